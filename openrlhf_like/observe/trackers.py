"""W&B and TensorBoard behind one object: one record a step, and a failing tracker never ends a training run."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from openrlhf_like.observe.metrics import to_json_scalar
from openrlhf_like.observe.tensorboard_tracker import TensorBoardTracker
from openrlhf_like.observe.wandb_tracker import WandbTracker

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """What a tracker offers. ``start`` raises UserError for a wrong setting; ``log`` may fail, see Trackers."""

    name: str

    def start(self, config: Mapping[str, Any]) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None: ...


CLOSE_SECONDS = 60


class Trackers:
    """All trackers of a run.

    Call order: construct (packages are checked), ``load_state_dict`` when resuming, ``start``, then ``log`` once a
    step with the merged record (rollout, training and evaluation together), ``close``.
    """

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self.failures: dict[str, int] = {tracker.name: 0 for tracker in trackers}
        self._last_step = -1
        self._started = False

    @classmethod
    def from_config(cls, logger_config: Any, run_dir: str | Path) -> Trackers:
        """The trackers that the configuration asks for.

        W&B is on with ``--logger.wandb.key`` or ``--logger.wandb.mode online|offline``; ``WANDB_API_KEY`` alone does
        not turn it on. TensorBoard is on with ``--logger.tensorboard_dir``.

        Args:
            logger_config: ``cfg.logger``, with ``wandb.{key,org,group,project,run_name,mode}`` and ``tensorboard_dir``.
            run_dir: W&B keeps its files in ``run/wandb``.

        Raises:
            UserError: a tracker's package is not installed.
        """
        trackers: list[Tracker] = []
        wandb_config = logger_config.wandb
        mode = wandb_config.mode
        if mode != "disabled" and (wandb_config.key or mode):
            trackers.append(
                WandbTracker(
                    directory=str(run_dir),
                    project=wandb_config.project,
                    key=wandb_config.key,
                    org=wandb_config.org,
                    group=wandb_config.group,
                    run_name=wandb_config.run_name,
                    mode=mode,
                )
            )
        if logger_config.tensorboard_dir:
            run_name = wandb_config.run_name or "run"
            trackers.append(TensorBoardTracker(os.path.expanduser(logger_config.tensorboard_dir), run_name))
        return cls(trackers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Start every tracker; ``config`` is the resolved configuration as a tree (masked again where it is stored).

        Raises:
            UserError: a setting is wrong. At the start this ends the command, before a model is loaded.
        """
        for tracker in self._trackers:
            tracker.start(config)
        self._started = True

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send one merged record. Values that are no finite number (None, text) are not sent.

        Raises:
            RuntimeError: called before ``start``.
        """
        if not self._started:
            raise RuntimeError("Trackers.log before Trackers.start")
        plain = {name: to_json_scalar(value) for name, value in metrics.items() if name != "step"}
        numbers = {name: float(value) for name, value in plain.items() if isinstance(value, bool | int | float)}
        for tracker in self._trackers:
            try:
                tracker.log(step, numbers)
            # A tracker is somebody else's client and server: it may raise anything, and no plot is worth a training
            # run. This is the one place that catches it; the failure is counted and said once.
            except Exception as error:
                self._failed(tracker, error)
        self._last_step = max(self._last_step, step)

    def close(self) -> None:
        """Close every tracker; a failure is counted like one of ``log``.

        Closing may upload, to a server that no longer answers: each has ``CLOSE_SECONDS``, then the command ends.
        """
        for tracker in self._trackers:
            thread = threading.Thread(target=self._close_one, args=(tracker,), daemon=True)
            thread.start()
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                logger.warning("%s did not finish its upload in %d s; its files are kept", tracker.name, CLOSE_SECONDS)

    def _close_one(self, tracker: Tracker) -> None:
        try:
            tracker.close()
        # Same reason as in ``log``.
        except Exception as error:
            self._failed(tracker, error)

    def state_dict(self) -> dict[str, Any]:
        """Each tracker's run identity, and the last step logged."""
        return {"step": self._last_step, "trackers": {t.name: t.state_dict() for t in self._trackers}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same runs. Before ``start``; a tracker that is new in this command starts a run of its own.

        Raises:
            RuntimeError: called after ``start``.
        """
        if self._started:
            raise RuntimeError("Trackers.load_state_dict after Trackers.start")
        self._last_step = state["step"]
        for tracker in self._trackers:
            if tracker.name in state["trackers"]:
                tracker.load_state_dict(state["trackers"][tracker.name], state["step"])

    def _failed(self, tracker: Tracker, error: Exception) -> None:
        self.failures[tracker.name] += 1
        if self.failures[tracker.name] == 1:
            logger.warning(
                "%s failed (%s: %s); training goes on, further failures are only counted",
                tracker.name,
                type(error).__name__,
                error,
            )
