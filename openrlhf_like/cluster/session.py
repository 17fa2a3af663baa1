"""The Ray of one command: found or started, used, and gone when the command ends, however it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil

from openrlhf_like.cluster import environment, logs, nodes, processes, signals
from openrlhf_like.cluster.placement import PlacementPlan, check_supply, plan_placement
from openrlhf_like.cluster.watcher import Watcher
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

_MAX_TEMP_BASE = 40  # Ray adds about 60 characters for its sockets; AF_UNIX paths end at 107
_GIB = 2**30
_EXIT_SECONDS = 3.0  # of --timeout.shutdown, for exit hooks after the cleanup


class RaySession:
    """What a command holds while Ray is up; made by ``ray_session``.

    Attributes:
        device: "cpu" or "cuda".
        plan: the placement plan of the configuration.
        owned: whether this session started Ray (else it joined one).
        placement: the placement groups, made on first use.
    """

    def __init__(self, device: str, plan: PlacementPlan, timeouts: Any) -> None:
        self.device = device
        self.plan = plan
        self.owned = False
        self._timeouts = timeouts
        self._placement: Any = None
        self._mark = uuid.uuid4().hex
        self._roots: list[psutil.Process] = []
        self._temp_dir: str | None = None
        self._watcher: Watcher | None = None
        self._joined = False
        self._started = False
        self._actors_before = 0

    @property
    def placement(self) -> Any:
        """``bundles.Placement`` of the plan; the first use waits for Ray, at most ``--timeout.placement`` seconds."""
        if self._placement is None:
            from openrlhf_like.cluster.bundles import Placement

            self._placement = Placement(self.plan, self._timeouts.placement)
        return self._placement

    def threads(self, num_processes: int) -> dict[str, str]:
        """OMP_NUM_THREADS for one of ``num_processes`` workers of a role on this machine."""
        return environment.threads_environment(num_processes, nodes.cpu_count())

    # -- start ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the Ray of RAY_ADDRESS, or start one here. Raises UserError when it cannot hold the plan."""
        address = _ray_address()
        if address.startswith("ray://"):
            raise UserError(
                f"RAY_ADDRESS={address} is a Ray Client address, which this command cannot use; start it on a node of "
                "the cluster with RAY_ADDRESS=<head>:6379, or with `ray job submit`"
            )
        local = address in ("", "local")
        if local:
            check_supply(self.plan, [_local_supply(self.device, self.plan)], "this machine")
        with _environ({**environment.ray_environment(), processes.MARK: self._mark}):
            import ray

            from openrlhf_like.cluster import host

            self._actors_before = host.live_count()
            self._started = True
            if ray.is_initialized():
                self._joined = True
            else:
                signals.set_force_action(self._kill_everything)
                self._init(ray, address, local)
        if not local or self._joined:
            check_supply(self.plan, [n["Resources"] for n in ray.nodes() if n["Alive"]], "the cluster")

    def _init(self, ray: Any, address: str, local: bool) -> None:
        variables = {**environment.worker_environment(self.device), processes.MARK: self._mark}
        options: dict[str, Any] = {
            "runtime_env": {"env_vars": variables},
            "logging_level": logging.ERROR,
            "log_to_driver": True,
            "namespace": f"openrlhf_like-{self._mark[:8]}",
        }
        self._temp_dir = _make_temp_dir() if local else None
        self._watcher = Watcher(self._mark, self._temp_dir)
        if local:
            supply = _local_supply(self.device, self.plan)
            options.update(
                address="local",
                num_cpus=int(supply["CPU"]),
                num_gpus=int(supply["GPU"]),
                include_dashboard=False,
                _temp_dir=self._temp_dir,
            )
            store = _object_store_bytes(self.device)
            if store is not None:
                options["object_store_memory"] = store
        else:
            options["address"] = address
            # `ray job submit` may bring a runtime environment of its own: ours is laid over it.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        before = {p.pid for p in psutil.Process().children()}
        try:
            ray.init(**options)
        except (ConnectionError, ValueError) as error:
            if local:
                raise
            raise UserError(
                f"RAY_ADDRESS={address}: no Ray cluster to join ({_line(error)}); start one, or unset RAY_ADDRESS"
            ) from error
        except SystemExit as error:  # Ray's own SIGTERM handler, set while it starts
            signals.note_received(signal.SIGTERM)
            raise signals.Terminated("SIGTERM") from error
        finally:
            self._roots = [
                p for p in psutil.Process().children() if p.pid not in before and not _is_watcher(p, self._watcher)
            ]
            signals.install_handlers()
        self.owned = local
        logs.route_worker_logs()

    # -- end -----------------------------------------------------------------------------------------------------

    def close(self, failed: bool) -> None:
        """End every process this session started, within ``--timeout.shutdown`` seconds, whatever state Ray is in."""
        if not self._started:
            return
        limit = max(2.0, float(self._timeouts.shutdown) - _EXIT_SECONDS)
        start = time.monotonic()
        mine = self._mine() if not self._joined else set()
        left_ray = self._say_goodbye(limit * 0.4)
        if self._joined:
            return
        if not left_ray or signals.received() is not None:
            # Ray's exit hook would wait for servers that are gone
            signals.exit_soon(_exit_code(), _EXIT_SECONDS)
        left = max(1.0, limit - (time.monotonic() - start))
        stuck = processes.reap(mine | self._mine(), grace=min(2.0, left / 3), limit=left)
        if stuck:
            logger.error("processes that would not end: %s", [p.pid for p in stuck])
        actors = {int(pid) for pid in logs.named_pids()}
        processes.drop_shared_memory({p.pid for p in mine} | {pid for pid in actors if not psutil.pid_exists(pid)})
        if self._watcher is not None:
            self._watcher.dismiss()
        signals.set_force_action(None)
        self._drop_temp_dir(keep=failed)

    def _say_goodbye(self, limit: float) -> bool:
        """Kill the actors and leave Ray in its own way; False when it does not answer within ``limit`` seconds.

        A thread does it: Ray's calls block for ever when its server is gone already, which is what a signal to the
        whole process group does (``timeout``, SLURM).
        """
        goodbye = threading.Thread(target=self._leave_ray, name="leave-ray", daemon=True)
        goodbye.start()
        until = time.monotonic() + limit
        while goodbye.is_alive() and time.monotonic() < until:
            goodbye.join(0.1)
            if self.owned and not all(processes.alive(p) for p in self._roots):
                goodbye.join(1.0)  # its servers are ending: either Ray is nearly through, or it never will be
                break
        return not goodbye.is_alive()

    def _leave_ray(self) -> None:
        import ray

        from openrlhf_like.cluster import host

        host.kill_live(self._actors_before)
        if self._placement is not None:
            self._placement.remove()
        if not self._joined:
            ray.shutdown()

    def _mine(self) -> set[psutil.Process]:
        return processes.tree(self._roots) | processes.marked(self._mark)

    def _kill_everything(self) -> None:
        processes.kill_now(self._mine())

    def _drop_temp_dir(self, keep: bool) -> None:
        if self._temp_dir is None:
            return
        if keep:
            logger.error("the workers' logs are kept in %s/session_latest/logs", self._temp_dir)
        else:
            shutil.rmtree(self._temp_dir, ignore_errors=True)


def check_demand(cfg: Any) -> None:
    """Refuse what this machine can never hold, before data is read and Ray starts. A cluster is asked once joined.

    Raises:
        UserError: naming the flags to lower; the table of demand and supply is logged before it.
    """
    if _ray_address() in ("", "local"):
        plan = plan_placement(cfg)
        check_supply(plan, [_local_supply(_device(cfg), plan)], "this machine")


def _ray_address() -> str:
    return os.environ.get("RAY_ADDRESS", "").strip()


def _device(cfg: Any) -> str:
    return "cpu" if cfg.device == "cpu" else "cuda"


def _local_supply(device: str, plan: PlacementPlan) -> dict[str, float]:
    cores = float(nodes.cpu_count())
    if device == "cpu":
        return {"CPU": cores, "GPU": 0.0}
    # One logical CPU a GPU is bookkeeping; a machine with fewer cores than that still runs.
    return {"CPU": max(cores, float(int(plan.total()["CPU"]) + 1)), "GPU": float(nodes.gpu_count())}


@contextlib.contextmanager
def ray_session(cfg: Any, plan: PlacementPlan | None = None) -> Iterator[RaySession]:
    """The Ray of one command.

    RAY_ADDRESS set: that cluster is joined; its workers of this run end with it, the cluster stays. Not set: a Ray is
    started here and stopped at the end. When Ray is up in this process already, it is used and left running, and only
    the actors and placement groups made inside the block end with it.

    Inside the block SIGTERM raises ``signals.Terminated`` and Ctrl-C KeyboardInterrupt; a second Ctrl-C kills what is
    left and ends the process at once. All processes started here are gone within ``--timeout.shutdown`` seconds of the
    block's end, and within seconds of the driver's death by SIGKILL.

    Args:
        cfg: a resolved configuration: ``device``, ``timeout`` and what ``plan_placement`` reads.
        plan: the placement plan, where the caller has it already.

    Raises:
        UserError: the machine or cluster cannot hold the plan, or RAY_ADDRESS leads nowhere.
    """
    session = RaySession(_device(cfg), plan or plan_placement(cfg), cfg.timeout)
    failed = False
    with signals.stop_signals():
        try:
            session.start()
            yield session
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException:
            failed = True
            raise
        finally:
            with signals.deferred():
                session.close(failed)


@contextlib.contextmanager
def _environ(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _make_temp_dir() -> str:
    """A short, private folder for Ray's sockets and logs; RAY_TMPDIR chooses its parent."""
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(base) > _MAX_TEMP_BASE:
        logger.info("%s is too long a path for Ray's sockets; using /tmp", base)
        base = "/tmp"
    os.makedirs(base, exist_ok=True)
    return tempfile.mkdtemp(prefix="orl-", dir=base)


def _object_store_bytes(device: str) -> int | None:
    """Shared memory for Ray's objects: bounded by free memory and by /dev/shm; None leaves Ray's default (30%)."""
    if device != "cpu":
        return None
    limit = min(4 * _GIB, psutil.virtual_memory().available // 5)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            limit = min(limit, int(shutil.disk_usage("/dev/shm").free * 0.8))
    return max(limit, _GIB // 8)


def _exit_code() -> int:
    signum = signals.received()
    return 1 if signum is None else 128 + signum


def _is_watcher(process: psutil.Process, watcher: Watcher | None) -> bool:
    return watcher is not None and process.pid == watcher.pid


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
