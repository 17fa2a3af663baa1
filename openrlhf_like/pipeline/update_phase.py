"""From credited rows to new weights: who gets which rows, the log-prob passes that are needed, the optimizer steps."""

from __future__ import annotations

import math
from typing import Any

from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.observe import RunProgress, Timer
from openrlhf_like.pipeline.credit import Credits
from openrlhf_like.pipeline.launch import limit
from openrlhf_like.pipeline.rollout_phase import Rollout
from openrlhf_like.training.batching import assign_rows, plan_forward, plan_updates, windows
from openrlhf_like.training.metrics import merge_metrics
from openrlhf_like.training.policy_options import needs_old_logprobs
from openrlhf_like.types import UpdatePlan


def updates_per_rollout(cfg: Any, num_rows: int | None = None) -> int:
    """Optimizer steps of one rollout: each epoch's last, smaller window is a step of its own."""
    rows = cfg.rollout.batch_size * cfg.rollout.n_samples_per_prompt if num_rows is None else num_rows
    return cfg.train.max_epochs * math.ceil(rows / cfg.train.batch_size)


def planned_updates(cfg: Any, num_prompts: int) -> int:
    """Optimizer steps of the whole run, which is the horizon of the learning rate: an episode's last rollout may be
    smaller. What failed rewards and filtering leave out is not known before; the run then ends above the lowest rate.
    """
    full, rest = divmod(num_prompts, cfg.rollout.batch_size)
    last = updates_per_rollout(cfg, rest * cfg.rollout.n_samples_per_prompt) if rest else 0
    return cfg.train.num_episodes * (full * updates_per_rollout(cfg) + last)


class UpdatePhase:
    """Trains the actor on one rollout."""

    def __init__(
        self, cfg: Any, actor: WorkerGroup, reference: WorkerGroup | None, progress: RunProgress, timer: Timer
    ) -> None:
        self.cfg, self.actor, self.reference = cfg, actor, reference
        self.progress, self.timer = progress, timer
        self.train_budget = cfg.train.max_tokens_per_gpu if cfg.train.dynamic_batch_enable else None
        forward_budget = cfg.rollout.max_tokens_per_gpu or cfg.train.max_tokens_per_gpu
        self.forward_budget = forward_budget if cfg.train.dynamic_batch_enable else None

    def run(self, rollout: Rollout, credits: Credits, kl_coef: float) -> dict[str, float]:
        """All optimizer steps of the rollout; the merged metrics of all workers."""
        lengths = [row.summary.num_tokens for row in credits.rows]
        order = list(range(len(credits.rows)))
        owner = assign_rows(lengths, len(self.actor), windows(order, self.cfg.train.batch_size))
        plans = self._plans(lengths, credits, order, owner)
        self._stage(self.actor, rollout, credits, owner)
        reference = self._reference_logprobs(rollout, credits, lengths)
        kl_in_reward = self.reference is not None and not self.cfg.algo.kl.use_loss
        if needs_old_logprobs(len(plans), kl_in_reward):
            self._old_logprobs(lengths, owner)
        parts = self._advantages(credits, owner, reference, kl_coef)
        parts += self._update(plans, kl_coef)
        metrics = merge_metrics(parts)
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    def _plans(self, lengths: list[int], credits: Credits, order: list[int], owner: Any) -> list[UpdatePlan]:
        actions = [row.summary.num_actions for row in credits.rows]
        epoch = plan_updates(
            lengths,
            actions,
            self.cfg.train.batch_size,
            len(self.actor),
            self.cfg.train.micro_batch_size,
            self.train_budget,
            order=order,
            packed=self.cfg.ds.packing_samples,
            row_worker=owner,
        )
        return epoch * self.cfg.train.max_epochs

    def _stage(self, group: WorkerGroup, rollout: Rollout, credits: Credits, owner: Any) -> None:
        """Tell each worker which rows are its own; the tokens travel from the engines' node to it, past the driver."""
        shares = []
        for rank in range(len(group)):
            mine = {k: (row.block, row.index) for k, row in enumerate(credits.rows) if int(owner[k]) == rank}
            needed = {block for block, _ in mine.values()}
            shares.append(([ref if b in needed else None for b, ref in enumerate(rollout.blocks)], mine))
        group.call_each("stage", shares, what="take its rows", **limit(self.cfg, "collective"))

    def _forward_plan(self, lengths: list[int], owner: Any, workers: int) -> list[list[list[int]]]:
        return plan_forward(
            lengths, owner, workers, self.cfg.rollout.micro_batch_size, self.forward_budget, self.cfg.ds.packing_samples
        )

    def _reference_logprobs(self, rollout: Rollout, credits: Credits, lengths: list[int]) -> list[Any] | None:
        """References to the reference model's log-probs, or None without one."""
        if self.reference is None:
            return None
        with self.timer("ref"), self.progress.phase("reference log-probs"):
            owner = assign_rows(lengths, len(self.reference), [])
            self._stage(self.reference, rollout, credits, owner)
            plan = self._forward_plan(lengths, owner, len(self.reference))
            # Two results a worker: the log-probs stay in the object store, the driver waits for their number.
            results = [
                handle.reference_logprobs.options(num_returns=2).remote(micro_batches)
                for handle, micro_batches in zip(self.reference.handles, plan, strict=True)
            ]
            counts = [count for _, count in results]
            self.reference.wait(counts, "compute reference log-probs", **limit(self.cfg, "collective"))
            return [values for values, _ in results]

    def _old_logprobs(self, lengths: list[int], owner: Any) -> None:
        with self.timer("old_logprobs"), self.progress.phase("old log-probs"):
            plan = self._forward_plan(lengths, owner, len(self.actor))
            self.actor.call_each(
                "old_logprobs", [(p,) for p in plan], what="compute old log-probs", **limit(self.cfg, "collective")
            )

    def _advantages(
        self, credits: Credits, owner: Any, reference: list[Any] | None, kl_coef: float
    ) -> list[Any]:
        shares = []
        for rank in range(len(self.actor)):
            credit = {k: c for k, c in enumerate(credits.credit) if int(owner[k]) == rank}
            shares.append((credit, kl_coef, reference))
        return self.actor.call_each(
            "prepare_advantages", shares, what="compute advantages", **limit(self.cfg, "collective")
        )

    def _update(self, plans: list[UpdatePlan], kl_coef: float) -> list[Any]:
        parts: list[Any] = []
        with self.timer("train"), self.progress.phase("update", len(plans)) as bar:
            for plan in plans:
                parts += self.actor.call(
                    "update", plan, kl_coef, what="train an update", **limit(self.cfg, "collective")
                )
                bar.advance()
        return parts
