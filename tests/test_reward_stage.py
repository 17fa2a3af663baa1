"""The stage around a source: batches, counts, the failure limit; the factory; the example file; the Ray actor."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_like.reward.base import RewardFunction, RewardResult
from openrlhf_like.reward.factory import make_reward
from openrlhf_like.reward.function import FunctionReward
from openrlhf_like.reward.http import HttpReward
from openrlhf_like.reward.reward_actor import RewardActor
from openrlhf_like.reward.stage import RewardStage
from openrlhf_like.types import TrainingAborted, Trajectory, UserError

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "python" / "reward_chain_sum.py"


class ByLabel(RewardFunction):
    """Gives each sample the result that its label names, and remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def score(self, request):
        self.sizes.append(len(request))
        return [self.result(label) for label in request.labels]

    @staticmethod
    def result(label):
        if label == "fail":
            return RewardResult(error="it raised")
        if label == "none":
            return RewardResult(error="reward is None", excluded=True)
        x = float(label)
        return RewardResult(reward=x, score=2 * x, metrics={"m": 1.0}, logs={"l": "x"}, retries=1)


def trajectories(labels, **fields) -> list[Trajectory]:
    return [
        Trajectory(f"t{i}", "p", "g", [], prompt=f"prompt {i} ", response=f"response {i}", label=x, **fields)
        for i, x in enumerate(labels)
    ]


def run_block(stage, block):
    return asyncio.run(stage.score_block(block))


def config(remote_url=None, verifier=None, **reward):
    values = {"num_workers": 1, "batch_size": 64, "max_failure_fraction": 0.5, "http_retries": 3, **reward}
    return SimpleNamespace(
        reward=SimpleNamespace(remote_url=remote_url, verifier=verifier, **values),
        timeout=SimpleNamespace(reward=20.0, init=60.0),
    )


def test_results_land_on_their_trajectories_and_counts_add_up():
    source = ByLabel()
    stage = RewardStage(source, batch_size=3)
    block = trajectories(["1", "fail", "3", "none", "5"]) + trajectories(["7"], error="engine died")
    block += trajectories(["8"], reward=0.25)
    out, stats = run_block(stage, block)
    assert source.sizes == [3, 2]
    assert [t.reward for t in out] == [1.0, None, 3.0, None, 5.0, None, 0.25]
    assert [t.scores for t in out][:3] == [2.0, None, 6.0]
    assert out[0].metrics == {"m": 1.0} and out[0].logs == {"l": "x"}
    errors = [None, "reward: it raised", None, "reward: reward is None", None, "engine died", None]
    assert [t.error for t in out] == errors
    assert (stats.scored, stats.failed, stats.excluded, stats.skipped, stats.retries) == (3, 1, 1, 2, 3)
    assert block[0].reward is None, "the records that came in are unchanged"


def test_fault_27_failures_are_logged_with_their_sample(caplog):
    run_block(RewardStage(ByLabel()), trajectories(["1", "fail"]))
    (record,) = [r.getMessage() for r in caplog.records]
    assert all(part in record for part in ("t1", "it raised", "prompt 1 ", "response 1"))


def test_fault_27_many_failures_are_logged_in_few_lines(caplog):
    run_block(RewardStage(ByLabel(), max_failure_fraction=1.0), trajectories(["fail"] * 100))
    assert len(caplog.records) == 6 and "95 more" in caplog.records[-1].getMessage()


def test_fault_27_too_many_failures_stop_the_run_naming_flag_count_and_error():
    stage = RewardStage(ByLabel(), max_failure_fraction=0.25, min_samples=16)
    run_block(stage, trajectories(["1"] * 12 + ["fail"] * 2 + ["none"] * 2))  # 4 of 16 is the share, not above it
    with pytest.raises(TrainingAborted) as caught:
        run_block(stage, trajectories(["1"] * 14 + ["fail"] * 6))
    message = str(caught.value)
    assert "10 of the last 36" in message and "--reward.max_failure_fraction" in message and "it raised" in message


def test_fault_27_a_source_that_breaks_late_stops_the_run_too():
    stage = RewardStage(ByLabel(), max_failure_fraction=0.5, window=4)
    for _ in range(50):
        run_block(stage, trajectories(["1"] * 8))
    with pytest.raises(TrainingAborted):
        for _ in range(3):
            run_block(stage, trajectories(["fail"] * 8))
    assert stage.total.failed == 24


def test_few_samples_are_not_judged():
    stage = RewardStage(ByLabel(), max_failure_fraction=0.0, min_samples=16)
    run_block(stage, trajectories(["fail"] * 15))
    assert stage.total.failed == 15
    with pytest.raises(TrainingAborted):
        run_block(stage, trajectories(["fail"]))


def test_counts_survive_a_resume():
    first = RewardStage(ByLabel(), max_failure_fraction=0.5)
    run_block(first, trajectories(["fail"] * 8 + ["1"] * 8))
    second = RewardStage(ByLabel(), max_failure_fraction=0.5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.total == first.total
    with pytest.raises(TrainingAborted, match="9 of the last 17"):
        run_block(second, trajectories(["fail"]))


def test_fault_26_one_nan_of_eight_leaves_seven_scored_through_the_whole_stage(tmp_path):
    path = tmp_path / "r.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return [float(x) for x in labels]\n")
    stage = RewardStage(FunctionReward(str(path), limit_s=20))
    try:
        out, stats = run_block(stage, trajectories(["1", "2", "nan", "4", "5", "6", "7", "8"]))
    finally:
        stage.source.close()
    assert (stats.scored, stats.excluded, stats.failed) == (7, 1, 0)
    assert out[2].error is not None and "nan" in out[2].error and [t.reward for t in out][3:] == [4, 5, 6, 7, 8]


def test_factory_chooses_the_source_and_refuses_what_cannot_work(tmp_path):
    (tmp_path / "a,b.py").write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)")
    for cfg, kind in (
        (config("http://a:1/x, https://b/y"), HttpReward),
        (config(str(tmp_path / "a,b.py")), FunctionReward),
    ):
        source = make_reward(cfg)
        assert isinstance(source, kind)
        source.close()
    assert make_reward(config("http://a:1/x, https://b/y")).urls == ["http://a:1/x", "https://b/y"]
    for cfg, said in (
        (config(), "--reward.remote_url"),
        (config(str(EXAMPLE), "math"), "--reward.verifier math: --reward.remote_url is given too"),
        (config(None, "physics"), "--reward.verifier physics"),
        (config("http://a/x,reward.py"), "--reward.remote_url reward.py"),
        (config(str(tmp_path / "gone.py")), "no such file"),
    ):
        with pytest.raises(UserError, match=said):
            make_reward(cfg)


def test_example_chain_sum_scores_strings_numbers_and_entries_quickly():
    pytest.importorskip("reasoning_gym")
    entry = {"question": "... 50 + 7 =", "answer": "57", "metadata": {}}
    cases = [
        (" 57<|im_end|>", "57", 1.0), ("57", 57, 1.0), ("50 + 7 = 57.", json.dumps(entry), 1.0), ("57.0", entry, 1.0),
        ("157", "57", 0.0), ("57 or 58", "57", 0.0), ("-57", "57", 0.0), ("-3", "-3", 1.0), ("", "57", 0.0),
        ("none", "57", 0.0), ("1,057", "1057", 1.0), ("57 = 12", "57", 0.0),
    ]  # fmt: skip
    block = [
        Trajectory(str(i), "p", "g", [], prompt="50 + 7 =", response=r, label=x) for i, (r, x, _) in enumerate(cases)
    ]

    async def run():
        actor = RewardActor(config(str(EXAMPLE)))
        await actor.check()
        started = time.perf_counter()
        big, _ = await actor.score((block * 6)[:64])
        seconds = time.perf_counter() - started
        scored, summaries = await actor.score(block)
        retries = await actor.retries()
        await actor.close()
        return scored, summaries, retries, seconds

    scored, summaries, retries, seconds = asyncio.run(run())
    assert [(t.response, t.label, t.reward) for t in scored] == cases
    assert [s.reward for s in summaries] == [r for *_, r in cases] == [s.score for s in summaries]
    assert all(s.error is None for s in summaries) and retries == 0
    assert seconds < 0.05 * 4, "a batch of 64 takes under 50 ms (four times that on a busy machine)"


def test_reward_actor_in_ray_returns_block_and_summaries_and_leaves_no_process(tmp_path):
    ray = pytest.importorskip("ray")
    path = tmp_path / "r.py"
    path.write_text(
        "import os\n"
        "def reward_func(queries, prompts, labels):\n"
        "    if labels[0] == 'short':\n        return [1.0]\n"
        "    return {'rewards': [1.0] * len(labels), 'extra_logs': {'pid': os.getpid()}}\n"
    )
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        actor = ray.remote(RewardActor).options(num_cpus=1).remote(config(str(path)), num_processes=1)
        ray.get(actor.check.remote(), timeout=60)
        block, summaries = actor.score.options(num_returns=2).remote(trajectories(["a", "b"]))
        assert [t.reward for t in ray.get(block, timeout=60)] == [1.0, 1.0]
        summary = ray.get(summaries, timeout=60)[0]
        assert summary.reward == 1.0
        with pytest.raises(UserError, match="1 value as rewards for 2 samples"):
            ray.get(actor.score.options(num_returns=2).remote(trajectories(["short", "b"])), timeout=60)
        child = Path(f"/proc/{int(summary.metrics['pid'])}")
        assert child.exists()
        ray.kill(actor)
        until = time.monotonic() + 10
        while child.exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert not child.exists()
    finally:
        ray.shutdown()
