"""Supervised fine-tuning end to end, with the real command: Ray, DeepSpeed, checkpoints, export."""

from __future__ import annotations

import functools
import shutil

import pytest
import yaml

from tests.pipeline_runs import (
    SFT_LIMIT,
    Run,
    data,
    kill_when,
    model,
    not_finite,
    run,
    same_metrics,
    sft,
    sft_flags,
    undocumented,
    wait_gone,
    workspace,
)

pytestmark = pytest.mark.timeout(900)


def test_the_loss_falls_and_every_step_is_recorded_once() -> None:
    done = sft()
    assert [r["step"] for r in done.metrics] == list(range(37))  # 80 examples in batches of 32: 3 a epoch, 12 epochs
    losses = [r["train/loss"] for r in done.steps]
    assert sum(losses[-6:]) / 6 < 0.4 * losses[0]
    held_out = {r["step"]: r["eval/loss"] for r in done.metrics if "eval/loss" in r}
    assert list(held_out) == [0, 12, 24, 36]  # --eval.before_train, then --eval.steps 12
    assert held_out[36] < 0.4 * held_out[0]


def test_its_metrics_are_finite_and_documented() -> None:
    assert undocumented(sft().metrics) == []
    assert not_finite(sft().metrics) == []
    rates = [r["train/lr"] for r in sft().steps]
    assert rates[0] == 0 and max(rates) == pytest.approx(5e-3) and rates[2:] == sorted(rates[2:], reverse=True)


def test_the_export_loads_in_transformers_and_holds_the_trained_weights() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = sft()
    tokenizer = AutoTokenizer.from_pretrained(done.output)
    before = AutoModelForCausalLM.from_pretrained(model()).eval()
    after = AutoModelForCausalLM.from_pretrained(done.output).eval()
    assert after.config.use_cache and after.dtype == torch.float32
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model()).chat_template

    # The evaluation's last loss, from the exported model alone: prompt, answer, end of turn; loss on the latter two.
    total, tokens = 0.0, 0
    for row in (data() / "heldout.jsonl").read_text().splitlines():
        record = yaml.safe_load(row)
        prompt = tokenizer(record["input"]).input_ids
        answer = [*tokenizer(record["output"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            logp = after(ids).logits[0].log_softmax(-1)
        total -= sum(float(logp[len(prompt) + i - 1, t]) for i, t in enumerate(answer))
        tokens += len(answer)
    assert total / tokens == pytest.approx(done.metrics[-1]["eval/loss"], abs=1e-4)
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))


def test_the_run_directory_repeats_the_run() -> None:
    config = yaml.safe_load((sft().output / "run" / "config.yaml").read_text())
    assert config["command"] == "train_sft" and config["device"] == "cpu" and config["adam"]["lr"] == 5e-3
    assert config["data"]["dataset"] == str(data() / "sft.jsonl")
    assert {p.name for p in (workspace() / "sft-ckpt").iterdir()} == {"global_step18", "global_step36"}


@functools.cache
def resumed() -> Run:
    """Killed with SIGKILL after the checkpoint of step 18 and started again, with a half-written one lying there."""
    flags = sft_flags("sft-resumed", ckpt__load_enable=True)
    path = workspace() / "sft-resumed-ckpt"
    pids = kill_when("train_sft", flags, (path / "global_step18").is_dir, SFT_LIMIT)
    assert wait_gone(pids, 30) == [], "a driver killed with SIGKILL leaves processes behind"
    shutil.rmtree(path / "global_step36", ignore_errors=True)  # a fast machine may have been through
    half = path / ".tmp-global_step36"
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(path / "global_step18", half)
    (half / "worker_00000.pt").unlink()
    return run("train_sft", flags, limit=SFT_LIMIT)


def test_fault_25_a_killed_run_resumed_gives_the_same_weights_bit_for_bit() -> None:
    assert resumed().weights() == sft().weights()


def test_fault_34_a_killed_run_resumed_has_each_step_once_with_the_same_numbers() -> None:
    done = resumed()
    assert "resumed from" in done.stderr and "global_step18" in done.stderr
    assert [r["step"] for r in done.metrics] == list(range(37))
    assert all(same_metrics(a, b) for a, b in zip(done.metrics, sft().metrics, strict=True))
    assert not list(done.ckpt.glob(".tmp-*"))


def test_fault_10_two_workers_give_the_loss_curve_of_one() -> None:
    """Also with another cut into micro-batches, which says how the work is dealt and not what is learned."""
    flags = sft_flags("sft-two", train__num_gpus_per_node=2, train__micro_batch_size=4, ckpt__save_steps=-1)
    two = run("train_sft", flags, limit=SFT_LIMIT)
    for name in ("train/loss", "train/grad_norm"):
        gaps = [abs(a[name] - b[name]) for a, b in zip(two.steps, sft().steps, strict=True)]
        assert max(gaps) < (1e-4 if name == "train/loss" else 1e-2), (name, gaps)
    assert two.metrics[-1]["eval/loss"] == pytest.approx(sft().metrics[-1]["eval/loss"], abs=1e-4)
