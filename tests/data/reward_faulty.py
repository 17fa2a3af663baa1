"""Raises for sums of 5 and 13, gives NaN for 7 and None for 8, sleeps for ever on one prompt; else the sum's last digit
with the answer's length, so that rewards differ within a group."""

import time

HANGS = "3+3 "


def reward_func(queries, prompts, labels, **kwargs):
    if any(label in ("5", "13") for label in labels):
        raise ValueError("cannot score a sum of 5 or 13")
    if HANGS in prompts:
        time.sleep(3600)
    bad = {"7": float("nan"), "8": None}
    return [bad.get(label, len(query) + hash(query) % 7 / 7) for query, label in zip(queries, labels, strict=True)]
