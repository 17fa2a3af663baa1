"""No dead options: every field is read by the program, refused as not built, or named in a warning."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import openrlhf_like
from openrlhf_like.config import COMMANDS
from openrlhf_like.config.effects import _COMMON, _RL, _SFT
from openrlhf_like.config.tree import kinds
from openrlhf_like.config.unbuilt import UNBUILT, UNBUILT_COMMANDS

PACKAGE = Path(openrlhf_like.__file__).parent

#: Field (``.*`` for a group) -> why nothing reads it. "needs X": X is in the table of what is not built, so that the
#: field has no effect that a user could miss; when X leaves that table, the test asks for the field again.
ALLOWED = {
    "critic.*": "needs algo.advantage.estimator",
    "actor.muon.*": "needs actor.optim",
    "muon.*": "needs optim",
    "ds.lora.*": "needs ds.lora.rank",
    "ds.ring_attn_head_stride": "needs ds.ring_attn_size",
    "ds.value_head_prefix": "needs reward.model_name_or_path",
    "reward.num_nodes": "needs reward.model_name_or_path",
    "reward.num_gpus_per_node": "needs reward.model_name_or_path",
    "reward.offload": "needs reward.model_name_or_path",
    "reward.normalize_enable": "needs reward.model_name_or_path",
    "train.colocate_critic_reward": "needs reward.model_name_or_path",
    "train.async_queue_size": "needs train.async_enable",
    "train.ema_beta": "needs train.enable_ema",
    "data.image_key": "needs data.max_images_per_prompt",
    "algo.advantage.lambd": "needs algo.advantage.estimator",
    "config": "read while the command line is parsed",
    "local_rank": "accepted for launchers that pass it; a value above 0 is named",
    "logger.tensorboard_dir": "read by Trackers.from_config, which is handed cfg.logger",
}


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern


@cache
def _readings() -> tuple[frozenset[str], tuple[str, ...]]:
    """The last two parts of every dotted name that is read, and regular expressions for names built at run time."""
    tails: set[str] = set()
    patterns: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        # config/ checks options and warns of them; that is not use. resolve.py alone turns options into others.
        if file.parent.name == "config" and file.name != "resolve.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                parent = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                tails.add(f"{parent.strip('_').removesuffix('_config').removesuffix('s')}.{node.attr}")
                tails.add(f"{parent}.{node.attr}")
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                words = node.args if name in ("get_or", "limit") else []
                for word in (w for w in words if isinstance(w, ast.Constant) and isinstance(w.value, str)):
                    tails.add(f"timeout.{word.value}" if name == "limit" else _tail(word.value))
                for word in (w for w in words if isinstance(w, ast.JoinedStr)):
                    pieces = [re.escape(v.value) if isinstance(v, ast.Constant) else "[a-z_.]*" for v in word.values]
                    if pieces[-1] != "[a-z_.]*":
                        patterns.add("".join(str(p) for p in pieces))
            elif isinstance(node, ast.Constant) and str(node.value).partition(".")[0] in ("train", "ds", "algo"):
                tails.add(_tail(str(node.value)))  # in a table of options; "timeout.*" stands in messages too
    return frozenset(tails), tuple(patterns)


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:]) if "." in name else f"cfg.{name}"


def _is_read(name: str) -> bool:
    tails, patterns = _readings()
    return _tail(name) in tails or any(re.fullmatch(p, name) for p in patterns)


def _is_allowed(name: str) -> bool:
    return any(_matches(name, pattern) for pattern in ALLOWED)


def _always_named() -> set[str]:
    """Options whose warning depends on no other option: the condition looks at nothing."""
    out: set[str] = set()
    for entry in (*_COMMON, *_RL, *_SFT):
        if not entry.when.__code__.co_names and entry.when(None) is True:
            out.update(entry.names)
    return out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in UNBUILT_COMMANDS])
def test_every_option_is_read_or_refused_or_named_or_allowed_with_a_reason(command: str) -> None:
    covered = {entry.name for entry in UNBUILT if not entry.values} | _always_named()
    dead = [n for n in kinds(COMMANDS[command]) if not (_is_read(n) or n in covered or _is_allowed(n))]
    assert not dead, f"{command}: nothing reads {', '.join(dead)}"


def test_what_is_allowed_because_something_is_not_built_still_waits_for_it() -> None:
    unbuilt = {entry.name for entry in UNBUILT}
    for name, reason in ALLOWED.items():
        if reason.startswith("needs "):
            assert reason.removeprefix("needs ") in unbuilt, f"{name}: {reason}, which is built now: read it"


def test_an_option_that_nothing_reads_would_be_found() -> None:
    assert not _is_read("train.no_such_option") and not _is_read("no_such_option")
