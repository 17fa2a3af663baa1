"""W&B (offline, the real client) and TensorBoard (real event files): nothing dropped, no secret stored."""

from __future__ import annotations

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from openrlhf_like.observe import Trackers, mask_secrets
from openrlhf_like.types import UserError

wandb = pytest.importorskip("wandb")

KEY = "0123456789abcdef0123456789abcdef01234567"


def logger_config(**changes):
    wandb = {"key": None, "org": None, "group": None, "project": "p", "run_name": "r", "mode": None}
    tensorboard_dir = changes.pop("tensorboard_dir", None)
    return SimpleNamespace(wandb=SimpleNamespace(**{**wandb, **changes}), tensorboard_dir=tensorboard_dir)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A home of its own, so that whatever the client writes anywhere is seen."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home" / name.lower()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    # Nothing leaves this machine, whatever the client decides.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # the client reads its environment once a process
    yield tmp_path
    wandb.teardown()


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log with W&B's 7-byte file header: blocks of 32 KiB, crc (4), length (2), type (1) each."""
    block, position, record = 32768, 7, b""
    while position + 7 <= len(content):
        room = block - position % block
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield record
            record = b""


def wandb_history(run_dir: Path) -> tuple[list[dict], set[str]]:
    """History rows of all offline runs in order, and their run ids, read from W&B's own transaction log."""
    from wandb.proto import wandb_internal_pb2

    rows, ids = [], set()
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda p: p.stat().st_mtime_ns):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows, ids


def test_fault_34_wandb_offline_keeps_everything_also_after_a_resume_and_stores_no_key(offline, monkeypatch, capfd):
    # The key is on the command line, in the configuration and inside another value: W&B itself records argv.
    monkeypatch.setattr(sys, "argv", ["train", "--logger.wandb.key", KEY])
    config = {"logger": {"wandb": {"key": KEY}}, "reward": {"remote_url": f"https://u:{KEY}@host/x?k={KEY}"}, "lr": 0.5}

    trackers = Trackers.from_config(logger_config(key=KEY), offline)
    trackers.start(config)
    trackers.log(1, {"step": 1, "policy/loss": 1.0, "eval/d/pass1": 0.25, "bad": None})
    trackers.log(2, {"step": 2, "policy/loss": 2.0})
    state = json.loads(json.dumps(trackers.state_dict()))
    trackers.log(3, {"step": 3, "policy/loss": 3.0})
    trackers.close()

    time.sleep(1.1)  # W&B names a run's folder by the second
    resumed = Trackers.from_config(logger_config(key=KEY), offline)
    resumed.load_state_dict(state)
    resumed.start(config)
    resumed.log(3, {"step": 3, "policy/loss": 30.0})  # below the client's own counter: must not be dropped
    resumed.log(3, {"step": 3, "eval/d/pass1": 0.5})
    resumed.close()
    assert resumed.failures == {"wandb": 0}

    rows, ids = wandb_history(offline)
    seen = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    assert seen == [
        {"step": 1, "policy/loss": 1.0, "eval/d/pass1": 0.25},
        {"step": 2, "policy/loss": 2.0},
        {"step": 3, "policy/loss": 3.0},
        {"step": 3, "policy/loss": 30.0},
        {"step": 3, "eval/d/pass1": 0.5},
    ]
    assert ids == {state["trackers"]["wandb"]["run_id"]}

    written = [path for path in offline.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert any(b"0.5" in path.read_bytes() for path in written if path.suffix == ".wandb")
    for path in written:
        assert KEY.encode() not in path.read_bytes(), path
    captured = capfd.readouterr()
    assert KEY not in captured.out + captured.err


def test_wandb_key_alone_in_the_environment_uploads_nothing(offline, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert Trackers.from_config(logger_config(), offline).failures == {}
    assert Trackers.from_config(logger_config(key=KEY, mode="disabled"), offline).failures == {}
    assert Trackers.from_config(logger_config(mode="offline"), offline).failures == {"wandb": 0}


def test_wandb_key_true_means_logged_in_before_and_masks_no_true_in_the_configuration(offline):
    trackers = Trackers.from_config(logger_config(key="True", mode="offline"), offline)
    trackers.start({"flag": "True story"})
    trackers.close()
    (file,) = offline.glob("wandb/offline-run-*/run-*.wandb")
    assert b"True story" in file.read_bytes()


def test_wandb_online_without_a_key_is_one_line_with_the_flag(offline):
    trackers = Trackers.from_config(logger_config(mode="online"), offline)
    with pytest.raises(UserError, match="--logger.wandb.key or WANDB_API_KEY.*--logger.wandb.mode offline") as caught:
        trackers.start({})
    assert "\n" not in str(caught.value)


def test_wandb_server_out_of_reach_goes_on_offline(offline, caplog):
    trackers = Trackers.from_config(logger_config(key=KEY, mode="online"), offline)
    with caplog.at_level(logging.WARNING):
        trackers.start({})
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert any("going on offline" in message for message in caplog.messages)
    assert [row["a"] for row in wandb_history(offline)[0]] == [1.0]


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_fault_34_tensorboard_has_each_step_once_after_a_resume_in_the_same_directory(tmp_path):
    trackers = Trackers.from_config(logger_config(tensorboard_dir=str(tmp_path / "tb")), tmp_path)
    trackers.start({})
    trackers.log(1, {"step": 1, "policy/loss": np.float32(1.0), "eval/d/pass1": 0.25, "bad": float("nan")})
    trackers.log(2, {"step": 2, "policy/loss": 2.0})
    state = json.loads(json.dumps(trackers.state_dict()))
    trackers.log(3, {"step": 3, "policy/loss": 3.0})
    # Killed: no close. The resumed command has a timestamped name of its own.
    resumed = Trackers.from_config(logger_config(tensorboard_dir=str(tmp_path / "tb"), run_name="later"), tmp_path)
    resumed.load_state_dict(state)
    resumed.start({})
    resumed.log(3, {"step": 3, "policy/loss": 30.0, "eval/d/pass1": 0.5})
    resumed.close()
    assert not (tmp_path / "tb" / "later").exists()
    assert tensorboard_scalars(tmp_path / "tb" / "r") == {
        "policy/loss": [(1, 1.0), (2, 2.0), (3, 30.0)],
        "eval/d/pass1": [(1, 0.25), (3, 0.5)],
    }


def test_missing_package_is_one_line_with_the_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--logger.tensorboard_dir .* pip install tensorboard"):
        Trackers.from_config(logger_config(tensorboard_dir="x"), tmp_path)
    with pytest.raises(UserError, match="--logger.wandb.* pip install wandb"):
        Trackers.from_config(logger_config(mode="offline"), tmp_path)


def test_unwritable_tensorboard_directory_is_one_line_with_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    trackers = Trackers.from_config(logger_config(tensorboard_dir=str(tmp_path / "file" / "tb")), tmp_path)
    with pytest.raises(UserError, match="--logger.tensorboard_dir: .* is not writable"):
        trackers.start({})


class FailingTracker:
    """A third-party client whose server is gone."""

    name = "failing"

    def start(self, config):
        pass

    def log(self, step, metrics):
        raise ConnectionError("server gone")

    def close(self):
        raise OSError("upload failed")

    def state_dict(self):
        return {}

    def load_state_dict(self, state, step):
        pass


def test_tracker_that_fails_does_not_stop_training_nor_the_other_tracker(tmp_path, caplog):
    tensorboard = Trackers.from_config(logger_config(tensorboard_dir=str(tmp_path / "tb")), tmp_path)
    trackers = Trackers([FailingTracker(), *tensorboard._trackers])
    trackers.start({})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            trackers.log(step, {"a": float(step)})
        trackers.close()
    assert trackers.failures == {"failing": 4, "tensorboard": 0}
    assert [message for message in caplog.messages if "failing failed" in message] == [
        "failing failed (ConnectionError: server gone); training goes on, further failures are only counted"
    ]
    assert tensorboard_scalars(tmp_path / "tb" / "r")["a"] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_order_of_calls_is_checked(tmp_path):
    trackers = Trackers([])
    with pytest.raises(RuntimeError, match="before Trackers.start"):
        trackers.log(1, {})
    trackers.start({})
    with pytest.raises(RuntimeError, match="after Trackers.start"):
        trackers.load_state_dict({"step": 1, "trackers": {}})


def test_mask_secrets_masks_secrets_and_nothing_else():
    tree = {
        "logger.wandb.key": "abc",
        "hf_token": "abc",
        "data": {"input_key": "question", "label_key": "answer", "max_new_tokens": 5, "tokenizer": "t"},
        "urls": ["http://user:pw@host/a", "https://host/b"],
        "key": None,
        "other": "has abc inside",
    }
    assert mask_secrets(tree, ("abc",)) == {
        "logger.wandb.key": "***",
        "hf_token": "***",
        "data": {"input_key": "question", "label_key": "answer", "max_new_tokens": 5, "tokenizer": "t"},
        "urls": ["http://***@host/a", "https://host/b"],
        "key": None,
        "other": "has *** inside",
    }


def test_a_tracker_that_never_closes_does_not_hold_the_command(monkeypatch, caplog):
    import threading

    from openrlhf_like.observe import trackers as module

    class Hanging:
        name = "hanging"

        def start(self, config):
            pass

        def log(self, step, metrics):
            pass

        def close(self):
            threading.Event().wait(30)

        def state_dict(self):
            return {}

        def load_state_dict(self, state, step):
            pass

    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    held = module.Trackers([Hanging()])
    held.start({})
    held.close()
    assert "hanging did not finish its upload" in caplog.text
