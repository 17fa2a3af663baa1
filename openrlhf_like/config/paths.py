"""Checks of what the options point at: models, data, reward files, output folders. Nothing is loaded or imported."""

from __future__ import annotations

import ast
import json
import os
import re
import tempfile
from pathlib import Path

from openrlhf_like.types import UserError

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATA_ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def _offline(*names: str) -> bool:
    return any(os.environ.get(n, "").lower() in ("1", "true", "yes", "on") for n in names)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _looks_local(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..") or not _HUB_NAME.fullmatch(name)


def check_model(name: str | None, flag: str) -> None:
    """A model folder with a config.json and a vocabulary that holds its tokenizer's ids, or a plausible hub name.

    None passes: ``check_required`` asks for what is missing, after everything given has been looked at.

    Raises:
        UserError: one line with ``flag``, the value and the fix.
    """
    if name is None:
        return
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{flag} {name}: has no config.json; give a Hugging Face model folder")
        _check_vocabulary(folder, flag, name)
        return
    if folder.exists():
        raise UserError(f"{flag} {name}: is a file; give a Hugging Face model folder")
    if _looks_local(name):
        raise UserError(f"{flag} {name}: no such folder; give a local model folder or a hub name (owner/name)")
    if _offline(*_OFFLINE[:2]) and not (_hub_cache() / ("models--" + name.replace("/", "--"))).is_dir():
        raise UserError(
            f"{flag} {name}: no such folder, and the hub is off (HF_HUB_OFFLINE); give a local model folder"
        )


def _check_vocabulary(folder: Path, flag: str, name: str) -> None:
    tokenizer = folder / "tokenizer.json"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{flag} {name}: its config.json is not valid JSON; give a Hugging Face model folder") from None
    nested = config.get("text_config")
    vocab = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    if not isinstance(vocab, int) or not tokenizer.is_file():
        return
    try:
        data = json.loads(tokenizer.read_text(encoding="utf-8"))
        entries = data["model"].get("vocab", {})
        ids = list(entries.values()) if isinstance(entries, dict) else [len(entries) - 1]
        ids += [token["id"] for token in data.get("added_tokens", [])]
        highest = max(ids, default=-1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # an unusual tokenizer file is the loader's business
    if highest >= vocab:
        raise UserError(
            f"{flag} {name}: the tokenizer has ids up to {highest} and the model's vocabulary is {vocab};"
            " use the model's own tokenizer, or resize the model's embeddings"
        )


def check_required(flag: str, value: str | None, what: str) -> None:
    """Raise UserError naming ``flag`` where nothing was given."""
    if not value:
        raise UserError(f"{flag}: missing; give {what}")


def check_datasets(spec: str | None, flag: str) -> None:
    """Every name of a comma-separated list: an existing file or folder, or a plausible hub name."""
    if spec is None:
        return
    names = [n.strip() for n in spec.split(",") if n.strip()]
    if not names:
        raise UserError(f"{flag} {spec!r}: names no data; give a data file, a folder or a hub name")
    for name in names:
        bare = re.split(r"[@#]", name, maxsplit=1)[0]  # OpenRLHF's name@data_dir, and name#config
        if Path(name).expanduser().exists() or Path(bare).expanduser().exists():
            continue
        if _looks_local(bare) or bare.lower().endswith(_DATA_ENDINGS):
            raise UserError(f"{flag} {name}: no such file or folder; give an existing one, or a hub name (owner/name)")
        cached = _hub_cache() / ("datasets--" + bare.replace("/", "--"))
        if _offline("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") and not cached.is_dir():
            raise UserError(f"{flag} {name}: no such file, and the hub is off (HF_HUB_OFFLINE); give a local file")


def check_probs(probs: str | None, spec: str | None, flag: str, data_flag: str) -> None:
    """As many positive numbers as data sets, summing to 1."""
    if probs is None or not probs.strip():
        return
    try:
        weights = [float(p) for p in probs.split(",")]
    except ValueError:
        raise UserError(f"{flag} {probs}: not a list of numbers; write for example 0.3,0.7") from None
    names = [n for n in (spec or "").split(",") if n.strip()]
    if len(weights) != len(names):
        raise UserError(
            f"{flag} {probs}: {len(weights)} probabilities for the {len(names)} of {data_flag}; give one each"
        )
    if not all(w > 0 for w in weights) or abs(sum(weights) - 1) > 1e-3:
        raise UserError(f"{flag} {probs}: must be above 0 and sum to 1; they sum to {sum(weights):g}")


def check_reward_source(spec: str, flag: str = "--reward.remote_url") -> None:
    """http(s) addresses, or a Python file that defines ``reward_func``. The file is parsed, never run."""
    if Path(spec).expanduser().is_file():
        _check_reward_file(spec, flag)
        return
    targets = [t.strip() for t in spec.split(",") if t.strip()]
    urls = [t for t in targets if t.startswith(("http://", "https://"))]
    for target in (t for t in targets if t not in urls):
        if not Path(target).expanduser().is_file():
            raise UserError(f"{flag} {target}: no such file; give a Python file with reward_func, or http(s) addresses")
        _check_reward_file(target, flag)
    if not targets or len(urls) not in (0, len(targets)) or (not urls and len(targets) > 1):
        raise UserError(f"{flag} {spec}: give one Python file, or http(s) addresses alone")


def _check_reward_file(path: str, flag: str) -> None:
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes(), filename=path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(f"{flag} {path}:{line}: not valid Python ({getattr(error, 'msg', error)}); fix it") from None
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); check its permissions") from None
    if not any(_defines(node, "reward_func") for node in ast.walk(tree)):
        raise UserError(
            f"{flag} {path}: has no function reward_func; define reward_func(queries, prompts, labels, **kwargs)"
        )


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any(a.name == "*" or (a.asname or a.name) == name for a in node.names)
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return False


def check_writable(path: str, flag: str) -> None:
    """The folder exists or can be made, and can be written; nothing is left behind."""
    folder = Path(path).expanduser()
    if not path:
        raise UserError(f"{flag}: empty; give a folder")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder")
        os.rmdir(tempfile.mkdtemp(prefix=".write_test_", dir=folder))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{flag} {path}: cannot be written ({reason}); give a folder that you may write") from None
