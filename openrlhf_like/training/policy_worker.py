"""The policy (and the reference) on one worker: log-probs, advantages, updates, weights out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_like.algorithms import (
    ADVANTAGE_ESTIMATORS,
    kl_per_token,
    token_advantages,
    whiten,
    whiten_moments,
    whiten_stats,
)
from openrlhf_like.training.layouts import LayoutBatch, LayoutRow, build_layout
from openrlhf_like.training.metrics import Metrics, add_metric
from openrlhf_like.training.options import EngineOptions
from openrlhf_like.training.policy_loss import PolicyBatch, add_engine_diff, add_kl, policy_loss
from openrlhf_like.training.policy_options import PolicyOptions, policy_options
from openrlhf_like.training.refs import resolve
from openrlhf_like.training.rollout_rows import RolloutRow
from openrlhf_like.training.worker import TrainWorker
from openrlhf_like.types import Trajectory, UpdatePlan


class RolloutWorker(TrainWorker):
    """Holds its share of a rollout and computes log-probs of it."""

    role = "ref"

    def __init__(self, cfg: Any, rank: int, world_size: int, local_rank: int | None = None, role: str | None = None):
        super().__init__(cfg, rank, world_size, local_rank, role)
        self._rows: dict[int, RolloutRow] = {}

    def stage(self, blocks: Sequence[Any], rows: Mapping[int, tuple[int, int]]) -> int:
        """Take this rank's rows of a rollout; the previous rollout is dropped.

        Args:
            blocks: lists of trajectories, or references to them; a block that no row names may be None.
            rows: global row id -> (block, index in it), this rank's rows only.

        Returns:
            Action tokens held.
        """
        held: list[Any] = [None] * len(blocks)
        for block in {b for b, _ in rows.values()}:
            held[block] = resolve(blocks[block])
        self._rows = {int(row): RolloutRow.of(held[b][i]) for row, (b, i) in rows.items()}
        return sum(r.num_actions for r in self._rows.values())

    def stage_trajectories(self, trajectories: Mapping[int, Trajectory]) -> int:
        """Take rows given as themselves: global row id -> trajectory."""
        self._rows = {int(row): RolloutRow.of(t) for row, t in trajectories.items()}
        return sum(r.num_actions for r in self._rows.values())

    def _batch(self, rows: Sequence[int]) -> LayoutBatch:
        made = [piece for row in rows for piece in self._rows[row].layout_rows(row)]
        return build_layout(made, packed=self.options.packing).to(self.device)

    @torch.no_grad()
    def compute_logprobs(self, micro_batches: Sequence[Sequence[int]], which: str = "old") -> dict[int, np.ndarray]:
        """log pi of every action token of the rows, under this worker's weights as they are.

        Args:
            micro_batches: row ids; every rank brings equally many micro-batches (empty ones where needed).
            which: "old" keeps them on the rows as log pi_old; "ref" only returns them.

        Returns:
            row id -> float32 [A], actions of all segments in order.
        """
        self.engine.eval()
        out: dict[int, np.ndarray] = {}
        for rows in micro_batches:
            batch = self._batch(rows)
            logprobs, _ = self.engine.forward(**batch.model_inputs())
            if batch.is_empty:
                out.update({row: np.zeros(0, np.float32) for row in rows})
                continue
            flat, owner = logprobs.float().cpu().numpy(), batch.row_index.cpu().numpy()
            out.update({row: flat[owner == i] for i, row in enumerate(batch.rows)})
        if which == "old":
            for row, values in out.items():
                self._rows[row].old = values
        return out

    @torch.no_grad()
    def probe_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """log p of each token but the first given those before it, temperature 1; all ranks take part."""
        self.engine.eval()
        ids = np.asarray(token_ids)
        batch = build_layout([LayoutRow(ids, np.ones(len(ids), np.int8), 0)]).to(self.device)
        logprobs, _ = self.engine.forward(**batch.model_inputs())
        return logprobs.float().cpu().numpy()


class ReferenceWorker(RolloutWorker):
    """A frozen model: no optimizer, no gradients, no dropout."""

    def load(self, model_path: str, total_steps: int = 1, trainable: bool = False) -> dict[str, Any]:
        """Load for inference, whatever ``trainable`` says."""
        return super().load(model_path, total_steps, trainable=False)


class PolicyWorker(RolloutWorker):
    """The policy under training."""

    role = "actor"

    def __init__(self, cfg: Any, rank: int, world_size: int, local_rank: int | None = None, role: str | None = None):
        super().__init__(cfg, rank, world_size, local_rank, role)
        self.policy = PolicyOptions() if isinstance(cfg, EngineOptions) else policy_options(cfg)
        self._sender: Any = None

    # -- advantages ---------------------------------------------------------------------------------------------

    def prepare_advantages(
        self,
        credit: Mapping[int, float | Sequence[float]],
        kl_coef: float = 0.0,
        ref_logprobs: Any = None,
    ) -> Metrics:
        """Per-token advantages of the staged rows, whitened over all workers where the estimator asks for it.

        Args:
            credit: row id -> credit of the trajectory, or one value a turn. Rows without one (dropped groups) get
                advantage 0.
            kl_coef: beta; enters the reward unless the KL is a term of the loss.
            ref_logprobs: list of row id -> float32 [A] mappings (or references to them) that cover this rank's rows.
        """
        start = time.perf_counter()
        metrics: Metrics = {}
        if ref_logprobs is not None:
            for part in resolve(ref_logprobs):
                for row in self._rows.keys() & part.keys():
                    self._rows[row].ref = part[row]
        spec = ADVANTAGE_ESTIMATORS.get(self.policy.estimator)
        in_reward = 0.0 if self.policy.kl_in_loss else kl_coef
        gamma = spec.effective_gamma(self.policy.gamma)
        flat = {row: self._token_advantages(row, credit.get(row, 0.0), in_reward, gamma) for row in self._rows}
        if spec.whitened:
            flat = self._whiten(flat)
        for row, values in flat.items():
            self._rows[row].advantages = values.numpy().astype(np.float32)
            add_metric(metrics, "advantage/mean", float(values.sum()), len(values))
            add_metric(metrics, "advantage/abs_mean", float(values.abs().sum()), len(values))
            self._old_metrics(self._rows[row], metrics)
        add_metric(metrics, "time/advantages", time.perf_counter() - start, 1)
        return metrics

    def _token_advantages(
        self, row: int, credit: float | Sequence[float], kl_coef: float, gamma: float
    ) -> torch.Tensor:
        r = self._rows[row]
        mask = torch.ones(r.num_actions)
        kl = None
        if kl_coef:
            if r.old is None or r.ref is None:
                raise RuntimeError(f"row {row}: a KL in the reward needs log pi_old and log pi_ref first")
            kl = kl_per_token(self.policy.kl_estimator, torch.from_numpy(r.old), torch.from_numpy(r.ref), mask)
        per_token = torch.from_numpy(r.credit_per_token(credit))
        return token_advantages(per_token, kl, mask, kl_coef=kl_coef, gamma=gamma)

    def _whiten(self, flat: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Mean and variance over the action tokens of all workers, in float64, in two passes."""
        from openrlhf_like.training.strategy import sum_over_workers

        everything = torch.cat(list(flat.values())) if flat else torch.zeros(0, dtype=torch.float64)
        mask = torch.ones_like(everything)

        def moments(center: float) -> tuple[float, float]:
            stats = whiten_stats(everything, mask, center).to(self.device)
            return whiten_moments(sum_over_workers(stats).cpu(), center)

        mean, var = moments(moments(0.0)[0])
        divide = not self.policy.no_std_norm
        return {row: whiten(v, torch.ones_like(v), mean, var, divide) for row, v in flat.items()}

    def _old_metrics(self, row: RolloutRow, metrics: Metrics) -> None:
        if row.old is None:
            return
        old = torch.from_numpy(row.old)
        add_engine_diff(metrics, old, torch.from_numpy(row.behavior), self.policy)
        if row.ref is not None:
            add_kl(metrics, old, torch.from_numpy(row.ref))

    def rows_advantages(self) -> dict[int, list[np.ndarray]]:
        """row id -> one float32 [T] a segment, aligned with its token_ids, 0 outside the action tokens."""
        return {row: r.per_segment(r.advantages) for row, r in self._rows.items()}

    # -- updates ------------------------------------------------------------------------------------------------

    def update(self, plan: UpdatePlan, kl_coef: float = 0.0) -> Metrics:
        """One optimizer step. Takes the whole plan, does its own share.

        Rows without log pi_old are taken to be on-policy: the step's own log-probs are the old ones.
        """
        start = time.perf_counter()
        metrics: Metrics = {}
        self.engine.train()
        rate = self.engine.lr
        want_entropy = self.policy.entropy_coef is not None
        padded = real = 0
        for rows in plan.micro_batches[self.rank]:
            batch = self._batch(rows)
            logprobs, entropies = self.engine.forward(**batch.model_inputs(), entropy=want_entropy)
            if batch.is_empty:
                # Nothing to learn, but this rank's collectives must match the others'.
                self.engine.backward(logprobs.sum() * 0.0)
                continue
            inputs = self._policy_batch(batch)
            if not self.policy.entropy_coef:
                entropies = entropies.detach()
            loss = policy_loss(
                logprobs, entropies, inputs, self.policy, plan.num_tokens, plan.num_sequences, kl_coef, metrics,
                self.world_size,
            )  # fmt: skip
            self.engine.backward(loss)
            real += batch.real_tokens
            padded += batch.input_ids.numel()
        # The loss of the step is the sum of its shares: counted once a worker, whatever the micro-batching.
        add_metric(metrics, "policy/loss", 0.0, 1.0)
        norm = self.engine.step()
        add_metric(metrics, "policy/grad_norm", norm, 1)
        add_metric(metrics, "policy/lr", rate, 1)
        add_metric(metrics, "batch/padding_fraction", padded - real, padded)
        add_metric(metrics, "batch/micro_batches", len(plan.micro_batches[self.rank]), 1)
        add_metric(metrics, "time/update", time.perf_counter() - start, 1)
        return metrics

    def _policy_batch(self, batch: LayoutBatch) -> PolicyBatch:
        rows = [self._rows[row] for row in batch.rows]
        if any(r.advantages is None for r in rows):
            raise RuntimeError("update before prepare_advantages")

        def flat(values: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(values)).to(self.device)

        has_old = all(r.old is not None for r in rows)
        has_ref = all(r.ref is not None for r in rows)
        lengths = torch.tensor([r.num_actions for r in rows], device=self.device)
        return PolicyBatch(
            advantages=flat([r.advantages for r in rows]),  # type: ignore[misc]
            behavior=flat([r.behavior for r in rows]),
            old=flat([r.old for r in rows]) if has_old else None,  # type: ignore[misc]
            ref=flat([r.ref for r in rows]) if has_ref else None,  # type: ignore[misc]
            seq_index=batch.row_index,
            seq_lengths=lengths[batch.row_index],
        )

    # -- weights out --------------------------------------------------------------------------------------------

    def attach_sender(self, factory: Callable[..., Any]) -> Any:
        """Build this rank's half of the weight transfer: ``factory(gather, rank, world_size)``."""
        self._sender = factory(self.gather(), self.rank, self.world_size)
        return None

    def send_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Send the current weights; all ranks take part. Arguments and answer are the sender's ``send``'s."""
        if self._sender is None:
            raise RuntimeError("send_weights before attach_sender")
        return self._sender.send(*args, **kwargs)
