"""What a user function or a reward server answered, turned into one result a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openrlhf_like.reward.base import RewardResult
from openrlhf_like.types import UserError


def parse_answer(answer: Any, n: int, who: str) -> list[RewardResult]:
    """Results for ``n`` samples from ``{"rewards", "scores", "extra_logs"}`` or a plain list of rewards.

    A value that is no finite number excludes its sample only. ``scores`` default to the rewards. An entry of
    ``extra_logs`` is a list with one value a sample, or one scalar for all; numbers become metrics, the rest logs.

    Args:
        answer: plain Python values (tensors and arrays already turned into lists).
        who: names the function or URL in messages.

    Raises:
        UserError: the answer has the wrong form or number of values, which is a bug in its maker, not bad luck.
    """
    scores: Any = None
    extra: Any = None
    if isinstance(answer, dict):
        if "rewards" not in answer:
            raise UserError(f'{who} returned a dict without "rewards" (its keys: {_keys(answer)}); add that key')
        rewards, scores, extra = answer["rewards"], answer.get("scores"), answer.get("extra_logs")
    else:
        rewards = answer
    rewards = _column(rewards, n, who, "rewards")
    scores = rewards if scores is None else _column(scores, n, who, "scores")
    results = [_result(r, s) for r, s in zip(rewards, scores, strict=True)]
    if extra:
        _add_logs(results, extra, who)
    return results


def number(value: Any) -> float | None:
    """``value`` as a finite float; None where it is not one. A list of one number counts as that number."""
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (int, float)):
        return None
    try:
        out = float(value)
    except OverflowError:
        return None
    return out if math.isfinite(out) else None


def _keys(mapping: dict[Any, Any]) -> str:
    return ", ".join(str(k) for k in mapping) or "none"


def _column(values: Any, n: int, who: str, name: str) -> Sequence[Any]:
    if isinstance(values, (int, float)) or values is None:
        if n == 1:
            return [values]
        raise UserError(f"{who} returned 1 value as {name} for {n} samples; return one a query, in their order")
    if not isinstance(values, (list, tuple)):
        raise UserError(f"{who} returned {name} of type {type(values).__name__}; return a list with one number a query")
    if len(values) != n:
        many = "1 value" if len(values) == 1 else f"{len(values)} values"
        samples = "1 sample" if n == 1 else f"{n} samples"
        raise UserError(f"{who} returned {many} as {name} for {samples}; return one a query, in their order")
    return values


def _result(reward: Any, score: Any) -> RewardResult:
    value = number(reward)
    if value is None:
        shown = " ".join(repr(reward).split())[:80]
        return RewardResult(error=f"reward is {shown}, not a finite number", excluded=True)
    return RewardResult(reward=value, score=number(score))


def _add_logs(results: list[RewardResult], extra: Any, who: str) -> None:
    if not isinstance(extra, dict):
        raise UserError(f"{who} returned extra_logs of type {type(extra).__name__}; return a dict of name to list")
    for name, values in extra.items():
        column = _column(values, len(results), who, f"extra_logs[{name!r}]") if _is_list(values) else None
        for i, result in enumerate(results):
            value = values if column is None else column[i]
            as_number = number(value)
            if as_number is not None:
                result.metrics[str(name)] = as_number
            else:
                result.logs[str(name)] = value


def _is_list(values: Any) -> bool:
    return isinstance(values, (list, tuple))
