"""One prompt, one sampled answer: the Trajectory holds exactly the ids that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_like.types import Completion, Prompt, SamplingSpec, Segment, Trajectory, TurnParams


def build_trajectory(
    prompt: Prompt,
    completion: Completion,
    sampling: SamplingSpec,
    tokenizer: Any,
    *,
    trajectory_id: str,
    group_id: str,
) -> Trajectory:
    """Prompt ids followed by the sampled ids, the end token included if it was sampled; nothing is re-tokenized.

    ``response`` is the text without special tokens; the ids keep them. An aborted or empty completion is marked.
    """
    if completion.finish_reason == "abort" or not completion.token_ids:
        reason = "the engine aborted the request" if completion.finish_reason == "abort" else "no token was sampled"
        return failed_trajectory(prompt, reason, trajectory_id=trajectory_id, group_id=group_id)
    segment = build_segment(prompt.token_ids, completion, sampling)
    return Trajectory(
        trajectory_id=trajectory_id,
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        segments=[segment],
        prompt=prompt.text,
        response=tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        label=prompt.label,
        metadata=_metadata(prompt),
        turns=1,
        finish_reason=completion.finish_reason,
        truncated=completion.finish_reason == "length",
    ).check()


def build_segment(prompt_ids: Sequence[int], completion: Completion, sampling: SamplingSpec) -> Segment:
    """One segment of T = prompt + sampled tokens; see ``Segment`` for the arrays."""
    start, sampled = len(prompt_ids), len(completion.token_ids)
    total = start + sampled
    action_mask = np.zeros(total, dtype=np.int8)
    action_mask[start:] = 1
    logprobs = np.zeros(total, dtype=np.float32)
    if sampling.logprobs:
        logprobs[start:] = completion.logprobs
    version = np.full(total, -1, dtype=np.int32)
    version[start:] = completion.weight_version
    return Segment(
        token_ids=np.concatenate([np.asarray(prompt_ids), np.asarray(completion.token_ids)]).astype(np.int32),
        action_mask=action_mask,
        behavior_logprobs=logprobs,
        weight_version=version,
        turn_params=[TurnParams(start, total, sampling.temperature, sampling.top_p, sampling.top_k)],
    )


def failed_trajectory(prompt: Prompt, error: str, *, trajectory_id: str, group_id: str) -> Trajectory:
    """Stands for an episode that could not be sampled: counted, shown, and kept out of statistics and training."""
    return Trajectory(
        trajectory_id=trajectory_id,
        prompt_id=prompt.prompt_id,
        group_id=group_id,
        segments=[],
        prompt=prompt.text,
        label=prompt.label,
        metadata=_metadata(prompt),
        finish_reason="error",
        error=error,
    ).check()


def _metadata(prompt: Prompt) -> dict[str, Any]:
    return {**prompt.metadata, "datasource": prompt.datasource}
