"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timer:
    """Adds up wall-clock seconds under names: ``with timer("generate"): ...`` counts into ``time/generate``.

    The same name may be entered several times a step; the seconds add up. Not for use by several threads at once.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's seconds under ``time/<name>``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere, in another process say."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds counted so far under ``name``; 0 for a name never entered."""
        return self._seconds.get(name, 0.0)

    def pop(self) -> dict[str, float]:
        """``{"time/<name>": seconds}`` since the last call, and start again from zero."""
        out = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return out


def throughput(*, tokens: float, samples: float, seconds: float) -> dict[str, float]:
    """``throughput/tokens_per_second`` and ``throughput/samples_per_second``.

    Args:
        tokens: all tokens trained on in the step, prompt and response, over all workers.
        samples: trajectories of the step over all workers.
        seconds: wall-clock seconds of the whole step, ``time/step``.

    Returns:
        The two metrics; empty when ``seconds`` is not positive (there is no rate then, not a rate of 0).
    """
    if seconds <= 0:
        return {}
    return {
        "throughput/tokens_per_second": tokens / seconds,
        "throughput/samples_per_second": samples / seconds,
    }

