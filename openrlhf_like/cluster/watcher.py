"""A small process that outlives the driver by a moment and takes what it left behind.

A driver killed with SIGKILL (the out-of-memory killer, ``kill -9``, a batch system at its limit) runs no cleanup of its
own. Ray's own processes notice, mostly; its agents and the engines' child processes need not. The watcher waits until
the driver is gone and kills what carries the session's mark. The driver dismisses it at a normal end.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

from openrlhf_like.cluster import environment, processes

logger = logging.getLogger(__name__)

_SNAPSHOT_SECONDS = 2.0
_DISMISS = b"done\n"


class Watcher:
    """The driver's side: started before Ray, dismissed after it."""

    def __init__(self, mark: str, temp_dir: str | None = None) -> None:
        command = [sys.executable, "-m", __name__, mark, str(os.getpid())]
        env = {**os.environ, "PYTHONPATH": environment.python_path()}
        env.pop(processes.MARK, None)  # the watcher is not among those it ends
        if temp_dir is not None:
            command += ["--temp_dir", temp_dir]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # a signal to the driver's group must not take the watcher with it
        )

        self.pid = self._process.pid

    def dismiss(self) -> None:
        """The driver has cleaned up: the watcher ends what that left over, and itself.

        Left over is what the driver could not find any more: children of a worker that died before the cleanup began,
        in a session of their own.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_DISMISS)
            self._process.stdin.close()
        except BrokenPipeError:
            logger.warning("the process watcher had already ended")
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()


def watch(mark: str, driver: psutil.Process) -> tuple[set[psutil.Process], bool]:
    """Every process the driver was seen to have started, once it is gone or has dismissed the watcher (True).

    They are noted while the driver runs: Ray's agents overwrite their environment with their title, and once the raylet
    is gone nothing leads to them.
    """
    seen: set[psutil.Process] = set()
    while processes.alive(driver):
        seen = {p for p in seen | processes.tree(processes.marked(mark)) if processes.alive(p)}
        readable, _, _ = select.select([sys.stdin], [], [], _SNAPSHOT_SECONDS)
        if readable:
            if sys.stdin.buffer.readline() == _DISMISS:
                return seen, True
            time.sleep(0.1)  # end of file: the driver is dying, or has closed the pipe; its pid says which
    return seen, False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mark")
    parser.add_argument("driver", type=int)
    parser.add_argument("--temp_dir")
    args = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    try:
        seen, dismissed = watch(args.mark, psutil.Process(args.driver))
    except psutil.NoSuchProcess:
        seen, dismissed = set(), False
    if dismissed:
        processes.reap(seen, grace=0.5, limit=2.0)
        return
    time.sleep(1.0)  # Ray ends most of its own by itself
    for _ in range(3):  # a dying parent may have started one more child in between
        left = seen | processes.tree(processes.marked(args.mark))
        processes.reap(left, grace=2.0, limit=8.0)
        processes.drop_shared_memory(p.pid for p in left)
    if args.temp_dir:
        shutil.rmtree(args.temp_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
