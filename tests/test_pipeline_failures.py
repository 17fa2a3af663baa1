"""Runs that go wrong: rewards that fail, and stop signals."""

from __future__ import annotations

import functools
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pipeline_runs import RL_LIMIT, Run, family, grpo_flags, run, start, wait_gone, workspace, write_jsonl

pytestmark = pytest.mark.timeout(1200)

HANGS = "3+3 "


@functools.cache
def faulty() -> Run:
    """Rewards that raise, are NaN, are None, and one that never comes, under a limit of two seconds a call."""
    sums = "1+1 2+3 3+4 4+4 3+3 1+2 6+7 9+9 0+2 0+3 1+0 8+8 9+1 4+0".split()
    rows = [{"input": f"{s} ", "label": str(int(s[0]) + int(s[2]))} for s in sums]
    prompts = write_jsonl(workspace() / "faulty.jsonl", rows)
    flags = grpo_flags(
        "faulty", "reward_faulty.py", data__prompt_dataset=prompts, rollout__batch_size=7, train__batch_size=28,
        train__micro_batch_size=7, timeout__reward=2, reward__max_failure_fraction=0.95,
    )  # fmt: skip
    return run("train_grpo_ray", flags)


def test_fault_26_and_27_the_run_goes_on_and_counts_what_failed() -> None:
    done = faulty()
    assert [r["step"] for r in done.steps] == [1, 2]
    hung = 0
    for record in done.steps:
        rows = done.rollouts(record["step"])
        failed = {row["prompt"] for row in rows if row["error"] is not None}
        assert record["reward/failed_fraction"] == sum(row["error"] is not None for row in rows) / 28
        assert record["train/samples"] == sum(row["advantages"] is not None for row in rows)
        expected = {row["prompt"] for row in rows if row["label"] in ("5", "7", "8", "13") or row["prompt"] == HANGS}
        if HANGS in failed:
            hung += 1
            assert expected <= failed  # those that the time did not reach are failures too
        else:
            assert expected == failed
        for row in rows:
            assert (row["error"] is None) == (row["advantages"] is not None)
    assert hung == 1 and any("cannot score a sum of 5 or 13" in line for line in done.stderr.splitlines())


def test_fault_27_a_reward_that_hangs_ends_within_its_limit() -> None:
    """Twice the limit for finding the sample at fault, and the time to start its process again."""
    assert max(r["time/reward"] for r in faulty().steps) < 2 * 2 + 10
    assert faulty().code == 0


def test_too_many_failures_end_the_run_with_the_flag() -> None:
    done = run("train_grpo_ray", grpo_flags("broken", "reward_broken.py"), code=1)
    (line,) = done.errors()
    assert "--reward.max_failure_fraction" in line and "the reward is broken" in line and "Traceback" not in line
    assert not (done.output / "config.json").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_in_mid_training_ends_every_process_within_15_seconds(signum: int, code: int) -> None:
    name = f"stopped-{code}"
    flags = grpo_flags(name, train__num_episodes=200, logger__wandb__mode="offline")
    log = workspace() / "logs" / name
    process = start("train_grpo_ray", flags, log)
    _wait_for(process, workspace() / name / "run" / "rollouts" / "step_000002.jsonl", log)
    pids = family(process)
    assert len(pids) > 5
    begun = time.monotonic()
    process.send_signal(signum)
    assert process.wait(15) == code, Path(f"{log}.err").read_text()[-3000:]
    assert wait_gone(pids, 15 - (time.monotonic() - begun)) == []
    stderr = Path(f"{log}.err").read_text()
    assert f"stopped by {signal.Signals(signum).name}" in stderr and "Traceback" not in stderr
    assert not list(Path("/dev/shm").glob(f"openrlhf_like_{process.pid}_*"))


def _wait_for(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    until = time.monotonic() + RL_LIMIT
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, Path(f"{log}.err").read_text()[-3000:]
        time.sleep(0.1)
