"""Checkpoints: complete or invisible, resumed bit for bit; exports that other programs read."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf_like.training.checkpoint import commit, complete_checkpoints, latest_checkpoint, prune, stage
from openrlhf_like.training.options import EngineOptions, OptimOptions
from openrlhf_like.types import UpdatePlan, UserError
from tests.tiny import build_tiny_model
from tests.training_workers import run_workers


def write(path: Path, tag: str, size: int = 10) -> None:
    (stage(path, tag) / "file").write_bytes(b"x" * size)
    commit(path, tag)


def test_an_interrupted_save_is_never_the_latest(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    write(tmp_path, "step_9")
    write(tmp_path, "step_10")
    (stage(tmp_path, "step_11") / "half").write_text("")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_10"
    write(tmp_path, "step_11")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_11"
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path, "step_1", 10)
    write(tmp_path, "step_1", 20)
    assert (tmp_path / "step_1" / "file").stat().st_size == 20
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_1"]


def test_the_oldest_go_first_by_number_and_by_size(tmp_path: Path) -> None:
    for k in (1, 2, 3, 10):
        write(tmp_path, f"step_{k}", 2**20)
    assert [p.name for p in prune(tmp_path, 3, 1e8)] == ["step_1"]
    assert [p.name for p in prune(tmp_path, 3, 2 / 1024)] == ["step_2"]
    assert [p.name for p in prune(tmp_path, 3, 0)] == ["step_3"]
    assert [p.name for p in complete_checkpoints(tmp_path)] == ["step_10"]


# -- real engines -------------------------------------------------------------------------------------------------

STEPS = 6


def make(rank: int, world: int, port: int, model: str, zero_stage: int, dtype: str, disable: bool = False):  # noqa: ANN201
    from openrlhf_like.training.sft_worker import SFTWorker

    optim = OptimOptions(lr=1e-2, lr_warmup_ratio=0.2, weight_decay=0.1)
    options = EngineOptions(zero_stage=zero_stage, param_dtype=dtype, optim=optim, disable_ds_ckpt=disable)
    worker = SFTWorker(options, rank, world)
    worker.setup("127.0.0.1", port)
    worker.load(model, STEPS)
    rng = np.random.default_rng(0)
    worker.set_data([(rng.integers(0, 250, 12), np.ones(12, np.int8)) for _ in range(4 * STEPS)])
    return worker


def plan(step: int, world: int) -> UpdatePlan:
    rows = list(range(4 * step, 4 * step + 4))
    share = [[rows[:2], rows[2:]]] if world == 1 else [[[r] for r in rows[:2]], [[r] for r in rows[2:]]]
    return UpdatePlan(share, 44, 4)


def draws() -> tuple[float, float]:
    return float(np.random.rand()), float(torch.rand(()))


def uninterrupted(rank: int, world: int, port: int, model: str, zero_stage: int, dtype: str) -> tuple:
    worker = make(rank, world, port, model, zero_stage, dtype)
    rates = []
    for step in range(STEPS):
        rates.append(worker.train_step(plan(step, world))["train/lr"][0])
        if step == 2:
            seen = draws()
    return worker.weights_checksum(), rates, seen


def killed_after_save(rank: int, world: int, port: int, model: str, zero_stage: int, dtype: str, path: str) -> None:
    import torch.distributed as dist

    worker = make(rank, world, port, model, zero_stage, dtype)
    if rank == 0:
        stage(path, "step_3")
    dist.barrier()
    for step in range(3):
        worker.train_step(plan(step, world))
    assert worker.save_checkpoint(f"{path}/.tmp-step_3")
    dist.barrier()
    if rank == 0:
        commit(path, "step_3")
        (stage(path, "step_4") / "half").write_text("")
    dist.barrier()
    worker.train_step(plan(3, world))  # lost: it came after the checkpoint
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, world: int, port: int, model: str, zero_stage: int, dtype: str, path: str) -> tuple:
    worker = make(rank, world, port, model, zero_stage, dtype)
    worker.load_checkpoint(str(latest_checkpoint(path)))
    seen = draws()
    rates = [worker.train_step(plan(step, world))["train/lr"][0] for step in range(3, STEPS)]
    return worker.weights_checksum(), rates, seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize(
    ("world", "zero_stage", "dtype"),
    [
        (1, 2, "fp32"),
        pytest.param(1, 0, "fp32", marks=pytest.mark.slow),
        pytest.param(1, 1, "fp32", marks=pytest.mark.slow),
        pytest.param(1, 3, "fp32", marks=pytest.mark.slow),
        pytest.param(1, 2, "bf16", marks=pytest.mark.slow),
        pytest.param(2, 2, "fp32", marks=pytest.mark.slow),
    ],
)
def test_fault_25_killed_between_two_steps_and_resumed_gives_the_same_bits(
    model: str, tmp_path: Path, world: int, zero_stage: int, dtype: str
) -> None:
    settings = (model, zero_stage, dtype)
    want = run_workers(uninterrupted, world, *settings)
    with pytest.raises(AssertionError, match=str(-signal.SIGKILL)):
        run_workers(killed_after_save, world, *settings, str(tmp_path))
    got = run_workers(resumed, world, *settings, str(tmp_path))
    for (checksum, rates, seen), (got_checksum, got_rates, got_seen) in zip(want, got, strict=True):
        assert got_rates == rates[3:] and len(set(got_rates)) == 3
        assert got_seen == seen
        assert got_checksum == checksum


def export_and_gather(rank: int, world: int, port: int, cases: list, out: str) -> dict:
    results = {}
    for name, model, zero_stage in cases:
        worker = make(rank, world, port, model, zero_stage, "fp32", disable=True)
        worker.train_step(plan(0, world))
        worker.train_step(plan(1, world))
        target = Path(out) / name
        if rank == 0:  # a run's folder is there already, and an older model
            (target / "run").mkdir(parents=True)
            (target / "model-00001-of-00002.safetensors").write_text("old")
        torch.distributed.barrier()
        worker.export_hf(str(target))
        gathered = {n: t.clone() for n, t in worker.gather().iter_full()}
        results[name] = (
            {n: t.numpy() for n, t in gathered.items()},
            worker.gather().names_and_shapes(),
            worker.save_checkpoint(str(target / "never")),
        )
        worker.engine.engine.destroy()
        worker.engine = None
    return results


def test_exports_load_elsewhere_with_the_trained_weights_and_gather_names_them_once(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tied = str(build_tiny_model(tmp_path / "tied", tie=True))
    untied = str(build_tiny_model(tmp_path / "untied", tie=False))
    cases = [("tied-2", tied, 2), ("tied-3", tied, 3), ("untied-3", untied, 3)]
    ranks = run_workers(export_and_gather, 2, cases, str(tmp_path / "out"))
    for name, source, _ in cases:
        folder = tmp_path / "out" / name
        weights, declared, saved = ranks[0][name]
        assert saved is False and not (folder / "never").exists()
        assert (folder / "run").is_dir() and not list(folder.glob(".tmp-*"))
        assert not (folder / "model-00001-of-00002.safetensors").exists()
        with (
            safe_open(folder / "model.safetensors", "np") as stored,
            safe_open(f"{source}/model.safetensors", "np") as original,
        ):
            assert set(stored.keys()) == set(weights) == set(original.keys())
            for key in stored.keys():  # noqa: SIM118 - not a dict
                np.testing.assert_array_equal(stored.get_tensor(key), weights[key])
                assert not np.array_equal(stored.get_tensor(key), original.get_tensor(key)), key
        assert [(n, s) for n, _, s in declared] == [(n, w.shape) for n, w in weights.items()]
        for n, w in ranks[1][name][0].items():
            np.testing.assert_array_equal(w, weights[n])
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert loaded.config.tie_word_embeddings is (source == tied) and loaded.config.use_cache
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert "im_start" in tokenizer.chat_template


def resume_with_other_workers(rank: int, world: int, port: int, model: str, path: str) -> str:
    worker = make(rank, world, port, model, 2, "fp32")
    try:
        worker.load_checkpoint(path)
    except UserError as e:
        return str(e)
    return ""


def test_a_checkpoint_of_other_workers_is_refused_in_one_line(model: str, tmp_path: Path) -> None:
    (message,) = run_workers(resume_with_other_workers, 1, model, str(tmp_path))
    assert str(tmp_path) in message and "worker 0" in message and "\n" not in message
    torch.save({"world_size": 2}, tmp_path / "worker_00000.pt")
    (message,) = run_workers(resume_with_other_workers, 1, model, str(tmp_path))
    assert "2 workers" in message and "with 1" in message
