"""What the policy's training step needs to know, picked out of a command's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openrlhf_like.config.tree import get_or


@dataclass
class PolicyOptions:
    """Loss of the policy.

    Attributes:
        loss_type, eps_low, eps_high, dual_clip: see ``algorithms.losses``.
        aggregation, max_len: see ``algorithms.aggregation``; ``max_len`` is the constant length of its norm.
        kl_in_loss, kl_estimator: where the KL stands, and as what.
        entropy_coef: None computes no entropy; 0 logs it.
        correction: None or the kind of engine-trainer correction; the range is used for the metrics either way.
        estimator, gamma, no_std_norm: see ``algorithms.advantages``.
    """

    loss_type: str = "ppo"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    aggregation: str = "token_mean"
    max_len: int | None = None
    kl_in_loss: bool = False
    kl_estimator: str = "k1"
    entropy_coef: float | None = None
    correction: str | None = None
    correction_range: tuple[float, float] = (0.5, 5.0)
    estimator: str = "group_norm"
    gamma: float = 1.0
    no_std_norm: bool = False


def policy_options(cfg: Any) -> PolicyOptions:
    """From the resolved configuration of an RL command."""
    eps = float(get_or(cfg, "actor.eps_clip", 0.2))
    low, high = get_or(cfg, "actor.eps_clip_low_high", (eps, eps))
    enabled = bool(get_or(cfg, "algo.advantage.is_correction_enable", False))
    lo, hi = get_or(cfg, "algo.advantage.is_correction_threshold", (0.5, 5.0))
    return PolicyOptions(
        loss_type=get_or(cfg, "actor.policy_loss_type", "ppo"),
        eps_low=float(low),
        eps_high=float(high),
        dual_clip=get_or(cfg, "actor.dual_clip"),
        aggregation=get_or(cfg, "algo.loss_aggregation", "token_mean"),
        max_len=get_or(cfg, "rollout.max_new_tokens") or get_or(cfg, "data.max_len"),
        kl_in_loss=bool(get_or(cfg, "algo.kl.use_loss", False)),
        kl_estimator=get_or(cfg, "algo.kl.estimator", "k1"),
        entropy_coef=get_or(cfg, "actor.entropy_coef"),
        correction=get_or(cfg, "algo.advantage.is_correction_type", "tis") if enabled else None,
        correction_range=(float(lo), float(hi)),
        estimator=get_or(cfg, "algo.advantage.estimator", "group_norm"),
        gamma=float(get_or(cfg, "algo.advantage.gamma", 1.0)),
        no_std_norm=bool(get_or(cfg, "algo.advantage.no_std_norm", False)),
    )


def needs_old_logprobs(updates_per_rollout: int, kl_in_reward: bool) -> bool:
    """Whether log pi_old needs a forward pass of its own.

    With one update a rollout the training pass itself runs on pi_old: its detached log-probs are the old ones.
    A KL in the reward must be known before the first update, so it needs the pass too.
    """
    return updates_per_rollout > 1 or kl_in_reward
