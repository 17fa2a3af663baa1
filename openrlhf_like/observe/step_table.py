"""The key metrics of a step for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openrlhf_like.observe.console import table_console

# What a person looks at first, in this order; a metric that a step lacks is left out.
KEY_METRICS = (
    "reward/mean",
    "reward/std",
    "reward/group_zero_std_fraction",
    "reward/failed_fraction",
    "policy/loss",
    "policy/kl_ref",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/entropy",
    "policy/grad_norm",
    "policy/lr",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "eval/loss",
    "eval/accuracy",
    "rollout/response_length",
    "rollout/truncated_fraction",
    "rollout/logprob_diff_mean",
    "time/generate",
    "time/reward",
    "time/ref",
    "time/train",
    "time/weight_sync",
    "time/step",
    "throughput/tokens_per_second",
)

# Name and value of one metric side by side take about this many characters.
_PAIR_WIDTH = 40
_MOST_PAIRS = 3


def format_value(name: str, value: Any) -> str:
    """A metric for people: seconds with their unit, fractions and losses with three digits, null as ``-``."""
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    number = float(value)
    if name.startswith("time/"):
        return f"{number:.2f}s"
    if number == 0:
        return "0"
    if abs(number) < 1e-3 or abs(number) >= 1e6:
        return f"{number:.2e}"
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def chosen_metrics(metrics: Mapping[str, Any], keys: tuple[str, ...] = KEY_METRICS) -> list[tuple[str, str]]:
    """The key metrics that are there, then every ``eval/<dataset>/...`` metric; names and formatted values."""
    names = [name for name in keys if name in metrics]
    names += sorted(name for name in metrics if name.startswith("eval/") and name not in names)
    return [(name, format_value(name, metrics[name])) for name in names]


class StepTable:
    """Prints a step's key metrics: a small table on a terminal, one line of text elsewhere."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self._console = console

    def show(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of ``step``."""
        console = self._console or table_console()
        if console.is_terminal:
            console.print(self.table(step, metrics, console.width))
        else:
            # No wrapping: one step is one line, for grep.
            console.print(self.line(step, metrics), soft_wrap=True, markup=False, highlight=False, emoji=False)

    def table(self, step: int, metrics: Mapping[str, Any], width: int = 120) -> Table:
        """The rich table, with as many metrics side by side as ``width`` characters hold."""
        pairs = max(1, min(_MOST_PAIRS, width // _PAIR_WIDTH))
        table = Table(title=f"step {step}/{self.total_steps}", title_justify="left", show_header=False, box=None)
        for _ in range(pairs):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(justify="right", style="bold", no_wrap=True)
        # Text, because a dataset's name may hold brackets, which rich would read as markup.
        cells = [Text(cell) for pair in chosen_metrics(metrics) for cell in pair]
        for start in range(0, len(cells), 2 * pairs):
            table.add_row(*cells[start : start + 2 * pairs])
        return table

    def line(self, step: int, metrics: Mapping[str, Any]) -> str:
        """The line of text."""
        pairs = "  ".join(f"{name} {value}" for name, value in chosen_metrics(metrics))
        return f"step {step}/{self.total_steps}  {pairs}".rstrip()
