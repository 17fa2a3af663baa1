"""From what the reward said to what the statistics see: penalties, then the clip. One scalar a trajectory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ShapedRewards(NamedTuple):
    """float64 [B] each. ``rewards`` is NaN where the input was no finite number; the changes are 0 there.

    rewards = input + overlong + stop_properly + clipped.

    Attributes:
        rewards: after everything.
        overlong: what the overlong penalty added (<= 0 for a non-negative factor).
        stop_properly: what the truncation penalty added, either sign.
        clipped: what the clip added.
    """

    rewards: Tensor
    overlong: Tensor
    stop_properly: Tensor
    clipped: Tensor


def as_reward_tensor(rewards: Sequence[float | None] | Tensor) -> Tensor:
    """float64 [B]; None, NaN and the infinities all become NaN, so that no later clip can make them look valid."""
    if isinstance(rewards, Tensor):
        out = rewards.detach().to("cpu", torch.float64).clone()
    else:
        out = torch.tensor([math.nan if r is None else float(r) for r in rewards], dtype=torch.float64)
    out[~torch.isfinite(out)] = math.nan
    return out


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer_len: float, factor: float) -> Tensor:
    """-factor * clip((length - (max_new_tokens - buffer)) / buffer, 0, 1), float64 [B].

    Args:
        lengths: [B], action tokens of each trajectory (tool and environment tokens do not count).
        max_new_tokens: the limit a response may reach.
        buffer_len: the last ``buffer_len`` tokens before the limit are where the penalty grows from 0 to ``factor``.
        factor: the largest penalty.

    Source: DAPO, arXiv 2503.14476, equation 13. Raises ValueError for a buffer outside (0, max_new_tokens].
    """
    if not 0 < buffer_len <= max_new_tokens:
        raise ValueError(f"--reward.overlong_buffer_len is {buffer_len}: want a number in (0, {max_new_tokens}]")
    excess = lengths.to(torch.float64) - (max_new_tokens - buffer_len)
    # Adding 0.0 turns the -0.0 of "no penalty" into a plain 0.
    return -factor * (excess / buffer_len).clamp(0.0, 1.0) + 0.0


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Truncated samples: coef >= 0 multiplies the reward, coef < 0 replaces it. float64 [B]."""
    changed = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated.bool(), changed, rewards)


def shape_rewards(
    rewards: Sequence[float | None] | Tensor,
    lengths: Sequence[int] | Tensor,
    truncated: Sequence[bool] | Tensor,
    *,
    max_new_tokens: int,
    overlong_buffer_len: float | None = None,
    overlong_penalty_factor: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
    clip_range: tuple[float, float] | Sequence[float] | None = None,
) -> ShapedRewards:
    """Overlong penalty, then the penalty on truncated samples, then the clip, in this order.

    Args:
        rewards: [B], one return a trajectory; None or a non-finite number marks a trajectory without a reward.
        lengths: [B], action tokens.
        truncated: [B].
        max_new_tokens: limit of the response length, for the overlong penalty.
        overlong_buffer_len: None switches that penalty off.
        stop_properly_penalty_coef: None switches that penalty off.
        clip_range: (low, high); None switches the clip off.

    Raises:
        ValueError: lengths disagree, or a setting is out of its range (the message names the flag).
    """
    given = as_reward_tensor(rewards)
    length = torch.as_tensor(lengths, dtype=torch.float64)
    cut = torch.as_tensor(truncated, dtype=torch.bool)
    if not given.shape == length.shape == cut.shape:
        raise ValueError(f"{len(given)} rewards, {len(length)} lengths and {len(cut)} truncation marks disagree")

    shaped, steps = given, []
    if overlong_buffer_len is not None:
        shaped = shaped + overlong_penalty(length, max_new_tokens, overlong_buffer_len, overlong_penalty_factor)
    steps.append(shaped)
    if stop_properly_penalty_coef is not None:
        shaped = stop_properly_penalty(shaped, cut, stop_properly_penalty_coef)
        # A negative coefficient replaces: it must not give a reward to a sample that has none.
        shaped = torch.where(given.isnan(), given, shaped)
    steps.append(shaped)
    if clip_range is not None:
        low, high = clip_range
        if not low <= high:
            raise ValueError(f"--reward.clip_range is {low} {high}: want low <= high")
        shaped = shaped.clamp(low, high)
    steps.append(shaped)
    changes = [(after - before).nan_to_num(0.0) for before, after in zip([given, *steps], steps, strict=False)]
    return ShapedRewards(shaped, *changes)
