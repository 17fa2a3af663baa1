"""``--reward.verifier math``: 1 where the response's final answer equals the label mathematically, else 0."""

from __future__ import annotations

import asyncio
import importlib.util

from openrlhf_like.reward.base import RewardFunction, RewardRequest, RewardResult
from openrlhf_like.reward.isolated import ChildTask, IsolatedPool
from openrlhf_like.types import UserError, WaitTimeout


class MathReward(RewardFunction):
    """math-verify in a pool of processes: boxed answers first, then LaTeX, then the last number of the response.

    An expression that cannot be compared within ``item_limit_s`` (its process is killed) has not been shown right: it
    scores 0, with the metric ``verifier_killed`` at 1, so that a policy gains nothing from writing such expressions. A
    label without an answer in it is the data's fault: that sample is marked failed.

    Args:
        item_limit_s: seconds a sample.
        load_limit_s: seconds for math-verify's imports (``--timeout.init``).
        num_processes: samples compared at the same time (``--reward.num_workers``).
    """

    flag = "--reward.verifier"

    def __init__(self, *, item_limit_s: float = 5.0, load_limit_s: float = 1200.0, num_processes: int = 1) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"{self.flag} math: the package math-verify is missing; pip install 'openrlhf_like[math]'"
            )
        self.item_limit_s = item_limit_s
        self._load_limit_s = load_limit_s
        task = ChildTask("openrlhf_like.reward.math_child:load")
        self._pool = IsolatedPool(task, size=num_processes, load_limit_s=load_limit_s)

    async def check(self) -> None:
        outcome = await self._pool.load()
        if outcome.status == "timeout":
            raise WaitTimeout(
                f"the reward stage waited {self._load_limit_s:g} s for math-verify's imports (--timeout.init)"
            )
        if not outcome.ok:
            raise UserError(f"{self.flag} math: math-verify does not load: {outcome.error}")

    async def score(self, request: RewardRequest) -> list[RewardResult]:
        pairs = zip(request.responses, request.labels, strict=True)
        return list(await asyncio.gather(*(self._one(response, label) for response, label in pairs)))

    async def _one(self, response: str, label: object) -> RewardResult:
        outcome = await self._pool.call((response, label), self.item_limit_s)
        if outcome.ok:
            status, reward = outcome.value
            if status != "ok":
                shown = " ".join(repr(label).split())[:80]
                return RewardResult(error=f"no mathematical answer in the label {shown}")
            return RewardResult(reward=reward, score=reward, metrics={"verifier_killed": 0.0})
        if outcome.loading:
            return RewardResult(error=f"math-verify did not start again: {outcome.error}")
        metrics = {"verifier_killed": float(outcome.status in ("timeout", "died"))}
        return RewardResult(reward=0.0, score=0.0, metrics=metrics, logs={"verifier": outcome.error})

    def close(self) -> None:
        self._pool.close()
