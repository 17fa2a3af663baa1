"""The process that writes rollouts. Apart from the other actors: it needs no torch and should start at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray

from openrlhf_like.observe.rollout_store import RolloutStore


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
