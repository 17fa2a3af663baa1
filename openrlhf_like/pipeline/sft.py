"""Supervised fine-tuning: records in, a model out."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.cluster.session import check_demand, ray_session
from openrlhf_like.data.load import fingerprint, load_records
from openrlhf_like.data.sampler import ResumableSampler, num_batches
from openrlhf_like.data.sft import SFTExample, SFTOptions, build_sft_examples
from openrlhf_like.data.templates import check_vocab, load_tokenizer, model_vocab_size
from openrlhf_like.pipeline.checkpointer import Checkpointer
from openrlhf_like.pipeline.launch import join_workers, limit, start_workers
from openrlhf_like.pipeline.recorder import Recorder
from openrlhf_like.pipeline.state import Counters, StateRegistry
from openrlhf_like.training.batching import assign_rows, plan_forward, plan_updates
from openrlhf_like.training.metrics import merge_metrics
from openrlhf_like.training.sft_worker import SFTWorker

logger = logging.getLogger(__name__)


def run_sft(cfg: Any) -> None:
    """Train ``cfg.model.model_name_or_path`` on ``cfg.data.dataset`` and export it to ``cfg.ckpt.output_dir``.

    Data is read and checked before Ray starts, so that a bad record costs seconds.
    """
    check_demand(cfg)
    tokenizer = _load_tokenizer(cfg)
    train, print_ = _examples(cfg, tokenizer, cfg.data.dataset, cfg.data.dataset_split, cfg.data.dataset_probs, "data")
    held_out = _examples(cfg, tokenizer, cfg.eval.dataset, cfg.eval.split, None, "eval")[0] if cfg.eval.dataset else []

    registry = StateRegistry()
    sampler = ResumableSampler(
        len(train), cfg.train.batch_size, cfg.train.seed, epochs=cfg.train.max_epochs, fingerprint=print_
    )
    counters = Counters(step=0)
    registry.register("sampler", sampler)
    registry.register("counters", counters)
    total_steps = num_batches(len(train), cfg.train.batch_size, cfg.train.max_epochs)

    checkpointer = Checkpointer(cfg, registry)
    resume_from = checkpointer.find()
    recorder = Recorder(cfg, registry, resuming=resume_from is not None)
    if resume_from is not None:
        checkpointer.load_driver(resume_from)
        recorder.metrics.resume(int(counters["step"]))

    recorder.start(total_steps, int(counters["step"]), "SFT")
    with recorder, ray_session(cfg) as session:
        group = start_workers(session, cfg, "actor", SFTWorker)
        join_workers(cfg, group)
        group.call("load", cfg.model.model_name_or_path, total_steps, what="load the model", **limit(cfg, "init"))
        for split, examples in (("train", train), ("eval", held_out)):
            if examples:
                group.call("set_data", ray.put(examples), split, what="take the data", **limit(cfg, "init"))
        if resume_from is not None:
            checkpointer.load_workers(resume_from, group)
        trainer = SFTLoop(cfg, group, train, held_out, sampler, counters)
        trainer.run(recorder, checkpointer)
        group.call("export_hf", cfg.ckpt.output_dir, what="export the model", **limit(cfg, "collective"))
    logger.info("model written to %s", cfg.ckpt.output_dir)


class SFTLoop:
    """The loop over optimizer steps."""

    def __init__(
        self,
        cfg: Any,
        group: WorkerGroup,
        train: list[SFTExample],
        held_out: list[SFTExample],
        sampler: ResumableSampler,
        counters: Counters,
    ) -> None:
        self.cfg, self.group, self.sampler, self.counters = cfg, group, sampler, counters
        self.lengths = [len(e) for e in train]
        self.labels = [e.num_labels for e in train]
        self.held_out_lengths = [len(e) for e in held_out]
        self.max_tokens = cfg.train.max_tokens_per_gpu if cfg.train.dynamic_batch_enable else None
        self.steps_per_epoch = num_batches(len(train), cfg.train.batch_size)

    def run(self, recorder: Recorder, checkpointer: Checkpointer) -> None:
        """Train to the end of the last epoch."""
        if self.cfg.eval.before_train and self.counters["step"] == 0 and self.held_out_lengths:
            recorder.log(0, self.evaluate())
        recorder.progress.clock.restart()
        for rows in self.sampler:
            start = time.perf_counter()
            step = int(self.counters["step"]) + 1
            metrics = self.train_step(rows)
            metrics["train/epoch"] = step / self.steps_per_epoch
            seconds = time.perf_counter() - start
            metrics["time/step"] = seconds
            metrics["throughput/tokens_per_second"] = sum(self.lengths[r] for r in rows) / seconds
            self.counters["step"] = step
            if self._evaluation_due(step):
                metrics.update(self.evaluate())
            recorder.log(step, metrics)
            recorder.progress.step_done()
            if checkpointer.due(step):
                checkpointer.save(step, self.group)

    def train_step(self, rows: list[int]) -> dict[str, float]:
        """One optimizer step on these rows."""
        (plan,) = plan_updates(
            self.lengths,
            self.labels,
            len(rows),
            len(self.group),
            self.cfg.train.micro_batch_size,
            self.max_tokens,
            order=rows,
            packed=self.cfg.ds.packing_samples,
        )
        parts = self.group.call("train_step", plan, what="train a step", **limit(self.cfg, "collective"))
        return {**merge_metrics(parts), "train/tokens": plan.num_tokens}

    def evaluate(self) -> dict[str, float]:
        """Loss per label token over the held-out data."""
        start = time.perf_counter()
        lengths, workers = self.held_out_lengths, len(self.group)
        owner = assign_rows(lengths, workers, [])
        plan = plan_forward(
            lengths, owner, workers, self.cfg.train.micro_batch_size, self.max_tokens, self.cfg.ds.packing_samples
        )
        parts = self.group.call_each(
            "evaluate", [(p,) for p in plan], what="evaluate", **limit(self.cfg, "collective")
        )
        total, tokens = (sum(column) for column in zip(*parts, strict=True))
        return {"eval/loss": total / max(tokens, 1), "eval/tokens": tokens, "time/eval": time.perf_counter() - start}

    def _evaluation_due(self, step: int) -> bool:
        """``--eval.steps``; -1 evaluates at the end of each epoch, as OpenRLHF does."""
        if not self.held_out_lengths:
            return False
        every = self.cfg.eval.steps
        return step % (every if every > 0 else self.steps_per_epoch) == 0


def _load_tokenizer(cfg: Any) -> Any:
    path = cfg.model.model_name_or_path
    tokenizer = load_tokenizer(
        path, use_fast=not cfg.data.disable_fast_tokenizer, chat_template=cfg.data.tokenizer_chat_template
    )
    check_vocab(model_vocab_size(path), tokenizer, path)
    return tokenizer


def _examples(
    cfg: Any, tokenizer: Any, spec: str, split: str, probs: str | None, group: str
) -> tuple[list[SFTExample], str]:
    records = load_records(spec, split, probs, cfg.data.max_samples, cfg.train.seed, flag=f"--{group}.dataset")
    examples, stats = build_sft_examples(records, tokenizer, SFTOptions.from_config(cfg))
    logger.info("--%s.dataset: %d examples of %d records", group, len(examples), stats.total)
    return examples, fingerprint(records)

