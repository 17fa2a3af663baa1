"""Where the numbers of a step go: metrics.jsonl, trackers, the terminal, and the health checks."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

from openrlhf_like.config import to_dict, to_yaml
from openrlhf_like.observe import (
    HealthMonitor,
    MetricsWriter,
    RunProgress,
    StepTable,
    Trackers,
    mask_secrets,
    prepare_run_dir,
)
from openrlhf_like.pipeline.state import StateRegistry

logger = logging.getLogger(__name__)


class Recorder:
    """One call a step: everything that was measured at it, merged into one record.

    Args:
        cfg: resolved configuration.
        registry: gets the state of metrics and trackers.
        resuming: keep what the interrupted run wrote; otherwise an earlier run's records are moved aside.
    """

    def __init__(self, cfg: Any, registry: StateRegistry, resuming: bool) -> None:
        self.cfg = cfg
        self.run_dir = prepare_run_dir(cfg.ckpt.output_dir, to_yaml(cfg), resume=resuming)
        self.metrics = MetricsWriter(self.run_dir)
        self.trackers = Trackers.from_config(cfg.logger, self.run_dir)
        self.health = HealthMonitor()
        registry.register("metrics", self.metrics)
        registry.register("trackers", self.trackers)
        self.progress: RunProgress
        self.table: StepTable

    def start(self, total_steps: int, done_steps: int, description: str) -> None:
        """Open trackers, so that a wrong key shows before anything heavy starts. Then used as a context manager."""
        self.trackers.start(mask_secrets(to_dict(self.cfg)))
        self.progress = RunProgress(total_steps, done_steps=done_steps, description=description)
        self.table = StepTable(total_steps)

    def __enter__(self) -> Recorder:
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        self.metrics.close()
        self.trackers.close()

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a step. The terminal and the trackers see every ``--logger.logging_steps``-th, and evaluations."""
        record = self.metrics.log(step, metrics)
        self.health.check(step, record)
        evaluated = any(name.startswith("eval/") for name in record)
        if evaluated or step % max(1, self.cfg.logger.logging_steps) == 0:
            self.trackers.log(step, record)
            self.table.show(step, record)
