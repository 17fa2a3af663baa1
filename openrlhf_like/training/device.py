"""The few lines that differ between a CPU and a GPU: device, collective backend, seeds, cached memory.

Importing this module selects DeepSpeed's accelerator lazily: call :func:`prepare_process` before the first
``import deepspeed``.
"""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_process(device: str, threads: int | None = None) -> None:
    """Settle what must be settled before DeepSpeed is imported: its accelerator, and CPU threads.

    ``threads`` None takes OMP_NUM_THREADS if set, else leaves torch's own choice.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    if threads is None and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        threads = int(os.environ["OMP_NUM_THREADS"])
    if threads:
        torch.set_num_threads(max(1, threads))


def torch_device(device: str, local_rank: int = 0) -> torch.device:
    """The torch device of this worker. ``device`` is "cpu" or "cuda" (resolved, never "auto")."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def set_current_device(device: torch.device) -> None:
    """Make ``device`` current for the process (nothing to do on a CPU)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def collective_backend(device: str) -> str:
    """torch.distributed backend of training collectives."""
    return "gloo" if device == "cpu" else "nccl"


def default_param_dtype(device: str) -> str:
    """The type where none is asked for: fp32 on a CPU, bf16 on a GPU."""
    return "fp32" if device == "cpu" else "bf16"


def param_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype of ``--ds.param_dtype``; raises UserError where the device cannot compute in it."""
    if name not in DTYPES:
        raise UserError(f"--ds.param_dtype {name}: unknown; choose one of {', '.join(DTYPES)}")
    if name == "fp16" and device == "cpu" and not cpu_supports_fp16():
        raise UserError("--ds.param_dtype fp16: this CPU has no fp16 arithmetic; use fp32 (or bf16)")
    return DTYPES[name]


def cpu_supports_fp16() -> bool:
    """Whether oneDNN computes in fp16 here (the question DeepSpeed asks of the CPU accelerator)."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


def seed_everything(seed: int, full_determinism: bool = False) -> None:
    """Seed Python, numpy and torch (all devices). With ``full_determinism``, refuse nondeterministic kernels too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def rng_state() -> dict[str, Any]:
    """The state of every random generator a training step may draw from."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what :func:`rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def empty_cache(device: torch.device) -> None:
    """Give cached blocks back to the driver (nothing to do on a CPU)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
