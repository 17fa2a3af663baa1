"""Dynamic filtering: the rule, and the accumulator over rounds."""

from __future__ import annotations

import math

import pytest

from openrlhf_like.algorithms import DynamicFilter, FilterStatus, judge_group

MIXED, RIGHT, WRONG = [1.0, 0.0, 1.0], [1.0] * 3, [0.0] * 3


def offer(f, name, scores):
    return f.offer(name, scores, scores)


@pytest.mark.parametrize(
    ("scores", "keep"),
    [(MIXED, True), (RIGHT, False), (WRONG, False), ([0.5] * 4, True), ([0.1] * 8, True), ([1.0, 1.0 - 1e-9], False)],
)
def test_the_range_is_open(scores, keep):
    assert judge_group(scores, scores, [True] * len(scores), 0.0, 1.0).keep is keep


def test_scores_come_first_rewards_stand_in_and_bad_members_leave():
    verdict = judge_group([1.0, None, math.nan, 1.0], [-5.0, 0.0, 0.5, 9.0], [True] * 4, 0, 1)
    assert verdict.keep and verdict.mean == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    verdict = judge_group([1.0, 1.0, 0.0, None], [1.0, 1.0, 0.0, None], [True, True, False, True], 0, 1)
    assert not verdict.keep and verdict.mean == 1.0 and verdict.all_equal and "all rewards equal" in verdict.reason
    verdict = judge_group([0.5, None], [0.5, math.inf], [True, True], 0, 1)
    assert not verdict.keep and "fewer than two" in verdict.reason


def test_reason_tells_equal_rewards_from_a_mean_outside():
    assert judge_group([1.0, 3.0], [0, 0], [True] * 2, 0, 1).reason == "mean score outside the range"


def test_fault_23_accept_reject_pending_accept_when_prompts_run_out_keeps_both():
    f = DynamicFilter(0, 1, groups_needed=4)
    f.start(["a", "b", "c"])
    assert offer(f, "a", MIXED).keep and not offer(f, "b", RIGHT).keep
    # c is in flight when the prompts run out: it is waited for.
    assert f.status(prompts_left=False) is FilterStatus.WAITING and f.pending == 1
    assert offer(f, "c", MIXED).keep
    assert f.status(prompts_left=False) is FilterStatus.PARTIAL
    assert f.take() == ["a", "c"]
    assert (f.num_accepted, f.num_rejected) == (2, 1)


def test_fault_23_a_pending_group_is_waited_for_even_after_the_last_empty_round():
    f = DynamicFilter(0, 1, groups_needed=1, max_empty_rounds=1)
    f.start(["a", "b"])
    offer(f, "a", WRONG)
    assert f.status(prompts_left=False) is FilterStatus.WAITING
    offer(f, "b", MIXED)
    assert f.status(prompts_left=False) is FilterStatus.READY


def test_accepted_groups_add_up_over_rounds_and_surplus_stays():
    f = DynamicFilter(0, 1, groups_needed=2)
    f.start(["a", "b"])
    offer(f, "b", WRONG)
    offer(f, "a", MIXED)
    assert f.status(True) is FilterStatus.NEED_MORE
    f.start(["c", "d"])
    offer(f, "d", MIXED)
    assert f.status(True) is FilterStatus.READY
    offer(f, "c", MIXED)
    assert f.take() == ["a", "d"] and f.accepted == ["c"]
    assert f.discard() == ["c"] and f.accepted == []


@pytest.mark.parametrize("refill", [False, True])
def test_fault_24_every_group_filtered_out_ends_after_the_stated_rounds_and_says_why(refill):
    f = DynamicFilter(0, 1, groups_needed=2, max_empty_rounds=3)
    started, judged = 0, 0
    f.start(["g0", "g1"])
    started = 2
    for _ in range(1000):
        if f.status(True) is FilterStatus.STUCK:
            break
        if f.pending and not (refill and f.pending < 2):
            offer(f, f"g{judged}", RIGHT if judged % 2 else WRONG)
            judged += 1
            continue
        f.start([f"g{started}"])
        started += 1
        if not refill:
            f.start([f"g{started}"])
            started += 1
    assert f.status(True) is FilterStatus.STUCK and judged == 6
    message = f.message()
    assert "3 rounds in a row" in message and "all rewards equal in 6" in message and "\n" not in message
    assert "mean scores 0 to 1" in message and "--algo.dynamic_filtering_range" in message


def test_prompts_that_run_out_with_nothing_accepted_are_told_apart():
    f = DynamicFilter(0, 1, groups_needed=2)
    f.start(["a"])
    offer(f, "a", WRONG)
    assert f.status(False) is FilterStatus.EMPTY and f.status(True) is FilterStatus.NEED_MORE


def test_an_accepted_group_resets_the_count_of_empty_rounds():
    f = DynamicFilter(0, 1, groups_needed=3, max_empty_rounds=2)
    for k, scores in enumerate([WRONG, MIXED, WRONG]):
        f.start([f"{k}"])
        offer(f, f"{k}", scores)
    assert f.empty_rounds == 1 and f.status(True) is FilterStatus.NEED_MORE


def test_state_survives_a_resume_without_groups_in_flight():
    f = DynamicFilter(0, 1, groups_needed=2, max_empty_rounds=5)
    f.start(["a", "b", "c"])
    offer(f, "a", MIXED)
    offer(f, "b", WRONG)
    other = DynamicFilter(0, 1, groups_needed=2, max_empty_rounds=5)
    other.load_state_dict(f.state_dict())
    assert other.accepted == ["a"] and other.pending == 0 and other.status(True) is FilterStatus.NEED_MORE
    assert other.message() == f.message()
    other.start(["c"])
    offer(other, "c", MIXED)
    assert other.take() == ["a", "c"]


def test_misuse_is_an_error():
    f = DynamicFilter(0, 1, groups_needed=1)
    with pytest.raises(ValueError, match="not started"):
        offer(f, "a", MIXED)
    f.start(["a"])
    with pytest.raises(ValueError, match="in flight"):
        f.start(["a"])
    for args, word in [((1, 0, 1), "range"), ((0, 1, 0), "at least one"), ((0, 1, 1, 0), "max_rounds")]:
        with pytest.raises(ValueError, match=word):
            DynamicFilter(*args)
