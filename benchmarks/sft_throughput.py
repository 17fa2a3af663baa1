"""Training throughput of our workers against plain torch loops, in CPU seconds of this one process.

    python benchmarks/sft_throughput.py [--steps 12] [--batch 16]

The same batches of log-normal lengths (8 to 400 tokens) on a model of 0.5 M parameters: SFT, and one on-policy GRPO
update. The plain loops pad each batch to its longest row and take the full logits. Steps of ours and of theirs
alternate, and CPU time is counted, so that other load on the machine changes little.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "python")]

from tiny_model import build_tiny_model  # noqa: E402

from openrlhf_like.data.sft import SFTExample  # noqa: E402
from openrlhf_like.training import device as dev  # noqa: E402
from openrlhf_like.training.batching import plan_updates  # noqa: E402
from openrlhf_like.training.options import EngineOptions, OptimOptions  # noqa: E402
from openrlhf_like.training.policy_options import PolicyOptions  # noqa: E402
from openrlhf_like.types import Segment, Trajectory, TurnParams, UpdatePlan  # noqa: E402

LR = 1e-3
MAX_TOKENS = 16192


def make_rows(count: int, seed: int = 0) -> list[np.ndarray]:
    """Token ids of log-normal lengths."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.0, 0.8, count), 8, 400).astype(int)
    return [rng.integers(0, 250, n) for n in lengths]


def make_worker(cls: type, model: str) -> Any:
    """One worker in this process."""
    options = EngineOptions(optim=OptimOptions(lr=LR, lr_scheduler="constant", lr_warmup_ratio=0.0))
    worker = cls(options, 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker.setup("127.0.0.1", port)
    worker.load(model, 1000)
    return worker


def plan_of(rows: Sequence[np.ndarray], chosen: Sequence[int], micro: int, max_tokens: int | None) -> UpdatePlan:
    lengths = [len(r) for r in rows]
    (plan,) = plan_updates(lengths, [n - 1 for n in lengths], len(chosen), 1, micro, max_tokens, order=chosen)
    return plan


class Plain:
    """What a person writes first: one padded batch, full logits, AdamW."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95))

    def step(self, rows: Sequence[np.ndarray], advantages: Sequence[float] | None = None, micro: int = 10**9) -> None:
        """One optimizer step in micro-batches of ``micro`` rows; with ``advantages`` the PPO loss at ratio 1."""
        import torch

        total = sum(len(r) - 1 for r in rows)
        for start in range(0, len(rows), micro):
            part = rows[start : start + micro]
            width = max(len(r) for r in part)
            ids, mask = torch.zeros(len(part), width, dtype=torch.long), torch.zeros(len(part), width)
            for i, row in enumerate(part):
                ids[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1.0
            logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
            chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
            if advantages is not None:
                weight = torch.tensor(advantages[start : start + micro]).unsqueeze(1)
                ratio = (chosen - chosen.detach()).exp()
                chosen = torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight)
            (-(chosen * mask[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(name: str, tokens: Sequence[int], contenders: dict[str, Callable[[int], Any]]) -> dict[str, float]:
    """CPU seconds of each contender over the same steps, taken in turns; the first step is a warm-up."""
    spent = dict.fromkeys(contenders, 0.0)
    for step in range(len(tokens)):
        for who, run in contenders.items():
            start = time.process_time()
            run(step)
            spent[who] += (time.process_time() - start) if step else 0.0
    counted = sum(tokens[1:])
    rates = {who: counted / seconds for who, seconds in spent.items()}
    ours = next(iter(rates.values()))
    for who, rate in rates.items():
        sys.stdout.write(f"{name:12s} {who:34s} {rate:9.0f} tokens/s   ours is {ours / rate:5.2f}x\n")
    return rates


def run_sft(model: str, steps: int, batch: int) -> dict[str, float]:
    from openrlhf_like.training.sft_worker import SFTWorker

    rows = make_rows(steps * batch)
    worker, plain = make_worker(SFTWorker, model), Plain(model)
    worker.set_data([SFTExample(r, np.ones(len(r), np.int8)) for r in rows])
    windows = [list(range(i * batch, (i + 1) * batch)) for i in range(steps)]

    def ours(max_tokens: int | None) -> Callable[[int], Any]:
        return lambda k: worker.train_step(plan_of(rows, windows[k], 8, max_tokens))

    return compare(
        "SFT",
        [sum(len(rows[r]) for r in w) for w in windows],
        {
            "ours, micro-batches of 8 rows": ours(None),
            "ours, dynamic batching": ours(MAX_TOKENS),
            "plain loop, one padded batch": lambda k: plain.step([rows[r] for r in windows[k]]),
            "plain loop, micro-batches of 8": lambda k: plain.step([rows[r] for r in windows[k]], micro=8),
        },
    )


def run_grpo(model: str, steps: int, batch: int) -> dict[str, float]:
    from openrlhf_like.training.policy_worker import PolicyWorker

    rows = make_rows(steps * batch, seed=1)
    worker, plain = make_worker(PolicyWorker, model), Plain(model)
    worker.policy = PolicyOptions()
    windows = [list(range(i * batch, (i + 1) * batch)) for i in range(steps)]
    credit = [float(i % 2) * 2 - 1 for i in range(batch)]

    def trajectory(row: int) -> Trajectory:
        ids = rows[row].astype(np.int32)
        mask = np.ones(len(ids), np.int8)
        mask[0] = 0
        logprobs = np.where(mask, -5.5, 0.0).astype(np.float32)
        segment = Segment(ids, mask, logprobs, np.zeros(len(ids), np.int32), [TurnParams(1, len(ids))])
        return Trajectory(str(row), "p", "g", [segment])

    def ours(k: int) -> None:
        worker.stage_trajectories({r: trajectory(r) for r in windows[k]})
        worker.prepare_advantages(dict(zip(windows[k], credit, strict=True)))
        worker.update(plan_of(rows, windows[k], 8, MAX_TOKENS))

    return compare(
        "GRPO update",
        [sum(len(rows[r]) for r in w) for w in windows],
        {
            "ours, dynamic batching": ours,
            "plain loop, one padded batch": lambda k: plain.step([rows[r] for r in windows[k]], credit),
            "plain loop, micro-batches of 8": lambda k: plain.step([rows[r] for r in windows[k]], credit, micro=8),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    dev.prepare_process("cpu", 1)
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_tiny_model(Path(folder) / "model", hidden=128, layers=3, heads=4))
        run_sft(model, args.steps, args.batch)
        run_grpo(model, args.steps, args.batch)


if __name__ == "__main__":
    main()
