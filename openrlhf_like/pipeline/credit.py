"""From scored rows to one credit a trajectory, on the driver: scalars only, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf_like.algorithms.advantages import GroupCredit, group_credit
from openrlhf_like.algorithms.rewards import ShapedRewards, shape_rewards
from openrlhf_like.pipeline.rollout_phase import Rollout, Row


@dataclass
class Credits:
    """``rows`` are those that take part in the update, in order; ``credit[k]`` belongs to ``rows[k]``."""

    rows: list[Row]
    credit: list[float]
    metrics: dict[str, float]


def assign_credit(cfg: Any, rollout: Rollout) -> Credits:
    """Penalties, clip, group statistics: in this order; see docs/algorithms.md."""
    rows = rollout.rows
    shaped = shape_rewards(
        [row.summary.reward for row in rows],
        [row.summary.num_actions for row in rows],
        [row.summary.truncated for row in rows],
        max_new_tokens=cfg.rollout.max_new_tokens or cfg.data.max_len,
        overlong_buffer_len=cfg.reward.overlong_buffer_len,
        overlong_penalty_factor=cfg.reward.overlong_penalty_factor,
        stop_properly_penalty_coef=cfg.reward.stop_properly_penalty_coef,
        clip_range=tuple(cfg.reward.clip_range),
    )
    groups = group_credit(
        cfg.algo.advantage.estimator,
        shaped.rewards,
        [row.group for row in rows],
        [row.summary.error is None for row in rows],
        [row.summary.num_actions for row in rows],
        no_std_norm=cfg.algo.advantage.no_std_norm,
    )
    kept = [i for i, keep in enumerate(groups.keep.tolist()) if keep]
    return Credits(
        rows=[rows[i] for i in kept],
        credit=[float(groups.credit[i]) for i in kept],
        metrics=rollout_metrics(rollout, shaped, groups),
    )


def rollout_metrics(rollout: Rollout, shaped: ShapedRewards, groups: GroupCredit) -> dict[str, float]:
    """``reward/*`` and ``rollout/*`` of a step, over the rows that dynamic filtering kept."""
    summaries = [row.summary for row in rollout.rows]
    answered = [s for s in summaries if s.num_actions > 0]
    rewards = [s.reward for s in summaries if s.error is None and math.isfinite(s.reward)]
    lengths = [s.num_actions for s in answered]
    out = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/shaped_mean": _mean([r for r in shaped.rewards.tolist() if math.isfinite(r)]),
        "reward/overlong_penalty_mean": 0.0 - _mean(shaped.overlong.tolist()),
        "reward/group_zero_std_fraction": groups.zero_std_fraction,
        "reward/dropped_groups": groups.dropped_groups,
        "reward/failed_fraction": groups.invalid / len(summaries) if summaries else 0.0,
        "rollout/response_length": _mean(lengths),
        "rollout/response_length_max": max(lengths, default=0),
        "rollout/truncated_fraction": _mean([float(s.truncated) for s in answered]),
        "rollout/turns": _mean([s.turns for s in answered]),
        "rollout/num_samples": len(summaries),
        "rollout/filtered_groups": rollout.filtered,
        "rollout/rounds": rollout.rounds,
    }
    names = sorted({name for s in summaries for name in s.metrics})
    for name in names:
        out[f"reward/extra/{name}"] = _mean([s.metrics[name] for s in summaries if name in s.metrics])
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
