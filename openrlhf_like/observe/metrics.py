"""Metrics: merged by step, one JSON object a step in ``run/metrics.jsonl``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from openrlhf_like.observe.run_dir import METRICS_NAME, set_aside_previous, write_text_atomic

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes ``run/metrics.jsonl``: one line a step, holding everything that was measured at that step.

    ``add`` gathers what rollout, training and evaluation report for a step; ``commit`` writes the merged record as
    one line, flushed, and returns it for the trackers and the terminal. Metrics that arrive for a step already
    written are merged into its line (the file is replaced atomically).

    Resume at step k: lines of steps beyond k, which the killed run wrote and the resumed run will write again, are
    cut off by replacing the file atomically; lines up to k stay; a line torn by the kill is dropped. So each step
    appears exactly once. A new run that finds an earlier run's file moves it to ``run/previous-<n>`` first.

    Values that are not finite become null and are counted in ``nonfinite``.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / METRICS_NAME
        self.nonfinite = 0
        self._warned: set[str] = set()
        self._pending_step: int | None = None
        self._pending: dict[str, Any] = {}
        self._last_committed = -1
        self._file: TextIO | None = None
        self._resumed = False

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Merge ``metrics`` into the record of ``step``. A value given twice: the later one stands, with a warning.

        Raises:
            ValueError: an earlier step is still open: its record would never reach the trackers.
        """
        if step <= self._last_committed and step != self._pending_step:
            self._amend(step, metrics)
            return
        if self._pending_step is not None and step != self._pending_step:
            raise ValueError(f"metrics of step {step} came while step {self._pending_step} is open: commit it first")
        self._pending_step = step
        self._merge(self._pending, metrics)

    def commit(self) -> dict[str, Any] | None:
        """Write the open record as one line and return it: ``step`` first, values finite or None.

        Returns None when no record is open.
        """
        if self._pending_step is None:
            return None
        record = {"step": self._pending_step, **self._pending}
        if self._pending_step <= self._last_committed:
            # Reopened by a resume: the killed run had written its line already.
            self._amend(self._pending_step, self._pending)
        else:
            file = self._open()
            file.write(_to_line(record))
            file.flush()
            self._last_committed = self._pending_step
        self._pending_step, self._pending = None, {}
        return record

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """``add`` then ``commit``, for a loop that has everything of a step in hand; returns the step's record."""
        if step <= self._last_committed and step != self._pending_step:
            return self._amend(step, metrics)
        self.add(step, metrics)
        record = self.commit()
        assert record is not None
        return record

    def resume(self, step: int) -> int:
        """Go on after ``step``: cut off later lines. Returns how many lines were cut."""
        self._close_file()
        self._resumed = True
        records, torn = read_records(self.path)
        kept = [record for record in records if record["step"] <= step]
        cut = len(records) - len(kept)
        if cut or torn or not _ends_whole(self.path):
            write_text_atomic(self.path, "".join(_to_line(record) for record in kept))
            logger.info("resume at step %d: cut %d later and %d torn lines off %s", step, cut, torn, self.path)
        self._last_committed = max((record["step"] for record in kept), default=-1)
        return cut

    def close(self) -> dict[str, Any] | None:
        """Commit what is open, close the file; returns the record that was open, None when there was none."""
        record = self.commit()
        self._close_file()
        return record

    def state_dict(self) -> dict[str, Any]:
        """The last step seen, and the record still open: a checkpoint may fall between two metrics of a step."""
        last = self._pending_step if self._pending_step is not None else self._last_committed
        return {
            "step": last,
            "pending_step": self._pending_step,
            "pending": dict(self._pending),
            "nonfinite": self.nonfinite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where ``state`` was taken: see the class for what happens to later lines."""
        self.nonfinite = state["nonfinite"]
        self.resume(state["step"])
        self._pending_step, self._pending = state["pending_step"], dict(state["pending"])
        if self._pending_step is not None:
            # What the killed run measured for this step after the checkpoint is on disk: open that too, so that the
            # next commit hands the whole record to the trackers.
            written = [r for r in read_records(self.path)[0] if r["step"] == self._pending_step]
            for record in written:
                self._pending.update({name: value for name, value in record.items() if name != "step"})

    def _open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._resumed:
                set_aside_previous(self.path.parent, (METRICS_NAME,))
                self._resumed = True
            self._file = self.path.open("a", encoding="utf-8")
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _amend(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Merge into a line already written, or put a new one in its place in the order; returns the record."""
        self._close_file()
        records, _ = read_records(self.path)
        by_step = {record["step"]: record for record in records}
        record = by_step.setdefault(step, {"step": step})
        self._merge(record, metrics)
        write_text_atomic(self.path, "".join(_to_line(by_step[key]) for key in sorted(by_step)))
        return record

    def _merge(self, target: dict[str, Any], metrics: Mapping[str, Any]) -> None:
        for name, value in self._clean(metrics).items():
            if name in target and target[name] != value:
                self._warn_once(f"twice {name}", f"metric {name} was given twice in one step: the later value stands")
            target[name] = value

    def _clean(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        out = {}
        for name, value in metrics.items():
            if name == "step":
                continue
            out[name] = to_json_scalar(value)
            if out[name] is None and value is not None:
                self.nonfinite += 1
                self._warn_once(f"nonfinite {name}", f"metric {name} is not finite ({value}): written as null")
        return out

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s (said once)", message)


def to_json_scalar(value: Any) -> Any:
    """A metric as JSON takes it: numbers of numpy and torch become plain ones, NaN and infinities None.

    Raises:
        TypeError, ValueError: the value is not a scalar (an array's own ``item()`` refuses).
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def read_records(path: str | Path) -> tuple[list[dict[str, Any]], int]:
    """All records of a metrics file in order, and the number of lines that are torn (a kill in mid-write).

    A missing file has no records.
    """
    path = Path(path)
    if not path.exists():
        return [], 0
    records, torn = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is None:
            torn += 1
        else:
            records.append(record)
    return records, torn


def _ends_whole(path: Path) -> bool:
    """False where the last line lacks its newline: the next append would run into it."""
    return not path.exists() or path.stat().st_size == 0 or path.read_bytes().endswith(b"\n")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, without the steps that lack it."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
