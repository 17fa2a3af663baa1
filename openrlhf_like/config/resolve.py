"""Defaults that depend on the machine: device, precision, numbers of workers and engines. No torch import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from openrlhf_like.config.common import CommonConfig, ModelLoadConfig
from openrlhf_like.config.offline import DPOConfig, LoraCombinerConfig, OfflineConfig
from openrlhf_like.config.rl import PPOConfig
from openrlhf_like.types import UserError

#: OpenRLHF's number, for a driver without GPUs in front of a cluster that has them.
CLUSTER_GPUS_PER_NODE = 8
#: Share of a GPU's memory an engine takes beside a training worker.
COLOCATED_GPU_MEMORY = 0.5


def visible_gpus(env: Mapping[str, str] | None = None, dev: str = "/dev") -> int:
    """NVIDIA GPUs this process may use, from device files and ``CUDA_VISIBLE_DEVICES``."""
    env = os.environ if env is None else env
    root = Path(dev)
    present = sum(1 for p in root.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)) if root.is_dir() else 0
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None or present == 0:
        return present
    entries: list[str] = []
    for entry in (e.strip() for e in listed.split(",")):
        # CUDA stops at the first entry that is no device.
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        entries.append(entry)
    if any(e.startswith("MIG-") for e in entries):
        return len(entries)
    return min(len(entries), present)


def _has_flash_attention() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _torch_is_cpu_build() -> bool:
    """Whether the installed torch cannot use a GPU, by its version alone: torch is not imported."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def resolve(cfg: CommonConfig, gpus: int | None = None) -> CommonConfig:
    """Fill in, in place, every default that depends on the machine; resolving twice changes nothing.

    Args:
        gpus: visible GPUs, counted when not given; none where torch is a CPU build.

    Raises:
        UserError: ``--device cuda`` on a machine without a GPU and without a cluster to connect to.
    """
    cpu_build = gpus is None and _torch_is_cpu_build()
    gpus = (0 if cpu_build else visible_gpus()) if gpus is None else gpus
    if cfg.device == "auto":
        cfg.device = "cuda" if gpus else "cpu"
    elif cfg.device == "cuda" and not gpus:
        if cpu_build and visible_gpus():
            raise UserError("--device cuda: the installed torch is a CPU build; install the gpu extra, or give cpu")
        if not os.environ.get("RAY_ADDRESS"):
            raise UserError("--device cuda: this machine has no visible GPU; use --device cpu, or set RAY_ADDRESS")
        gpus = CLUSTER_GPUS_PER_NODE
    _resolve_model_loading(cfg)
    if isinstance(cfg, OfflineConfig | PPOConfig):
        # A micro-batch says how the work is cut, not what is learned: its default gives way to a smaller batch.
        if "train.micro_batch_size" not in cfg.given and cfg.train.batch_size >= 1:
            cfg.train.micro_batch_size = min(cfg.train.micro_batch_size, cfg.train.batch_size)
    if isinstance(cfg, OfflineConfig):
        if cfg.train.num_gpus_per_node is None:
            cfg.train.num_gpus_per_node = gpus if cfg.device == "cuda" else 1
    if isinstance(cfg, PPOConfig):
        _resolve_workers(cfg, gpus)
        _resolve_engines(cfg)
        if cfg.rollout.max_tokens_per_gpu is None:
            cfg.rollout.max_tokens_per_gpu = cfg.train.max_tokens_per_gpu
    if isinstance(cfg, DPOConfig):
        cfg.ref.model_name_or_path = cfg.ref.model_name_or_path or cfg.model.model_name_or_path
        if cfg.model.ipo_enable:
            cfg.model.loss_type = "ipo"
    if isinstance(cfg, OfflineConfig | PPOConfig):
        wandb = cfg.logger.wandb
        if wandb.run_name is None:
            wandb.run_name = f"{cfg.command or 'run'}_{time.strftime('%Y%m%d_%H%M%S')}"
        if wandb.mode is None and wandb.key:
            wandb.mode = "online"
    return cfg


def _resolve_model_loading(cfg: CommonConfig) -> None:
    ds = getattr(cfg, "ds", None)
    cuda = cfg.device == "cuda"
    if ds is not None and ds.param_dtype is None:
        ds.param_dtype = "bf16" if cuda or isinstance(cfg, LoraCombinerConfig) else "fp32"
    if not isinstance(ds, ModelLoadConfig):
        return
    if ds.attn_implementation is None:
        flash = cuda and ds.param_dtype != "fp32" and _has_flash_attention()  # flash attention has no fp32 kernels
        ds.attn_implementation = "flash_attention_2" if flash else "sdpa"
    elif not cuda and ds.attn_implementation.startswith("flash"):
        cfg.notes.append(f"--ds.attn_implementation {ds.attn_implementation} needs a GPU: sdpa is used on the CPU")
        ds.attn_implementation = "sdpa"


def uses_reference(cfg: PPOConfig) -> bool:
    """Whether a reference model is needed: its KL has a weight."""
    return cfg.algo.kl.init_coef > 0


_PLACEMENT = (
    "actor.num_gpus_per_node",
    "ref.num_gpus_per_node",
    "vllm.num_engines",
    "train.colocate_all",
    "train.colocate_actor_ref",
)


def _share_few_gpus(cfg: PPOConfig, gpus: int) -> None:
    """Where nothing is said about placement and roles outnumber the GPUs of this machine, roles share them."""
    if any(name in cfg.given for name in _PLACEMENT) or os.environ.get("RAY_ADDRESS"):
        return
    train = cfg.train
    if gpus == 1 and not train.colocate_all:
        train.colocate_all = True
        cfg.notes.append("one GPU for all roles: --train.colocate_all is used")
    elif gpus == 2 and uses_reference(cfg) and not train.colocate_actor_ref and not train.colocate_all:
        train.colocate_actor_ref = True
        cfg.notes.append("two GPUs for actor, reference and engine: --train.colocate_actor_ref is used")


def _resolve_workers(cfg: PPOConfig, gpus: int) -> None:
    cuda = cfg.device == "cuda"
    if cuda:
        _share_few_gpus(cfg, gpus)
    shared = cfg.train.colocate_all
    ref_apart = uses_reference(cfg) and not (shared or cfg.train.colocate_actor_ref)
    roles = 1 if shared else (3 if ref_apart else 2)
    share = max(1, gpus // roles) if cuda else 1
    for group in (cfg.actor, cfg.critic, cfg.reward):
        if group.num_gpus_per_node is None:
            group.num_gpus_per_node = share
    if cfg.ref.num_gpus_per_node is None:
        cfg.ref.num_gpus_per_node = share if ref_apart else cfg.actor.num_gpus_per_node
        if not ref_apart and "ref.num_nodes" not in cfg.given:
            cfg.ref.num_nodes = cfg.actor.num_nodes
    if cfg.vllm.num_engines is None:
        if not cuda:
            cfg.vllm.num_engines = 1
        elif shared:
            world = cfg.actor.num_nodes * (cfg.actor.num_gpus_per_node or 1)
            cfg.vllm.num_engines = max(1, world // cfg.vllm.tensor_parallel_size)
        else:
            rest = gpus - (cfg.actor.num_gpus_per_node or 1) - ((cfg.ref.num_gpus_per_node or 1) if ref_apart else 0)
            cfg.vllm.num_engines = max(1, rest // cfg.vllm.tensor_parallel_size)


def _resolve_engines(cfg: PPOConfig) -> None:
    cuda, vllm = cfg.device == "cuda", cfg.vllm
    if vllm.backend == "auto":
        vllm.backend = "async" if cuda else "inprocess"
    if cuda and cfg.train.colocate_all and "vllm.gpu_memory_utilization" not in cfg.given:
        vllm.gpu_memory_utilization = COLOCATED_GPU_MEMORY  # the trainer lives on the same GPU
    if vllm.sync_backend is None:
        vllm.sync_backend = ("ipc" if cfg.train.colocate_all else "nccl") if cuda else "shm"
    elif not cuda and vllm.sync_backend != "shm":
        cfg.notes.append(f"--vllm.sync_backend {vllm.sync_backend} needs GPUs: shared memory is used on the CPU")
        vllm.sync_backend = "shm"
    elif cuda and vllm.sync_backend == "nccl" and cfg.train.colocate_all:
        # NCCL refuses two ranks on one GPU; OpenRLHF too goes over CUDA IPC here.
        if "vllm.sync_backend" in cfg.given:
            cfg.notes.append("--vllm.sync_backend nccl cannot serve colocated engines: ipc is used")
        vllm.sync_backend = "ipc"
