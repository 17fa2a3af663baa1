"""The real in-process engine in a Ray actor, its weight updates and the dispatcher. One engine for the whole file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from openrlhf_like.config import make_config
from openrlhf_like.rollout.dispatch import RolloutDispatcher
from openrlhf_like.rollout.engine.engine_actor import EngineActor
from openrlhf_like.types import Prompt, SamplingSpec, Trajectory, WaitTimeout
from tests.rollout_helpers import Deaf, Trainer
from tests.tiny import build_tiny_model

MAX_LEN = 320


def make_cfg(**overrides: Any) -> Any:
    values = {
        "device": "cpu",
        "data.max_len": MAX_LEN,
        "vllm.kv_cache_gib": 0.25,
        "vllm.enable_prefix_caching": True,
        "vllm.check_weight_sync": True,
        "train.seed": 7,
    }
    return make_config("train_grpo_ray", {**values, **overrides})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    path = build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tie=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True, log_to_driver=False)
    cfg = make_cfg()
    engine = start_engine(cfg, path, 0)
    trainer = ray.remote(num_cpus=0)(Trainer).remote(cfg, path, [engine])
    ray.get(engine.ready.remote(), timeout=240)
    ray.get(engine.warmup.remote(), timeout=240)
    yield SimpleNamespace(path=path, cfg=cfg, engine=engine, trainer=trainer)
    ray.get(trainer.shutdown.remote(), timeout=30)
    ray.get(engine.shutdown.remote(), timeout=30)
    ray.shutdown()


def start_engine(cfg: Any, path: str, index: int) -> Any:
    return ray.remote(num_cpus=0, max_concurrency=64)(EngineActor).remote(cfg, path, index, {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def tokenizer(world: SimpleNamespace) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(world.path)


def prompts_of(tokenizer: Any, *texts: str) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", token_ids=tokenizer(t).input_ids, text=t, label=i, metadata={"row": i})
        for i, t in enumerate(texts)
    ]


def block(world: SimpleNamespace, prompts: list[Prompt], n: int, sampling: SamplingSpec, **kw: Any) -> list[Trajectory]:
    refs = world.engine.generate_block.options(num_returns=2).remote(prompts, n, sampling, **kw)
    return ray.get(refs, timeout=120)[0]


def sampled_ids(t: Trajectory) -> list[int]:
    return t.segments[0].token_ids[t.segments[0].action_mask == 1].tolist()


def test_fault_01_ids_trained_are_the_ids_sampled(world: SimpleNamespace, tokenizer: Any) -> None:
    prompt = prompts_of(tokenizer, "What is 1+1?")[0]
    seeds = [list(range(48))]
    trajectories = block(world, [prompt], 48, SamplingSpec(max_tokens=40), seeds=seeds)
    special = set(tokenizer.all_special_ids) - {tokenizer.eos_token_id}
    awkward = [
        t
        for t in trajectories
        if special & set(sampled_ids(t)[:-1])
        and tokenizer(tokenizer.decode(sampled_ids(t))).input_ids != sampled_ids(t)
    ]
    assert awkward, "the random model gave no answer that re-tokenizing would change"
    # The same request straight at the engine, below everything that builds trajectories.
    from openrlhf_like.rollout.engine import GenerationRequest

    for t in awkward[:3]:
        j = trajectories.index(t)
        request = GenerationRequest(f"again-{j}", prompt.token_ids, SamplingSpec(max_tokens=40, seed=seeds[0][j]))
        completion = ray.get(world.engine.generate.remote(request), timeout=60)
        segment = t.segments[0]
        assert segment.token_ids.tolist() == prompt.token_ids + completion.token_ids
        assert segment.action_mask.tolist() == [0] * len(prompt.token_ids) + [1] * len(completion.token_ids)
        np.testing.assert_allclose(
            segment.behavior_logprobs[len(prompt.token_ids) :], completion.logprobs, atol=1e-5, rtol=0
        )
        assert not any(tokenizer.convert_ids_to_tokens(i) in t.response for i in special)


def test_the_end_token_is_part_of_the_trajectory(world: SimpleNamespace, tokenizer: Any) -> None:
    prompts = prompts_of(tokenizer, "hello")
    out = block(world, prompts, 64, SamplingSpec(max_tokens=200), seeds=[list(range(64))])
    ended = [t for t in out if t.finish_reason == "stop"]
    assert ended, "no answer ended by itself"
    for t in ended:
        assert sampled_ids(t)[-1] == tokenizer.eos_token_id and not t.truncated
        assert tokenizer.eos_token_id not in sampled_ids(t)[:-1]


def test_fault_07_a_prompt_beyond_the_context_is_marked_and_the_rest_is_sampled(
    world: SimpleNamespace, tokenizer: Any
) -> None:
    short, full, over = prompts_of(tokenizer, "a", "b" * MAX_LEN, "c" * 2000)
    out = block(world, [short, full, over], 2, SamplingSpec(max_tokens=8), seeds=[[1, 2], [3, 4], [5, 6]])
    assert [t.error is None for t in out] == [True, True, False, False, False, False]
    assert all("--data.max_len" in t.error for t in out if t.error)
    # Without a length of its own an answer gets what the prompt leaves.
    nearly = Prompt("n", full.token_ids[: MAX_LEN - 5], "")
    (answer,) = block(world, [nearly], 1, SamplingSpec(max_tokens=0), seeds=[[1]])
    assert answer.num_actions <= 5 and answer.num_tokens <= MAX_LEN


def test_a_request_the_engine_refuses_is_one_marked_trajectory(world: SimpleNamespace, tokenizer: Any) -> None:
    good = prompts_of(tokenizer, "fine")[0]
    bad = Prompt("bad", [10_000_000], "")
    out = block(world, [good, bad], 1, SamplingSpec(max_tokens=4), seeds=[[1], [2]])
    assert out[0].error is None and out[0].num_actions > 0
    assert out[1].error is not None and out[1].finish_reason == "error" and out[1].segments == []


def test_fault_08_09_counts_are_sampled_tokens_and_a_cut_answer_is_truncated(
    world: SimpleNamespace, tokenizer: Any
) -> None:
    prompt = prompts_of(tokenizer, "count to ten")[0]
    refs = world.engine.generate_block.options(num_returns=2).remote(
        [prompt], 16, SamplingSpec(max_tokens=12), [list(range(16))], 3, "train", ["g"]
    )
    trajectories, summaries = ray.get(refs, timeout=60)
    for t, s in zip(trajectories, summaries, strict=True):
        assert t.num_actions == len(sampled_ids(t)) == s.num_actions <= 12
        assert t.num_tokens == len(prompt.token_ids) + t.num_actions
        assert t.truncated == (t.finish_reason == "length") == s.truncated
        assert t.truncated == (sampled_ids(t)[-1] != tokenizer.eos_token_id)
        assert (t.group_id, t.prompt_id, t.label, t.metadata["row"]) == ("g", "p0", 0, 0)
    assert any(t.truncated for t in trajectories)
    assert len({t.trajectory_id for t in trajectories}) == 16


def test_fault_12_logprobs_are_those_of_the_distribution_sampled_from(world: SimpleNamespace, tokenizer: Any) -> None:
    prompt = prompts_of(tokenizer, "temperature")[0]
    for t in block(world, [prompt], 8, SamplingSpec(max_tokens=24, temperature=0.6), seeds=[list(range(8))]):
        ids = t.segments[0].token_ids.tolist()
        expected = ray.get(world.trainer.logprobs.remote(ids, 0.6), timeout=60)[len(prompt.token_ids) - 1 :]
        got = t.segments[0].behavior_logprobs[len(prompt.token_ids) :]
        np.testing.assert_allclose(got, expected, atol=1e-3, rtol=0)
        assert t.segments[0].turn_params[0].temperature == pytest.approx(0.6)


def test_fault_22_a_seeded_request_does_not_depend_on_its_company(world: SimpleNamespace, tokenizer: Any) -> None:
    first, *others = prompts_of(tokenizer, "alone", *(f"other {i}" for i in range(31)))
    spec = SamplingSpec(max_tokens=24)
    alone = block(world, [first], 1, spec, seeds=[[99]])[0]
    seeds = [[100 + i] for i in range(31)]
    together = block(world, [*others[:16], first, *others[16:]], 1, spec, seeds=[*seeds[:16], [99], *seeds[16:]])
    assert sampled_ids(together[16]) == sampled_ids(alone)
    group = block(world, [first], 8, spec, seeds=[list(range(8))])
    assert len({tuple(sampled_ids(t)) for t in group}) == 8


def test_weights_arrive_five_times_and_the_prefix_cache_is_forgotten(world: SimpleNamespace, tokenizer: Any) -> None:
    # Longer than a cache block, so that a second request would reuse keys and values.
    prompt = prompts_of(tokenizer, "x" * 260)[0]
    for version in range(1, 6):
        ray.get(world.trainer.perturb.remote(version), timeout=60)
        sent = ray.get(world.trainer.send.remote(version), timeout=120)
        assert sent["bytes"] > 0
        (t,) = block(world, [prompt], 1, SamplingSpec(max_tokens=16, temperature=0.6), seeds=[[version]])
        ids = t.segments[0].token_ids.tolist()
        expected = ray.get(world.trainer.logprobs.remote(ids, 0.6), timeout=60)[len(prompt.token_ids) - 1 :]
        np.testing.assert_allclose(t.segments[0].behavior_logprobs[260:], expected, atol=1e-4, rtol=0)
        probe = ray.get(world.engine.prompt_logprobs.remote(ids), timeout=60)
        np.testing.assert_allclose(probe, ray.get(world.trainer.logprobs.remote(ids), timeout=60), atol=1e-4, rtol=0)
        assert set(t.segments[0].weight_version[260:].tolist()) == {version}
        assert ray.get(world.engine.stats.remote(), timeout=30)["version"] == version


def test_a_weight_update_in_the_middle_of_a_sample_goes_on_with_the_new_weights(
    world: SimpleNamespace, tokenizer: Any
) -> None:
    prompt = prompts_of(tokenizer, "long")[0]
    refs = world.engine.generate_block.options(num_returns=2).remote(
        [prompt], 32, SamplingSpec(max_tokens=300), [list(range(32))]
    )
    while ray.get(world.engine.stats.remote(), timeout=30)["outstanding"] < 32:
        pass
    time.sleep(0.1)
    ray.get(world.engine.pause.remote("keep"), timeout=30)
    ray.get(world.trainer.perturb.remote(50), timeout=60)
    ray.get(world.trainer.send.remote(50), timeout=120)
    stats = ray.get(world.engine.stats.remote(), timeout=30)
    assert stats["outstanding"] > 0 and stats["paused"]
    ray.get(world.engine.resume.remote(), timeout=30)
    trajectories = ray.get(refs, timeout=120)[0]
    assert all(t.error is None and t.num_actions > 0 for t in trajectories)
    (after,) = block(world, [prompt], 1, SamplingSpec(max_tokens=8), seeds=[[1]])
    ids = after.segments[0].token_ids.tolist()
    probe = ray.get(world.engine.prompt_logprobs.remote(ids), timeout=60)
    np.testing.assert_allclose(probe, ray.get(world.trainer.logprobs.remote(ids), timeout=60), atol=1e-4, rtol=0)


def test_dispatcher_keeps_order_groups_and_progress(world: SimpleNamespace, tokenizer: Any) -> None:
    prompts = prompts_of(tokenizer, *(f"prompt {i}" for i in range(40)))
    prompts[7] = prompts[3]  # drawn twice in one batch
    seen: list[tuple[int, int]] = []
    dispatcher = RolloutDispatcher([world.engine], world.cfg)
    blocks = dispatcher.generate(
        prompts, 4, SamplingSpec(max_tokens=6), step=1, on_progress=lambda d, t: seen.append((d, t))
    )
    trajectories = [t for ref, _ in blocks for t in ray.get(ref)]
    assert [t.prompt_id for t in trajectories] == [p.prompt_id for p in prompts for _ in range(4)]
    assert [s.trajectory_id for _, part in blocks for s in part] == [t.trajectory_id for t in trajectories]
    assert all(len(part) % 4 == 0 and len(part) <= 64 for _, part in blocks)
    assert seen[-1] == (160, 160) and [d for d, _ in seen] == sorted(d for d, _ in seen)
    twice = {t.group_id: [] for t in trajectories if t.prompt_id == "p3"}
    assert len(twice) == 2
    again = [t for ref, _ in dispatcher.generate(prompts, 4, SamplingSpec(max_tokens=6), step=1) for t in ray.get(ref)]
    assert [sampled_ids(t) for t in again] == [sampled_ids(t) for t in trajectories]
    other = [t for ref, _ in dispatcher.generate(prompts, 4, SamplingSpec(max_tokens=6), step=2) for t in ray.get(ref)]
    assert [sampled_ids(t) for t in other] != [sampled_ids(t) for t in trajectories]


def test_a_generation_that_takes_too_long_is_named(world: SimpleNamespace, tokenizer: Any) -> None:
    ray.get(world.engine.pause.remote(), timeout=30)
    try:
        dispatcher = RolloutDispatcher([world.engine], make_cfg(**{"timeout.generate": 1}))
        with pytest.raises(WaitTimeout, match=r"engine 0, 0 of 2 samples done; --timeout.generate"):
            dispatcher.generate(prompts_of(tokenizer, "slow"), 2, SamplingSpec(max_tokens=4), step=1)
    finally:
        ray.get(world.engine.resume.remote(), timeout=30)
    assert block(world, prompts_of(tokenizer, "ok"), 1, SamplingSpec(max_tokens=2), seeds=[[1]])[0].error is None


def test_a_weight_sync_that_takes_too_long_is_named(world: SimpleNamespace) -> None:
    from openrlhf_like.cluster.transfer.sender import EngineSyncClient

    client = EngineSyncClient([ray.remote(num_cpus=0)(Deaf).remote()], timeout=3)
    with pytest.raises(
        WaitTimeout, match="engine 0 to acknowledge the start of a weight update; --timeout.weight_sync"
    ):
        client.start_weight_update()


def test_a_tensor_changed_on_its_way_is_named(world: SimpleNamespace) -> None:
    ray.get(world.trainer.send.remote(60), timeout=60)
    with pytest.raises(RuntimeError, match=r"engine 0 worker 0: 1 differ \(model.norm.weight\)"):
        ray.get(world.trainer.send_corrupted.remote("model.norm.weight", 61), timeout=60)
    ray.get(world.trainer.send.remote(62), timeout=60)


def test_fault_22_two_engines_give_the_samples_of_one_and_a_dead_engine_is_an_error(
    world: SimpleNamespace, tokenizer: Any
) -> None:
    second = start_engine(world.cfg, world.path, 1)
    ray.get(second.ready.remote(), timeout=240)
    # Both on the weights of the checkpoint: a fresh trainer sends them to both at once.
    trainer = ray.remote(num_cpus=0)(Trainer).remote(world.cfg, world.path, [world.engine, second])
    ray.get(trainer.send.remote(100), timeout=120)
    prompts, spec = prompts_of(tokenizer, *(f"prompt {i}" for i in range(16))), SamplingSpec(max_tokens=16)

    def samples(engines: list[Any]) -> list[list[int]]:
        out = RolloutDispatcher(engines, world.cfg).generate(prompts, 4, spec, step=5)
        return [sampled_ids(t) for ref, _ in out for t in ray.get(ref)]

    before = ray.get(second.stats.remote(), timeout=30)["finished"]
    both = samples([world.engine, second])
    assert ray.get(second.stats.remote(), timeout=30)["finished"] > before
    assert both == samples([world.engine])
    assert not any(math.isnan(x) for x in ray.get(second.prompt_logprobs.remote([1, 2, 3]), timeout=30))
    ray.get(trainer.shutdown.remote(), timeout=30)
    ray.kill(second)
    with pytest.raises(RuntimeError, match="died while it generated"):
        samples([world.engine, second])


def test_async_engine_gives_the_greedy_tokens_of_the_in_process_one(world: SimpleNamespace, tokenizer: Any) -> None:
    cfg = make_cfg(**{"vllm.backend": "async"})
    other = start_engine(cfg, world.path, 2)
    trainer = ray.remote(num_cpus=0)(Trainer).remote(cfg, world.path, [world.engine, other])
    try:
        ray.get(other.ready.remote(), timeout=300)
        ray.get(trainer.perturb.remote(5), timeout=60)
        ray.get(trainer.send.remote(200), timeout=120)
        assert ray.get(other.stats.remote(), timeout=30)["version"] == 200
        prompts, spec = prompts_of(tokenizer, *(f"prompt {i}" for i in range(8))), SamplingSpec(16, temperature=0.0)
        refs = other.generate_block.options(num_returns=2).remote(prompts, 1, spec)
        got = ray.get(refs, timeout=120)[0]
        expected = block(world, prompts, 1, spec)
        assert [sampled_ids(t) for t in got] == [sampled_ids(t) for t in expected]
        ids = got[0].segments[0].token_ids.tolist()
        probe = ray.get(other.prompt_logprobs.remote(ids), timeout=60)
        np.testing.assert_allclose(probe, ray.get(trainer.logprobs.remote(ids), timeout=60), atol=1e-4, rtol=0)
    finally:
        ray.get(other.shutdown.remote(), timeout=60)
        ray.kill(other)
