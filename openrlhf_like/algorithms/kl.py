"""Per-token KL estimators and the controllers of their coefficient.

With d = log pi - log pi_ref on a token drawn from pi, every estimator's *value* says something about
KL(pi || pi_ref); what a *gradient* sees is another matter and depends on where the term is put:

===========  =======================================  ===================================
estimator    in the reward (expected gradient)        in the loss (expected gradient)
===========  =======================================  ===================================
``k1``       the reverse KL's, unbiased               zero: refused
``k2``       biased                                   the reverse KL's, unbiased
``k3``       biased                                   the forward KL's, KL(pi_ref || pi)
===========  =======================================  ===================================

Source: J. Schulman, "Approximating KL divergence" (2020), for the estimators; the gradients follow by
differentiating under the expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.stats import LOG_RATIO_LIMIT, log_ratio

KlFunction = Callable[[Tensor], Tensor]
KL_ESTIMATORS: Registry[KlFunction] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(d: Tensor) -> Tensor:
    """d; any shape. Unbiased for the reverse KL, may be negative."""
    return d


@KL_ESTIMATORS.register("k2")
def k2(d: Tensor) -> Tensor:
    """d^2 / 2; any shape."""
    return 0.5 * d * d


@KL_ESTIMATORS.register("k3")
def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d; any shape, never below 0 but for rounding.

    For -d above LOG_RATIO_LIMIT the exponential goes on as its tangent: a clamp would leave only the gradient of
    ``+ d`` there, which points away from the reference.
    """
    x = -d
    # expm1, because exp(x) - 1 loses every digit of a small d in fp32. where() picks one branch in the backward pass
    # too: adding a tangent term that cancels inside the limit would leave rounding of the size e^20 * eps.
    inside = torch.expm1(x.clamp(max=LOG_RATIO_LIMIT))
    tangent = math.exp(LOG_RATIO_LIMIT) * (x - LOG_RATIO_LIMIT + 1.0) - 1.0
    return torch.where(x > LOG_RATIO_LIMIT, tangent, inside) + d


def kl_per_token(estimator: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimator on every action token.

    Args:
        estimator: ``k1``, ``k2`` or ``k3``.
        logprobs, ref_logprobs: log pi and log pi_ref of the sampled tokens, one shape, e.g. [B, T].
        mask: same shape; 1 on action tokens.

    Returns:
        Same shape; 0 outside the mask. Differentiable in ``logprobs``.
    """
    return KL_ESTIMATORS.get(estimator)(log_ratio(logprobs, ref_logprobs.detach(), mask))


def check_kl_mode(estimator: str, use_loss: bool) -> None:
    """Raise ValueError for an unknown estimator, and for k1 in the loss, whose expected gradient is zero."""
    KL_ESTIMATORS.get(estimator)
    if use_loss and estimator == "k1":
        raise ValueError("--algo.kl.estimator k1 with --algo.kl.use_loss: its expected gradient is zero; use k2 or k3")


class KLController(Protocol):
    """Owner of beta, the KL coefficient."""

    @property
    def value(self) -> float: ...

    def update(self, kl: float, n_trajectories: int) -> float: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKLController:
    """beta stays what it is."""

    kind = "fixed"

    def __init__(self, init_coef: float) -> None:
        self._value = _checked_coef(init_coef)

    @property
    def value(self) -> float:
        return self._value

    def update(self, kl: float, n_trajectories: int) -> float:
        """Returns beta, unchanged."""
        return self._value

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: a resumed run uses the coefficient it is given."""
        _check_kind(state, self.kind)


class AdaptiveKLController:
    """beta *= 1 + clip(kl / target - 1, +-0.2) * min(1, n_trajectories / horizon).

    Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2; the share of the
    horizon is capped at 1, so that one large rollout cannot move beta by more than 20%.
    """

    kind = "adaptive"

    def __init__(self, init_coef: float, target: float, horizon: int) -> None:
        self._value = _checked_coef(init_coef)
        if not (math.isfinite(target) and target > 0):
            raise ValueError(f"--algo.kl.target is {target}: want a positive number")
        if horizon <= 0:
            raise ValueError(f"--algo.kl.horizon is {horizon}: want a positive number of trajectories")
        self.target = float(target)
        self.horizon = int(horizon)

    @property
    def value(self) -> float:
        return self._value

    def update(self, kl: float, n_trajectories: int) -> float:
        """Move beta after a rollout.

        Args:
            kl: token mean of k1 over the rollout's action tokens, whichever estimator the loss uses.
            n_trajectories: trajectories in the rollout, all workers together.

        Returns:
            The new beta. Raises ValueError for a KL that is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL controller was given a KL of {kl}")
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self._value *= 1.0 + error * min(1.0, n_trajectories / self.horizon)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore beta; target and horizon come from the configuration."""
        _check_kind(state, self.kind)
        self._value = _checked_coef(state["value"])


def make_kl_controller(init_coef: float, target: float | None, horizon: int) -> KLController:
    """Adaptive when a target is given, else fixed."""
    return FixedKLController(init_coef) if target is None else AdaptiveKLController(init_coef, target, horizon)


def _checked_coef(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"--algo.kl.init_coef is {value}: want a number of at least 0")
    return float(value)


def _check_kind(state: dict[str, Any], kind: str) -> None:
    if state.get("kind") != kind:
        raise ValueError(
            f"the checkpoint's KL controller is {state.get('kind')!r}, this run's is {kind!r}; "
            "--algo.kl.target must be given in both or in neither"
        )
