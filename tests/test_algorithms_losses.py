"""The ppo loss and the aggregations against closed forms, definitions, finite differences and enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from openrlhf_like.algorithms import (
    AGGREGATIONS,
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossSettings,
    aggregate,
    merge_stats,
    ppo,
    token_advantages,
)

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def run_ppo(log_rho, advantages, settings=None, mask=None):
    """ppo on one row, with pi_old = 0 everywhere; returns per-token losses, their gradient and the statistics."""
    logprobs = torch.tensor([log_rho], dtype=torch.float32, requires_grad=True)
    advantages = torch.tensor([advantages], dtype=torch.float64)
    mask = torch.ones_like(logprobs) if mask is None else torch.tensor([mask])
    out = ppo(
        PolicyLossInputs(logprobs, advantages, mask, old_logprobs=torch.zeros_like(logprobs)),
        settings or PolicyLossSettings(),
    )
    (grad,) = torch.autograd.grad(out.per_token.sum(), logprobs)
    return out.per_token[0], grad[0], out.stats


def test_ppo_closed_form_and_clip_counts():
    rho = [0.5, 0.5, 1.0, 1.5, 1.5]
    adv = [2.0, -2.0, 2.0, 2.0, -2.0]
    loss, grad, stats = run_ppo([math.log(r) for r in rho], adv)
    assert loss.tolist() == pytest.approx([-1.0, 1.6, -2.0, -2.4, 3.0], rel=1e-6)
    # A clipped token has no gradient; d(-rho A)/d log pi = -rho A elsewhere.
    assert grad.tolist() == pytest.approx([-1.0, 0.0, -2.0, 0.0, 3.0], rel=1e-6)
    assert stats.means()["clip_fraction"] == pytest.approx(2 / 5)
    assert stats.means()["ratio"] == pytest.approx(1.0, rel=1e-6)
    assert float(stats.sums["tokens"]) == 5
    assert float(stats.maxima["log_ratio_abs"]) == pytest.approx(math.log(2), rel=1e-6)


def test_clip_higher_moves_the_upper_bound_only():
    settings = PolicyLossSettings(eps_low=0.2, eps_high=0.28)
    loss, _, _ = run_ppo([math.log(1.5), math.log(0.5)], [1.0, -1.0], settings)
    assert loss.tolist() == pytest.approx([-1.28, 0.8], rel=1e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    settings = PolicyLossSettings(dual_clip=3.0)
    loss, grad, stats = run_ppo([math.log(10.0), math.log(2.0), math.log(10.0)], [-1.0, -1.0, 1.0], settings)
    assert loss.tolist() == pytest.approx([3.0, 2.0, -1.2], rel=1e-6)
    assert grad.tolist() == pytest.approx([0.0, 2.0, 0.0], rel=1e-6)
    assert stats.means()["dual_clip_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "bad", [dict(eps_low=-0.1), dict(eps_low=1.5), dict(eps_high=-1.0), dict(dual_clip=1.0), dict(dual_clip=math.nan)]
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="--actor."):
        PolicyLossSettings(**bad)


def test_unknown_and_repeated_names_are_errors():
    with pytest.raises(ValueError, match="unknown policy loss 'pppo'; known: ppo"):
        POLICY_LOSSES.get("pppo")
    with pytest.raises(ValueError, match="registered already"):
        POLICY_LOSSES.add("ppo", ppo)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("gap", [200.0, -200.0, 88.0, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_fault_14_a_gap_of_200_gives_a_finite_gradient(gap, advantage, dual_clip):
    loss, grad, stats = run_ppo([gap, 0.0], [advantage, advantage], PolicyLossSettings(dual_clip=dual_clip))
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
    assert loss[1] == -advantage and grad[1] == -advantage
    assert float(stats.sums["ratio_saturated"]) == 1


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_fault_14_what_stands_under_the_mask_reaches_nothing(junk, where):
    fields = {
        "logprobs": torch.tensor([[-1.0, -2.0, -3.0]]),
        "old_logprobs": torch.tensor([[-1.1, -2.0, -2.9]]),
        "advantages": torch.tensor([[1.0, -1.0, 1.0]]),
    }
    mask = torch.tensor([[1, 0, 1]])
    clean = {k: v.clone() for k, v in fields.items()}
    fields[where][0, 1] = junk
    results = []
    for values in (clean, fields):
        values["logprobs"].requires_grad_()
        out = ppo(PolicyLossInputs(action_mask=mask, **values), PolicyLossSettings())
        (grad,) = torch.autograd.grad(out.per_token.sum(), values["logprobs"])
        assert out.per_token[0, 1] == 0 and grad[0, 1] == 0
        results.append((out.per_token, grad, out.stats.means()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_fault_12_equal_log_probs_give_ratio_exactly_1():
    logprobs = torch.randn(3, 7) - 5
    inputs = PolicyLossInputs(logprobs, torch.ones(3, 7), torch.ones(3, 7), old_logprobs=logprobs.clone())
    for given in (inputs, inputs._replace(old_logprobs=None)):
        out = ppo(given, PolicyLossSettings())
        assert torch.equal(out.per_token, -torch.ones(3, 7))
        assert out.stats.means()["ratio"] == 1 and out.stats.means()["clip_fraction"] == 0


def test_no_old_log_probs_still_gives_the_policy_gradient():
    logprobs = torch.randn(2, 3, requires_grad=True)
    adv = torch.randn(2, 3)
    out = ppo(PolicyLossInputs(logprobs, adv, torch.ones(2, 3)), PolicyLossSettings())
    (grad,) = torch.autograd.grad(out.per_token.sum(), logprobs)
    torch.testing.assert_close(grad, -adv)


def test_ppo_gradient_against_finite_differences():
    g = torch.Generator().manual_seed(0)
    logprobs = (0.6 * torch.randn(4, 6, generator=g).double()).requires_grad_()
    adv, mask = torch.randn(4, 6, generator=g), torch.rand(4, 6, generator=g) > 0.3
    old = torch.zeros(4, 6).double()

    def loss(x):
        out = ppo(PolicyLossInputs(x, adv, mask, old_logprobs=old), PolicyLossSettings(0.2, 0.28, 3.0))
        return aggregate(out.per_token, mask, "token_mean", num_tokens=int(mask.sum()), num_sequences=4)

    assert torch.autograd.gradcheck(loss, (logprobs,))


def test_ppo_at_ratio_1_is_the_exact_policy_gradient_of_an_enumerated_policy():
    """Two steps of a tabular policy over 3 symbols: sum p(x) grad loss(x) = -grad E[R] / 2, with any baseline."""
    g = torch.Generator().manual_seed(3)
    first = torch.randn(3, generator=g).double().requires_grad_()
    second = torch.randn(3, 3, generator=g).double().requires_grad_()
    reward = torch.randn(3, 3, generator=g).double()
    l1, l2 = first.log_softmax(0), second.log_softmax(1)
    prob = (l1.unsqueeze(1) + l2).exp()
    want = torch.autograd.grad(-(prob * reward).sum() / 2, (first, second), retain_graph=True)
    for baseline in (0.0, 1.7):
        total = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.product(range(3), repeat=2):
            logprobs = torch.stack([l1[a], l2[a, b]]).unsqueeze(0)
            mask = torch.ones(1, 2)
            adv = token_advantages((reward[a, b] - baseline).reshape(1), None, mask)
            inputs = PolicyLossInputs(logprobs, adv, mask, old_logprobs=logprobs.detach())
            out = ppo(inputs, PolicyLossSettings())
            share = aggregate(out.per_token, mask, "token_mean", num_tokens=2, num_sequences=1)
            total = total + prob[a, b].detach() * share
        got = torch.autograd.grad(total, (first, second), retain_graph=True)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_stats_merge_over_micro_batches():
    g = torch.Generator().manual_seed(4)
    logprobs, adv = torch.randn(6, 5, generator=g), torch.randn(6, 5, generator=g)
    mask = torch.rand(6, 5, generator=g) > 0.4
    full = PolicyLossInputs(logprobs, adv, mask, old_logprobs=torch.zeros(6, 5))
    whole = ppo(full, PolicyLossSettings()).stats
    parts = []
    for rows in ([0], [1, 2, 3], [4, 5], []):
        cut = PolicyLossInputs(*(None if x is None else x[rows] for x in full))
        parts.append(ppo(cut, PolicyLossSettings()).stats)
    merged = merge_stats(parts)
    assert merged.means() == pytest.approx(whole.means())
    assert float(merged.maxima["log_ratio_abs"]) == float(whole.maxima["log_ratio_abs"])


# --- aggregation -------------------------------------------------------------------------------------------------


def batch(seed=5):
    """8 rows that are 6 trajectories: rows 1 and 5, and rows 2 and 7, are segments of one."""
    g = torch.Generator().manual_seed(seed)
    losses, mask = torch.randn(8, 10, generator=g).double(), torch.rand(8, 10, generator=g) > 0.4
    trajectory = torch.tensor([0, 1, 2, 3, 4, 1, 5, 2])
    mask[6, 1:] = False
    mask[6, 0] = True
    own = mask.sum(1)
    lengths = torch.stack([own[trajectory == trajectory[i]].sum() for i in range(8)])
    return losses, mask, trajectory, lengths


def definition(mode, losses, mask, trajectory, max_len):
    per = [losses[trajectory == k][mask[trajectory == k]] for k in range(6)]
    if mode == "token_mean":
        return torch.cat(per).mean()
    if mode == "seq_mean_token_mean":
        return sum(x.mean() for x in per) / 6
    scale = max_len if mode == "seq_mean_token_sum_norm" else 1
    return sum(x.sum() for x in per) / 6 / scale


@pytest.mark.parametrize("mode", MODES)
def test_aggregations_are_their_definitions(mode):
    losses, mask, trajectory, lengths = batch()
    got = aggregate(losses, mask, mode, num_tokens=int(mask.sum()), num_sequences=6, seq_lengths=lengths, max_len=10)
    torch.testing.assert_close(got, definition(mode, losses, mask, trajectory, 10))
    assert mode in AGGREGATIONS and set(AGGREGATIONS.names()) == set(MODES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "split", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[i] for i in range(8)], [[7, 3], [], [0], [6, 5, 4, 2, 1]], [[5, 1], [6]]]
)
def test_fault_11_shares_of_any_split_add_up_to_the_global_batch(mode, split):
    losses, mask, _, lengths = batch()
    rows = [i for part in split for i in part]
    counts = dict(num_tokens=int(mask[rows].sum()), num_sequences=len(rows), max_len=10)
    leaf = losses.clone().requires_grad_()
    whole = aggregate(leaf[rows], mask[rows], mode, seq_lengths=lengths[rows], **counts)
    (want,) = torch.autograd.grad(whole, leaf)
    shares = [aggregate(leaf[p], mask[p], mode, seq_lengths=lengths[p], **counts) for p in split]
    (got,) = torch.autograd.grad(sum(shares), leaf)
    torch.testing.assert_close(sum(shares), whole, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_packed_tokens_aggregate_as_padded_rows(mode):
    losses, mask, _, lengths = batch()
    counts = dict(num_tokens=int(mask.sum()), num_sequences=6, max_len=10)
    padded = aggregate(losses, mask, mode, seq_lengths=lengths, **counts)
    each = lengths.unsqueeze(1).expand(8, 10)[mask]
    packed = aggregate(losses[mask], torch.ones(int(mask.sum())), mode, seq_lengths=each, **counts)
    torch.testing.assert_close(packed, padded)


@pytest.mark.parametrize("mode", MODES)
def test_fault_18_half_masked_and_all_masked(mode):
    losses = torch.tensor([[1.0, 100.0, 3.0, math.nan]], requires_grad=True)
    half = torch.tensor([[1, 0, 1, 0]])
    got = aggregate(losses, half, mode, num_tokens=2, num_sequences=1, seq_lengths=half.sum(1), max_len=4)
    want = {"token_mean": 2, "seq_mean_token_mean": 2, "seq_mean_token_sum": 4, "seq_mean_token_sum_norm": 1}[mode]
    assert float(got.detach()) == want
    nothing = torch.zeros(1, 4)
    got = aggregate(losses, nothing, mode, num_tokens=0, num_sequences=0, seq_lengths=torch.zeros(1), max_len=4)
    (grad,) = torch.autograd.grad(got, losses)
    assert float(got.detach()) == 0 and torch.equal(grad, torch.zeros(1, 4))


def test_missing_lengths_are_refused():
    losses, mask, _, lengths = batch()
    with pytest.raises(ValueError, match="seq_lengths"):
        aggregate(losses, mask, "seq_mean_token_mean", num_tokens=1, num_sequences=1)
    with pytest.raises(ValueError, match="constant length"):
        aggregate(losses, mask, "seq_mean_token_sum_norm", num_tokens=1, num_sequences=1)
    with pytest.raises(ValueError, match="shape"):
        aggregate(losses, mask, "token_mean", num_tokens=1, num_sequences=1, seq_lengths=lengths[:3])
