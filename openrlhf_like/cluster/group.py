"""A group of equal workers, one process a rank, called together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openrlhf_like.cluster.host import RemoteActor, Slot
from openrlhf_like.cluster.nodes import NodeInfo
from openrlhf_like.cluster.wait import wait_for

logger = logging.getLogger(__name__)


class WorkerGroup:
    """``len(slots)`` actors of one class, with the rendezvous that torch.distributed reads from the environment.

    Before the class's constructor runs, each process has RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR
    (rank 0's node) and MASTER_PORT (free there) set. LOCAL_RANK is 0 where Ray shows a process one GPU only, else its
    index on its node.

    The constructor returns as soon as the processes run; models load in the background and ``ready()`` (or the first
    call) waits for them, so that several groups and engines load at the same time.

    Args:
        cls: plain class, importable in the workers.
        slots: where each rank goes (``Placement.slots(role)``).
        name: role, for messages: "actor", "ref", ...
        args, kwargs: the constructor's, equal on all ranks.
        kwargs_each: further keyword arguments a rank.
        env: environment variables the processes start with.
        max_concurrency: calls at the same time on a rank.
        timeout, flag: limit for starting and loading.
    """

    def __init__(
        self,
        cls: type,
        slots: Sequence[Slot],
        *,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        kwargs_each: Sequence[Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        max_concurrency: int | None = None,
        timeout: float = 1200.0,
        flag: str = "timeout.init",
    ) -> None:
        if not slots:
            raise ValueError(f"worker group {name}: no slots")
        self.name = name
        self._timeout, self._flag = timeout, flag
        self._ready = False
        self.workers = [
            RemoteActor(
                cls,
                f"{name} rank {rank}",
                slot,
                env=env,
                max_concurrency=max_concurrency,
                log_level=logging.INFO if rank == 0 else logging.WARNING,
            )
            for rank, slot in enumerate(slots)
        ]
        try:
            self._build(args, dict(kwargs or {}), kwargs_each)
        except BaseException:
            self.kill()
            raise

    def _build(
        self, args: Sequence[Any], kwargs: dict[str, Any], kwargs_each: Sequence[Mapping[str, Any]] | None
    ) -> None:
        places = [worker.locate(self._timeout, self._flag) for worker in self.workers]
        port = self.workers[0].free_port(self._timeout, self._flag)
        for worker, variables, own in zip(
            self.workers, rendezvous(places, port), kwargs_each or [{}] * len(places), strict=True
        ):
            worker.build(variables, *args, **{**kwargs, **own})

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def handles(self) -> list[Any]:
        """Ray actor handles by rank, for code that passes them to other actors."""
        return [worker.handle for worker in self.workers]

    @property
    def places(self) -> list[NodeInfo]:
        """Where each rank runs."""
        return [worker.locate(self._timeout, self._flag) for worker in self.workers]

    def ready(self, timeout: float | None = None) -> None:
        """Wait for every rank's constructor; on failure the group is killed and the first error raised."""
        if self._ready:
            return
        refs = [worker.take_build_ref() for worker in self.workers]
        try:
            self._wait(refs, "load and get ready", self._timeout if timeout is None else timeout, self._flag)
        except BaseException:
            self.kill()
            raise
        self._ready = True

    def call_async(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``method`` with equal arguments on every rank; object references by rank."""
        self.ready()
        return [worker.submit(method, *args, **kwargs) for worker in self.workers]

    def call_each_async(self, method: str, args_each: Sequence[Any], **kwargs: Any) -> list[Any]:
        """Start ``method`` on every rank with its own arguments: rank r gets ``args_each[r]`` (a tuple is unpacked)."""
        self.ready()
        if len(args_each) != len(self.workers):
            raise ValueError(f"{self.name}.{method}: {len(args_each)} argument sets for {len(self.workers)} workers")
        return [
            worker.submit(method, *(args if isinstance(args, tuple) else (args,)), **kwargs)
            for worker, args in zip(self.workers, args_each, strict=True)
        ]

    def call(
        self, method: str, *args: Any, timeout: float, flag: str, what: str | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run ``method`` on every rank; results by rank. See ``wait_for`` for what it raises."""
        return self._wait(self.call_async(method, *args, **kwargs), what or method, timeout, flag)

    def call_each(
        self,
        method: str,
        args_each: Sequence[Any],
        *,
        timeout: float,
        flag: str,
        what: str | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``method`` on every rank with its own arguments; results by rank."""
        return self._wait(self.call_each_async(method, args_each, **kwargs), what or method, timeout, flag)

    def wait(
        self,
        refs: Sequence[Any],
        what: str,
        timeout: float,
        flag: str,
        on_done: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """Wait for references of ``call_async``, one a rank."""
        return self._wait(list(refs), what, timeout, flag, on_done)

    def _wait(
        self,
        refs: Sequence[Any],
        what: str,
        timeout: float,
        flag: str,
        on_done: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        return wait_for(
            list(refs),
            what,
            timeout,
            flag,
            names=[worker.label for worker in self.workers],
            explain=lambda i, error: self.workers[i].explain_death(i, error),
            on_done=on_done,
        )

    def kill(self) -> None:
        """End every process of the group at once."""
        for worker in self.workers:
            worker.kill()


def rendezvous(places: Sequence[NodeInfo], port: int) -> list[dict[str, str]]:
    """torch.distributed's environment for ranks that run at ``places``."""
    seen: dict[str, int] = {}
    local_ranks = []
    for place in places:
        local_ranks.append(seen.get(place.node_id, 0))
        seen[place.node_id] = local_ranks[-1] + 1
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            # Ray shows a process with one GPU only that one, as device 0.
            "LOCAL_RANK": "0" if len(place.gpu_ids) == 1 else str(local_ranks[rank]),
            "LOCAL_WORLD_SIZE": str(seen[place.node_id]),
            "MASTER_ADDR": places[0].ip,
            "MASTER_PORT": str(port),
        }
        for rank, place in enumerate(places)
    ]
