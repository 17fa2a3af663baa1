"""Policy losses: one loss a token, to be summed by :mod:`openrlhf_like.algorithms.aggregation`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.stats import LOG_RATIO_LIMIT, TokenStats, log_ratio, masked, safe_exp


class PolicyLossInputs(NamedTuple):
    """What a policy loss may look at. Every tensor but ``seq_index`` has one shape: [B, T], or [A] action tokens.

    Attributes:
        logprobs: log pi of the sampled tokens, with a graph.
        advantages: A, any float type; no gradient flows into it.
        action_mask: 1 on action tokens. Whatever stands elsewhere in the other tensors is never looked at.
        old_logprobs: log pi_old. None means that pi_old is pi (one on-policy update a rollout): every ratio is 1.
        behavior_logprobs: log mu of the sampling engine.
        ref_logprobs: log pi_ref.
        seq_index: int [B], the trajectory of each row (segments of one trajectory share it), or one id a token.
        entropies: entropy of the sampled-from distribution at each token.
    """

    logprobs: Tensor
    advantages: Tensor
    action_mask: Tensor
    old_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    seq_index: Tensor | None = None
    entropies: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossSettings:
    """Clip range of the ratio, [1 - eps_low, 1 + eps_high], and dual clip. Raises ValueError out of range."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.eps_low <= 1.0:
            raise ValueError(f"eps_low is {self.eps_low}: want a number in [0, 1] (--actor.eps_clip_low_high)")
        if not self.eps_high >= 0.0:
            raise ValueError(f"eps_high is {self.eps_high}: want at least 0 (--actor.eps_clip_low_high)")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"--actor.dual_clip is {self.dual_clip}: want a number above 1")


class PolicyLossOutput(NamedTuple):
    """``per_token``: the inputs' shape, 0 outside the mask. ``stats``: mergeable over micro-batches and workers."""

    per_token: Tensor
    stats: TokenStats


PolicyLoss = Callable[[PolicyLossInputs, PolicyLossSettings], PolicyLossOutput]
POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


@POLICY_LOSSES.register("ppo")
def ppo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> PolicyLossOutput:
    """-min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); for A < 0 and dual clip c the objective is at least c A.

    rho = exp(log pi - log pi_old). Sources: Schulman et al., arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476;
    dual clip: Ye et al., arXiv 1912.09729.

    A token whose log-ratio leaves +-LOG_RATIO_LIMIT gets a finite loss and no gradient (``ratio_saturated`` counts
    them): what exp() would give there is inf, and NaN in the backward pass.
    """
    log_rho, advantages = _log_rho(inputs), _advantages(inputs)
    rho = safe_exp(log_rho)
    plain = rho * advantages
    clipped = rho.clamp(1.0 - settings.eps_low, 1.0 + settings.eps_high) * advantages
    objective = torch.minimum(plain, clipped)
    is_clipped = clipped < plain
    is_dual = torch.zeros_like(is_clipped)
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        is_dual = (advantages < 0) & (floor > objective)
        objective = torch.where(is_dual, floor, objective)
    per_token = masked(-objective, inputs.action_mask)
    flags = {"clip_fraction": is_clipped, "dual_clip_fraction": is_dual}
    return PolicyLossOutput(per_token, ratio_stats(log_rho, rho, inputs.action_mask, flags))


def ratio_stats(log_rho: Tensor, rho: Tensor, mask: Tensor, flags: dict[str, Tensor]) -> TokenStats:
    """Sums of the flags, of rho, of -log rho (k1 of KL(pi_old || pi)), and the largest |log rho|, over the mask."""
    with torch.no_grad():
        on = mask.bool()
        size = masked(log_rho.double().abs(), on)
        values = {
            **{name: flag.double() for name, flag in flags.items()},
            "ratio": rho.double(),
            "old_kl": -log_rho.double(),
            "ratio_saturated": (size > LOG_RATIO_LIMIT).double(),
            "tokens": on.double(),
        }
        sums = {name: masked(value, on).sum() for name, value in values.items()}
        largest = size.max() if size.numel() else size.new_zeros(())
        return TokenStats(sums, {"log_ratio_abs": largest})


def _log_rho(inputs: PolicyLossInputs) -> Tensor:
    old = inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs
    return log_ratio(inputs.logprobs, old.detach(), inputs.action_mask)


def _advantages(inputs: PolicyLossInputs) -> Tensor:
    return masked(inputs.advantages.detach().to(inputs.logprobs.dtype), inputs.action_mask)
