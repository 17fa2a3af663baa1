"""Padded and packed rows: the same log-probs, each at its own place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from openrlhf_like.models.loading import load_causal_lm
from openrlhf_like.models.policy import PolicyModel
from openrlhf_like.training.layouts import LayoutRow, build_layout
from tests.tiny import build_tiny_model


def rows(seed: int = 0, lengths: tuple[int, ...] = (7, 19, 1, 12, 3)) -> list[LayoutRow]:
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        mask = (rng.random(n) < 0.5).astype(np.int8)
        temperature = rng.uniform(0.5, 1.5, n).astype(np.float32)
        out.append(LayoutRow(rng.integers(0, 250, n), mask, 100 + i, temperature))
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def policy(request: pytest.FixtureRequest, path: str) -> PolicyModel:
    return PolicyModel(load_causal_lm(path, attn_implementation=request.param)).eval()


@torch.no_grad()
def run(policy: PolicyModel, batch) -> np.ndarray:  # noqa: ANN001
    return policy(**batch.model_inputs())[0].numpy()


@pytest.mark.parametrize("packed", [False, True])
def test_the_first_action_at_t_is_predicted_by_t_minus_1_and_comes_back_to_its_row(packed: bool) -> None:
    made = rows()
    batch = build_layout(made, packed=packed)
    flat_ids, flat_positions = batch.input_ids.flatten(), batch.position_ids.flatten()
    at = 0
    for i, row in enumerate(made):
        for t in np.flatnonzero(row.action_mask):
            if t == 0:
                continue
            source = int(batch.source_index[at])
            assert flat_positions[source] == t - 1
            assert flat_ids[source] == row.token_ids[t - 1] and batch.target_ids[at] == row.token_ids[t]
            assert batch.temperature[at] == pytest.approx(float(row.temperature[t]))
            assert batch.row_index[at] == i and batch.rows[i] == row.row
            at += 1
    assert at == batch.num_actions


def test_fault_19_packed_and_padded_logprobs_agree(policy: PolicyModel) -> None:
    padded, packed = run(policy, build_layout(rows())), run(policy, build_layout(rows(), packed=True))
    np.testing.assert_allclose(packed, padded, atol=2e-5)
    alone = np.concatenate([run(policy, build_layout([r])) for r in rows() if r.action_mask[1:].any()])
    np.testing.assert_allclose(packed, alone, atol=2e-5)


def test_fault_19_a_packed_neighbour_changes_nothing(policy: PolicyModel) -> None:
    mine = rows(1, (13,))
    batches = []
    for seed in (2, 3):
        before, after = replace(rows(seed, (9,))[0], row=1), replace(rows(seed + 7, (6,))[0], row=2)
        batches.append(build_layout([before, *mine, after], packed=True))
    a, b = (run(policy, batch)[batch.row_index.numpy() == 1] for batch in batches)
    np.testing.assert_allclose(a, b, atol=1e-6)
    np.testing.assert_allclose(a, run(policy, build_layout(mine)), atol=2e-5)


def test_segments_of_one_trajectory_share_a_row_index() -> None:
    a, b = rows(0, (8, 6))
    same = [LayoutRow(a.token_ids, a.action_mask, 5), LayoutRow(b.token_ids, b.action_mask, 5)]
    batch = build_layout(same)
    assert batch.rows == [5] and not batch.row_index.any()


def test_an_empty_micro_batch_is_a_placeholder_with_a_graph(policy: PolicyModel) -> None:
    for nothing in ([], [LayoutRow(np.array([1, 2]), np.array([1, 0]), 0)]):
        batch = build_layout(nothing)
        assert batch.is_empty and batch.num_actions == 0
        loss = policy(**batch.model_inputs())[0].sum() * 0.0
        grads = torch.autograd.grad(loss, list(policy.parameters()))
        assert float(loss.detach()) == 0.0 and all(not g.any() for g in grads)


def test_padding_is_counted() -> None:
    made = rows()
    assert build_layout(made).padding_tokens == 5 * 19 - 42
    assert build_layout(made, packed=True).padding_tokens == 0
