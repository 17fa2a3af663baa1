"""The one record that crosses folders: an episode of one agent on one prompt.

Built in ``rollout/``, scored in ``reward/``, given advantages in ``algorithms/``, packed in ``training/``, shown in
``observe/``. Plain numpy, so that it pickles cheaply and travels through Ray's object store without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class TurnParams:
    """Sampling parameters of one turn: log pi must be taken under the same ones as mu was.

    ``start`` and ``end`` are the half-open span of the turn's sampled tokens in its segment.
    """

    start: int
    end: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass
class Segment:
    """One unbroken token sequence as the engine saw it. All arrays have length T.

    Attributes:
        token_ids: int32 [T], prompt and every turn, as sampled.
        action_mask: int8 [T], 1 where the policy sampled the token.
        behavior_logprobs: float32 [T], log mu of sampled tokens under the weights that sampled them; 0 elsewhere.
        weight_version: int32 [T], the policy version that sampled the token; -1 where the mask is 0.
        turn_params: one entry a turn, in order.
        images: image references in prompt order (empty for text).
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    behavior_logprobs: np.ndarray
    weight_version: np.ndarray
    turn_params: list[TurnParams] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_actions(self) -> int:
        """Number of sampled tokens."""
        return int(self.action_mask.sum())

    def temperatures(self) -> np.ndarray:
        """float32 [T]: the temperature each action token was sampled at; 1 elsewhere.

        A greedy turn (temperature 0) has no density; its tokens are given 1, the engine's own convention.
        """
        out = np.ones(len(self), dtype=np.float32)
        for turn in self.turn_params:
            if turn.temperature > 0:
                out[turn.start : turn.end] = turn.temperature
        return out

    def check(self) -> None:
        """Raise AssertionError naming the broken invariant."""
        n = len(self.token_ids)
        for name in ("action_mask", "behavior_logprobs", "weight_version"):
            got = len(getattr(self, name))
            assert got == n, f"segment.{name} has length {got}, token_ids has {n}"
        assert np.isfinite(self.behavior_logprobs).all(), "segment.behavior_logprobs holds a non-finite value"
        outside = self.behavior_logprobs[self.action_mask == 0]
        assert not outside.any(), "segment.behavior_logprobs is non-zero where action_mask is 0"


@dataclass
class Trajectory:
    """One episode. ``reward`` stays None until it is scored; a scalar, or one value a turn (list).

    ``error`` set means: this episode takes no part in statistics or in training, and is counted.
    """

    trajectory_id: str
    prompt_id: str
    group_id: str
    segments: list[Segment]
    prompt: str = ""
    response: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: int = 1
    finish_reason: str = "stop"
    truncated: bool = False
    error: str | None = None
    reward: float | list[float] | None = None
    scores: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)

    @property
    def num_actions(self) -> int:
        """Response length: sampled tokens only, environment and tool tokens left out."""
        return sum(s.num_actions for s in self.segments)

    @property
    def num_tokens(self) -> int:
        """All tokens of all segments: what a forward pass costs."""
        return sum(len(s) for s in self.segments)

    def total_reward(self) -> float:
        """The episode's return: the reward itself, or the sum over turns. NaN when unscored."""
        if self.reward is None:
            return float("nan")
        if isinstance(self.reward, list):
            return float(sum(self.reward))
        return float(self.reward)

    def check(self) -> Trajectory:
        """Check every invariant; returns self so that builders can end with it."""
        assert self.error is not None or self.num_actions > 0, (
            f"trajectory {self.trajectory_id}: no action token and no error set"
        )
        for segment in self.segments:
            segment.check()
        return self


@dataclass
class TrajectorySummary:
    """What the driver sees of a trajectory: small, and never a token."""

    trajectory_id: str
    group_id: str
    num_tokens: int
    num_actions: int
    segment_lengths: list[int]
    truncated: bool
    finish_reason: str
    error: str | None
    reward: float
    score: float | None
    turns: int
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, t: Trajectory) -> TrajectorySummary:
        return cls(
            trajectory_id=t.trajectory_id,
            group_id=t.group_id,
            num_tokens=t.num_tokens,
            num_actions=t.num_actions,
            segment_lengths=[len(s) for s in t.segments],
            truncated=t.truncated,
            finish_reason=t.finish_reason,
            error=t.error,
            reward=t.total_reward(),
            score=t.scores,
            turns=t.turns,
            metrics=dict(t.metrics),
        )
