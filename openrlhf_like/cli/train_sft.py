"""Supervised fine-tuning."""

from __future__ import annotations

import sys

from openrlhf_like.cli.common import run_command


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_command("train_sft", "openrlhf_like.pipeline.sft:run_sft", argv)


if __name__ == "__main__":
    sys.exit(main())
