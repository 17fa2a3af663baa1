"""Group credit, token advantages, GAE and whitening against closed forms, brute force and invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from openrlhf_like.algorithms import (
    ADVANTAGE_ESTIMATORS,
    gae,
    group_credit,
    suffix_sums,
    token_advantages,
    token_rewards,
    whiten,
    whiten_moments,
    whiten_stats,
)

GROUP = ["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "opo"]


def one_group(name, rewards, lengths=None, **kw):
    n = len(rewards)
    return group_credit(name, rewards, ["g"] * n, [True] * n, lengths or [5] * n, **kw).credit


def test_table_of_estimators():
    spec = {n: ADVANTAGE_ESTIMATORS.get(n) for n in ADVANTAGE_ESTIMATORS.names()}
    assert set(spec) == {*GROUP, "gae", "reinforce"}
    assert {n for n in spec if spec[n].whitened} == {"gae", "reinforce", "reinforce_baseline"}
    assert {n for n in spec if spec[n].group} == set(GROUP)
    assert {n for n in spec if spec[n].needs_values} == {"gae"}
    assert all(spec[n].effective_gamma(0.9) == (1.0 if n in GROUP else 0.9) for n in spec)


def test_closed_forms():
    r, lengths = [1.0, 0.0, 3.0, 2.0], [1, 2, 3, 4]
    mean = 1.5
    std = math.sqrt(sum((x - mean) ** 2 for x in r) / 3)
    opo_base = (1 + 0 + 9 + 8) / 10
    want = {
        "group_norm": [(x - mean) / (std + 1e-9) for x in r],
        "dr_grpo": [x - mean for x in r],
        "reinforce_baseline": [x - mean for x in r],
        "rloo": [x - (6 - x) / 3 for x in r],
        "opo": [x - opo_base for x in r],
        "reinforce": r,
        "gae": r,
    }
    for name, expected in want.items():
        got = one_group(name, r, lengths)
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-14)
    np.testing.assert_allclose(one_group("group_norm", r, no_std_norm=True), [x - mean for x in r])


def test_opo_is_the_minimum_variance_baseline_when_squared_score_grows_with_length():
    # With E|score|^2 proportional to length, sum l (R - b)^2 is least at opo's baseline.
    r, lengths = torch.tensor([1.0, 0.0, 3.0, 2.0]).double(), torch.tensor([7.0, 1.0, 2.0, 4.0]).double()
    base = float(r[0] - one_group("opo", r.tolist(), [7, 1, 2, 4])[0])
    spread = [float((lengths * (r - b) ** 2).sum()) for b in (base - 1e-3, base, base + 1e-3)]
    assert spread[1] < spread[0] and spread[1] < spread[2]


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("n", [3, 7, 8])
@pytest.mark.parametrize("value", [0.1, 0.95, -1 / 3, 1e6 + 0.1])
def test_fault_13_equal_rewards_give_exactly_zero_advantage(name, n, value):
    credit = group_credit(name, [value] * n, ["g"] * n, [True] * n, list(range(1, n + 1)))
    assert torch.equal(credit.credit, torch.zeros(n, dtype=torch.float64))
    assert credit.zero_std_groups == 1 and credit.zero_std_fraction == 1.0 and bool(credit.keep.all())
    # ... and stays zero as token advantages.
    adv = token_advantages(credit.credit, None, torch.ones(n, 4))
    assert torch.equal(adv, torch.zeros(n, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0] + [0.95] * 7])
def test_fault_13_lone_outlier_is_bounded_and_finite(name, rewards):
    got = one_group(name, [float(r) for r in rewards])
    n = len(rewards)
    # (R - mean) / unbiased std cannot exceed (n - 1) / sqrt(n); the others cannot exceed the range of the rewards.
    bound = (n - 1) / math.sqrt(n) if name == "group_norm" else 1.0
    assert torch.isfinite(got).all() and got.abs().max() <= bound + 1e-12


def test_rewards_equal_up_to_rounding_are_not_blown_up():
    assert one_group("group_norm", [0.3, 0.1 + 0.2, 0.3, 0.3]).abs().max() < 1e-6


@pytest.mark.parametrize("name", GROUP)
def test_shift_of_the_rewards_changes_nothing_and_scale_scales(name):
    r, lengths = [0.2, 0.7, -1.0, 3.0, 0.2], [3, 9, 2, 5, 1]
    base = one_group(name, r, lengths)
    np.testing.assert_allclose(one_group(name, [x + 5 for x in r], lengths), base, atol=1e-12)
    scaled = one_group(name, [x * 4 for x in r], lengths)
    np.testing.assert_allclose(scaled, base if name == "group_norm" else base * 4, rtol=1e-8)


@pytest.mark.parametrize("name", GROUP)
def test_fault_21_groups_are_formed_by_id_and_row_order_changes_nothing(name):
    rng = np.random.default_rng(0)
    ids = [f"row{k}" for k in range(4) for _ in range(5)]
    rewards, lengths = rng.normal(size=20), rng.integers(1, 30, 20)
    valid = rng.random(20) > 0.2
    base = group_credit(name, rewards.tolist(), ids, valid.tolist(), lengths.tolist())
    order = rng.permutation(20)
    moved = group_credit(
        name, rewards[order].tolist(), [ids[i] for i in order], valid[order].tolist(), lengths[order].tolist()
    )
    np.testing.assert_allclose(moved.credit, base.credit[order], atol=1e-13)
    assert torch.equal(moved.keep, base.keep[order])
    # Each group's statistics are its own: by itself it gets the same credit.
    alone = group_credit(name, rewards[:5].tolist(), ids[:5], valid[:5].tolist(), lengths[:5].tolist())
    np.testing.assert_allclose(alone.credit, base.credit[:5], atol=1e-13)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf, "error"])
def test_fault_26_one_bad_of_eight_leaves_the_statistics_and_is_counted(bad):
    rewards = [0.0, 1.0, 0.5, 0.25, 1.0, 0.0, 0.75]
    failed = bad == "error"
    got = group_credit("group_norm", [*rewards, 99.0 if failed else bad], ["g"] * 8, [True] * 7 + [not failed], [3] * 8)
    np.testing.assert_allclose(got.credit[:7], one_group("group_norm", rewards))
    assert got.credit[7] == 0 and got.keep.tolist() == [True] * 7 + [False]
    assert (got.invalid, got.dropped_groups, got.num_groups) == (1, 0, 1)


def test_groups_with_fewer_than_two_valid_members_are_dropped_and_counted():
    rewards = [1.0, None, 0.0, 1.0, None, None]
    ids = ["a", "a", "b", "b", "c", "c"]
    got = group_credit("dr_grpo", rewards, ids, [True] * 6, [1] * 6)
    assert got.keep.tolist() == [False, False, True, True, False, False]
    assert (got.num_groups, got.dropped_groups, got.invalid, got.zero_std_groups) == (3, 2, 3, 0)
    assert got.credit.tolist() == [0, 0, -0.5, 0.5, 0, 0]
    # `reinforce` compares nobody, so a lone valid member stays.
    assert (
        group_credit("reinforce", rewards, ids, [True] * 6, [1] * 6).keep.tolist()
        == [True, False, True, True] + [False] * 2
    )


def test_arguments_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="'valid': 1"):
        group_credit("dr_grpo", [1.0, 2.0], ["g", "g"], [True], [1, 1])


def brute_suffix(rewards, mask, gamma):
    out = torch.zeros(len(rewards), dtype=torch.float64)
    steps = [t for t in range(len(rewards)) if mask[t]]
    for i, t in enumerate(steps):
        out[t] = sum(gamma ** (j - i) * float(rewards[steps[j]]) for j in range(i, len(steps)))
    return out


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_suffix_sums_count_action_tokens_only(gamma):
    g = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(5, 11, generator=g), torch.rand(5, 11, generator=g) > 0.4
    mask[4] = False
    dirty = rewards.masked_fill(~mask, math.nan)
    got = suffix_sums(dirty, mask, gamma)
    for row in range(5):
        np.testing.assert_allclose(got[row], brute_suffix(rewards[row], mask[row], gamma), atol=1e-12)
        np.testing.assert_allclose(suffix_sums(dirty[row], mask[row], gamma), got[row], atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_environment_tokens_between_turns_do_not_discount(gamma):
    # 4 + 5 sampled tokens with 3 tool tokens between count as 9 steps.
    mask = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0])
    adv = token_advantages(2.0, None, mask, gamma=gamma)
    dense = token_advantages(2.0, None, torch.ones(9), gamma=gamma)
    np.testing.assert_allclose(adv[mask.bool()], dense)
    assert dense[0] == pytest.approx(2.0 * gamma**8) and dense[-1] == 2.0


def test_kl_in_the_reward_is_summed_from_each_token_on():
    kl = torch.tensor([0.5, math.nan, 0.25, 0.125])
    mask = torch.tensor([1, 0, 1, 1])
    rewards = token_rewards(3.0, kl, mask, kl_coef=2.0)
    assert rewards.tolist() == [-1.0, 0.0, -0.5, 2.75]
    assert token_advantages(3.0, kl, mask, kl_coef=2.0).tolist() == [1.25, 0.0, 2.25, 2.75]
    with pytest.raises(ValueError, match="needs per-token KL"):
        token_rewards(3.0, None, mask, kl_coef=2.0)


def test_token_rewards_take_one_reward_a_turn():
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    placed = torch.tensor([[0.0, 1.0, 9.0, 0.0, 2.0]])
    # By hand, from the right: 2, 0 + 2/2, 1 + 1/2, 0 + 1.5/2; what lies on an environment token is not read.
    assert token_advantages(placed, None, mask, gamma=0.5).tolist() == [[0.75, 1.5, 0.0, 1.0, 2.0]]
    with pytest.raises(ValueError, match="does not fit"):
        token_rewards(torch.zeros(3), None, mask, 0.0)


def test_a_row_without_action_tokens_earns_nothing():
    assert token_advantages(torch.tensor([5.0]), None, torch.zeros(1, 3)).tolist() == [[0, 0, 0]]
    assert token_advantages(torch.zeros(0), None, torch.zeros(0, 3)).shape == (0, 3)


def test_padding_changes_no_advantage():
    kl, mask = torch.rand(3, 6).double(), torch.ones(3, 6)
    credit = torch.tensor([1.0, -1.0, 0.5])
    base = token_advantages(credit, kl, mask, kl_coef=0.1, gamma=0.9)
    left = torch.full((3, 2), math.nan).double()
    padded = token_advantages(
        credit,
        torch.cat([left, kl, left], 1),
        torch.cat([torch.zeros(3, 2), mask, torch.zeros(3, 2)], 1),
        kl_coef=0.1,
        gamma=0.9,
    )
    np.testing.assert_allclose(padded[:, 2:-2], base, atol=1e-14)
    assert padded[:, :2].abs().sum() == 0 and padded[:, -2:].abs().sum() == 0


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0)])
def test_gae_against_its_definition(gamma, lambd):
    g = torch.Generator().manual_seed(1)
    r, v = torch.randn(4, 9, generator=g).double(), torch.randn(4, 9, generator=g).double()
    mask = torch.rand(4, 9, generator=g) > 0.35
    adv, ret = gae(r.masked_fill(~mask, math.nan), v.masked_fill(~mask, math.nan), mask, gamma, lambd)
    for row in range(4):
        steps = [t for t in range(9) if mask[row, t]]
        deltas = [
            float(r[row, t]) + gamma * (float(v[row, steps[i + 1]]) if i + 1 < len(steps) else 0.0) - float(v[row, t])
            for i, t in enumerate(steps)
        ]
        for i, t in enumerate(steps):
            want = sum((gamma * lambd) ** (j - i) * deltas[j] for j in range(i, len(steps)))
            assert float(adv[row, t]) == pytest.approx(want, abs=1e-12)
            assert float(ret[row, t]) == pytest.approx(want + float(v[row, t]), abs=1e-12)
    assert adv[~mask].abs().sum() == 0 and ret[~mask].abs().sum() == 0


def test_gae_with_lambda_1_is_return_minus_value():
    r, v, mask = torch.rand(2, 5).double(), torch.rand(2, 5).double(), torch.ones(2, 5)
    adv, ret = gae(r, v, mask, 0.9, 1.0)
    np.testing.assert_allclose(ret, suffix_sums(r, mask, 0.9), atol=1e-12)
    np.testing.assert_allclose(adv, suffix_sums(r, mask, 0.9) - v, atol=1e-12)


def global_moments(parts):
    """What workers do: all-reduce at center 0, then again at the mean."""
    mean, _ = whiten_moments(sum(whiten_stats(a, m) for a, m in parts))
    return whiten_moments(sum(whiten_stats(a, m, mean) for a, m in parts), mean)


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_fault_15_whitening_over_uneven_workers(offset):
    g = torch.Generator().manual_seed(2)
    parts = []
    for rows, width in [(5, 3), (2, 40), (0, 4), (1, 1)]:
        mask = torch.rand(rows, width, generator=g) > 0.3
        adv = (torch.randn(rows, width, generator=g).double() * 3 + offset).masked_fill(~mask, math.nan)
        parts.append((adv, mask))
    mean, var = global_moments(parts)
    white = torch.cat([whiten(a, m, mean, var)[m] for a, m in parts])
    assert abs(float(white.mean())) < 1e-9 and float(white.std(unbiased=False)) == pytest.approx(1.0, abs=1e-9)
    # One worker with everything sees the same numbers.
    whole = torch.cat([a[m] for a, m in parts]).unsqueeze(0)
    assert global_moments([(whole, torch.ones_like(whole))]) == pytest.approx((mean, var), rel=1e-12)


def test_one_pass_moments_are_the_biased_variance_about_the_mean_at_any_center():
    adv, mask = torch.tensor([[1.0, 2.0, 3.0, 6.0]]), torch.ones(1, 4)
    for center in (0.0, 3.0, -10.0):
        assert whiten_moments(whiten_stats(adv, mask, center), center) == pytest.approx((3.0, 3.5), abs=1e-12)


def test_whitening_without_division_and_of_constants():
    mask = torch.ones(1, 4)
    constant = torch.full((1, 4), 0.1).double()
    mean, var = global_moments([(constant, mask)])
    assert whiten(constant, mask, mean, var).abs().max() < 1e-10
    adv = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    mean, var = global_moments([(adv, mask)])
    assert whiten(adv, mask, mean, var, divide=False).tolist() == [[-2.0, -1.0, 0.0, 3.0]]
    assert whiten_moments(torch.zeros(3)) == (0.0, 0.0)


def test_fault_18_masked_tokens_take_no_part_in_whitening():
    adv, mask = torch.tensor([[1.0, 100.0, 3.0, -100.0]]), torch.tensor([[1, 0, 1, 0]])
    mean, var = global_moments([(adv, mask)])
    assert (mean, var) == (2.0, 1.0)
    assert whiten(adv, mask, mean, var).tolist() == [[-1.0, 0.0, 1.0, 0.0]]
