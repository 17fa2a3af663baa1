"""Starting the processes of a run in the places that the plan gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.cluster.host import RemoteActor, start_actor
from openrlhf_like.cluster.session import RaySession


def limit(cfg: Any, name: str) -> dict[str, Any]:
    """The limit of a wait by its name in ``--timeout.*``, as ``call`` and ``wait_for`` take it."""
    return {"timeout": getattr(cfg.timeout, name), "flag": f"timeout.{name}"}


def start_workers(session: RaySession, cfg: Any, role: str, cls: type) -> WorkerGroup:
    """Start the training workers of a role. Returns at once; they import their libraries meanwhile."""
    slots = session.placement.slots(role)
    return WorkerGroup(
        cls,
        slots,
        name=role,
        args=(cfg,),
        kwargs_each=[{"rank": rank, "world_size": len(slots)} for rank in range(len(slots))],
        env=session.threads(len(slots)),
        timeout=cfg.timeout.init,
        flag="timeout.init",
    )


def join_workers(cfg: Any, group: WorkerGroup) -> None:
    """Make one process group of the workers of a role."""
    address = group.workers[0].call("rendezvous_info", what="find a port", **limit(cfg, "init"))
    group.call("setup", *address, what="meet each other", **limit(cfg, "init"))


def start_actors(
    session: RaySession, role: str, cls: type, args_each: list[tuple[Any, ...]], env: dict[str, str] | None = None
) -> list[RemoteActor]:
    """Start one actor a slot of the role, each with its own arguments. Returns at once: `wait_built` waits."""
    slots = session.placement.slots(role)
    return [
        start_actor(cls, f"{role} {i}", slot, *args, env=env)
        for i, (slot, args) in enumerate(zip(slots, args_each, strict=True))
    ]


def wait_built(cfg: Any, actors: Sequence[RemoteActor]) -> None:
    """Wait for the constructors. Nothing may be called before: Ray runs an async actor's calls in any order."""
    for actor in actors:
        actor.ready(**limit(cfg, "init"))
