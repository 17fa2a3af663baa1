"""Signals, exit codes, environments, ports and log lines, without Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from openrlhf_like.cluster import bundles, environment, logs, nodes, signals
from openrlhf_like.cluster.group import rendezvous
from openrlhf_like.cluster.nodes import NodeInfo
from openrlhf_like.types import TrainingAborted, UserError, WaitTimeout


@pytest.fixture
def hangup_not_ignored():
    """As in a terminal, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stop_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            signals.raise_if_received()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_stop_signal_raises_in_the_main_thread_and_gives_its_exit_code(signum, code, hangup_not_ignored):
    def body():
        os.kill(os.getpid(), signum)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as error, signals.stop_signals():
        body()
    assert time.monotonic() - start < 2
    assert isinstance(error.value, signals.Terminated) == (signum != signal.SIGINT)
    assert signals.exit_status(error.value) == code
    assert signals.exit_status(KeyboardInterrupt()) == code, "libraries turn it into a plain KeyboardInterrupt"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_earlier_runs_signal_does_not_stop_a_later_run_in_the_same_process():
    with pytest.raises(KeyboardInterrupt), signals.stop_signals():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    with signals.stop_signals():
        signals.raise_if_received()


def test_a_signal_during_cleanup_is_raised_after_it():
    finished = False
    with pytest.raises(signals.Terminated), signals.stop_signals(), signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        finished = True
    assert finished


def test_a_second_ctrl_c_kills_at_once_but_a_forwarded_twin_does_not():
    script = (
        "import os, signal, sys, time\n"
        "from openrlhf_like.cluster import signals\n"
        "with signals.stop_signals():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    except KeyboardInterrupt:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(0.9); print('alive', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(9); print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "alive\n")


@pytest.mark.parametrize(
    "error, code", [(UserError("x"), 2), (WaitTimeout("x"), 1), (TrainingAborted("x"), 1), (None, 0)]
)
def test_run_command_gives_the_exit_code_and_one_line(error, code, capsys):
    def body():
        if error is not None:
            raise error

    assert signals.run_command(body) == code
    assert capsys.readouterr().err == ("" if error is None else "error: x\n")


def test_ranks_of_one_node_are_counted_from_zero_and_meet_at_rank_0():
    places = [NodeInfo("10.0.0.1", "a", 1), NodeInfo("10.0.0.1", "a", 2), NodeInfo("10.0.0.2", "b", 3)]
    envs = rendezvous(places, 29500)
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in envs] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert {e["MASTER_ADDR"] for e in envs} == {"10.0.0.1"} and {e["MASTER_PORT"] for e in envs} == {"29500"}


def test_a_process_that_sees_one_gpu_calls_it_device_0():
    places = [NodeInfo("h", "a", 1, gpu_ids=("4",)), NodeInfo("h", "a", 2, gpu_ids=("5",))]
    assert [e["LOCAL_RANK"] for e in rendezvous(places, 1)] == ["0", "0"]


def test_bundles_of_a_node_become_neighbouring_ranks():
    assert bundles.by_node({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 2, 1, 3]
    assert bundles.by_node({0: "z", 1: "a"}) == [0, 1], "nodes in the order of their first bundle"


def test_free_ports_can_be_bound_and_lie_below_the_ephemeral_range():
    for _ in range(5):
        port = nodes.free_port()
        assert 20000 <= port < 32000
        with socket.socket() as sock:
            sock.bind(("", port))


def test_workers_get_the_users_settings_but_no_tracker_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    env = environment.worker_environment("cuda")
    assert "secret" not in env.values() and env["HF_HOME"] == "/models"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG", "what the user set wins"
    assert "DS_ACCELERATOR" not in env and "CUDA_VISIBLE_DEVICES" not in env
    assert env["PYTHONPATH"].split(os.pathsep)[0] == os.getcwd()


def test_threads_are_shared_between_the_processes_of_a_role(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment.threads_environment(2, 8) == {"OMP_NUM_THREADS": "4"}
    assert environment.threads_environment(4, 2) == {"OMP_NUM_THREADS": "1"}
    assert environment.threads_environment(2, 8, {"OMP_NUM_THREADS": "7"}) == {"OMP_NUM_THREADS": "7"}


def test_worker_output_is_shown_by_role_without_noise():
    logs.name_process(17, "actor rank 0")
    lines = ["[Gloo] Rank 0 is connected to 1 peer ranks", "", "loaded", ":actor_name:W"]
    assert logs.shown_lines({"pid": 17, "lines": lines}) == ["[actor rank 0] loaded"]
    assert logs.shown_lines({"pid": 18, "actor_name": "W", "lines": ["x"]}) == ["[W] x"]
    assert logs.shown_lines({"pid": "autoscaler", "lines": ["Resources"]}) == []


def test_importing_the_package_imports_neither_ray_nor_torch():
    script = "import sys, openrlhf_like.cluster; print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
