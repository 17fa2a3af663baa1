"""Run a function in worker processes that form a process group, as the tests of training need it."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _entry(fn: Callable[..., Any], rank: int, world: int, port: int, out: str, args: tuple) -> None:
    from openrlhf_like.training import device as dev

    dev.prepare_process("cpu", 1)
    result = fn(rank, world, port, *args)
    with open(f"{out}/{rank}.pkl", "wb") as f:
        pickle.dump(result, f)
    # Process-group destruction at interpreter exit is noisy and proves nothing here.
    os._exit(0)


def run_workers(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300) -> list[Any]:
    """``fn(rank, world, port, *args)`` in ``world`` fresh processes; their results by rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as out:
        port = free_port()
        processes = [context.Process(target=_entry, args=(fn, r, world, port, out, args)) for r in range(world)]
        for p in processes:
            p.start()
        for p in processes:
            p.join(timeout)
        hung = [p for p in processes if p.is_alive()]
        for p in hung:
            p.kill()
        assert not hung, f"{len(hung)} of {world} workers still ran after {timeout} s"
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]
        return [pickle.loads(Path(out, f"{r}.pkl").read_bytes()) for r in range(world)]
