"""Waiting for Ray results: always with a limit, a name, and an ear for Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from openrlhf_like.cluster import signals
from openrlhf_like.cluster.errors import WorkerDied, WorkerFailed
from openrlhf_like.types import TrainingAborted, UserError, WaitTimeout

_POLL_SECONDS = 0.5


def wait_for(
    refs: Sequence[Any] | Any,
    what: str,
    timeout: float,
    flag: str,
    *,
    names: Sequence[str] | None = None,
    explain: Callable[[int, BaseException], BaseException | None] | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Any:
    """Results of ``refs`` in their order (one result for one ref).

    The first failure is raised at once, also while others still run: one rank that raises must not hide behind
    another that waits for it in a collective.

    Args:
        refs: one Ray object reference, or several.
        what: what they do, as in "generate 128 responses".
        timeout: seconds for all of them together; <= 0 means no limit.
        flag: the flag that changes it, with or without dashes, e.g. ``timeout.generate``.
        names: who each ref belongs to, e.g. "actor rank 1 (pid 12)".
        explain: turns the death of ref i's process into a richer error.
        on_done: called with (finished, all) after each poll that finished something.

    Raises:
        WaitTimeout: names who was waited for, for what, for how long, and the flag.
        WorkerFailed, WorkerDied: a worker raised, or is gone. UserError, TrainingAborted and WaitTimeout that a worker
            raised come through as themselves.
    """
    single = not isinstance(refs, (list, tuple))
    refs = [refs] if single else list(refs)
    if names is None:
        names = [f"task {i}" if len(refs) > 1 else "the task" for i in range(len(refs))]
    results: list[Any] = [None] * len(refs)
    indices: dict[Any, list[int]] = {}
    for i, ref in enumerate(refs):
        indices.setdefault(ref, []).append(i)
    pending = list(indices)
    finished = 0
    start = time.monotonic()
    while pending:
        signals.raise_if_received()
        left = timeout - (time.monotonic() - start) if timeout > 0 else _POLL_SECONDS
        if left <= 0:
            raise _timed_out([names[i] for ref in pending for i in indices[ref]], what, timeout, flag)
        ready, pending = ray.wait(pending, num_returns=1, timeout=min(_POLL_SECONDS, left))
        for ref in ready:
            for i in indices[ref]:
                results[i] = _get(ref, i, names[i], what, max(left, 1.0), flag, explain)
                finished += 1
        if ready and on_done is not None:
            on_done(finished, len(refs))
    return results[0] if single else results


def _get(
    ref: Any,
    index: int,
    name: str,
    what: str,
    timeout: float,
    flag: str,
    explain: Callable[[int, BaseException], BaseException | None] | None,
) -> Any:
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, (UserError, WaitTimeout, TrainingAborted)):
            raise cause from error
        raise WorkerFailed(f"{name} failed to {what}: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        better = explain(index, error) if explain is not None else None
        raise better or WorkerDied(f"{name} died while it was to {what}: {_first_line(error)}") from error
    except GetTimeoutError as error:
        raise _timed_out([name], f"hand over the result of: {what}", timeout, flag) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _timed_out(names: Sequence[str], what: str, timeout: float, flag: str) -> WaitTimeout:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return WaitTimeout(
        f"the driver waited {timeout:g} s for {shown} to {what}, in vain; --{flag.lstrip('-')} changes the limit"
    )
