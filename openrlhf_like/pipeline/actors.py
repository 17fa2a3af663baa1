"""The processes of a policy run, where classes of several folders meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray

from openrlhf_like.cluster.transfer.sender import WeightSender
from openrlhf_like.observe.rollout_store import RolloutStore
from openrlhf_like.rollout.engine.engine_actor import EngineActor
from openrlhf_like.training.policy_worker import PolicyWorker, ReferenceWorker


class ActorWorker(PolicyWorker):
    """The policy under training, with its half of the weight transfer."""

    def old_logprobs(self, micro_batches: list[list[int]]) -> int:
        """Compute log pi_old and keep it on the rows; the driver gets the number of tokens only."""
        return sum(len(values) for values in self.compute_logprobs(micro_batches, "old").values())

    def connect(self, engines: list[Any]) -> None:
        """Build this rank's sender to the engines (Ray handles)."""
        self.attach_sender(
            lambda gather, rank, world_size: WeightSender(engines, self.cfg, rank, world_size, gather)
        )


class RefWorker(ReferenceWorker):
    """The frozen reference."""

    def reference_logprobs(self, micro_batches: list[list[int]]) -> tuple[dict[int, np.ndarray], int]:
        """(row id -> float32 [actions], number of tokens): call with ``num_returns=2``, the first stays where it is."""
        values = self.compute_logprobs(micro_batches, "ref")
        return values, sum(len(v) for v in values.values())


class RolloutEngine(EngineActor):
    """An engine that is warm when it says that it is ready."""

    async def start(self) -> int:
        """Load the model and run one request: the first is many times slower than the rest."""
        index = await self.ready()
        await self.warmup()
        return index


class RolloutWriter:
    """Writes the trajectories of a step while the next one runs. Lives on the driver's node, beside the run folder."""

    def __init__(self, run_dir: str, every: int) -> None:
        self._store = RolloutStore(Path(run_dir), every)

    def write(
        self, step: int, blocks: list[Any], rows: dict[int, tuple[int, int]], advantages: list[Any]
    ) -> None:
        """Queue a step.

        Args:
            blocks: references to lists of trajectories.
            rows: row id -> (block, index in it), for the rows that were trained on.
            advantages: references to mappings of row id -> one float array a segment.
        """
        trajectories = ray.get(list(blocks))
        names = {row: trajectories[block][index].trajectory_id for row, (block, index) in rows.items()}
        by_name: dict[str, list[np.ndarray]] = {}
        for part in ray.get(list(advantages)):
            by_name.update({names[row]: arrays for row, arrays in part.items()})
        self._store.write(step, [t for block in trajectories for t in block], by_name)

    def discard_after(self, step: int) -> int:
        """A run resumed at ``step`` writes later ones again."""
        return self._store.discard_after(step)

    def flush(self) -> None:
        """Wait until every queued step is on disk: a checkpoint comes after the rollouts it stands for."""
        self._store.flush()

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._store.close()
