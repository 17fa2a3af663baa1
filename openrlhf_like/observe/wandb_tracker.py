"""Weights & Biases, online or offline, without ever storing the key."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Any

from openrlhf_like.observe.secrets import mask_secrets
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)


class WandbTracker:
    """One W&B run.

    Steps: W&B drops whatever is logged for a step below its own counter, which is what happens to the metrics of a
    resumed run, and to an evaluation logged late. So its counter is left alone: every call carries ``step`` as a
    value of its own, declared as the x axis of all metrics.

    Secrets: the key goes to the client as a setting of this process. ``wandb.login`` is not used (it writes the key
    to ``~/.netrc``), and W&B's own metadata is turned off, because it records the command line, key included.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        directory: str,
        project: str,
        key: str | None = None,
        org: str | None = None,
        group: str | None = None,
        run_name: str | None = None,
        mode: str | None = None,
    ) -> None:
        """Checks that the package is there; starts nothing yet.

        Args:
            directory: W&B makes its ``wandb/`` folder in here.
            key: None, or "True" as OpenRLHF's scripts write it, reads ``WANDB_API_KEY``, or what ``wandb login``
                has stored before.
            mode: "online", "offline" or "disabled"; None reads ``WANDB_MODE``, else online.

        Raises:
            UserError: ``wandb`` is not installed.
        """
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "--logger.wandb.* needs the package wandb; pip install wandb, or leave the --logger.wandb flags out"
            )
        self.run_id: str | None = None
        given = None if key is None or key.lower() == "true" else key
        self._key = given or os.environ.get("WANDB_API_KEY") or None
        self._mode = mode
        self._init_args: dict[str, Any] = {
            "dir": directory,
            "project": project,
            "entity": org,
            "group": group,
            "name": run_name,
        }
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Start the run, or go on with the one whose id was loaded. ``config`` is logged with its secrets masked.

        Where the server cannot be reached the run goes on offline, with a warning: ``wandb sync`` uploads it later.

        Raises:
            UserError: the key is missing or refused, or a setting is wrong.
        """
        import wandb

        masked = mask_secrets(config, (self._key,) if self._key else ())
        mode = self._mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online" and self._key is None and not self._has_stored_login():
            raise UserError(
                "--logger.wandb.mode 'online' has no key; set --logger.wandb.key or WANDB_API_KEY, "
                "or use --logger.wandb.mode offline"
            )
        try:
            self._run = self._init(masked, mode)
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise UserError(
                f"--logger.wandb: W&B refused to start ({self._safe(error)}); "
                "check --logger.wandb.key, or use --logger.wandb.mode offline"
            ) from None
        except wandb.errors.CommError as error:
            logger.warning("W&B cannot be reached (%s): going on offline, run `wandb sync` later", self._safe(error))
            self._run = self._init(masked, "offline")
        self.run_id = self._run.id
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One history row with everything of the step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the run: waits for its upload, and until its file is whole on disk."""
        import wandb

        if self._run is not None:
            self._run.finish()
            self._run = None
            # finish returns before an offline run's last rows are in its file; ending the client's service waits.
            wandb.teardown()

    def state_dict(self) -> dict[str, Any]:
        """The run id."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on with the same W&B run. Call before ``start``."""
        self.run_id = state["run_id"]

    def _init(self, config: Mapping[str, Any], mode: str) -> Any:
        import wandb

        settings = wandb.Settings(
            api_key=self._key,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_meta=True,
        )
        arguments = {**self._init_args, "id": self.run_id, "resume": "allow" if self.run_id else None, "mode": mode}
        return wandb.init(**arguments, config=dict(config), settings=settings)

    @staticmethod
    def _has_stored_login() -> bool:
        import wandb

        return wandb.api.api_key is not None

    def _safe(self, error: Exception) -> str:
        """The error's first line without the key."""
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return first.replace(self._key, "***") if self._key else first
