"""What workers write to stdout and stderr, shown by the driver: on stderr, by role and rank, without known noise."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_MAX_LINE = 2000
# Said by libraries in every run and meaning nothing to the user; everything else is shown.
_NOISE = re.compile(
    r"^\[Gloo\] Rank \d+ is connected"
    r"|^ninja: no work to do|^Using .*torch_extensions|^Loading extension module|^Time to load .* op:"
    r"|^Emitting ninja build file|^Building extension module|^Allowing ninja to set"
    r"|Warning: NUMA binding: Using MEMBIND policy|Disabling Triton\.$"
    r"|^No modifications detected for re-loaded extension|^:(job_id|actor_name|task_name):"
    # the driver reports a dead worker itself, with its last words
    r"|A worker died or was killed while executing a task"
)

_names: dict[str, str] = {}


def name_process(pid: int, name: str) -> None:
    """Lines of this process are shown as "[name] line"."""
    _names[str(pid)] = name


def named_pids() -> list[str]:
    """The ids of all processes named so far."""
    return list(_names)


def shown_lines(data: Mapping[str, Any]) -> list[str]:
    """The lines of one of Ray's log batches (keys "pid", "actor_name", "lines", ...) as the driver prints them."""
    pid = str(data.get("pid", ""))
    if pid == "autoscaler":
        return []  # a status table every few seconds; what a run lacks is said by the placement check
    name = _names.get(pid) or data.get("actor_name") or data.get("task_name") or pid
    lines = (line for line in data.get("lines", []) if line.strip() and not _NOISE.search(line))
    return [f"[{name}] {line[:_MAX_LINE]}" for line in lines]


def _show(data: Mapping[str, Any]) -> None:
    for line in shown_lines(data):
        sys.stderr.write(line + "\n")


def route_worker_logs() -> None:
    """Take Ray's place in showing worker output; called after ``ray.init``. Ray's own way stays where it has moved."""
    try:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
    except ImportError:
        logger.debug("this Ray shows worker output in its own way")
        return
    dispatcher.remove_handler("ray_print_logs")
    dispatcher.remove_handler("openrlhf_like")
    dispatcher.add_handler("openrlhf_like", _show)
