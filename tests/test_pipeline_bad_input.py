"""Bad input to the real commands: exit code 2, one line that names the flag and the fix, and nothing started."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pipeline_runs import REWARDS, data, environment, model, run, sft_flags, start, workspace, write_jsonl

SECONDS = 60.0  # far above what is needed (about 5): tests share their machine


def rl_flags(name: str, **changes: Any) -> dict[str, Any]:
    """A policy run that would start, had it no fault; it needs no SFT checkpoint to be refused."""
    return {
        "actor.model_name_or_path": model(),
        "data.prompt_dataset": data() / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 16,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 4,
        "train.batch_size": 32,
        "reward.remote_url": REWARDS / "reward_sum.py",
        "ckpt.output_dir": workspace() / name,
        "ckpt.path": workspace() / f"{name}-ckpt",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


def malformed() -> Path:
    path = write_jsonl(workspace() / "bad" / "malformed.jsonl", [{"input": "1+1 ", "label": "2"}] * 2)
    path.write_text(path.read_text() + '{"input": "2+2 ", "label"\n')
    return path


def without_key() -> Path:
    return write_jsonl(workspace() / "bad" / "key.jsonl", [{"input": "1+1 ", "label": "2"}, {"prompt": "1+2 "}])


def small_vocabulary() -> Path:
    path = workspace() / "bad" / "small_vocabulary"
    shutil.copytree(model(), path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    return path


def no_reward_func() -> Path:
    path = workspace() / "bad" / "no_reward_func.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("def reward(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    return path


def below_a_file() -> Path:
    path = workspace() / "bad" / "a_file"
    path.parent.mkdir(exist_ok=True)
    path.write_text("not a folder")
    return path / "out"


# name -> (command, changes or a function that makes them, what the line must say)
CASES: dict[str, tuple[str, Any, list[str]]] = {
    "missing model": (
        "train_grpo_ray", {"actor__model_name_or_path": "/no/such/model"},
        ["--actor.model_name_or_path /no/such/model", "give a local model folder"],
    ),
    "missing data": (
        "train_grpo_ray", {"data__prompt_dataset": "no_such.jsonl"},
        ["--data.prompt_dataset no_such.jsonl", "give an existing one"],
    ),
    "malformed line": ("train_grpo_ray", lambda: {"data__prompt_dataset": malformed()}, ["malformed.jsonl:3"]),
    "malformed line in SFT": ("train_sft", lambda: {"data__dataset": malformed()}, ["malformed.jsonl:3"]),
    "missing key": (
        "train_grpo_ray", lambda: {"data__prompt_dataset": without_key()}, ["key.jsonl:2", "--data.input_key"],
    ),
    "unknown flag": (
        "train_grpo_ray", {"rollout__n_sample_per_prompt": 4},
        ["--rollout.n_sample_per_prompt", "did you mean --rollout.n_samples_per_prompt?"],
    ),
    "wrong type": ("train_grpo_ray", {"rollout__batch_size": "eight"}, ["--rollout.batch_size", "'eight'"]),
    "micro-batch above batch": (
        "train_grpo_ray", {"train__micro_batch_size": 64},
        ["--train.micro_batch_size 64", "--train.batch_size 32", "give 32 or less"],
    ),
    "one sample a group": (
        "train_grpo_ray", {"rollout__n_samples_per_prompt": 1, "train__batch_size": 8},
        ["--rollout.n_samples_per_prompt 1", "group_norm", "give 2 or more"],
    ),
    "output below a file": (
        "train_grpo_ray", lambda: {"ckpt__output_dir": below_a_file()},
        ["--ckpt.output_dir", "cannot be written", "give a folder"],
    ),
    "output below a file in SFT": ("train_sft", lambda: {"ckpt__output_dir": below_a_file()}, ["--ckpt.output_dir"]),
    "no reward_func": (
        "train_grpo_ray", lambda: {"reward__remote_url": no_reward_func()},
        ["--reward.remote_url", "no function reward_func", "define reward_func("],
    ),
    "small vocabulary": (
        "train_grpo_ray", lambda: {"actor__model_name_or_path": small_vocabulary()},
        ["--actor.model_name_or_path", "vocabulary is 100", "resize"],
    ),
    "small vocabulary in SFT": (
        "train_sft", lambda: {"model__model_name_or_path": small_vocabulary()}, ["--model.model_name_or_path"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_line_with_exit_code_2_and_nothing_starts(name: str) -> None:
    command, changes, parts = CASES[name]
    changes = changes() if callable(changes) else changes
    flags = (sft_flags if command == "train_sft" else rl_flags)(f"refused-{name.replace(' ', '-')}", **changes)
    log = workspace() / "logs" / f"refused-{name.replace(' ', '-')}"
    process = start(command, flags, log)
    started: set[str] = set()
    while process.poll() is None:
        started |= _names(process.pid)
        time.sleep(0.05)
    assert process.returncode == 2, Path(f"{log}.err").read_text()
    stderr = Path(f"{log}.err").read_text()
    (line,) = [text for text in stderr.splitlines() if text.startswith("error:")]
    assert stderr.splitlines()[-1] == line and "Traceback" not in stderr
    assert not [part for part in parts if part not in line], line
    assert Path(f"{log}.out").read_text() == ""
    assert not [text for text in started if "ray" in text or "gcs_server" in text], started
    for left in (flags["ckpt.output_dir"], flags["ckpt.path"]):
        assert not Path(left).exists(), "a refused run leaves no folder"


def _names(pid: int) -> set[str]:
    names = set()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            names.add(" ".join(child.cmdline())[:200])
    return names


def test_fault_33_more_workers_than_the_machine_has_prints_demand_and_supply() -> None:
    done = run("train_grpo_ray", rl_flags("too-many", actor__num_gpus_per_node=500), code=2, limit=SECONDS * 2)
    (line,) = done.errors()
    assert "500 actor" in line and "this machine holds" in line and "lower --actor.num_gpus_per_node (now 500)" in line
    assert "demand:" in done.stderr and "supply:" in done.stderr and "Traceback" not in done.stderr
    assert environment().get("RAY_ADDRESS") is None and done.seconds < SECONDS
