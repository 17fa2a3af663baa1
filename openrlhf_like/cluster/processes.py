"""Which operating-system processes a command started, and how they end.

Every process below the local Ray carries the session's mark in its environment: a child that has moved to a session of
its own, or lost its parent, is found all the same, and nothing that somebody else started ever is.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Iterable

import psutil

MARK = "OPENRLHF_LIKE_SESSION"
SHARED_MEMORY_PREFIX = "/dev/shm/openrlhf_like_"  # followed by the maker's pid and "_"


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; a zombie that waits for its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def marked(mark: str) -> set[psutil.Process]:
    """Every process of this user on this machine whose environment holds the mark; never this one or its ancestors."""
    needle = f"{MARK}={mark}".encode()
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    found = set()
    for pid in psutil.pids():
        if pid in spared:
            continue
        with contextlib.suppress(OSError, psutil.Error), open(f"/proc/{pid}/environ", "rb") as file:
            if needle in file.read().split(b"\0"):
                found.add(psutil.Process(pid))
    return found


def tree(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """The roots that run, and all their descendants."""
    found: set[psutil.Process] = set()
    for root in roots:
        with contextlib.suppress(psutil.Error):
            if root.is_running():
                found.add(root)
                found.update(root.children(recursive=True))
    return found


def reap(processes: Iterable[psutil.Process], grace: float, limit: float) -> list[psutil.Process]:
    """SIGTERM, ``grace`` seconds later SIGKILL, and wait; returns what still runs after ``limit`` seconds.

    psutil compares start times before it signals, so a reused pid is not hit.
    """
    start = time.monotonic()
    left = [p for p in processes if alive(p)]
    _signal(left, "terminate")
    left = _wait_gone(left, start + min(grace, limit))
    _signal(left, "kill")
    return _wait_gone(left, start + limit)


def drop_shared_memory(pids: Iterable[int]) -> None:
    """Unlink the shared memory that processes of these (dead) ids made under our name and had no time to remove."""
    for pid in set(pids):
        for path in glob.glob(f"{SHARED_MEMORY_PREFIX}{pid}_*"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def kill_now(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL without waiting."""
    _signal(processes, "kill")


def _signal(processes: Iterable[psutil.Process], how: str) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            getattr(process, how)()


def _wait_gone(processes: list[psutil.Process], until: float) -> list[psutil.Process]:
    left = [p for p in processes if alive(p)]
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [p for p in left if alive(p)]
    return left
