"""Engine-trainer correction: weights for tokens whose sampling engine and trainer disagree on their probability."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.stats import TokenStats, log_ratio, masked, safe_exp, sequence_mean

CorrectionFunction = Callable[[Tensor, Tensor, float, float], Tensor]
CORRECTIONS: Registry[CorrectionFunction] = Registry("engine-trainer correction")


@CORRECTIONS.register("tis")
def tis(w: Tensor, sequence_w: Tensor, low: float, high: float) -> Tensor:
    """clamp(w, low, high): truncated importance sampling."""
    return w.clamp(low, high)


@CORRECTIONS.register("icepop")
def icepop(w: Tensor, sequence_w: Tensor, low: float, high: float) -> Tensor:
    """w inside [low, high], else 0: a token outside takes no part."""
    return torch.where((w >= low) & (w <= high), w, torch.zeros_like(w))


@CORRECTIONS.register("seq-mask-tis")
def seq_mask_tis(w: Tensor, sequence_w: Tensor, low: float, high: float) -> Tensor:
    """clamp(w), and 0 for every token of a trajectory whose geometric mean of w is outside [low, high]."""
    inside = (sequence_w >= low) & (sequence_w <= high)
    return torch.where(inside, w.clamp(low, high), torch.zeros_like(w))


def correction_weights(
    kind: str,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    seq_index: Tensor | None = None,
    sequence_level: bool = False,
) -> Tensor:
    """Weights that multiply the per-token loss, w = exp(log pi_old - log mu). No gradient flows through them.

    The token mean still divides by every action token, those with weight 0 too.

    Args:
        kind: ``tis``, ``icepop`` or ``seq-mask-tis``.
        old_logprobs, behavior_logprobs: [B, T] log pi_old (the trainer's, before the update) and log mu (the engine's).
        mask: same shape; 1 on action tokens.
        low, high: the range of w that is trusted, 0 <= low <= high.
        seq_index: int [B] or one a token, as in PolicyLossInputs. All segments of a trajectory must be in the call.
        sequence_level: for losses on a sequence's ratio (gspo, gmpo): exp(mean log w) takes the place of w.

    Returns:
        Same shape and type as ``old_logprobs``; 0 outside the mask.
    """
    _check_range(low, high)
    with torch.no_grad():
        log_w = log_ratio(old_logprobs, behavior_logprobs, mask).to(torch.float64)
        needs_sequence = sequence_level or kind == "seq-mask-tis"
        sequence_w = safe_exp(sequence_mean(log_w, mask, seq_index)) if needs_sequence else log_w
        w = sequence_w if sequence_level else safe_exp(log_w)
        return masked(CORRECTIONS.get(kind)(w, sequence_w, low, high), mask).to(old_logprobs.dtype)


def correction_stats(
    old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, low: float, high: float
) -> TokenStats:
    """How far engine and trainer are apart; cheap, and logged whether a correction is on or off.

    Returns:
        sums ``logprob_diff`` (of |log pi_old - log mu|), ``outside_range`` (tokens with w outside [low, high]) and
        ``tokens``; maximum ``logprob_diff``. Merge with ``merge_stats``, then ``means()``.
    """
    _check_range(low, high)
    with torch.no_grad():
        log_w = log_ratio(old_logprobs, behavior_logprobs, mask).to(torch.float64)
        w = safe_exp(log_w)
        size = log_w.abs()
        sums = {
            "logprob_diff": size.sum(),
            "outside_range": masked(((w < low) | (w > high)).double(), mask).sum(),
            "tokens": mask.bool().sum().double(),
        }
        largest = size.max() if size.numel() else size.new_zeros(())
        return TokenStats(sums, {"logprob_diff": largest})


def _check_range(low: float, high: float) -> None:
    if not (0.0 <= low <= high and math.isfinite(high)):
        raise ValueError(f"--algo.advantage.is_correction_threshold is {low} {high}: want 0 <= low <= high")
