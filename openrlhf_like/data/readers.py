"""Local files -> records. Every record knows its file and line, so that a later complaint can name them.

JSONL is read line by line by our own reader: a malformed line is reported with its number, which the columnar
readers cannot do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openrlhf_like.types import UserError

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")

# (row's columns, where it stands: "file:line" or "file[row]")
Row = tuple[dict[str, Any], str]


def read_file(path: Path, flag: str) -> Iterator[Row]:
    """Rows of one file, in order.

    Args:
        path: a .jsonl, .json, .parquet, .csv or .arrow file.
        flag: the option that named it, for messages.

    Raises:
        UserError: unknown ending, unreadable file, or a malformed line (named ``file:line``).
    """
    kind = path.suffix.lower()
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
        ".arrow": _read_arrow,
    }
    if kind not in readers:
        raise UserError(f"{flag} {path}: unknown file type {kind or '(none)'!r}; use one of {', '.join(FILE_KINDS)}")
    try:
        yield from readers[kind](path)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror or error})") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object with named columns, got {type(value).__name__}")
    return value


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, start=1):
            where = f"{path}:{number}"
            try:
                # A byte-order mark may stand at the start of the file only.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
            yield _object(value, where), where


def _read_json(path: Path) -> Iterator[Row]:
    """A list of objects, an object whose "data" is one, or JSON lines under the wrong ending."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # Two objects, one a line: that is JSONL, and its reader names the bad line if there is one.
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            yield from _read_jsonl(path)
            return
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno})") from error
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list):
        raise UserError(f"{path}: expected a list of JSON objects, got {type(value).__name__}")
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        yield _object(item, where), where


def _read_csv(path: Path) -> Iterator[Row]:
    """Columns of text: a CSV file has no types, so every value stays the string that it is."""
    with path.open(newline="", encoding="utf-8-sig") as handle:
        reader = csv.DictReader(handle, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or [])
                    raise UserError(f"{where}: the row has not the {columns} columns of the header; quote its commas")
                yield dict(row), where
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not valid CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason}, after line {reader.line_num})") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1024)
        index = 0
        for batch in batches:
            for row in batch.to_pylist():
                yield row, f"{path}[{index}]"
                index += 1
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    from datasets import Dataset

    for index, row in enumerate(Dataset.from_file(str(path))):
        yield dict(row), f"{path}[{index}]"
