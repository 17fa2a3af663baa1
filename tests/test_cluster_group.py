"""Worker groups, actors and waits on one real Ray that all tests of this file share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Namespace

import psutil
import pytest

from openrlhf_like.cluster import WorkerDied, WorkerFailed, WorkerGroup, ray_session, start_actor, wait_for
from openrlhf_like.types import UserError, WaitTimeout

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(300)
LIMIT = {"timeout": 60, "flag": "timeout.collective"}


class Worker:
    """Says what it was given; can fail in the ways workers fail."""

    def __init__(self, common: int, own: str = "") -> None:
        if own == "refuse":
            raise UserError("--model.name x: no such model; give another")
        self.common, self.own, self.rank = common, own, int(os.environ["RANK"])

    def describe(self, extra: int = 0) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        names += ("OMP_NUM_THREADS", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "EXTRA")
        return {"common": self.common, "own": self.own, "extra": extra, **{n: os.environ.get(n) for n in names}}

    def fail_on_one(self) -> None:
        if self.rank == 1:
            raise ValueError("rank one is unwell")
        time.sleep(5)

    def refuse(self) -> None:
        raise UserError("--data.path x: no such file; give another")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        if self.rank == 1:
            sys.stderr.write("these are my last words\n")
            sys.stderr.flush()
            os._exit(7)
        time.sleep(5)

    def pid(self) -> int:
        return os.getpid()


class Async:
    """An actor whose calls overlap."""

    async def generate(self, i: int) -> int:
        await asyncio.sleep(0.3)
        return i


def config(workers: int = 2) -> Namespace:
    timeout = Namespace(shutdown=15.0, placement=60.0, init=120.0)
    return Namespace(device="cpu", timeout=timeout, train=Namespace(num_nodes=1, num_gpus_per_node=workers))


@pytest.fixture(scope="module")
def session():
    with ray_session(config()) as session:
        yield session


@pytest.fixture(scope="module")
def group(session):
    group = WorkerGroup(
        Worker,
        session.placement.slots("actor"),
        name="actor",
        args=(5,),
        kwargs_each=[{"own": "a"}, {"own": "b"}],
        env={"EXTRA": "yes", "OMP_NUM_THREADS": "3"},
    )
    yield group
    group.kill()


def test_each_rank_gets_its_arguments_environment_and_one_rendezvous(group):
    first, second = group.call("describe", **LIMIT)
    assert (first["common"], first["own"], second["own"]) == (5, "a", "b")
    assert [r["RANK"] for r in (first, second)] == ["0", "1"] == [r["LOCAL_RANK"] for r in (first, second)]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] and first["MASTER_ADDR"] == second["MASTER_ADDR"]
    assert second["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert (first["EXTRA"], first["OMP_NUM_THREADS"]) == ("yes", "3")
    assert (first["DS_ACCELERATOR"], first["CUDA_VISIBLE_DEVICES"]) == ("cpu", ""), "a CPU run leaves GPUs alone"


def test_call_each_gives_every_rank_its_own_argument(group):
    assert [r["extra"] for r in group.call_each("describe", [7, (8,)], **LIMIT)] == [7, 8]
    with pytest.raises(ValueError, match="1 argument sets for 2 workers"):
        group.call_each("describe", [7], **LIMIT)


def test_an_error_on_rank_1_is_raised_at_once_while_rank_0_still_works(group):
    group.call("pid", **LIMIT)
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"actor rank 1 \(pid \d+ on .*\) failed to add up: ValueError: .* unwell"):
        group.call("fail_on_one", what="add up", **LIMIT)
    assert time.monotonic() - start < 4


def test_a_user_error_in_a_worker_arrives_as_itself(group):
    with pytest.raises(UserError, match="--data.path x: no such file; give another"):
        group.call("refuse", **LIMIT)


def test_a_wait_that_passes_its_limit_says_who_waited_for_whom_how_long_and_which_flag(group):
    group.call("pid", **LIMIT)
    with pytest.raises(WaitTimeout) as error:
        group.call_each("sleep", [0.0, 3.0], what="add up the gradients", timeout=1, flag="timeout.collective")
    message = str(error.value)
    assert "waited 1 s for actor rank 1 (pid " in message and "rank 0" not in message
    assert "add up the gradients" in message and "--timeout.collective" in message


def test_a_dead_worker_is_named_with_the_end_of_its_stderr(session):
    group = WorkerGroup(Worker, [None, None], name="critic", args=(1,))
    try:
        with pytest.raises(WorkerDied, match=r"critic rank 1 \(pid \d+ on .*\) died") as error:
            group.call("die", **LIMIT)
        assert "these are my last words" in str(error.value)
    finally:
        group.kill()


def test_a_constructor_that_refuses_raises_its_own_error_and_leaves_no_process(session):
    group = WorkerGroup(Worker, [None, None], name="ref", args=(1,), kwargs_each=[{}, {"own": "refuse"}])
    pids = [place.pid for place in group.places]
    with pytest.raises(UserError, match="no such model"):
        group.ready()
    _gone(pids)


def test_calls_of_an_async_actor_overlap_and_keep_their_order(session):
    actor = start_actor(Async, "engine 0")
    actor.ready(120)
    start = time.monotonic()
    done = []
    refs = [actor.submit("generate", i) for i in range(30)]
    results = wait_for(refs, "generate", 60, "timeout.generate", on_done=lambda k, n: done.append((k, n)))
    assert results == list(range(30))
    assert time.monotonic() - start < 5 < 30 * 0.3
    assert done[-1] == (30, 30)
    actor.kill()
    actor.kill()


def test_a_session_inside_a_running_ray_ends_its_own_actors_only(session, group):
    with ray_session(config(1)) as inner:
        mine = WorkerGroup(Worker, inner.placement.slots("actor"), name="inner", args=(1,))
        pids = mine.call("pid", **LIMIT)
    _gone(pids)
    assert len(group.call("pid", **LIMIT)) == 2


def test_fault_33_a_plan_that_the_machine_cannot_hold_is_refused_before_anything_starts(session, group):
    with pytest.raises(UserError, match=r"this run asks for 4000 worker processes .* lower --train.num_gpus_per_node"):
        with ray_session(config(4000)):
            pytest.fail("the session started")
    assert len(group.call("pid", **LIMIT)) == 2, "the refusal touched nobody else's actors"


def test_a_command_that_joins_a_cluster_ends_its_workers_and_leaves_the_cluster(session, group, tmp_path):
    import ray

    path = tmp_path / "pids.json"
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = subprocess.Popen([sys.executable, str(HERE / "cluster_command.py"), str(path), "hang"], env=env)
    until = time.monotonic() + 120
    while not path.exists():
        assert command.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    pids = json.loads(path.read_text())
    command.send_signal(signal.SIGTERM)
    assert command.wait(15) == 143
    _gone(pids)
    assert len(group.call("pid", **LIMIT)) == 2


def _gone(pids: list[int], limit: float = 15) -> None:
    until = time.monotonic() + limit
    while [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < until, f"still running after {limit} s: {pids}"
        time.sleep(0.1)
