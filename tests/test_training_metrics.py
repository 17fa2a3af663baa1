"""Metrics of micro-batches and workers become one value each."""

from __future__ import annotations

import math
import pickle

import pytest

from openrlhf_like.training.metrics import Metrics, add_metric, max_metric, merge_metrics


def part(**means: tuple[float, float]) -> Metrics:
    out: Metrics = {}
    for name, (total, weight) in means.items():
        add_metric(out, name, total, weight)
    return out


def test_workers_with_uneven_counts_are_weighed_by_count() -> None:
    # 3 tokens of mean 1 and 1 token of mean 5: the mean over tokens is 2, the mean of means would be 3.
    assert merge_metrics([part(loss=(3.0, 3)), part(loss=(5.0, 1))]) == {"loss": 2.0}


def test_the_order_of_workers_and_the_way_through_a_process_change_nothing() -> None:
    parts = [part(a=(float(k), k + 1)) for k in range(8)]
    assert merge_metrics(parts[::-1]) == pytest.approx(merge_metrics(pickle.loads(pickle.dumps(parts))), rel=1e-14)


def test_an_empty_mean_has_no_value_and_is_left_out() -> None:
    assert merge_metrics([part(a=(0.0, 0)), part(a=(0.0, 0), b=(1.0, 1))]) == {"b": 1.0}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_maximum_shows_wherever_it_stands(values: tuple[float, float]) -> None:
    one: Metrics = {}
    for value in values:
        max_metric(one, "m", value)
    assert math.isnan(merge_metrics([one])["m"])
    assert math.isnan(merge_metrics([{"m": ("max", v)} for v in values])["m"])


def test_a_diverged_mean_shows() -> None:
    assert merge_metrics([part(a=(math.inf, 1)), part(a=(1.0, 1))]) == {"a": math.inf}
    assert math.isnan(merge_metrics([part(a=(math.nan, 1)), part(a=(1.0, 1))])["a"])
