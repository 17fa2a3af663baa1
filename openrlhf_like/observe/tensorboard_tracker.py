"""TensorBoard: the metric names of metrics.jsonl as scalars."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf_like.types import UserError


class TensorBoardTracker:
    """Writes scalars to ``<tensorboard_dir>/<run_name>``.

    A resumed run writes to the directory it began in, and hides what the killed run had written beyond the resume
    step (TensorBoard's own purge mark), so that each step appears once.
    """

    name = "tensorboard"

    def __init__(self, tensorboard_dir: str, run_name: str) -> None:
        """Checks that the packages are there; writes nothing yet.

        Raises:
            UserError: ``tensorboard`` or ``torch`` is not installed.
        """
        for package in ("tensorboard", "torch"):
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"--logger.tensorboard_dir {tensorboard_dir!r} needs the package {package}; "
                    f"pip install {package}, or leave the flag out"
                )
        self.log_dir = str(Path(tensorboard_dir) / run_name)
        self._purge_step: int | None = None
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file. Raises UserError where the directory cannot be written."""
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(self.log_dir, purge_step=self._purge_step)
        except OSError as error:
            raise UserError(
                f"--logger.tensorboard_dir: {self.log_dir!r} is not writable ({error.strerror}); give another directory"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar a metric, flushed: a killed run loses nothing of the steps it finished."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """The directory of the run."""
        return {"log_dir": self.log_dir}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on in the run's directory after ``step``. Call before ``start``."""
        self.log_dir = state["log_dir"]
        self._purge_step = step + 1
