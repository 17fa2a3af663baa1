"""Full weights out of the training engine, one at a time, in the names of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from openrlhf_like.models.loading import unique_parameters
from openrlhf_like.training.strategy import TrainEngine


class WeightGather:
    """Names, shapes and full tensors of a model under any ZeRO stage.

    Every rank must run :meth:`iter_full` to its end, in step with the others: under ZeRO-3 each parameter is
    gathered by a collective. Tied weights come once. Where transformers loads a checkpoint under other names or fuses
    its tensors, they are mapped back to the checkpoint's form.
    """

    def __init__(self, engine: TrainEngine):
        self._engine = engine
        self._model: Any = engine.module.model
        self._params = list(unique_parameters(self._model))

    def names_and_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(checkpoint name, dtype, full shape) in the order of :meth:`iter_full`; no communication."""
        out: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        for name, param in self._params:
            meta = torch.empty(tuple(getattr(param, "ds_shape", param.shape)), dtype=param.dtype, device="meta")
            out.extend((n, t.dtype, tuple(t.shape)) for n, t in self._checkpoint_form(name, meta))
        return out

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, full tensor) on every rank. A tensor is valid until the next one is asked for."""
        for name, param in self._params:
            with self._whole([param]):
                yield from self._checkpoint_form(name, param.detach())

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Every full weight on the CPU, under the model's own names, on rank 0; None on the others (all take part)."""
        keep = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        state: dict[str, Tensor] = {}
        by_id: dict[int, Tensor] = {}
        for name, param in self._params:
            with self._whole([param]):
                if keep:
                    by_id[id(param)] = param.detach().to("cpu", copy=True)
                    state[name] = by_id[id(param)]
        if not keep:
            return None
        # Tied names share one tensor: transformers recognises and drops the duplicates when it saves.
        for name, param in self._model.named_parameters(remove_duplicate=False):
            state.setdefault(name, by_id[id(param)])
        persistent = set(self._model.state_dict().keys())
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                state[name] = buffer.detach().to("cpu", copy=True)
        return state

    def _whole(self, params: list[nn.Parameter]) -> AbstractContextManager:
        return self._engine.full_parameters(params)

    def _checkpoint_form(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if not getattr(self._model, "_weight_conversions", None):
            return [(name, tensor)]
        return list(revert_weight_conversion(self._model, {name: tensor}).items())
