"""The child side of ``isolated.py``: run as ``python -m openrlhf_like.reward.child``. Standard library only.

It must start in well under a second, so neither numpy nor torch nor Ray may be imported here. Frames are an 8-byte
length and a pickle. The parent sends ``(sys_path, loader, args)`` once, then one payload a call; every frame is
answered by ``(status, value, error)``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

_PR_SET_PDEATHSIG = 1
HEADER = struct.Struct("<Q")
#: The parent sends this before it kills a child that passed its limit, to learn where the child hangs.
DUMP_SIGNAL = getattr(signal, "SIGUSR2", None)


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when the thread that started it ends; elsewhere the pipe's end must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's pickle, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = stream.read(size)
    return body if len(body) == size else None


def describe(error: BaseException) -> str:
    """One line: the exception's type and text, and the innermost frame outside this file."""
    text = " ".join(str(error).split())[:500]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((__file__, "<frozen"))]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def load(setup: tuple[list[str], str, tuple[Any, ...]]) -> Callable[[Any], Any]:
    """The handler that ``module:function`` returns when called with the arguments of the setup frame."""
    sys_path, loader, args = setup
    sys.path[:] = sys_path
    module, _, name = loader.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def guarded(function: Callable[[Any], Any], argument: Any) -> tuple[str, Any, str]:
    """Call and report. Everything is caught, ``SystemExit`` too: the user's code must not end the child by it."""
    try:
        return "ok", function(argument), ""
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which decides
        return "raised", None, describe(error)


def _read_requests(stream: BinaryIO, frames: queue.SimpleQueue[bytes]) -> None:
    """Feed the main thread; the parent's end of the pipe closing ends this process even in the middle of a call."""
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)


def _reply(stream: BinaryIO, answer: tuple[str, Any, str]) -> None:
    for text in (sys.stdout, sys.stderr):
        text.flush()
    try:
        body = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - any object may refuse to be pickled, each in its own way
        body = pickle.dumps(("raised", None, f"the answer cannot be sent: {describe(error)}"))
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    parent_pid, request_fd, response_fd = (int(a) for a in sys.argv[1:4])
    die_with_parent(parent_pid)
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=False)
    for fd in (request_fd, response_fd):
        os.set_inheritable(fd, False)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    requests = os.fdopen(request_fd, "rb")
    responses = os.fdopen(response_fd, "wb")
    threading.Thread(target=_read_requests, args=(requests, frames), daemon=True).start()

    status, handler, error = guarded(lambda f: load(pickle.loads(f)), frames.get())
    _reply(responses, (status, None, error))
    if handler is None:
        return
    while True:
        _reply(responses, guarded(lambda f: handler(pickle.loads(f)), frames.get()))


if __name__ == "__main__":
    main()
