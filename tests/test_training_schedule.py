"""Learning-rate schedules against transformers', and what transformers' do wrong after the end."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from openrlhf_like.training.schedule import SCHEDULES, check_schedule, lr_factor, warmup_updates
from openrlhf_like.types import UserError

TOTAL, WARMUP = 40, 5


def theirs(name: str) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kwargs = {"min_lr_rate": 0.1} if "min_lr" in name else {"lr_end": 1e-12} if name == "polynomial" else {}
    scheduler = get_scheduler(name, optimizer, WARMUP, TOTAL, kwargs)
    out = []
    for _ in range(TOTAL):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


@pytest.mark.parametrize("name", [s for s in SCHEDULES if s != "warmup_stable_decay"])
def test_schedules_are_transformers_up_to_the_horizon(name: str) -> None:
    ours = [lr_factor(name, k, TOTAL, WARMUP, 0.1) for k in range(TOTAL)]
    assert ours == pytest.approx(theirs(name), abs=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_fault_20_the_rate_never_rises_again(name: str) -> None:
    rates = [lr_factor(name, k, TOTAL, WARMUP, 0.1) for k in range(3 * TOTAL)]
    after = rates[WARMUP:]
    assert all(b <= a + 1e-12 for a, b in zip(after, after[1:], strict=False))
    assert len(set(rates[TOTAL:])) == 1


def test_cosine_with_min_lr_ends_at_its_floor_and_warms_up_linearly() -> None:
    assert lr_factor("cosine_with_min_lr", TOTAL, TOTAL, WARMUP, 0.1) == pytest.approx(0.1)
    assert [lr_factor("cosine_with_min_lr", k, TOTAL, WARMUP, 0.1) for k in range(6)] == pytest.approx(
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    )


def test_the_warmup_is_the_ratios_share_of_the_horizon_rounded_up() -> None:
    assert [warmup_updates(n, 0.03) for n in (1, 24, 100, 101)] == [1, 1, 3, 4]


def test_an_unknown_schedule_names_the_choices() -> None:
    with pytest.raises(UserError, match="--lr_scheduler nope: unknown.*cosine_with_min_lr"):
        check_schedule("nope")
