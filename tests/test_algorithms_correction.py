"""Engine-trainer correction weights and the statistics that are always logged."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf_like.algorithms import CORRECTIONS, correction_stats, correction_weights, merge_stats

LOG_W = torch.tensor([[math.log(0.1), 0.0, math.log(3.0)], [math.log(10.0), math.log(8.0), 0.0]])
ON = torch.tensor([[1, 1, 1], [1, 1, 0]])


def weights(kind, **kw):
    return correction_weights(kind, LOG_W, torch.zeros(2, 3), ON, 0.5, 5.0, **kw)


def close(got, want):
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-6)


def test_closed_forms():
    assert CORRECTIONS.names() == ["tis", "icepop", "seq-mask-tis"]
    close(weights("tis"), [[0.5, 1.0, 3.0], [5.0, 5.0, 0.0]])
    close(weights("icepop"), [[0.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
    # Geometric means: (0.1 * 1 * 3)^(1/3) = 0.67 is inside, (10 * 8)^(1/2) = 8.9 is not.
    close(weights("seq-mask-tis"), [[0.5, 1.0, 3.0], [0.0, 0.0, 0.0]])


def test_segments_of_one_trajectory_share_their_sequence_weight():
    joint = (0.1 * 1 * 3 * 10 * 8) ** (1 / 5)
    assert 0.5 < joint < 5
    close(weights("seq-mask-tis", seq_index=torch.tensor([7, 7])), [[0.5, 1.0, 3.0], [5.0, 5.0, 0.0]])
    close(weights("tis", seq_index=torch.tensor([7, 7]), sequence_level=True), [[joint] * 3, [joint, joint, 0.0]])


def test_fault_14_sequence_ratio_is_1_at_any_length_and_finite_at_a_gap_of_200():
    for length in (1, 10, 1000):
        mask = torch.ones(1, length)
        same = torch.randn(1, length) - 3
        got = correction_weights("tis", same, same.clone(), mask, 0.5, 5.0, sequence_level=True)
        assert torch.equal(got, torch.ones(1, length))
    for gap in (200.0, -200.0):
        for kind in CORRECTIONS.names():
            got = correction_weights(kind, torch.full((1, 4), gap), torch.zeros(1, 4), torch.ones(1, 4), 0.5, 5.0)
            assert torch.isfinite(got).all()


@pytest.mark.parametrize("kind", CORRECTIONS.names())
def test_equal_log_probs_give_exactly_1_and_padding_never_counts(kind):
    logprobs = torch.randn(3, 6)
    mask = torch.rand(3, 6) > 0.4
    old, mu = logprobs.masked_fill(~mask, math.nan), logprobs.masked_fill(~mask, -math.inf)
    got = correction_weights(kind, old, mu, mask, 0.5, 5.0)
    assert torch.equal(got, mask.float())
    stats = correction_stats(old, mu, mask, 0.5, 5.0)
    assert stats.means() == {"logprob_diff": 0, "outside_range": 0} and float(stats.maxima["logprob_diff"]) == 0


def test_no_gradient_flows_through_a_weight():
    old = LOG_W.clone().requires_grad_()
    assert not correction_weights("tis", old, torch.zeros(2, 3), ON, 0.5, 5.0).requires_grad


def test_statistics_and_their_merge():
    whole = correction_stats(LOG_W, torch.zeros(2, 3), ON, 0.5, 5.0)
    diffs = [math.log(10), 0.0, math.log(3), math.log(10), math.log(8)]
    assert whole.means()["logprob_diff"] == pytest.approx(sum(diffs) / 5, rel=1e-6)
    assert whole.means()["outside_range"] == pytest.approx(3 / 5)
    assert float(whole.maxima["logprob_diff"]) == pytest.approx(math.log(10), rel=1e-6)
    parts = [correction_stats(LOG_W[r], torch.zeros(2, 3)[r], ON[r], 0.5, 5.0) for r in ([0], [], [1])]
    assert merge_stats(parts).means() == pytest.approx(whole.means())
    assert correction_stats(LOG_W[[]], LOG_W[[]], ON[[]], 0.5, 5.0).means()["logprob_diff"] == 0


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1.0), (2.0, 1.0), (0.5, math.inf), (math.nan, 1.0)])
def test_impossible_ranges_are_refused(low, high):
    with pytest.raises(ValueError, match="is_correction_threshold"):
        correction_weights("tis", LOG_W, LOG_W, ON, low, high)
