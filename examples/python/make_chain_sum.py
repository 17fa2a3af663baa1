"""Arithmetic prompts from reasoning-gym's ``chain_sum``, split into disjoint files for SFT, GRPO and evaluation.

    python examples/python/make_chain_sum.py ./data --terms 3 --digits 1

Writes ``sft.jsonl`` ({"input", "output"}), ``prompts.jsonl`` and ``heldout.jsonl`` ({"input", "label"}, and
"output" for a loss), where the label is the answer. Questions are made distinct first, so that no held-out question is
ever trained on.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def distinct_questions(size: int, terms: int, digits: int, seed: int) -> list[tuple[str, str]]:
    """(expression, answer) pairs, each expression once, in a seeded order."""
    import reasoning_gym

    source = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=seed, min_terms=terms, max_terms=terms, min_digits=1, max_digits=digits
    )
    # The fixed sentence around the expression carries nothing for a model trained from nothing.
    pairs = sorted({entry["question"].split(":")[-1].strip(): entry["answer"] for entry in source}.items())
    random.Random(seed).shuffle(pairs)
    return pairs


def sloppy(question: str, answer: str, wrong_share: float) -> str:
    """The teacher's answer: off by one for a share of the questions, always for the same ones."""
    return str(int(answer) + 1) if random.Random(question).random() < wrong_share else answer


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_chain_sum(
    folder: str | Path, *, size: int, terms: int, digits: int, heldout: int, seed: int, wrong_share: float = 0.0
) -> dict[str, int]:
    """Write the three files to ``folder``; returns how many rows each has."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = distinct_questions(size, terms, digits, seed)
    if len(pairs) <= heldout:
        raise SystemExit(f"only {len(pairs)} distinct questions: lower --heldout or raise --size, --terms or --digits")
    test, train = pairs[:heldout], pairs[heldout:]
    write_jsonl(folder / "sft.jsonl", [{"input": f"{q} ", "output": sloppy(q, a, wrong_share)} for q, a in train])
    write_jsonl(folder / "prompts.jsonl", [{"input": f"{q} ", "label": a} for q, a in train])
    write_jsonl(folder / "heldout.jsonl", [{"input": f"{q} ", "output": a, "label": a} for q, a in test])
    return {"sft": len(train), "prompts": len(train), "heldout": len(test)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--size", type=int, default=8000, help="questions drawn before duplicates are dropped")
    parser.add_argument("--terms", type=int, default=3)
    parser.add_argument("--digits", type=int, default=1)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong_share", type=float, default=0.0, help="share of SFT answers that are off by one")
    args = parser.parse_args()
    print(make_chain_sum(**vars(args)))


if __name__ == "__main__":
    main()
