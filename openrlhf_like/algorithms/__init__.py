"""Rewards to advantages to losses: pure functions on tensors. Imports torch and nothing else of ours."""

from openrlhf_like.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    GroupCredit,
    gae,
    group_credit,
    suffix_sums,
    token_advantages,
    token_rewards,
    whiten,
    whiten_moments,
    whiten_stats,
)
from openrlhf_like.algorithms.aggregation import AGGREGATIONS, aggregate
from openrlhf_like.algorithms.correction import CORRECTIONS, correction_stats, correction_weights
from openrlhf_like.algorithms.filtering import DynamicFilter, FilterStatus, GroupVerdict, judge_group
from openrlhf_like.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    KLController,
    check_kl_mode,
    kl_per_token,
    make_kl_controller,
)
from openrlhf_like.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutput,
    PolicyLossSettings,
    ppo,
)
from openrlhf_like.algorithms.registry import Registry
from openrlhf_like.algorithms.rewards import ShapedRewards, as_reward_tensor, shape_rewards
from openrlhf_like.algorithms.stats import TokenStats, merge_stats, sequence_mean

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "DynamicFilter",
    "FilterStatus",
    "FixedKLController",
    "GroupCredit",
    "GroupVerdict",
    "KLController",
    "PolicyLossInputs",
    "PolicyLossOutput",
    "PolicyLossSettings",
    "Registry",
    "ShapedRewards",
    "TokenStats",
    "aggregate",
    "as_reward_tensor",
    "check_kl_mode",
    "correction_stats",
    "correction_weights",
    "gae",
    "group_credit",
    "judge_group",
    "kl_per_token",
    "make_kl_controller",
    "merge_stats",
    "ppo",
    "sequence_mean",
    "shape_rewards",
    "suffix_sums",
    "token_advantages",
    "token_rewards",
    "whiten",
    "whiten_moments",
    "whiten_stats",
]
