"""Short runs of the real SFT worker, from records to weights, against a plain loop over unpadded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_like.data.load import Record
from openrlhf_like.data.sampler import ResumableSampler, num_batches
from openrlhf_like.data.sft import SFTExample, SFTOptions, build_sft_examples
from openrlhf_like.data.templates import load_tokenizer
from openrlhf_like.training.batching import plan_updates
from openrlhf_like.training.options import EngineOptions, OptimOptions
from tests.tiny import build_tiny_model
from tests.training_workers import run_workers

ROWS, BATCH, MICRO, EPOCHS, LR = 20, 8, 2, 2, 0.5
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


def examples(model: str) -> list[SFTExample]:
    """Answers of 1 to 20 characters, by a tokenizer whose pad token is its end token."""
    tokenizer = load_tokenizer(model)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    records = [Record({"input": f"q{i}", "output": "ab" * (i % 10) + "c"}, "s", i, f"s:{i}") for i in range(ROWS)]
    made, _ = build_sft_examples(records, tokenizer, SFTOptions(output_key="output", input_template="{}: "))
    assert all(e.input_ids[-1] == tokenizer.eos_token_id and e.loss_mask[-1] for e in made)
    return made


def train(worker: Any, data: list[SFTExample], batch: int, micro: int, epochs: int, max_tokens: int | None = None):
    """As the SFT loop does it; metrics of each step."""
    worker.set_data(data)
    lengths, labels = [len(e) for e in data], [e.num_labels for e in data]
    out = []
    for rows in ResumableSampler(len(data), batch, seed=0, epochs=epochs):
        (plan,) = plan_updates(lengths, labels, len(rows), worker.world_size, micro, max_tokens, order=rows)
        out.append(worker.train_step(plan))
    return out


def make_worker(rank: int, world: int, port: int, model: str, total: int, **optim: Any):
    from openrlhf_like.training.sft_worker import SFTWorker

    class PlainSGD(SFTWorker):
        def make_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(module.parameters(), lr=1.0)

    settings: dict[str, Any] = {"lr": LR, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "max_norm": 0.0, **optim}
    worker = PlainSGD(EngineOptions(optim=OptimOptions(**settings), chat_template=TEMPLATE), rank, world)
    worker.setup("127.0.0.1", port)
    worker.load(model, total)
    return worker


def runs(rank: int, world: int, port: int, model: str, out: str) -> dict[str, Any]:
    data = examples(model)
    worker = make_worker(rank, world, port, model, num_batches(ROWS, BATCH, EPOCHS))
    result: dict[str, Any] = {"metrics": train(worker, data, BATCH, MICRO, EPOCHS)}
    result["weights"] = {n: t.numpy().copy() for n, t in worker.gather().iter_full()}
    worker.export_hf(out)
    if world == 1:
        short = [SFTExample(np.array([1, 2, 3 + i % 50]), np.array([0, 1, 1])) for i in range(1000)]
        total = num_batches(1000, 128, 3)
        schedule = {"lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.1, "min_lr_ratio": 0.1}
        worker = make_worker(rank, world, port, model, total, **schedule)
        result["rates"] = [m["train/lr"][0] for m in train(worker, short, 128, 128, 3)]
        sizes = np.clip(np.random.default_rng(0).lognormal(3.5, 0.8, 128), 8, 400).astype(int)
        uneven = [SFTExample(np.arange(n) % 250, np.ones(n, np.int8)) for n in sizes]
        (step,) = train(worker, uneven, 128, 8, 1, max_tokens=2048)
        result["padding"] = step["batch/padding_fraction"]
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoTokenizer

    path = str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def results(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    out = tmp_path_factory.mktemp("out")
    return {world: run_workers(runs, world, model, str(out / str(world))) for world in (1, 2)}


@pytest.fixture(scope="module")
def expected(model: str) -> tuple[dict[str, np.ndarray], list[float]]:
    """(weights, loss of each step): one row at a time, no padding, mean over the labels of each whole batch."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = examples(model)
    optimizer = torch.optim.SGD(lm.parameters(), lr=LR)
    losses = []
    for rows in ResumableSampler(ROWS, BATCH, seed=0, epochs=EPOCHS):
        optimizer.zero_grad()
        total = sum(data[r].num_labels for r in rows)
        losses.append(0.0)
        for row in rows:
            ids = torch.tensor(data[row].input_ids, dtype=torch.long)
            log_p = torch.log_softmax(lm(input_ids=ids[None]).logits[0, :-1], -1)
            chosen = log_p.gather(1, ids[1:, None]).squeeze(1) * torch.tensor(data[row].loss_mask[1:])
            loss = -chosen.sum() / total
            loss.backward()
            losses[-1] += float(loss.detach())
        optimizer.step()
    return {n: p.detach().numpy() for n, p in lm.named_parameters()}, losses


@pytest.mark.parametrize("world", [1, 2])
def test_fault_04_and_11_two_epochs_with_incomplete_windows_and_pad_equal_to_eos_end_in_the_plain_loops_weights(
    results: dict, expected: tuple[dict[str, np.ndarray], list[float]], world: int
) -> None:
    """Windows of 8, 8 and 4 rows, twice. Trained padding or an untrained end token would show."""
    from openrlhf_like.training.metrics import merge_metrics

    weights, losses = expected
    steps = zip(*(rank["metrics"] for rank in results[world]), strict=True)
    assert [merge_metrics(s)["train/loss"] for s in steps] == pytest.approx(losses, rel=1e-4)
    for rank in results[world]:
        for name, want in weights.items():
            np.testing.assert_allclose(rank["weights"][name], want, atol=1e-5, err_msg=name)


def test_fault_20_1000_samples_in_batches_of_128_for_3_epochs_are_24_updates_that_end_at_the_floor(
    results: dict,
) -> None:
    """The rule: an epoch's incomplete last batch is an update of its own, so 3 x 8."""
    rates = results[1][0]["rates"]
    assert len(rates) == 24
    top = rates.index(max(rates))
    assert top == 3 and all(b < a for a, b in zip(rates[top:], rates[top + 1 :], strict=False))
    assert 0.1 * LR < rates[-1] < 0.12 * LR


def test_padding_is_below_ten_percent_where_it_is_computed(results: dict) -> None:
    wasted, computed = results[1][0]["padding"]
    assert wasted / computed < 0.10


def test_the_exported_tokenizer_has_the_chat_template_that_was_trained_with(results: dict, tmp_path_factory) -> None:
    from transformers import AutoTokenizer

    folder = next(p for p in Path(tmp_path_factory.getbasetemp()).glob("out*/1") if (p / "config.json").is_file())
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
