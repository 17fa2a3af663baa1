"""The gradient of an optimizer step is that of its global batch, however it is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from openrlhf_like.training.options import EngineOptions, OptimOptions
from openrlhf_like.types import UpdatePlan
from tests.tiny import build_tiny_model
from tests.training_workers import run_workers

LENGTHS = [5, 23, 9, 31, 4, 12, 17, 7]
TOLERANCE = 1e-5


def examples() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    out = []
    for n in LENGTHS:
        mask = (rng.random(n) < 0.6).astype(np.int8)
        mask[0], mask[-1] = 0, 1
        out.append((rng.integers(0, 250, n), mask))
    return out


def plan(micro_batches: list[list[list[int]]]) -> UpdatePlan:
    data = examples()
    rows = [r for rank in micro_batches for mb in rank for r in mb]
    return UpdatePlan(micro_batches, sum(int(data[r][1].sum()) for r in rows), len(rows))


ONE_WORKER = {
    "1x8": (False, [[list(range(8))]]),
    "4x2": (False, [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
    "permuted 3 micro-batches": (False, [[[7, 2, 5], [6, 0], [1, 4, 3]]]),
    "packed 1x8": (True, [[list(range(8))]]),
    "packed uneven": (True, [[[3], [0, 1, 2, 4, 7], [6, 5]]]),
    "with an empty micro-batch": (False, [[[0, 1, 2, 3], [], [4, 5, 6, 7]]]),
}
TWO_WORKERS = {
    "even": (False, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    "uneven, empty share": (False, [[[0], [1, 2], [3, 4, 6]], [[5, 7], [], []]]),
    "packed": (True, [[[0, 7, 1, 2]], [[3, 4, 5, 6]]]),
    "a worker with nothing": (True, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[], []]]),
}


def step_gradients(rank: int, world: int, port: int, model: str, stages: list[int], cases: dict) -> dict:
    """Weights before minus after one step of plain SGD at rate 1: the gradient, through the whole engine."""
    import torch.distributed as dist

    from openrlhf_like.training.sft_worker import SFTWorker

    class PlainSGD(SFTWorker):
        def make_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=1.0)

    def weights(worker: SFTWorker) -> dict[str, np.ndarray]:
        return {n: t.float().numpy().copy() for n, t in worker.gather().iter_full()}

    out: dict = {}
    for stage in stages:
        for name, (packed, micro_batches) in cases.items():
            optim = OptimOptions(lr=1.0, lr_scheduler="constant", lr_warmup_ratio=0.0, max_norm=0.0)
            options = EngineOptions(zero_stage=stage, packing=packed, optim=optim)
            worker = PlainSGD(options, rank, world)
            worker.setup("127.0.0.1", port)
            worker.load(model, 10)
            worker.set_data(examples())
            before = weights(worker)
            metrics = worker.train_step(plan(micro_batches))
            after = weights(worker)
            out[stage, name] = ({n: before[n] - after[n] for n in before}, metrics["train/grad_norm"][0])
            worker.engine.engine.destroy()
            worker.engine = None
    dist.barrier()
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, np.ndarray]:
    """Plain autograd over full logits, one row at a time: sum of -log p over all labels / their number."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = examples()
    total = sum(int(mask.sum()) for _, mask in data)
    for ids, mask in data:
        tokens = torch.tensor(ids).unsqueeze(0)
        logprobs = torch.log_softmax(lm(input_ids=tokens).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)
        (-(chosen * torch.tensor(mask[1:])).sum() / total).backward()
    return {n: p.grad.numpy() for n, p in lm.named_parameters()}


def check(results: dict, expected: dict[str, np.ndarray]) -> None:
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in expected.values()))
    for key, (gradient, reported) in results.items():
        assert gradient.keys() == expected.keys()
        for name, want in expected.items():
            np.testing.assert_allclose(gradient[name], want, atol=TOLERANCE, err_msg=f"{key} {name}")
        assert reported == pytest.approx(norm, rel=1e-4), key


def test_fault_10_one_worker_any_micro_batching_padded_or_packed_same_gradient(model: str, expected: dict) -> None:
    (results,) = run_workers(step_gradients, 1, model, [0, 1, 2, 3], ONE_WORKER)
    check(results, expected)


def test_fault_10_and_32_two_workers_with_uneven_shares_same_gradient_no_hang(model: str, expected: dict) -> None:
    for results in run_workers(step_gradients, 2, model, [0, 1, 2, 3], TWO_WORKERS):
        check(results, expected)
