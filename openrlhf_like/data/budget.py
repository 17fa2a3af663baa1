"""The one rule for how many new tokens a prompt leaves room for.

The prompt filter and the rollout both call it: a prompt that passed the filter can always be sampled from, and never
beyond the context.
"""

from __future__ import annotations


def prompt_budget(
    prompt_len: int, max_len: int, max_new_tokens: int | None = None, model_context: int | None = None
) -> int:
    """New tokens that may be sampled after a prompt; 0 means that the prompt is too long and is dropped.

    The limit is ``max_len``, or the model's context where that is shorter. With ``max_new_tokens`` every prompt gets
    exactly that many, or none: a prompt longer than ``limit - max_new_tokens`` is dropped rather than given a shorter
    answer than its neighbours. Without, a prompt gets what is left of the limit.

    Args:
        prompt_len: tokens of the prompt.
        max_len: tokens of prompt and answer together (``--data.max_len``).
        max_new_tokens: tokens of the answer (``--rollout.max_new_tokens``), or None.
        model_context: the model's longest sequence, or None where it is unknown.
    """
    limit = max_len if model_context is None else min(max_len, model_context)
    left = limit - prompt_len
    if max_new_tokens is None:
        return max(left, 0)
    return max_new_tokens if 0 < max_new_tokens <= left else 0
