"""The policy's loss on one micro-batch: what ``algorithms`` defines, on flat action tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_like.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossSettings,
    TokenStats,
    aggregate,
    correction_stats,
    correction_weights,
    kl_per_token,
)
from openrlhf_like.training.metrics import Metrics, add_metric, max_metric
from openrlhf_like.training.policy_options import PolicyOptions


@dataclass
class PolicyBatch:
    """Flat [A] tensors of one micro-batch, all on one device.

    ``old`` None: this pass runs on pi_old itself. ``ref`` None: no reference. ``seq_lengths``: action tokens of the
    trajectory that each token belongs to. ``seq_index``: which trajectory that is.
    """

    advantages: Tensor
    behavior: Tensor
    old: Tensor | None
    ref: Tensor | None
    seq_index: Tensor
    seq_lengths: Tensor


def policy_loss(
    logprobs: Tensor,
    entropies: Tensor,
    batch: PolicyBatch,
    options: PolicyOptions,
    num_tokens: int,
    num_sequences: int,
    kl_coef: float,
    metrics: Metrics,
    world_size: int = 1,
) -> Tensor:
    """This micro-batch's share of the global batch's loss (a scalar with a graph); adds to ``metrics``.

    Args:
        logprobs, entropies: fp32 [A] with graphs.
        num_tokens, num_sequences: of the whole optimizer step.
        kl_coef: weight of the KL where it is in the loss.
    """
    mask = torch.ones_like(logprobs)
    old = logprobs.detach() if batch.old is None else batch.old
    settings = PolicyLossSettings(options.eps_low, options.eps_high, options.dual_clip)
    inputs = PolicyLossInputs(
        logprobs, batch.advantages, mask, batch.old, batch.behavior, batch.ref, batch.seq_index, entropies
    )
    out = POLICY_LOSSES.get(options.loss_type)(inputs, settings)
    per_token = out.per_token
    low, high = options.correction_range
    if options.correction is not None:
        weights = correction_weights(
            options.correction, old, batch.behavior, mask, low, high, batch.seq_index,
            sequence_level=options.loss_type in ("gspo", "gmpo"),
        )  # fmt: skip
        per_token = per_token * weights

    def total(values: Tensor) -> Tensor:
        return aggregate(
            values, mask, options.aggregation, num_tokens=num_tokens, num_sequences=num_sequences,
            seq_lengths=batch.seq_lengths, max_len=options.max_len,
        )  # fmt: skip

    loss = total(per_token)
    # Shares add up over workers, while metrics average over them.
    add_metric(metrics, "policy/loss", float(loss.detach()) * world_size, 0.0)
    if options.kl_in_loss and batch.ref is not None and kl_coef:
        kl = kl_per_token(options.kl_estimator, logprobs, batch.ref, mask).sum() / max(num_tokens, 1)
        loss = loss + kl_coef * kl
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropies.sum() / max(num_tokens, 1)
    if options.entropy_coef is not None:
        add_metric(metrics, "policy/entropy", float(entropies.detach().double().sum()), len(entropies))
    _add_loss_stats(metrics, out.stats)
    if batch.old is None:
        add_engine_diff(metrics, old, batch.behavior, options)
        if batch.ref is not None:
            add_kl(metrics, old, batch.ref)
    return loss


def _add_loss_stats(metrics: Metrics, stats: TokenStats) -> None:
    tokens = float(stats.sums["tokens"])
    names = {"clip_fraction": "clip_fraction", "dual_clip_fraction": "dual_clip_fraction", "old_kl": "approx_kl",
             "ratio": "ratio_mean", "ratio_saturated": "ratio_saturated_fraction"}  # fmt: skip
    for theirs, ours in names.items():
        if theirs in stats.sums:
            add_metric(metrics, f"policy/{ours}", float(stats.sums[theirs]), tokens)
    if "log_ratio_abs" in stats.maxima:
        max_metric(metrics, "policy/ratio_max", float(stats.maxima["log_ratio_abs"].clamp(max=700).exp()))


def add_engine_diff(metrics: Metrics, old: Tensor, behavior: Tensor, options: PolicyOptions) -> None:
    """|log pi_old - log mu|: how far the engine that sampled and the trainer are apart. Logged always."""
    if old.numel() == 0:
        return
    stats = correction_stats(old, behavior, torch.ones_like(old), *options.correction_range)
    tokens = float(stats.sums["tokens"])
    add_metric(metrics, "rollout/logprob_diff_mean", float(stats.sums["logprob_diff"]), tokens)
    add_metric(metrics, "rollout/is_outside_fraction", float(stats.sums["outside_range"]), tokens)
    max_metric(metrics, "rollout/logprob_diff_max", float(stats.maxima["logprob_diff"]))


def add_kl(metrics: Metrics, old: Tensor, ref: Tensor) -> None:
    """policy/kl_ref: token mean of k1 between the policy before the update and the reference."""
    if old.numel():
        add_metric(metrics, "policy/kl_ref", float((old.double() - ref.double()).sum()), old.numel())
