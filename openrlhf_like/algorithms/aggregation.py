"""From a loss a token to the scalar of a micro-batch: its share of the global batch's loss.

The shares of all micro-batches of all workers *add up* to the loss of the global batch, however it was split, because
every denominator is a number of the global batch and none is of the micro-batch. A data-parallel engine that averages
gradients over W workers needs the share times W; one that divides by its accumulation steps needs it times those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.stats import masked, per_token


class GlobalCounts(NamedTuple):
    """Numbers of one optimizer step.

    Attributes:
        num_tokens: action tokens of all workers, those masked by a correction too.
        num_sequences: trajectories of all workers (segments of one trajectory count once).
        max_len: the constant length of ``seq_mean_token_sum_norm``.
    """

    num_tokens: int
    num_sequences: int
    max_len: int | None = None


Aggregation = Callable[[Tensor, "Tensor | None", GlobalCounts], Tensor]
AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation")


@AGGREGATIONS.register("token_mean")
def token_mean(losses: Tensor, lengths: Tensor | None, counts: GlobalCounts) -> Tensor:
    """Sum over tokens / N: every token weighs the same (DAPO, arXiv 2503.14476)."""
    return losses.sum() / max(counts.num_tokens, 1)


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(losses: Tensor, lengths: Tensor | None, counts: GlobalCounts) -> Tensor:
    """Mean over trajectories of the mean over their tokens (GRPO as published, arXiv 2402.03300)."""
    if lengths is None:
        raise ValueError("seq_mean_token_mean needs seq_lengths, the action tokens of each row's trajectory")
    return (losses / lengths.clamp(min=1).to(losses.dtype)).sum() / max(counts.num_sequences, 1)


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(losses: Tensor, lengths: Tensor | None, counts: GlobalCounts) -> Tensor:
    """Mean over trajectories of the sum over their tokens."""
    return losses.sum() / max(counts.num_sequences, 1)


@AGGREGATIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(losses: Tensor, lengths: Tensor | None, counts: GlobalCounts) -> Tensor:
    """As ``seq_mean_token_sum``, divided by a constant length (Dr. GRPO, arXiv 2503.20783)."""
    if counts.max_len is None or counts.max_len < 1:
        raise ValueError(f"seq_mean_token_sum_norm needs a constant length of at least 1, got {counts.max_len}")
    return losses.sum() / (max(counts.num_sequences, 1) * counts.max_len)


def aggregate(
    per_token_loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_tokens: int,
    num_sequences: int,
    seq_lengths: Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    """The micro-batch's share of the global loss.

    Args:
        per_token_loss: [B, T] (or [A] action tokens, with ``seq_lengths`` [A]).
        mask: same shape; 1 on action tokens.
        mode: a name in AGGREGATIONS.
        num_tokens, num_sequences: of the whole optimizer step, all workers.
        seq_lengths: int [B] (or one a token): action tokens of the row's *trajectory*, all its segments together.
            Needed by ``seq_mean_token_mean`` only.
        max_len: the constant of ``seq_mean_token_sum_norm``, e.g. the longest response allowed.

    Returns:
        A scalar with a graph; 0 and finite when nothing is on.
    """
    losses = masked(per_token_loss, mask)
    lengths = None if seq_lengths is None else per_token(seq_lengths, losses, "seq_lengths")
    return AGGREGATIONS.get(mode)(losses, lengths, GlobalCounts(num_tokens, num_sequences, max_len))
