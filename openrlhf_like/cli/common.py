"""What every command does around its pipeline function: options, logging, exit codes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from openrlhf_like.config import CommonConfig, parse_args, to_yaml, validate
from openrlhf_like.types import UserError

logger = logging.getLogger("openrlhf_like")

EXIT_USER_ERROR = 2
EXIT_SIGINT = 130


def run_command(command: str, target: str | None, argv: list[str] | None = None) -> int:
    """Parse, validate and run one command.

    Args:
        command: its name, as in ``COMMANDS``.
        target: ``module:function`` called with the resolved configuration, imported only when everything is in
            order; None for a command that is not built yet.
        argv: words after the program's name; default ``sys.argv[1:]``.

    Returns:
        The exit code: 0 done, 1 the run cannot go on, 2 the user's input is wrong (one line on stderr), 130 Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        cfg = parse_args(command, argv)
        if cfg.print_config:
            return _print(to_yaml(cfg))
        warnings = validate(cfg)
    except UserError as error:
        return _fail(f"error: {error}", EXIT_USER_ERROR)
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except SystemExit as error:
        # --help ends with 0.
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if target is None:
        return _fail(f"error: {command}: this command is not built yet", EXIT_USER_ERROR)
    return _run(target, cfg, warnings)


def _run(target: str, cfg: CommonConfig, warnings: list[str]) -> int:
    """Logging and signal handling around the pipeline function; what is heavy is imported only from here on."""
    from openrlhf_like.cluster.signals import run_command as guarded
    from openrlhf_like.observe.console import quiet_env, setup_logging

    for name, value in quiet_env().items():
        os.environ.setdefault(name, value)
    setup_logging()
    for warning in warnings:
        logger.warning(warning)
    # Errors with a meaning become one line and a code; Ctrl-C ends with 130, SIGTERM with 143.
    return guarded(lambda: _load(target)(cfg))


def _load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def _print(text: str) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # `--print_config | head` closed the pipe; Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(line: str, code: int) -> int:
    sys.stderr.write(" ".join(line.split()) + "\n")
    sys.stderr.flush()
    return code
