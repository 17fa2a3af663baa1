"""Reward shaping in its stated order."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf_like.algorithms import group_credit, shape_rewards
from openrlhf_like.algorithms.rewards import overlong_penalty


def shape(rewards, lengths=None, truncated=None, **kw):
    n = len(rewards)
    return shape_rewards(rewards, lengths or [1] * n, truncated or [False] * n, max_new_tokens=100, **kw)


def test_nothing_switched_on_changes_nothing():
    out = shape([0.1, -3.0, 50.0])
    assert out.rewards.tolist() == [0.1, -3.0, 50.0] and out.rewards.dtype == torch.float64
    assert out.overlong.tolist() == out.stop_properly.tolist() == out.clipped.tolist() == [0, 0, 0]


def test_overlong_penalty_grows_over_the_buffer():
    got = overlong_penalty(torch.tensor([0, 80, 81, 90, 100, 150]), 100, 20, 0.5)
    assert got.tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5, -0.5])
    for bad in (0, -1, 101):
        with pytest.raises(ValueError, match="--reward.overlong_buffer_len"):
            overlong_penalty(torch.tensor([1]), 100, bad, 1.0)


def test_stop_properly_multiplies_or_replaces_truncated_samples_only():
    rewards, cut = [2.0, 2.0, -1.0], [True, False, True]
    assert shape(rewards, truncated=cut, stop_properly_penalty_coef=0.5).rewards.tolist() == [1.0, 2.0, -0.5]
    assert shape(rewards, truncated=cut, stop_properly_penalty_coef=0.0).rewards.tolist() == [0.0, 2.0, 0.0]
    assert shape(rewards, truncated=cut, stop_properly_penalty_coef=-0.7).rewards.tolist() == [-0.7, 2.0, -0.7]


def test_order_is_overlong_then_truncation_then_clip_and_each_change_is_reported():
    out = shape([10.0, 1.0], [100, 90], [True, False], overlong_buffer_len=20, overlong_penalty_factor=2.0,
                stop_properly_penalty_coef=0.5, clip_range=(-1.0, 3.0))  # fmt: skip
    assert out.rewards.tolist() == [3.0, 0.0]
    assert out.overlong.tolist() == [-2.0, -1.0]
    assert out.stop_properly.tolist() == [-4.0, 0.0]
    assert out.clipped.tolist() == [-1.0, 0.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("coef", [0.5, -0.5])
def test_fault_26_no_shaping_makes_a_missing_reward_valid(bad, coef):
    out = shape([bad, 1.0, 0.0], [100, 1, 1], [True, False, False], overlong_buffer_len=20,
                stop_properly_penalty_coef=coef, clip_range=(-10, 10))  # fmt: skip
    assert math.isnan(float(out.rewards[0])) and out.rewards[1:].tolist() == [1.0, 0.0]
    assert all(math.isfinite(float(x[0])) and float(x[0]) == 0 for x in out[1:])
    credit = group_credit("dr_grpo", out.rewards, ["g"] * 3, [True] * 3, [1] * 3)
    assert credit.keep.tolist() == [False, True, True] and credit.invalid == 1


def test_clip_acts_on_the_reward_before_the_group_statistics():
    # Clipped after the baseline the credits would be [10, -10]; the clip acts on R: [10, -10] - mean 0 is the same
    # here, but with three members the order shows.
    out = shape([100.0, 0.0, 0.0], clip_range=(-10.0, 10.0))
    credit = group_credit("dr_grpo", out.rewards, ["g"] * 3, [True] * 3, [1] * 3).credit
    assert credit.tolist() == pytest.approx([20 / 3, -10 / 3, -10 / 3])


def test_wrong_arguments():
    with pytest.raises(ValueError, match="disagree"):
        shape_rewards([1.0], [1, 2], [False], max_new_tokens=5)
    with pytest.raises(ValueError, match="--reward.clip_range"):
        shape([1.0], clip_range=(1.0, -1.0))
