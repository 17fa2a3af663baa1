"""Real runs of the commands, shared by the end-to-end tests: each is made once, by the first test that asks for it.

The task is one-digit addition: ``"3+4 "`` is answered by ``"7"``. The model is built from nothing and has two layers.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from openrlhf_like.observe import read_records
from tests.tiny import build_tiny_model

ROOT = Path(__file__).resolve().parents[1]
REWARDS = ROOT / "tests" / "data"
MARK = "OPENRLHF_LIKE_SESSION"
RL_LIMIT, SFT_LIMIT = 500.0, 400.0  # seconds; far above what a quiet machine needs

Flags = dict[str, Any]


@functools.cache
def workspace() -> Path:
    """A folder for all runs of this test session; gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix="pipeline-runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@functools.cache
def model() -> Path:
    return Path(build_tiny_model(workspace() / "model", hidden=64, layers=2, heads=2, seed=1))


@functools.cache
def data() -> Path:
    """``sft.jsonl`` (80 sums), ``prompts.jsonl`` (32 of them, with labels) and ``heldout.jsonl`` (the other 20)."""
    folder = workspace() / "data"
    sums = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    rows = [{"input": f"{a}+{b} ", "output": str(a + b), "label": str(a + b)} for a, b in sums]
    write_jsonl(folder / "sft.jsonl", rows[:80])
    write_jsonl(folder / "prompts.jsonl", [{"input": r["input"], "label": r["label"]} for r in rows[:32]])
    write_jsonl(folder / "heldout.jsonl", rows[80:])
    return folder


def environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "WANDB_SILENT": "true"}
    env.pop("RAY_ADDRESS", None)
    env.pop("WANDB_API_KEY", None)
    return env


def words(command: str, flags: Flags) -> list[str]:
    """The command line: True is a flag without a value, None leaves a flag out, a list is several values."""
    out = [sys.executable, "-m", f"openrlhf_like.cli.{command}"]
    for name, value in flags.items():
        if value is None:
            continue
        out.append(f"--{name}")
        if value is not True:
            out += [str(v) for v in (value if isinstance(value, list | tuple) else [value])]
    return out


@dataclass
class Run:
    """A command that has ended, and where it wrote."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    output: Path
    ckpt: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of run/metrics.jsonl; fails on a torn line."""
        records, torn = read_records(self.output / "run" / "metrics.jsonl")
        assert torn == 0
        return records

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The records of training steps (an evaluation before training is step 0)."""
        return [r for r in self.metrics if r["step"] > 0]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        path = self.output / "run" / "rollouts" / f"step_{step:06d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def weights(self) -> bytes:
        return (self.output / "model.safetensors").read_bytes()

    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]


def start(command: str, flags: Flags, log: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, its output in ``log``.out and ``log``.err."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{log}.out", "wb") as out, open(f"{log}.err", "wb") as err:
        return subprocess.Popen(
            words(command, flags), env=environment(), cwd=ROOT, stdout=out, stderr=err, start_new_session=True
        )


def run(command: str, flags: Flags, *, code: int = 0, limit: float = RL_LIMIT) -> Run:
    """Run a command to its end and check its exit code; on a wrong one the end of its log is shown."""
    begun = time.monotonic()
    log = workspace() / "logs" / f"{len(list(workspace().glob('logs/*.err'))):03d}"
    process = start(command, flags, log)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(60)
        shown = Path(f"{log}.err").read_text()[-4000:]
        raise AssertionError(f"{command} still ran after {limit:g} s:\n{shown}") from None
    done = _ended(process.returncode, flags, log, time.monotonic() - begun)
    assert done.code == code, f"exit code {done.code}, not {code}:\n{done.stdout[-1000:]}\n{done.stderr[-6000:]}"
    return done


def _ended(code: int, flags: Flags, log: Path, seconds: float) -> Run:
    return Run(
        code, Path(f"{log}.out").read_text(), Path(f"{log}.err").read_text(), seconds,
        Path(flags["ckpt.output_dir"]), Path(flags["ckpt.path"]),
    )  # fmt: skip


def kill_when(command: str, flags: Flags, ready: Callable[[], bool], limit: float = RL_LIMIT) -> list[int]:
    """Start a command, SIGKILL its main process as soon as ``ready()``; returns the pids it had started."""
    process = start(command, flags, workspace() / "logs" / f"killed-{time.monotonic_ns()}")
    until = time.monotonic() + limit
    while not ready():
        assert process.poll() is None and time.monotonic() < until, f"{command} ended before it could be killed"
        time.sleep(0.005)
    pids = family(process)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    return pids


def family(process: subprocess.Popen[bytes]) -> list[int]:
    """Every process the command started: its descendants, and those that carry the mark of its session."""
    children = psutil.Process(process.pid).children(recursive=True)
    marks = {mark for child in children if (mark := _mark(child.pid))}
    marked = [pid for pid in psutil.pids() if pid != process.pid and _mark(pid) in marks]
    return sorted({child.pid for child in children} | set(marked))


def _mark(pid: int) -> str | None:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    found = re.search(rf"(?:^|\0){MARK}=([0-9a-f]+)".encode(), text)
    return found.group(1).decode() if found else None


def wait_gone(pids: list[int], limit: float) -> list[str]:
    """Names of the processes that still run after ``limit`` seconds; empty when all are gone."""
    until = time.monotonic() + limit
    while True:
        left = []
        for pid in pids:
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{pid} {' '.join(process.cmdline())[:80]}")
            except psutil.Error:
                continue
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


# -- the settings that tests share ---------------------------------------------------------------------------------


def sft_flags(name: str, **changes: Any) -> Flags:
    """A short SFT; ``changes`` in dotted names with ``__`` for the dot."""
    return {
        "model.model_name_or_path": model(),
        "data.dataset": data() / "sft.jsonl",
        "data.output_key": "output",
        "data.input_template": "{}",
        "data.max_len": 16,
        "train.batch_size": 32,  # 80 examples: the last batch of an epoch has 16
        "train.micro_batch_size": 16,
        "train.max_epochs": 12,
        "adam.lr": 5e-3,
        "eval.dataset": data() / "heldout.jsonl",
        "eval.before_train": True,
        "eval.steps": 12,
        "logger.logging_steps": 12,
        "ckpt.save_steps": 18,
        "ckpt.output_dir": workspace() / name,
        "ckpt.path": workspace() / f"{name}-ckpt",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


@functools.cache
def sft() -> Run:
    """The checkpoint that policy runs start from."""
    return run("train_sft", sft_flags("sft"), limit=SFT_LIMIT)


def grpo_flags(name: str, reward: str = "reward_sum.py", **changes: Any) -> Flags:
    """Four steps of eight prompts with four samples each, one update a step, no KL, two engines."""
    return {
        "actor.model_name_or_path": sft().output,
        "data.prompt_dataset": data() / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 16,
        "rollout.batch_size": 8,
        "rollout.n_samples_per_prompt": 4,
        "rollout.micro_batch_size": 8,
        "rollout.max_new_tokens": 4,
        "train.batch_size": 32,
        "train.micro_batch_size": 8,
        "actor.adam.lr": 1e-3,
        "algo.kl.init_coef": 0,
        "reward.remote_url": REWARDS / reward,
        "vllm.kv_cache_gib": 0.25,
        "ckpt.output_dir": workspace() / name,
        "ckpt.path": workspace() / f"{name}-ckpt",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


# -- what docs/metrics.md says -------------------------------------------------------------------------------------


@functools.cache
def documented() -> dict[str, re.Pattern[str]]:
    """Metric names of docs/metrics.md's tables, each as a pattern: ``<dataset>``, ``<N>`` stand for any text."""
    out = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cell = re.match(r"\| (`[a-z_]+/[^|]+) \|", line)
        for name in re.findall(r"`((?!run/)[a-z_]+/[^`]+)`", cell.group(1)) if cell else []:
            out[name] = re.compile(re.sub(r"<[^>]*>", "[^/]+", name))
    return out


def undocumented(records: list[dict[str, Any]]) -> list[str]:
    """Names in the records that docs/metrics.md does not have."""
    names = {name for record in records for name in record} - {"step"}
    return sorted(n for n in names if not any(pattern.fullmatch(n) for pattern in documented().values()))


def not_finite(records: list[dict[str, Any]]) -> list[str]:
    """``step: name`` of every value that is no finite number."""
    return [
        f"{record['step']}: {name} = {value}"
        for record in records
        for name, value in record.items()
        if not isinstance(value, int | float) or value != value or abs(value) == float("inf")
    ]


def same_metrics(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two records agree in everything that is no time."""
    def clean(record: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))}

    return clean(a) == clean(b)
