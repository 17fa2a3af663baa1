"""What every source of rewards takes and gives back, one entry a sample."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RewardRequest:
    """A batch to score. All lists have one entry a sample, in the same order.

    Attributes:
        queries: prompt and response text together.
        prompts: the rendered prompts.
        labels: the records' label column, untouched.
        responses: the responses alone.
        metadata: every other column of each record.
    """

    queries: list[str]
    prompts: list[str]
    labels: list[Any]
    responses: list[str] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.queries)
        if not self.responses:
            pairs = zip(self.queries, self.prompts, strict=True)
            self.responses = [q[len(p) :] if q.startswith(p) else q for q, p in pairs]
        if not self.metadata:
            self.metadata = [{} for _ in range(n)]
        for name in ("prompts", "labels", "responses", "metadata"):
            got = len(getattr(self, name))
            if got != n:
                raise ValueError(f"RewardRequest.{name} has {got} entries, queries has {n}")

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, indices: list[int]) -> RewardRequest:
        """The samples at ``indices``, in that order."""
        return RewardRequest(
            queries=[self.queries[i] for i in indices],
            prompts=[self.prompts[i] for i in indices],
            labels=[self.labels[i] for i in indices],
            responses=[self.responses[i] for i in indices],
            metadata=[self.metadata[i] for i in indices],
        )


@dataclass
class RewardResult:
    """The outcome for one sample: a finite ``reward``, or ``error`` set.

    Attributes:
        reward: the scalar to train on; None where ``error`` is set.
        score: what filtering and plots use; the reward itself where the source names no other.
        metrics: numbers for plots. ``logs``: anything else, for people.
        error: one line saying why there is no reward.
        excluded: the source answered, but with None, NaN, infinity or something that is no number.
        retries: requests repeated for this sample's batch; only its first sample carries them, so that sums are right.
    """

    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    excluded: bool = False
    retries: int = 0


class RewardFunction(abc.ABC):
    """A source of rewards.

    ``score`` never raises for a sample that cannot be scored (its result carries ``error``); it raises ``UserError``
    where the source breaks the contract for everything, such as a wrong number of values.
    """

    #: The flag that chose this source, for messages.
    flag: str = "--reward.remote_url"

    @abc.abstractmethod
    async def score(self, request: RewardRequest) -> list[RewardResult]:
        """One result a sample, in the request's order, within the source's own time limits."""

    async def check(self) -> None:  # noqa: B027 - nothing to check is a valid answer
        """Make ready, and raise ``UserError`` for what is wrong before training starts."""

    def close(self) -> None:  # noqa: B027
        """End every process the source started. Idempotent."""
