"""``--vllm.check_weight_sync``: are the bytes that the engines loaded the bytes that the trainer sent?

A checksum a tensor on both sides, compared by name. Costs a pass over the weights on each side.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_CHUNK = 1 << 20


def tensor_checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of a tensor's bytes, type and shape, computed where the tensor lies.

    A sum of bytes weighted by position, modulo 2**64: sees changed, swapped and shifted elements.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 == 0:
        # Four bytes at a time where the size allows, on both sides alike; a view needs an aligned start.
        data = (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK].to(torch.int64) + 1
        position = torch.arange(start, start + part.numel(), dtype=torch.int64, device=data.device)
        # A large odd multiplier spreads neighbouring positions over all 64 bits.
        total += (part * (position * 0x2545F4914F6CDD1D + 1)).sum()
    tag = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return (int(total.item()) + tag) & 0xFFFFFFFFFFFFFFFF


class WeightRecorder:
    """Mixed into vLLM's worker (``worker_extension_cls``): checksums of what is handed to the model's loader.

    Recording sits where every backend ends, so shm, nccl and ipc are checked alike.
    """

    def start_recording_weights(self) -> None:
        """Record from the next update on."""
        model = self.get_model()  # type: ignore[attr-defined]
        if "load_weights" in vars(model):
            self._recorded.clear()
            return
        self._recorded: dict[str, int] = {}
        load = model.load_weights

        def recording_load(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            return load(self._record(weights), *args, **kwargs)

        model.load_weights = recording_load

    def stop_recording_weights(self) -> dict[str, int]:
        """Checksums by name since recording began; recording ends."""
        model = self.get_model()  # type: ignore[attr-defined]
        vars(model).pop("load_weights", None)
        recorded = getattr(self, "_recorded", {})
        self._recorded = {}
        return recorded

    def _record(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._recorded[name] = tensor_checksum(tensor)
            yield name, tensor


def compare_checksums(sent: dict[str, int], received: dict[str, int], engine: str) -> None:
    """Raise RuntimeError naming the tensors that differ, are missing or were never sent."""
    missing = sorted(sent.keys() - received.keys())
    extra = sorted(received.keys() - sent.keys())
    differ = sorted(n for n in sent.keys() & received.keys() if sent[n] != received[n])
    if missing or extra or differ:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
            for names, what in ((differ, "differ"), (missing, "did not arrive"), (extra, "arrived unsent"))
            if names
        ]
        raise RuntimeError(f"weight sync check: of {len(sent)} tensors sent to {engine}: {'; '.join(parts)}")
