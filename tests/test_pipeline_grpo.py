"""GRPO end to end with the real command: what is recorded and stored, and that a run repeats and resumes exactly."""

from __future__ import annotations

import functools
import json
import math
import statistics

import pytest

from tests.pipeline_runs import (
    Run,
    data,
    documented,
    grpo_flags,
    kill_when,
    not_finite,
    run,
    same_metrics,
    sft,
    undocumented,
    wait_gone,
    workspace,
)

pytestmark = pytest.mark.timeout(1200)

SETTINGS = {
    "vllm__num_engines": 2, "ckpt__save_steps": 2, "eval__n_samples_per_prompt": 2, "eval__temperature": 1.0,
    "eval__before_train": True, "actor__entropy_coef": 0.0,
}  # fmt: skip


@functools.cache
def whole() -> Run:
    """Four steps without an interruption."""
    return run("train_grpo_ray", grpo_flags("grpo", eval__dataset=data() / "heldout.jsonl", **SETTINGS))


@functools.cache
def resumed() -> Run:
    """The same run, killed with SIGKILL after its checkpoint of step 2 and started again."""
    flags = grpo_flags("grpo-resumed", eval__dataset=data() / "heldout.jsonl", ckpt__load_enable=True, **SETTINGS)
    path = workspace() / "grpo-resumed-ckpt"
    pids = kill_when("train_grpo_ray", flags, (path / "global_step2").is_dir)
    assert wait_gone(pids, 30) == [], "a driver killed with SIGKILL leaves processes behind"
    half = path / ".tmp-global_step4"
    half.mkdir(exist_ok=True)
    (half / "driver.json").write_text("{}")
    return run("train_grpo_ray", flags)


# -- metrics -------------------------------------------------------------------------------------------------------


def test_its_metrics_are_finite_and_documented() -> None:
    done = whole()
    assert [r["step"] for r in done.metrics] == [0, 1, 2, 3, 4]
    assert undocumented(done.metrics) == []
    assert not_finite(done.metrics) == []


def test_every_documented_metric_that_applies_is_there() -> None:
    absent = {  # by the settings of this run: no reference, one update, no warm-up of a critic, no failures
        "policy/kl_ref", "policy/kl_coef", "time/ref", "time/old_logprobs", "eval/loss", "eval/tokens", "eval/accuracy",
        "train/loss", "train/lr", "train/grad_norm", "train/epoch",
    }  # fmt: skip
    for record in whole().steps[:-1]:
        missing = {n for n, p in documented().items() if not any(map(p.fullmatch, record))}
        missing = {n for n in missing if not n.startswith("eval/") and n != "time/eval"}
        assert missing <= absent, missing - absent
        assert not absent & set(record)
    for record in (whole().metrics[0], whole().metrics[-1]):
        names = {"pass1", "pass2", "response_length", "truncated_fraction", "failed_fraction", "prompts"}
        assert {f"eval/heldout/{name}" for name in names} <= set(record) and record["eval/heldout/prompts"] == 20


def test_engine_and_trainer_agree_on_what_was_sampled() -> None:
    for record in whole().steps:
        assert record["rollout/logprob_diff_mean"] < 1e-4 and record["rollout/logprob_diff_max"] < 1e-3
        assert record["rollout/is_outside_fraction"] == 0


def test_one_update_a_rollout_is_on_policy_and_needs_no_old_logprob_pass() -> None:
    for record in whole().steps:
        assert record["policy/ratio_max"] == 1 and record["policy/clip_fraction"] == record["policy/approx_kl"] == 0
        assert "time/old_logprobs" not in record and "time/ref" not in record


# -- run/rollouts --------------------------------------------------------------------------------------------------


def test_the_stored_rollouts_are_what_was_sampled() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sft().output)
    for step in (1, 2, 3, 4):
        rows = whole().rollouts(step)
        assert len(rows) == 32 and {row["step"] for row in rows} == {step}
        for row in rows:
            arrays = ("token_ids", "action_mask", "behavior_logprobs", "weight_version", "advantages")
            assert {len(row[name]) for name in arrays} == {len(row["token_ids"])}
            sampled = [t for t, m in zip(row["token_ids"], row["action_mask"], strict=True) if m]
            prompt = [t for t, m in zip(row["token_ids"], row["action_mask"], strict=True) if not m]
            assert prompt == tokenizer(row["prompt"]).input_ids == row["token_ids"][: len(prompt)]
            assert tokenizer.decode(sampled, skip_special_tokens=True) == row["response"]
            assert row["truncated"] == (row["finish_reason"] == "length") == (sampled[-1] != tokenizer.eos_token_id)
            assert 1 <= len(sampled) <= 4 and row["error"] is None
            versions = {v for v, m in zip(row["weight_version"], row["action_mask"], strict=True) if m}
            assert versions == {step - 1}, "strictly on-policy: the weights of the step before"
            inside = [lp for lp, m in zip(row["behavior_logprobs"], row["action_mask"], strict=True) if m]
            assert all(lp < 0 for lp in inside) and not any(row["behavior_logprobs"][: len(prompt)])


def test_the_stored_rewards_and_advantages_are_those_of_the_task() -> None:
    labels = {r["input"]: r["label"] for r in map(json.loads, (data() / "prompts.jsonl").read_text().splitlines())}
    for step, record in enumerate(whole().steps, start=1):
        groups: dict[str, list[dict]] = {}
        for row in whole().rollouts(step):
            assert row["label"] == labels[row["prompt"]]
            answer = row["response"].strip()
            right = answer == row["label"]
            assert row["scores"] == float(right)
            assert row["reward"] == (1.0 if right else 0.2 if answer.isdigit() else 0.0)
            groups.setdefault(row["group_id"], []).append(row)
        assert len(groups) == 8 and {len(g) for g in groups.values()} == {4}
        rewards = [row["reward"] for g in groups.values() for row in g]
        assert record["reward/mean"] == pytest.approx(statistics.fmean(rewards))
        assert record["reward/std"] == pytest.approx(statistics.stdev(rewards))
        equal = sum(len({row["reward"] for row in g}) == 1 for g in groups.values())
        assert record["reward/group_zero_std_fraction"] == equal / 8
        for group in groups.values():
            own = [row["reward"] for row in group]
            std = statistics.stdev(own)
            for row in group:
                want = (row["reward"] - statistics.fmean(own)) / std if std > 1e-9 else 0.0
                for value, acts in zip(row["advantages"], row["action_mask"], strict=True):
                    assert value == pytest.approx(want if acts else 0.0, abs=1e-5)
        lengths = [sum(row["action_mask"]) for g in groups.values() for row in g]
        assert record["rollout/response_length"] == pytest.approx(statistics.fmean(lengths))


def test_fault_22_samples_of_a_group_are_distinct_draws() -> None:
    """At temperature 1 and this policy's entropy, groups of four equal answers are rare."""
    rows = [row for step in (1, 2, 3, 4) for row in whole().rollouts(step)]
    groups: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group_id"]), set()).add(row["response"])
    assert sum(len(g) > 1 for g in groups.values()) > len(groups) / 2
    assert len({row["trajectory_id"] for row in rows}) == len(rows)


# -- repeating and resuming ----------------------------------------------------------------------------------------


def test_fault_25_a_killed_run_resumed_gives_the_same_weights_bit_for_bit() -> None:
    assert resumed().weights() == whole().weights()
    assert resumed().weights() != sft().weights()


def test_fault_22_the_same_seed_twice_samples_the_same_with_two_engines() -> None:
    """The resumed run did steps 1 and 2 in one process and 3 and 4 in another: all four repeat the whole run's."""
    assert "resumed from" in resumed().stderr and "global_step2" in resumed().stderr
    for step in (1, 2, 3, 4):
        assert resumed().rollouts(step) == whole().rollouts(step)


def test_fault_34_each_step_is_recorded_once_with_the_same_numbers() -> None:
    assert [r["step"] for r in resumed().metrics] == [0, 1, 2, 3, 4]
    for mine, other in zip(resumed().metrics, whole().metrics, strict=True):
        assert same_metrics(mine, other), [(k, mine[k], other.get(k)) for k in mine if mine[k] != other.get(k)]
    assert not list(resumed().ckpt.glob(".tmp-*"))


def test_the_exported_policy_is_the_one_that_was_trained() -> None:
    """Log-probs of the last rollout under the export differ from mu by one update, and not by more."""
    import torch
    from transformers import AutoModelForCausalLM

    def gap(path: object, step: int) -> float:
        policy = AutoModelForCausalLM.from_pretrained(path).eval()
        worst = 0.0
        for row in whole().rollouts(step):
            ids = torch.tensor([row["token_ids"]])
            with torch.no_grad():
                logp = policy(ids).logits[0].log_softmax(-1)
            for t, acts in enumerate(row["action_mask"]):
                if acts:
                    worst = max(worst, abs(float(logp[t - 1, row["token_ids"][t]]) - row["behavior_logprobs"][t]))
        return worst

    assert gap(sft().output, 1) < 1e-3  # step 1 was sampled by the SFT checkpoint
    assert 1e-4 < gap(whole().output, 4) < 1.0
    assert math.isfinite(gap(whole().output, 1))
