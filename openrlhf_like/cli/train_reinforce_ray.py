"""Policy training with REINFORCE++: train_ppo_ray with a preset."""

from __future__ import annotations

import sys

from openrlhf_like.cli.common import run_command


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run_command("train_reinforce_ray", "openrlhf_like.pipeline.rl:run_rl", argv)


if __name__ == "__main__":
    sys.exit(main())
