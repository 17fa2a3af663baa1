"""A pool of child processes that can be killed in the middle of a call.

Code that may loop for ever, crash, or print without end (a user's reward function, a symbolic verifier) runs here. A
child is a fresh interpreter (``child.py``), never a fork: the parent may hold torch, Ray and threads. It dies with its
parent, and whatever it starts in its own process group is killed with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import queue
import re
import selectors
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_like.reward.child import DUMP_SIGNAL, HEADER

logger = logging.getLogger(__name__)

#: Characters of a call's printed output that are kept; the rest is read and dropped.
OUTPUT_KEPT = 2000
_CHUNK = 1 << 16
_STDLIB = sysconfig.get_path("stdlib")
_DUMP_FRAME = re.compile(r'File "([^"\n]+)", line (\d+) in (\S+)')
#: A dump ends with the child's outermost frame, or with dots after a hundred frames.
_DUMP_END = re.compile(rb"most recent call first\):[^\0]*(_run_module_as_main|\n  \.\.\.)")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

# Linux sends the parent-death signal when the *thread* that started the child ends, so all are started by this one,
# which lives as long as the process does.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-spawner")


@dataclass(frozen=True)
class ChildTask:
    """What a child runs: ``loader`` ("module:function"), called with ``args`` in the child, returns the handler."""

    loader: str
    args: tuple[Any, ...] = ()


@dataclass
class Outcome:
    """How a call ended. ``status``: ok, raised, timeout, died (the process ended), or unready (still loading).

    ``error`` is one line; ``output`` the first characters that the call printed; ``loading``: it failed before the
    handler stood, so the payload is not to blame.
    """

    status: str
    value: Any = None
    error: str = ""
    output: str = ""
    seconds: float = 0.0
    loading: bool = False

    @property
    def ok(self) -> bool:
        return self.status == "ok"


class ChildProcess:
    """One child and its pipes. ``call`` blocks its caller's thread; a lock lets one caller in at a time."""

    def __init__(self, task: ChildTask, load_limit_s: float) -> None:
        self._task = task
        self._load_limit_s = load_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fds: dict[str, int] = {}
        self._loaded = False
        self._load_started = 0.0
        self._closed = False
        self._received = bytearray()
        self._output = bytearray()
        self._pending = memoryview(b"")
        self._hung_up = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def load(self, deadline: float | None = None) -> Outcome:
        """Start the child where there is none and wait until its handler stands, at most until ``deadline``."""
        with self._lock:
            return self._load(deadline)

    def call(self, payload: Any, limit_s: float, deadline: float | None = None) -> Outcome:
        """Run the handler on ``payload``. The child is killed at the limit; the next call starts another.

        Args:
            limit_s: seconds for the handler alone, loading left out.
            deadline: ``time.monotonic()`` value by which the call returns, loading included.
        """
        with self._lock:
            ready = self._load(deadline)
            if not ready.ok:
                return ready
            started = time.monotonic()
            until = started + limit_s if deadline is None else min(started + limit_s, deadline)
            frame = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
            return self._exchange(frame, started, until, kill_at_limit=True)

    def kill(self) -> None:
        """Kill the child and its process group. A call that waits for it returns ``died``."""
        process = self._process
        if process is not None and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """Kill, and never start again."""
        self._closed = True
        self.kill()
        with self._lock:
            self._reap()

    def _load(self, deadline: float | None) -> Outcome:
        if self._closed:
            return Outcome("died", error="the pool is closed", loading=True)
        if self._loaded:
            return Outcome("ok")
        if self._process is None:
            self._start()
        until = self._load_started + self._load_limit_s
        own_limit = deadline is None or until <= deadline
        if deadline is not None:
            until = min(until, deadline)
        outcome = self._exchange(None, self._load_started, until, kill_at_limit=own_limit)
        outcome.loading = not outcome.ok
        if outcome.status == "timeout" and not own_limit:
            return Outcome("unready", error="the child was still loading", output=outcome.output, loading=True)
        self._loaded = outcome.ok
        if outcome.status == "raised":
            self._reap()
        return outcome

    def _start(self) -> None:
        request_r, request_w = os.pipe()
        response_r, response_w = os.pipe()
        output_r, output_w = os.pipe()
        argv = [sys.executable, "-u", "-m", "openrlhf_like.reward.child"]
        argv += [str(os.getpid()), str(request_r), str(response_w)]
        path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = _SPAWNER.submit(
                subprocess.Popen,
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output_w,
                stderr=output_w,
                pass_fds=(request_r, response_w),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            ).result()
        finally:
            for fd in (request_r, response_w, output_w):
                os.close(fd)
        self._fds = {"request": request_w, "response": response_r, "output": output_r}
        for fd in self._fds.values():
            os.set_blocking(fd, False)
        self._received.clear()
        self._output.clear()
        self._load_started = time.monotonic()
        setup = ([p for p in sys.path if p != _PACKAGE_ROOT] + [_PACKAGE_ROOT], self._task.loader, self._task.args)
        self._pending = _framed(pickle.dumps(setup))

    def _exchange(self, frame: bytes | None, started: float, until: float, *, kill_at_limit: bool) -> Outcome:
        """Send what is pending and wait for one reply, reading the child's output all the while."""
        if frame is not None:
            self._output.clear()
            self._pending = _framed(frame)
        body = self._pump(until)
        if body is not None:
            status, value, error = pickle.loads(body)
            return Outcome(status, value, error, self._text(), time.monotonic() - started)
        process = self._process
        assert process is not None
        if self._hung_up:
            while self._read_output(block=False):
                pass
            self._reap()
            code = process.returncode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return Outcome("died", None, f"the process ended ({how})", self._text(), time.monotonic() - started)
        seconds = time.monotonic() - started
        if not kill_at_limit:
            return Outcome("timeout", None, "", self._text(), seconds)
        text = self._text()
        place = self._where_it_hangs()
        self._reap()
        at = f"; it was at {place}" if place else ""
        return Outcome("timeout", None, f"no answer within {seconds:.3g} s, killed{at}", text, seconds)

    def _pump(self, until: float) -> bytes | None:
        """One reply's pickle, or None at the limit (``_hung_up`` False) or when the child ended (True)."""
        self._hung_up = False
        request, response, output = (self._fds[k] for k in ("request", "response", "output"))
        with selectors.DefaultSelector() as selector:
            selector.register(response, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            if self._pending:
                selector.register(request, selectors.EVENT_WRITE)
            while (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fd == request:
                        if self._write_some(request):
                            selector.unregister(request)
                    elif key.fd == output:
                        if not self._read_output():
                            selector.unregister(output)
                    elif (body := self._read_reply(response)) is not None:
                        while self._read_output(block=False):
                            pass
                        return body
                if self._hung_up:
                    return None
        return None

    def _write_some(self, fd: int) -> bool:
        """Write what fits; True when nothing is left (or nobody reads any more: the reply's end will tell)."""
        try:
            sent = os.write(fd, self._pending[:_CHUNK])
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._pending = memoryview(b"")
            return True
        self._pending = self._pending[sent:]
        return not self._pending

    def _read_reply(self, fd: int) -> bytes | None:
        try:
            chunk = os.read(fd, 1 << 20)
        except BlockingIOError:
            return None
        if not chunk:
            self._hung_up = True
            return None
        self._received += chunk
        if len(self._received) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._received)
        if len(self._received) < HEADER.size + size:
            return None
        body = bytes(self._received[HEADER.size : HEADER.size + size])
        self._received.clear()
        return body

    def _read_output(self, block: bool = True) -> bool:
        """Read a piece of the output, keep its beginning. False when there is none now (or, blocking, never again)."""
        try:
            chunk = os.read(self._fds["output"], _CHUNK)
        except BlockingIOError:
            return block
        room = 4 * OUTPUT_KEPT - len(self._output)  # a character has up to 4 bytes
        if room > 0:
            self._output += chunk[:room]
        return bool(chunk)

    def _text(self) -> str:
        return self._output.decode("utf-8", "replace")[:OUTPUT_KEPT]

    def _where_it_hangs(self) -> str:
        """Ask the child's fault handler for its innermost Python frame ("file.py:3 in f"); empty where it cannot."""
        process = self._process
        if DUMP_SIGNAL is None or process is None or not self._loaded:
            return ""
        dump = b""
        os.kill(process.pid, DUMP_SIGNAL)
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not _DUMP_END.search(dump):
            try:
                dump = (dump + os.read(self._fds["output"], _CHUNK))[-4 * _CHUNK :]
            except BlockingIOError:
                time.sleep(0.01)
        return _user_frame(dump.rpartition(b"most recent call first):")[2].decode("utf-8", "replace"))

    def _reap(self) -> None:
        self.kill()
        process, self._process = self._process, None
        self._loaded = False
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}
        if process is not None:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                logger.warning("reward child %d did not end within 10 s of SIGKILL", process.pid)


def _user_frame(dump: str) -> str:
    """The innermost frame of a fault handler's dump that is neither Python's own nor this package's."""
    for file, line, name in _DUMP_FRAME.findall(dump):
        own = file.startswith(_STDLIB) and "site-packages" not in file
        if not own and not file.startswith(str(Path(__file__).parent)):
            return f"{os.path.basename(file)}:{line} in {name}"
    return ""


def _framed(body: bytes) -> memoryview:
    return memoryview(HEADER.pack(len(body)) + body)


class IsolatedPool:
    """``size`` children with the same handler. Calls run concurrently, one a child; the rest wait for a free one.

    Usable from any thread and any event loop, one after the other or together.
    """

    def __init__(self, task: ChildTask, *, size: int = 1, load_limit_s: float = 300.0) -> None:
        self.size = size
        self._children = [ChildProcess(task, load_limit_s) for _ in range(size)]
        self._free: queue.LifoQueue[ChildProcess] = queue.LifoQueue()
        for child in self._children:
            self._free.put(child)
        # As many threads as children: a thread that runs always finds a free child.
        self._threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix="reward-call")

    @property
    def pids(self) -> list[int]:
        """Process ids of the children alive."""
        return [c.pid for c in self._children if c.pid is not None]

    async def load(self) -> Outcome:
        """Start every child; the first failure, or ok."""
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._threads, c.load) for c in self._children]
        outcomes = await asyncio.gather(*jobs)
        return next((o for o in outcomes if not o.ok), outcomes[0])

    async def call(self, payload: Any, limit_s: float, deadline: float | None = None) -> Outcome:
        """``ChildProcess.call`` on a free child; the time spent waiting for one is outside ``limit_s``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, payload, limit_s, deadline)

    def _call(self, payload: Any, limit_s: float, deadline: float | None) -> Outcome:
        child = self._free.get_nowait()
        try:
            return child.call(payload, limit_s, deadline)
        finally:
            self._free.put(child)

    def close(self) -> None:
        """Kill every child and end the threads. Idempotent."""
        for child in self._children:
            child.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
