"""A reward file for reasoning-gym's ``chain_sum`` task: 1 for the right sum, 0 for anything else.

Use it with ``--reward.remote_url examples/python/reward_chain_sum.py``. The label column holds the right answer ("57",
or the number 57), or the reasoning-gym entry itself, as a dict or as JSON text with the keys "question", "answer" and
"metadata".
"""

from __future__ import annotations

import json
import re
from typing import Any

import reasoning_gym

_DATASET = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SPECIAL_TOKEN = re.compile(r"<\|[^|>]*\|>")


def answer_text(response: str) -> str | None:
    """The response's answer: what stands after its last "=", without special tokens; the last number in it."""
    text = _SPECIAL_TOKEN.sub("", response).rpartition("=")[2]
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def entry_of(label: Any) -> dict[str, Any]:
    """The reasoning-gym entry that the label stands for."""
    if isinstance(label, str) and label.lstrip().startswith("{"):
        label = json.loads(label)
    return label if isinstance(label, dict) else {"answer": str(label).strip()}


def reward_func(queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any) -> dict[str, Any]:
    """1.0 where reasoning-gym's scorer finds the answer exactly right; its partial credit is not given."""
    rewards, answered = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        answer = answer_text(query[len(prompt) :])
        exact = _DATASET.score_answer(answer, entry_of(label)) == 1.0
        rewards.append(1.0 if exact else 0.0)
        answered.append(0.0 if answer is None else 1.0)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"answered": answered}}
