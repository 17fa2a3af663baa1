"""Settings of GRPO end to end: KL in reward and loss, several updates, filtering, penalties, ZeRO 3, bf16."""

from __future__ import annotations

import functools
import statistics

import pytest

from tests.pipeline_runs import Run, data, grpo_flags, not_finite, run, sft, undocumented, workspace, write_jsonl

pytestmark = pytest.mark.timeout(1200)


@functools.cache
def everything() -> Run:
    """Two workers at ZeRO 3 with a reference and two engines in shared places; k1 in the reward; two updates and two
    epochs a rollout; correction; weights checked after each transfer; every tracker on."""
    flags = grpo_flags(
        "everything",
        data__max_samples=16,  # two steps
        actor__num_gpus_per_node=2, ref__num_gpus_per_node=2, vllm__num_engines=2, train__colocate_all=True,
        ds__zero_stage=3, train__batch_size=16, train__micro_batch_size=4, train__max_epochs=2,
        actor__lr_warmup_ratio=0, actor__eps_clip=0.05,
        algo__kl__init_coef=0.05, algo__kl__estimator="k1", algo__kl__no_use_loss=True,
        algo__advantage__is_correction_enable=True, vllm__check_weight_sync=True,
        logger__wandb__mode="offline", logger__wandb__run_name="everything",
        logger__tensorboard_dir=workspace() / "everything-tb",
    )  # fmt: skip
    return run("train_grpo_ray", flags)


@functools.cache
def filtered() -> Run:
    """bf16 at ZeRO 2, k3 in the loss (the command's preset), dynamic filtering, both penalties on length."""
    prompts = write_jsonl(
        workspace() / "filtered.jsonl",
        [{"input": f"{a}+{b} ", "label": str(a + b)} for a, b in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2))],
    )
    flags = grpo_flags(
        "filtered", "reward_alternating.py",
        data__prompt_dataset=prompts, rollout__batch_size=4, train__batch_size=16, train__micro_batch_size=8,
        algo__kl__init_coef=0.001, algo__dynamic_filtering_enable=True,
        reward__overlong_buffer_len=3, reward__stop_properly_penalty_coef=-0.5,
        rollout__max_new_tokens=3, actor__adam__lr=1e-4, actor__lr_warmup_ratio=0,
        ds__zero_stage=2, ds__param_dtype="bf16", eval__dataset=data() / "heldout.jsonl", eval__max_samples=4,
        eval__n_samples_per_prompt=1, vllm__check_weight_sync=True,
    )  # fmt: skip
    return run("train_grpo_ray", flags)


@functools.cache
def constant() -> Run:
    """The control: every answer earns the same."""
    flags = grpo_flags(
        "constant", "reward_constant.py", data__max_samples=16, eval__dataset=data() / "heldout.jsonl",
        eval__before_train=True, eval__temperature=0, eval__n_samples_per_prompt=1, actor__lr_warmup_ratio=0,
        logger__rollouts_every=0,
    )  # fmt: skip
    return run("train_grpo_ray", flags)


def test_their_metrics_are_finite_and_documented() -> None:
    for done in (everything(), filtered(), constant()):
        assert undocumented(done.metrics) == []
        assert not_finite(done.metrics) == []


def test_kl_in_the_reward_is_measured_before_the_first_update_and_moves_with_the_policy() -> None:
    first, second = everything().steps
    assert first["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)  # the policy is its reference
    assert abs(second["policy/kl_ref"]) > 1e-4
    assert first["policy/kl_coef"] == second["policy/kl_coef"] == 0.05
    assert first["time/ref"] > 0 and first["time/old_logprobs"] > 0


def test_kl_in_the_reward_stands_in_the_stored_advantages() -> None:
    """Step 1: KL 0, so the advantage is the credit, equal on all tokens. Step 2: it differs along the answer."""
    def spread(step: int) -> float:
        rows = everything().rollouts(step)
        inside = [[a for a, m in zip(r["advantages"], r["action_mask"], strict=True) if m] for r in rows]
        return max(max(values) - min(values) for values in inside)

    assert spread(1) < 1e-5 < 1e-4 < spread(2)


def test_several_updates_a_rollout_use_a_pass_for_the_old_logprobs_and_clip() -> None:
    for record in everything().steps:
        assert record["policy/approx_kl"] != 0 and record["policy/ratio_max"] > 1
        assert 0 <= record["policy/clip_fraction"] <= 1
    assert any(record["policy/clip_fraction"] > 0 for record in everything().steps)


def test_weights_of_zero_3_workers_reach_the_engines() -> None:
    """The run's own check compared checksums and log-probs; engine and trainer agree on the second step's samples."""
    for record in everything().steps:
        assert record["rollout/logprob_diff_mean"] < 1e-4 and record["rollout/is_outside_fraction"] == 0
    versions = {v for row in everything().rollouts(2) for v in row["weight_version"]}
    assert versions == {-1, 1} and everything().weights() != sft().weights()


def test_trackers_get_the_same_names_and_values() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = everything()
    assert list((done.output / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    events = EventAccumulator(str(workspace() / "everything-tb" / "everything"))
    events.Reload()
    for record in done.steps:
        for name in record.keys() - {"step"}:
            values = {event.step: event.value for event in events.Scalars(name)}
            assert values[record["step"]] == pytest.approx(record[name], rel=1e-5, abs=1e-12), name


def test_kl_in_the_loss_needs_no_pass_for_the_old_logprobs() -> None:
    (record,) = filtered().steps
    assert "time/old_logprobs" not in record and record["time/ref"] > 0
    assert record["policy/kl_ref"] == pytest.approx(0.0, abs=1e-2) and record["policy/kl_coef"] == 0.001


def test_no_reference_process_without_a_kl() -> None:
    assert not any("policy/kl_ref" in r or "time/ref" in r for r in constant().steps)
    assert "[ref rank" not in constant().stderr


def test_fault_23_what_was_accepted_before_the_prompts_ran_out_is_trained_on() -> None:
    """Six prompts, three of them with differing rewards, asked for in fours: the second round has two left."""
    (record,) = filtered().steps
    assert record["rollout/rounds"] == 2 and record["rollout/filtered_groups"] == 3
    assert record["rollout/num_samples"] == record["train/samples"] == 12
    rows = filtered().rollouts(1)
    assert len(rows) == 24, "filtered groups are stored too"
    trained = {row["prompt"] for row in rows if row["advantages"] is not None}
    assert trained == {"2+1 ", "4+1 ", "6+2 "}
    assert record["eval/heldout/prompts"] == 4, "the last step is evaluated"


def test_penalties_on_length_stand_in_the_shaped_reward_and_not_in_the_reward() -> None:
    (record,) = filtered().steps
    rows = [row for row in filtered().rollouts(1) if row["advantages"] is not None]
    assert record["reward/mean"] == pytest.approx(statistics.fmean(row["reward"] for row in rows)) == 0.5
    penalty = [min(1.0, sum(row["action_mask"]) / 3) for row in rows]  # the buffer is the whole answer
    shaped = [-0.5 if row["truncated"] else row["reward"] - p for row, p in zip(rows, penalty, strict=True)]
    assert record["reward/overlong_penalty_mean"] == pytest.approx(statistics.fmean(penalty))
    assert record["reward/shaped_mean"] == pytest.approx(statistics.fmean(shaped))
    for group in {row["group_id"] for row in rows}:
        own = [s for s, row in zip(shaped, rows, strict=True) if row["group_id"] == group]
        for s, row in zip(shaped, rows, strict=True):
            if row["group_id"] == group:
                want = (s - statistics.fmean(own)) / statistics.stdev(own)
                assert row["advantages"][-1] == pytest.approx(want, abs=1e-5)


def test_bf16_engine_and_trainer_agree_to_bf16s_rounding() -> None:
    (record,) = filtered().steps
    assert 0 < record["rollout/logprob_diff_mean"] < 0.05
    assert filtered().weights() != sft().weights()


def test_the_control_with_a_constant_reward_learns_exactly_nothing() -> None:
    assert constant().weights() == sft().weights()
    for record in constant().steps:
        assert record["policy/grad_norm"] == 0 and record["reward/group_zero_std_fraction"] == 1
        assert record["policy/lr"] > 0
    scores = [r["eval/heldout/pass1"] for r in constant().metrics if "eval/heldout/pass1" in r]
    assert len(scores) == 2 and scores[0] == scores[1]
    assert not (constant().output / "run" / "rollouts").exists()


def test_fault_24_a_run_without_any_signal_ends_after_the_stated_rounds() -> None:
    flags = grpo_flags(
        "no-signal", "reward_plain_constant.py", algo__dynamic_filtering_enable=True,
        algo__dynamic_filtering_max_rounds=2,
    )  # fmt: skip
    done = run("train_grpo_ray", flags, code=1)
    (line,) = done.errors()
    assert "2 rounds in a row accepted no group" in line and "all rewards equal in 16" in line
    assert "--algo.dynamic_filtering_range 0 1" in line and "Traceback" not in done.stderr
    assert not (done.output / "config.json").exists(), "a run that failed exports no model"
