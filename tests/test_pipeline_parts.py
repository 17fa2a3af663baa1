"""The pipeline's own pieces against closed forms: evaluation, credit, the prompts' place, registry, checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from openrlhf_like.config import make_config
from openrlhf_like.data.sampler import ResumableSampler
from openrlhf_like.pipeline.checkpointer import Checkpointer, remove_leftovers, set_aside
from openrlhf_like.pipeline.credit import assign_credit
from openrlhf_like.pipeline.evaluate import evaluation_metrics
from openrlhf_like.pipeline.prompts import PromptFeed
from openrlhf_like.pipeline.recorder import Recorder
from openrlhf_like.pipeline.rollout_phase import Rollout, Row
from openrlhf_like.pipeline.state import Counters, StateRegistry
from openrlhf_like.pipeline.update_phase import planned_updates
from openrlhf_like.training.checkpoint import commit, complete_checkpoints, stage
from openrlhf_like.types import Prompt, TrajectorySummary, UserError


def summary(group: str, reward: float, **fields: Any) -> TrajectorySummary:
    values = {
        "trajectory_id": f"{group}/{reward}", "group_id": group, "num_tokens": 6, "num_actions": 3,
        "segment_lengths": [6], "truncated": False, "finish_reason": "stop", "error": None, "reward": reward,
        "score": None, "turns": 1, **fields,
    }  # fmt: skip
    return TrajectorySummary(**values)


def rollout(*summaries: TrajectorySummary) -> Rollout:
    rows = [Row(0, i, s.group_id, s) for i, s in enumerate(summaries)]
    return Rollout(rows=rows, groups=len({s.group_id for s in summaries}), rounds=1)


def config(command: str = "train_grpo_ray", **changes: Any) -> Any:
    return make_config(command, {name.replace("__", "."): value for name, value in changes.items()}, gpus=0)


# -- evaluation ----------------------------------------------------------------------------------------------------


def test_pass1_is_a_samples_mean_and_passn_a_prompts_best() -> None:
    rows = [summary("a", 1.0, num_actions=2), summary("a", 0.0, num_actions=4, truncated=True),
            summary("b", 0.0, num_actions=3), summary("b", 0.0, num_actions=3)]  # fmt: skip
    got = evaluation_metrics(rows, 2)
    assert got == {
        "pass1": 0.25, "pass2": 0.5, "response_length": 3.0, "truncated_fraction": 0.25, "failed_fraction": 0.0,
        "prompts": 2.0,
    }  # fmt: skip
    assert "pass1" in evaluation_metrics(rows[:1], 1) and "pass2" not in evaluation_metrics(rows[:1], 1)


def test_the_score_counts_where_there_is_one() -> None:
    rows = [summary("a", -3.0, score=1.0), summary("a", 5.0, score=0.0)]
    assert evaluation_metrics(rows, 2)["pass1"] == 0.5


@pytest.mark.parametrize("failure", [{"error": "reward: raised", "reward": math.nan}, {"reward": math.nan}])
def test_an_evaluation_does_not_look_better_because_its_verifier_crashed(failure: dict[str, Any]) -> None:
    rows = [summary("a", **{"reward": 1.0}), summary("b", **{"reward": 1.0, **failure})]
    got = evaluation_metrics(rows, 1)
    assert got["pass1"] == 0.5 and got["failed_fraction"] == 0.5


# -- credit --------------------------------------------------------------------------------------------------------


def test_credit_is_the_rewards_place_in_its_group() -> None:
    got = assign_credit(config(), rollout(*[summary("a", r) for r in (1.0, 0.0, 0.0)]))
    mean, std = 1 / 3, math.sqrt(1 / 3)
    assert got.credit == pytest.approx([(r - mean) / std for r in (1.0, 0.0, 0.0)], rel=1e-6)
    assert [row.index for row in got.rows] == [0, 1, 2]
    assert got.metrics["reward/mean"] == pytest.approx(mean) and got.metrics["reward/std"] == pytest.approx(std)


def test_fault_13_a_group_of_equal_rewards_earns_exactly_nothing() -> None:
    got = assign_credit(config(), rollout(*[summary("a", 0.1) for _ in range(7)], summary("b", 1.0), summary("b", 0.0)))
    assert got.credit[:7] == [0.0] * 7 and got.credit[7] > 0 > got.credit[8]
    assert got.metrics["reward/group_zero_std_fraction"] == 0.5


def test_fault_26_a_failed_sample_is_left_out_and_counted() -> None:
    failed = summary("a", math.nan, error="reward: raised", num_actions=9)
    got = assign_credit(config(), rollout(summary("a", 1.0), failed, summary("a", 0.0), summary("b", 1.0)))
    # Group b has one member only, which no group estimator can use.
    assert [row.index for row in got.rows] == [0, 2]
    assert got.credit == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert got.metrics["reward/failed_fraction"] == 0.25 and got.metrics["reward/dropped_groups"] == 1
    assert got.metrics["reward/mean"] == pytest.approx(2 / 3)
    assert got.metrics["rollout/num_samples"] == 4


def test_penalties_change_the_credit_and_not_the_reported_reward() -> None:
    cfg = config(rollout__max_new_tokens=8, reward__overlong_buffer_len=4, reward__stop_properly_penalty_coef=0.0)
    rows = [summary("a", 1.0, num_actions=2), summary("a", 1.0, num_actions=6),
            summary("a", 1.0, num_actions=8, truncated=True)]  # fmt: skip
    got = assign_credit(cfg, rollout(*rows))
    # 1, then half of the buffer used: 1 - 0.5, then all of it and cut: 0.
    shaped = [1.0, 0.5, 0.0]
    std = 0.5
    assert got.credit == pytest.approx([(s - 0.5) / std for s in shaped], abs=1e-6)
    assert got.metrics["reward/mean"] == 1.0 and got.metrics["reward/shaped_mean"] == pytest.approx(0.5)
    assert got.metrics["reward/overlong_penalty_mean"] == pytest.approx((0 + 0.5 + 1.0) / 3)
    assert got.metrics["rollout/truncated_fraction"] == pytest.approx(1 / 3)


def test_fault_8_lengths_count_sampled_tokens_only() -> None:
    got = assign_credit(config(), rollout(summary("a", 1.0, num_tokens=12, num_actions=9), summary("a", 0.0)))
    assert got.metrics["rollout/response_length"] == 6.0 and got.metrics["rollout/response_length_max"] == 9


# -- the place in the prompts --------------------------------------------------------------------------------------


def feed(n: int = 5, batch: int = 2, epochs: int = 2, fingerprint: str = "f") -> PromptFeed:
    prompts = [Prompt(f"p{i}", [i], str(i)) for i in range(n)]
    return PromptFeed(prompts, ResumableSampler(n, batch, 3, epochs=epochs, fingerprint=fingerprint))


def drain(source: PromptFeed) -> list[list[str]]:
    return [[p.prompt_id for p in batch] for batch in iter(source.next_batch, None)]


def test_fault_25_a_resumed_feed_goes_on_in_the_same_order_within_and_across_epochs() -> None:
    whole = drain(feed())
    assert [len(b) for b in whole] == [2, 2, 1, 2, 2, 1]
    assert sorted(sum(whole[:3], [])) == sorted(sum(whole[3:], [])) == [f"p{i}" for i in range(5)]
    for stop in range(7):
        first, second = feed(), feed()
        begun = [first.next_batch() for _ in range(stop)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [[p.prompt_id for p in b] for b in begun if b] + drain(second) == whole
        assert not second.has_more() and second.next_batch() is None


def test_fault_25_a_changed_dataset_is_a_clear_error() -> None:
    for changed in (feed(n=6), feed(fingerprint="other")):
        with pytest.raises(UserError, match="--ckpt.load_enable"):
            changed.load_state_dict(feed().state_dict())


@pytest.mark.parametrize(
    ("prompts", "episodes", "batch", "updates"),
    [(64, 1, 32, 8), (64, 2, 64, 8), (70, 1, 32, 9), (70, 1, 50, 9), (3, 2, 32, 2)],
)
def test_fault_20_the_schedule_ends_with_the_last_update(prompts: int, episodes: int, batch: int, updates: int) -> None:
    """Rollouts of 16 prompts with 4 samples: 64 rows; an episode's last rollout is smaller."""
    cfg = config(
        rollout__batch_size=16, rollout__n_samples_per_prompt=4, train__batch_size=batch, train__max_epochs=1,
        train__num_episodes=episodes,
    )  # fmt: skip
    rows = [min(16, prompts - start) * 4 for start in range(0, prompts, 16)]
    assert planned_updates(cfg, prompts) == episodes * sum(math.ceil(r / batch) for r in rows)
    assert planned_updates(cfg, prompts) == updates


# -- state ---------------------------------------------------------------------------------------------------------


def test_every_owner_gets_its_state_back() -> None:
    first, second = StateRegistry(), StateRegistry()
    first.register("counters", Counters(step=7, empty_steps=1))
    restored = Counters(step=0, empty_steps=0)
    second.register("counters", restored)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert restored.values == {"step": 7, "empty_steps": 1}
    with pytest.raises(ValueError, match="twice"):
        first.register("counters", Counters())


def test_a_checkpoint_of_other_settings_is_named() -> None:
    registry = StateRegistry()
    registry.register("kl", Counters())
    with pytest.raises(UserError, match="--ckpt.load_enable: the checkpoint has no state of kl"):
        registry.load_state_dict({"counters": {}})


def test_state_that_its_owner_refuses_is_one_line_and_no_traceback() -> None:
    from openrlhf_like.algorithms.kl import AdaptiveKLController, FixedKLController

    registry = StateRegistry()
    registry.register("kl", FixedKLController(0.1))
    with pytest.raises(UserError, match="--ckpt.load_enable: .* kl .*--algo.kl.target"):
        registry.load_state_dict({"kl": AdaptiveKLController(0.1, 6.0, 100).state_dict()})


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpointer(path: Path, **changes: Any) -> Checkpointer:
    return Checkpointer(config(ckpt__path=str(path), **changes), StateRegistry())


def write(path: Path, step: int, driver: bool = True) -> Path:
    folder = stage(path, f"global_step{step}")
    (folder / "worker_00000.pt").write_text("x")
    if driver:
        (folder / "driver.json").write_text("{}")
    return commit(path, f"global_step{step}")


def test_the_newest_complete_checkpoint_is_found_and_a_half_written_one_is_not(tmp_path: Path) -> None:
    own = checkpointer(tmp_path, ckpt__load_enable=True)
    assert own.newest() is None and own.find() is None
    write(tmp_path, 9)
    write(tmp_path, 10)
    write(tmp_path, 11, driver=False)  # --ckpt.disable_ds with --ckpt.save_hf: nothing to resume from
    (stage(tmp_path, "global_step12") / "driver.json").write_text("{}")
    assert own.newest() == own.find() == tmp_path / "global_step10"
    assert checkpointer(tmp_path).find() is None  # without --ckpt.load_enable
    remove_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"global_step9", "global_step10", "global_step11"}


def test_folders_that_are_no_checkpoints_are_never_taken_or_deleted(tmp_path: Path) -> None:
    (tmp_path / "my_data").mkdir()
    (tmp_path / "my_data" / "driver.json").write_text("{}")
    write(tmp_path, 1)
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["global_step1"]
    assert checkpointer(tmp_path).newest() == tmp_path / "global_step1"


def test_checkpoints_of_an_earlier_run_are_moved_aside_not_resumed_and_not_deleted(tmp_path: Path) -> None:
    write(tmp_path, 30)
    assert set_aside(tmp_path) == tmp_path / "previous-1"
    assert (tmp_path / "previous-1" / "global_step30" / "driver.json").is_file()
    assert checkpointer(tmp_path).newest() is None and set_aside(tmp_path) is None
    write(tmp_path, 2)
    assert checkpointer(tmp_path).newest() == tmp_path / "global_step2"
    assert set_aside(tmp_path) == tmp_path / "previous-2"


@pytest.mark.parametrize(
    ("steps", "disable", "hf", "due"),
    [(-1, False, False, []), (2, False, False, [2, 4]), (2, True, False, []), (2, True, True, [2, 4])],
)
def test_when_checkpoints_are_due(tmp_path: Path, steps: int, disable: bool, hf: bool, due: list[int]) -> None:
    own = checkpointer(tmp_path, ckpt__save_steps=steps, ckpt__disable_ds=disable, ckpt__save_hf=hf)
    assert [step for step in range(1, 6) if own.due(step)] == due


# -- the record of a run -------------------------------------------------------------------------------------------


def record(tmp_path: Path, resuming: bool, state: dict[str, Any] | None, steps: list[int]) -> dict[str, Any]:
    """A run that logs ``steps``; returns the registry's state after the second one."""
    registry = StateRegistry()
    cfg = config(ckpt__output_dir=str(tmp_path), logger__wandb__run_name="run")
    recorder = Recorder(cfg, registry, resuming)
    if state is not None:
        registry.load_state_dict(state)
    recorder.start(6, 0, "test")
    kept: dict[str, Any] = {}
    with recorder:
        for step in steps:
            recorder.log(step, {"reward/mean": float(step), "run": len(steps)})
            if step == 2:
                kept = json.loads(json.dumps(registry.state_dict()))
    return kept


def test_fault_34_after_a_resume_each_step_stands_once(tmp_path: Path) -> None:
    state = record(tmp_path, False, None, [1, 2, 3, 4])
    record(tmp_path, True, state, [3, 4, 5])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["run"] for line in lines] == [4, 4, 3, 3, 3]
    assert "preset: train_grpo_ray" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_new_run_moves_an_earlier_ones_records_aside(tmp_path: Path) -> None:
    record(tmp_path, False, None, [1, 2])
    record(tmp_path, False, None, [1])
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert (tmp_path / "run" / "previous-1" / "metrics.jsonl").read_text().count("\n") == 2
