"""What a person sees: bars on a terminal, lines in a file, one table or line a step, quiet libraries."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from openrlhf_like.observe import RunProgress, StepTable, quiet_env, setup_logging
from openrlhf_like.observe.progress import StepClock, format_seconds
from openrlhf_like.observe.step_table import KEY_METRICS, format_value
from openrlhf_like.types import UserError


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_bars_show_steps_samples_and_time_left_on_a_terminal():
    console = terminal()
    with RunProgress(10, done_steps=4, console=console) as progress:
        with progress.phase("rollout", total=8) as phase:
            phase.advance(3)
            progress._bars.refresh()
        progress.step_done()
        progress._bars.refresh()
    shown = console.file.getvalue()
    assert "rollout" in shown and "3/8" in shown
    assert " 4/10" in shown and " 5/10" in shown and "left 0:0" in shown


def test_without_a_terminal_progress_is_a_log_line_at_intervals(caplog):
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO), RunProgress(5, console=console, interval_s=0.0) as progress:
        with progress.phase("reward", total=4) as phase:
            phase.advance()
        progress.step_done()
    assert caplog.messages[0] == "train: step 0/5, reward 1/4, time left ?"
    assert caplog.messages[1].startswith("train: step 1/5, time left 0:0")
    assert console.file.getvalue() == ""

    caplog.clear()
    with caplog.at_level(logging.INFO), RunProgress(5, console=console, interval_s=1000.0) as progress:
        for _ in range(5):
            progress.step_done()
    assert caplog.messages == []


def test_phase_counts_exactly_from_many_threads():
    with RunProgress(1, console=terminal()) as progress, progress.phase("rollout", total=800) as phase:
        threads = [threading.Thread(target=lambda: [phase.advance() for _ in range(100)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert phase.done == 800


def test_time_left_follows_the_recent_steps_and_not_a_slow_first_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("openrlhf_like.observe.progress.time.monotonic", lambda: now[0])
    clock = StepClock(total=100, done=90)
    assert clock.seconds_left() is None
    for seconds in (60.0, 2.0, 2.0, 2.0):
        now[0] += seconds
        assert clock.tick() == seconds
    assert clock.seconds_left() == 2.0 * 6


@pytest.mark.parametrize("seconds, text", [(None, "?"), (5, "0:05"), (125, "2:05"), (3725, "1:02:05")])
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


METRICS = {
    "step": 3,
    "reward/mean": 0.53125,
    "policy/loss": -1.2e-5,
    "rollout/truncated_fraction": 0.0,
    "policy/grad_norm": None,
    "time/step": 12.345,
    "throughput/tokens_per_second": 5432.1,
    "eval/[gsm]/pass1": 0.25,
    "internal/other": 1.0,
}


def test_step_is_one_line_of_plain_text_without_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    StepTable(10, console).show(3, METRICS)
    assert console.file.getvalue() == (
        "step 3/10  reward/mean 0.5312  policy/loss -1.20e-05  policy/grad_norm -  rollout/truncated_fraction 0  "
        "time/step 12.35s  throughput/tokens_per_second 5432  eval/[gsm]/pass1 0.25\n"
    )


def test_step_is_a_table_on_a_terminal_with_every_key_metric():
    console = terminal()
    StepTable(10, console).show(3, METRICS)
    shown = console.file.getvalue()
    assert "step 3/10" in shown and "0.5312" in shown and "12.35s" in shown and "eval/[gsm]/pass1" in shown
    assert "internal/other" not in shown
    assert "…" not in shown


@pytest.mark.parametrize("width", [50, 80, 120, 200])
def test_no_metric_is_cut_at_any_width(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    StepTable(1000, console).show(999, dict.fromkeys(KEY_METRICS, -123.456789))
    shown = console.file.getvalue()
    assert "…" not in shown
    for name in KEY_METRICS:
        assert name in shown


def test_key_metrics_are_documented_names():
    documented = (_repo() / "docs" / "metrics.md").read_text()
    for name in KEY_METRICS:
        assert f"`{name}`" in documented, name


def _repo():
    from pathlib import Path

    return Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("value, text", [(None, "-"), (0, "0"), (1e-6, "1.00e-06"), (0.5, "0.5"), (123456.7, "123457")])
def test_format_value(value, text):
    assert format_value("policy/lr", value) == text


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=_repo())


def test_log_lines_go_to_stderr_tables_to_stdout_and_libraries_are_quiet():
    done = run_python(
        "import logging\n"
        "from openrlhf_like.observe import setup_logging, StepTable\n"
        "setup_logging('info'); setup_logging('info')\n"
        "logging.getLogger('ours').info('hello [bold]'); logging.getLogger('vllm').info('noise')\n"
        "logging.getLogger('vllm').warning('trouble')\n"
        "StepTable(2).show(1, {'reward/mean': 0.5})\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "step 1/2  reward/mean 0.5\n"
    assert done.stderr.count("INFO ours: hello [bold]") == 1
    assert "noise" not in done.stderr and "trouble" in done.stderr


def test_importing_observe_imports_nothing_heavy():
    done = run_python(
        "import sys, openrlhf_like.observe\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'wandb', 'tensorboard', 'matplotlib', 'transformers')"
        " if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_unknown_log_level_is_one_line():
    with pytest.raises(UserError, match="'loud' is unknown; use one of"):
        setup_logging("loud")


def test_quiet_env_is_strings_only():
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in quiet_env().items())
