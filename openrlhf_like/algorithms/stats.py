"""Statistics that merge: sums add and maxima take the larger, over micro-batches and over workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# exp() of a log-ratio is taken on [-20, 20]: e^20 = 4.9e8 is far outside every clip range and still finite in fp32,
# and so is its gradient. Beyond the limit the clamp passes no gradient.
LOG_RATIO_LIMIT = 20.0


class TokenStats(NamedTuple):
    """Mergeable statistics over action tokens; every value is a detached float64 scalar tensor.

    Attributes:
        sums: totals over tokens; divide by ``sums["tokens"]`` of the merged result for the mean.
        maxima: largest values (0 for an empty batch).
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def means(self) -> dict[str, float]:
        """Every sum but ``tokens`` divided by the number of tokens (0 when there are none)."""
        n = max(float(self.sums["tokens"]), 1.0)
        return {name: float(value) / n for name, value in self.sums.items() if name != "tokens"}


def merge_stats(parts: Iterable[TokenStats]) -> TokenStats:
    """Add sums and take the larger of maxima. Raises ValueError for no parts."""
    parts = list(parts)
    if not parts:
        raise ValueError("merge_stats needs at least one part")
    sums = {name: torch.stack([p.sums[name] for p in parts]).sum() for name in parts[0].sums}
    maxima = {name: torch.stack([p.maxima[name] for p in parts]).max() for name in parts[0].maxima}
    return TokenStats(sums, maxima)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with 0 wherever ``mask`` is 0, whatever stands there (NaN and inf included); same shape."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """log(new/old) per token, exactly 0 outside the mask; same shape as the inputs.

    Both sides are masked before they meet, so that padding (0, -inf, NaN) reaches neither the value nor the gradient.
    """
    return masked(new, mask) - masked(old, mask)


def safe_exp(log_value: Tensor) -> Tensor:
    """exp() on the documented range +-LOG_RATIO_LIMIT: finite in value and in gradient for every finite input."""
    return log_value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_mean(values: Tensor, mask: Tensor, seq_index: Tensor | None = None) -> Tensor:
    """Mean over the action tokens of each trajectory, handed back to each of its tokens.

    Args:
        values: [B, T] (or any shape, with ``seq_index`` of that shape).
        mask: same shape; 1 on action tokens.
        seq_index: int [B], the trajectory of each row, or one id a token. None: every row of a 2-D tensor is a
            trajectory of its own. Rows with one id are segments of one trajectory and share one mean.

    Returns:
        Same shape as ``values``; 0 outside the mask, and 0 for a trajectory without action tokens.
    """
    index = token_sequence_ids(values, seq_index)
    _, index = torch.unique(index, return_inverse=True)
    size = int(index.max()) + 1 if index.numel() else 0
    flat_index, flat_mask = index.reshape(-1), mask.reshape(-1).to(values.dtype)
    totals = values.new_zeros(size).index_add(0, flat_index, masked(values, mask).reshape(-1))
    counts = values.new_zeros(size).index_add(0, flat_index, flat_mask)
    means = totals / counts.clamp(min=1)
    return masked(means[flat_index].reshape(values.shape), mask)


def token_sequence_ids(values: Tensor, seq_index: Tensor | None) -> Tensor:
    """Trajectory ids in the shape of ``values``. Raises ValueError when they cannot be brought to it."""
    if seq_index is None:
        if values.dim() != 2:
            raise ValueError(f"seq_index is needed for values of shape {tuple(values.shape)}; only [B, T] has rows")
        seq_index = torch.arange(values.shape[0], device=values.device)
    return per_token(seq_index, values, "seq_index")


def per_token(per_row: Tensor, like: Tensor, name: str) -> Tensor:
    """Spread a [B] tensor over the tokens of a [B, T] one; a tensor of the full shape passes through."""
    if per_row.shape == like.shape:
        return per_row
    if like.dim() == 2 and per_row.shape == like.shape[:1]:
        return per_row.unsqueeze(1).expand(like.shape)
    raise ValueError(f"{name} has shape {tuple(per_row.shape)}; want {tuple(like.shape[:1])} or {tuple(like.shape)}")
