"""Reward-model training."""

from __future__ import annotations

import sys

from openrlhf_like.cli.common import run_command


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_command("train_rm", None, argv)


if __name__ == "__main__":
    sys.exit(main())
