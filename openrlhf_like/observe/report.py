"""What is left for people after a run: a curve and a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_like.observe.metrics import read_records, series
from openrlhf_like.types import UserError


def plot_reward_curve(
    metrics_path: str | Path,
    out_png: str | Path,
    keys: Sequence[str] = ("reward/mean",),
    title: str = "reward",
) -> Path:
    """Draw metrics over steps into a PNG; needs no display.

    Args:
        metrics_path: a run's ``metrics.jsonl``.
        out_png: where the picture goes.
        keys: metrics to draw, a line each.

    Returns:
        The path of the picture.

    Raises:
        UserError: matplotlib is not installed, or no line of the file has any of ``keys``.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("drawing the reward curve needs the package matplotlib; pip install matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records, _ = read_records(metrics_path)
    lines = {key: series(records, key) for key in keys}
    lines = {key: points for key, points in lines.items() if points[0]}
    if not lines:
        raise UserError(f"{metrics_path}: no step has a value for {', '.join(keys)}; nothing to draw")
    # A figure of our own with the Agg canvas: pyplot would keep global state and may ask for a display.
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for key, (steps, values) in lines.items():
        axes.plot(steps, values, label=key, marker="o" if len(steps) <= 50 else None, markersize=3)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png, dpi=120)
    return out_png


def results_table(rows: Sequence[Sequence[Any]], columns: Sequence[str]) -> str:
    """A Markdown table that also reads well in a terminal: padded columns, numbers to the right.

    Args:
        rows: one sequence a row, as long as ``columns``; floats are shown with three digits after the point.

    Raises:
        ValueError: a row has another length.
    """
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"row {list(row)!r} has {len(row)} cells, the table has {len(columns)} columns")
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    widths = [max([len(name), 3, *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    rule = [("-" * (w - 1) + ":") if right else "-" * w for w, right in zip(widths, numeric, strict=True)]
    return "\n".join(_line(row, widths, numeric) for row in [list(columns), rule, *cells])


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [c.rjust(w) if right else c.ljust(w) for c, w, right in zip(cells, widths, numeric, strict=True)]
    return "| " + " | ".join(padded) + " |"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
