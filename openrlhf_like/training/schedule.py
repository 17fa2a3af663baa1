"""Learning-rate schedules: pure functions of the update's number, so that they hold no state.

Names and shapes are those of transformers' schedules, without their rise after the horizon: past the last planned
update the value at the horizon stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from openrlhf_like.types import UserError


def _linear(p: float, floor: float) -> float:
    return 1.0 - p


def _cosine(p: float, floor: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * p))


def _cosine_min(p: float, floor: float) -> float:
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * p))


def _polynomial(p: float, floor: float) -> float:
    # transformers' default power is 1; its lr_end of 1e-7 is an absolute rate and is left at 0 here.
    return 1.0 - p


def _constant(p: float, floor: float) -> float:
    return 1.0


def _warmup_stable_decay(p: float, floor: float) -> float:
    # Stable for the first 90% after the warmup, then a cosine to the floor.
    if p <= 0.9:
        return 1.0
    return _cosine_min((p - 0.9) / 0.1, floor)


_SHAPES: dict[str, Callable[[float, float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine,  # transformers' default is one cycle
    "cosine_with_min_lr": _cosine_min,
    "cosine_warmup_with_min_lr": _cosine_min,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "warmup_stable_decay": _warmup_stable_decay,
}

SCHEDULES = (*_SHAPES, "inverse_sqrt")


def check_schedule(name: str, flag: str = "--lr_scheduler") -> None:
    """Raise UserError for a name that is none of :data:`SCHEDULES`."""
    if name not in SCHEDULES:
        raise UserError(f"{flag} {name}: unknown schedule; choose one of {', '.join(SCHEDULES)}")


def warmup_updates(total: int, ratio: float) -> int:
    """Updates spent warming up: the ratio's share of the horizon, rounded up."""
    return math.ceil(total * ratio)


def lr_factor(name: str, update: int, total: int, warmup: int, min_lr_ratio: float = 0.0) -> float:
    """The factor on the peak rate at update ``update`` (0-based) of ``total`` planned ones.

    Rises linearly from 0 over ``warmup`` updates, then follows the named shape; at and after ``total`` it stays at
    the shape's last value. As in transformers, the very first update of a warmup has factor 0.
    """
    check_schedule(name)
    update = min(update, total)
    if name == "constant":
        return 1.0
    if name == "cosine_warmup_with_min_lr" and update < total:
        # transformers' shape of this name is one update ahead: its warmup starts above 0.
        update += 1
        if update <= warmup:
            return update / warmup
    if update < warmup:
        return update / warmup
    if name == "inverse_sqrt":
        timescale = warmup or 10_000
        return 1.0 / math.sqrt((update + timescale - warmup) / timescale)
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    return max(0.0, _SHAPES[name](progress, min_lr_ratio))
