"""The demo: a small model is built from nothing, fine-tuned by a sloppy teacher, then put right by GRPO.

    make demo

1. builds a 0.8 M-parameter model and a byte-level tokenizer,
2. draws arithmetic questions from reasoning-gym's chain_sum; more than half of the demonstrations are off by one,
3. ``train_sft`` on the demonstrations: a middling policy that imitates the teacher's slips,
4. ``train_grpo_ray`` with the task's own scorer as reward, from prompts alone,
5. prints greedy pass@1 on held-out questions before and after, and draws the reward curve.

Exits with 1 unless GRPO raised pass@1 by 0.20 over an SFT checkpoint between 0.2 and 0.6. Everything is real: the
same commands, Ray actors, DeepSpeed workers and vLLM engine as on a cluster.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from make_chain_sum import make_chain_sum  # noqa: E402
from tiny_model import build_tiny_model  # noqa: E402

from openrlhf_like.observe import plot_reward_curve, read_records, results_table  # noqa: E402

REWARD_FILE = HERE.parent / "python" / "reward_chain_sum.py"
MIN_GAIN = 0.20
SFT_RANGE = (0.2, 0.6)


def sft_flags(out: Path, seed: int, epochs: int) -> list[str]:
    """Flags of the SFT stage."""
    return [
        "--model.model_name_or_path", f"{out}/model",
        "--data.dataset", f"{out}/data/sft.jsonl",
        "--data.output_key", "output",
        "--data.input_template", "{}",
        "--data.max_len", "32",
        "--train.batch_size", "64",
        "--train.micro_batch_size", "64",
        "--train.max_epochs", str(epochs),
        "--train.seed", str(seed),
        "--adam.lr", "2e-3",
        "--logger.logging_steps", "50",
        "--ckpt.output_dir", f"{out}/sft",
    ]  # fmt: skip


def grpo_flags(out: Path, seed: int, steps: int, reward: str) -> list[str]:
    """Flags of the GRPO stage: one update a rollout of 32 prompts with 8 answers each."""
    return [
        "--actor.model_name_or_path", f"{out}/sft",
        "--data.prompt_dataset", f"{out}/data/prompts.jsonl",
        "--data.label_key", "label",
        "--data.max_samples", str(32 * steps),
        "--data.max_len", "32",
        "--rollout.batch_size", "32",
        "--rollout.n_samples_per_prompt", "8",
        "--rollout.max_new_tokens", "8",
        "--train.batch_size", "256",
        "--train.dynamic_batch_enable",
        "--train.max_tokens_per_gpu", "8192",
        "--train.seed", str(seed),
        "--actor.adam.lr", "3e-4",
        "--algo.kl.init_coef", "0",
        "--reward.remote_url", reward,
        "--eval.dataset", f"{out}/data/heldout.jsonl",
        "--eval.temperature", "0",
        "--eval.n_samples_per_prompt", "1",
        "--eval.before_train",
        "--logger.logging_steps", "5",
        "--ckpt.output_dir", f"{out}/grpo",
    ]  # fmt: skip


def run(command: str, flags: list[str]) -> float:
    """Run a command of the package as a user would; returns its seconds."""
    words = [sys.executable, "-m", f"openrlhf_like.cli.{command}", *flags]
    print(f"\n$ python -m openrlhf_like.cli.{command} {shlex.join(flags)}", flush=True)
    start = time.monotonic()
    code = subprocess.call(words)
    if code:
        raise SystemExit(code)
    return time.monotonic() - start


def held_out_pass1(metrics: Path) -> tuple[float, float]:
    """(before, after): greedy pass@1 of the first and the last evaluation."""
    records, _ = read_records(metrics)
    values = [r["eval/heldout/pass1"] for r in records if "eval/heldout/pass1" in r]
    return values[0], values[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("demo_out"))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--sft_epochs", type=int, default=14)
    parser.add_argument("--grpo_steps", type=int, default=60)
    parser.add_argument("--reward", default=str(REWARD_FILE), help="reward file of the GRPO stage")
    args = parser.parse_args()
    out = args.output_dir
    start = time.monotonic()
    print(f"building a model and arithmetic questions under {out}", flush=True)
    build_tiny_model(out / "model", hidden=128, layers=3, heads=4, seed=args.seed)
    rows = make_chain_sum(out / "data", size=8000, terms=3, digits=1, heldout=256, seed=1, wrong_share=0.55)
    print(f"questions: {rows}", flush=True)
    seconds = {
        "SFT": run("train_sft", sft_flags(out, args.seed, args.sft_epochs)),
        "GRPO": run("train_grpo_ray", grpo_flags(out, args.seed, args.grpo_steps, args.reward)),
    }
    metrics = out / "grpo" / "run" / "metrics.jsonl"
    curve = plot_reward_curve(metrics, out / "reward_curve.png", keys=("reward/mean",), title="GRPO on chain_sum")
    before, after = held_out_pass1(metrics)
    table = results_table(
        [["SFT", f"{before:.3f}", f"{seconds['SFT']:.0f}"], ["SFT + GRPO", f"{after:.3f}", f"{seconds['GRPO']:.0f}"]],
        ["checkpoint", f"greedy pass@1 ({rows['heldout']} held-out)", "seconds"],
    )
    print(f"\n{table}\n\nreward curve: {curve}\nmodel: {out}/grpo\ntotal: {time.monotonic() - start:.0f} s", flush=True)
    if not SFT_RANGE[0] <= before <= SFT_RANGE[1]:
        print(f"FAILED: the SFT checkpoint lies outside {SFT_RANGE}: {before:.3f}")
        return 1
    if after - before < MIN_GAIN:
        print(f"FAILED: GRPO raised pass@1 by {after - before:.3f}, less than {MIN_GAIN}")
        return 1
    print(f"GRPO raised greedy pass@1 by {after - before:+.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
