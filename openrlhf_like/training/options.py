"""What a training engine needs to know, picked out of a command's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openrlhf_like.config.tree import get_or
from openrlhf_like.training import device as dev


@dataclass
class OptimOptions:
    """Optimizer and schedule of one model.

    ``lr`` is the peak; ``warmup_ratio`` and ``min_lr_ratio`` are shares of the horizon and of the peak.
    """

    name: str = "adam"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scheduler: str = "cosine_with_min_lr"
    lr_warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1
    max_norm: float = 1.0


@dataclass
class EngineOptions:
    """Everything the DeepSpeed engine of one role is built from.

    ``flag`` and ``optim_flag`` name the role's flag groups in messages. ``chat_template`` replaces the tokenizer's own,
    in the exported model too.
    """

    device: str = "cpu"
    param_dtype: str = "fp32"
    zero_stage: int = 2
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    gradient_checkpointing_reentrant: bool = False
    packing: bool = False
    grad_accum_dtype: str | None = None
    overlap_comm: bool = False
    adam_offload: bool = False
    param_offload: bool = False
    zpg: int = 1
    disable_dropout: bool = False
    seed: int = 42
    full_determinism: bool = False
    disable_ds_ckpt: bool = False
    collective_timeout: float = 1800.0
    flag: str = "actor"
    optim_flag: str = "--actor."
    slow_tokenizer: bool = False
    chat_template: str | None = None
    optim: OptimOptions = field(default_factory=OptimOptions)


def _optim(cfg: Any, prefix: str) -> OptimOptions:
    base = OptimOptions()
    dot = f"{prefix}." if prefix else ""
    return OptimOptions(
        name=get_or(cfg, f"{dot}optim", base.name),
        lr=float(get_or(cfg, f"{dot}adam.lr", base.lr)),
        betas=tuple(get_or(cfg, f"{dot}adam.betas", base.betas)),  # type: ignore[arg-type]
        eps=float(get_or(cfg, f"{dot}adam.eps", base.eps)),
        weight_decay=float(get_or(cfg, f"{dot}adam.weight_decay", base.weight_decay)),
        lr_scheduler=get_or(cfg, f"{dot}lr_scheduler", base.lr_scheduler),
        lr_warmup_ratio=float(get_or(cfg, f"{dot}lr_warmup_ratio", base.lr_warmup_ratio)),
        min_lr_ratio=float(get_or(cfg, f"{dot}min_lr_ratio", base.min_lr_ratio)),
        max_norm=float(get_or(cfg, f"{dot}max_norm", base.max_norm)),
    )


def engine_options(cfg: Any, role: str) -> EngineOptions:
    """Options of one role: "sft", "actor" or "ref". ``cfg`` is the command's resolved configuration."""
    device = get_or(cfg, "device", "cpu")
    device = "cpu" if device == "auto" else device
    group = "model" if role == "sft" else "actor"
    return EngineOptions(
        device=device,
        param_dtype=get_or(cfg, "ds.param_dtype", dev.default_param_dtype(device)),
        zero_stage=int(get_or(cfg, "ds.zero_stage", 2)),
        attn_implementation=get_or(cfg, "ds.attn_implementation", "sdpa"),
        gradient_checkpointing=bool(get_or(cfg, f"{group}.gradient_checkpointing_enable", False)),
        gradient_checkpointing_reentrant=bool(get_or(cfg, f"{group}.gradient_checkpointing_reentrant", False)),
        packing=bool(get_or(cfg, "ds.packing_samples", False)),
        grad_accum_dtype=get_or(cfg, "ds.grad_accum_dtype"),
        overlap_comm=bool(get_or(cfg, "ds.overlap_comm", False)),
        adam_offload=bool(get_or(cfg, "ds.adam_offload", False)),
        param_offload=bool(get_or(cfg, "ref.offload", False)) if role == "ref" else False,
        zpg=int(get_or(cfg, "ds.zpg", 1)),
        # Log pi must be that of the distribution sampled from: dropout in any RL pass would make ratios noise.
        disable_dropout=role != "sft",
        seed=int(get_or(cfg, "train.seed", 42)),
        full_determinism=bool(get_or(cfg, "train.full_determinism_enable", False)),
        disable_ds_ckpt=bool(get_or(cfg, "ckpt.disable_ds", False)),
        collective_timeout=float(get_or(cfg, "timeout.collective", 1800)),
        flag=group,
        optim_flag="--" if role == "sft" else "--actor.",
        slow_tokenizer=bool(get_or(cfg, "data.disable_fast_tokenizer", False)),
        chat_template=get_or(cfg, "data.tokenizer_chat_template"),
        optim=_optim(cfg, "" if role == "sft" else "actor"),
    )
