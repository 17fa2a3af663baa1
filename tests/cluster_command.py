"""A command for the signal tests: two workers, one with children of its own, listed in a file; then a call that hangs.

Run as ``python cluster_command.py PIDS_FILE MODE``; MODE is "hang" (until a signal) or "raise".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Namespace

import psutil

from openrlhf_like.cluster import WorkerGroup, ray_session, run_command


class Parent:
    """A worker that starts children, one of which moves to a session of its own with an empty environment."""

    def pids(self, spawn: bool) -> list[int]:
        out = [os.getpid()]
        Path(f"/dev/shm/openrlhf_like_{os.getpid()}_test").touch()
        if spawn:
            out.append(subprocess.Popen(["sleep", "600"]).pid)
            out.append(subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid)
        return out

    def hang(self) -> None:
        time.sleep(600)


def main() -> None:
    path, mode = sys.argv[1:]
    timeout = Namespace(shutdown=15.0, placement=120.0, init=120.0)
    config = Namespace(device="cpu", timeout=timeout, train=Namespace(num_nodes=1, num_gpus_per_node=2))
    with ray_session(config) as session:
        group = WorkerGroup(Parent, session.placement.slots("actor"), name="actor", timeout=120)
        pids = sum(group.call_each("pids", [True, False], timeout=60, flag="timeout.init"), [])
        pids += [p.pid for p in psutil.Process().children(recursive=True)]
        time.sleep(8)  # the watcher looks every two seconds, on a busy machine later
        with open(path + ".part", "w") as file:
            json.dump(sorted(set(pids)), file)
        os.rename(path + ".part", path)
        if mode == "raise":
            raise RuntimeError("the run failed")
        group.call("hang", timeout=600, flag="timeout.collective")


if __name__ == "__main__":
    sys.exit(run_command(main))
