"""A rollout's trajectories as one worker trains on them: one row a trajectory, flat arrays over its action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from openrlhf_like.training.layouts import LayoutRow, action_positions
from openrlhf_like.types import Trajectory


@dataclass
class RolloutRow:
    """One trajectory. Every array runs over its action tokens, segment after segment (shape [A]).

    Attributes:
        trajectory: where it comes from.
        positions: per segment, the positions of its action tokens.
        behavior: float32, log mu.
        old, ref: float32 log pi_old and log pi_ref, once they are computed.
        advantages: float32, once they are.
    """

    trajectory: Trajectory
    positions: list[np.ndarray] = field(default_factory=list)
    behavior: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    old: np.ndarray | None = None
    ref: np.ndarray | None = None
    advantages: np.ndarray | None = None

    @classmethod
    def of(cls, trajectory: Trajectory) -> RolloutRow:
        """Find the action tokens (a segment's very first token has nothing that predicts it, and is never one)."""
        positions = [action_positions(s.action_mask) for s in trajectory.segments]
        behavior = [s.behavior_logprobs[p] for s, p in zip(trajectory.segments, positions, strict=True)]
        flat = np.concatenate(behavior).astype(np.float32) if behavior else np.zeros(0, np.float32)
        return cls(trajectory, positions, flat)

    @property
    def num_actions(self) -> int:
        """A."""
        return len(self.behavior)

    def layout_rows(self, row: int) -> list[LayoutRow]:
        """One layout row a segment."""
        return [LayoutRow(s.token_ids, s.action_mask, row, s.temperatures()) for s in self.trajectory.segments]

    def turn_ends(self) -> np.ndarray:
        """Index into the action tokens of each turn's last one, int [turns]; turns without an action are skipped."""
        ends, before = [], 0
        for segment, positions in zip(self.trajectory.segments, self.positions, strict=True):
            for turn in segment.turn_params:
                inside = np.flatnonzero((positions >= turn.start) & (positions < turn.end))
                if len(inside):
                    ends.append(before + int(inside[-1]))
            before += len(positions)
        return np.asarray(ends, dtype=np.int64)

    def credit_per_token(self, credit: float | Sequence[float]) -> np.ndarray:
        """float64 [A]: the credit on the last action token, or one a turn on each turn's last."""
        out = np.zeros(self.num_actions)
        if self.num_actions == 0:
            return out
        if not isinstance(credit, Sequence):
            out[-1] = float(credit)
            return out
        ends = self.turn_ends()
        if len(ends) != len(credit):
            # Fewer or more rewards than turns that sampled something: nothing says which is whose.
            raise ValueError(
                f"trajectory {self.trajectory.trajectory_id}: {len(credit)} turn rewards for {len(ends)} turns"
            )
        np.add.at(out, ends, np.asarray(credit, dtype=np.float64))
        return out

    def per_segment(self, values: np.ndarray | None) -> list[np.ndarray]:
        """float32 [T] a segment: ``values`` at the action tokens, 0 elsewhere (all 0 for None)."""
        out, at = [], 0
        for segment, positions in zip(self.trajectory.segments, self.positions, strict=True):
            full = np.zeros(len(segment), dtype=np.float32)
            if values is not None:
                full[positions] = values[at : at + len(positions)]
            at += len(positions)
            out.append(full)
        return out
