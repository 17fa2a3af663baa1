"""From the command's configuration to vLLM's arguments."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WORKER_EXTENSION = "openrlhf_like.cluster.transfer.check.WeightRecorder"


@dataclass(frozen=True)
class EngineOptions:
    """What an engine needs to know, resolved.

    Attributes:
        model: path or hub name.
        device: "cpu" or "cuda".
        dtype: torch's name of the weights' type.
        max_model_len: longest prompt plus response in tokens; None takes the model's own.
        kv_cache_bytes: size of the KV cache on a CPU.
        num_threads: CPU threads of the engine; 0 leaves it to the engine.
        sync_backend: how weights arrive: "shm", "nccl" or "ipc".
        seed: of the engine's own random stream (requests without a seed).
    """

    model: str
    device: str = "cpu"
    dtype: str = "float32"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_bytes: int = 1 << 30
    num_threads: int = 0
    sync_backend: str = "shm"
    seed: int = 0
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    enable_sleep: bool = False
    gpu_memory_utilization: float = 0.95
    tensor_parallel_size: int = 1

    @classmethod
    def from_config(cls, cfg: Any, model_path: str, index: int = 0) -> EngineOptions:
        """Read the resolved configuration. ``index`` tells engines apart: each has its own random stream."""
        return cls(
            model=str(model_path),
            device=cfg.device,
            dtype=DTYPES[cfg.ds.param_dtype],
            max_model_len=cfg.data.max_len,
            max_num_seqs=cfg.vllm.max_num_seqs,
            kv_cache_bytes=int(cfg.vllm.kv_cache_gib * 2**30),
            num_threads=cfg.vllm.num_threads,
            sync_backend=cfg.vllm.sync_backend,
            seed=cfg.train.seed + index,
            enable_prefix_caching=cfg.vllm.enable_prefix_caching,
            enforce_eager=cfg.vllm.enforce_eager,
            enable_sleep=cfg.vllm.enable_sleep,
            gpu_memory_utilization=cfg.vllm.gpu_memory_utilization,
            tensor_parallel_size=cfg.vllm.tensor_parallel_size,
        )

    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's EngineArgs."""
        from vllm.config import WeightTransferConfig

        kwargs: dict[str, Any] = dict(
            model=self.model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            seed=self.seed,
            enable_prefix_caching=self.enable_prefix_caching,
            tensor_parallel_size=self.tensor_parallel_size,
            # mu must be the density of what was sampled from, temperature and top-p included.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=self.sync_backend),
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if self.max_num_seqs is not None:
            kwargs["max_num_seqs"] = self.max_num_seqs
        if self.device == "cpu":
            # Compiling takes minutes on a CPU and gains nothing at the sizes that run there.
            kwargs.update(enforce_eager=True, kv_cache_memory_bytes=self.kv_cache_bytes)
        else:
            kwargs.update(
                enforce_eager=self.enforce_eager,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_sleep_mode=self.enable_sleep,
            )
            if self.tensor_parallel_size > 1:
                # Inside a placement group vLLM would ask Ray for GPUs that this very actor holds.
                kwargs["distributed_executor_backend"] = "mp"
        return kwargs


def prepare_environment(options: EngineOptions, in_process: bool) -> None:
    """Set vLLM's variables for this process; call before vLLM is imported.

    A variable that the user set stays, except the one that decides how the engine runs.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if options.sync_backend == "ipc":
        # CUDA IPC handles are pickled on their way to the engine's own processes.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if options.device == "cpu":
        # By default every engine pins its threads to the same first cores, and to the trainers' as well.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Only whole GiB, and above the argument in rank: the argument is ours.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if options.num_threads > 0:
            os.environ["OMP_NUM_THREADS"] = str(options.num_threads)
