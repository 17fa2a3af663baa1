"""What spinning OpenMP threads cost where processes share cores: why cluster/environment.py sets GOMP_SPINCOUNT.

    python benchmarks/omp_spin.py --processes 3

Runs training steps of a small model in several processes at the same time, two threads each, under each setting, and
prints the median seconds of a step relative to the fastest setting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "python"))

SETTINGS = {"default": {}, "spin 1000": {"GOMP_SPINCOUNT": "1000"}, "passive": {"OMP_WAIT_POLICY": "passive"}}


def step_seconds(model_path: str, steps: int) -> float:
    """Median seconds of a forward, backward and update on 64 rows of 16 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    import openrlhf_like  # noqa: F401 - readies torchvision before transformers asks for it

    model = AutoModelForCausalLM.from_pretrained(model_path)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 200, (64, 16))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def run(setting: dict[str, str], processes: int, model_path: str) -> float:
    """Median over the processes, all running at the same time."""
    env = {**os.environ, "OMP_NUM_THREADS": "2", **setting}
    words = [sys.executable, __file__, "--child", model_path]
    children = [subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return statistics.median(float(child.communicate()[0].split()[-1]) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        sys.stdout.write(f"{step_seconds(args.child, args.steps)}\n")
        return
    from tiny_model import build_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_model(folder, hidden=128, layers=3, heads=4)
        seconds = {name: run(setting, args.processes, path) for name, setting in SETTINGS.items()}
    fastest = min(seconds.values())
    for name, value in seconds.items():
        sys.stdout.write(f"{name:10s} {value * 1000:6.0f} ms a step  x{value / fastest:.2f}\n")


if __name__ == "__main__":
    main()
