"""What the commands do around the pipeline function: warnings once, exit codes, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys, time
from openrlhf_like.cli.common import run_command
from openrlhf_like.types import TrainingAborted, UserError, WaitTimeout

def target(cfg):
    {body}

sys.exit(run_command("train_sft", "__main__:target", {argv!r}))
"""


def program(tmp_path: Path, body: str, *flags: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 8}))
    (tmp_path / "data.jsonl").write_text('{"input": "a"}\n')
    argv = ["--model.model_name_or_path", "model", "--data.dataset", "data.jsonl", *flags]
    words = [sys.executable, "-c", SCRIPT.format(body=body, argv=argv)]
    return words, {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("print(cfg.train.seed)", 0, None),
        ("raise UserError('data.jsonl:3: no such key')", 2, "error: data.jsonl:3: no such key"),
        ("raise TrainingAborted('all rewards are equal')", 1, "error: all rewards are equal"),
        (
            "raise WaitTimeout('driver waited 5 s; see --timeout.init')",
            1,
            "error: driver waited 5 s; see --timeout.init",
        ),
        ("raise KeyboardInterrupt", 130, "stopped by SIGINT"),
        ("raise ZeroDivisionError('a fault of ours keeps its traceback')", 1, None),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, code: int, line: str | None) -> None:
    words, env = program(tmp_path, body)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if line is not None:
        assert done.stderr.splitlines() == [line]


def test_warnings_are_logged_once(tmp_path: Path) -> None:
    words, env = program(tmp_path, "print('trained')", "--eval.steps", "5")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "trained\n"
    assert done.stderr.count("--eval.steps (command line) has no effect without --eval.dataset") == 1


def test_sigterm_ends_with_143(tmp_path: Path) -> None:
    words, env = program(tmp_path, "print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
