"""One Ray actor around one plain class: started, located, built, called, and explained when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_like.cluster import logs, nodes
from openrlhf_like.cluster.errors import WorkerDied
from openrlhf_like.cluster.wait import wait_for

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
_LIVE: list[Any] = []


@dataclass(frozen=True)
class Slot:
    """Where one worker goes.

    Attributes:
        placement_group: a Ray placement group, or None for anywhere.
        bundle_index: its bundle.
        num_cpus, num_gpus: what the worker takes of it. Bookkeeping for Ray's scheduler: Ray limits neither.
        devices: physical GPU ids, where the worker spans several bundles and must be told (Ray sets them otherwise).
    """

    placement_group: Any = None
    bundle_index: int = -1
    num_cpus: float = 0.25
    num_gpus: float = 0.0
    devices: tuple[str, ...] = ()


def _remote_class(cls: type) -> Any:
    """A Ray actor class with every method of ``cls``, whose constructor runs in ``host_build``.

    The process is up and located before the constructor's arguments (the address of rank 0, say) are known.
    """

    class Hosted(cls):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            pass

        def host_prepare(self, log_level: int) -> nodes.NodeInfo:
            # Of other libraries only what may need an answer: their progress is not the run's.
            logging.basicConfig(
                level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s", force=True
            )
            logging.getLogger("openrlhf_like").setLevel(log_level)
            return nodes.here()

        def host_port(self) -> int:
            return nodes.free_port()

        def host_build(self, environment: dict[str, str], *args: Any, **kwargs: Any) -> None:
            os.environ.update(environment)
            super().__init__(*args, **kwargs)

    Hosted.__name__, Hosted.__qualname__, Hosted.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
    Hosted.__module__ = cls.__module__
    return ray.remote(Hosted)


class RemoteActor:
    """A running actor. Method calls run in the order they were made (async methods: interleaved).

    Args:
        cls: a plain class, importable in the worker (or picklable by value).
        name: its name in messages, e.g. "actor rank 1" or "engine 0".
        slot: its place and share.
        env: environment variables its process starts with, over the session's.
        max_concurrency: calls at the same time; None is Ray's default (1, or 1000 for a class with async methods).
        log_level: level of ``logging`` in the process.
    """

    def __init__(
        self,
        cls: type,
        name: str,
        slot: Slot | None = None,
        *,
        env: Mapping[str, str] | None = None,
        max_concurrency: int | None = None,
        log_level: int = logging.INFO,
    ) -> None:
        slot = slot or Slot()
        self.name = name
        self._info: nodes.NodeInfo | None = None
        self._build_ref: Any = None
        self._dead = False
        options: dict[str, Any] = {
            "num_cpus": slot.num_cpus,
            "num_gpus": slot.num_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if max_concurrency is not None:
            options["max_concurrency"] = max_concurrency
        if slot.placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
            )
        variables = {k: str(v) for k, v in (env or {}).items()}
        if slot.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
        if variables:
            options["runtime_env"] = {"env_vars": variables}
        self.handle = _remote_class(cls).options(**options).remote()
        _LIVE.append(self.handle)
        self._info_ref = self.handle.host_prepare.remote(log_level)

    @property
    def label(self) -> str:
        """Name, pid and node, as messages show it."""
        if self._info is None:
            return self.name
        return f"{self.name} (pid {self._info.pid} on {self._info.ip})"

    def locate(self, timeout: float, flag: str) -> nodes.NodeInfo:
        """Wait until the process is up; where it runs."""
        if self._info is None:
            self._info = wait_for(
                self._info_ref, "start its process", timeout, flag, names=[self.name], explain=self.explain_death
            )
            assert self._info is not None
            logs.name_process(self._info.pid, self.name)
        return self._info

    def free_port(self, timeout: float, flag: str) -> int:
        """A free port on the actor's node."""
        return int(wait_for(self.handle.host_port.remote(), "find a free port", timeout, flag, names=[self.label]))

    def build(self, environment: Mapping[str, str], *args: Any, **kwargs: Any) -> None:
        """Start the class's constructor; returns at once. Top-level object references are resolved by Ray."""
        self._build_ref = self.handle.host_build.remote(dict(environment), *args, **kwargs)

    def ready(self, timeout: float, flag: str = "timeout.init") -> None:
        """Wait for the constructor. Raises what it raised (UserError as itself)."""
        self.locate(timeout, flag)
        if self._build_ref is not None:
            ref, self._build_ref = self._build_ref, None
            wait_for(ref, "load and get ready", timeout, flag, names=[self.label], explain=self.explain_death)

    def take_build_ref(self) -> Any:
        """The reference of the running constructor, once: for a group that waits for all of its members together."""
        ref, self._build_ref = self._build_ref, None
        return ref

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a method; returns its object reference."""
        return getattr(self.handle, method).remote(*args, **kwargs)

    def call(
        self, method: str, *args: Any, timeout: float, flag: str, what: str | None = None, **kwargs: Any
    ) -> Any:
        """Run a method and wait for its result, at most ``timeout`` seconds."""
        return wait_for(
            self.submit(method, *args, **kwargs),
            what or method,
            timeout,
            flag,
            names=[self.label],
            explain=self.explain_death,
        )

    def explain_death(self, index: int, error: BaseException) -> WorkerDied:
        """The error of this actor's death, with the end of its stderr where it can be read from here."""
        del index
        reason = _reason(error)
        tail = self._stderr_tail()
        return WorkerDied(f"{self.label} died: {reason}{tail}")

    def _stderr_tail(self) -> str:
        if self._info is None or self._info.stderr is None:
            return ""
        if self._info.ip != nodes.node_ip():
            return f"\n  its stderr: {self._info.stderr} on {self._info.ip}"
        try:
            with open(self._info.stderr, errors="replace") as file:
                lines = [line.rstrip() for line in file.readlines()[-_TAIL_LINES:]]
        except OSError:
            return f"\n  its stderr: {self._info.stderr}"
        shown = [line for line in lines if line and not line.startswith(":actor_name:")]
        return f"\n  the end of its stderr ({self._info.stderr}):\n" + "\n".join(f"    {line}" for line in shown)

    def kill(self) -> None:
        """End the process at once. Safe to call twice."""
        if self._dead:
            return
        self._dead = True
        kill_handle(self.handle)


def _reason(error: BaseException) -> str:
    """Ray's account of a death without identifiers and without its list of common causes."""
    text = " ".join(str(error).split()).split(" Some common causes", 1)[0]
    return (text.rpartition("Worker exit detail: ")[2] or text or type(error).__name__)[:400]


def start_actor(
    cls: type,
    name: str,
    slot: Slot | None = None,
    *args: Any,
    env: Mapping[str, str] | None = None,
    max_concurrency: int | None = None,
    log_level: int = logging.INFO,
    **kwargs: Any,
) -> RemoteActor:
    """Start one actor and its constructor ``cls(*args, **kwargs)``; returns at once; ``ready(timeout)`` waits.

    A class with async methods must be waited for before anything is called: Ray may run its calls in any order.
    """
    actor = RemoteActor(cls, name, slot, env=env, max_concurrency=max_concurrency, log_level=log_level)
    actor.build({}, *args, **kwargs)
    return actor


def kill_handle(handle: Any) -> None:
    """ray.kill that does not mind an actor that is gone already."""
    with contextlib.suppress(ValueError):
        _LIVE.remove(handle)
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(handle, no_restart=True)


def live_count() -> int:
    """Actors started and not killed yet, in order of start."""
    return len(_LIVE)


def kill_live(since: int = 0) -> None:
    """Kill the actors started after the first ``since``."""
    for handle in _LIVE[since:]:
        kill_handle(handle)
