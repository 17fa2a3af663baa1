"""Trajectories in, scored trajectories out; failures are counted, logged with their sample, and limited in share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from openrlhf_like.reward.base import RewardFunction, RewardRequest, RewardResult
from openrlhf_like.types import TrainingAborted, Trajectory

logger = logging.getLogger(__name__)

_LOGGED_PER_BLOCK = 5
_TAIL = 200


@dataclass
class BlockStats:
    """Counts of one block, or of a run.

    Attributes:
        scored: given a finite reward.
        failed: the source raised, hung, crashed or could not be reached.
        excluded: the source answered without a finite number (None, NaN, infinity).
        skipped: already had an error or a reward when they came, and were not sent to the source.
        retries: HTTP requests repeated.
        seconds: wall time.
    """

    scored: int = 0
    failed: int = 0
    excluded: int = 0
    skipped: int = 0
    retries: int = 0
    seconds: float = 0.0

    def add(self, other: BlockStats) -> None:
        """Add the other's counts to these."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    @property
    def attempted(self) -> int:
        return self.scored + self.failed + self.excluded

    @property
    def without_reward(self) -> int:
        return self.failed + self.excluded


class RewardStage:
    """Scores blocks with a ``RewardFunction``, ``batch_size`` samples a call, the calls of a block together.

    The share of samples without a reward is judged after each block, over the last ``window`` blocks: a source that
    breaks after a day of good work ends the run as soon as one that never worked, and a short outage does not.

    Args:
        source: where rewards come from.
        batch_size: samples a call (``--reward.batch_size``).
        max_failure_fraction: the share that ends the run when passed (``--reward.max_failure_fraction``).
        window: blocks looked back on. ``min_samples``: no judgement on fewer.
    """

    def __init__(
        self,
        source: RewardFunction,
        *,
        batch_size: int = 64,
        max_failure_fraction: float = 0.5,
        window: int = 32,
        min_samples: int = 16,
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.max_failure_fraction = max_failure_fraction
        self.min_samples = min_samples
        self.total = BlockStats()
        self.last_error = ""
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)  # (without reward, attempted) of each block

    async def score_block(self, block: list[Trajectory]) -> tuple[list[Trajectory], BlockStats]:
        """The block with ``reward``, ``scores``, ``metrics`` and ``logs`` set, or ``error`` where there is no reward.

        Trajectories that come with an error or a reward are passed through. The given records are not changed.

        Raises:
            TrainingAborted: too large a share of the latest samples has no reward.
            UserError: the source breaks its contract.
        """
        started = time.monotonic()
        out = list(block)
        todo = [i for i, t in enumerate(block) if t.error is None and t.reward is None]
        batches = [todo[i : i + self.batch_size] for i in range(0, len(todo), self.batch_size)]
        answers = await asyncio.gather(*(self.source.score(_request([block[i] for i in b])) for b in batches))
        stats = BlockStats(skipped=len(block) - len(todo))
        for batch, results in zip(batches, answers, strict=True):
            for i, result in zip(batch, results, strict=True):
                out[i] = _scored(block[i], result)
                _count(stats, result)
        stats.seconds = time.monotonic() - started
        self._log_failures([out[i] for i in todo if out[i].error is not None])
        self.total.add(stats)
        self._recent.append((stats.without_reward, stats.attempted))
        self._judge()
        return out, stats

    def _log_failures(self, failed: list[Trajectory]) -> None:
        for t in failed[:_LOGGED_PER_BLOCK]:
            logger.warning(
                "no reward for trajectory %s: %s | prompt ends %r | response ends %r",
                t.trajectory_id,
                t.error,
                t.prompt[-_TAIL:],
                t.response[-_TAIL:],
            )
        if len(failed) > _LOGGED_PER_BLOCK:
            logger.warning("no reward for %d more trajectories of this block", len(failed) - _LOGGED_PER_BLOCK)
        if failed:
            self.last_error = failed[-1].error or ""

    def _judge(self) -> None:
        bad, n = (sum(counts) for counts in zip(*self._recent, strict=True))
        if n >= self.min_samples and bad > self.max_failure_fraction * n:
            raise TrainingAborted(
                f"{bad} of the last {n} samples have no reward, more than the share of "
                f"{self.max_failure_fraction:g} that --reward.max_failure_fraction allows; the last: {self.last_error}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The run's counts."""
        return {"total": asdict(self.total), "recent": list(self._recent), "last_error": self.last_error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the counts of an interrupted run."""
        self.total = BlockStats(**state["total"])
        self._recent.extend(tuple(counts) for counts in state["recent"])
        self.last_error = state["last_error"]


def _request(trajectories: list[Trajectory]) -> RewardRequest:
    return RewardRequest(
        queries=[t.prompt + t.response for t in trajectories],
        prompts=[t.prompt for t in trajectories],
        labels=[t.label for t in trajectories],
        responses=[t.response for t in trajectories],
        metadata=[t.metadata for t in trajectories],
    )


def _scored(t: Trajectory, result: RewardResult) -> Trajectory:
    metrics, logs = {**t.metrics, **result.metrics}, {**t.logs, **result.logs}
    if result.error is not None:
        return replace(t, error=f"reward: {result.error}", metrics=metrics, logs=logs)
    return replace(t, reward=result.reward, scores=result.score, metrics=metrics, logs=logs)


def _count(stats: BlockStats, result: RewardResult) -> None:
    stats.retries += result.retries
    if result.error is None:
        stats.scored += 1
    elif result.excluded:
        stats.excluded += 1
    else:
        stats.failed += 1
