"""Rewards from the user's Python file, run in child processes that can be killed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from openrlhf_like.reward.base import RewardFunction, RewardRequest, RewardResult
from openrlhf_like.reward.contract import parse_answer
from openrlhf_like.reward.isolated import ChildTask, IsolatedPool, Outcome
from openrlhf_like.types import UserError, WaitTimeout

logger = logging.getLogger(__name__)


class FunctionReward(RewardFunction):
    """``reward_func(queries, prompts, labels, **kwargs)`` of a Python file.

    ``score`` takes at most twice the limit: one limit for the batch, and one more to tell the bad samples from the
    good ones. A batch that fails is run again one sample a time; from the first call that passes its limit or kills its
    process on, each sample is given an equal share of the time left, so that a function that hangs on one sample costs
    that sample only. What the second limit does not reach counts as failed. A batch of one is not run again.

    Args:
        path: the file.
        limit_s: seconds a call (``--timeout.reward``).
        load_limit_s: seconds for the file's imports (``--timeout.init``), paid at the start and after each kill.
        num_processes: children; batches that come together run in as many at once (``--reward.num_workers``).
    """

    def __init__(
        self, path: str, *, limit_s: float = 60.0, load_limit_s: float = 1200.0, num_processes: int = 1
    ) -> None:
        self.path = str(Path(path).expanduser().resolve())
        self.limit_s = limit_s
        self._load_limit_s = load_limit_s
        if not Path(self.path).is_file():
            raise UserError(f"{self.flag} {path}: no such file; give a Python file or an http(s) URL")
        task = ChildTask("openrlhf_like.reward.function_child:load", (self.path,))
        self._pool = IsolatedPool(task, size=num_processes, load_limit_s=load_limit_s)

    @property
    def who(self) -> str:
        """The function's name in messages."""
        return f"{self.flag}: reward_func in {self.path}"

    async def check(self) -> None:
        """Import the file in every child.

        Raises:
            UserError: the import failed, or there is no callable ``reward_func``.
            WaitTimeout: the import did not end in time.
        """
        outcome = await self._pool.load()
        if outcome.status == "timeout":
            raise WaitTimeout(
                f"the reward stage waited {self._load_limit_s:g} s for the imports of {self.path} (--timeout.init)"
            )
        if not outcome.ok:
            printed = f"; it printed: {_tail(outcome.output)}" if outcome.output and outcome.status == "died" else ""
            raise UserError(f"{self.flag} {self.path}: {outcome.error}{printed}")

    async def score(self, request: RewardRequest) -> list[RewardResult]:
        if not len(request):
            return []
        outcome = await self._pool.call(_payload(request), self.limit_s)
        self._log_output(outcome)
        if outcome.ok:
            return parse_answer(outcome.value, len(request), self.who)
        error = self._explain(outcome)
        if len(request) == 1 or outcome.loading:
            return [RewardResult(error=error) for _ in range(len(request))]
        logger.warning("%s failed on %d samples, each is run alone now: %s", self.who, len(request), error)
        # Waiting for a free child and for imports is outside the limit: count from what the call itself took.
        deadline = time.monotonic() + 2 * self.limit_s - outcome.seconds
        return await self._one_by_one(request, deadline, shared=outcome.status != "raised")

    async def _one_by_one(self, request: RewardRequest, deadline: float, *, shared: bool) -> list[RewardResult]:
        """Every sample as a batch of its own; ``shared``: the time left is divided equally among those left."""
        waiting = deque(range(len(request)))
        results: list[RewardResult] = [RewardResult() for _ in waiting]
        lanes = min(self._pool.size, len(request))

        async def lane() -> None:
            nonlocal shared
            while waiting:
                left = deadline - time.monotonic()
                # Half of what is left, at first nearly a whole limit: a sample that hangs leaves time for the others.
                limit = left * (min(1.0, lanes / len(waiting)) if shared else 0.5)
                index = waiting.popleft()
                if left <= 0:
                    late = f"its batch failed, and no time was left to run it alone in {2 * self.limit_s:g} s"
                    results[index] = RewardResult(error=f"{late} (--timeout.reward)")
                    continue
                outcome = await self._pool.call(_payload(request.take([index])), limit, deadline)
                self._log_output(outcome)
                if outcome.ok:
                    results[index] = parse_answer(outcome.value, 1, self.who)[0]
                else:
                    results[index] = RewardResult(error=self._explain(outcome))
                    shared = shared or outcome.status != "raised"

        await asyncio.gather(*(lane() for _ in range(lanes)))
        return results

    def _explain(self, outcome: Outcome) -> str:
        flag = " (--timeout.reward)" if outcome.status in ("timeout", "unready") else ""
        return f"{outcome.error}{flag}"

    def _log_output(self, outcome: Outcome) -> None:
        if outcome.output.strip():
            logger.info("%s printed: %s", self.who, outcome.output.rstrip())

    def close(self) -> None:
        self._pool.close()


def _payload(request: RewardRequest) -> dict[str, Any]:
    """The arguments, and what functions that name it (or take ``**kwargs``) are given on top."""
    extra: dict[str, list[Any]] = {}
    for key in sorted({str(k) for record in request.metadata for k in record}):
        extra[key] = [record.get(key) for record in request.metadata]
    extra.setdefault("datasource", ["default"] * len(request))
    extra["responses"] = request.responses
    extra["metadata"] = request.metadata
    for reserved in ("queries", "prompts", "labels"):
        extra.pop(reserved, None)
    return {"queries": request.queries, "prompts": request.prompts, "labels": request.labels, "extra": extra}


def _tail(text: str) -> str:
    return " ".join(text.split())[-300:]
