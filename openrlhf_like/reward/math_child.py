"""Runs in the child process: compares a response's final answer with the label by math-verify.

math-verify's own limits use ``signal.alarm``, which does not interrupt C code and works on the main thread only; they
are off, and the parent kills the child instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_MEMORY_BYTES = 4 << 30


def load() -> Callable[[tuple[str, Any]], tuple[str, float]]:
    """The handler: (response, label) to ("ok", 1 or 0), or ("bad label", 0) where the label holds no answer."""
    _limit_memory()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if judge(("so \\boxed{\\frac{1}{2}}", "0.5")) != ("ok", 1.0):  # also pays the parser's slow first use
        raise RuntimeError("math-verify does not find 1/2 equal to 0.5; is its latex2sympy2_extended intact?")
    return judge


def _limit_memory() -> None:
    """9^9^9 asks for gigabytes before it asks for hours."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def judge(pair: tuple[str, Any]) -> tuple[str, float]:
    """Compare one response with its label; a list of labels holds alternatives."""
    from math_verify import parse, verify

    response, label = pair
    labels = label if isinstance(label, (list, tuple)) else [label]
    golds = [g for g in (_parse_gold(x) for x in labels) if g]
    if not golds:
        return "bad label", 0.0
    answer = parse(final_part(response), parsing_timeout=None)
    return "ok", float(any(verify(g, answer, timeout_seconds=None) for g in golds))


def final_part(response: str) -> str:
    """What follows the reasoning, where the response closes it with ``</think>``."""
    return response.rpartition("</think>")[2]


def _parse_gold(label: Any) -> list[Any]:
    """A bare number, LaTeX with or without dollars or a box, or a solution that ends in GSM8K's ``#### answer``."""
    from math_verify import parse

    text = "" if label is None else str(label).rpartition("####")[2].strip()
    if not text:
        return []
    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    return (not marked and parse(f"\\boxed{{{text}}}", parsing_timeout=None)) or parse(text, parsing_timeout=None)
