"""The trainer's weights as vLLM's ``WeightSource``: built over a gather object that the training side hands in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf_like.cluster.transfer.check import tensor_checksum


class Gather(Protocol):
    """What training provides. Every rank calls both in lockstep; gathering is a collective under ZeRO-3.

    Names and shapes are those of the checkpoint (Hugging Face) form; tied weights appear once.
    """

    def names_and_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type on the wire and full shape of every tensor, in the order of ``iter_full``."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and full tensor, one at a time: the previous one may be freed when the next is asked for."""


class CallbackSource(WeightSource):
    """Reads its metadata once; converts to the declared type; keeps checksums of what it gave out where asked to."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._metadata: list[ParamMeta] | None = None
        self.record = False
        self.checksums: dict[str, int] = {}

    def metadata(self) -> list[ParamMeta]:
        if self._metadata is None:
            self._metadata = [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self._declared()]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksums = {}
        declared = iter(self.metadata())
        for name, tensor in self._gather.iter_full():
            expected = next(declared, None)
            if expected is None or expected.name != name or expected.shape != tuple(tensor.shape):
                raise RuntimeError(
                    f"the trainer gathered {name} {tuple(tensor.shape)} where it had declared "
                    f"{expected.name if expected else 'nothing more'} {expected.shape if expected else ''}"
                )
            ready = tensor.detach().to(expected.dtype).contiguous()
            if self.record:
                self.checksums[name] = tensor_checksum(ready)
            yield name, ready
        missing = next(declared, None)
        if missing is not None:
            raise RuntimeError(f"the trainer declared {missing.name} and did not gather it")

    def _declared(self) -> list[tuple[Any, ...]]:
        return list(self._gather.names_and_shapes())
