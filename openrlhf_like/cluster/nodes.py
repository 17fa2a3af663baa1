"""The machine this process runs on: address, free ports, cores, accelerators."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_PORT_TRIES = 50


@dataclass(frozen=True)
class NodeInfo:
    """Where an actor runs. ``gpu_ids`` are the physical ids Ray gave it, ``stderr`` its log file on that node."""

    ip: str
    node_id: str
    pid: int
    gpu_ids: tuple[str, ...] = ()
    stderr: str | None = None


def node_ip() -> str:
    """This node's address as Ray knows it (what the other nodes reach it by)."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_port(host: str = "") -> int:
    """A TCP port that is free on this node now.

    It is taken from below the kernel's ephemeral range, so that an outgoing connection made between this call and the
    use does not land on it; falls back to any free port.

    Raises:
        OSError: no port could be bound at all.
    """
    start, count = 20000, 12000
    offset = (os.getpid() * 131 + int.from_bytes(os.urandom(2), "big")) % count
    for step in range(_PORT_TRIES):
        port = start + (offset + step * 97) % count
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((host, port))
            except OSError:
                continue
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def cpu_count() -> int:
    """Cores this process may use (cgroup quota and affinity counted)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cgroup_cores()
    return max(1, min(cores, quota) if quota else cores)


def _cgroup_cores() -> int | None:
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            limit, period = file.read().split()[:2]
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, round(int(limit) / int(period)))


def gpu_count() -> int:
    """Accelerators visible to this process; 0 where torch has no CUDA."""
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def gpu_ids() -> tuple[str, ...]:
    """Physical ids of the GPUs Ray has given the calling actor or task."""
    import ray

    return tuple(str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def stderr_path() -> str | None:
    """The file this process's stderr goes to, when it is a file (Ray workers: their log)."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if path.startswith("/") and not path.startswith("/dev/") else None


def here() -> NodeInfo:
    """Describe the calling actor's place."""
    import ray

    return NodeInfo(
        ip=node_ip(),
        node_id=ray.get_runtime_context().get_node_id(),
        pid=os.getpid(),
        gpu_ids=gpu_ids(),
        stderr=stderr_path(),
    )
