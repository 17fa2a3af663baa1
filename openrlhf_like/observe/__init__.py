"""Metrics, trackers, progress, the rollout store, reports.

Light to import: torch, wandb, tensorboard and matplotlib are imported only where they are used.
"""

from openrlhf_like.observe.console import err_console, out_console, quiet_env, setup_logging, table_console
from openrlhf_like.observe.metrics import (
    MetricsWriter,
    read_records,
    series,
)
from openrlhf_like.observe.progress import RunProgress
from openrlhf_like.observe.report import plot_reward_curve, results_table
from openrlhf_like.observe.rollout_store import RolloutStore, read_rollouts
from openrlhf_like.observe.run_dir import prepare_run_dir, set_aside_previous
from openrlhf_like.observe.secrets import mask_secrets, mask_text
from openrlhf_like.observe.step_table import StepTable
from openrlhf_like.observe.timers import Timer, throughput
from openrlhf_like.observe.trackers import Trackers
from openrlhf_like.observe.warnings import HealthLimits, HealthMonitor

__all__ = [
    "HealthLimits",
    "HealthMonitor",
    "MetricsWriter",
    "RolloutStore",
    "RunProgress",
    "StepTable",
    "Timer",
    "Trackers",
    "err_console",
    "mask_secrets",
    "mask_text",
    "out_console",
    "plot_reward_curve",
    "prepare_run_dir",
    "quiet_env",
    "read_records",
    "read_rollouts",
    "results_table",
    "series",
    "set_aside_previous",
    "setup_logging",
    "table_console",
    "throughput",
]
