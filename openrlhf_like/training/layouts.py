"""How sequences are laid out in a forward pass.

A layout turns a micro-batch of sequences into one [B, T] input and says, for every action token, which position
predicts it and which row it belongs to. Losses see flat [A] tensors and never learn which layout ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LayoutRow:
    """One unbroken sequence.

    Attributes:
        token_ids: int [T].
        action_mask: int [T], 1 where a log-prob is wanted. Position 0 has nothing that predicts it and is ignored.
        temperature: float [T] or None (all 1).
        row: the caller's index of the trajectory this sequence is part of.
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    row: int
    temperature: np.ndarray | None = None


@dataclass
class LayoutBatch:
    """One forward pass.

    Attributes:
        input_ids, position_ids: int64 [B, T].
        source_index: int64 [A], position in the flattened [B*T] that predicts the action token.
        target_ids: int64 [A].
        temperature: float32 [A].
        row_index: int64 [A], position of the token's trajectory in ``rows``.
        rows: the distinct trajectory indices, in the order first given.
        real_tokens: tokens that are not padding.
        is_empty: nothing to train on: a placeholder that keeps this rank in step with the others.
    """

    input_ids: Tensor
    position_ids: Tensor
    source_index: Tensor
    target_ids: Tensor
    temperature: Tensor
    row_index: Tensor
    rows: list[int]
    real_tokens: int
    is_empty: bool = False

    @property
    def num_actions(self) -> int:
        """A, the action tokens of the batch (0 for a placeholder)."""
        return 0 if self.is_empty else int(self.target_ids.numel())

    @property
    def padding_tokens(self) -> int:
        """Positions of the input that hold no token of any sequence."""
        return int(self.input_ids.numel()) - self.real_tokens

    def model_inputs(self) -> dict[str, Tensor]:
        """Keyword arguments of ``PolicyModel.forward``."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "source_index": self.source_index,
            "target_ids": self.target_ids,
            "temperature": self.temperature,
        }

    def to(self, device: torch.device) -> LayoutBatch:
        """The same batch with its tensors on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def action_positions(action_mask: np.ndarray) -> np.ndarray:
    """Positions of the action tokens that something predicts: where the mask is set, position 0 excepted."""
    positions = np.flatnonzero(action_mask)
    return positions[positions > 0]


def build_layout(rows: Sequence[LayoutRow], packed: bool = False, pad_id: int = 0) -> LayoutBatch:
    """Lay out one micro-batch, padded on the right to [B, longest] or packed into one row [1, sum of lengths].

    An action token at position t is predicted by t - 1. Action tokens come in the order of ``rows``, by position.
    No rows at all give a placeholder of one action token, marked ``is_empty``.
    """
    if not rows or not any(len(action_positions(r.action_mask)) for r in rows):
        return _placeholder(rows)
    lengths = [len(r.token_ids) for r in rows]
    if packed:
        shape, offsets = (1, sum(lengths)), np.concatenate([[0], np.cumsum(lengths)[:-1]])
    else:
        shape, offsets = (len(rows), max(lengths)), np.arange(len(rows)) * max(lengths)
    ids = np.full(shape[0] * shape[1], pad_id, dtype=np.int64)
    # Padding goes on counting, so that no position restarts within a padded row.
    position = np.tile(np.arange(shape[1], dtype=np.int64), shape[0])
    source, target, temperature, owner = [], [], [], []
    order: dict[int, int] = {}
    for r, offset, length in zip(rows, offsets, lengths, strict=True):
        ids[offset : offset + length] = r.token_ids
        position[offset : offset + length] = np.arange(length)
        actions = action_positions(r.action_mask)
        source.append(offset + actions - 1)
        target.append(np.asarray(r.token_ids)[actions])
        temps = np.ones(length, dtype=np.float32) if r.temperature is None else r.temperature
        temperature.append(np.asarray(temps)[actions])
        owner.append(np.full(len(actions), order.setdefault(r.row, len(order))))
    return LayoutBatch(
        input_ids=torch.from_numpy(ids.reshape(shape)),
        position_ids=torch.from_numpy(position.reshape(shape)),
        source_index=torch.from_numpy(np.concatenate(source).astype(np.int64)),
        target_ids=torch.from_numpy(np.concatenate(target).astype(np.int64)),
        temperature=torch.from_numpy(np.concatenate(temperature).astype(np.float32)),
        row_index=torch.from_numpy(np.concatenate(owner).astype(np.int64)),
        rows=list(order),
        real_tokens=sum(lengths),
    )


def _placeholder(rows: Sequence[LayoutRow]) -> LayoutBatch:
    return LayoutBatch(
        input_ids=torch.zeros((1, 2), dtype=torch.int64),
        position_ids=torch.arange(2).unsqueeze(0),
        source_index=torch.zeros(1, dtype=torch.int64),
        target_ids=torch.zeros(1, dtype=torch.int64),
        temperature=torch.ones(1),
        row_index=torch.zeros(1, dtype=torch.int64),
        rows=[],
        real_tokens=sum(len(r.token_ids) for r in rows),
        is_empty=True,
    )
