"""Progress with time left: two bars on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from openrlhf_like.observe.console import err_console

logger = logging.getLogger(__name__)

# Time left follows the recent steps: a first step with its warm-up would spoil a mean over all of them.
_RECENT_STEPS = 20


class StepClock:
    """Time left of a run, from the median of the recent steps."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total = total
        self.done = done
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._last = time.monotonic()

    def restart(self) -> None:
        """The next step starts now: what came before it (loading, an evaluation) is no part of a step."""
        self._last = time.monotonic()

    def tick(self) -> float:
        """One more step is done; returns its seconds."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self.done += 1
        self._recent.append(seconds)
        return seconds

    def seconds_left(self) -> float | None:
        """None before the first step."""
        if not self._recent:
            return None
        return statistics.median(self._recent) * max(0, self.total - self.done)


def format_seconds(seconds: float | None) -> str:
    """``1:02:03``, ``2:03``, or ``?`` when unknown."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class Phase:
    """The inner bar: samples of one phase (rollout, reward, train). Made by ``RunProgress.phase``; thread-safe."""

    def __init__(self, owner: RunProgress, name: str, total: int | None) -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self.name = name
        self.total = total
        self.done = 0

    def advance(self, count: int = 1) -> None:
        """``count`` more samples are done."""
        with self._lock:
            self.done += count
        self._owner._phase_moved(self)

    def update(self, done: int, total: int | None = None) -> None:
        """Set the number done, and the total where it has changed (dynamic filtering asks for more)."""
        with self._lock:
            self.done = done
            self.total = self.total if total is None else total
        self._owner._phase_moved(self)


class RunProgress:
    """Outer bar: steps with time left. Inner bar: samples of the phase at work.

    Use as a context manager. Where stderr is no terminal nothing is drawn; instead a log line says where the run is,
    at the end of a step or of a phase's advance, at most every ``interval_s`` seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        description: str = "train",
        console: Console | None = None,
        interval_s: float = 30.0,
    ) -> None:
        """``done_steps``: steps already done, when resuming."""
        self.clock = StepClock(total_steps, done_steps)
        self._description = description
        self._console = console or err_console()
        self._interval_s = interval_s
        self._last_line = time.monotonic()
        self._phase: Phase | None = None
        self._bars: Progress | None = None
        self._outer: TaskID | None = None
        self._inner: TaskID | None = None

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._outer = self._bars.add_task(
                self._description, total=self.clock.total, completed=self.clock.done, left="left ?"
            )
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """The inner bar for the time of the block; ``total`` samples, None when unknown."""
        phase = Phase(self, name, total)
        self._phase = phase
        if self._bars is not None:
            self._inner = self._bars.add_task(f"  {name}", total=total, left="")
        try:
            yield phase
        finally:
            self._phase = None
            if self._bars is not None and self._inner is not None:
                self._bars.remove_task(self._inner)
            self._inner = None

    def step_done(self) -> float:
        """One step is done; returns its seconds."""
        seconds = self.clock.tick()
        if self._bars is not None and self._outer is not None:
            left = f"left {format_seconds(self.clock.seconds_left())}"
            self._bars.update(self._outer, completed=self.clock.done, left=left)
        else:
            self._maybe_line()
        return seconds

    def _phase_moved(self, phase: Phase) -> None:
        if self._bars is not None and self._inner is not None:
            self._bars.update(self._inner, completed=phase.done, total=phase.total)
        elif self._bars is None:
            self._maybe_line()

    def _maybe_line(self) -> None:
        now = time.monotonic()
        if now - self._last_line < self._interval_s:
            return
        self._last_line = now
        clock, phase = self.clock, self._phase
        where = "" if phase is None else f", {phase.name} {phase.done}/{'?' if phase.total is None else phase.total}"
        left = format_seconds(clock.seconds_left())
        logger.info("%s: step %d/%d%s, time left %s", self._description, clock.done, clock.total, where, left)
