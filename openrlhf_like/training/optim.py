"""Optimizers and their parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from openrlhf_like.training.options import EngineOptions
from openrlhf_like.types import UserError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices decay; biases, norms and other vectors do not. Frozen parameters are left out.

    Under ZeRO-3 a parameter's own shape is empty, ``ds_shape`` holds the full one.
    """
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        ndim = len(getattr(param, "ds_shape", param.shape))
        is_plain = ndim < 2 or name.endswith("bias") or "norm" in name.lower().rsplit(".", 2)[-2:][0]
        (plain if is_plain else decay).append(param)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def build_optimizer(model: nn.Module, options: EngineOptions) -> torch.optim.Optimizer:
    """AdamW: torch's own on a CPU (nothing to compile), torch's fused one on a GPU, DeepSpeed's with offload."""
    opt = options.optim
    if opt.name != "adam":
        raise UserError(f"{options.optim_flag}optim {opt.name}: use adam")
    groups = parameter_groups(model, opt.weight_decay)
    kwargs: dict[str, Any] = {"lr": opt.lr, "betas": tuple(opt.betas), "eps": opt.eps}
    if options.adam_offload and options.device != "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **kwargs)
    return torch.optim.AdamW(groups, fused=options.device == "cuda", **kwargs)
