"""What a single option may be: one table of limits, for every command that has the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.tree import get, kinds, nearest
from openrlhf_like.types import UserError

#: Schedules by transformers' names; those that need a metric or further numbers are left out.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)


@dataclass(frozen=True)
class Limit:
    """A value must pass ``test``; ``fix`` says what to give. None always passes."""

    names: str
    test: Callable[[Any], bool]
    fix: str


def _pair(test: Callable[[float, float], bool]) -> Callable[[Any], bool]:
    return lambda v: test(v[0], v[1])


LIMITS: tuple[Limit, ...] = (
    Limit(
        "train.batch_size train.micro_batch_size train.max_epochs train.num_nodes train.num_gpus_per_node"
        " train.max_tokens_per_gpu train.num_episodes train.async_queue_size"
        " actor.num_nodes actor.num_gpus_per_node ref.num_nodes ref.num_gpus_per_node critic.num_nodes"
        " critic.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node reward.num_workers reward.batch_size"
        " rollout.batch_size rollout.n_samples_per_prompt rollout.micro_batch_size rollout.vllm_generate_batch_size"
        " rollout.max_tokens_per_gpu rollout.max_new_tokens vllm.num_engines vllm.tensor_parallel_size"
        " vllm.max_num_seqs data.max_len data.max_samples eval.n_samples_per_prompt eval.max_samples"
        " algo.dynamic_filtering_max_rounds algo.kl.horizon logger.logging_steps ckpt.max_num"
        " ds.zpg ds.tensor_parallel_size ds.ring_attn_size ds.ring_attn_head_stride ds.lora.alpha batch_size"
        " muon.ns_steps actor.muon.ns_steps critic.muon.ns_steps",
        lambda v: v >= 1,
        "give 1 or more",
    ),
    Limit("ckpt.save_steps eval.steps", lambda v: v == -1 or v >= 1, "give -1 for never, or 1 or more"),
    Limit("ds.zero_stage", lambda v: 0 <= v <= 3, "give 0, 1, 2 or 3"),
    Limit(
        "train.seed data.dataloader_num_workers data.max_images_per_prompt vllm.num_threads reward.http_retries"
        " logger.rollouts_every ds.lora.rank",
        lambda v: v >= 0,
        "give 0 or more",
    ),
    Limit(
        "adam.lr actor.adam.lr critic.adam.lr muon.lr actor.muon.lr critic.muon.lr adam.weight_decay"
        " actor.adam.weight_decay critic.adam.weight_decay max_norm actor.max_norm critic.max_norm"
        " algo.kl.init_coef actor.entropy_coef actor.aux_loss_coef model.aux_loss_coef model.nll_loss_coef"
        " reward.overlong_penalty_factor critic.value_clip eval.temperature",
        lambda v: 0 <= v < math.inf,
        "give a number from 0 up",
    ),
    Limit(
        "adam.eps actor.adam.eps critic.adam.eps algo.kl.target reward.overlong_buffer_len vllm.kv_cache_gib"
        " ckpt.max_mem timeout.placement timeout.init timeout.generate timeout.reward timeout.weight_sync"
        " timeout.collective timeout.shutdown model.beta",
        lambda v: v > 0,
        "give a number above 0",
    ),
    Limit(
        "rollout.temperature",
        lambda v: 0 < v < math.inf,
        "give a number above 0: a greedy policy has no density to train on",
    ),
    Limit("rollout.top_p vllm.gpu_memory_utilization", lambda v: 0 < v <= 1, "give a number above 0, up to 1"),
    Limit(
        "lr_warmup_ratio min_lr_ratio actor.lr_warmup_ratio actor.min_lr_ratio critic.lr_warmup_ratio"
        " critic.min_lr_ratio algo.advantage.gamma algo.advantage.lambd reward.max_failure_fraction train.ema_beta",
        lambda v: 0 <= v <= 1,
        "give a number from 0 to 1",
    ),
    Limit("ds.lora.dropout", lambda v: 0 <= v < 1, "give a number from 0, below 1"),
    Limit("model.label_smoothing", lambda v: 0 <= v < 0.5, "give a number from 0, below 0.5"),
    Limit(
        "adam.betas actor.adam.betas critic.adam.betas",
        _pair(lambda a, b: 0 <= a < 1 and 0 <= b < 1),
        "give two numbers from 0, below 1",
    ),
    Limit("actor.eps_clip", lambda v: 0 < v < 1, "give a number above 0, below 1"),
    Limit(
        "actor.eps_clip_low_high",
        _pair(lambda low, high: 0 < low < 1 and low <= high < math.inf),
        "give low and high, 0 < low < 1 and low <= high, such as 0.2 0.28",
    ),
    Limit("actor.dual_clip", lambda v: 1 < v < math.inf, "give a number above 1, such as 3"),
    Limit(
        "algo.advantage.is_correction_threshold",
        _pair(lambda low, high: 0 <= low < high),
        "give low and high, 0 <= low < high",
    ),
    Limit(
        "reward.clip_range algo.dynamic_filtering_range",
        _pair(lambda low, high: low < high),
        "give low and high, low < high",
    ),
    Limit("ds.grad_accum_dtype", lambda v: v in ("fp32", "bf16", "fp16"), "give fp32, bf16 or fp16"),
    Limit("model.loss_type", lambda v: v != "", "give a loss"),
    Limit("port", lambda v: 0 <= v <= 65535, "give 0 to 65535"),
)


def shown(value: Any) -> str:
    """A value as it would stand on the command line."""
    return " ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else str(value)


def check_ranges(cfg: CommonConfig) -> None:
    """Raise UserError for the first option outside its limit."""
    known = kinds(type(cfg))
    for limit in LIMITS:
        for name in limit.names.split():
            if name not in known:
                continue
            value = get(cfg, name)
            if value is not None and not limit.test(value):
                raise UserError(f"--{name} {shown(value)}: out of range; {limit.fix}")
    for name in (n for n in known if n.rsplit(".", 1)[-1] == "lr_scheduler"):
        value = get(cfg, name)
        if value not in SCHEDULES:
            fix = nearest(value, SCHEDULES) or f"give one of {', '.join(SCHEDULES)}"
            raise UserError(f"--{name} {value}: unknown schedule; {fix}")
