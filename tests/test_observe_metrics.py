"""metrics.jsonl: one record a step, whatever reports at that step and whatever was killed."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch

from openrlhf_like.observe import MetricsWriter, read_records, series


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_fault_34_rollout_training_and_evaluation_of_a_step_are_one_record(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add(1, {"rollout/response_length": 12.0})
    writer.add(1, {"policy/loss": 0.5})
    writer.add(1, {"eval/math/pass1": 0.25})
    record = writer.commit()
    writer.log(2, {"policy/loss": 0.4})
    writer.close()
    expected = {"step": 1, "rollout/response_length": 12.0, "policy/loss": 0.5, "eval/math/pass1": 0.25}
    assert record == expected
    assert lines(tmp_path) == [expected, {"step": 2, "policy/loss": 0.4}]


def test_fault_34_evaluation_that_comes_late_joins_the_line_already_written(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.log(1, {"policy/loss": 0.5})
    writer.log(2, {"policy/loss": 0.4})
    assert writer.log(1, {"eval/d/pass1": 1.0}) == {"step": 1, "policy/loss": 0.5, "eval/d/pass1": 1.0}
    writer.log(3, {"policy/loss": 0.3})
    writer.close()
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3]
    assert lines(tmp_path)[0]["eval/d/pass1"] == 1.0


def test_fault_34_resume_keeps_each_step_once(tmp_path):
    killed = MetricsWriter(tmp_path)
    state = {}
    for step in range(1, 8):
        killed.log(step, {"policy/loss": float(step)})
        if step == 4:
            state = json.loads(json.dumps(killed.state_dict()))  # a checkpoint is JSON-able
    # Killed in the middle of a line: no close, half a record on disk.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "policy/lo')

    resumed = MetricsWriter(tmp_path)
    resumed.load_state_dict(state)
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4]
    for step in range(5, 10):
        resumed.log(step, {"policy/loss": 10.0 * step})
    resumed.close()
    got = lines(tmp_path)
    assert [r["step"] for r in got] == list(range(1, 10))
    assert [r["policy/loss"] for r in got] == [1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 70.0, 80.0, 90.0]


def test_fault_34_checkpoint_between_two_metrics_of_a_step_loses_neither(tmp_path):
    killed = MetricsWriter(tmp_path)
    killed.log(1, {"policy/loss": 1.0})
    killed.add(2, {"policy/loss": 2.0})
    state = killed.state_dict()  # step 2 is open, and its line never gets written

    resumed = MetricsWriter(tmp_path)
    resumed.load_state_dict(state)
    resumed.add(2, {"eval/d/pass1": 0.5})
    resumed.commit()
    resumed.close()
    assert lines(tmp_path) == [{"step": 1, "policy/loss": 1.0}, {"step": 2, "policy/loss": 2.0, "eval/d/pass1": 0.5}]


def test_fault_34_record_written_after_the_checkpoint_is_handed_to_the_trackers_again(tmp_path):
    killed = MetricsWriter(tmp_path)
    killed.add(1, {"policy/loss": 1.0})
    state = killed.state_dict()
    killed.add(1, {"eval/d/pass1": 0.5})
    killed.commit()
    killed.log(2, {"policy/loss": 2.0})

    resumed = MetricsWriter(tmp_path)
    resumed.load_state_dict(state)
    whole = {"step": 1, "policy/loss": 1.0, "eval/d/pass1": 0.5}
    assert lines(tmp_path) == [whole]
    assert resumed.commit() == whole
    resumed.log(2, {"policy/loss": 3.0})
    resumed.close()
    assert lines(tmp_path) == [whole, {"step": 2, "policy/loss": 3.0}]


def test_resume_mends_a_last_line_without_its_newline(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}')
    writer = MetricsWriter(tmp_path)
    writer.resume(1)
    writer.log(2, {"a": 2.0})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]


def test_new_run_in_an_old_directory_mixes_nothing_and_deletes_nothing(tmp_path):
    first = MetricsWriter(tmp_path)
    first.log(1, {"a": 1.0})
    first.close()
    second = MetricsWriter(tmp_path)
    second.log(1, {"a": 2.0})
    second.close()
    assert lines(tmp_path) == [{"step": 1, "a": 2.0}]
    assert lines(tmp_path / "previous-1") == [{"step": 1, "a": 1.0}]


def test_each_line_is_on_disk_when_commit_returns(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.log(1, {"a": 1.0})
    assert lines(tmp_path) == [{"step": 1, "a": 1.0}]
    writer.close()


def test_skipping_a_commit_is_an_error_and_not_a_silent_loss_for_the_trackers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add(1, {"a": 1.0})
    with pytest.raises(ValueError, match="step 1 is open"):
        writer.add(2, {"a": 2.0})
    assert writer.close() == {"step": 1, "a": 1.0}


def test_nonfinite_values_are_null_counted_and_warned_once(tmp_path, caplog):
    writer = MetricsWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.log(1, {"a": math.nan, "b": math.inf, "c": torch.tensor(float("nan"))})
        writer.log(2, {"a": np.float32("nan"), "b": 1.0})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert lines(tmp_path) == [{"step": 1, "a": None, "b": None, "c": None}, {"step": 2, "a": None, "b": 1.0}]
    assert writer.nonfinite == 4
    assert sum("metric a is not finite" in message for message in caplog.messages) == 1


def test_numpy_and_torch_scalars_become_plain_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.log(1, {"i": np.int64(3), "f": np.float32(0.5), "t": torch.tensor(2), "x": np.ones(1)})
    writer.close()
    assert lines(tmp_path) == [{"step": 1, "i": 3, "f": 0.5, "t": 2, "x": 1.0}]
    with pytest.raises(ValueError):
        MetricsWriter(tmp_path).log(1, {"a": np.ones(2)})


def test_a_value_given_twice_in_a_step_is_said(tmp_path, caplog):
    writer = MetricsWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.add(1, {"a": 1.0})
        writer.add(1, {"a": 2.0})
    assert writer.commit() == {"step": 1, "a": 2.0}
    assert any("metric a was given twice" in message for message in caplog.messages)
    writer.close()


def test_series_skips_steps_without_a_value(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.log(1, {"reward/mean": 0.5})
    writer.log(2, {"reward/mean": math.nan})
    writer.log(3, {"policy/loss": 1.0})
    writer.log(4, {"reward/mean": 1.0})
    writer.close()
    records, torn = read_records(tmp_path / "metrics.jsonl")
    assert torn == 0
    assert series(records, "reward/mean") == ([1, 4], [0.5, 1.0])
