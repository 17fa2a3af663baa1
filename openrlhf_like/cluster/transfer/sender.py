"""Weights from the trainer's workers to the engines: one code path for shm, nccl and ipc."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from openrlhf_like.types import UserError, WaitTimeout

logger = logging.getLogger(__name__)


class EngineSyncClient:
    """vLLM's weight-sync protocol over Ray actors: every call goes to all engines and waits for all, with a limit.

    vLLM's own Ray client waits without a limit, gives every engine the same NCCL rank, and cannot pass on a version.
    """

    def __init__(self, handles: list[Any], timeout: float) -> None:
        self.handles = handles
        self.timeout = timeout
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = [dict(init_info) for _ in self.handles]
        if "rank_offset" in init_info:
            offset = init_info["rank_offset"]
            for info, size in zip(infos, self.world_sizes(), strict=True):
                info["rank_offset"] = offset
                offset += size
        refs = [
            h.init_weight_transfer_engine.remote({"init_info": info})
            for h, info in zip(self.handles, infos, strict=True)
        ]
        self.wait(refs, "the handshake")

    def start_weight_update(self) -> None:
        self.wait([h.start_weight_update.remote() for h in self.handles], "the start of a weight update")

    def update_weights(self, update_info: Any) -> None:
        request = {"update_info": update_info}
        self.wait([h.update_weights.remote(request) for h in self.handles], "a part of the weights")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = self.version if weight_version is None else int(weight_version)
        self.wait([h.finish_weight_update.remote(version) for h in self.handles], "the end of a weight update")

    def world_sizes(self) -> list[int]:
        """Workers of each engine."""
        return self.wait([h.world_size.remote() for h in self.handles], "its number of workers")

    def worker_call(self, method: str) -> list[list[Any]]:
        """A method of every engine's workers; results by engine, then by worker."""
        return self.wait([h.worker_call.remote(method) for h in self.handles], method)

    def wait(self, refs: list[Any], what: str) -> list[Any]:
        """Results in order. Raises WaitTimeout, or the engine's own error."""
        import ray

        try:
            return ray.get(refs, timeout=self.timeout)
        except ray.exceptions.GetTimeoutError as error:
            _, late = ray.wait(refs, num_returns=len(refs), timeout=0)
            names = ", ".join(str(i) for i, ref in enumerate(refs) if ref in late)
            raise WaitTimeout(
                f"weight sync: trainer rank 0 waited {self.timeout:g} s for engine {names} to acknowledge {what}; "
                "--timeout.weight_sync changes the limit"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"weight sync: an engine died while the trainer waited for {what}: {error}") from error


class WeightSender:
    """Lives in every worker of the trainer; every rank calls ``init`` once and ``send`` after each policy update."""

    def __init__(self, engine_handles: list[Any], cfg: Any, rank: int, world_size: int, gather: Any) -> None:
        """``gather`` is the training side's gather object (see ``source.Gather``)."""
        self.cfg = cfg
        self.rank = rank
        self.world_size = world_size
        self.backend: str = cfg.vllm.sync_backend
        self.check: bool = bool(cfg.vllm.check_weight_sync)
        self.client = EngineSyncClient(list(engine_handles), float(cfg.timeout.weight_sync))
        self._gather = gather
        self._source: Any = None
        self._transfer: Any = None

    def init(self) -> None:
        """Rendezvous with the engines."""
        from openrlhf_like import vllm_plugin

        vllm_plugin.register()
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from openrlhf_like.cluster.transfer.source import CallbackSource

        self._source = CallbackSource(self._gather)
        self._source.record = self.check and self.rank == 0
        self._transfer = WeightTransferTrainerFactory.trainer_init(
            self._init_info(), client=self.client, source=self._source
        )

    def send(self, version: int) -> dict[str, float]:
        """Send all weights as policy ``version``; returns seconds and bytes. Every rank, in lockstep.

        Raises WaitTimeout past ``--timeout.weight_sync``; RuntimeError if the check finds a difference.
        """
        if self._transfer is None:
            self.init()
        began = time.perf_counter()
        self.client.version = int(version)
        checking = self.check and self.rank == 0
        if checking:
            self.client.worker_call("start_recording_weights")
        _finish_device_work()
        self._transfer.send_weights()
        if checking:
            self._compare()
        num_bytes = sum(m.dtype.itemsize * _count(m.shape) for m in self._source.metadata())
        return {"seconds": time.perf_counter() - began, "bytes": float(num_bytes)}

    def shutdown(self) -> None:
        """Free segments and process groups. Idempotent."""
        if self._transfer is not None:
            self._transfer.shutdown()
            self._transfer = None

    def _compare(self) -> None:
        from openrlhf_like.cluster.transfer.check import compare_checksums

        for i, workers in enumerate(self.client.worker_call("stop_recording_weights")):
            for j, received in enumerate(workers):
                compare_checksums(self._source.checksums, received, f"engine {i} worker {j}")

    def _init_info(self) -> Any:
        if self.backend == "shm":
            from openrlhf_like.cluster.transfer.shm import ShmTrainerInitInfo

            return ShmTrainerInitInfo(rank=self.rank)
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
            from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

            # A tensor must fit into the buffer whole, and a large vocabulary's embedding is beyond its default.
            largest = max(m.dtype.itemsize * _count(m.shape) for m in self._source.metadata())
            size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
            return IPCTrainerInitInfo(packed=True, rank=self.rank, packed_buffer_size_bytes=size)
        if self.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            address, port = _free_endpoint() if self.rank == 0 else ("", 0)
            members = 1 + sum(self.client.world_sizes()) if self.rank == 0 else 0
            return NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=members, rank=self.rank)
        raise UserError(f"--vllm.sync_backend {self.backend}: unknown; give shm, nccl or ipc")


def _finish_device_work() -> None:
    """Packing runs on streams of its own, which do not wait for the optimizer step on the default one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _count(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _free_endpoint() -> tuple[str, int]:
    """This node's address as Ray knows it, and a port that is free now."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]
