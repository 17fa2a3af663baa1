"""Policy training: prompts -> rollout -> reward -> advantages -> update -> weights to the engines -> next."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from openrlhf_like.algorithms.kl import KLController, make_kl_controller
from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.cluster.host import RemoteActor, Slot, start_actor
from openrlhf_like.cluster.session import RaySession, check_demand, ray_session
from openrlhf_like.cluster.signals import raise_if_received
from openrlhf_like.cluster.wait import wait_for
from openrlhf_like.config import uses_reference
from openrlhf_like.observe import Timer, throughput
from openrlhf_like.pipeline.actors import ActorWorker, RefWorker, RolloutEngine
from openrlhf_like.pipeline.checkpointer import Checkpointer
from openrlhf_like.pipeline.credit import Credits, assign_credit
from openrlhf_like.pipeline.evaluate import Evaluator
from openrlhf_like.pipeline.launch import join_workers, limit, start_actors, start_workers, wait_built
from openrlhf_like.pipeline.prompts import PromptFeed, load_prompts
from openrlhf_like.pipeline.recorder import Recorder
from openrlhf_like.pipeline.rollout_phase import RetryCount, Rollout, RolloutPhase, check_rewards, close_rewards
from openrlhf_like.pipeline.state import Counters, StateRegistry
from openrlhf_like.pipeline.update_phase import UpdatePhase, planned_updates
from openrlhf_like.pipeline.weights import WeightSync
from openrlhf_like.pipeline.writer import RolloutWriter
from openrlhf_like.reward.reward_actor import RewardActor
from openrlhf_like.rollout.dispatch import RolloutDispatcher
from openrlhf_like.types import Prompt, TrainingAborted

logger = logging.getLogger(__name__)


def run_rl(cfg: Any) -> None:
    """Train ``cfg.actor.model_name_or_path`` on ``cfg.data.prompt_dataset``; export it to ``cfg.ckpt.output_dir``.

    Prompts are read and checked before Ray starts, so that a bad record costs seconds.
    """
    check_demand(cfg)
    feed, evaluation = load_prompts(cfg)
    total_steps = len(feed.sampler)
    registry = StateRegistry()
    counters = Counters(step=0, empty_steps=0, evaluated_step=-1)
    controller = make_kl_controller(cfg.algo.kl.init_coef, cfg.algo.kl.target, cfg.algo.kl.horizon)
    for name, owner in (("prompts", feed), ("counters", counters), ("kl", controller)):
        registry.register(name, owner)
    checkpointer = Checkpointer(cfg, registry)
    resume_from = checkpointer.find()
    recorder = Recorder(cfg, registry, resuming=resume_from is not None)
    if resume_from is not None:
        checkpointer.load_driver(resume_from)
        recorder.metrics.resume(int(counters["step"]))
    recorder.start(total_steps, int(counters["step"]), cfg.preset or cfg.command)
    # Ray ends first, then the recorder: a tracker's upload must not keep processes alive.
    with recorder, ray_session(cfg) as session:
        roles = start_roles(cfg, session, str(recorder.run_dir), planned_updates(cfg, len(feed.prompts)))
        if resume_from is not None:
            checkpointer.load_workers(resume_from, roles.actor)
            roles.writer.call("discard_after", int(counters["step"]), **limit(cfg, "init"))
        try:
            PolicyLoop(cfg, roles, feed, evaluation, recorder, counters, controller, checkpointer).run()
        finally:
            close_rewards(cfg, roles.rewards)
        roles.actor.call("export_hf", cfg.ckpt.output_dir, what="export the model", **limit(cfg, "collective"))
        roles.writer.call("close", what="write the last rollouts", **limit(cfg, "collective"))
    logger.info("model written to %s", cfg.ckpt.output_dir)


@dataclass
class Roles:
    """The processes of a run."""

    actor: WorkerGroup
    reference: WorkerGroup | None
    engines: list[RemoteActor]
    rewards: list[RemoteActor]
    writer: RemoteActor


def start_roles(cfg: Any, session: RaySession, run_dir: str, horizon: int) -> Roles:
    """Start every process, then load everything at the same time: engines warm up while workers read weights.

    ``horizon`` is the number of optimizer steps that the learning rate is planned for.
    """
    model = cfg.actor.model_name_or_path
    engine_count = len(session.placement.slots("engine"))
    reward_count = len(session.placement.slots("reward"))
    engines = start_actors(
        session,
        "engine",
        RolloutEngine,
        [(cfg, model, i) for i in range(engine_count)],
        env=session.threads(engine_count),
    )
    rewards = start_actors(session, "reward", RewardActor, [(cfg, 1)] * reward_count)
    actor = start_workers(session, cfg, "actor", ActorWorker)
    reference = start_workers(session, cfg, "ref", RefWorker) if uses_reference(cfg) else None
    writer = start_actor(RolloutWriter, "rollout writer", Slot(num_cpus=0), run_dir, cfg.logger.rollouts_every)
    wait_built(cfg, [*engines, *rewards, writer])
    started = [engine.submit("start") for engine in engines]
    check_rewards(cfg, rewards)
    labels = [engine.label for engine in engines]
    if cfg.device == "cuda" and cfg.train.colocate_all:
        # An engine measures what is free on its GPU while it starts: workers load after it, not beside it.
        wait_for(started, "start and warm up", names=labels, **limit(cfg, "init"))
    groups = [actor] if reference is None else [actor, reference]
    loading = []
    for group in groups:
        join_workers(cfg, group)
        loading.append((group, group.call_async("load", model, horizon, group is actor)))
    for group, refs in loading:
        group.wait(refs, "load the model", **limit(cfg, "init"))
    wait_for(started, "start and warm up", names=labels, **limit(cfg, "init"))
    return Roles(actor, reference, engines, rewards, writer)


class PolicyLoop:
    """The loop over rollouts; a step is one rollout with all its updates."""

    def __init__(
        self,
        cfg: Any,
        roles: Roles,
        feed: PromptFeed,
        evaluation: list[Prompt],
        recorder: Recorder,
        counters: Counters,
        controller: KLController,
        checkpointer: Checkpointer,
    ) -> None:
        self.cfg, self.roles, self.feed, self.recorder = cfg, roles, feed, recorder
        self.counters, self.controller, self.checkpointer = counters, controller, checkpointer
        self.timer = Timer()
        dispatcher = RolloutDispatcher([engine.handle for engine in roles.engines], cfg, on_poll=raise_if_received)
        self.rollouts = RolloutPhase(cfg, dispatcher, roles.rewards, recorder.progress, self.timer)
        self.updates = UpdatePhase(cfg, roles.actor, roles.reference, recorder.progress, self.timer)
        self.evaluator = Evaluator(cfg, self.rollouts, evaluation, self.timer)
        self.weights = WeightSync(cfg, roles.actor, roles.engines, feed.prompts[0].token_ids, self.timer)
        self.retries = RetryCount(cfg, roles.rewards)
        self._writing: Any = None

    def run(self) -> None:
        """Train until the prompts of the last episode are used up.

        Raises:
            TrainingAborted: they were used up, or a limit of empty rounds passed, before anything was trained on.
        """
        step = int(self.counters["step"])
        self.weights.connect()
        self.weights.send(step)
        self.timer.pop()
        if step == 0 and self.cfg.eval.before_train and self.evaluator.prompts:
            self.recorder.log(0, self._evaluate(0))
        self.recorder.progress.clock.restart()
        while True:
            start = time.perf_counter()
            rollout = self.rollouts.collect(step + 1, self.feed)
            if rollout is None:
                break
            step += 1
            metrics = self.train_step(step, rollout)
            metrics["time/step"] = time.perf_counter() - start
            self._finish_step(step, metrics, last=not self.feed.has_more())
        self._wait_for_writer()
        if step == 0:
            raise TrainingAborted(f"no step was trained before the prompts ended; {self.rollouts.filter.message()}")
        if self.evaluator.due(step, last=True) and self.counters["evaluated_step"] != step:
            # Dynamic filtering found nothing in the last prompts, so that an earlier step was the last one.
            self.recorder.log(step, self._evaluate(step))

    def _evaluate(self, step: int) -> dict[str, float]:
        """``eval/*`` and ``time/eval``; what was timed before it belongs to no step."""
        self.timer.pop()
        metrics = self.evaluator.run(step)
        self.counters["evaluated_step"] = step
        return {**metrics, "time/eval": self.timer.pop()["time/eval"]}

    def train_step(self, step: int, rollout: Rollout) -> dict[str, float]:
        """Credit, update, weights out. A rollout without one usable group changes nothing and is counted."""
        credits = assign_credit(self.cfg, rollout)
        metrics = dict(credits.metrics)
        if credits.rows:
            self.counters["empty_steps"] = 0
            metrics.update(self.updates.run(rollout, credits, self.controller.value))
            if "policy/kl_ref" in metrics:
                metrics["policy/kl_coef"] = self.controller.value
                self._update_kl_coef(step, metrics["policy/kl_ref"], len(credits.rows))
            self._write(step, rollout, credits)
            self.weights.send(step)
        else:
            self._write(step, rollout, credits)
            self._skip(step, metrics)
        metrics["train/tokens"] = sum(row.summary.num_tokens for row in credits.rows)
        metrics["train/samples"] = len(credits.rows)
        metrics["reward/retries"] = self.retries.since_last()
        return metrics

    def _update_kl_coef(self, step: int, kl: float, trajectories: int) -> None:
        if not math.isfinite(kl):
            raise TrainingAborted(
                f"step {step}: policy/kl_ref is {kl}: the policy has left the reference for good; "
                "lower --actor.adam.lr or raise --algo.kl.init_coef"
            )
        self.controller.update(kl, trajectories)

    def _finish_step(self, step: int, metrics: dict[str, float], last: bool) -> None:
        self.counters["step"] = step
        metrics.update(
            throughput(
                tokens=metrics["train/tokens"], samples=metrics["train/samples"], seconds=metrics["time/step"]
            )
        )
        metrics.update(self.timer.pop())
        if self.evaluator.due(step, last):
            metrics.update(self._evaluate(step))
        self.recorder.log(step, metrics)
        self.recorder.progress.step_done()
        if self.checkpointer.due(step):
            self._wait_for_writer()
            self.roles.writer.call("flush", what="write the rollouts so far", **limit(self.cfg, "collective"))
            self.checkpointer.save(step, self.roles.actor)

    def _skip(self, step: int, metrics: dict[str, float]) -> None:
        self.counters["empty_steps"] += 1
        most = self.cfg.algo.dynamic_filtering_max_rounds
        reason = (
            f"{metrics['reward/dropped_groups']:g} groups have fewer valid rewards than the estimator "
            f"{self.cfg.algo.advantage.estimator} needs (failed samples: {metrics['reward/failed_fraction']:.0%})"
        )
        if self.counters["empty_steps"] >= most:
            raise TrainingAborted(f"{most} steps in a row had nothing to train on: {reason}; see run/rollouts")
        logger.warning("step %d trains nothing: %s", step, reason)

    def _write(self, step: int, rollout: Rollout, credits: Credits) -> None:
        """Hand the step's trajectories to the writer; the previous step's must be queued by then."""
        every = self.cfg.logger.rollouts_every
        if every < 1 or step % every:
            return
        self._wait_for_writer()
        rows = {k: (row.block, row.index) for k, row in enumerate(credits.rows)}
        # Without rows the workers still hold the previous rollout's.
        advantages = self.roles.actor.call_async("rows_advantages") if rows else []
        self._writing = self.roles.writer.submit("write", step, rollout.blocks, rows, advantages)

    def _wait_for_writer(self) -> None:
        if self._writing is not None:
            wait_for(self._writing, "write a rollout", names=["the rollout writer"], **limit(self.cfg, "collective"))
            self._writing = None
