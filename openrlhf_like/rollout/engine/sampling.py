"""Between our words and vLLM's: sampling parameters, and what comes back."""

from __future__ import annotations

import math
from typing import Any

from openrlhf_like.types import Completion, SamplingSpec


def to_vllm(spec: SamplingSpec) -> Any:
    """vLLM's SamplingParams of one request: the whole answer at once, ids only."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        seed=spec.seed,
        stop=list(spec.stop) or None,
        stop_token_ids=list(spec.stop_token_ids) or None,
        # 0 asks for the sampled token's own log-probability and no others.
        logprobs=0 if spec.logprobs else None,
        # Stop strings are found in text; nothing else needs it.
        detokenize=bool(spec.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_completion(output: Any, sampling: SamplingSpec, version: int) -> Completion:
    """What was sampled, from vLLM's finished RequestOutput. Raises ValueError if a log-probability is not finite."""
    sample = output.outputs[0]
    ids = list(sample.token_ids)
    logprobs: list[float] = []
    if sampling.logprobs:
        logprobs = [position[token].logprob for token, position in zip(ids, sample.logprobs or [], strict=True)]
        for i, value in enumerate(logprobs):
            if not math.isfinite(value):
                raise ValueError(f"request {output.request_id}: log-probability of sampled token {i} is {value}")
    return Completion(
        token_ids=ids, logprobs=logprobs, finish_reason=sample.finish_reason or "abort", weight_version=version
    )


def scoring_params() -> Any:
    """SamplingParams that ask for the log-probabilities of the prompt's own tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def to_prompt_logprobs(output: Any) -> list[float]:
    """T-1 values of a scoring request's output."""
    ids = list(output.prompt_token_ids)
    return [position[token].logprob for token, position in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
