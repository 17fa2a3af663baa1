"""Environment variables of Ray and of the workers. Nothing here imports Ray or torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import openrlhf_like

# What a user's shell says to the libraries inside the workers. On a local Ray the workers inherit the whole
# environment; a cluster's nodes were started by somebody else's shell and are told.
_PREFIXES = (
    "CUDA_DEVICE_",
    "DS_",
    "GLOO_",
    "GOMP_",
    "HF_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENRLHF_",
    "PYTORCH_",
    "TOKENIZERS_",
    "TORCH_",
    "TRANSFORMERS_",
    "TRITON_",
    "VLLM_",
    "WANDB_",
)
# Trackers run in the driver: their keys have no business in Ray's job record.
_NEVER = {"WANDB_API_KEY"}

_RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    # A worker that asks for no GPU keeps the CUDA_VISIBLE_DEVICES it was given (engines that span several bundles).
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Errors of calls that nobody waits for any more would be printed a second time.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Child processes of a worker (vLLM's engine core, data loaders) end with it.
    "RAY_process_group_cleanup_enabled": "true",
    "RAY_kill_child_processes_on_worker_exit": "true",
}

_WORKER_DEFAULTS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
}


def python_path() -> str:
    """PYTHONPATH for workers: the working directory and this package's parent first, then what was there.

    User files that import their neighbours, and a checkout that is not installed, work in the workers as in the driver.
    """
    package_parent = str(Path(openrlhf_like.__file__).resolve().parent.parent)
    parts = [os.getcwd(), package_parent, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(p for p in parts if p))


def ray_environment() -> dict[str, str]:
    """What Ray's own processes are started with; a variable that the user has set stays as it is."""
    env = {k: v for k, v in _RAY_DEFAULTS.items() if k not in os.environ}
    has_token = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if not has_token and not _home_is_writable():
        env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray would write one to the home folder
    return env


def _home_is_writable() -> bool:
    try:
        home = Path.home() / ".ray"
    except RuntimeError:
        return False
    return os.access(home if home.exists() else home.parent, os.W_OK)


def worker_environment(device: str) -> dict[str, str]:
    """Environment variables of every worker of a run on ``device`` ("cpu" or "cuda"); values the user set win."""
    env = {**_WORKER_DEFAULTS}
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and name not in _NEVER:
            env[name] = value
    if device == "cpu":
        # --device cpu on a machine with GPUs leaves them alone.
        env["DS_ACCELERATOR"] = "cpu"
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Threads that wait must soon sleep: spinning, they take the time of those that compute, here and in the other
        # roles' processes. Three busy processes on two cores ran about 3 times as fast: benchmarks/omp_spin.py.
        if "OMP_WAIT_POLICY" not in os.environ:
            env.setdefault("GOMP_SPINCOUNT", "1000")
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            env["VLLM_LOGGING_LEVEL"] = "ERROR"  # its warnings on a CPU name what a CPU does not have, one by one
    env["PYTHONPATH"] = python_path()
    return env


def threads_environment(num_processes: int, cores: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """OMP_NUM_THREADS for one of ``num_processes`` processes that compute at the same time on ``cores`` cores.

    Roles take turns (generation, then training), so each role may use all cores; Ray's own default is one thread.
    """
    known = {**os.environ, **(base or {})}
    if known.get("OMP_NUM_THREADS"):
        return {"OMP_NUM_THREADS": known["OMP_NUM_THREADS"]}
    return {"OMP_NUM_THREADS": str(max(1, cores // max(1, num_processes)))}
