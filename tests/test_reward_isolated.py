"""The killable children: limits, crashes, floods of output, and that none outlives its parent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from openrlhf_like.reward.isolated import OUTPUT_KEPT, ChildTask, IsolatedPool

ROOT = str(Path(__file__).resolve().parents[1])

HANDLERS = """
    import os, subprocess, sys, time

    def load():
        return handle

    def handle(payload):
        what, arg = payload
        if what == "echo":
            return arg
        if what == "length":
            return len(arg)
        if what == "big":
            return "x" * arg
        if what == "sleep":
            time.sleep(arg)
            return arg
        if what == "raise":
            raise KeyError("no such key")
        if what == "exit":
            sys.exit(3)
        if what == "hard_exit":
            os._exit(7)
        if what == "grandchild":
            return subprocess.Popen(["sleep", "600"]).pid
        if what == "print":
            os.write(1, b"y" * arg)
            return arg
        if what == "modules":
            return sorted(m for m in ("numpy", "torch", "ray", "vllm") if m in sys.modules)
        if what == "pid":
            return os.getpid()

    def load_slow(seconds):
        time.sleep(seconds)
        return handle
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "child_handlers.py").write_text(textwrap.dedent(HANDLERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = IsolatedPool(ChildTask("child_handlers:load"), size=1, load_limit_s=30)
    yield made
    made.close()


def alive(pid: int) -> bool:
    """Running, and no zombie that init has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_child_starts_without_heavy_imports_and_keeps_its_process(pool):
    async def run():
        first = await pool.call(("pid", None), 20)
        return first, await pool.call(("pid", None), 20), await pool.call(("modules", None), 20)

    first, second, modules = asyncio.run(run())
    assert first.ok and first.value == second.value == pool.pids[0]
    assert modules.value == []


def test_payloads_and_answers_larger_than_a_pipe_pass(pool):
    async def run():
        return await pool.call(("length", "a" * 5_000_000), 30), await pool.call(("big", 5_000_000), 30)

    sent, received = asyncio.run(run())
    assert sent.value == 5_000_000 and received.value == "x" * 5_000_000


def test_hanging_call_is_killed_at_its_limit_and_the_next_call_works(pool):
    async def run():
        assert (await pool.load()).ok
        victim = pool.pids[0]
        started = time.monotonic()
        hung = await pool.call(("sleep", 600), 0.5)
        return victim, hung, time.monotonic() - started, await pool.call(("echo", 1), 20)

    victim, hung, seconds, after = asyncio.run(run())
    assert hung.status == "timeout" and 0.5 <= seconds < 3
    assert "child_handlers.py" in hung.error and "in handle" in hung.error, "the place where it hangs is named"
    assert wait_gone(victim) and after.ok and after.value == 1


def test_exceptions_and_exits_are_told_apart(pool):
    async def run():
        return [await pool.call((what, None), 20) for what in ("raise", "exit", "hard_exit", "pid")]

    raised, soft, hard, after = asyncio.run(run())
    assert raised.status == "raised" and raised.error.startswith("KeyError: 'no such key' (child_handlers.py:")
    assert soft.status == "raised" and "SystemExit" in soft.error
    assert hard.status == "died" and "exit code 7" in hard.error and not hard.loading
    assert after.ok


def test_output_is_drained_and_its_beginning_kept(pool):
    async def run():
        flood = await pool.call(("print", 10_000_000), 20)
        return flood, await pool.call(("print", 3), 20)

    flood, little = asyncio.run(run())
    assert flood.ok and flood.output == "y" * OUTPUT_KEPT
    assert little.output == "yyy", "each call's output is its own"


def test_grandchildren_die_with_the_killed_child(pool):
    async def run():
        grandchild = (await pool.call(("grandchild", None), 20)).value
        await pool.call(("sleep", 600), 0.2)
        return grandchild

    assert wait_gone(asyncio.run(run()))


def test_load_slower_than_the_callers_deadline_goes_on_and_serves_the_next_call(pool):
    slow = IsolatedPool(ChildTask("child_handlers:load_slow", (1.0,)), load_limit_s=30)

    async def run():
        early = await slow.call(("echo", 1), 20, deadline=time.monotonic() + 0.2)
        pid = slow.pids
        return early, pid, await slow.call(("echo", 2), 20), slow.pids

    try:
        early, pid, late, same_pid = asyncio.run(run())
    finally:
        slow.close()
    assert early.status == "unready" and early.loading
    assert late.value == 2 and pid == same_pid


def test_load_limit_kills_and_says_that_loading_failed(pool):
    slow = IsolatedPool(ChildTask("child_handlers:load_slow", (600,)), load_limit_s=0.5)
    try:
        outcome = asyncio.run(slow.load())
    finally:
        slow.close()
    assert outcome.status == "timeout" and outcome.loading and slow.pids == []


def test_calls_run_in_parallel_over_the_children(tmp_path, pool):
    two = IsolatedPool(ChildTask("child_handlers:load"), size=2, load_limit_s=30)

    async def run():
        await two.load()
        started = time.monotonic()
        await asyncio.gather(*(two.call(("sleep", 1.5), 20) for _ in range(2)))
        return time.monotonic() - started

    try:
        assert asyncio.run(run()) < 2.8
    finally:
        two.close()


def test_close_during_a_call_ends_it_and_leaves_no_process(pool):
    async def run():
        await pool.load()
        pid = pool.pids[0]
        call = asyncio.create_task(pool.call(("sleep", 600), 500))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(pool.close)
        return pid, await asyncio.wait_for(call, 5)

    pid, outcome = asyncio.run(run())
    assert outcome.status == "died" and wait_gone(pid)


def test_child_outlives_the_thread_that_first_used_it(pool):
    """Linux ties the parent-death signal to the starting thread; a pool used from a short-lived one must live on."""
    pids = []
    thread = threading.Thread(target=lambda: pids.append(asyncio.run(pool.call(("pid", None), 20)).value))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert asyncio.run(pool.call(("pid", None), 20)).value == pids[0]


def test_children_die_when_the_parent_is_killed(tmp_path):
    (tmp_path / "child_handlers.py").write_text(textwrap.dedent(HANDLERS))
    script = """
        import asyncio
        from openrlhf_like.reward.isolated import ChildTask, IsolatedPool
        async def main():
            pool = IsolatedPool(ChildTask("child_handlers:load"), load_limit_s=30)
            await pool.load()
            print(pool.pids[0], flush=True)
            await pool.call(("sleep", 600), 600)
        asyncio.run(main())
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.1)
        assert alive(pid)
        parent.kill()
        assert wait_gone(pid)


def test_endless_recursion_and_a_held_interpreter_lock_are_killed_too(tmp_path, monkeypatch):
    """A pattern that backtracks for ever never gives the interpreter back; deep stacks end a dump early."""
    (tmp_path / "child_hogs.py").write_text(
        "import re, sys, time\n"
        "def load():\n    return handle\n"
        "def dive(depth):\n    time.sleep(600) if depth == 0 else dive(depth - 1)\n"
        "def handle(what):\n"
        "    if what == 'regex':\n        re.match(r'(a+)+$', 'a' * 60 + 'b')\n"
        "    dive(300)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hogs = IsolatedPool(ChildTask("child_hogs:load"), load_limit_s=30)

    async def run():
        return await hogs.call("regex", 0.5), await hogs.call("dive", 0.5)

    try:
        regex, dive = asyncio.run(run())
    finally:
        hogs.close()
    assert regex.status == dive.status == "timeout"
    assert "in handle" in regex.error and "in dive" in dive.error
