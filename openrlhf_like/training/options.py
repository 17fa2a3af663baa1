"""What a training engine needs to know, picked out of a command's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """Everything the DeepSpeed engine of one role is built from. ``flag`` names the role's flag group in messages."""

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
    max_ckpt_num: int = 3
    max_ckpt_mem: float = 1e8
    collective_timeout: float = 1800.0
    flag: str = "actor"
    optim: OptimOptions = field(default_factory=OptimOptions)


def _get(cfg: Any, dotted: str, default: Any = None) -> Any:
    """``cfg.a.b`` for "a.b"; the default where any part is missing or None."""
    node = cfg
    for part in dotted.split("."):
        node = getattr(node, part, None)
        if node is None:
            return default
    return node


def _optim(cfg: Any, prefix: str) -> OptimOptions:
    base = OptimOptions()
    dot = f"{prefix}." if prefix else ""
    return OptimOptions(
        name=_get(cfg, f"{dot}optim", base.name),
        lr=float(_get(cfg, f"{dot}adam.lr", base.lr)),
        betas=tuple(_get(cfg, f"{dot}adam.betas", base.betas)),  # type: ignore[arg-type]
        eps=float(_get(cfg, f"{dot}adam.eps", base.eps)),
        weight_decay=float(_get(cfg, f"{dot}adam.weight_decay", base.weight_decay)),
        lr_scheduler=_get(cfg, f"{dot}lr_scheduler", base.lr_scheduler),
        lr_warmup_ratio=float(_get(cfg, f"{dot}lr_warmup_ratio", base.lr_warmup_ratio)),
        min_lr_ratio=float(_get(cfg, f"{dot}min_lr_ratio", base.min_lr_ratio)),
        max_norm=float(_get(cfg, f"{dot}max_norm", base.max_norm)),
    )


def engine_options(cfg: Any, role: str) -> EngineOptions:
    """Options of one role: "sft", "actor" or "ref". ``cfg`` is the command's resolved configuration."""
    device = _get(cfg, "device", "cpu")
    device = "cpu" if device == "auto" else device
    group = "model" if role == "sft" else "actor"
    return EngineOptions(
        device=device,
        param_dtype=_get(cfg, "ds.param_dtype", dev.default_param_dtype(device)),
        zero_stage=int(_get(cfg, "ds.zero_stage", 2)),
        attn_implementation=_get(cfg, "ds.attn_implementation", "sdpa"),
        gradient_checkpointing=bool(_get(cfg, f"{group}.gradient_checkpointing_enable", False)),
        gradient_checkpointing_reentrant=bool(_get(cfg, f"{group}.gradient_checkpointing_reentrant", False)),
        packing=bool(_get(cfg, "ds.packing_samples", False)),
        grad_accum_dtype=_get(cfg, "ds.grad_accum_dtype"),
        overlap_comm=bool(_get(cfg, "ds.overlap_comm", False)),
        adam_offload=bool(_get(cfg, "ds.adam_offload", False)),
        param_offload=bool(_get(cfg, "ref.offload", False)) if role == "ref" else False,
        zpg=int(_get(cfg, "ds.zpg", 1)),
        # Log pi must be that of the distribution sampled from: dropout in any RL pass would make ratios noise.
        disable_dropout=role != "sft",
        seed=int(_get(cfg, "train.seed", 42)),
        full_determinism=bool(_get(cfg, "train.full_determinism_enable", False)),
        disable_ds_ckpt=bool(_get(cfg, "ckpt.disable_ds", False)),
        max_ckpt_num=int(_get(cfg, "ckpt.max_num", 3)),
        max_ckpt_mem=float(_get(cfg, "ckpt.max_mem", 1e8)),
        collective_timeout=float(_get(cfg, "timeout.collective", 1800)),
        flag=group,
        optim=_optim(cfg, "" if role == "sft" else "actor"),
    )
