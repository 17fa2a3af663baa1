"""Flags that a user gave and that change nothing in this setting: each is named in one warning line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.offline import OfflineConfig, SFTConfig
from openrlhf_like.config.presets import GROUP_ESTIMATORS
from openrlhf_like.config.resolve import uses_reference
from openrlhf_like.config.rl import PPOConfig


@dataclass(frozen=True)
class NoEffect:
    """``names`` (dotted; a trailing ``.*`` stands for a group) have no effect ``when``; ``why`` ends the warning."""

    names: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str


def _all(names: str) -> tuple[str, ...]:
    return tuple(names.split())


def _wandb(c: Any) -> bool:
    return c.logger.wandb.mode != "disabled" and bool(c.logger.wandb.key or c.logger.wandb.mode)


def _no_forward_pass(c: Any) -> bool:
    """One update a rollout and no reference: nothing needs log-probs outside the training pass."""
    samples = c.rollout.batch_size * c.rollout.n_samples_per_prompt
    return not uses_reference(c) and c.train.max_epochs == 1 and samples <= c.train.batch_size


def _optims(c: Any) -> tuple[Any, ...]:
    return (c.actor,) if isinstance(c, PPOConfig) else (c,)


#: Schedules that end above 0.
_WITH_FLOOR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")

_COMMON = (
    NoEffect(
        _all("train.max_tokens_per_gpu rollout.max_tokens_per_gpu"),
        lambda c: not c.train.dynamic_batch_enable,
        "without --train.dynamic_batch_enable",
    ),
    NoEffect(
        _all("train.micro_batch_size rollout.micro_batch_size"),
        lambda c: c.train.dynamic_batch_enable,
        "with --train.dynamic_batch_enable: the token budget decides",
    ),
    NoEffect(
        _all("eval.steps eval.split eval.before_train eval.temperature eval.n_samples_per_prompt eval.max_samples"),
        lambda c: not c.eval.dataset,
        "without --eval.dataset",
    ),
    NoEffect(
        _all("ds.lora.alpha ds.lora.target_modules ds.lora.dropout"),
        lambda c: c.ds.lora.rank == 0,
        "without --ds.lora.rank",
    ),
    NoEffect(("ds.ring_attn_head_stride",), lambda c: c.ds.ring_attn_size == 1, "without --ds.ring_attn_size"),
    NoEffect(
        ("ds.adam_offload", "ref.offload", "ds.enable_sleep"),
        lambda c: c.device == "cpu",
        "on a CPU: everything is in host memory",
    ),
    NoEffect(("ds.overlap_comm",), lambda c: c.device == "cpu", "on a CPU"),
    NoEffect(("ds.overlap_comm",), lambda c: c.ds.zero_stage < 2, "with --ds.zero_stage below 2"),
    NoEffect(
        ("data.dataloader_num_workers",),
        lambda c: True,
        "here: all data is tokenized once, before training, by the tokenizer's own threads",
    ),
    NoEffect(
        _all("lr_warmup_ratio actor.lr_warmup_ratio"),
        lambda c: any(o.lr_scheduler == "constant" for o in _optims(c)),
        "with a constant schedule; constant_with_warmup has one",
    ),
    NoEffect(
        _all("min_lr_ratio actor.min_lr_ratio"),
        lambda c: any(o.lr_scheduler not in _WITH_FLOOR for o in _optims(c)),
        f"with this schedule: {', '.join(_WITH_FLOOR)} have a lowest rate",
    ),
    NoEffect(
        _all("model.gradient_checkpointing_reentrant actor.gradient_checkpointing_reentrant"),
        lambda c: not (c.actor if isinstance(c, PPOConfig) else c.model).gradient_checkpointing_enable,
        "without gradient_checkpointing_enable",
    ),
    NoEffect(
        _all("ckpt.save_hf ckpt.max_num ckpt.max_mem"),
        lambda c: c.ckpt.save_steps < 1,
        "without --ckpt.save_steps: nothing is saved on the way",
    ),
    NoEffect(
        ("ckpt.path",),
        lambda c: c.ckpt.save_steps < 1 and not c.ckpt.load_enable,
        "without --ckpt.save_steps or --ckpt.load_enable",
    ),
    NoEffect(
        ("data.input_template",),
        lambda c: c.data.apply_chat_template and c.data.input_template is not None,
        "with --data.apply_chat_template",
    ),
    NoEffect(
        ("data.tokenizer_chat_template",),
        lambda c: not c.data.apply_chat_template,
        "without --data.apply_chat_template",
    ),
    NoEffect(
        _all("logger.wandb.org logger.wandb.group logger.wandb.project"),
        lambda c: not _wandb(c),
        "without --logger.wandb.key or --logger.wandb.mode",
    ),
    NoEffect(
        ("logger.wandb.run_name",),
        lambda c: not _wandb(c) and not c.logger.tensorboard_dir,
        "without --logger.wandb.key, --logger.wandb.mode or --logger.tensorboard_dir",
    ),
    NoEffect(("ckpt.load_enable",), lambda c: c.ckpt.disable_ds and c.ckpt.load_enable, "with --ckpt.disable_ds"),
    NoEffect(("local_rank",), lambda c: c.local_rank > 0, "here: workers are placed by Ray"),
)

_SFT = (
    NoEffect(("logger.rollouts_every",), lambda c: True, "in this command: it has no rollouts"),
    NoEffect(
        _all("timeout.generate timeout.reward timeout.weight_sync"),
        lambda c: True,
        "in this command: it has no rollouts",
    ),
    NoEffect(("data.multiturn",), lambda c: c.model.pretrain_mode_enable, "with --model.pretrain_mode_enable"),
    NoEffect(
        _all("muon.lr muon.momentum muon.ns_steps muon.nesterov"), lambda c: c.optim != "muon", "without --optim muon"
    ),
)

_RL = (
    # KL and reference
    NoEffect(
        _all("algo.kl.target algo.kl.horizon algo.kl.estimator algo.kl.use_loss"),
        lambda c: c.algo.kl.init_coef == 0,
        "with --algo.kl.init_coef 0",
    ),
    NoEffect(
        ("algo.kl.horizon",), lambda c: c.algo.kl.init_coef > 0 and c.algo.kl.target is None, "without --algo.kl.target"
    ),
    NoEffect(
        _all("ref.num_nodes ref.num_gpus_per_node ref.offload train.colocate_actor_ref"),
        lambda c: not uses_reference(c),
        "with --algo.kl.init_coef 0: there is no reference model",
    ),
    NoEffect(
        ("ref.offload",),
        lambda c: c.device == "cuda" and c.ds.zero_stage < 3,
        "without --ds.zero_stage 3: DeepSpeed offloads sharded weights only",
    ),
    NoEffect(
        _all("rollout.micro_batch_size rollout.max_tokens_per_gpu"),
        _no_forward_pass,
        "with one update a rollout and no reference: the training pass computes the only log-probs",
    ),
    NoEffect(
        ("train.colocate_actor_ref",),
        lambda c: c.train.colocate_all and uses_reference(c),
        "with --train.colocate_all: it includes this",
    ),
    # losses and advantages
    NoEffect(
        ("actor.dual_clip", "actor.eps_clip", "actor.eps_clip_low_high"),
        lambda c: c.actor.policy_loss_type == "gpg",
        "with --actor.policy_loss_type gpg",
    ),
    NoEffect(
        ("actor.dual_clip",),
        lambda c: c.actor.policy_loss_type not in ("ppo", "gspo", "clip_cov", "gpg"),
        "with this --actor.policy_loss_type",
    ),
    NoEffect(("actor.eps_clip",), lambda c: c.actor.eps_clip_low_high is not None, "with --actor.eps_clip_low_high"),
    NoEffect(
        _all("algo.advantage.is_correction_threshold algo.advantage.is_correction_type"),
        lambda c: not c.algo.advantage.is_correction_enable,
        "without --algo.advantage.is_correction_enable",
    ),
    NoEffect(
        ("algo.advantage.lambd", "critic.*"),
        lambda c: c.algo.advantage.estimator != "gae",
        "without --algo.advantage.estimator gae: there is no critic",
    ),
    NoEffect(
        ("algo.advantage.gamma",),
        lambda c: c.algo.advantage.estimator in (*GROUP_ESTIMATORS, "remax"),
        "with a group estimator: gamma is 1",
    ),
    NoEffect(
        ("algo.advantage.no_std_norm",),
        lambda c: c.algo.advantage.estimator in ("rloo", "dr_grpo", "opo", "remax"),
        "with this --algo.advantage.estimator: it divides by no deviation",
    ),
    NoEffect(
        ("algo.dynamic_filtering_range",),  # max_rounds also ends a run in which every reward fails
        lambda c: not c.algo.dynamic_filtering_enable,
        "without --algo.dynamic_filtering_enable",
    ),
    NoEffect(
        _all("actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov"),
        lambda c: c.actor.optim != "muon",
        "without --actor.optim muon",
    ),
    # rewards
    NoEffect(
        ("reward.overlong_penalty_factor",),
        lambda c: c.reward.overlong_buffer_len is None,
        "without --reward.overlong_buffer_len",
    ),
    NoEffect(
        _all("reward.num_nodes reward.num_gpus_per_node reward.offload reward.normalize_enable"),
        lambda c: not c.reward.model_name_or_path,
        "without --reward.model_name_or_path",
    ),
    NoEffect(
        ("train.colocate_critic_reward",),
        lambda c: not c.reward.model_name_or_path or c.algo.advantage.estimator != "gae",
        "without a critic and a reward model",
    ),
    NoEffect(
        ("reward.http_retries",),
        lambda c: not str(c.reward.remote_url or "").startswith("http"),
        "without an http(s) --reward.remote_url",
    ),
    NoEffect(
        ("reward.num_workers",),
        lambda c: str(c.reward.remote_url or "").startswith("http"),
        "with an http(s) --reward.remote_url",
    ),
    NoEffect(
        ("ds.value_head_prefix",),
        lambda c: c.algo.advantage.estimator != "gae" and not c.reward.model_name_or_path,
        "without a critic and a reward model",
    ),
    # loops
    NoEffect(("train.async_queue_size",), lambda c: not c.train.async_enable, "without --train.async_enable"),
    NoEffect(("train.ema_beta",), lambda c: not c.train.enable_ema, "without --train.enable_ema"),
    NoEffect(("ckpt.best_metric_key",), lambda c: not c.eval.dataset, "without --eval.dataset"),
    NoEffect(("data.image_key",), lambda c: c.data.max_images_per_prompt == 0, "without --data.max_images_per_prompt"),
    # engines
    NoEffect(
        _all("vllm.gpu_memory_utilization vllm.enable_sleep vllm.enforce_eager"),
        lambda c: c.device == "cpu",
        "on a CPU",
    ),
    NoEffect(_all("vllm.kv_cache_gib vllm.num_threads"), lambda c: c.device == "cuda", "on GPUs"),
    NoEffect(("vllm.sync_with_ray",), lambda c: True, "here: weights travel through vLLM's transfer framework"),
)


def flags_without_effect(cfg: CommonConfig) -> list[str]:
    """One line a flag that the user gave and that changes nothing here, in the order of the tables."""
    table: tuple[NoEffect, ...] = ()
    if isinstance(cfg, PPOConfig):
        table = _COMMON + _RL
    elif isinstance(cfg, SFTConfig):
        table = _COMMON + _SFT
    elif isinstance(cfg, OfflineConfig):
        table = _COMMON
    lines: dict[str, str] = {}
    for entry in table:
        for name in (n for n in _matching(entry.names, cfg.given) if n not in lines):
            if entry.when(cfg):
                lines[name] = f"--{name} ({cfg.given[name]}) has no effect {entry.why}"
    return list(lines.values())


def _matching(names: tuple[str, ...], given: dict[str, str]) -> list[str]:
    out: list[str] = []
    for name in names:
        if name.endswith(".*"):
            out.extend(g for g in given if g.startswith(name[:-1]))
        elif name in given:
            out.append(name)
    return out
