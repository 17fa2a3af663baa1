"""What is refused before anything starts, and what is warned about."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from openrlhf_like.config import make_config, parse_args, validate
from openrlhf_like.config.tree import kinds, put
from openrlhf_like.config.unbuilt import UNBUILT
from openrlhf_like.types import UserError


def write_model(folder: Path, vocab: int = 8, tokens: int = 8) -> Path:
    """The two files the checks look at: a model's config and its tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    words = {chr(97 + i): i for i in range(tokens - 1)}
    special = [{"id": tokens - 1, "content": "<end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": special}))
    return folder


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    write_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"input": "a"}\n')
    (tmp_path / "reward.py").write_text("async def reward_func(queries, prompts, labels, **kwargs):\n    return []\n")
    return tmp_path


SFT = {"--model.model_name_or_path": "model", "--data.dataset": "data.jsonl"}
RL = {
    "--actor.model_name_or_path": "model",
    "--data.prompt_dataset": "data.jsonl",
    "--reward.remote_url": "reward.py",
}


def check(command: str, *argv: str, gpus: int = 0, without: tuple[str, ...] = ()) -> list[str]:
    """Parse a complete command with these flags added, and validate it."""
    base = {k: v for k, v in (SFT if command == "train_sft" else RL).items() if k not in (*argv, *without)}
    words = [w for pair in base.items() for w in pair]
    return validate(parse_args(command, [*words, *argv], gpus=gpus))


def refusal(command: str, *argv: str, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(command, *argv, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300
    return text


@pytest.mark.parametrize("command", ["train_sft", "train_grpo_ray", "train_rloo_ray", "train_reinforce_ray"])
def test_a_complete_command_passes_without_a_warning(files: Path, command: str) -> None:
    assert check(command) == []
    assert sorted(p.name for p in files.iterdir()) == ["data.jsonl", "model", "reward.py"]


# ---- bad input: one line with the flag and the fix --------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train_sft", "--model.model_name_or_path"),
        ("train_sft", "--data.dataset"),
        ("train_grpo_ray", "--actor.model_name_or_path"),
        ("train_grpo_ray", "--data.prompt_dataset"),
        ("train_grpo_ray", "--reward.remote_url"),
    ],
)
def test_a_missing_input_is_named(files: Path, command: str, flag: str) -> None:
    assert refusal(command, without=(flag,)).startswith(f"{flag}: ")


@pytest.mark.parametrize("path", ["./nothing", "/no/such/model", "a/b/c", "data.jsonl", "~/no_such_model_here"])
def test_a_model_path_that_is_no_model_is_refused(files: Path, path: str) -> None:
    assert f"--actor.model_name_or_path {path}" in refusal("train_grpo_ray", "--actor.model_name_or_path", path)
    assert f"--model.model_name_or_path {path}" in refusal("train_sft", "--model.model_name_or_path", path)


def test_a_folder_without_config_is_no_model(files: Path) -> None:
    (files / "empty").mkdir()
    assert "config.json" in refusal("train_sft", "--model.model_name_or_path", "empty")


def test_a_hub_name_passes_unless_the_hub_is_off(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("train_sft", "--model.model_name_or_path", "owner/name") == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(files / "cache"))
    assert "HF_HUB_OFFLINE" in refusal("train_sft", "--model.model_name_or_path", "owner/name")
    (files / "cache" / "models--owner--name").mkdir(parents=True)
    assert check("train_sft", "--model.model_name_or_path", "owner/name") == []


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(files: Path) -> None:
    write_model(files / "small", vocab=7, tokens=8)
    text = refusal("train_grpo_ray", "--actor.model_name_or_path", "small")
    assert "ids up to 7" in text and "vocabulary is 7" in text
    write_model(files / "larger", vocab=64, tokens=8)
    assert check("train_grpo_ray", "--actor.model_name_or_path", "larger") == []


@pytest.mark.parametrize("path", ["missing.jsonl", "./missing", "data.jsonl,missing.parquet", "/no/such/folder", ""])
def test_missing_data_is_refused(files: Path, path: str) -> None:
    assert "--data.dataset" in refusal("train_sft", "--data.dataset", path)
    assert "--data.prompt_dataset" in refusal("train_grpo_ray", "--data.prompt_dataset", path)
    assert "--eval.dataset" in refusal("train_grpo_ray", "--eval.dataset", path)


@pytest.mark.parametrize("probs", ["0.5,0.5", "a", "0", "0.9"])
def test_probabilities_must_match_the_data(files: Path, probs: str) -> None:
    assert f"--data.dataset_probs {probs}" in refusal("train_sft", "--data.dataset_probs", probs)


def test_output_that_cannot_be_written_is_refused(files: Path) -> None:
    (files / "file").write_text("")
    for path in ("file", "file/below", "/proc/nothing/here"):
        assert f"--ckpt.output_dir {path}" in refusal("train_grpo_ray", "--ckpt.output_dir", path)
        assert f"--ckpt.path {path}" in refusal("train_sft", "--ckpt.path", path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(files: Path) -> None:
    (files / "locked").mkdir(mode=0o500)
    assert "--ckpt.output_dir" in refusal("train_sft", "--ckpt.output_dir", "locked/out")


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def reward(q): pass", "no function reward_func"),
        ("# reward_func\nx = 'reward_func'", "no function reward_func"),
        ("def reward_func(:\n", ":1: not valid Python"),
    ],
)
def test_a_reward_file_without_reward_func_is_refused(files: Path, source: str, part: str) -> None:
    (files / "bad.py").write_text(source)
    text = refusal("train_grpo_ray", "--reward.remote_url", "bad.py")
    assert text.startswith("--reward.remote_url bad.py") and part in text


@pytest.mark.parametrize(
    "source",
    ["from other import reward_func", "from other import f as reward_func", "reward_func = make()",
     "from other import *", "try:\n    def reward_func(*a): ...\nexcept ImportError: ..."],
)  # fmt: skip
def test_reward_func_may_come_from_anywhere_in_the_file(files: Path, source: str) -> None:
    (files / "good.py").write_text(source)
    assert check("train_grpo_ray", "--reward.remote_url", "good.py") == []


def test_a_reward_file_is_never_run(files: Path) -> None:
    (files / "loud.py").write_text("open('ran', 'w')\ndef reward_func(*a): ...\n")
    check("train_grpo_ray", "--reward.remote_url", "loud.py")
    assert not (files / "ran").exists()


@pytest.mark.parametrize("spec", ["missing.py", "http://a/b,reward.py", "reward.py,reward.py", "ftp://x"])
def test_reward_sources_are_one_file_or_addresses(files: Path, spec: str) -> None:
    assert "--reward.remote_url" in refusal("train_grpo_ray", "--reward.remote_url", spec)
    assert check("train_grpo_ray", "--reward.remote_url", "http://a:1/get,https://b/get") == []


REFUSED = [
    ("train_sft", "--train.batch_size 4 --train.micro_batch_size 8", "--train.micro_batch_size 8"),
    ("train_sft", "--lr_scheduler cosin", "did you mean cosine?"),
    ("train_sft", "--ds.zero_stage 4", "--ds.zero_stage 4"),
    ("train_sft", "--data.multiturn", "--data.apply_chat_template"),
    ("train_sft", "--data.max_len 0", "--data.max_len 0"),
    ("train_sft", "--adam.lr -1", "--adam.lr -1"),
    ("train_sft", "--adam.betas 0.9 1", "--adam.betas 0.9 1"),
    ("train_sft", "--optim muon", "--optim muon: not built yet"),
    ("train_grpo_ray", "--train.batch_size 4 --train.micro_batch_size 8", "--train.micro_batch_size 8"),
    ("train_grpo_ray", "--rollout.n_samples_per_prompt 1", "--rollout.n_samples_per_prompt 1"),
    ("train_rloo_ray", "--rollout.n_samples_per_prompt 1", "--rollout.n_samples_per_prompt 1"),
    ("train_reinforce_ray", "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_enable"),
    ("train_grpo_ray", "--rollout.batch_size 8 --train.batch_size 65", "--train.batch_size 65"),
    ("train_grpo_ray", "--algo.kl.estimator k1", "--algo.kl.estimator k1"),
    ("train_reinforce_ray", "--algo.kl.use_loss", "--algo.kl.estimator k1"),
    ("train_grpo_ray", "--algo.kl.horizon 0", "--algo.kl.horizon 0"),
    ("train_grpo_ray", "--algo.kl.init_coef -0.1", "--algo.kl.init_coef -0.1"),
    ("train_grpo_ray", "--algo.kl.target 0", "--algo.kl.target 0"),
    ("train_grpo_ray", "--actor.entropy_coef -1", "--actor.entropy_coef -1"),
    ("train_grpo_ray", "--actor.eps_clip_low_high 0.3 0.2", "--actor.eps_clip_low_high 0.3 0.2"),
    ("train_grpo_ray", "--actor.dual_clip 1", "--actor.dual_clip 1"),
    ("train_grpo_ray", "--algo.advantage.is_correction_enable --rollout.top_p 0.9", "--rollout.top_p 0.9"),
    ("train_grpo_ray", "--algo.advantage.is_correction_threshold 5 0.5", "is_correction_threshold 5 0.5"),
    ("train_grpo_ray", "--algo.dynamic_filtering_range 1 0", "--algo.dynamic_filtering_range 1 0"),
    ("train_grpo_ray", "--reward.clip_range 1 1", "--reward.clip_range 1 1"),
    ("train_grpo_ray", "--rollout.temperature 0", "--rollout.temperature 0"),
    ("train_grpo_ray", "--rollout.top_p 1.1", "--rollout.top_p 1.1"),
    ("train_grpo_ray", "--data.max_len 64 --rollout.max_new_tokens 64", "--rollout.max_new_tokens 64"),
    ("train_grpo_ray", "--reward.overlong_buffer_len 16", "--rollout.max_new_tokens"),
    ("train_grpo_ray", "--reward.overlong_buffer_len 16 --rollout.max_new_tokens 8", "overlong_buffer_len 16"),
    ("train_grpo_ray", "--reward.verifier math", "--reward.verifier math"),
    ("train_grpo_ray", "--timeout.generate 0", "--timeout.generate 0"),
    ("train_grpo_ray", "--reward.max_failure_fraction 2", "--reward.max_failure_fraction 2"),
    ("train_grpo_ray", "--data.input_template hello", "--data.input_template"),
    ("train_grpo_ray", "--vllm.tensor_parallel_size 2", "--vllm.tensor_parallel_size 2"),
    ("train_grpo_ray", "--train.colocate_all --vllm.num_engines 2", "--vllm.num_engines 2"),
    ("train_grpo_ray", "--train.colocate_actor_ref --ref.num_gpus_per_node 2", "--ref.num_gpus_per_node 2"),
    ("train_ppo_ray", "", "--algo.advantage.estimator gae: not built yet"),
    ("train_ppo_ray", "--algo.advantage.estimator remax", "estimator remax: not built yet"),
]


@pytest.mark.parametrize(("command", "flags", "part"), REFUSED)
def test_impossible_settings_are_refused_in_one_line(files: Path, command: str, flags: str, part: str) -> None:
    assert part in refusal(command, *flags.split())


@pytest.mark.parametrize(
    ("flags", "part"),
    [("--vllm.sync_backend shm", "--vllm.sync_backend shm"), ("--vllm.sync_backend ipc", "--vllm.sync_backend ipc")],
)
def test_transfer_backends_on_gpus(files: Path, flags: str, part: str) -> None:
    assert part in refusal("train_grpo_ray", *flags.split(), gpus=4)
    assert check("train_grpo_ray", "--vllm.sync_backend", "nccl", gpus=4) == []
    assert check("train_grpo_ray", "--vllm.sync_backend", "ipc", "--train.colocate_all", gpus=4) == []
    # OpenRLHF's scripts say nccl and colocate, which there means CUDA IPC too.
    (line,) = check("train_grpo_ray", "--vllm.sync_backend", "nccl", "--train.colocate_all", gpus=4)
    assert "ipc is used" in line


def test_verifier_takes_the_place_of_a_reward_file(files: Path) -> None:
    argv = ("--reward.verifier", "math", "--data.label_key", "answer")
    assert check("train_grpo_ray", *argv, without=("--reward.remote_url",)) == []
    text = refusal("train_grpo_ray", "--reward.verifier", "math", without=("--reward.remote_url",))
    assert "--data.label_key" in text


# ---- not built yet ----------------------------------------------------------------------------------------------


def _other_value(entry: Any, default: Any) -> Any:
    if entry.values:
        return entry.values[-1]
    if isinstance(default, bool):
        return not default
    if entry.name == "ds.experts_implementation":
        return "eager"
    if isinstance(default, int | float):
        return default + 1
    return 7 if entry.name.endswith("batch_size") else "something"


@pytest.mark.parametrize("entry", UNBUILT, ids=lambda e: e.name)
def test_each_unbuilt_flag_names_itself(files: Path, entry: Any) -> None:
    from openrlhf_like.config.tree import get

    command = "train_grpo_ray" if entry.name in kinds(type(make_config("train_grpo_ray"))) else "train_sft"
    gpus = 2 if entry.name.endswith("enable_sleep") else 0
    base = {k[2:]: v for k, v in (SFT if command == "train_sft" else RL).items()}
    cfg = make_config(command, base, gpus=gpus)
    put(cfg, entry.name, _other_value(entry, get(cfg, entry.name)))
    with pytest.raises(UserError, match=f"^--{entry.name}.*: not built yet; ."):
        validate(cfg)


@pytest.mark.parametrize("command", ["train_rm", "train_dpo", "serve_rm", "lora_combiner"])
def test_an_unbuilt_command_says_so(command: str) -> None:
    with pytest.raises(UserError, match=f"^{command}: this command is not built yet"):
        validate(parse_args(command, [], gpus=0))


# ---- flags without effect ---------------------------------------------------------------------------------------

SILENT = [
    ("train_grpo_ray", "--train.max_tokens_per_gpu 4096", "--train.max_tokens_per_gpu"),
    ("train_sft", "--train.max_tokens_per_gpu 4096", "--train.max_tokens_per_gpu"),
    ("train_sft", "--train.dynamic_batch_enable --train.micro_batch_size 2", "--train.micro_batch_size"),
    ("train_grpo_ray", "--algo.kl.init_coef 0 --algo.kl.target 0.1", "--algo.kl.target"),
    ("train_grpo_ray", "--algo.kl.init_coef 0 --ref.offload", "--ref.offload"),
    ("train_grpo_ray", "--algo.kl.horizon 5000", "--algo.kl.horizon"),
    ("train_sft", "--data.dataloader_num_workers 2", "--data.dataloader_num_workers"),
    ("train_grpo_ray", "--data.dataloader_num_workers 2", "--data.dataloader_num_workers"),
    ("train_sft", "--lr_scheduler constant --lr_warmup_ratio 0.1", "--lr_warmup_ratio"),
    ("train_grpo_ray", "--actor.lr_scheduler linear --actor.min_lr_ratio 0.2", "--actor.min_lr_ratio"),
    ("train_sft", "--model.gradient_checkpointing_reentrant", "--model.gradient_checkpointing_reentrant"),
    ("train_sft", "--ckpt.save_hf", "--ckpt.save_hf"),
    ("train_grpo_ray", "--ckpt.max_num 5", "--ckpt.max_num"),
    (
        "train_grpo_ray",
        "--algo.kl.init_coef 0 --rollout.batch_size 4 --train.batch_size 32 --rollout.micro_batch_size 2",
        "--rollout.micro_batch_size",
    ),
    ("train_grpo_ray", "--eval.steps 5", "--eval.steps"),
    ("train_sft", "--eval.before_train", "--eval.before_train"),
    ("train_grpo_ray", "--vllm.gpu_memory_utilization 0.95", "--vllm.gpu_memory_utilization"),
    ("train_grpo_ray", "--vllm.enable_sleep", "--vllm.enable_sleep"),
    ("train_grpo_ray", "--ds.adam_offload", "--ds.adam_offload"),
    ("train_grpo_ray", "--critic.adam.lr 1e-5", "--critic.adam.lr"),
    ("train_grpo_ray", "--algo.advantage.gamma 0.9", "--algo.advantage.gamma"),
    ("train_rloo_ray", "--algo.advantage.no_std_norm", "--algo.advantage.no_std_norm"),
    ("train_grpo_ray", "--actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.3", "--actor.eps_clip"),
    ("train_grpo_ray", "--algo.advantage.is_correction_type icepop", "--algo.advantage.is_correction_type"),
    ("train_grpo_ray", "--algo.dynamic_filtering_range 0.1 0.9", "--algo.dynamic_filtering_range"),
    ("train_grpo_ray", "--actor.muon.no_nesterov", "--actor.muon.nesterov"),
    ("train_grpo_ray", "--reward.normalize_enable", "--reward.normalize_enable"),
    ("train_grpo_ray", "--reward.http_retries 5", "--reward.http_retries"),
    ("train_grpo_ray", "--train.async_queue_size 2", "--train.async_queue_size"),
    ("train_grpo_ray", "--logger.wandb.group g", "--logger.wandb.group"),
    ("train_sft", "--logger.rollouts_every 2", "--logger.rollouts_every"),
]


@pytest.mark.parametrize(("command", "flags", "named"), SILENT)
def test_a_given_flag_without_effect_is_named_once(files: Path, command: str, flags: str, named: str) -> None:
    lines = check(command, *flags.split())
    assert [line for line in lines if line.startswith(f"{named} (command line) has no effect")] == lines
    assert len(lines) == 1


def test_the_same_flags_with_effect_are_not_named(files: Path) -> None:
    argv = "--eval.dataset data.jsonl --eval.steps 5 --train.dynamic_batch_enable --train.max_tokens_per_gpu 4096"
    argv += " --algo.kl.target 0.1 --algo.kl.horizon 50 --algo.advantage.is_correction_enable"
    argv += " --algo.advantage.is_correction_type icepop --logger.wandb.mode offline --logger.wandb.group g"
    assert check("train_grpo_ray", *argv.split()) == []


def test_packed_rows_and_schedules_with_effect_are_not_named(files: Path) -> None:
    assert check("train_grpo_ray", "--ds.packing_samples", "--actor.min_lr_ratio", "0.2") == []
    flags = "--lr_scheduler constant_with_warmup --lr_warmup_ratio 0.1 --ckpt.save_steps 5 --ckpt.max_num 2"
    assert check("train_sft", *flags.split()) == []


def test_an_offloaded_reference_needs_sharded_weights(files: Path) -> None:
    (line,) = check("train_grpo_ray", "--ref.offload", gpus=4)
    assert line.startswith("--ref.offload") and "zero_stage 3" in line
    assert check("train_grpo_ray", "--ref.offload", "--ds.zero_stage", "3", gpus=4) == []


def test_a_value_from_a_file_is_named_with_the_file(files: Path) -> None:
    (files / "c.yaml").write_text("critic: {adam: {lr: 1.0}}\n")
    (line,) = check("train_grpo_ray", "--config", "c.yaml")
    assert line.startswith("--critic.adam.lr (c.yaml) has no effect")


def test_a_literal_backslash_n_in_a_template_is_pointed_out(files: Path) -> None:
    (line,) = check("train_grpo_ray", "--data.input_template", "User: {}\\nAssistant: ")
    assert "backslash" in line


# ---- fault 31 ---------------------------------------------------------------------------------------------------


def test_fault_31_sweep_of_sizes_is_accepted_or_refused_in_one_line(files: Path) -> None:
    """Each combination passes, or names a flag that was given; and which of both follows the stated rules."""
    accepted = refused = 0
    sizes = itertools.product((1, 2, 3, 8), (1, 2, 3), (1, 3, 8, 24), (1, 2, 16), (1, 2, 3), (1, 2))
    for prompts, samples, batch, micro, workers, engines in sizes:
        values = {
            "rollout.batch_size": prompts,
            "rollout.n_samples_per_prompt": samples,
            "train.batch_size": batch,
            "train.micro_batch_size": micro,
            "actor.num_gpus_per_node": workers,
            "vllm.num_engines": engines,
            "data.prompt_dataset": "data.jsonl",
            "actor.model_name_or_path": "model",
            "reward.remote_url": "reward.py",
        }
        possible = samples >= 2 and micro <= batch <= prompts * samples
        try:
            validate(make_config("train_grpo_ray", values, gpus=0))
        except UserError as error:
            text = str(error)
            assert "\n" not in text and any(f"--{name} {value}" in text for name, value in values.items()), text
            assert not possible, text
            refused += 1
        else:
            assert possible, values
            accepted += 1
    assert accepted > 50 and refused > 50


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "flag",
    ["--rollout.batch_size", "--rollout.n_samples_per_prompt", "--train.batch_size", "--train.micro_batch_size",
     "--actor.num_gpus_per_node", "--actor.num_nodes", "--vllm.num_engines", "--rollout.micro_batch_size"],
)  # fmt: skip
def test_fault_31_sizes_below_one_are_refused(files: Path, flag: str, value: str) -> None:
    assert refusal("train_grpo_ray", flag, value).startswith(f"{flag} {value}: ")


@pytest.mark.parametrize(
    "flags, part",
    [
        ("--ds.param_dtype fp16 --ds.zero_stage 0", "--ds.param_dtype fp16"),
        ("--ds.adam_offload --ds.zero_stage 0", "--ds.adam_offload"),
        ("--ds.grad_accum_dtype fp32 --ds.zero_stage 0", "--ds.grad_accum_dtype fp32"),
        ("--ds.attn_implementation flash_attention_2 --ds.param_dtype fp32", "--ds.attn_implementation"),
    ],
)
def test_precisions_that_deepspeed_would_train_wrongly_on_gpus(files: Path, flags: str, part: str) -> None:
    assert part in refusal("train_grpo_ray", *flags.split(), gpus=4)


def test_a_cpu_build_of_torch_leaves_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf_like.config import resolve

    monkeypatch.setattr(resolve, "visible_gpus", lambda: 2)
    monkeypatch.setattr(resolve, "_torch_is_cpu_build", lambda: True)
    assert make_config("train_grpo_ray").device == "cpu"
    with pytest.raises(UserError, match="--device cuda: the installed torch is a CPU build"):
        make_config("train_grpo_ray", {"device": "cuda"})
    monkeypatch.setattr(resolve, "_torch_is_cpu_build", lambda: False)
    assert make_config("train_grpo_ray").device == "cuda"


def test_an_engine_beside_a_trainer_takes_half_of_the_gpu() -> None:
    assert make_config("train_grpo_ray", {"train.colocate_all": True}, gpus=2).vllm.gpu_memory_utilization == 0.5
    chosen = {"train.colocate_all": True, "vllm.gpu_memory_utilization": 0.3}
    assert make_config("train_grpo_ray", chosen, gpus=2).vllm.gpu_memory_utilization == 0.3
    assert make_config("train_grpo_ray", gpus=8).vllm.gpu_memory_utilization == 0.95
