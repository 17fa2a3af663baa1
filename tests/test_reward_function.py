"""Rewards from a user's Python file: the contract, and what happens when the file misbehaves."""

from __future__ import annotations

import asyncio
import textwrap
import time

import pytest

from openrlhf_like.reward.base import RewardRequest
from openrlhf_like.reward.function import FunctionReward
from openrlhf_like.types import UserError, WaitTimeout


def request(n: int, labels=None, metadata=None) -> RewardRequest:
    labels = labels if labels is not None else [str(i) for i in range(n)]
    prompts = [f"p{i}:" for i in range(n)]
    return RewardRequest([f"{p}r{i}" for i, p in enumerate(prompts)], prompts, labels, metadata=metadata or [])


@pytest.fixture
def make(tmp_path):
    made = []

    def build(body: str, **options) -> FunctionReward:
        path = tmp_path / f"reward_{len(made)}.py"
        path.write_text(textwrap.dedent(body))
        made.append(FunctionReward(str(path), **{"limit_s": 20.0, "load_limit_s": 30.0, **options}))
        return made[-1]

    yield build
    for reward in made:
        reward.close()


def score(reward: FunctionReward, batch: RewardRequest):
    return asyncio.run(reward.score(batch))


def test_openrlhf_contract_dict_of_rewards_scores_and_logs(make):
    reward = make("""
        def reward_func(queries, prompts, labels):
            assert queries == ["p0:r0", "p1:r1"] and prompts == ["p0:", "p1:"]
            return {"rewards": [float(x) for x in labels], "scores": [5, 6],
                    "extra_logs": {"length": [2, 3], "note": ["a", "b"], "all": 7}}
    """)
    first, second = score(reward, request(2))
    assert (first.reward, first.score, second.reward, second.score) == (0.0, 5.0, 1.0, 6.0)
    assert first.metrics == {"length": 2.0, "all": 7.0} and second.logs == {"note": "b"}


@pytest.mark.parametrize("expression", [
    "[1, 2.5]", "(1, 2.5)", "np.array([1, 2.5])", "[np.float32(1), np.float64(2.5)]", "np.array([[1], [2.5]])",
    '{"rewards": np.array([1, 2.5])}', "later([1, 2.5])",
])  # fmt: skip
def test_answers_may_be_lists_arrays_or_awaited(make, expression):
    reward = make(f"""
        import asyncio
        import numpy as np
        async def later(x):
            await asyncio.sleep(0)
            return x
        def reward_func(queries, prompts, labels):
            return {expression}
    """)
    results = score(reward, request(2))
    assert [r.reward for r in results] == [1.0, 2.5] and [r.score for r in results] == [1.0, 2.5]


def test_tensors_on_the_way_out(make):
    reward = make("""
        import torch
        async def reward_func(queries, prompts, labels, **kwargs):
            values = torch.tensor([0.5, 1.0], requires_grad=True)
            return {"rewards": values, "scores": list(values), "extra_logs": {"dummy": values}}
    """)
    results = score(reward, request(2))
    assert [(r.reward, r.score, r.metrics["dummy"]) for r in results] == [(0.5, 0.5, 0.5), (1.0, 1.0, 1.0)]


def test_extra_arguments_only_where_the_function_takes_them(make):
    metadata = [{"level": 3, "datasource": "gsm"}, {"level": 4}]
    named = make("""
        def reward_func(queries, prompts, labels, level, responses=None):
            assert responses == ["r0", "r1"]
            return level
    """)
    everything = make("""
        def reward_func(queries, prompts, labels, **kwargs):
            assert sorted(kwargs) == ["datasource", "level", "metadata", "responses"], sorted(kwargs)
            assert kwargs["datasource"] == ["gsm", None]
            return [m["level"] for m in kwargs["metadata"]]
    """)
    for reward in (named, everything):
        assert [r.reward for r in score(reward, request(2, metadata=metadata))] == [3.0, 4.0]


def test_the_file_may_import_its_neighbours_and_keep_state(make, tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("calls = []\n")
    reward = make("""
        import neighbour_of_reward
        def reward_func(queries, prompts, labels):
            neighbour_of_reward.calls.append(1)
            return [len(neighbour_of_reward.calls)] * len(queries)
    """)

    async def twice():
        return await reward.score(request(1)), await reward.score(request(1))

    first, second = asyncio.run(twice())
    assert (first[0].reward, second[0].reward) == (1.0, 2.0)


@pytest.mark.parametrize("returned, said", [
    ("[1.0]", "1 value as rewards for 3 samples"),
    ("1.0", "1 value as rewards for 3 samples"),
    ("[1.0] * 4", "4 values as rewards for 3 samples"),
    ("{'scores': [1, 2, 3]}", 'a dict without "rewards"'),
    ("{'rewards': [1, 2, 3], 'scores': [1]}", "1 value as scores for 3 samples"),
    ("{'rewards': [1, 2, 3], 'extra_logs': {'x': [1, 2]}}", "2 values as extra_logs['x'] for 3 samples"),
    ("None", "1 value as rewards for 3 samples"),
    ("'good'", "rewards of type str"),
])  # fmt: skip
def test_fault_26_wrong_count_is_an_error_that_names_the_function_and_the_file(make, returned, said):
    reward = make(f"def reward_func(queries, prompts, labels):\n    return {returned}\n")
    with pytest.raises(UserError) as caught:
        score(reward, request(3))
    message = str(caught.value)
    assert "reward_func" in message and reward.path in message and said in message and "\n" not in message


@pytest.mark.parametrize("bad", ["None", "float('nan')", "float('inf')", "-float('inf')", "'seven'", "10 ** 400"])
def test_fault_26_none_or_nan_for_one_of_eight_excludes_that_one_only(make, bad):
    reward = make(f"""
        def reward_func(queries, prompts, labels):
            return [{bad} if x == "3" else 1.0 for x in labels]
    """)
    results = score(reward, request(8))
    assert [i for i, r in enumerate(results) if r.error] == [3]
    assert results[3].reward is None and results[3].excluded
    assert all(r.reward == 1.0 for i, r in enumerate(results) if i != 3)


def test_fault_27_one_that_raises_costs_its_own_sample_only(make):
    reward = make("""
        def reward_func(queries, prompts, labels):
            return [10 / int(x) for x in labels]
    """)
    results = score(reward, request(8))
    assert [i for i, r in enumerate(results) if r.error] == [0]
    assert "ZeroDivisionError" in results[0].error and "reward_0.py:3" in results[0].error
    assert not results[0].excluded and results[5].reward == 2.0


def test_fault_27_one_that_sleeps_for_ever_is_killed_and_found_within_twice_the_limit(make):
    reward = make("""
        import time
        def reward_func(queries, prompts, labels):
            if "5" in labels:
                time.sleep(10_000)
            return [1.0] * len(labels)
    """, limit_s=5.0)

    async def run():
        await reward.check()
        started = time.monotonic()
        results = await reward.score(request(8))
        return results, time.monotonic() - started

    results, seconds = asyncio.run(run())
    assert seconds < 2 * 5.0 + 2
    assert [i for i, r in enumerate(results) if r.error] == [5]
    assert "--timeout.reward" in results[5].error and "in reward_func" in results[5].error


def test_fault_27_all_that_sleep_for_ever_end_within_twice_the_limit(make):
    reward = make("import time\ndef reward_func(queries, prompts, labels):\n    time.sleep(10_000)\n", limit_s=1.0)

    async def run():
        await reward.check()
        started = time.monotonic()
        results = await reward.score(request(64))
        return results, time.monotonic() - started

    results, seconds = asyncio.run(run())
    assert seconds < 2 * 1.0 + 1.5
    assert len(results) == 64 and all("--timeout.reward" in r.error for r in results)


def test_fault_27_raising_and_hanging_samples_in_one_batch_are_told_apart_within_twice_the_limit(make):
    reward = make("""
        import time
        def reward_func(queries, prompts, labels):
            if "0" in labels:
                raise ValueError("a bad label")
            if "2" in labels:
                time.sleep(10_000)
            return [1.0] * len(labels)
    """, limit_s=5.0)

    async def run():
        await reward.check()
        started = time.monotonic()
        results = await reward.score(request(5))
        return results, time.monotonic() - started

    results, seconds = asyncio.run(run())
    assert seconds < 2 * 5.0 + 2
    assert "ValueError: a bad label" in results[0].error and results[1].reward == results[3].reward == 1.0
    assert results[4].reward == 1.0 and "--timeout.reward" in results[2].error


def test_fault_27_one_that_prints_10_mb_is_neither_blocked_nor_a_flood(make, caplog):
    reward = make("""
        import sys
        def reward_func(queries, prompts, labels):
            for _ in range(100):
                print("z" * 50_000)
                sys.stderr.write("e" * 50_000)
            return [1.0] * len(labels)
    """)
    with caplog.at_level("INFO"):
        results = score(reward, request(4))
    assert [r.reward for r in results] == [1.0] * 4
    assert 2000 <= sum(len(r.getMessage()) for r in caplog.records) < 2500


def test_fault_27_one_that_kills_its_process_costs_its_own_sample_only(make):
    reward = make("""
        import os
        def reward_func(queries, prompts, labels):
            if "1" in labels:
                os.kill(os.getpid(), 11)
            return [1.0] * len(labels)
    """)
    results = score(reward, request(3))
    assert [i for i, r in enumerate(results) if r.error] == [1]
    assert "signal 11" in results[1].error


@pytest.mark.parametrize("body, said", [
    ("import surely_not_installed_xyz", "surely_not_installed_xyz"),
    ("def reward_func(queries, prompts, labels)\n    pass", "SyntaxError"),
    ("def score(queries, prompts, labels):\n    return [1.0]", "no function reward_func"),
    ("reward_func = 3", "no function reward_func"),
    ("def reward_func(queries):\n    return [1.0]", "cannot be called with (queries, prompts, labels)"),
    ("raise SystemExit('set MY_KEY first')", "set MY_KEY first"),
    ("import os\nprint('on my way out', flush=True)\nos._exit(9)", "on my way out"),
])  # fmt: skip
def test_a_file_that_does_not_load_is_one_line_at_the_start(make, body, said):
    reward = make(body)
    with pytest.raises(UserError) as caught:
        asyncio.run(reward.check())
    message = str(caught.value)
    assert said in message and "--reward.remote_url" in message and reward.path in message and "\n" not in message


def test_a_file_whose_import_hangs_names_the_wait_and_the_flag(make):
    reward = make("import time\ntime.sleep(10_000)\n", load_limit_s=0.5)
    with pytest.raises(WaitTimeout, match=r"waited 0.5 s for the imports of .*--timeout.init"):
        asyncio.run(reward.check())


def test_missing_file_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="--reward.remote_url .*no such file"):
        FunctionReward(str(tmp_path / "nowhere.py"))
