"""Plans: who is in which step never depends on how the step is split; padding, budgets and balance hold."""

from __future__ import annotations

import numpy as np
import pytest

from openrlhf_like.training.batching import assign_rows, micro_batches, padding_fraction, plan_forward, plan_updates
from openrlhf_like.types import UserError


def log_normal(n: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4.0, 0.8, n), 8, 400).astype(int)


def flat(plan) -> list[int]:  # noqa: ANN001
    return [r for rank in plan.micro_batches for mb in rank for r in mb]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [None, 600, 16192])
@pytest.mark.parametrize("packed", [False, True])
def test_every_step_holds_the_same_rows_however_it_is_split(workers: int, max_tokens: int | None, packed: bool) -> None:
    lengths = log_normal(300)
    order = np.random.default_rng(1).permutation(300)
    plans = plan_updates(lengths, lengths - 1, 128, workers, 8, max_tokens, order, packed)
    assert len(plans) == 3
    for i, plan in enumerate(plans):
        window = order[i * 128 : (i + 1) * 128]
        assert sorted(flat(plan)) == sorted(window)
        assert plan.num_tokens == int((lengths[window] - 1).sum()) and plan.num_sequences == len(window)


def test_fault_32_every_rank_gets_equally_many_micro_batches() -> None:
    lengths = [400, 8, 8, 8, 9, 300, 10, 8]
    for workers in (2, 3, 5, 9):
        for plan in plan_updates(lengths, lengths, 8, workers, 1, max_tokens=410):
            assert len({len(rank) for rank in plan.micro_batches}) == 1
            assert len(plan.micro_batches) == workers


@pytest.mark.parametrize("batch", [128, 256, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_padding_is_below_ten_percent_by_token_budget(batch: int, seed: int) -> None:
    lengths = log_normal(1000, seed)
    for max_tokens in (512, 2048, 16192):
        for workers in (1, 2):
            for plan in plan_updates(lengths, lengths, batch, workers, 1, max_tokens):
                if plan.num_sequences >= 128:
                    batches = [mb for rank in plan.micro_batches for mb in rank]
                    assert padding_fraction(lengths, batches) < 0.10


def test_padding_is_below_ten_percent_with_a_fixed_micro_batch_size() -> None:
    for seed in range(4):
        lengths = log_normal(128, seed)
        (plan,) = plan_updates(lengths, lengths, 128, 1, 8)
        assert padding_fraction(lengths, plan.micro_batches[0]) < 0.10


@pytest.mark.parametrize("packed", [False, True])
def test_the_token_budget_holds_and_a_longer_row_goes_alone(packed: bool) -> None:
    lengths = np.append(log_normal(200), [900, 901])
    for mb in micro_batches(range(202), lengths, 1, max_tokens=500, packed=packed):
        cost = lengths[mb].sum() if packed else len(mb) * lengths[mb].max()
        assert cost <= 500 or len(mb) == 1


def test_a_large_budget_gives_few_micro_batches() -> None:
    lengths = log_normal(256)
    assert len(micro_batches(range(256), lengths, 1, max_tokens=16192)) <= 20
    assert len(micro_batches(range(256), np.full(256, 64), 1, max_tokens=16384)) == 1


def test_workers_get_like_numbers_of_tokens() -> None:
    lengths = log_normal(512)
    steps = [range(i, i + 128) for i in range(0, 512, 128)]
    worker = assign_rows(lengths, 4, steps)
    for step in steps:
        loads = [lengths[[r for r in step if worker[r] == w]].sum() for w in range(4)]
        assert max(loads) - min(loads) <= 0.02 * sum(loads)


def test_a_rows_worker_is_fixed_for_the_rollout() -> None:
    lengths = log_normal(64)
    order = list(range(64)) + list(reversed(range(64)))
    worker = assign_rows(lengths, 2, [order[:48], order[48:96], order[96:]])
    for plan in plan_updates(lengths, lengths, 48, 2, 4, order=order, row_worker=worker):
        for rank, batches in enumerate(plan.micro_batches):
            assert all(worker[r] == rank for mb in batches for r in mb)
    forward = plan_forward(lengths, worker, 2, 4)
    assert sorted(r for rank in forward for mb in rank for r in mb) == list(range(64))


def test_fault_11_an_incomplete_last_window_is_kept_and_counts_its_own_tokens() -> None:
    lengths = [10] * 20
    plans = plan_updates(lengths, [9] * 20, 8, 1, 2, order=list(range(20)) * 2)
    assert [p.num_sequences for p in plans] == [8, 8, 8, 8, 8]
    plans = plan_updates(lengths, [9] * 20, 8, 1, 2)
    assert [(p.num_sequences, p.num_tokens) for p in plans] == [(8, 72), (8, 72), (4, 36)]


def test_a_row_that_meets_itself_at_an_epochs_end_is_taken_twice() -> None:
    plans = plan_updates([5, 6, 7], [4, 5, 6], 4, 2, 1, order=[0, 1, 2, 2, 1, 0])
    assert sorted(flat(plans[0])) == [0, 1, 2, 2] and sorted(flat(plans[1])) == [0, 1]
    assert plans[0].num_tokens == 4 + 5 + 6 + 6


def test_plans_repeat() -> None:
    lengths = log_normal(300)
    assert plan_updates(lengths, lengths, 64, 2, 1, 900) == plan_updates(lengths, lengths, 64, 2, 1, 900)


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="--train.batch_size 0"):
        plan_updates([1], [1], 0, 1, 1)
