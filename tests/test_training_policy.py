"""The policy worker on real DeepSpeed engines: ratios, whitening, losses, and equal gradients on any split."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf_like.training.options import EngineOptions, OptimOptions
from openrlhf_like.training.policy_options import PolicyOptions, needs_old_logprobs
from openrlhf_like.types import Segment, Trajectory, TurnParams, UpdatePlan
from tests.tiny import build_tiny_model
from tests.training_workers import run_workers

ROWS = 6
TEMPERATURE = 0.6
TOLERANCE = 1e-5

#: One batch cut in other ways: {world: micro-batches by rank}. Rank 0 of two holds rows 0 to 3.
ONE_ROW_EACH = {1: [[[0], [1], [2], [3], [4], [5]]], 2: [[[0], [1], [2], [3]], [[4], [5], [], []]]}
ALL_AT_ONCE = {1: [[[0, 1, 2, 3, 4, 5]]], 2: [[[0, 1, 2, 3]], [[4, 5]]]}
PERMUTED = {1: [[[5, 0, 3], [], [4, 1], [2]]], 2: [[[2, 0], [3, 1]], [[5, 4], []]]}


def trajectory(row: int, temperature: float = TEMPERATURE) -> Trajectory:
    """Prompt, turn, tool tokens, turn; uneven lengths. log mu is filled in by the tests."""
    rng = np.random.default_rng(row)
    prompt, first, tool, second = 3 + row, 4 + 2 * row, 3, 2 + row
    mask = np.concatenate([np.zeros(prompt), np.ones(first), np.zeros(tool), np.ones(second)]).astype(np.int8)
    n = len(mask)
    turns = [
        TurnParams(prompt, prompt + first, temperature),
        TurnParams(n - second, n, temperature),
    ]
    segment = Segment(
        rng.integers(0, 250, n).astype(np.int32), mask, np.zeros(n, np.float32), np.where(mask, 0, -1), turns
    )
    return Trajectory(f"t{row}", "p", "g", [segment])


def split(world: int) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Rows of each rank, and their micro-batches: uneven, so that ranks differ in number and in tokens."""
    if world == 1:
        return [list(range(ROWS))], [[[0, 1, 2], [3, 4, 5]]]
    return [[0, 1, 2, 3], [4, 5]], [[[0], [1, 2], [3]], [[4, 5], [], []]]


def make_worker(rank: int, world: int, port: int, model: str, stage: int, policy: PolicyOptions, packed: bool = False):
    """A worker whose step is plain SGD at rate 1: weights before minus after are the gradient."""
    import torch

    from openrlhf_like.training.policy_worker import PolicyWorker

    class PlainSGD(PolicyWorker):
        def make_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=1.0)

    optim = OptimOptions(lr=1.0, lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=0.0)
    options = EngineOptions(zero_stage=stage, packing=packed, disable_dropout=True, optim=optim)
    worker = PlainSGD(options, rank, world)
    worker.policy = policy
    worker.setup("127.0.0.1", port)
    worker.load(model, 10)
    return worker


def full_logits_reference(model: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(log pi, entropy) at the action tokens under softmax(logits / T), from transformers itself."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    segment = trajectory(row).segments[0]
    ids = torch.tensor(segment.token_ids, dtype=torch.long)
    with torch.no_grad():
        log_p = torch.log_softmax(lm(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
    keep = torch.tensor(segment.action_mask[1:].astype(bool))
    chosen = log_p.gather(1, ids[1:, None]).squeeze(1)
    return chosen[keep].numpy(), (-(log_p.exp() * log_p).sum(-1))[keep].numpy()


def full_logits_gradient(model: str) -> dict[str, np.ndarray]:
    """Plain autograd over full logits, row by row: of sum over action tokens of -A log pi / their number."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = sum(trajectory(r).num_actions for r in range(ROWS))
    for row in range(ROWS):
        segment = trajectory(row).segments[0]
        ids = torch.tensor(segment.token_ids, dtype=torch.long)
        log_p = torch.log_softmax(lm(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        chosen = log_p.gather(1, ids[1:, None]).squeeze(1) * torch.tensor(segment.action_mask[1:])
        (-(row % 3 - 1) * chosen.sum() / total).backward()
    return {n: p.grad.numpy() for n, p in lm.named_parameters()}


def one_update(rank: int, world: int, port: int, model: str, cases: dict) -> dict:
    """Stage, log-probs, advantages, one update; for each case on a fresh worker."""
    from openrlhf_like.training.metrics import merge_metrics

    mine, usual = split(world)
    out: dict = {}
    for name, case in cases.items():
        micro_batches = case.get("split", {}).get(world, usual)
        worker = make_worker(rank, world, port, model, case["stage"], case["policy"], case.get("packed", False))
        rows = {r: trajectory(r) for r in mine[rank]}
        for r, t in rows.items():
            segment = t.segments[0]
            segment.behavior_logprobs[segment.action_mask.astype(bool)] = case["behavior"][r]
            if r in case.get("silent", ()):
                segment.action_mask[:], segment.behavior_logprobs[:] = 0, 0.0
        worker.stage([list(rows.values())], {r: (0, i) for i, r in enumerate(rows)})
        old = worker.compute_logprobs(micro_batches[rank], "old" if case["old_pass"] else "ref")
        ref = [{r: v - 0.25 for r, v in old.items()}] if case.get("ref") else None
        credit = {r: float(r % 3 - 1) for r in rows} | case.get("credit", {})
        prepared = worker.prepare_advantages(credit, case.get("kl_coef", 0.0), ref)
        for r in rows.keys() & case.get("old_shift", {}).keys():
            worker._rows[r].old = old[r] + np.float32(case["old_shift"][r])
        advantages = {r: v[0] for r, v in worker.rows_advantages().items()}
        tokens = sum(trajectory(r).num_actions for r in range(ROWS) if r not in case.get("silent", ()))
        before = {n: t.numpy().copy() for n, t in worker.gather().iter_full()}
        updated = worker.update(UpdatePlan(micro_batches, tokens, ROWS), case.get("kl_coef", 0.0))
        gradient = {n: before[n] - t.numpy() for n, t in worker.gather().iter_full()}
        out[name] = {"old": old, "advantages": advantages, "parts": [prepared, updated], "gradient": gradient,
                     "metrics": merge_metrics([prepared, updated])}  # fmt: skip
        worker.stage([list(rows.values())], {r: (0, i) for i, r in enumerate(rows)})
        kept = [value for r in worker._rows.values() for value in (r.old, r.ref, r.advantages) if value is not None]
        out[name]["left over"] = kept
        worker.engine.engine.destroy()
        worker.engine = None
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def reference(model: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {r: full_logits_reference(model, r) for r in range(ROWS)}


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, np.ndarray]:
    return full_logits_gradient(model)


@pytest.fixture(scope="module")
def results(model: str, reference: dict) -> dict:
    """All cases on one and on two workers; ``{world: [by rank]}``."""
    mu = {r: v[0] for r, v in reference.items()}
    shifted = {r: v + np.where(np.arange(len(v)) % 2, 0.1, -0.1) for r, v in mu.items()}
    plain = {"stage": 2, "behavior": mu, "old_pass": False, "policy": PolicyOptions(entropy_coef=0.0)}
    with_ref = plain | {"ref": True, "kl_coef": 0.5}
    no_credit = dict.fromkeys(range(ROWS), 0.0)
    cases = {
        "on-policy": plain,
        "old pass": plain | {"old_pass": True},
        "zero 3": plain | {"stage": 3},
        "packed": plain | {"packed": True},
        "seq mean": plain | {"policy": PolicyOptions(aggregation="seq_mean_token_mean")},
        "whitened": plain | {"policy": PolicyOptions(estimator="reinforce_baseline")},
        "kl in loss": with_ref | {"policy": PolicyOptions(kl_in_loss=True, kl_estimator="k2")},
        "kl in reward": with_ref | {"old_pass": True, "credit": no_credit},
        "correction": plain | {"behavior": shifted, "policy": PolicyOptions(correction="tis")},
        "entropy bonus": plain | {"policy": PolicyOptions(entropy_coef=0.1)},
        "equal rewards": plain | {"credit": no_credit},
        "one row each": plain | {"split": ONE_ROW_EACH},
        "all at once": plain | {"split": ALL_AT_ONCE},
        "permuted": plain | {"split": PERMUTED},
        "packed permuted": plain | {"split": PERMUTED, "packed": True},
        "zero 3 permuted": plain | {"split": PERMUTED, "stage": 3},
        "a gap of 200": plain | {"old_pass": True, "old_shift": {0: 200.0, 2: 200.0, 3: -200.0, 5: -200.0}},
        "two silent rows": plain | {"silent": (0, 4)},
        "all silent": plain | {"silent": tuple(range(ROWS))},
    }
    return {world: run_workers(one_update, world, model, cases) for world in (1, 2)}


def merged(results: dict, world: int, case: str) -> dict[str, float]:
    from openrlhf_like.training.metrics import merge_metrics

    return merge_metrics([p for rank in results[world] for p in rank[case]["parts"]])


def test_fault_12_logprobs_at_temperature_are_those_of_the_sampled_distribution(results: dict, reference: dict) -> None:
    for world, ranks in results.items():
        for rank in ranks:
            for row, got in rank["on-policy"]["old"].items():
                np.testing.assert_allclose(got, reference[row][0], atol=1e-4, err_msg=f"{world} workers, row {row}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", ["on-policy", "old pass", "zero 3", "packed"])
def test_fault_12_unchanged_weights_give_ratio_1_and_the_entropy_of_softmax_over_t(
    results: dict, reference: dict, world: int, case: str
) -> None:
    metrics = merged(results, world, case)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["policy/clip_fraction"] == 0.0
    assert metrics["rollout/logprob_diff_max"] < 1e-3
    entropy = np.concatenate([e for _, e in reference.values()])
    assert metrics["policy/entropy"] == pytest.approx(float(entropy.mean()), abs=1e-3)


@pytest.mark.parametrize("case", ["on-policy", "old pass", "zero 3", "packed", "seq mean", "whitened", "kl in loss",
                                  "kl in reward", "correction", "entropy bonus"])  # fmt: skip
def test_fault_10_one_and_two_workers_make_the_same_update(results: dict, case: str) -> None:
    one = results[1][0][case]
    for rank in results[2]:
        a, b = merged(results, 1, case), merged(results, 2, case)
        for name in ("policy/loss", "policy/grad_norm", "rollout/logprob_diff_mean"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
        for name, gradient in rank[case]["gradient"].items():
            np.testing.assert_allclose(gradient, one["gradient"][name], atol=TOLERANCE, err_msg=name)
        for row, advantages in rank[case]["advantages"].items():
            np.testing.assert_allclose(advantages, one["advantages"][row], atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", ["on-policy", "old pass", "zero 3", "packed", "one row each", "all at once",
                                  "permuted", "packed permuted", "zero 3 permuted"])  # fmt: skip
def test_fault_10_any_split_layout_and_order_has_the_gradient_of_plain_autograd(
    results: dict, expected: dict[str, np.ndarray], world: int, case: str
) -> None:
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    assert norm > 0.05  # far above the tolerance
    assert merged(results, world, case)["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for rank in results[world]:
        assert rank[case]["gradient"].keys() == expected.keys()
        for name, want in expected.items():
            np.testing.assert_allclose(rank[case]["gradient"][name], want, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("world", [1, 2])
def test_fault_14_a_gap_of_200_in_log_probs_gives_a_finite_loss_and_gradient(results: dict, world: int) -> None:
    """Rows whose ratio is out of all bounds give no gradient (rows 1 and 4 have no credit); nothing turns NaN."""
    metrics = merged(results, world, "a gap of 200")
    assert all(np.isfinite(v) for v in metrics.values()), metrics
    assert metrics["policy/ratio_saturated_fraction"] > 0.5
    for rank in results[world]:
        for name, gradient in rank["a gap of 200"]["gradient"].items():
            np.testing.assert_allclose(gradient, 0.0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("world", [1, 2])
def test_fault_18_rows_without_an_action_token_take_no_part(results: dict, world: int) -> None:
    """Two silent rows: the mean is over the tokens of the rest. All silent: loss and gradient 0, nothing NaN."""
    rest = sum(trajectory(r).num_actions for r in range(ROWS) if r not in (0, 4))
    credit = sum((r % 3 - 1) * trajectory(r).num_actions for r in range(ROWS) if r not in (0, 4))
    two, none = merged(results, world, "two silent rows"), merged(results, world, "all silent")
    assert two["policy/loss"] == pytest.approx(-credit / rest, abs=1e-4)
    assert none["policy/loss"] == 0.0 and none["policy/grad_norm"] == 0.0
    assert all(np.isfinite(v) for v in (*two.values(), *none.values()))
    for rank in results[world]:
        for name, gradient in rank["all silent"]["gradient"].items():
            assert not gradient.any(), name
            assert np.isfinite(rank["two silent rows"]["gradient"][name]).all(), name


def test_nothing_of_a_rollout_is_left_over_in_the_next(results: dict) -> None:
    assert not any(case["left over"] for ranks in results.values() for rank in ranks for case in rank.values())


def test_fault_15_whitening_over_two_uneven_workers(results: dict) -> None:
    values = []
    for rank in results[2]:
        for row, advantages in rank["whitened"]["advantages"].items():
            values.append(advantages[trajectory(row).segments[0].action_mask.astype(bool)])
    flat = np.concatenate(values).astype(np.float64)
    assert abs(flat.mean()) < 1e-6 and flat.std() == pytest.approx(1.0, abs=1e-6)


def test_kl_ref_is_the_token_mean_of_k1_wherever_the_kl_stands(results: dict) -> None:
    for case in ("kl in loss", "kl in reward"):
        assert merged(results, 2, case)["policy/kl_ref"] == pytest.approx(0.25, abs=1e-4)


def test_kl_in_the_reward_accumulates_from_the_end_over_action_tokens_only(results: dict) -> None:
    advantages = results[1][0]["kl in reward"]["advantages"]
    for row, values in advantages.items():
        mask = trajectory(row).segments[0].action_mask.astype(bool)
        n = int(mask.sum())
        assert not values[~mask].any()
        np.testing.assert_allclose(values[mask], -0.5 * 0.25 * np.arange(n, 0, -1), atol=1e-4)


def test_the_engine_trainer_difference_is_always_measured(results: dict) -> None:
    metrics = merged(results, 2, "correction")
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.1, abs=1e-3)
    assert metrics["rollout/is_outside_fraction"] == 0.0
    assert merged(results, 1, "correction")["policy/loss"] != pytest.approx(
        merged(results, 1, "on-policy")["policy/loss"], abs=1e-5
    )


def test_fault_13_zero_credit_gives_exactly_zero_gradient(results: dict) -> None:
    for world in (1, 2):
        assert merged(results, world, "equal rewards")["policy/grad_norm"] == 0.0
        assert merged(results, world, "equal rewards")["policy/loss"] == 0.0


def test_no_old_pass_where_the_training_pass_computes_the_same() -> None:
    assert not needs_old_logprobs(1, kl_in_reward=False)
    assert needs_old_logprobs(2, kl_in_reward=False)
    assert needs_old_logprobs(1, kl_in_reward=True)


def reference_pass(rank: int, world: int, port: int, model: str, stages: list[int]) -> dict:
    from openrlhf_like.training.policy_worker import ReferenceWorker

    mine, micro_batches = split(world)
    out = {}
    for stage in stages:
        worker = ReferenceWorker(EngineOptions(zero_stage=stage, disable_dropout=True), rank, world)
        worker.setup("127.0.0.1", port)
        worker.load(model)
        worker.stage_trajectories({r: trajectory(r) for r in mine[rank]})
        out[stage] = worker.compute_logprobs(micro_batches[rank], "ref")
        assert worker.probe_logprobs([1, 2, 3]).shape == (2,)
        assert not any(p.requires_grad for p in worker.engine.module.parameters())
    return out


def test_a_reference_model_needs_no_optimizer_at_any_stage(model: str, reference: dict) -> None:
    for rank in run_workers(reference_pass, 2, model, [2, 3]):
        for by_row in rank.values():
            for row, got in by_row.items():
                np.testing.assert_allclose(got, reference[row][0], atol=1e-4)
