"""run/rollouts: what was trained on can be read back, aligned token by token, and errors are not lost."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from openrlhf_like.observe import RolloutStore, read_rollouts
from openrlhf_like.types import Segment, Trajectory, TurnParams, WaitTimeout


def make_segment(length: int, start: int) -> Segment:
    mask = np.zeros(length, dtype=np.int8)
    mask[start:] = 1
    return Segment(
        token_ids=np.arange(length, dtype=np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        weight_version=np.where(mask, 3, -1).astype(np.int32),
        turn_params=[TurnParams(start, length, temperature=0.6)],
    )


def make_trajectory(name: str, lengths: tuple[int, ...] = (5,), **fields) -> Trajectory:
    values = {"prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0, **fields}
    return Trajectory(name, "p", "g", [make_segment(n, 2) for n in lengths], **values)


def file_of(run_dir, step):
    return run_dir / "rollouts" / f"step_{step:06d}.jsonl"


def test_one_line_a_segment_with_every_array_aligned_to_the_token_ids(tmp_path):
    store = RolloutStore(tmp_path)
    trajectories = [make_trajectory("a", (5, 8)), make_trajectory("b", (4,))]
    advantages = {"a": [np.full(5, 0.25, np.float32), np.arange(8, dtype=np.float32)]}
    assert store.write(1, trajectories, advantages)
    store.close()
    rows = read_rollouts(file_of(tmp_path, 1))
    assert [(r["trajectory_id"], r["segment"]) for r in rows] == [("a", 0), ("a", 1), ("b", 0)]
    for row, length in zip(rows, (5, 8, 4), strict=True):
        for name in ("token_ids", "action_mask", "behavior_logprobs", "weight_version"):
            assert len(row[name]) == length, name
        assert row["step"] == 1 and row["prompt"] == "1+1=" and row["response"] == "2" and row["label"] == "2"
        assert row["turn_params"] == [{"start": 2, "end": length, "temperature": 0.6, "top_p": 1.0, "top_k": -1}]
    assert rows[0]["advantages"] == [0.25] * 5 and rows[1]["advantages"] == list(range(8))
    assert rows[2]["advantages"] is None
    assert rows[0]["behavior_logprobs"] == [0, 0, -0.5, -0.5, -0.5]
    missing = (set(Trajectory.__dataclass_fields__) | set(Segment.__dataclass_fields__)) - {"segments"} - set(rows[0])
    assert not missing


def test_misaligned_advantages_are_refused_where_they_are_handed_over(tmp_path):
    store = RolloutStore(tmp_path)
    with pytest.raises(ValueError, match="trajectory a, segment 0: lengths differ"):
        store.write(1, [make_trajectory("a")], {"a": [np.zeros(3)]})
    with pytest.raises(ValueError, match="1 segments and 2 advantage arrays"):
        store.write(1, [make_trajectory("a")], {"a": [np.zeros(5), np.zeros(5)]})
    store.close()
    assert not file_of(tmp_path, 1).exists()


def test_labels_and_logs_that_json_lacks_are_written_all_the_same(tmp_path):
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    store = RolloutStore(tmp_path)
    odd = make_trajectory(
        "a",
        label=Odd(),
        reward=float("nan"),
        response="line\u2028break\nand \ud800 lone",
        logs={"array": np.arange(2), 1: {2}},
        metrics={"x": np.float32(0.5)},
    )
    odd.segments[0].images = ["a.png", {"pixel_values": np.zeros((3, 4))}]
    store.write(1, [odd])
    store.close()
    (row,) = read_rollouts(file_of(tmp_path, 1))
    assert row["label"] == "<odd>" and row["reward"] is None and row["metrics"] == {"x": 0.5}
    assert row["response"] == "line\u2028break\nand \ud800 lone"
    assert row["logs"] == {"array": [0, 1], "1": "{2}"}
    assert row["images"] == ["a.png", {"pixel_values": "array(3, 4)"}]


def test_trajectory_that_failed_before_its_first_token_is_still_logged(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(1, [Trajectory("a", "p", "g", [], error="environment raised", label=1)])
    store.close()
    (row,) = read_rollouts(file_of(tmp_path, 1))
    assert row["error"] == "environment raised" and row["segment"] is None and row["token_ids"] == []


def test_every_keeps_the_steps_it_says_and_zero_keeps_none(tmp_path):
    store = RolloutStore(tmp_path, every=2)
    assert [store.write(step, [make_trajectory("a")]) for step in range(1, 6)] == [False, True, False, True, False]
    store.close()
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step_000002.jsonl", "step_000004.jsonl"]
    never = RolloutStore(tmp_path / "never", every=0)
    assert not never.write(1, [make_trajectory("a")])
    never.close()
    assert not (tmp_path / "never").exists()


def test_step_appears_under_its_name_only_when_its_last_block_is_written(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(1, [make_trajectory("a")], last=False)
    store.flush()
    assert not file_of(tmp_path, 1).exists()
    store.write(1, [make_trajectory("b")], last=True)
    store.close()
    assert [r["trajectory_id"] for r in read_rollouts(file_of(tmp_path, 1))] == ["a", "b"]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["step_000001.jsonl"]


def test_half_a_step_left_by_a_killed_run_does_not_get_into_the_resumed_one(tmp_path):
    killed = RolloutStore(tmp_path)
    for step in (1, 2, 3):
        killed.write(step, [make_trajectory("old")])
    killed.write(4, [make_trajectory("old")], last=False)
    killed.flush()

    resumed = RolloutStore(tmp_path)
    resumed.write(4, [make_trajectory("new")])
    resumed.close()
    assert [r["trajectory_id"] for r in read_rollouts(file_of(tmp_path, 4))] == ["new"]
    assert RolloutStore(tmp_path).discard_after(2) == 2
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]


def test_error_in_the_background_surfaces_at_the_next_call(tmp_path):
    (tmp_path / "rollouts").write_text("a file where the directory should be")
    store = RolloutStore(tmp_path)
    store.write(1, [make_trajectory("a")])
    with pytest.raises(OSError) as caught:
        store.close()
    assert "writing rollouts" in caught.value.__notes__[0]
    (tmp_path / "rollouts").unlink()
    store.write(2, [make_trajectory("a")])
    store.close()
    assert len(read_rollouts(file_of(tmp_path, 2))) == 1


class Blocking(list):
    """Trajectories whose iteration waits: stands for a disk that hangs."""

    def __init__(self, items, gate: threading.Event) -> None:
        super().__init__(items)
        self.gate, self.passes = gate, 0

    def __iter__(self):
        self.passes += 1
        if self.passes > 1:  # the first pass is the alignment check of the caller
            self.gate.wait(20)
        return super().__iter__()


def test_a_disk_that_hangs_is_a_named_timeout_and_the_queue_is_bounded(tmp_path):
    gate = threading.Event()
    store = RolloutStore(tmp_path, queue_size=1, wait_limit_s=0.2)
    store.write(1, Blocking([make_trajectory("a")], gate))
    with pytest.raises(WaitTimeout, match=r"waited 0\.2 s for the disk .*--logger\.rollouts_every"):
        for step in (2, 3, 4):
            store.write(step, [make_trajectory("a")])
    gate.set()
    store._wait_limit_s = 10
    store.close()
    assert json.loads(file_of(tmp_path, 1).read_text())["trajectory_id"] == "a"
