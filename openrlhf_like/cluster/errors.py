"""What can go wrong with a process of the cluster, in words a person can act on."""

from __future__ import annotations


class WorkerFailed(RuntimeError):
    """A method of a worker raised: the message names it and the error; the cause has its traceback."""


class WorkerDied(WorkerFailed):
    """A worker's process is gone: the message names role, rank, pid and node, and ends with its last stderr."""
