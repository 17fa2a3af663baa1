"""The two consoles of a command, and how logging looks.

Progress and log lines go to stderr, tables to stdout, so that a pipe or a file gets the results alone.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from openrlhf_like.types import UserError

# Libraries whose INFO lines say nothing to the person who watches a training run.
NOISY_LOGGERS = (
    "DeepSpeed",
    "absl",
    "accelerate",
    "asyncio",
    "datasets",
    "filelock",
    "fsspec",
    "git",
    "httpcore",
    "httpx",
    "matplotlib",
    "numexpr",
    "ray",
    "tensorboard",
    "torch",
    "transformers",
    "urllib3",
    "vllm",
    "wandb",
)

_PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HANDLER_MARK = "openrlhf_like_console"


@functools.cache
def err_console() -> Console:
    """The console of log lines and progress (stderr)."""
    return Console(stderr=True)


@functools.cache
def out_console() -> Console:
    """The console of tables and results (stdout)."""
    return Console()


def table_console() -> Console:
    """Where a table goes while progress may be drawn.

    When stdout and stderr are both a terminal they are the same screen, and only the console that owns the live
    display can print above it; otherwise stdout gets the table.
    """
    out, err = out_console(), err_console()
    return err if out.is_terminal and err.is_terminal else out


def quiet_env() -> dict[str, str]:
    """Environment variables that quiet third-party libraries before they are imported, for worker processes too."""
    return {
        "DS_LOG_LEVEL": "warning",
        "RAY_DEDUP_LOGS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def setup_logging(level: int | str = "INFO", *, quiet_third_party: bool = True) -> None:
    """Send log records to stderr: rich lines on a terminal, plain lines elsewhere. Safe to call again.

    Args:
        level: level of the root logger, a ``logging`` constant or its name.
        quiet_third_party: raise the libraries of ``NOISY_LOGGERS`` to WARNING.

    Raises:
        UserError: ``level`` is not the name of a level.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if getattr(h, _HANDLER_MARK, False)]:
        root.removeHandler(handler)
    root.addHandler(_make_handler())
    root.setLevel(_level_number(level))
    logging.captureWarnings(True)
    if quiet_third_party:
        for name in NOISY_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)


def _level_number(level: int | str) -> int:
    if isinstance(level, int):
        return level
    names = logging.getLevelNamesMapping()
    if level.upper() not in names:
        raise UserError(f"log level {level!r} is unknown; use one of {', '.join(names)}")
    return names[level.upper()]


def _make_handler() -> logging.Handler:
    console = err_console()
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, rich_tracebacks=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(_PLAIN_FORMAT, datefmt="%H:%M:%S"))
    setattr(handler, _HANDLER_MARK, True)
    return handler


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the time of the record, so that a redirected stream is followed."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        """Ignored: the stream is looked up for each record."""
