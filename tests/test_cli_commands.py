"""The commands as a user starts them: exit codes, one-line errors, speed, and nothing heavy imported."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openrlhf_like.config import COMMANDS

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "ray", "vllm", "deepspeed", "datasets")
# A command answers in under two seconds. Processor time is what it needs of them: tests share their machine.
SECONDS = 2.0


def start(command: str, *argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    words = [sys.executable, "-m", f"openrlhf_like.cli.{command}", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=cwd)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_print_config_import_nothing_heavy(command: str) -> None:
    code = (
        "import sys\n"
        f"from openrlhf_like.cli.{command} import main\n"
        "codes = [main(['--help']), main(['--print_config'])]\n"
        f"sys.stderr.write(repr((codes, [m for m in {HEAVY!r} if m in sys.modules])))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stderr.endswith("([0, 0], [])"), done.stderr


@pytest.mark.parametrize("argv", ["--help", "--print_config"])
def test_the_largest_command_answers_in_two_seconds(argv: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert start("train_grpo_ray", argv).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS


def test_help_is_grouped_and_says_what_flags_do() -> None:
    done = start("train_grpo_ray", "--help")
    assert "actor.adam options" in done.stdout and "rollout options" in done.stdout
    assert "--rollout.n_samples_per_prompt INT" in done.stdout and "Samples a prompt." in done.stdout
    # The preset's value is the default that help shows.
    assert "group_norm)" in done.stdout.replace("│", "").replace("\n", " ")


def test_print_config_is_yaml_on_stdout_and_reads_back(tmp_path: Path) -> None:
    first = start("train_grpo_ray", "--print_config", "--actor.adam.lr", "1e-5", "--logger.wandb.key", "hunter2")
    assert first.returncode == 0 and first.stderr == ""
    tree = yaml.safe_load(first.stdout)
    assert tree["preset"] == "train_grpo_ray" and tree["actor"]["adam"]["lr"] == 1e-5
    assert "hunter2" not in first.stdout
    tree["logger"]["wandb"]["key"] = None
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    second = start("train_grpo_ray", "--print_config", "--config", str(tmp_path / "c.yaml"))
    assert yaml.safe_load(second.stdout) == tree
    assert list(tmp_path.iterdir()) == [tmp_path / "c.yaml"]


@pytest.mark.parametrize(
    ("command", "argv", "part"),
    [
        ("train_grpo_ray", ["--actor.adam.lrr", "1"], "did you mean --actor.adam.lr?"),
        ("train_grpo_ray", ["--train.batch_size", "many"], "--train.batch_size: 'many'"),
        (
            "train_grpo_ray",
            ["--actor.model_name_or_path", "/no/such/model"],
            "--actor.model_name_or_path /no/such/model",
        ),
        ("train_sft", ["--data.dataset", "missing.jsonl"], "--data.dataset missing.jsonl"),
        ("train_sft", ["--train.batch_size", "2", "--train.micro_batch_size", "4"], "--train.micro_batch_size 4"),
        ("train_sft", ["--ckpt.output_dir", "/proc/nothing"], "--ckpt.output_dir /proc/nothing"),
        ("train_ppo_ray", [], "--algo.advantage.estimator gae: not built yet"),
        ("train_rm", [], "train_rm: this command is not built yet"),
        ("serve_rm", [], "serve_rm: this command is not built yet"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, command: str, argv: list[str], part: str) -> None:
    done = start(command, *argv, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and part in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_traceback() -> None:
    words = f"{sys.executable} -m openrlhf_like.cli.train_grpo_ray --print_config | head -1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout == "command: train_grpo_ray\n" and done.stderr == ""


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        main = importlib.import_module(f"openrlhf_like.cli.{command}").main
        assert main(["--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["command"] == command
        assert main(["--no.such_flag"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
