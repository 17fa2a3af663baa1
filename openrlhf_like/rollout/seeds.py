"""Every request's own seed: batch order, batch size and the number of engines then change no sample."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, prompt_id: str, sample: int, turn: int = 0, phase: str = "train") -> int:
    """A seed in [0, 2**63) from what names the request; the same on every machine and Python.

    ``sample`` counts within the group, ``turn`` within the episode, ``phase`` keeps evaluation and training apart.
    """
    text = "\x1f".join((str(run_seed), phase, str(step), prompt_id, str(sample), str(turn)))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    # vLLM seeds a torch generator with it: 63 bits fit every signed and unsigned form on the way.
    return int.from_bytes(digest, "big") >> 1
