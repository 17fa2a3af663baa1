"""From prompts to scored groups: generation, reward, and with dynamic filtering as many rounds as it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from openrlhf_like.algorithms.filtering import DynamicFilter, FilterStatus
from openrlhf_like.cluster.host import RemoteActor
from openrlhf_like.cluster.wait import wait_for
from openrlhf_like.observe import RunProgress, Timer
from openrlhf_like.pipeline.launch import limit
from openrlhf_like.pipeline.prompts import PromptFeed
from openrlhf_like.rollout.dispatch import RolloutDispatcher
from openrlhf_like.types import Prompt, SamplingSpec, TrainingAborted, TrajectorySummary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """Where one trajectory lies, and what the driver knows of it."""

    block: int
    index: int
    group: str
    summary: TrajectorySummary


@dataclass
class Rollout:
    """The scored trajectories of one step.

    Attributes:
        blocks: references to lists of trajectories; the driver never fetches them.
        rows: those that may be trained on, groups together.
        groups: groups sampled, filtered ones included.
        filtered: groups that dynamic filtering left out.
        rounds: how often prompts were sent to the engines.
    """

    blocks: list[Any] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    groups: int = 0
    filtered: int = 0
    rounds: int = 0


class RolloutPhase:
    """Samples and scores; owns the dynamic filter.

    Args:
        cfg: resolved configuration.
        dispatcher: to the engines.
        rewards: reward actors.
        progress: inner bars.
        timer: ``time/generate`` and ``time/reward``.
    """

    def __init__(
        self,
        cfg: Any,
        dispatcher: RolloutDispatcher,
        rewards: Sequence[RemoteActor],
        progress: RunProgress,
        timer: Timer,
    ) -> None:
        self.cfg, self.dispatcher, self.rewards = cfg, dispatcher, list(rewards)
        self.progress, self.timer = progress, timer
        low, high = cfg.algo.dynamic_filtering_range
        self.filter = DynamicFilter(low, high, cfg.rollout.batch_size, cfg.algo.dynamic_filtering_max_rounds)
        self.sampling = SamplingSpec(
            max_tokens=cfg.rollout.max_new_tokens or 0, temperature=cfg.rollout.temperature, top_p=cfg.rollout.top_p
        )

    def collect(self, step: int, feed: PromptFeed) -> Rollout | None:
        """The rollout of a step; None when the prompts are used up.

        Raises:
            TrainingAborted: dynamic filtering accepted nothing for ``--algo.dynamic_filtering_max_rounds`` rounds.
        """
        if not self.cfg.algo.dynamic_filtering_enable:
            prompts = feed.next_batch()
            if prompts is None:
                return None
            rollout = Rollout()
            self._round(step, prompts, rollout)
            return rollout
        return self._collect_filtered(step, feed)

    def _collect_filtered(self, step: int, feed: PromptFeed) -> Rollout | None:
        rollout = Rollout()
        waiting: dict[str, list[Row]] = {}
        while True:
            status = self.filter.status(prompts_left=feed.has_more())
            if status is FilterStatus.STUCK:
                raise TrainingAborted(self.filter.message())
            if status in (FilterStatus.READY, FilterStatus.PARTIAL, FilterStatus.EMPTY):
                break
            prompts = feed.next_batch()
            assert prompts is not None  # NEED_MORE is only said while there are prompts
            rows = self._round(step, prompts, rollout)
            groups: dict[str, list[Row]] = {}
            for row in rows:
                groups.setdefault(row.group, []).append(row)
            self.filter.start(groups)
            for name, members in groups.items():
                verdict = self.filter.offer(
                    name,
                    [r.summary.score for r in members],
                    [r.summary.reward for r in members],
                    [r.summary.error is None for r in members],
                )
                if verdict.keep:
                    waiting[name] = members
        if status is FilterStatus.EMPTY:
            if rollout.groups:
                logger.warning("the prompts ended with every group filtered out: %s", self.filter.message())
            return None
        taken = self.filter.take()
        surplus = self.filter.discard()  # sampled by weights that are about to change: strictly on-policy
        rollout.rows = [row for name in taken for row in waiting[name]]
        rollout.filtered = rollout.groups - len(taken) - len(surplus)
        return rollout

    def _round(self, step: int, prompts: Sequence[Prompt], rollout: Rollout) -> list[Row]:
        """Sample and score one batch of prompts; adds its blocks (and, unfiltered, its rows) to the rollout."""
        phase = f"train.{rollout.rounds}" if rollout.rounds else "train"
        n = self.cfg.rollout.n_samples_per_prompt
        scored = self.score(self.generate(prompts, n, self.sampling, step, phase))
        first = len(rollout.blocks)
        rows = [
            Row(first + b, i, f"{rollout.rounds}/{summary.group_id}", summary)
            for b, (_, summaries) in enumerate(scored)
            for i, summary in enumerate(summaries)
        ]
        rollout.blocks += [ref for ref, _ in scored]
        rollout.groups += len(prompts)
        rollout.rounds += 1
        if not self.cfg.algo.dynamic_filtering_enable:
            rollout.rows = rows
        return rows

    def generate(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingSpec, step: int, phase: str
    ) -> list[tuple[Any, list[TrajectorySummary]]]:
        """Blocks of trajectories, without rewards."""
        with self.timer("generate"), self.progress.phase("rollout", len(prompts) * n) as bar:
            return self.dispatcher.generate(prompts, n, sampling, step, phase, on_progress=bar.update)

    def score(
        self, blocks: Sequence[tuple[Any, list[TrajectorySummary]]]
    ) -> list[tuple[Any, list[TrajectorySummary]]]:
        """The same blocks with rewards. Raises what the reward stage raises (TrainingAborted, UserError)."""
        total = sum(len(summaries) for _, summaries in blocks)
        with self.timer("reward"), self.progress.phase("reward", total) as bar:
            refs = []
            for i, (block, _) in enumerate(blocks):
                actor = self.rewards[i % len(self.rewards)]
                refs.append(actor.handle.score.options(num_returns=2).remote(block))
            # A call has its own limit inside the actor, and twice that for finding the sample at fault; this one is
            # for an actor that no longer answers at all.
            calls = -(-total // max(1, self.cfg.reward.batch_size))
            summaries = wait_for(
                [summary for _, summary in refs],
                "score a block",
                3 * self.cfg.timeout.reward * max(1, calls) + self.cfg.timeout.init,
                "timeout.reward",
                names=[self.rewards[i % len(self.rewards)].label for i in range(len(refs))],
                explain=lambda i, error: self.rewards[i % len(self.rewards)].explain_death(i, error),
                on_done=lambda done, of: bar.update(total * done // max(1, of)),
            )
            return [(ref, summary) for (ref, _), summary in zip(refs, summaries, strict=True)]


class RetryCount:
    """How often reward servers had to be asked again, a step."""

    def __init__(self, cfg: Any, rewards: Sequence[RemoteActor]) -> None:
        self.cfg, self.rewards, self._seen = cfg, list(rewards), 0

    def since_last(self) -> int:
        """Retries since the last call."""
        counts = wait_for(
            [actor.submit("retries") for actor in self.rewards],
            "count its retries",
            names=[actor.label for actor in self.rewards],
            **limit(self.cfg, "reward"),
        )
        new, self._seen = sum(counts) - self._seen, sum(counts)
        return new


def check_rewards(cfg: Any, rewards: Sequence[RemoteActor]) -> None:
    """Load every reward source now, so that what is wrong with it shows before training."""
    wait_for(
        [actor.submit("check") for actor in rewards],
        "load the reward",
        names=[actor.label for actor in rewards],
        **limit(cfg, "init"),
    )


def close_rewards(cfg: Any, rewards: Sequence[RemoteActor]) -> None:
    """End the processes that run user code, and what those started."""
    ray.wait([a.submit("close") for a in rewards], num_returns=len(rewards), timeout=cfg.timeout.shutdown)
