"""Records -> prompts to sample from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from openrlhf_like.data.budget import prompt_budget
from openrlhf_like.data.fields import DataStats, column, messages_column, text_column
from openrlhf_like.data.load import Record
from openrlhf_like.data.templates import check_input_template, encode_first, render_chat, require_chat_template
from openrlhf_like.types import Prompt, UserError

logger = logging.getLogger(__name__)

_INPUT_FLAG = "--data.input_key"
_LABEL_FLAG = "--data.label_key"
_CHUNK = 512


def build_prompts(
    records: Iterable[Record],
    tokenizer: Any,
    input_key: str = "input",
    label_key: str | None = None,
    apply_chat_template: bool = False,
    input_template: str | None = None,
    max_len: int = 2048,
    max_new_tokens: int | None = None,
    model_context: int | None = None,
) -> tuple[list[Prompt], DataStats]:
    """Render and tokenize every record once; drop and count those that leave no room for an answer.

    Room is what :func:`~openrlhf_like.data.budget.prompt_budget` says, which the rollout asks too. A prompt is known
    by its place (``source:row``, with ``#2`` where a mixture repeats it), never by its text.

    Args:
        records: as loaded.
        tokenizer: of the policy.
        input_key: column of the prompt: text, or messages with ``apply_chat_template``.
        label_key: column handed to the reward untouched; None gives "".
        apply_chat_template, input_template: how the prompt is rendered.
        max_len, max_new_tokens, model_context: as in ``prompt_budget``.

    Raises:
        UserError: a record with a missing, empty or mistyped column; no prompt left.
    """
    if apply_chat_template:
        require_chat_template(tokenizer)
    else:
        check_input_template(input_template)
    template = None if apply_chat_template else input_template
    stats = DataStats()
    prompts: list[Prompt] = []
    seen: Counter[str] = Counter()
    rows = iter(records)
    while chunk := list(islice(rows, _CHUNK)):
        texts = [_text(record, tokenizer, input_key, apply_chat_template, template) for record in chunk]
        for record, text, ids in zip(chunk, texts, encode_first(tokenizer, texts, apply_chat_template), strict=True):
            prompt = _prompt(record, text, ids, input_key, label_key, seen)
            stats.total += 1
            if not prompt_budget(len(ids), max_len, max_new_tokens, model_context):
                stats.drop("prompt_too_long")
                continue
            stats.kept += 1
            stats.tokens += len(ids)
            prompts.append(prompt)
    _report(stats, max_len, max_new_tokens, model_context)
    return prompts, stats


def _text(record: Record, tokenizer: Any, key: str, apply_chat_template: bool, template: str | None) -> str:
    if not apply_chat_template:
        text = text_column(record, key, _INPUT_FLAG)
        return template.format(text) if template else text
    messages = messages_column(record, key, _INPUT_FLAG)
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{record.where}: key {key!r} ({_INPUT_FLAG}) ends with an assistant message; a prompt must end before it"
        )
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=True)
    except UserError as error:
        raise UserError(f"{record.where}: key {key!r} ({_INPUT_FLAG}): {error}") from error


def _prompt(
    record: Record, text: str, ids: list[int], input_key: str, label_key: str | None, seen: Counter[str]
) -> Prompt:
    label = "" if label_key is None else column(record, label_key, _LABEL_FLAG)
    name = f"{record.source}:{record.row}"
    seen[name] += 1
    datasource = record.data.get("datasource")
    return Prompt(
        prompt_id=name if seen[name] == 1 else f"{name}#{seen[name]}",
        token_ids=[int(i) for i in ids],
        text=text,
        label=label,
        metadata={k: v for k, v in record.data.items() if k not in (input_key, label_key)},
        datasource=datasource if isinstance(datasource, str) and datasource else record.source,
    )


def _report(stats: DataStats, max_len: int, max_new_tokens: int | None, model_context: int | None) -> None:
    if not stats.num_dropped:
        return
    room = f"--data.max_len {max_len}"
    if model_context is not None and model_context < max_len:
        room = f"the model's context of {model_context} (below --data.max_len {max_len})"
    if max_new_tokens is not None:
        room += f" and --rollout.max_new_tokens {max_new_tokens}"
    if not stats.kept:
        raise UserError(f"{room}: all {stats.total} prompts are too long; raise the limit or shorten the prompts")
    logger.warning("%d of %d prompts dropped as too long for %s", stats.num_dropped, stats.total, room)
