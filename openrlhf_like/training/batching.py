"""Which rows meet in which micro-batch, on which worker. numpy only; the driver runs it on lengths alone.

Three decisions, in this order, so that the later never changes the earlier: which rows are in an optimizer step (the
given order), which worker holds a row (balanced by tokens), which rows of a worker share a forward pass (rows of like
length together, within a budget).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf_like.types import UpdatePlan, UserError

#: Padding a plan aims to stay below, as a share of all positions computed.
TARGET_PADDING = 0.08
#: Rows looked at together by the exact micro-batch search; longer lists are searched in blocks.
SEARCH_BLOCK = 512


def windows(order: Sequence[int], batch_size: int) -> list[list[int]]:
    """The order cut into optimizer steps of ``batch_size`` rows; the incomplete last one is kept."""
    if batch_size < 1:
        raise UserError(f"--train.batch_size {batch_size}: must be at least 1")
    rows = [int(i) for i in order]
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


def assign_rows(lengths: Sequence[int] | np.ndarray, num_workers: int, steps: Sequence[Sequence[int]]) -> np.ndarray:
    """Worker of each row, int [rows]: within every step the workers' token counts are as even as greedy gets them.

    A row that several steps name (more epochs) keeps the worker of its first; a row that no step names gets one too,
    so that it can take part in passes without gradient.
    """
    size = np.asarray(lengths, dtype=np.int64)
    worker = np.full(len(size), -1, dtype=np.int64)
    rest = sorted(set(range(len(size))) - {int(i) for s in steps for i in s})
    for step in [*steps, rest]:
        load = np.zeros(num_workers, dtype=np.int64)
        new = []
        for row in dict.fromkeys(int(i) for i in step):
            if worker[row] >= 0:
                load[worker[row]] += size[row]
            else:
                new.append(row)
        # Longest first to the least loaded worker; ties by worker number, so that the plan is reproducible.
        for row in sorted(new, key=lambda r: (-size[r], r)):
            target = int(np.argmin(load))
            worker[row] = target
            load[target] += size[row]
    return worker


def _segments(lengths: np.ndarray, per_batch: float, max_tokens: int | None, max_rows: int | None) -> list[int]:
    """Cut lengths, sorted downwards, into runs: least padded positions plus ``per_batch`` a run. Returns the ends."""
    n = len(lengths)
    best = np.full(n + 1, np.inf)
    best[n] = 0.0
    end_of = np.zeros(n, dtype=np.int64)
    for start in range(n - 1, -1, -1):
        counts = np.arange(1, n - start + 1)
        padded = counts * lengths[start]
        cost = padded + per_batch + best[start + 1 :]
        if max_tokens is not None:
            cost[(padded > max_tokens) & (counts > 1)] = np.inf
        if max_rows is not None:
            cost[max_rows:] = np.inf
        k = int(np.argmin(cost))
        best[start], end_of[start] = cost[k], start + 1 + k
    ends, at = [], 0
    while at < n:
        at = int(end_of[at])
        ends.append(at)
    return ends


def _padding_of(lengths: np.ndarray, ends: Sequence[int]) -> float:
    start, total = 0, 0
    for end in ends:
        total += (end - start) * int(lengths[start])
        start = end
    return 1.0 - float(lengths.sum()) / total if total else 0.0


def _padded(
    rows: list[int], lengths: np.ndarray, max_tokens: int | None = None, max_rows: int | None = None
) -> list[list[int]]:
    """Few micro-batches within the limit (rows x longest <= max_tokens, or rows), with padding below the target."""
    out: list[list[int]] = []
    for block in range(0, len(rows), SEARCH_BLOCK):
        part = rows[block : block + SEARCH_BLOCK]
        size = lengths[part]
        mean = float(size.mean())
        for per_batch in (mean * 2.0**k for k in range(6, -6, -1)):
            ends = _segments(size, per_batch, max_tokens, max_rows)
            if _padding_of(size, ends) <= TARGET_PADDING:
                break
        out.extend(part[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True))
    return out


def _packed_by_budget(rows: list[int], lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """First fit, longest first: each micro-batch's sum of lengths <= max_tokens."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        size = int(lengths[row])
        slot = next((i for i, r in enumerate(room) if r >= size), None)
        if slot is None:
            bins.append([row])
            room.append(max_tokens - size)
        else:
            bins[slot].append(row)
            room[slot] -= size
    return bins


def micro_batches(
    rows: Sequence[int],
    lengths: Sequence[int] | np.ndarray,
    micro_batch_size: int,
    max_tokens: int | None = None,
    packed: bool = False,
) -> list[list[int]]:
    """One worker's rows in micro-batches, largest first.

    ``max_tokens`` None allows ``micro_batch_size`` rows a micro-batch. Otherwise it bounds the positions computed
    (padding included), whatever the number of rows; a row longer than it goes alone. Padded micro-batches are cut
    smaller than the limit allows where lengths differ too much.
    """
    size = np.asarray(lengths, dtype=np.int64)
    ordered = sorted((int(r) for r in rows), key=lambda r: (-size[r], r))
    if not ordered:
        return []
    if not packed:
        limit = {"max_rows": micro_batch_size} if max_tokens is None else {"max_tokens": max_tokens}
        return _padded(ordered, size, **limit)
    if max_tokens is None:
        return [ordered[i : i + micro_batch_size] for i in range(0, len(ordered), micro_batch_size)]
    return _packed_by_budget(ordered, size, max_tokens)


def _in_step(per_rank: list[list[list[int]]]) -> list[list[list[int]]]:
    """Equally many micro-batches on every rank: empty ones at the end where a rank has fewer."""
    most = max((len(r) for r in per_rank), default=0)
    return [r + [[] for _ in range(most - len(r))] for r in per_rank]


def plan_forward(
    lengths: Sequence[int] | np.ndarray,
    row_worker: Sequence[int] | np.ndarray,
    num_workers: int,
    micro_batch_size: int,
    max_tokens: int | None = None,
    packed: bool = False,
    rows: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Micro-batches of a pass without gradient: ``[rank][k]`` lists row indices, equally many a rank."""
    chosen = range(len(lengths)) if rows is None else rows
    mine: list[list[int]] = [[] for _ in range(num_workers)]
    for row in chosen:
        mine[int(row_worker[row])].append(int(row))
    return _in_step([micro_batches(m, lengths, micro_batch_size, max_tokens, packed) for m in mine])


def plan_updates(
    lengths: Sequence[int],
    num_actions: Sequence[int],
    batch_size: int,
    num_workers: int,
    micro_batch_size: int,
    max_tokens: int | None = None,
    order: Sequence[int] | None = None,
    packed: bool = False,
    row_worker: Sequence[int] | np.ndarray | None = None,
) -> list[UpdatePlan]:
    """The optimizer steps of ``order``, each with its micro-batches a worker.

    Args:
        lengths: tokens a row costs in a forward pass (all its segments).
        num_actions: tokens of the row that carry loss.
        batch_size: rows an optimizer step takes over all workers.
        num_workers: data-parallel workers.
        micro_batch_size: rows a forward pass, without ``max_tokens``.
        max_tokens: positions a forward pass (dynamic batching), or None.
        order: row indices in training order, epochs one after the other (a row may return); None is 0, 1, 2, ...
        packed: rows are packed, not padded.
        row_worker: where each row already lies (a rollout's rows stay put); None balances every step anew.

    Returns:
        One plan an optimizer step. Which rows are in a step depends on ``order`` and ``batch_size`` alone.
    """
    order = range(len(lengths)) if order is None else order
    actions = np.asarray(num_actions, dtype=np.int64)
    size = np.asarray(lengths, dtype=np.int64)
    plans = []
    for step in windows(order, batch_size):
        # A row twice in a step (an epoch's end within it) may be split over workers: planned by place, not by row.
        local = size[step]
        worker = (
            assign_rows(local, num_workers, [range(len(step))])
            if row_worker is None
            else np.asarray([row_worker[r] for r in step])
        )
        per_rank = plan_forward(local, worker, num_workers, micro_batch_size, max_tokens, packed)
        plans.append(
            UpdatePlan(
                micro_batches=[[[step[i] for i in mb] for mb in rank] for rank in per_rank],
                num_tokens=int(actions[step].sum()),
                num_sequences=len(step),
            )
        )
    return plans


def padding_fraction(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the computed positions that hold no token, over micro-batches padded to their longest row."""
    real = sum(int(lengths[r]) for mb in batches for r in mb)
    padded = sum(len(mb) * max(int(lengths[r]) for r in mb) for mb in batches if len(mb))
    return 1.0 - real / padded if padded else 0.0
