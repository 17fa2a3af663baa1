"""Files, folders, saved data sets, splits, mixtures and fingerprints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from openrlhf_like.data import Record, fingerprint, load_records
from openrlhf_like.types import UserError

ROWS = [{"input": f"q{i}", "n": i} for i in range(10)]


def write_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def inputs(records):
    return [r.data["input"] for r in records]


def test_jsonl_records_know_their_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("\ufeff".encode() + b'{"input": "x"}\n\n  \n{"input": "\xc3\xa9\xe2\x80\xa8"}\r\n{"input": "z"}')
    records = load_records(str(path))
    assert inputs(records) == ["x", "é\u2028", "z"]
    assert [r.where for r in records] == [f"{path}:1", f"{path}:4", f"{path}:5"]
    assert [r.row for r in records] == [0, 1, 2]
    assert {r.source for r in records} == {"a"}


@pytest.mark.parametrize(
    "line,message",
    [
        (b'{"input": "x"', r"a\.jsonl:17: not valid JSON \("),
        (b"[1, 2]", r"a\.jsonl:17: expected a JSON object with named columns, got list"),
        (b'{"input": "\xff"}', r"a\.jsonl:17: not UTF-8 text"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"input": "x"}\n' * 16 + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        load_records(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "json", "json_lines", "json_data", "csv", "parquet", "arrow_folder"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    from datasets import Dataset

    rows = [{"input": f'q "{i}", \n', "label": str(i)} for i in range(5)]
    path = tmp_path / f"d.{kind.split('_')[0]}"
    if kind == "jsonl" or kind == "json_lines":
        write_jsonl(path, rows)
    elif kind.startswith("json"):
        path.write_text(json.dumps({"data": rows} if kind == "json_data" else rows, indent=1))
    elif kind == "csv":
        Dataset.from_list(rows).to_csv(str(path), index=False)
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    else:
        path = tmp_path / "saved"
        Dataset.from_list(rows).save_to_disk(str(path))
    records = load_records(str(path))
    assert [r.data for r in records] == rows
    assert [r.row for r in records] == list(range(5))


@pytest.mark.parametrize("kind,content", [("json", "[1,"), ("csv", "a,b\n1,2,3\n"), ("parquet", "nothing")])
def test_other_malformed_files_are_one_line(tmp_path, kind, content):
    path = tmp_path / f"bad.{kind}"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"bad\.{kind}") as caught:
        load_records(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "split,expected",
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[7:]", range(7, 10)),
        ("test[2:4]", range(2, 4)),
        ("train[-2:]", range(8, 10)),
        ("train[:20%]", range(2)),
        ("train[50%:]", range(5, 10)),
    ],
)
def test_slices_of_a_file(tmp_path, split, expected):
    records = load_records(write_jsonl(tmp_path / "a.jsonl"), split)
    assert [r.data["n"] for r in records] == list(expected)


def test_a_split_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--eval\.split 'train\[1\]'"):
        load_records(write_jsonl(tmp_path / "a.jsonl"), "train[1]", flag="--eval.dataset")


def test_a_folder_gives_the_files_of_the_split_in_order(tmp_path):
    write_jsonl(tmp_path / "d" / "train-1.jsonl", ROWS[3:6])
    write_jsonl(tmp_path / "d" / "train-0.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "d" / "test.jsonl", ROWS[6:])
    folder = str(tmp_path / "d")
    assert [r.data["n"] for r in load_records(folder)] == list(range(6))
    assert [r.row for r in load_records(folder)] == list(range(6))
    assert [r.data["n"] for r in load_records(folder, "test[1:]")] == [7, 8, 9]
    with pytest.raises(UserError, match=r"--data\.dataset_split 'validation': .*test, train"):
        load_records(folder, "validation")


def test_a_folder_without_split_names_is_used_whole(tmp_path):
    write_jsonl(tmp_path / "d" / "x" / "b.jsonl", ROWS[5:])
    write_jsonl(tmp_path / "d" / "a.jsonl", ROWS[:5])
    assert [r.data["n"] for r in load_records(str(tmp_path / "d"), "test")] == list(range(10))
    assert [r.data["n"] for r in load_records(str(tmp_path / "d") + "@x")] == list(range(5, 10))


def test_a_saved_dictionary_of_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS[:7]), "held": Dataset.from_list(ROWS[7:])}).save_to_disk(
        str(tmp_path / "s")
    )
    assert len(load_records(str(tmp_path / "s"))) == 7
    assert [r.data["n"] for r in load_records(str(tmp_path / "s"), "held[:2]")] == [7, 8]
    with pytest.raises(UserError, match=r"--data\.prompt_split 'test': .*train, held"):
        load_records(str(tmp_path / "s"), "test", flag="--data.prompt_dataset")


@pytest.mark.parametrize("name", ["missing.jsonl", "/no/such/folder", "./missing", "a/b/c"])
def test_a_missing_file_is_refused_without_asking_the_hub(name):
    with pytest.raises(UserError, match=rf"--data\.prompt_dataset {name}: no such file"):
        load_records(name, flag="--data.prompt_dataset")


def test_unknown_ending_empty_folder_and_empty_file_are_refused(tmp_path):
    (tmp_path / "a.xyz").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"unknown file type '\.xyz'"):
        load_records(str(tmp_path / "a.xyz"))
    with pytest.raises(UserError, match="the folder holds no"):
        load_records(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no records in split 'train'"):
        load_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="no data set named"):
        load_records("")


def test_without_probabilities_data_sets_follow_one_another_each_capped(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"input": f"a{i}"} for i in range(5)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"input": f"b{i}"} for i in range(5)])
    assert inputs(load_records(f"{a}, {b}")) == [f"{s}{i}" for s in "ab" for i in range(5)]
    assert inputs(load_records(f"{a},{b}", max_samples=3)) == ["a0", "a1", "a2"]
    assert [r.source for r in load_records(f"{a},{b}")] == ["a"] * 5 + ["b"] * 5


def test_max_samples_stops_reading(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "x"}\n{"input": "y"}\nbroken\n')
    assert inputs(load_records(str(path), max_samples=2)) == ["x", "y"]


def test_a_mixture_is_that_of_interleave_datasets(tmp_path):
    from datasets import Dataset, interleave_datasets

    rows = {name: [{"input": f"{name}{i}"} for i in range(n)] for name, n in (("a", 40), ("b", 12))}
    spec = ",".join(write_jsonl(tmp_path / f"{name}.jsonl", r) for name, r in rows.items())
    mixed = inputs(load_records(spec, probs="0.3,0.7", seed=3))
    reference = interleave_datasets(
        [Dataset.from_list(r) for r in rows.values()],
        probabilities=[0.3, 0.7],
        seed=3,
        stopping_strategy="all_exhausted",
    )
    assert mixed == reference["input"][:]
    # The last data set to run out is seen once, the other starts over.
    counts = Counter(mixed)
    assert set(counts) == {r["input"] for part in rows.values() for r in part}
    assert 0.55 < sum(x.startswith("b") for x in mixed) / len(mixed) < 0.85
    assert mixed == inputs(load_records(spec, probs="0.3,0.7", seed=3))
    assert mixed != inputs(load_records(spec, probs="0.3,0.7", seed=4))
    assert inputs(load_records(spec, probs="0.3,0.7", seed=3, max_samples=20)) != mixed
    assert len(load_records(spec, probs="0.3,0.7", seed=3, max_samples=20)) == 20


@pytest.mark.parametrize("probs", ["0.5", "0.5,x", "0.5,0.9", "1,0", "-0.5,1.5", "nan,1"])
def test_bad_probabilities_are_refused_naming_the_flag(tmp_path, probs):
    a, b = (write_jsonl(tmp_path / f"{n}.jsonl") for n in "ab")
    with pytest.raises(UserError, match=rf"^--data\.dataset_probs {probs}: "):
        load_records(f"{a},{b}", probs=probs)
    with pytest.raises(UserError, match=rf"^--data\.prompt_probs {probs}: "):
        load_records(f"{a},{b}", probs=probs, flag="--data.prompt_dataset")


def test_sources_of_one_name_are_told_apart(tmp_path):
    a = write_jsonl(tmp_path / "x" / "train.jsonl")
    b = write_jsonl(tmp_path / "y" / "train.jsonl")
    sources = {r.source for r in load_records(f"{a},{b},{a}")}
    assert sources == {"x/train", "y/train", "x/train#2"}


def test_fault_25_the_fingerprint_follows_content_and_order_not_place(tmp_path):
    a = load_records(write_jsonl(tmp_path / "a.jsonl"))
    moved = load_records(write_jsonl(tmp_path / "other" / "b.jsonl"))
    assert fingerprint(a) == fingerprint(moved)
    assert fingerprint(a) != fingerprint(a[::-1])
    assert fingerprint(a) != fingerprint(a[:-1])
    changed = [*a[:-1], Record({**a[-1].data, "n": 99}, "a", 9, "a")]
    assert fingerprint(a) != fingerprint(changed)


def test_the_fingerprint_of_an_image_is_its_pixels():
    from PIL import Image

    def one(color):
        return fingerprint([Record({"images": [Image.new("RGB", (4, 4), color)]}, "a", 0, "a")])

    assert one("red") == one("red") != one("blue")


def test_importing_the_data_folder_imports_neither_torch_nor_ray_nor_transformers():
    code = (
        "import sys, openrlhf_like.data; "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
