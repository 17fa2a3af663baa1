"""Checkpoints on disk: resumable state, and models for other programs.

A resumable checkpoint is a folder ``<path>/<tag>``. It is written under a temporary name beside it and renamed once
every worker is done, so that a folder without the prefix is always complete, whenever a run was killed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from openrlhf_like.training import device as dev
from openrlhf_like.training.gather import WeightGather
from openrlhf_like.training.strategy import TrainEngine
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

STAGING_PREFIX = ".tmp-"
#: What a checkpoint is called. Nothing else in the folder is ever taken for one, or deleted as one.
_NAME = re.compile(r"(global_)?step_?\d+")
_GIB = 2**30


def staging_path(path: str | os.PathLike[str], tag: str) -> Path:
    """Where checkpoint ``tag`` is written before it is complete."""
    return Path(path) / f"{STAGING_PREFIX}{tag}"


def stage(path: str | os.PathLike[str], tag: str) -> Path:
    """An empty staging folder; what an interrupted save left there is thrown away."""
    tmp = staging_path(path, tag)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    return tmp


def commit(path: str | os.PathLike[str], tag: str) -> Path:
    """Give a staged checkpoint its name; an older one of the same name is replaced."""
    final, tmp = Path(path) / tag, staging_path(path, tag)
    if final.exists():
        old = Path(path) / f"{STAGING_PREFIX}old-{tag}"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        tmp.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        tmp.rename(final)
    return final


def _order(folder: Path) -> tuple[int, float]:
    numbers = re.findall(r"\d+", folder.name)
    return (int(numbers[-1]) if numbers else -1, folder.stat().st_mtime)


def complete_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints, oldest first: by the number in their name, then by time."""
    root = Path(path)
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=_order)


def latest_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint, or None."""
    found = complete_checkpoints(path)
    return found[-1] if found else None


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def prune(path: str | os.PathLike[str], max_num: int, max_mem_gb: float) -> list[Path]:
    """Delete the oldest checkpoints beyond ``max_num`` or ``max_mem_gb`` (GiB, all together); the newest stays."""
    found = complete_checkpoints(path)
    sizes = {p: _size(p) for p in found}
    removed = []
    while len(found) > 1 and (len(found) > max(1, max_num) or sum(sizes[p] for p in found) > max_mem_gb * _GIB):
        victim = found.pop(0)
        # Renamed first: a deletion that is cut short must not leave half a checkpoint under a complete one's name.
        doomed = victim.with_name(f"{STAGING_PREFIX}old-{victim.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        victim.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(victim)
    return removed


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def save_worker_state(folder: Path, rank: int, engine: TrainEngine, extra: dict[str, Any]) -> None:
    """This worker's part of a checkpoint: its DeepSpeed shards, its RNGs, its counters. All ranks take part."""
    engine.engine.save_checkpoint(str(folder), tag="engine", save_latest=False)
    state = {"rng": dev.rng_state(), "engine": engine.state_dict(), "world_size": engine.world_size, "extra": extra}
    torch.save(state, folder / f"worker_{rank:05d}.pt")


def load_worker_state(folder: Path, rank: int, engine: TrainEngine) -> dict[str, Any]:
    """Put back what :func:`save_worker_state` wrote; returns its ``extra``."""
    file = folder / f"worker_{rank:05d}.pt"
    if not file.is_file():
        raise UserError(f"--ckpt.path {folder}: has no state of worker {rank}; resume with as many workers as wrote it")
    state = torch.load(file, weights_only=False)  # our own file; RNG states are not plain tensors
    if state["world_size"] != engine.world_size:
        raise UserError(
            f"--ckpt.path {folder}: written by {state['world_size']} workers, resumed with {engine.world_size};"
            " use the same number"
        )
    loaded, _ = engine.engine.load_checkpoint(str(folder), tag="engine", load_lr_scheduler_states=False)
    if loaded is None:
        raise UserError(f"--ckpt.path {folder}: DeepSpeed finds no state in it; remove the folder")
    engine.load_state_dict(state["engine"])
    dev.set_rng_state(state["rng"])
    return state["extra"]


def export_hf(engine: TrainEngine, output_dir: str | os.PathLike[str], tokenizer: Any, rank: int) -> None:
    """Write the model in Hugging Face form: full weights as safetensors, tokenizer, chat template.

    All ranks take part; rank 0 writes. A reader of ``output_dir`` never sees a half-written model: everything is
    written beside it first and moved in, ``config.json`` last, without which nothing loads.
    """
    state = WeightGather(engine).full_state_dict()
    if rank == 0:
        out = Path(output_dir)
        out.mkdir(parents=True, exist_ok=True)
        tmp = out / f"{STAGING_PREFIX}export"
        shutil.rmtree(tmp, ignore_errors=True)
        model = engine.module.model
        use_cache, model.config.use_cache = model.config.use_cache, True
        try:
            model.save_pretrained(tmp, state_dict=state)
        finally:
            model.config.use_cache = use_cache
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp)
        _move_in(tmp, out)
    _barrier()


def _move_in(tmp: Path, out: Path) -> None:
    (out / "config.json").unlink(missing_ok=True)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    for file in sorted(tmp.iterdir(), key=lambda f: f.name == "config.json"):
        target = out / file.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(file, target)
    tmp.rmdir()
