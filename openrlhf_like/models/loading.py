"""Loading causal language models for training and inference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)


def check_model_path(path: str | None, flag: str) -> str:
    """The path itself, or UserError naming ``flag``. A name with a slash that is no local path may be a hub name."""
    if not path:
        raise UserError(f"{flag}: missing; give a local model folder or a hub name")
    local = Path(path)
    if local.exists():
        if not (local / "config.json").is_file():
            raise UserError(f"{flag} {path}: has no config.json; give a Hugging Face model folder")
    elif path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"{flag} {path}: no such folder; give a local model folder or a hub name (owner/name)")
    return path


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    gradient_checkpointing: bool = False,
    gradient_checkpointing_reentrant: bool = False,
    disable_dropout: bool = False,
    flag: str = "--actor.model_name_or_path",
) -> nn.Module:
    """A transformers causal LM in ``dtype``, on the CPU (or already sharded where a HfDeepSpeedConfig is alive).

    Raises:
        UserError: no such model, not a causal LM, or an attention implementation that cannot run here.
    """
    check_model_path(path, flag)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation)
    except ImportError as e:
        raise UserError(
            f"--ds.attn_implementation {attn_implementation}: not available here ({_first_line(e)}); use sdpa"
        ) from e
    except (OSError, ValueError) as e:
        raise UserError(f"{flag} {path}: cannot be loaded as a causal language model ({_first_line(e)})") from e
    model.config.use_cache = False
    if disable_dropout:
        set_dropout_zero(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": gradient_checkpointing_reentrant}
        )
        if gradient_checkpointing_reentrant:
            # Reentrant checkpoints drop the gradient of a block whose input does not ask for one.
            model.enable_input_require_grads()
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def set_dropout_zero(model: nn.Module) -> None:
    """No dropout in any module, whatever train() says; the config (and so an export) keeps its values."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) in checkpoint order; tied weights once, under the name they are first seen by."""
    seen: set[int] = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in seen:
            seen.add(id(param))
            yield name, param
