"""The demo as a user runs it, and its control. About four minutes each on two quiet cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_like.observe import read_records
from tests.pipeline_runs import REWARDS, ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def demo(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "examples" / "demo" / "run_demo.py"), "--output_dir", str(out), *flags]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=1100)


def pass1(out: Path) -> list[float]:
    records, _ = read_records(out / "grpo" / "run" / "metrics.jsonl")
    return [r["eval/heldout/pass1"] for r in records if "eval/heldout/pass1" in r]


def test_grpo_raises_held_out_pass1_by_at_least_a_fifth(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    before, after = pass1(tmp_path)
    assert 0.2 <= before <= 0.6 and after - before >= 0.2
    assert f"{before:.3f}" in done.stdout and f"{after:.3f}" in done.stdout
    assert (tmp_path / "reward_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_demos_control_with_a_constant_reward_does_not_rise_and_exits_non_zero(tmp_path: Path) -> None:
    done = demo(tmp_path, "--reward", str(REWARDS / "reward_constant.py"))
    assert done.returncode == 1 and "FAILED: GRPO raised pass@1 by 0.000" in done.stdout, done.stdout[-2000:]
    before, after = pass1(tmp_path)
    assert before == after
