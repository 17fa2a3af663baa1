"""Ray: where workers run, how they are called, and that they end. Importing this package does not import Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openrlhf_like.cluster.errors import WorkerDied, WorkerFailed
from openrlhf_like.cluster.placement import PlacementPlan, check_supply, plan_placement
from openrlhf_like.cluster.signals import Terminated, exit_status, run_command

if TYPE_CHECKING:
    from openrlhf_like.cluster.group import WorkerGroup
    from openrlhf_like.cluster.host import RemoteActor, Slot, start_actor
    from openrlhf_like.cluster.session import RaySession, ray_session
    from openrlhf_like.cluster.wait import wait_for

_LAZY = {
    "RaySession": "session",
    "RemoteActor": "host",
    "Slot": "host",
    "WorkerGroup": "group",
    "ray_session": "session",
    "start_actor": "host",
    "wait_for": "wait",
}

__all__ = [
    "PlacementPlan",
    "RaySession",
    "RemoteActor",
    "Slot",
    "Terminated",
    "WorkerDied",
    "WorkerFailed",
    "WorkerGroup",
    "check_supply",
    "exit_status",
    "plan_placement",
    "ray_session",
    "run_command",
    "start_actor",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"openrlhf_like.cluster.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
