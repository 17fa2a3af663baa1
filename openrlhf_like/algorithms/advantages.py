"""Rewards to advantages: one credit a trajectory from its group, then one advantage a token, then whitening.

Everything here is float64, and everything is 0 outside the action mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.rewards import as_reward_tensor
from openrlhf_like.algorithms.stats import masked

CreditFunction = Callable[[Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class AdvantageEstimator:
    """What the pipeline must know of an estimator.

    Attributes:
        credit: (rewards [n], lengths [n], no_std_norm) -> credit [n], for the valid members of one group.
        group: the credit compares the members of a group, so a group needs two; gamma is 1.
        whitened: token advantages are whitened over the whole rollout.
        needs_values: token advantages come from a critic through :func:`gae`.
    """

    name: str
    credit: CreditFunction
    group: bool
    whitened: bool
    needs_values: bool = False

    def effective_gamma(self, gamma: float) -> float:
        """``gamma``, or 1 for a group estimator."""
        return 1.0 if self.group else gamma


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")


def _register(name: str, *, group: bool, whitened: bool, needs_values: bool = False):
    def wrap(credit: CreditFunction) -> CreditFunction:
        ADVANTAGE_ESTIMATORS.add(name, AdvantageEstimator(name, credit, group, whitened, needs_values))
        return credit

    return wrap


@_register("gae", group=False, whitened=True, needs_values=True)
@_register("reinforce", group=False, whitened=True)
def own_reward(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """R itself: PPO's, and REINFORCE++'s (arXiv 2501.03262), which compares over the batch by whitening."""
    return rewards


@_register("reinforce_baseline", group=True, whitened=True)
def reinforce_baseline(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """R - group mean; whitened over the batch afterwards. REINFORCE++-baseline, arXiv 2501.03262."""
    return rewards - rewards.mean()


@_register("rloo", group=True, whitened=False)
def rloo(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """R - mean of the other n - 1. Ahmadian et al. 2024, arXiv 2402.14740."""
    n = rewards.numel()
    return rewards - (rewards.sum() - rewards) / (n - 1)


@_register("group_norm", group=True, whitened=False)
def group_norm(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """(R - mean) / (std + 1e-9), unbiased std. GRPO: Shao et al. 2024, arXiv 2402.03300."""
    centered = rewards - rewards.mean()
    return centered if no_std_norm else centered / (rewards.std(unbiased=True) + 1e-9)


@_register("dr_grpo", group=True, whitened=False)
def dr_grpo(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """R - mean. Dr. GRPO: Liu et al. 2025, arXiv 2503.20783."""
    return rewards - rewards.mean()


@_register("opo", group=True, whitened=False)
def opo(rewards: Tensor, lengths: Tensor, no_std_norm: bool) -> Tensor:
    """R - sum(length * R) / sum(length). On-policy RL with optimal baseline: arXiv 2505.23585."""
    weights = lengths.to(rewards.dtype)
    if not weights.sum() > 0:
        raise ValueError("opo weighs rewards by length, and every member of a group has length 0")
    return rewards - (weights * rewards).sum() / weights.sum()


class GroupCredit(NamedTuple):
    """The first stage's result.

    Attributes:
        credit: float64 [B]; 0 where ``keep`` is false.
        keep: bool [B]; the trajectories that take part in the update.
        num_groups: groups seen.
        dropped_groups: groups without enough valid members (two for a group estimator, else one).
        zero_std_groups: kept groups of two or more valid members whose rewards are all equal.
        invalid: trajectories with an error or without a finite reward.
    """

    credit: Tensor
    keep: Tensor
    num_groups: int
    dropped_groups: int
    zero_std_groups: int
    invalid: int

    @property
    def zero_std_fraction(self) -> float:
        """``zero_std_groups`` over the groups that were kept; 0 when none was."""
        kept = self.num_groups - self.dropped_groups
        return self.zero_std_groups / kept if kept else 0.0


def group_credit(
    estimator: str,
    rewards: Sequence[float | None] | Tensor,
    group_ids: Sequence[str],
    valid: Sequence[bool] | Tensor,
    lengths: Sequence[int] | Tensor,
    no_std_norm: bool = False,
) -> GroupCredit:
    """One credit a trajectory, in the order given; rows of a group may lie anywhere.

    Args:
        estimator: a name in ADVANTAGE_ESTIMATORS.
        rewards: [B], shaped returns. None and non-finite numbers make their trajectory invalid.
        group_ids: [B], the id of the prompt instance. Neither text nor position groups anything.
        valid: [B], false for an episode that ended in an error.
        lengths: [B], action tokens.
        no_std_norm: drop the division of ``group_norm``.

    A group whose valid rewards are all equal gets exactly 0 from a group estimator. Raises ValueError for an unknown
    estimator, and when the lengths of the arguments disagree.
    """
    spec = ADVANTAGE_ESTIMATORS.get(estimator)
    reward = as_reward_tensor(rewards)
    length = torch.as_tensor(lengths)
    usable = torch.as_tensor(valid, dtype=torch.bool)
    sizes = {"rewards": len(reward), "group_ids": len(group_ids), "valid": len(usable), "lengths": len(length)}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"one entry a trajectory is needed, got {sizes}")
    ok = usable & reward.isfinite()

    members: dict[str, list[int]] = {}
    for row, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(row)

    credit = torch.zeros_like(reward)
    keep = torch.zeros_like(ok)
    dropped = zero_std = 0
    for rows in members.values():
        index = torch.tensor([r for r in rows if ok[r]], dtype=torch.long)
        if len(index) < (2 if spec.group else 1):
            dropped += 1
            continue
        own = reward[index]
        # The mean of equal numbers need not be that number in floating point; equality itself is exact.
        equal = len(index) > 1 and bool(own.max() == own.min())
        zero_std += equal
        keep[index] = True
        credit[index] = torch.zeros_like(own) if equal and spec.group else spec.credit(own, length[index], no_std_norm)
    return GroupCredit(credit, keep, len(members), dropped, zero_std, int((~ok).sum()))


def suffix_sums(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each action token on, over action tokens only.

    Args:
        rewards: [B, T] or [T].
        mask: same shape. Tokens outside it are skipped: they neither earn nor discount.
        gamma: discount from one action token to the next, in [0, 1].

    Returns:
        float64, same shape; 0 outside the mask.
    """
    reward = masked(rewards.to(torch.float64), mask)
    if gamma == 1.0:
        return masked(reward.flip(-1).cumsum(-1).flip(-1), mask)
    on = mask.bool()
    out = torch.zeros_like(reward)
    running = reward.new_zeros(reward.shape[:-1])
    for t in range(reward.shape[-1] - 1, -1, -1):
        running = torch.where(on[..., t], reward[..., t] + gamma * running, running)
        out[..., t] = running
    return masked(out, mask)


def token_rewards(credit: Tensor | float, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """r_t = -kl_coef * kl_t + [t is the last action token] * credit.

    Args:
        credit: [B] for a [B, T] mask, a scalar for a [T] one; placed on the last action token. Or the mask's full
            shape: rewards that lie on their tokens already (one a turn, on its last action token).
        kl: the mask's shape, or None when kl_coef is 0 or the KL is a term of the loss.
        mask: [B, T] or [T].
        kl_coef: beta.

    Returns:
        float64, the mask's shape; 0 outside it. Raises ValueError when a coefficient meets no KL.
    """
    on = mask.bool()
    value = torch.as_tensor(credit, dtype=torch.float64, device=mask.device)
    if value.shape == mask.shape and mask.dim() > 0:
        out = masked(value, on)
    elif value.shape == mask.shape[:-1]:
        # The last action token is the one with no action token after it.
        after = on.to(torch.int64).flip(-1).cumsum(-1).flip(-1)
        out = torch.where(on & (after == 1), value.unsqueeze(-1), torch.zeros((), dtype=torch.float64))
    else:
        raise ValueError(f"credit of shape {tuple(value.shape)} does not fit a mask of shape {tuple(mask.shape)}")
    if kl_coef == 0.0:
        return out
    if kl is None:
        raise ValueError(f"a KL coefficient of {kl_coef} in the reward needs per-token KL values")
    return out - kl_coef * masked(kl.detach().to(torch.float64), on)


def token_advantages(
    credit: Tensor | float, kl: Tensor | None, mask: Tensor, *, kl_coef: float = 0.0, gamma: float = 1.0
) -> Tensor:
    """Second stage for every estimator without a critic: suffix sums of :func:`token_rewards`.

    Takes one trajectory as [T] (its action tokens of all segments in order, mask all 1) or a padded batch as [B, T];
    arguments as in :func:`token_rewards`. Returns float64 in the mask's shape, before whitening. Pass
    ``estimator.effective_gamma(gamma)``.
    """
    return suffix_sums(token_rewards(credit, kl, mask, kl_coef), mask, gamma)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over action tokens.

    delta = r + gamma V' - V, A = delta + gamma lambda A', return = A + V, where the prime is the next *action* token
    (environment tokens are skipped) and the value after the last one is 0. Source: Schulman et al., arXiv 1506.02438.

    Args:
        rewards, values, mask: [B, T] or [T].

    Returns:
        (advantages, returns), float64, same shape, 0 outside the mask.
    """
    on = mask.bool()
    reward = masked(rewards.to(torch.float64), on)
    value = masked(values.detach().to(torch.float64), on)
    advantages = torch.zeros_like(reward)
    next_value = reward.new_zeros(reward.shape[:-1])
    next_advantage = next_value
    for t in range(reward.shape[-1] - 1, -1, -1):
        delta = reward[..., t] + gamma * next_value - value[..., t]
        advantage = delta + gamma * lambd * next_advantage
        next_advantage = torch.where(on[..., t], advantage, next_advantage)
        next_value = torch.where(on[..., t], value[..., t], next_value)
        advantages[..., t] = next_advantage
    advantages = masked(advantages, on)
    return advantages, masked(advantages + value, on)


def whiten_stats(advantages: Tensor, mask: Tensor, center: float = 0.0) -> Tensor:
    """float64 [3]: sum of (A - center), sum of its square, number of action tokens. Sums over workers by addition.

    Two passes are the accurate way: all-reduce the stats at center 0, take the mean with :func:`whiten_moments`,
    all-reduce the stats at that center, and take the moments again.
    """
    x = masked(advantages.to(torch.float64) - center, mask)
    return torch.stack([x.sum(), (x * x).sum(), mask.bool().sum().to(torch.float64)])


def whiten_moments(stats: Tensor, center: float = 0.0) -> tuple[float, float]:
    """(mean, biased variance) from summed :func:`whiten_stats` taken at ``center``; (0, 0) without tokens."""
    total, squares, count = (float(v) for v in stats)
    if count == 0:
        return 0.0, 0.0
    shift = total / count
    return center + shift, max(squares / count - shift * shift, 0.0)


def whiten(advantages: Tensor, mask: Tensor, mean: float, var: float, divide: bool = True) -> Tensor:
    """(A - mean) / sqrt(max(var, 1e-8)) on action tokens, 0 elsewhere; float64, same shape.

    ``divide`` False (``no_std_norm``) keeps the centering alone.
    """
    scale = max(var, 1e-8) ** -0.5 if divide else 1.0
    return masked((advantages.to(torch.float64) - mean) * scale, mask)
