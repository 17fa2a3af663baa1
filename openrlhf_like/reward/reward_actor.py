"""The Ray actor around the reward stage. A plain class: the pipeline wraps it with ``ray.remote``."""

from __future__ import annotations

from typing import Any

from openrlhf_like.reward.factory import make_stage
from openrlhf_like.types import Trajectory, TrajectorySummary


class RewardActor:
    """Scores blocks of trajectories off the driver. Its methods are async: Ray runs several blocks together.

    Args:
        cfg: the resolved configuration (``reward.*``, ``timeout.reward``, ``timeout.init``).
        num_processes: child processes of this actor; ``reward.num_workers`` where it is not given. Give 1 where there
            are ``reward.num_workers`` actors.
    """

    def __init__(self, cfg: Any, num_processes: int | None = None) -> None:
        self._stage = make_stage(cfg, num_processes)

    async def check(self) -> None:
        """Load the source, so that what is wrong with it surfaces before training.

        Raises:
            UserError: the user's file does not import or has no ``reward_func``; a package is missing.
            WaitTimeout: the imports passed ``--timeout.init``.
        """
        await self._stage.source.check()

    async def score(self, block: list[Trajectory]) -> tuple[list[Trajectory], list[TrajectorySummary]]:
        """The scored block for the workers and its summaries for the driver: call with ``num_returns=2``.

        Raises:
            TrainingAborted: too large a share of the latest samples has no reward.
            UserError: the source breaks its contract.
        """
        scored, _ = await self._stage.score_block(block)
        return scored, [TrajectorySummary.of(t) for t in scored]

    async def retries(self) -> int:
        """Requests to a reward server that were sent again, since the start."""
        return self._stage.total.retries

    async def close(self) -> None:
        """End the child processes."""
        self._stage.source.close()
