"""Every check across options, in one place. All run before Ray or a model is touched."""

from __future__ import annotations

from openrlhf_like.config import paths
from openrlhf_like.config.common import CkptConfig, CommonConfig
from openrlhf_like.config.effects import flags_without_effect
from openrlhf_like.config.offline import OfflineConfig, SFTConfig, TextDataConfig, TrainConfig
from openrlhf_like.config.presets import GROUP_ESTIMATORS
from openrlhf_like.config.ranges import check_ranges
from openrlhf_like.config.resolve import uses_reference
from openrlhf_like.config.rl import PPOConfig
from openrlhf_like.config.unbuilt import refuse_unbuilt
from openrlhf_like.types import UserError

_MODEL = "a local model folder or a hub name"
_DATA = "a data file, a folder or a hub name"


def validate(cfg: CommonConfig) -> list[str]:
    """Check a resolved configuration: limits, combinations, what is built, then files.

    Returns:
        Warnings, one line each, for a person to read once at the start.

    Raises:
        UserError: the first fault found; one line with the flag, the value and the fix.
    """
    check_ranges(cfg)
    refuse_unbuilt(cfg)
    warnings = [*cfg.notes, *flags_without_effect(cfg)]
    if isinstance(cfg, PPOConfig):
        warnings += check_rl(cfg)
        check_rl_files(cfg)
    elif isinstance(cfg, OfflineConfig):
        warnings += check_offline(cfg)
        check_offline_files(cfg)
    return warnings


def check_offline(cfg: OfflineConfig) -> list[str]:
    """Combinations of the offline trainers; returns warnings."""
    _check_batches(cfg.train)
    _check_precision(cfg)
    data = cfg.data
    if isinstance(cfg, SFTConfig):
        if cfg.data.multiturn and not cfg.data.apply_chat_template and not cfg.model.pretrain_mode_enable:
            raise UserError("--data.multiturn: needs --data.apply_chat_template, which marks the turns; add it")
    return [*_check_template(data), *_check_token_budget(cfg.train, data)]


def check_rl(cfg: PPOConfig) -> list[str]:
    """Combinations of policy training; returns warnings."""
    _check_batches(cfg.train)
    _check_precision(cfg)
    _check_groups(cfg)
    _check_kl(cfg)
    _check_correction(cfg)
    _check_lengths(cfg)
    _check_reward(cfg)
    _check_placement(cfg)
    return [
        *_check_rollout_batch(cfg),
        *_check_template(cfg.data),
        *_check_token_budget(cfg.train, cfg.data),
    ]


def _check_precision(cfg: OfflineConfig | PPOConfig) -> None:
    """What DeepSpeed does wrong, or refuses late, without ZeRO."""
    ds = cfg.ds
    if ds.attn_implementation == "flash_attention_2" and ds.param_dtype == "fp32":
        raise UserError("--ds.attn_implementation flash_attention_2: has no fp32; give sdpa, or --ds.param_dtype bf16")
    if ds.zero_stage != 0:
        return
    if ds.param_dtype == "fp16":
        raise UserError(
            "--ds.param_dtype fp16: needs --ds.zero_stage 1 or more, where DeepSpeed scales the loss; give 1, or bf16"
        )
    if ds.adam_offload and cfg.device == "cuda":
        raise UserError("--ds.adam_offload: needs --ds.zero_stage 1 or more, which split off the optimizer; give 1")
    if ds.grad_accum_dtype and ds.grad_accum_dtype != ds.param_dtype:
        raise UserError(
            f"--ds.grad_accum_dtype {ds.grad_accum_dtype}: --ds.zero_stage 0 accumulates in {ds.param_dtype}; "
            "give --ds.zero_stage 1 or more"
        )


def check_offline_files(cfg: OfflineConfig) -> None:
    """Model, data and output folders of the offline trainers."""
    paths.check_model(cfg.model.model_name_or_path, "--model.model_name_or_path")
    paths.check_datasets(cfg.data.dataset, "--data.dataset")
    paths.check_probs(cfg.data.dataset_probs, cfg.data.dataset, "--data.dataset_probs", "--data.dataset")
    paths.check_datasets(cfg.eval.dataset, "--eval.dataset")
    _check_outputs(cfg.ckpt, cfg.logger.tensorboard_dir)
    paths.check_required("--model.model_name_or_path", cfg.model.model_name_or_path, _MODEL)
    paths.check_required("--data.dataset", cfg.data.dataset, _DATA)


def check_rl_files(cfg: PPOConfig) -> None:
    """Model, prompts, reward file and output folders of policy training."""
    paths.check_model(cfg.actor.model_name_or_path, "--actor.model_name_or_path")
    paths.check_datasets(cfg.data.prompt_dataset, "--data.prompt_dataset")
    paths.check_probs(cfg.data.prompt_probs, cfg.data.prompt_dataset, "--data.prompt_probs", "--data.prompt_dataset")
    paths.check_datasets(cfg.eval.dataset, "--eval.dataset")
    if cfg.reward.remote_url:
        paths.check_reward_source(cfg.reward.remote_url)
    _check_outputs(cfg.ckpt, cfg.logger.tensorboard_dir)
    paths.check_required("--actor.model_name_or_path", cfg.actor.model_name_or_path, _MODEL)
    paths.check_required("--data.prompt_dataset", cfg.data.prompt_dataset, _DATA)
    reward = cfg.reward
    if not (reward.remote_url or reward.verifier or reward.model_name_or_path or cfg.train.agent_func_path):
        raise UserError("--reward.remote_url: no reward is given; give a Python file or URL, or --reward.verifier math")


def _check_outputs(ckpt: CkptConfig, tensorboard_dir: str | None) -> None:
    paths.check_writable(ckpt.output_dir, "--ckpt.output_dir")
    if not ckpt.disable_ds:
        paths.check_writable(ckpt.path, "--ckpt.path")
    if tensorboard_dir:
        paths.check_writable(tensorboard_dir, "--logger.tensorboard_dir")


# The rule for batches: a global batch need not divide by workers or micro-batches, because the update plan deals any
# number of rows to any number of workers exactly. A micro-batch larger than the batch could never be filled.
def _check_batches(train: TrainConfig) -> None:
    if train.micro_batch_size > train.batch_size and not train.dynamic_batch_enable:
        raise UserError(
            f"--train.micro_batch_size {train.micro_batch_size}: larger than --train.batch_size {train.batch_size};"
            f" give {train.batch_size} or less"
        )


def _check_rollout_batch(cfg: PPOConfig) -> list[str]:
    samples = cfg.rollout.batch_size * cfg.rollout.n_samples_per_prompt
    made = f"--rollout.batch_size {cfg.rollout.batch_size} x --rollout.n_samples_per_prompt"
    made = f"{made} {cfg.rollout.n_samples_per_prompt} = {samples} samples"
    # A rollout smaller than the batch would train on a batch size that nobody asked for.
    if samples < cfg.train.batch_size:
        raise UserError(f"--train.batch_size {cfg.train.batch_size}: larger than the rollout ({made}); lower it")
    if cfg.rollout.micro_batch_size > samples and not cfg.train.dynamic_batch_enable:
        raise UserError(
            f"--rollout.micro_batch_size {cfg.rollout.micro_batch_size}: larger than the rollout ({made}); lower it"
        )
    rest = samples % cfg.train.batch_size
    if rest and not cfg.algo.dynamic_filtering_enable:
        return [
            f"{made} do not divide by --train.batch_size {cfg.train.batch_size}: each rollout's last update has {rest}"
        ]
    return []


def _check_groups(cfg: PPOConfig) -> None:
    n, estimator = cfg.rollout.n_samples_per_prompt, cfg.algo.advantage.estimator
    if n < 2 and estimator in GROUP_ESTIMATORS:
        raise UserError(
            f"--rollout.n_samples_per_prompt {n}: --algo.advantage.estimator {estimator} compares the samples of a"
            " prompt; give 2 or more, or use --algo.advantage.estimator reinforce"
        )
    if n < 2 and cfg.algo.dynamic_filtering_enable:
        raise UserError(f"--rollout.n_samples_per_prompt {n}: --algo.dynamic_filtering_enable needs 2 or more")


def _check_kl(cfg: PPOConfig) -> None:
    kl = cfg.algo.kl
    if kl.use_loss and kl.init_coef > 0 and kl.estimator == "k1":
        raise UserError(
            "--algo.kl.estimator k1: has no gradient in expectation in the loss (--algo.kl.use_loss);"
            " give k2 or k3, or leave --algo.kl.use_loss out"
        )


def _check_correction(cfg: PPOConfig) -> None:
    if cfg.algo.advantage.is_correction_enable and cfg.rollout.top_p < 1:
        raise UserError(
            f"--rollout.top_p {cfg.rollout.top_p:g}: cuts the support that --algo.advantage.is_correction_enable"
            " compares; give 1, or leave the correction out"
        )


def _check_lengths(cfg: PPOConfig) -> None:
    new, longest = cfg.rollout.max_new_tokens, cfg.data.max_len
    if new is not None and new >= longest:
        raise UserError(
            f"--rollout.max_new_tokens {new}: leaves no room for a prompt in --data.max_len {longest};"
            f" lower it, or raise --data.max_len"
        )
    buffer = cfg.reward.overlong_buffer_len
    if buffer is None:
        return
    if new is None:
        raise UserError(
            f"--reward.overlong_buffer_len {buffer:g}: counts back from --rollout.max_new_tokens; give that too"
        )
    if buffer > new:
        raise UserError(
            f"--reward.overlong_buffer_len {buffer:g}: longer than --rollout.max_new_tokens {new}; lower it"
        )


def _check_reward(cfg: PPOConfig) -> None:
    reward = cfg.reward
    if reward.remote_url and reward.verifier:
        raise UserError(f"--reward.verifier {reward.verifier}: --reward.remote_url is given too; leave one of them out")
    if reward.verifier and not cfg.data.label_key:
        raise UserError(f"--reward.verifier {reward.verifier}: compares with a label; give --data.label_key")


def _check_placement(cfg: PPOConfig) -> None:
    actor = cfg.actor.num_nodes * (cfg.actor.num_gpus_per_node or 1)
    ref = cfg.ref.num_nodes * (cfg.ref.num_gpus_per_node or 1)
    train, vllm = cfg.train, cfg.vllm
    if uses_reference(cfg) and ref != actor and (train.colocate_all or train.colocate_actor_ref):
        flag = "--train.colocate_all" if train.colocate_all else "--train.colocate_actor_ref"
        raise UserError(
            f"--ref.num_gpus_per_node {cfg.ref.num_gpus_per_node}: {flag} needs as many reference workers ({ref}) as"
            f" actor workers ({actor}); give --actor's numbers"
        )
    engines = (vllm.num_engines or 1) * vllm.tensor_parallel_size
    if train.colocate_all and engines > actor:
        raise UserError(
            f"--vllm.num_engines {vllm.num_engines}: needs {engines} places of the {actor} that --train.colocate_all"
            " shares; lower it"
        )
    if cfg.device == "cpu":
        if vllm.tensor_parallel_size > 1:
            raise UserError(
                f"--vllm.tensor_parallel_size {vllm.tensor_parallel_size}: an engine has one process on a CPU;"
                " give 1, and more --vllm.num_engines"
            )
        return
    _check_gpu_transfer(cfg)


def _check_gpu_transfer(cfg: PPOConfig) -> None:
    backend = cfg.vllm.sync_backend
    if backend == "shm":
        raise UserError("--vllm.sync_backend shm: serves CPUs only; give nccl, or ipc with --train.colocate_all")
    if backend == "ipc" and not cfg.train.colocate_all:
        raise UserError(
            "--vllm.sync_backend ipc: needs actor and engine on one GPU; add --train.colocate_all, or give nccl"
        )


def _check_template(data: TextDataConfig) -> list[str]:
    template = data.input_template
    if template is None or data.apply_chat_template:
        return []
    if "{}" not in template:
        raise UserError(f"--data.input_template {template!r}: has no {{}} where the prompt goes; add it")
    if "\\n" in template:
        return [f"--data.input_template {template!r} holds a backslash and an n: in a shell, $'...' writes a newline"]
    return []


def _check_token_budget(train: TrainConfig, data: TextDataConfig) -> list[str]:
    if train.dynamic_batch_enable and train.max_tokens_per_gpu < data.max_len:
        return [
            f"--train.max_tokens_per_gpu {train.max_tokens_per_gpu} is below --data.max_len {data.max_len}:"
            " a longer sequence gets a micro-batch of its own, above the budget"
        ]
    return []
