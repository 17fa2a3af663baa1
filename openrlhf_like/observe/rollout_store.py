"""The trajectories of each step as JSONL, written in the background."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import queue
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_like.observe.run_dir import ROLLOUTS_NAME
from openrlhf_like.types import Segment, Trajectory, WaitTimeout

logger = logging.getLogger(__name__)

Advantages = Mapping[str, Sequence[np.ndarray]]

_STEP_FILE = re.compile(r"^step_(\d+)\.jsonl$")
_ARRAYS = ("token_ids", "action_mask", "behavior_logprobs", "weight_version")


@dataclasses.dataclass
class _Block:
    step: int
    trajectories: Sequence[Trajectory]
    advantages: Advantages
    last: bool


class RolloutStore:
    """Writes ``run/rollouts/step_000001.jsonl``: one line a segment.

    Each line holds the fields of the segment and of its trajectory side by side, plus ``step``, ``segment`` (its
    index) and ``advantages``; every array aligns with ``token_ids``. A trajectory without a segment (it failed before
    its first token) still gets a line, with empty arrays and ``segment`` null, so that its error can be read.

    A step's file is written under a temporary name and renamed when the step is complete. Writing happens in a thread
    behind a bounded queue: ``write`` blocks only while ``queue_size`` blocks are waiting. An error of the thread is
    raised by the next ``write`` or ``close``. Trajectories handed over must not be changed afterwards.
    """

    def __init__(
        self, run_dir: str | Path, every: int = 1, *, queue_size: int = 4, wait_limit_s: float = 600.0
    ) -> None:
        """
        Args:
            run_dir: the files go to ``<run_dir>/rollouts``.
            every: keep the steps divisible by this (``--logger.rollouts_every``); 0 keeps none.
            queue_size: blocks that may wait to be written.
            wait_limit_s: seconds ``write`` and ``close`` wait for the disk before they raise WaitTimeout.
        """
        self.directory = Path(run_dir) / ROLLOUTS_NAME
        self.every = every
        self._wait_limit_s = wait_limit_s
        self._queue: queue.Queue[_Block | None] = queue.Queue(maxsize=queue_size)
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._open_steps: set[int] = set()

    def wants(self, step: int) -> bool:
        """True where the trajectories of ``step`` are kept: ask before gathering them."""
        return self.every > 0 and step % self.every == 0

    def write(
        self, step: int, trajectories: Sequence[Trajectory], advantages: Advantages | None = None, *, last: bool = True
    ) -> bool:
        """Queue trajectories of a step.

        Args:
            advantages: trajectory id -> one float array [T] a segment; a trajectory left out has null advantages
                (it was filtered or failed).
            last: False for a block that more blocks of the same step follow.

        Returns:
            Whether the step is one that is kept.

        Raises:
            ValueError: an advantage array does not align with its segment's ``token_ids``.
            WaitTimeout: the queue stayed full.
            OSError: an earlier block could not be written.
        """
        self._raise_error()
        if not self.wants(step):
            return False
        advantages = advantages or {}
        for trajectory in trajectories:
            _check_alignment(trajectory, advantages)
        self._put(_Block(step, trajectories, advantages, last))
        return True

    def discard_after(self, step: int) -> int:
        """Resume at ``step``: remove the files of later steps and unfinished ones. Returns how many were removed."""
        removed = 0
        for path in sorted(self.directory.glob("step_*.jsonl*")):
            match = _STEP_FILE.match(path.name)
            if match is None or int(match.group(1)) > step:
                path.unlink()
                removed += 1
        return removed

    def flush(self) -> None:
        """Wait until everything queued is on disk. Raises like ``close``."""
        self._stop_thread()
        self._raise_error()

    def close(self) -> None:
        """Write what is queued and end the thread.

        Raises:
            WaitTimeout: the disk did not keep up within the limit.
            OSError: a block could not be written.
        """
        self.flush()

    def _put(self, item: _Block | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollout-store", daemon=True)
            self._thread.start()
        try:
            self._queue.put(item, timeout=self._wait_limit_s)
        except queue.Full:
            raise self._timeout() from None

    def _stop_thread(self) -> None:
        if self._thread is None:
            return
        self._put(None)
        self._thread.join(self._wait_limit_s)
        if self._thread.is_alive():
            raise self._timeout()
        self._thread = None

    def _timeout(self) -> WaitTimeout:
        return WaitTimeout(
            f"the rollout store waited {self._wait_limit_s:g} s for the disk under {self.directory}; "
            "write fewer steps with --logger.rollouts_every"
        )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            error.add_note(f"raised in the background while writing rollouts to {self.directory}")
            raise error

    def _run(self) -> None:
        while (block := self._queue.get()) is not None:
            try:
                self._write_block(block)
            # Anything that goes wrong here belongs to the caller, who is in another thread: it is kept and raised
            # by the next call.
            except Exception as error:
                self._error = error

    def _write_block(self, block: _Block) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self.directory / f"step_{block.step:06d}.jsonl"
        tmp = final.with_name(final.name + ".tmp")
        # The first block starts the file anew: a killed run may have left half of one. A lone surrogate in a user's
        # text becomes the JSON escape it came from.
        mode = "a" if block.step in self._open_steps else "w"
        with tmp.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            self._open_steps.add(block.step)
            for trajectory in block.trajectories:
                for row in trajectory_rows(block.step, trajectory, block.advantages.get(trajectory.trajectory_id)):
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        if block.last:
            tmp.replace(final)
            self._open_steps.discard(block.step)


def trajectory_rows(
    step: int, trajectory: Trajectory, advantages: Sequence[np.ndarray] | None = None
) -> Iterator[dict[str, Any]]:
    """One JSON-ready row a segment; see :class:`RolloutStore`. ``advantages``: one array [T] a segment, or None."""
    shared = {
        field.name: to_jsonable(getattr(trajectory, field.name))
        for field in dataclasses.fields(Trajectory)
        if field.name != "segments"
    }
    if not trajectory.segments:
        yield {"step": step, "segment": None, **shared, **_empty_segment(), "advantages": None}
    for index, segment in enumerate(trajectory.segments):
        own = {name: to_jsonable(getattr(segment, name)) for name in (*_ARRAYS, "turn_params")}
        own["images"] = [_image_reference(image) for image in segment.images]
        values = None if advantages is None else to_jsonable(advantages[index])
        yield {"step": step, "segment": index, **shared, **own, "advantages": values}


def to_jsonable(value: Any) -> Any:
    """Plain JSON values: arrays become lists, NaN and infinities null, dataclasses dicts, anything unknown its repr."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, np.generic):
        return to_jsonable(value.item())
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """The rows of one step's file."""
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _image_reference(image: Any) -> Any:
    """A path or a URL as it is; of pixels and processor inputs only their shape: they are not for reading."""
    if isinstance(image, Mapping):
        return {str(key): _image_reference(value) for key, value in image.items()}
    if hasattr(image, "shape"):
        return f"array{tuple(image.shape)}"
    return image if isinstance(image, str) and not image.startswith("data:") else repr(image)[:200]


def _empty_segment() -> dict[str, Any]:
    return {field.name: [] for field in dataclasses.fields(Segment)}


def _check_alignment(trajectory: Trajectory, advantages: Advantages) -> None:
    arrays = advantages.get(trajectory.trajectory_id)
    if arrays is not None and len(arrays) != len(trajectory.segments):
        raise ValueError(
            f"trajectory {trajectory.trajectory_id} has {len(trajectory.segments)} segments "
            f"and {len(arrays)} advantage arrays"
        )
    for index, segment in enumerate(trajectory.segments):
        lengths = {name: len(getattr(segment, name)) for name in _ARRAYS}
        if arrays is not None:
            lengths["advantages"] = len(arrays[index])
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory {trajectory.trajectory_id}, segment {index}: lengths differ: {lengths}")
