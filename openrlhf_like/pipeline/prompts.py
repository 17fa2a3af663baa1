"""The prompts of a policy run: read, checked and rendered before anything heavy starts; then fed batch by batch."""

from __future__ import annotations

import logging
from typing import Any

from openrlhf_like.data.load import fingerprint, load_records
from openrlhf_like.data.prompts import build_prompts
from openrlhf_like.data.sampler import ResumableSampler
from openrlhf_like.data.templates import check_vocab, load_tokenizer, model_context, model_vocab_size
from openrlhf_like.types import Prompt

logger = logging.getLogger(__name__)


class PromptFeed:
    """Batches of prompts over all episodes; its place is part of the checkpoint."""

    def __init__(self, prompts: list[Prompt], sampler: ResumableSampler) -> None:
        self.prompts, self.sampler = prompts, sampler

    def has_more(self) -> bool:
        """Whether another batch is left."""
        return self.sampler.epochs is None or self.sampler.epoch < self.sampler.epochs

    def next_batch(self) -> list[Prompt] | None:
        """The next ``--rollout.batch_size`` prompts (fewer at the end of an episode); None at the end."""
        if not self.has_more():
            return None
        return [self.prompts[i] for i in next(iter(self.sampler))]

    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place. UserError when the data changed."""
        self.sampler.load_state_dict(state)


def load_prompts(cfg: Any) -> tuple[PromptFeed, list[Prompt]]:
    """(training feed, evaluation prompts) of the configuration. Raises UserError naming file, line and key."""
    path = cfg.actor.model_name_or_path
    tokenizer = load_tokenizer(
        path,
        use_fast=not cfg.data.disable_fast_tokenizer,
        chat_template=cfg.data.tokenizer_chat_template,
        flag="--actor.model_name_or_path",
    )
    check_vocab(model_vocab_size(path), tokenizer, path, flag="--actor.model_name_or_path")
    prompts, print_ = _read(
        cfg, tokenizer, cfg.data.prompt_dataset, cfg.data.prompt_split, cfg.data.prompt_probs, cfg.data.max_samples,
        "--data.prompt_dataset",
    )  # fmt: skip
    evaluation: list[Prompt] = []
    if cfg.eval.dataset:
        evaluation, _ = _read(
            cfg, tokenizer, cfg.eval.dataset, cfg.eval.split, None, cfg.eval.max_samples, "--eval.dataset"
        )
    sampler = ResumableSampler(
        len(prompts), cfg.rollout.batch_size, cfg.train.seed, epochs=cfg.train.num_episodes, fingerprint=print_
    )
    return PromptFeed(prompts, sampler), evaluation


def _read(
    cfg: Any, tokenizer: Any, spec: str, split: str, probs: str | None, max_samples: int, flag: str
) -> tuple[list[Prompt], str]:
    records = load_records(spec, split, probs, max_samples, cfg.train.seed, flag=flag)
    prompts, stats = build_prompts(
        records,
        tokenizer,
        input_key=cfg.data.input_key,
        label_key=cfg.data.label_key,
        apply_chat_template=cfg.data.apply_chat_template,
        input_template=cfg.data.input_template,
        max_len=cfg.data.max_len,
        max_new_tokens=cfg.rollout.max_new_tokens,
        model_context=model_context(cfg.actor.model_name_or_path, tokenizer),
    )
    logger.info("%s: %d prompts of %d records", flag, len(prompts), stats.total)
    return prompts, fingerprint(records)
