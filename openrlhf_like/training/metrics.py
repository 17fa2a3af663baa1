"""Numbers that merge over micro-batches and workers: ("sum", total, weight) means and ("max", value) maxima."""

from __future__ import annotations

import math
from collections.abc import Iterable

Metric = tuple[float, float] | tuple[str, float]
Metrics = dict[str, Metric]


def add_metric(into: Metrics, name: str, total: float, weight: float) -> None:
    """Add ``total`` over ``weight`` (tokens, say) to the mean called ``name``."""
    old_total, old_weight = into.get(name, (0.0, 0.0))
    into[name] = (float(old_total) + float(total), float(old_weight) + float(weight))


def max_metric(into: Metrics, name: str, value: float) -> None:
    """Raise the maximum called ``name``."""
    old = into.get(name)
    into[name] = ("max", float(value) if old is None else _larger(float(old[1]), float(value)))


def _larger(a: float, b: float) -> float:
    """The builtin max loses a NaN, by its place; a NaN anywhere must show."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """Means (sum of totals / sum of weights) and maxima over all parts; a mean without weight is left out."""
    totals: dict[str, list[float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (first, second) in part.items():
            if first == "max":
                maxima[name] = _larger(maxima.get(name, -math.inf), float(second))
            else:
                entry = totals.setdefault(name, [0.0, 0.0])
                entry[0] += float(first)
                entry[1] += second
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return {**means, **maxima}
