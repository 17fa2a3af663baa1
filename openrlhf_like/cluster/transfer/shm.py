"""Weight transfer through POSIX shared memory: trainer and engines on the CPUs of one machine.

A backend of vLLM's weight-transfer framework like ``nccl`` and ``ipc``, under the name ``shm``. The trainer's rank 0
owns one segment. It fills the segment with whole tensors, tells the engines names, types, shapes and offsets, waits
until all have taken their copy, and fills it again: peak memory is one segment, however large the model is.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import shared_memory
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from openrlhf_like.cluster.transfer.check import tensor_checksum

logger = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES = 128 << 20
_ALIGN = 64
_RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class ShmWeightTransferInitInfo(WeightTransferInitInfo):
    """Which segment to map, and its size in bytes."""

    segment: str
    size: int


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """``segment_bytes`` bounds the memory of a transfer; a tensor larger than it enlarges the segment."""

    backend: ClassVar[str] = "shm"
    segment_bytes: int = DEFAULT_SEGMENT_BYTES


@dataclass
class ShmWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """What lies in the segment now. ``checksums`` are of the bytes written, empty where none were asked for."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    checksums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes), len(self.offsets)}
        if len(lengths) != 1 or len(self.checksums) not in (0, len(self.names)):
            raise ValueError("names, dtype_names, shapes, offsets and checksums must have equal lengths")


class ShmWeightTransferEngine(WeightTransferEngine[ShmWeightTransferInitInfo, ShmWeightTransferUpdateInfo]):
    """The engine's side: copies tensors out of the segment and reloads the model layer by layer."""

    init_info_cls = ShmWeightTransferInitInfo
    update_info_cls = ShmWeightTransferUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._map: mmap.mmap | None = None
        self._expected: set[str] = set()
        self._loaded: set[str] | None = set()

    def init_transfer_engine(self, init_info: ShmWeightTransferInitInfo) -> None:
        self.shutdown()
        self._map = _map_segment(init_info.segment, init_info.size)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # Tied weights are one parameter and have one name here.
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then waits for an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmWeightTransferUpdateInfo) -> None:
        load: Any = self.model.load_weights
        loaded = load(list(self._tensors(update_info)))
        if loaded is None:  # a model class that does not report what it loaded
            self._loaded = None
        elif self._loaded is not None:
            self._loaded |= set(loaded)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with _quiet(_RELOAD_LOGGER):
            finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_heads(self.model)
        missing = set() if self._loaded is None else self._expected - self._loaded
        if missing:
            names = ", ".join(sorted(missing)[:5])
            raise RuntimeError(f"weight transfer: {len(missing)} parameters of the engine got no weights: {names}")

    def shutdown(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _tensors(self, info: ShmWeightTransferUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._map is None:
            raise RuntimeError("shm weight transfer was not initialized: call init_weight_transfer_engine first")
        checksums: list[Any] = info.checksums or [None] * len(info.names)
        for name, dtype_name, shape, offset, checksum in zip(
            info.names, info.dtype_names, info.shapes, info.offsets, checksums, strict=True
        ):
            tensor = _read(self._map, getattr(torch, dtype_name), shape, offset)
            if checksum is not None and tensor_checksum(tensor) != checksum:
                raise RuntimeError(f"weight transfer: the bytes of {name} changed between trainer and engine")
            yield name, tensor


class ShmTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """The trainer's side. Every rank iterates the source, which gathers; rank 0 writes and tells the engines."""

    init_info_cls = ShmTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, size: int) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.with_checksums = False
        self._segment: shared_memory.SharedMemory | None = None
        if is_sender:
            self._segment = shared_memory.SharedMemory(
                name=f"openrlhf_like_{os.getpid()}_{secrets.token_hex(4)}", create=True, size=size
            )

    @classmethod
    def trainer_init(
        cls, init_info: ShmTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        if source is None:
            raise ValueError("shm weight transfer needs a WeightSource")
        largest = max(_num_bytes(m.dtype, m.shape) for m in source.metadata())
        engine = cls(
            client=client, source=source, is_sender=init_info.is_sender, size=max(init_info.segment_bytes, largest)
        )
        if engine._segment is not None:
            info = ShmWeightTransferInitInfo(segment=engine._segment.name, size=engine._segment.size)
            try:
                client.init_weight_transfer_engine(asdict(info))
            finally:
                # All have mapped it (or failed): without a name it ends with its last user, however that ends.
                engine._segment.unlink()
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        if self._segment is None:
            for _ in self.source:  # gathering is a collective: this rank takes its part
                pass
            return
        self.client.start_weight_update()
        for chunk in self._fill(self._segment):
            self.client.update_weights(asdict(chunk))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _fill(self, segment: shared_memory.SharedMemory) -> Iterator[ShmWeightTransferUpdateInfo]:
        """Yield each time the segment is full, and at the end; it may be overwritten when the consumer comes back."""
        assert self.source is not None
        chunk = ShmWeightTransferUpdateInfo([], [], [], [])
        used = 0
        for name, tensor in self.source:
            size = _num_bytes(tensor.dtype, tuple(tensor.shape))
            if chunk.names and used + size > segment.size:
                yield chunk
                chunk, used = ShmWeightTransferUpdateInfo([], [], [], []), 0
            _write(segment, tensor, used)
            chunk.names.append(name)
            chunk.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
            chunk.shapes.append(list(tensor.shape))
            chunk.offsets.append(used)
            if self.with_checksums:
                chunk.checksums.append(tensor_checksum(tensor))
            used += -(-size // _ALIGN) * _ALIGN
        if chunk.names:
            yield chunk


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Hold a logger at errors: it warns at every update of layers that have nothing to load (rotary, tied heads).

    What really got no weights is found by name afterwards, and is an error.
    """
    target = logging.getLogger(name)
    before = target.level
    target.setLevel(logging.ERROR)
    try:
        yield
    finally:
        target.setLevel(before)


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count * dtype.itemsize


def _write(segment: shared_memory.SharedMemory, tensor: torch.Tensor, offset: int) -> None:
    size = tensor.numel() * tensor.dtype.itemsize
    if size == 0:
        return
    target = torch.frombuffer(segment.buf, dtype=torch.uint8, count=size, offset=offset)
    target.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def _read(source: mmap.mmap, dtype: torch.dtype, shape: list[int], offset: int) -> torch.Tensor:
    """A copy: the loader keeps tensors until their layer is complete, and the segment is filled again before that."""
    size = _num_bytes(dtype, tuple(shape))
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(source, dtype=torch.uint8, count=size, offset=offset).clone().view(dtype).view(shape)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Give an output head that shares its weight with the embedding the new weight.

    The reload takes such a head for a layer that got no weights, and leaves it with the matrix that vLLM's CPU kernels
    packed from the old ones.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules: list[Any] = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding) and hasattr(m, "weight")]
    embeddings: set[int] = {m.weight.data_ptr() for m in modules if not isinstance(m, ParallelLMHead)}
    for head in modules:
        if isinstance(head, ParallelLMHead) and head.weight.data_ptr() in embeddings:  # type: ignore[operator]
            method: Any = head.quant_method
            method.process_weights_after_loading(head)


def _map_segment(name: str, size: int) -> mmap.mmap:
    """Map the trainer's segment.

    Not through SharedMemory: attaching would enter the segment into this process's resource tracker, although the
    trainer owns it and takes its name away.
    """
    import _posixshmem

    try:
        handle = _posixshmem.shm_open("/" + name, os.O_RDWR, mode=0o600)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"the engine on {os.uname().nodename} does not see the trainer's shared memory {name}: --vllm.sync_backend "
            "shm needs trainer rank 0 and every engine on one machine"
        ) from error
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
