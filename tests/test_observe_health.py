"""Warnings that name the flag, the run directory, timers, and what is left for people."""

from __future__ import annotations

import logging
import os
import time

import pytest

from openrlhf_like.observe import (
    HealthLimits,
    HealthMonitor,
    MetricsWriter,
    Timer,
    plot_reward_curve,
    prepare_run_dir,
    results_table,
    throughput,
)
from openrlhf_like.observe.run_dir import write_text_atomic
from openrlhf_like.types import UserError


def test_fault_35_over_90_percent_at_the_limit_is_a_loud_warning_that_names_the_flag(caplog):
    monitor = HealthMonitor()
    with caplog.at_level(logging.WARNING):
        assert monitor.check(1, {"rollout/truncated_fraction": 0.9}) == []
        (message,) = monitor.check(2, {"rollout/truncated_fraction": 0.95})
    assert "--rollout.max_new_tokens" in message and "95%" in message
    assert caplog.messages == [message]
    assert caplog.records[0].levelno == logging.WARNING


def test_each_kind_is_said_once_in_n_steps():
    monitor = HealthMonitor(repeat_every=10)
    bad = {"rollout/truncated_fraction": 1.0}
    warned = [step for step in range(1, 31) if monitor.check(step, bad)]
    assert warned == [1, 11, 21]
    both = monitor.check(31, {**bad, "reward/group_zero_std_fraction": 1.0})
    assert len(both) == 2


@pytest.mark.parametrize(
    "metrics, flag",
    [
        ({"reward/group_zero_std_fraction": 1.0}, "--rollout.n_samples_per_prompt"),
        ({"reward/failed_fraction": 0.5}, "--timeout.reward"),
        ({"rollout/logprob_diff_mean": 0.2}, "--vllm.check_weight_sync"),
        ({"rollout/logprob_diff_mean": float("nan")}, "--vllm.check_weight_sync"),
        ({"policy/grad_norm": None}, "--actor.adam.lr"),
        ({"policy/grad_norm": float("inf")}, "--actor.adam.lr"),
        ({"train/grad_norm": float("nan")}, "--adam.lr"),
        ({"policy/kl_ref": 50.0}, "--algo.kl.init_coef"),
        ({"policy/approx_kl": 2.0}, "--actor.eps_clip"),
    ],
)
def test_unhealthy_metric_names_the_flag_to_turn(metrics, flag):
    (message,) = HealthMonitor().check(1, metrics)
    assert flag in message and next(iter(metrics)) in message and "\n" not in message


def test_healthy_and_missing_metrics_are_silent():
    healthy = {
        "rollout/truncated_fraction": 0.2,
        "reward/group_zero_std_fraction": 0.6,
        "reward/failed_fraction": 0.0,
        "rollout/logprob_diff_mean": 0.01,
        "policy/grad_norm": 3.0,
        "policy/kl_ref": 0.1,
        "policy/approx_kl": 0.01,
    }
    assert HealthMonitor().check(1, healthy) == []
    assert HealthMonitor().check(1, {}) == []
    assert len(HealthMonitor(HealthLimits(truncated_fraction=0.1)).check(1, healthy)) == 1


def test_run_directory_holds_the_configuration(tmp_path):
    run_dir = prepare_run_dir(tmp_path / "a" / "b", "x: 1\n")
    assert run_dir == tmp_path / "a" / "b" / "run"
    assert (run_dir / "config.yaml").read_text() == "x: 1\n"
    prepare_run_dir(tmp_path / "a" / "b", "x: 2\n")
    assert [p.name for p in run_dir.iterdir()] == ["config.yaml"]
    assert (run_dir / "config.yaml").read_text() == "x: 2\n"


def test_output_directory_not_writable_is_one_line_with_the_flag(tmp_path):
    # A file where a directory should be: refused for root too, unlike permission bits.
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--ckpt\.output_dir '.*file/out' is not writable") as caught:
        prepare_run_dir(tmp_path / "file" / "out", "")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_directory_without_permission_is_one_line_with_the_flag(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="--ckpt.output_dir .* is not writable .Permission denied."):
        prepare_run_dir(tmp_path / "out", "")


def test_new_run_sets_the_earlier_one_aside(tmp_path):
    run_dir = prepare_run_dir(tmp_path, "x: 1\n")
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "rollouts").mkdir()
    prepare_run_dir(tmp_path, "x: 2\n", resume=False)
    assert sorted(p.name for p in run_dir.iterdir()) == ["config.yaml", "previous-1"]
    assert sorted(p.name for p in (run_dir / "previous-1").iterdir()) == ["metrics.jsonl", "rollouts"]


def test_failed_atomic_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_text_atomic(path, "old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_timer_adds_up_also_through_errors_and_starts_again():
    timer = Timer()
    for _ in range(2):
        with timer("generate"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer("train"):
        raise KeyError
    timer.add("train", 1.0)
    assert timer.seconds("generate") >= 0.02
    times = timer.pop()
    assert times.keys() == {"time/generate", "time/train"}
    assert 0.02 <= times["time/generate"] < 1.0 and times["time/train"] == pytest.approx(1.0, abs=0.1)
    assert timer.pop() == {}


def test_throughput():
    assert throughput(tokens=100, samples=4, seconds=2.0) == {
        "throughput/tokens_per_second": 50.0,
        "throughput/samples_per_second": 2.0,
    }
    assert throughput(tokens=100, samples=4, seconds=0.0) == {}


def test_reward_curve_is_a_picture_of_the_points(tmp_path):
    pytest.importorskip("matplotlib")
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.log(step, {"reward/mean": step / 5})
    writer.close()
    path = plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "out" / "curve.png", ("reward/mean", "absent"))
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    with pytest.raises(UserError, match="no step has a value for absent"):
        plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", ("absent",))


def test_reward_curve_without_matplotlib_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")


def test_results_table_is_aligned_markdown():
    table = results_table([["SFT", 0.41234, 200], ["GRPO | best", 0.75, 200]], ["model", "pass@1", "n"])
    assert table.splitlines() == [
        "| model        | pass@1 |   n |",
        "| ------------ | -----: | --: |",
        "| SFT          |  0.412 | 200 |",
        "| GRPO \\| best |  0.750 | 200 |",
    ]
    with pytest.raises(ValueError, match="has 1 cells, the table has 2"):
        results_table([["a"]], ["a", "b"])
