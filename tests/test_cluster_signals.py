"""What a command started is gone when it ends, however it ends: real Ray, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _start(tmp_path: Path, short_dir: Path, mode: str = "hang") -> tuple[subprocess.Popen[bytes], list[int]]:
    path = tmp_path / "pids.json"
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "RAY_TMPDIR": str(short_dir)}
    env.pop("RAY_ADDRESS", None)
    command = subprocess.Popen(
        [sys.executable, str(HERE / "cluster_command.py"), str(path), mode],
        env=env,
        stderr=(tmp_path / "stderr").open("wb"),
        start_new_session=True,  # a process group of its own, as a shell gives a command
    )
    until = time.monotonic() + 180
    while not path.exists():
        assert command.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < until, "the command did not start in three minutes"
        time.sleep(0.1)
    return command, json.loads(path.read_text())


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a path short enough for Ray's sockets, where its session is seen to come and go."""
    with tempfile.TemporaryDirectory(prefix="oc", dir="/tmp") as folder:
        yield Path(folder)


def _ends(command: subprocess.Popen[bytes], pids: list[int], limit: float) -> int:
    """Exit code; fails when anything listed still runs ``limit`` seconds from now."""
    until = time.monotonic() + limit
    try:
        code = command.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        command.kill()
        pytest.fail(f"the command still ran after {limit} s")
    while left := [p for p in pids if _alive(p)]:
        assert time.monotonic() < until, f"still running after {limit} s: {[psutil.Process(p) for p in left]}"
        time.sleep(0.1)
    while shared := [path for p in pids for path in Path("/dev/shm").glob(f"openrlhf_like_{p}_*")]:
        assert time.monotonic() < until, f"shared memory left: {shared}"
        time.sleep(0.1)
    return code


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "signum, whole_group, code",
    [
        (signal.SIGINT, True, 130),  # Ctrl-C in a terminal reaches every process of the group, Ray's servers too
        (signal.SIGTERM, False, 143),  # kill PID
        (signal.SIGTERM, True, 143),  # timeout, SLURM
    ],
    ids=["ctrl-c", "sigterm", "sigterm-group"],
)
def test_a_stop_signal_ends_every_process_within_15_seconds(tmp_path, short_dir, signum, whole_group, code):
    command, pids = _start(tmp_path, short_dir)
    (os.killpg if whole_group else os.kill)(command.pid, signum)
    assert _ends(command, pids, 15) == code
    assert not list(short_dir.iterdir()), "Ray's folder is removed"


@pytest.mark.timeout(300)
def test_a_driver_killed_with_sigkill_leaves_nothing_after_30_seconds(tmp_path, short_dir):
    command, pids = _start(tmp_path, short_dir)
    command.kill()
    assert _ends(command, pids, 30) == -signal.SIGKILL


@pytest.mark.timeout(300)
def test_a_run_that_fails_ends_every_process_and_keeps_the_workers_logs(tmp_path, short_dir):
    command, pids = _start(tmp_path, short_dir, "raise")
    assert _ends(command, pids, 15) == 1
    stderr = (tmp_path / "stderr").read_text()
    assert "the run failed" in stderr and "logs are kept in" in stderr
    assert list(short_dir.glob("orl-*/session_latest/logs/*.err"))
