"""What a rollout starts from, and how it samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Prompt:
    """One prompt instance. Groups are keyed by ``prompt_id``, never by text: equal texts may carry other labels.

    Attributes:
        prompt_id: unique within the dataset (its row), stable over epochs.
        token_ids: the rendered prompt, tokenized once; every sample of the group starts from exactly these ids.
        text: the rendered prompt, for reward functions and people.
        label: the record's label column, handed to the reward untouched.
        metadata: every other column of the record.
        datasource: name of the dataset it came from.
    """

    prompt_id: str
    token_ids: list[int]
    text: str
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    datasource: str = "default"


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling parameters of one request, in our own words (vLLM is imported by the engines only).

    ``max_tokens`` counts new tokens. ``seed`` None leaves the engine's own random stream.
    ``temperature`` 0 is greedy. ``logprobs`` asks for log mu of the sampled tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: bool = True

    def with_(self, **changes: Any) -> SamplingSpec:
        """A copy with fields replaced."""
        return replace(self, **changes)


@dataclass
class Completion:
    """What an engine returns for one request: exactly the sampled ids, with log mu of each (float, len = ids)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_version: int
