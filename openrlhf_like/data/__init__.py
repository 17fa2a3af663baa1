"""Records -> token ids: supervised examples, prompts, chat templates. Imports no Ray, and torch nowhere at the top."""

from openrlhf_like.data.budget import prompt_budget
from openrlhf_like.data.fields import DataStats
from openrlhf_like.data.hub import check_model_path
from openrlhf_like.data.load import Record, fingerprint, load_records
from openrlhf_like.data.prompts import build_prompts
from openrlhf_like.data.sampler import ResumableSampler, num_batches
from openrlhf_like.data.sft import SFTExample, SFTOptions, build_sft_examples
from openrlhf_like.data.templates import (
    check_vocab,
    load_tokenizer,
    model_context,
    model_vocab_size,
    read_model_config,
    render_prompt,
)

__all__ = [
    "DataStats",
    "Record",
    "ResumableSampler",
    "SFTExample",
    "SFTOptions",
    "build_prompts",
    "build_sft_examples",
    "check_model_path",
    "check_vocab",
    "fingerprint",
    "load_records",
    "load_tokenizer",
    "model_context",
    "model_vocab_size",
    "num_batches",
    "prompt_budget",
    "read_model_config",
    "render_prompt",
]
