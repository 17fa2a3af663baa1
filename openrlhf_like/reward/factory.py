"""From the configuration to the source of rewards and the stage around it."""

from __future__ import annotations

from typing import Any

from openrlhf_like.reward.base import RewardFunction
from openrlhf_like.reward.stage import RewardStage
from openrlhf_like.types import UserError

#: A verifier's limit a sample is its own; ``--timeout.reward`` can only lower it.
_MATH_ITEM_LIMIT_S = 5.0


def make_reward(cfg: Any, num_processes: int | None = None) -> RewardFunction:
    """The source that ``reward.remote_url`` (a Python file, or http(s) URLs) or ``reward.verifier`` names.

    ``num_processes``: children of this one source; ``reward.num_workers`` where it is not given.

    Raises:
        UserError: none or both are given, the file or the package is missing, or a URL is malformed.
    """
    remote, verifier = cfg.reward.remote_url, cfg.reward.verifier
    targets = remote if isinstance(remote, (list, tuple)) else str(remote or "").split(",")
    targets = [t.strip() for t in targets if t.strip()]
    if targets and verifier:
        raise UserError(f"--reward.verifier {verifier}: --reward.remote_url is given too; leave one of them out")
    limits = {"load_limit_s": cfg.timeout.init, "num_processes": num_processes or cfg.reward.num_workers}
    if verifier == "math":
        from openrlhf_like.reward.math_verifier import MathReward

        return MathReward(item_limit_s=min(_MATH_ITEM_LIMIT_S, cfg.timeout.reward), **limits)
    if verifier:
        raise UserError(f"--reward.verifier {verifier}: unknown; the only one is math")
    if not targets:
        raise UserError("--reward.remote_url: no reward is given; name a Python file or URL, or use --reward.verifier")
    if targets[0].startswith(("http://", "https://")):
        from openrlhf_like.reward.http import HttpReward

        return HttpReward(targets, limit_s=cfg.timeout.reward, retries=cfg.reward.http_retries)
    from openrlhf_like.reward.function import FunctionReward

    path = remote if isinstance(remote, str) else ",".join(targets)  # a file's name may hold a comma
    return FunctionReward(path, limit_s=cfg.timeout.reward, **limits)


def make_stage(cfg: Any, num_processes: int | None = None) -> RewardStage:
    """The stage with its limits from ``reward.batch_size`` and ``reward.max_failure_fraction``."""
    return RewardStage(
        make_reward(cfg, num_processes),
        batch_size=cfg.reward.batch_size,
        max_failure_fraction=cfg.reward.max_failure_fraction,
    )
