"""The run directory: ``<ckpt.output_dir>/run`` with the resolved configuration in it."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
METRICS_NAME = "metrics.jsonl"
ROLLOUTS_NAME = "rollouts"


def prepare_run_dir(output_dir: str | Path, config_yaml: str, *, resume: bool = True) -> Path:
    """Create ``<output_dir>/run`` and write ``config.yaml`` into it.

    Args:
        output_dir: value of ``--ckpt.output_dir``.
        config_yaml: the resolved configuration, secrets already masked.
        resume: False moves the metrics and rollouts of an earlier run aside, see :func:`set_aside_previous`.

    Returns:
        The run directory.

    Raises:
        UserError: the directory cannot be created or written.
    """
    run_dir = Path(output_dir) / "run"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not resume:
            set_aside_previous(run_dir)
        write_text_atomic(run_dir / CONFIG_NAME, config_yaml)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"--ckpt.output_dir {str(output_dir)!r} is not writable ({reason}); give a directory you can write to"
        ) from error
    return run_dir


def set_aside_previous(run_dir: str | Path, names: tuple[str, ...] = (METRICS_NAME, ROLLOUTS_NAME)) -> Path | None:
    """Move what an earlier run left into ``run/previous-<n>``, so that two runs never share a file.

    Nothing is deleted. Returns the folder it went to, None when there was nothing to move.
    """
    run_dir = Path(run_dir)
    found = [run_dir / name for name in names if (run_dir / name).exists()]
    if not found:
        return None
    number = 1
    while (run_dir / f"previous-{number}").exists():
        number += 1
    target = run_dir / f"previous-{number}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    logger.info("moved %s of an earlier run to %s", ", ".join(p.name for p in found), target)
    return target


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a crash at any moment, sees the whole old file or the whole new one.

    The bytes reach the disk before the name does. Raises OSError.
    """
    handle, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise
