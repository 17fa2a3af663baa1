"""SIGTERM, SIGHUP and Ctrl-C as exceptions in the main thread, and the exit codes they stand for.

Imports nothing but the standard library and ``types``: commands use it before anything heavy is loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from openrlhf_like.types import TrainingAborted, UserError, WaitTimeout

logger = logging.getLogger(__name__)

# Wrappers (timeout, uv, make) forward a signal that the terminal has sent to the whole group already: the same key
# press arrives twice within milliseconds. A second Ctrl-C counts only when a person can have meant it.
_DEBOUNCE_SECONDS = 0.7


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived.

    It derives from KeyboardInterrupt because Ray's and asyncio's waits let exactly that one through; any other
    exception that a signal handler raises inside them is printed and swallowed.
    """


class _Received:
    """The first stop signal of this process, and when it came. One per process, as signals are."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at = 0.0
        self.on_force: Callable[[], None] | None = None
        self.deferred = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        if first:
            self.signum, self.at = signum, time.monotonic()
            if not self.deferred:
                raise _as_exception(signum)
            return
        if signum == signal.SIGINT and time.monotonic() - self.at > _DEBOUNCE_SECONDS:
            self._force()

    def _force(self) -> None:
        sys.stderr.write("second interrupt: killing what is left\n")
        sys.stderr.flush()
        if self.on_force is not None:
            self.on_force()
        os._exit(128 + (self.signum or signal.SIGINT))


def _as_exception(signum: int) -> KeyboardInterrupt:
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signal.Signals(signum).name)


_received = _Received()


def received() -> int | None:
    """The number of the first stop signal this process got, or None."""
    return _received.signum


def raise_if_received() -> None:
    """Raise again what a library may have swallowed: called by our own waits between two polls."""
    if _received.signum is not None:
        raise _as_exception(_received.signum)


def note_received(signum: int) -> None:
    """Record a stop signal that another handler (Ray's, during its start) took before ours."""
    if _received.signum is None:
        _received.signum, _received.at = signum, time.monotonic()


def set_force_action(action: Callable[[], None] | None) -> None:
    """What a second Ctrl-C does before the process ends at once (the session: kill every process it started)."""
    _received.on_force = action


def install_handlers() -> None:
    """Install ours for SIGINT, SIGTERM and SIGHUP; again after ``ray.init``, which replaces SIGTERM's.

    A no-op outside the main thread, where Python does not allow it. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_IGN:
            continue
        signal.signal(signum, _received.handle)


@contextmanager
def stop_signals() -> Iterator[None]:
    """Within the block stop signals raise; afterwards the handlers are as before. Blocks may nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) != _received.handle:
        _received.signum = None  # an outermost block: what an earlier run in this process got is over
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    install_handlers()
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block (a cleanup) a first stop signal is noted and raised at its end; a second Ctrl-C still forces."""
    had, outer = _received.signum, _received.deferred
    _received.deferred = True
    try:
        yield
    finally:
        _received.deferred = outer
    if had is None and not outer:
        raise_if_received()


def exit_status(error: BaseException) -> int:
    """The exit code of a command that ended with ``error``: 2 for bad input, 128 + n for signal n, else 1."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        if _received.signum is not None:
            return 128 + _received.signum
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def run_command(main: Callable[[], Any], shutdown_seconds: float = 3.0) -> int:
    """Run a command's body and return its exit code; errors that have a meaning become one line on stderr.

    After a stop signal the process ends within ``shutdown_seconds`` of this function's return, whatever thread of
    whatever library still wants to finish.
    """
    with stop_signals():
        try:
            result = main()
            return result if isinstance(result, int) else 0
        except (UserError, WaitTimeout, TrainingAborted) as error:
            sys.stderr.write(f"error: {error}\n")
            return exit_status(error)
        except KeyboardInterrupt as error:
            code = exit_status(error)
            sys.stderr.write(f"stopped by {signal.Signals(code - 128).name}\n")
            exit_soon(code, shutdown_seconds)
            return code


def exit_soon(code: int, seconds: float) -> None:
    """When the main thread has ended, give exit hooks and threads ``seconds``, then end the process with ``code``.

    For a library (Ray, whose server is gone) that would block the interpreter's end for ever.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="exit-soon", daemon=True).start()
