"""Errors of one line, YAML in and out, and what is recorded about where a value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from openrlhf_like.cluster.placement import plan_placement
from openrlhf_like.config import COMMANDS, from_yaml, make_config, parse_args, to_dict, to_yaml
from openrlhf_like.config.resolve import resolve, visible_gpus
from openrlhf_like.types import UserError


def refused(command: str, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_args(command, list(argv), gpus=0)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--actor.adam.lrr", "--actor.adam.lr"),
        ("--actor.model_name_or_pth", "--actor.model_name_or_path"),
        ("--rollout.n_sample_per_prompt", "--rollout.n_samples_per_prompt"),
        ("--n_samples_per_prompt", "--rollout.n_samples_per_prompt or --eval.n_samples_per_prompt"),
        ("--adam.lr", "--actor.adam.lr or --critic.adam.lr"),
        ("--vllm.num_engine", "--vllm.num_engines"),
        ("--train.colocate_al", "--train.colocate_all"),
    ],
)
def test_unknown_flag_suggests_the_nearest(flag: str, nearest: str) -> None:
    text = refused("train_ppo_ray", flag, "1")
    assert text.startswith(f"{flag}: unknown flag") and f"did you mean {nearest}?" in text


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--train.batch_size", "many"], ["--train.batch_size", "'many'", "whole number"]),
        (["--train.batch_size", "1.5"], ["--train.batch_size", "'1.5'", "whole number"]),
        (["--actor.adam.lr", "fast"], ["--actor.adam.lr", "'fast'", "a number"]),
        (["--actor.adam.lr", "nan"], ["--actor.adam.lr", "'nan'", "a number"]),
        (["--actor.adam.lr"], ["--actor.adam.lr", "needs one value"]),
        (["--actor.adam.betas", "0.9"], ["--actor.adam.betas", "0.9", "two values"]),
        (["--actor.adam.betas", "0.9", "0.95", "0.99"], ["--actor.adam.betas", "two values"]),
        (["--ds.param_dtype", "int8"], ["--ds.param_dtype", "'int8'", "bf16, fp16, fp32"]),
        (["--ckpt.save_hf", "True"], ["--ckpt.save_hf True", "takes no value", "--ckpt.no_save_hf"]),
        (["--data.input_key", "two", "words"], ["--data.input_key two words", "one value"]),
        (["stray"], ["'stray'", "not a flag"]),
        (["--config", "/no/such.yaml"], ["--config", "/no/such.yaml", "existing YAML"]),
    ],
)
def test_wrong_type_names_flag_value_and_fix(argv: list[str], parts: list[str]) -> None:
    text = refused("train_ppo_ray", *argv)
    assert [p for p in parts if p not in text] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("actor: {adam: {lrr: 1}}", ["run.yaml: unknown key actor.adam.lrr", "did you mean actor.adam.lr?"]),
        ("actr: {adam: {lr: 1}}", ["run.yaml: unknown key actr", "did you mean actor?"]),
        ("train: {batch_size: many}", ["run.yaml: train.batch_size", "'many'", "whole number"]),
        ("train: {batch_size: true}", ["run.yaml: train.batch_size", "True"]),
        ("train: {batch_size: null}", ["run.yaml: train.batch_size", "None"]),
        ("ckpt: {save_hf: 'yes'}", ["run.yaml: ckpt.save_hf", "true or false"]),
        ("actor: 3", ["run.yaml: actor", "group of options"]),
        ("- a", ["run.yaml", "mapping"]),
        ("a: 1\nb: [1", ["run.yaml:", "not valid YAML"]),
        ("train: {seed: 1}\ntrain: {seed: 2}", ["run.yaml:2", "appears twice"]),
        ("print_config: true", ["run.yaml: unknown key print_config"]),
        ("preset: train_rloo_ray", ["run.yaml", "train_rloo_ray", "does not belong"]),
        ("preset: nonsense", ["run.yaml", "nonsense"]),
    ],
)
def test_yaml_faults_name_file_and_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    got = refused("train_grpo_ray", "--config", str(file))
    assert [p for p in parts if p not in got] == []


def test_flags_override_the_file_and_both_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("actor:\n  adam: {lr: 1e-5, betas: [0.8, 0.9]}\nrollout.batch_size: 16\ntrain: {batch_size: 128}\n")
    cfg = parse_args("train_grpo_ray", ["--config", str(file), "--actor.adam.lr", "1e-6"], gpus=0)
    assert cfg.actor.adam.lr == 1e-6 and cfg.actor.adam.betas == (0.8, 0.9) and cfg.rollout.batch_size == 16
    # train.batch_size 128 is the default: writing it down is no choice.
    assert cfg.given == {
        "actor.adam.betas": str(file),
        "rollout.batch_size": str(file),
        "actor.adam.lr": "command line",
        "config": "command line",
    }


def test_a_flag_clears_what_the_file_set(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("ckpt: {save_hf: true}\n")
    assert parse_args("train_sft", ["--config", str(file)], gpus=0).ckpt.save_hf is True
    assert parse_args("train_sft", ["--config", str(file), "--ckpt.save_hf"], gpus=0).ckpt.save_hf is True
    assert parse_args("train_sft", ["--config", str(file), "--ckpt.no_save_hf"], gpus=0).ckpt.save_hf is False


@pytest.mark.parametrize("gpus", [0, 4])
@pytest.mark.parametrize("command", COMMANDS)
def test_printed_configuration_reads_back_as_itself(command: str, gpus: int, tmp_path: Path) -> None:
    printed = to_yaml(parse_args(command, [], gpus=gpus))
    file = tmp_path / "c.yaml"
    file.write_text(printed)
    again = parse_args(command, ["--config", str(file)], gpus=gpus)
    assert to_yaml(again) == printed
    # A machine's own values are not the user's choice. The run name holds a time.
    assert set(again.given) - {"config", "logger.wandb.run_name", "device"} == set()
    assert to_yaml(from_yaml(command, printed, gpus=gpus)) == printed


def test_general_command_takes_a_presets_file() -> None:
    printed = to_yaml(make_config("train_grpo_ray", {"actor.eps_clip_low_high": [0.2, 0.28]}, gpus=0))
    cfg = from_yaml("train_ppo_ray", printed, gpus=0)
    assert cfg.preset == "train_grpo_ray" and cfg.algo.advantage.estimator == "group_norm"
    assert cfg.actor.eps_clip_low_high == (0.2, 0.28)


def test_secrets_are_masked_and_a_masked_file_is_no_key() -> None:
    cfg = parse_args("train_sft", ["--logger.wandb.key", "hunter2"], gpus=0)
    printed = to_yaml(cfg)
    assert "hunter2" not in printed and yaml.safe_load(printed)["logger"]["wandb"]["key"] == "***"
    again = from_yaml("train_sft", printed, "run/config.yaml")
    assert again.logger.wandb.key is None
    assert any("logger.wandb.key is masked" in note for note in again.notes)
    assert cfg.logger.wandb.key == "hunter2"


def test_make_config_checks_names_and_types() -> None:
    cfg = make_config("train_grpo_ray", {"actor.adam.lr": 1, "actor.adam.betas": [0.9, 0.99], "train.batch_size": 8})
    assert cfg.actor.adam.lr == 1.0 and isinstance(cfg.actor.adam.lr, float)
    assert cfg.actor.adam.betas == (0.9, 0.99)
    with pytest.raises(UserError, match="did you mean actor.adam.lr"):
        make_config("train_grpo_ray", {"actor.adam.lrr": 1})
    with pytest.raises(UserError, match="whole number"):
        make_config("train_grpo_ray", {"train.batch_size": "eight"})


def _device_folder(tmp_path: Path, count: int) -> str:
    for i in range(count):
        (tmp_path / f"nvidia{i}").touch()
    for other in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / other).touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("count", "listed", "gpus"),
    [(0, None, 0), (0, "0", 0), (4, None, 4), (4, "", 0), (4, "1,2", 2), (4, "-1", 0), (2, "0,1,2,3", 2),
     (4, "0,-1,1", 1), (1, "MIG-a,MIG-b", 2), (4, "GPU-aa", 1)],
)  # fmt: skip
def test_visible_gpus(tmp_path: Path, count: int, listed: str | None, gpus: int) -> None:
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(env, _device_folder(tmp_path, count)) == gpus


def test_defaults_on_a_cpu() -> None:
    cfg = parse_args("train_grpo_ray", [], gpus=0)
    assert (cfg.device, cfg.ds.param_dtype, cfg.ds.attn_implementation) == ("cpu", "fp32", "sdpa")
    assert (cfg.vllm.backend, cfg.vllm.sync_backend, cfg.vllm.num_engines) == ("inprocess", "shm", 1)
    assert [cfg.actor.num_gpus_per_node, cfg.ref.num_gpus_per_node] == [1, 1]
    assert parse_args("train_sft", [], gpus=0).train.num_gpus_per_node == 1


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("flags", [[], ["--algo.kl.init_coef", "0"], ["--train.colocate_actor_ref"]])
def test_defaults_on_gpus_ask_for_no_more_than_there_are(gpus: int, flags: list[str]) -> None:
    cfg = parse_args("train_grpo_ray", flags, gpus=gpus)
    assert (cfg.device, cfg.ds.param_dtype, cfg.vllm.backend) == ("cuda", "bf16", "async")
    demand = plan_placement(cfg).total()["GPU"]
    if gpus == 1 and "--train.colocate_actor_ref" in flags:
        assert demand == 2, "placement is the user's here: actor and engine want a GPU each, and the run is refused"
    else:
        assert demand == gpus
    assert cfg.vllm.sync_backend == ("ipc" if cfg.train.colocate_all else "nccl")


def test_colocated_gpus_serve_every_role() -> None:
    cfg = parse_args("train_grpo_ray", ["--train.colocate_all", "--vllm.tensor_parallel_size", "2"], gpus=8)
    assert (cfg.actor.num_gpus_per_node, cfg.ref.num_gpus_per_node, cfg.vllm.num_engines) == (8, 8, 4)
    assert cfg.vllm.sync_backend == "ipc"


def test_openrlhf_flags_of_a_gpu_run_work_on_a_cpu_and_say_what_changed() -> None:
    argv = ["--vllm.sync_backend", "nccl", "--ds.attn_implementation", "flash_attention_2", "--ds.param_dtype", "bf16"]
    cfg = parse_args("train_grpo_ray", argv, gpus=0)
    assert (cfg.vllm.sync_backend, cfg.ds.attn_implementation, cfg.ds.param_dtype) == ("shm", "sdpa", "bf16")
    assert len(cfg.notes) == 2 and "nccl" in "".join(cfg.notes) and "flash_attention_2" in "".join(cfg.notes)


def test_cuda_without_a_gpu_is_refused_unless_there_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "--device cuda" in refused("train_sft", "--device", "cuda")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse_args("train_sft", ["--device", "cuda"], gpus=0).train.num_gpus_per_node == 8


@pytest.mark.parametrize("command", COMMANDS)
def test_resolving_twice_changes_nothing(command: str) -> None:
    cfg: Any = make_config(command, gpus=0)
    before = to_dict(cfg)
    assert to_dict(resolve(cfg, 0)) == before


def test_default_micro_batch_gives_way_to_a_smaller_batch() -> None:
    assert parse_args("train_sft", ["--train.batch_size", "4"], gpus=0).train.micro_batch_size == 4
    given = parse_args("train_sft", ["--train.batch_size", "4", "--train.micro_batch_size", "8"], gpus=0)
    assert given.train.micro_batch_size == 8
