"""Resumable checkpoints of a whole run: the workers' part and the driver's, complete or not there at all."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.pipeline.state import StateRegistry
from openrlhf_like.training import checkpoint as files
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

DRIVER_FILE = "driver.json"
HF_FOLDER = "hf"


class Checkpointer:
    """Saves ``<ckpt.path>/global_step<k>`` and finds the newest complete one.

    A checkpoint holds the workers' shards, ``driver.json`` with the registry's state, and with ``--ckpt.save_hf`` the
    model in Hugging Face form under ``hf/``. It is written under a temporary name and renamed at the end.
    """

    def __init__(self, cfg: Any, registry: StateRegistry) -> None:
        self.cfg, self.registry = cfg, registry
        self.path = Path(cfg.ckpt.path)
        self._resumed = self._saved = False

    def due(self, step: int) -> bool:
        """Whether ``--ckpt.save_steps`` asks for a checkpoint after this step."""
        every = self.cfg.ckpt.save_steps
        return every > 0 and step % every == 0 and (not self.cfg.ckpt.disable_ds or self.cfg.ckpt.save_hf)

    def save(self, step: int, group: WorkerGroup) -> Path:
        """Write the checkpoint of ``step``; delete what ``--ckpt.max_num`` and ``--ckpt.max_mem`` leave no room for.

        A new run's first one moves an earlier run's aside: the newest by number must be this run's.
        """
        tag = f"global_step{step}"
        if not self._saved:
            self._saved = True
            remove_leftovers(self.path)
            if not self._resumed:
                set_aside(self.path)
        folder = files.stage(self.path, tag)
        limit = {"timeout": self.cfg.timeout.collective, "flag": "timeout.collective"}
        if not self.cfg.ckpt.disable_ds:
            group.call("save_checkpoint", str(folder), what="save a checkpoint", **limit)
            (folder / DRIVER_FILE).write_text(json.dumps(self.registry.state_dict()))
        if self.cfg.ckpt.save_hf:
            group.call("export_hf", str(folder / HF_FOLDER), what="export the model", **limit)
        final = files.commit(self.path, tag)
        files.prune(self.path, self.cfg.ckpt.max_num, self.cfg.ckpt.max_mem)
        logger.info("checkpoint %s", final)
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint that can be resumed, or None."""
        found = [p for p in files.complete_checkpoints(self.path) if (p / DRIVER_FILE).is_file()]
        return found[-1] if found else None

    def find(self) -> Path | None:
        """With ``--ckpt.load_enable``: what to resume from; None (said in the log) when there is nothing yet."""
        if not self.cfg.ckpt.load_enable:
            return None
        newest = self.newest()
        if newest is None:
            logger.warning("--ckpt.load_enable: no complete checkpoint under %s; starting from the model", self.path)
        return newest

    def load_driver(self, folder: Path) -> None:
        """Restore the registry's state from a checkpoint."""
        try:
            state = json.loads((folder / DRIVER_FILE).read_text())
        except (OSError, json.JSONDecodeError) as error:
            why = f"{DRIVER_FILE} cannot be read ({error})"
            raise UserError(f"--ckpt.path {folder}: {why}; remove the folder") from error
        self.registry.load_state_dict(state)
        self._resumed = True

    def load_workers(self, folder: Path, group: WorkerGroup) -> None:
        """Restore every worker's state."""
        group.call(
            "load_checkpoint",
            str(folder),
            what="load the checkpoint",
            timeout=self.cfg.timeout.init,
            flag="timeout.init",
        )
        logger.info("resumed from %s", folder)


def remove_leftovers(path: str | Path) -> None:
    """Delete half-written checkpoints that an interrupted run left."""
    for folder in Path(path).glob(f"{files.STAGING_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(path: str | Path) -> Path | None:
    """Move the checkpoints of an earlier run to ``previous-<n>``: a later resume must not take them for this run's.

    Nothing is deleted. Returns the folder they went to, None when there was nothing to move.
    """
    found = files.complete_checkpoints(path)
    if not found:
        return None
    number = 1
    while (target := Path(path) / f"previous-{number}").exists():
        number += 1
    target.mkdir()
    for folder in found:
        folder.rename(target / folder.name)
    logger.warning("--ckpt.path: moved %d checkpoints of an earlier run to %s", len(found), target)
    return target
