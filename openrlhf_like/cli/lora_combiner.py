"""Merge a LoRA adapter into its model."""

from __future__ import annotations

import sys

from openrlhf_like.cli.common import run_command


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_command("lora_combiner", None, argv)


if __name__ == "__main__":
    sys.exit(main())
