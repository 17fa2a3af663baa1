"""Health checks: what usually goes wrong without an error, said loudly and with the flag to turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealthLimits:
    """When a metric is unhealthy.

    Attributes:
        truncated_fraction: share of responses cut at their limit, above which most of the signal is about length.
        logprob_diff_mean: mean |log pi_old - log mu|; about 1e-5 in fp32 and 0.01 in bf16 when engine and trainer
            hold the same weights.
        kl_ref: mean KL to the reference (nats a token).
        approx_kl: mean KL of one update (nats a token).
        failed_fraction: share of samples without a usable reward.
    """

    truncated_fraction: float = 0.9
    logprob_diff_mean: float = 0.05
    kl_ref: float = 10.0
    approx_kl: float = 0.5
    failed_fraction: float = 0.1


@dataclass(frozen=True)
class _Check:
    kind: str
    metric: str
    unhealthy: Callable[[float, HealthLimits], bool]
    message: str


def _not_finite(value: float, limits: HealthLimits) -> bool:
    return not math.isfinite(value)


_CHECKS = (
    _Check(
        "truncated",
        "rollout/truncated_fraction",
        lambda v, limits: v > limits.truncated_fraction,
        "{value:.0%} of the responses were cut at their length limit: raise --rollout.max_new_tokens, or teach the "
        "model to end its answers first",
    ),
    _Check(
        "no_signal",
        "reward/group_zero_std_fraction",
        lambda v, limits: v >= 1.0,
        "in every group all rewards are equal, so that nothing can be learned: check the reward function, raise "
        "--rollout.temperature or --rollout.n_samples_per_prompt, or take prompts of another difficulty",
    ),
    _Check(
        "reward_failed",
        "reward/failed_fraction",
        lambda v, limits: v > limits.failed_fraction,
        "{value:.0%} of the samples got no usable reward and were left out: see error in run/rollouts, and "
        "--timeout.reward if calls ran out of time",
    ),
    _Check(
        "engine_differs",
        "rollout/logprob_diff_mean",
        lambda v, limits: not v <= limits.logprob_diff_mean,
        "engine and trainer disagree on the log-probabilities of the same tokens by {value:.3g} on average: run with "
        "--vllm.check_weight_sync, compare --ds.param_dtype, or turn on --algo.advantage.is_correction_enable",
    ),
    _Check(
        "grad_norm",
        "policy/grad_norm",
        _not_finite,
        "the gradient norm is not finite: lower --actor.adam.lr, or use --ds.param_dtype bf16 or fp32 instead of fp16",
    ),
    _Check(
        "grad_norm",
        "train/grad_norm",
        _not_finite,
        "the gradient norm is not finite: lower --adam.lr, or use --ds.param_dtype bf16 or fp32 instead of fp16",
    ),
    _Check(
        "kl_ref",
        "policy/kl_ref",
        lambda v, limits: not abs(v) <= limits.kl_ref,
        "the policy is {value:.3g} nats a token away from its reference: lower --actor.adam.lr or raise "
        "--algo.kl.init_coef",
    ),
    _Check(
        "approx_kl",
        "policy/approx_kl",
        lambda v, limits: not abs(v) <= limits.approx_kl,
        "one update moved the policy by {value:.3g} nats a token: lower --actor.adam.lr, --train.max_epochs or "
        "--actor.eps_clip",
    ),
)


class HealthMonitor:
    """Looks at a step's metrics and warns, each kind of trouble at most once in ``repeat_every`` steps."""

    def __init__(self, limits: HealthLimits | None = None, repeat_every: int = 50) -> None:
        self.limits = limits or HealthLimits()
        self.repeat_every = repeat_every
        self._last_warned: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Log and return the warnings due at this step.

        Args:
            metrics: the step's merged record; null counts as not finite, a missing metric is not checked.
        """
        messages = []
        for check in _CHECKS:
            if check.metric not in metrics:
                continue
            raw = metrics[check.metric]
            value = math.nan if raw is None else float(raw)
            if check.unhealthy(value, self.limits) and self._due(check.kind, step):
                messages.append(f"step {step}: {check.message.format(value=value)} ({check.metric})")
        for message in messages:
            logger.warning(message)
        return messages

    def _due(self, kind: str, step: int) -> bool:
        last = self._last_warned.get(kind)
        if last is not None and step - last < self.repeat_every:
            return False
        self._last_warned[kind] = step
        return True
