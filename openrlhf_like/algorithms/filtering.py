"""Dynamic filtering: groups that carry no learning signal are sampled again instead of trained on.

The rule is OpenRLHF's: a group is kept when its mean score lies strictly inside the range, with a margin for rounding:
``low + 1e-6 < mean < high - 1e-6``. With scores in {0, 1} and the range (0, 1) this drops exactly the groups that are
all right or all wrong (DAPO, arXiv 2503.14476). A group of equal scores inside the range, say all 0.5, is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_MARGIN = 1e-6


@dataclass(frozen=True)
class GroupVerdict:
    """Whether a group is kept; ``mean`` is NaN without a usable score, ``reason`` is '' for a kept group."""

    keep: bool
    mean: float
    all_equal: bool
    reason: str


def judge_group(
    scores: Sequence[float | None],
    rewards: Sequence[float | None],
    valid: Sequence[bool],
    low: float,
    high: float,
) -> GroupVerdict:
    """Apply the rule to one group.

    Args:
        scores: one a member; where a score is None or not finite, the member's reward stands in.
        rewards: one a member.
        valid: false for members that ended in an error: they leave the mean.
        low, high: the open range.

    Returns:
        The verdict. A group with fewer than two usable members is rejected: no estimator could use it.
    """
    values = [v for s, r, ok in zip(scores, rewards, valid, strict=True) if ok and (v := _usable(s, r)) is not None]
    if len(values) < 2:
        return GroupVerdict(False, math.nan, False, "fewer than two members with a finite score")
    # fsum: the mean of eight times 0.1 must not depend on their order.
    mean = math.fsum(values) / len(values)
    equal = max(values) == min(values)
    if low + _MARGIN < mean < high - _MARGIN:
        return GroupVerdict(True, mean, equal, "")
    return GroupVerdict(False, mean, equal, "all rewards equal" if equal else "mean score outside the range")


def _usable(score: float | None, reward: float | None) -> float | None:
    for value in (score, reward):
        if value is not None and math.isfinite(value):
            return float(value)
    return None


class FilterStatus(Enum):
    """What the caller should do next.

    READY: enough groups are accepted, take them. WAITING: groups are in flight, collect them. NEED_MORE: start more
    prompts. PARTIAL: prompts ran out, take the groups there are. EMPTY: prompts ran out and none was accepted.
    STUCK: the stated number of rounds brought nothing, stop the run with ``message()``.
    """

    READY = "ready"
    WAITING = "waiting"
    NEED_MORE = "need_more"
    PARTIAL = "partial"
    EMPTY = "empty"
    STUCK = "stuck"


class DynamicFilter:
    """Accepted groups across rounds of sampling, until a batch is full.

    Use: ``start(ids)`` when prompts go to the engines, ``offer(id, ...)`` for each group that comes back,
    ``status(prompts_left)``, and ``take()`` on READY or PARTIAL. A round is ``groups_needed`` judged groups, or fewer
    when nothing is in flight any more; ``max_empty_rounds`` rounds in a row without an accepted group end in STUCK.
    """

    def __init__(self, low: float, high: float, groups_needed: int, max_empty_rounds: int = 10) -> None:
        if not low < high:
            raise ValueError(f"--algo.dynamic_filtering_range is {low} {high}: want low < high")
        if groups_needed < 1:
            raise ValueError(f"a batch needs at least one group, got {groups_needed}")
        if max_empty_rounds < 1:
            raise ValueError(f"--algo.dynamic_filtering_max_rounds is {max_empty_rounds}: want at least 1")
        self.low, self.high = float(low), float(high)
        self.groups_needed = groups_needed
        self.max_empty_rounds = max_empty_rounds
        self.accepted: list[str] = []
        self.empty_rounds = 0
        self.num_accepted = 0
        self.num_rejected = 0
        self._pending: set[str] = set()
        self._round_accepted = 0
        self._round_offered = 0
        self._reasons: dict[str, int] = {}
        self._mean_range: tuple[float, float] | None = None

    @property
    def pending(self) -> int:
        """Groups in flight."""
        return len(self._pending)

    def start(self, group_ids: Iterable[str]) -> None:
        """Groups went to the engines. Raises ValueError for one that is in flight or accepted already."""
        for group_id in group_ids:
            if group_id in self._pending or group_id in self.accepted:
                raise ValueError(f"group {group_id} is in flight or accepted already")
            self._pending.add(group_id)

    def offer(
        self,
        group_id: str,
        scores: Sequence[float | None],
        rewards: Sequence[float | None],
        valid: Sequence[bool] | None = None,
    ) -> GroupVerdict:
        """A group came back scored: judge it, and keep its id when it is accepted.

        Arguments as in :func:`judge_group`. Raises ValueError for a group that was not started.
        """
        if group_id not in self._pending:
            raise ValueError(f"group {group_id} was not started")
        verdict = judge_group(scores, rewards, [True] * len(rewards) if valid is None else valid, self.low, self.high)
        self._pending.remove(group_id)
        self._round_offered += 1
        if verdict.keep:
            self.accepted.append(group_id)
            self.num_accepted += 1
            self._round_accepted += 1
        else:
            self.num_rejected += 1
            self._note_rejection(verdict)
        if not self._pending or self._round_offered >= self.groups_needed:
            self._end_round()
        return verdict

    def status(self, prompts_left: bool) -> FilterStatus:
        """What to do next; ``prompts_left`` says whether there is another prompt to start.

        Groups in flight are waited for before prompts that ran out end anything, so none of them is lost.
        """
        if len(self.accepted) >= self.groups_needed:
            return FilterStatus.READY
        if self.empty_rounds >= self.max_empty_rounds and (prompts_left or not self._pending):
            return FilterStatus.STUCK
        if self._pending:
            return FilterStatus.WAITING
        if prompts_left:
            return FilterStatus.NEED_MORE
        return FilterStatus.PARTIAL if self.accepted else FilterStatus.EMPTY

    def take(self) -> list[str]:
        """Up to ``groups_needed`` accepted ids, in the order they were accepted; the rest stay for the next batch."""
        taken, self.accepted = self.accepted[: self.groups_needed], self.accepted[self.groups_needed :]
        self._reasons, self._mean_range = {}, None
        return taken

    def discard(self) -> list[str]:
        """Drop and return what is accepted: for callers whose weights moved on, as surplus would be off-policy."""
        dropped, self.accepted = self.accepted, []
        return dropped

    def message(self) -> str:
        """Why nothing was accepted, in one line."""
        total = sum(self._reasons.values())
        parts = ", ".join(f"{reason} in {count}" for reason, count in sorted(self._reasons.items()))
        span = ""
        if self._mean_range is not None:
            span = f"; mean scores {self._mean_range[0]:.4g} to {self._mean_range[1]:.4g}"
        return (
            f"dynamic filtering: {self.empty_rounds} rounds in a row accepted no group; of {total} rejected groups: "
            f"{parts or 'none'}{span}, outside --algo.dynamic_filtering_range {self.low:g} {self.high:g}; make the "
            "prompts easier or harder, widen the range, or raise --algo.dynamic_filtering_max_rounds"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but groups in flight: those are started again by whoever owns the position in the data."""
        return {
            "accepted": list(self.accepted),
            "empty_rounds": self.empty_rounds,
            "num_accepted": self.num_accepted,
            "num_rejected": self.num_rejected,
            "reasons": dict(self._reasons),
            "mean_range": self._mean_range,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; nothing is in flight afterwards."""
        self.accepted = list(state["accepted"])
        self.empty_rounds = int(state["empty_rounds"])
        self.num_accepted = int(state["num_accepted"])
        self.num_rejected = int(state["num_rejected"])
        self._reasons = dict(state["reasons"])
        span = state["mean_range"]
        self._mean_range = None if span is None else (float(span[0]), float(span[1]))
        self._pending.clear()
        self._round_accepted = self._round_offered = 0

    def _end_round(self) -> None:
        self.empty_rounds = 0 if self._round_accepted else self.empty_rounds + 1
        self._round_accepted = self._round_offered = 0

    def _note_rejection(self, verdict: GroupVerdict) -> None:
        self._reasons[verdict.reason] = self._reasons.get(verdict.reason, 0) + 1
        if not math.isnan(verdict.mean):
            low, high = self._mean_range or (verdict.mean, verdict.mean)
            self._mean_range = (min(low, verdict.mean), max(high, verdict.mean))
