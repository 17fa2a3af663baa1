"""Names of data sets -> records with provenance, mixtures and fingerprints.

The spec is OpenRLHF's: ``a,b`` with optional probabilities ``0.3,0.7``; each name a local file, a folder of files, a
``save_to_disk`` folder or a hub name (``name@data_dir`` as there; ``name#config`` is ours).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from openrlhf_like.data.hub import hub_reachable, looks_like_path
from openrlhf_like.data.readers import FILE_KINDS, Row, read_file
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One row of one data set.

    Attributes:
        data: its columns.
        source: short name of its data set, unique within the spec (the file's or folder's stem, or the hub name).
        row: its index in that data set and split, from 0.
        where: what a message calls it: ``file:line``, ``file[row]`` or ``name[split][row]``.
    """

    data: dict[str, Any]
    source: str
    row: int
    where: str


def load_records(
    spec: str,
    split: str = "train",
    probs: str | None = None,
    max_samples: int = 100_000_000,
    seed: int = 42,
    flag: str = "--data.dataset",
) -> list[Record]:
    """Read every data set of ``spec`` and join them.

    Without ``probs`` they follow one another. With ``probs`` they are drawn at random by ``seed`` as
    ``datasets.interleave_datasets(..., stopping_strategy="all_exhausted")`` does: a smaller one starts over until the
    last has been seen completely, so a row may occur several times.

    Args:
        spec: names, separated by commas.
        split: ``train``, ``test``, ..., with an optional slice: ``train[:100]``, ``train[10%:20%]``.
        probs: one probability a name, separated by commas; they sum to 1.
        max_samples: at most so many rows of each data set, and at most so many of the whole.
        seed: of the mixture.
        flag: the option that gave ``spec``, for messages.

    Raises:
        UserError: a name that is not there, a malformed row, no rows at all, bad probabilities.
    """
    names = [name.strip() for name in (spec or "").split(",") if name.strip()]
    if not names:
        raise UserError(f"{flag} {spec!r}: no data set named; give a file, a folder or a hub name")
    if max_samples < 1:
        raise UserError(f"--data.max_samples {max_samples}: must be at least 1")
    weights = _parse_probs(probs, names, flag)
    parts: list[list[Record]] = []
    for name, source in zip(names, _short_names(names), strict=True):
        rows = islice(_rows_of(name, split, flag), max_samples)
        part = [Record(data, source, row, where) for row, (data, where) in enumerate(rows)]
        if not part:
            raise UserError(f"{flag} {name}: no records in split {split!r}")
        logger.info("%s: %d records from %s", flag, len(part), name)
        parts.append(part)
    if weights is None:
        return [record for part in parts for record in part][:max_samples]
    return _mix(parts, weights, seed)[:max_samples]


def fingerprint(records: Iterable[Record]) -> str:
    """Hash (hex) of the records' contents in their order. File names do not enter: moved data is the same data."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        text = json.dumps(record.data, sort_keys=True, ensure_ascii=False, default=_stable_text)
        digest.update(text.encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _stable_text(value: Any) -> str:
    """Text of a value JSON does not know; for images and arrays their bytes, never an address in memory."""
    if isinstance(value, bytes | bytearray):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    to_bytes = getattr(value, "tobytes", None)
    if callable(to_bytes):
        size = getattr(value, "size", "")
        return f"{type(value).__name__} {size} {hashlib.blake2b(to_bytes(), digest_size=16).hexdigest()}"
    return str(value)


def _parse_probs(probs: str | None, names: Sequence[str], flag: str) -> list[float] | None:
    if probs is None or not probs.strip():
        return None
    name = f"{flag}_probs" if not flag.endswith("prompt_dataset") else "--data.prompt_probs"
    try:
        weights = [float(p) for p in probs.split(",")]
    except ValueError:
        raise UserError(f"{name} {probs}: not a list of numbers; write for example 0.3,0.7") from None
    if len(weights) != len(names):
        raise UserError(f"{name} {probs}: {len(weights)} probabilities for {len(names)} data sets; give one each")
    # A data set that is never drawn would never be exhausted, and the mixture would have no end.
    if not all(w > 0 for w in weights):
        raise UserError(f"{name} {probs}: every probability must be above 0; leave a data set out to not use it")
    total = sum(weights)
    # 0.33,0.33,0.33 is meant as thirds; 1,2 is not a list of probabilities.
    if abs(total - 1) > 0.02:
        raise UserError(f"{name} {probs}: probabilities must sum to 1, they sum to {total:g}")
    return [w / total for w in weights]


def _mix(parts: list[list[Record]], weights: list[float], seed: int) -> list[Record]:
    """Interleave by the ``datasets`` library itself, over indices, so that the order is OpenRLHF's."""
    from datasets import Dataset, interleave_datasets

    indices = [Dataset.from_dict({"part": [p] * len(part), "row": range(len(part))}) for p, part in enumerate(parts)]
    mixed = interleave_datasets(indices, probabilities=weights, seed=seed, stopping_strategy="all_exhausted")
    return [parts[p][row] for p, row in zip(mixed["part"], mixed["row"], strict=True)]


def _short_names(names: Sequence[str]) -> list[str]:
    """A short name each: the stem; the parent folder's name in front where stems meet; a number where that fails."""
    stems = [_local(name).stem if _is_local(name) else name for name in names]
    short = [
        f"{_local(name).resolve().parent.name}/{stem}" if stems.count(stem) > 1 and _is_local(name) else stem
        for name, stem in zip(names, stems, strict=True)
    ]
    return [stem if stem not in short[:i] else f"{stem}#{i}" for i, stem in enumerate(short)]


def _local(name: str) -> Path:
    path = Path(name).expanduser()
    return path if path.exists() else Path(name.split("@")[0]).expanduser()


def _is_local(name: str) -> bool:
    path = _local(name)
    return looks_like_path(name.split("@")[0]) or path.suffix.lower() in FILE_KINDS or path.exists()


def _rows_of(name: str, split: str, flag: str) -> Iterator[Row]:
    """Rows of one name, whichever kind it is."""
    if not _is_local(name):
        yield from _hub_rows(name, split, flag)
        return
    path = _local(name)
    if not path.exists():
        raise UserError(f"{flag} {name}: no such file; give an existing file, a folder or a hub name")
    if path.is_dir() and "@" in name and not Path(name).expanduser().exists():
        path = path / name.split("@", 1)[1]
    if path.is_file():
        # One file is one split, whatever the option calls it; a slice still applies.
        yield from _sliced(read_file(path, flag), split, flag)
    elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        yield from _saved_rows(path, split, flag)
    else:
        files = _files_of_split(path, split, flag)
        yield from _sliced((row for file in files for row in read_file(file, flag)), split, flag)


_SPLIT = re.compile(r"^\s*(?P<name>[^\[\]\s]+)\s*(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?\s*$")


def _parse_split(split: str, flag: str) -> tuple[str, str | None, str | None]:
    """``train[10%:20%]`` -> ("train", "10%", "20%")."""
    match = _SPLIT.match(split)
    if match is None:
        raise UserError(f"{_split_flag(flag)} {split!r}: write a name with an optional slice, such as train[:100]")
    return match["name"], match["start"], match["stop"]


def _split_flag(flag: str) -> str:
    if flag == "--eval.dataset":
        return "--eval.split"
    return "--data.prompt_split" if flag.endswith("prompt_dataset") else f"{flag}_split"


def _sliced(rows: Iterator[Row], split: str, flag: str) -> Iterator[Row]:
    """Apply the slice of a split; only percentages and negative bounds need the whole file in memory."""
    _, start, stop = _parse_split(split, flag)
    if any(bound is not None and (bound.startswith("-") or bound.endswith("%")) for bound in (start, stop)):
        everything = list(rows)
        bounds = [_bound(b, len(everything)) for b in (start, stop)]
        yield from everything[bounds[0] : bounds[1]]
    else:
        yield from islice(rows, int(start or 0), None if stop is None else int(stop))


def _bound(bound: str | None, length: int) -> int | None:
    if bound is None:
        return None
    return round(length * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)


_SPLIT_WORDS = {
    "train": {"train", "training"},
    "test": {"test", "eval"},
    "validation": {"validation", "valid", "val", "dev"},
}


def _files_of_split(folder: Path, split: str, flag: str) -> list[Path]:
    """Data files of a folder: those named after the split where names tell splits apart, else all."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in FILE_KINDS)
    if not files:
        raise UserError(f"{flag} {folder}: the folder holds no {', '.join(FILE_KINDS)} file and no saved data set")
    wanted = _parse_split(split, flag)[0]
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = set(re.split(r"[^a-z0-9]+", str(file.relative_to(folder).with_suffix("")).lower()))
        for name, spellings in {wanted: {wanted.lower()}, **_SPLIT_WORDS}.items():
            if words & spellings:
                splits.setdefault(name, []).append(file)
    if not splits:
        return files
    if wanted not in splits:
        raise UserError(
            f"{_split_flag(flag)} {split!r}: {folder} has files for {', '.join(sorted(splits))}; choose one of these"
        )
    return splits[wanted]


def _saved_rows(path: Path, split: str, flag: str) -> Iterator[Row]:
    """Rows of a ``datasets`` folder written by ``save_to_disk``, one split or several."""
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(path))
    if isinstance(data, DatasetDict):
        name = _parse_split(split, flag)[0]
        if name not in data:
            raise UserError(f"{_split_flag(flag)} {split!r}: {path} has the splits {', '.join(data)}; choose one")
        data = data[name]
    yield from _sliced(((dict(row), f"{path}[{i}]") for i, row in enumerate(data)), split, flag)


def _hub_rows(name: str, split: str, flag: str) -> Iterator[Row]:
    """Rows of a hub data set; ``name@data_dir`` and ``name#config``."""
    from datasets import config as datasets_config
    from datasets import load_dataset

    repo, _, data_dir = name.partition("@")
    repo, _, config = repo.partition("#")
    cached = Path(datasets_config.HF_DATASETS_CACHE) / repo.replace("/", "___")
    if not hub_reachable() and not cached.exists():
        raise UserError(f"{flag} {name}: no such file or folder, and the hub cannot be reached from here")
    try:
        data = load_dataset(repo, config or None, data_dir=data_dir or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        # datasets reports a missing repository, configuration or split, and an unreachable hub, by these three.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{flag} {name}: no such file or folder, and not found on the hub ({reason})") from error
    for index, row in enumerate(data):
        yield dict(row), f"{name}[{split}][{index}]"
