"""The one interface to an inference engine: the rest of the code does not know which engine runs behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from openrlhf_like.rollout.engine.options import EngineOptions
from openrlhf_like.types import Completion, SamplingSpec

PauseMode = Literal["keep", "wait", "abort"]


class EngineDead(RuntimeError):
    """The engine itself failed (not one request): nothing it held will be answered."""


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to continue.

    Attributes:
        request_id: unique among the engine's unfinished requests.
        token_ids: the prompt, as the engine shall see it.
        sampling: how to sample.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingSpec


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine started.

    Attributes:
        outstanding: requests submitted and not yet answered.
        finished: requests answered, failed ones included.
        prompt_tokens, generated_tokens: of the requests answered.
        version: the policy version the weights belong to.
        paused: whether generation stands still.
    """

    outstanding: int
    finished: int
    prompt_tokens: int
    generated_tokens: int
    version: int
    paused: bool


@runtime_checkable
class Engine(Protocol):
    """Submit token ids, await what was sampled; update the weights in between.

    Weight updates follow vLLM's own protocol: ``init_weight_transfer_engine`` once, then
    ``start_weight_update``, ``update_weights`` any number of times, ``finish_weight_update``. Between start and finish
    no step runs. Finishing resets the prefix cache, and running requests recompute theirs, so that no token is sampled
    from keys and values of older weights.
    """

    options: EngineOptions
    version: int

    async def start(self) -> None:
        """Load the model; may take a minute."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec, request_id: str) -> Completion:
        """Sample one continuation. Raises ValueError for a request the engine refuses, EngineDead if it died.

        A request aborted while it ran comes back empty, with finish reason ``"abort"``. ``weight_version`` of the
        completion is the version that the request began under.
        """

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion | BaseException]:
        """Sample all; an entry is the exception where that one request failed. Raises EngineDead if the engine died."""

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log pi(token t | tokens before t) at temperature 1 for t = 1 .. T-1 (T-1 values)."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Stop these requests, or all."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping: keep running requests where they are, wait for them first, or abort them."""

    async def resume(self) -> None:
        """Go on after ``pause``."""

    async def reset_prefix_cache(self, reset_running: bool = True) -> None:
        """Forget cached keys and values; running requests recompute theirs if ``reset_running``."""

    async def sleep(self, level: int = 1) -> None:
        """Give device memory back (no effect on a CPU)."""

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take device memory again."""

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Handshake of the weight transfer; ``request`` carries ``init_info``."""

    async def start_weight_update(self) -> None:
        """Open an update: stepping stops."""

    async def update_weights(self, request: Any) -> None:
        """Take one chunk; ``request`` carries ``update_info``."""

    async def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        """Close the update, reset the prefix cache, set the version, go on stepping."""

    async def update_weight_version(self, new_version: str | int) -> None:
        """Name the version of the weights already there."""

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every worker of the engine; one result a worker."""

    async def stats(self) -> EngineStats:
        """Counters; cheap, also while the engine is busy."""

    async def shutdown(self) -> None:
        """Free everything; unfinished requests fail with EngineDead. Idempotent."""


def request_field(request: Any, name: str) -> Any:
    """A field of a weight-transfer request: vLLM's clients send a dataclass, HTTP a dict."""
    return request[name] if isinstance(request, dict) else getattr(request, name)
