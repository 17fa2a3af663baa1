"""Supervised fine-tuning on one worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_like.training.layouts import LayoutBatch, LayoutRow, build_layout
from openrlhf_like.training.metrics import Metrics, add_metric
from openrlhf_like.training.refs import resolve
from openrlhf_like.training.worker import TrainWorker
from openrlhf_like.types import UpdatePlan


def example_arrays(example: Any) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids int [T], loss_mask int [T]) of an SFT example (``data.sft.SFTExample``), or of a pair of them.

    ``loss_mask[t]`` is 1 where token t itself is to be learned (predicted from the tokens before it).
    """
    if hasattr(example, "input_ids"):
        ids, mask = example.input_ids, example.loss_mask
    else:
        ids, mask = example
    return np.asarray(ids), np.asarray(mask)


class SFTWorker(TrainWorker):
    """Trains on examples held in full by every worker; plans say who takes which."""

    role = "sft"

    def __init__(self, cfg: Any, rank: int, world_size: int, local_rank: int | None = None, role: str | None = None):
        super().__init__(cfg, rank, world_size, local_rank, role)
        self._data: dict[str, Sequence[Any]] = {}

    def set_data(self, examples: Any, split: str = "train") -> int:
        """Hold a split's examples (a list, or a reference to one). Returns their number."""
        self._data[split] = resolve(examples)
        return len(self._data[split])

    def _batch(self, rows: Sequence[int], split: str) -> LayoutBatch:
        made = []
        for row in rows:
            ids, mask = example_arrays(self._data[split][row])
            made.append(LayoutRow(ids, mask, row))
        return build_layout(made, packed=self.options.packing).to(self.device)

    def train_step(self, plan: UpdatePlan) -> Metrics:
        """One optimizer step: the token mean over the whole global batch. Takes the whole plan, does its own share."""
        start = time.perf_counter()
        metrics: Metrics = {}
        self.engine.train()
        rate = self.engine.lr
        padded = real = 0
        for rows in plan.micro_batches[self.rank]:
            batch = self._batch(rows, "train")
            logprobs, _ = self.engine.forward(**batch.model_inputs())
            # An empty share keeps its graph: this rank's collectives must match the others'.
            scale = 0.0 if batch.is_empty else 1.0 / max(plan.num_tokens, 1)
            loss = -logprobs.sum() * scale
            self.engine.backward(loss)
            if batch.is_empty:
                continue
            add_metric(metrics, "train/loss", float(-logprobs.detach().double().sum()), batch.num_actions)
            real += batch.real_tokens
            padded += batch.input_ids.numel()
        norm = self.engine.step()
        add_metric(metrics, "train/grad_norm", norm, 1)
        add_metric(metrics, "train/lr", rate, 1)
        add_metric(metrics, "batch/padding_fraction", padded - real, padded)
        add_metric(metrics, "batch/micro_batches", len(plan.micro_batches[self.rank]), 1)
        add_metric(metrics, "time/train", time.perf_counter() - start, 1)
        return metrics

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Sequence[int]], split: str = "eval") -> tuple[float, int]:
        """(sum of -log p, tokens) over this rank's micro-batches; all ranks bring equally many."""
        self.engine.eval()
        total, count = 0.0, 0
        for rows in micro_batches:
            batch = self._batch(rows, split)
            logprobs, _ = self.engine.forward(**batch.model_inputs())
            if not batch.is_empty:
                total += float(-logprobs.double().sum())
                count += batch.num_actions
        self.engine.train()
        return total, count
