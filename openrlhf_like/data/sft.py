"""Records -> token ids and loss masks for supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from openrlhf_like.data.fields import DataStats, column, messages_column, text_column
from openrlhf_like.data.load import Record
from openrlhf_like.data.templates import check_input_template, encode_first, encode_next, require_chat_template
from openrlhf_like.data.turns import Piece, conversation_pieces
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

_INPUT_FLAG = "--data.input_key"
_OUTPUT_FLAG = "--data.output_key"
_CHUNK = 512  # records tokenized in one call: fast tokenizers spread a batch over threads


@dataclass
class SFTExample:
    """One training sequence, unpadded.

    Attributes:
        input_ids: int32 [T].
        loss_mask: int8 [T], 1 where the token is a label: it is predicted, from what stands before it. Position 0 is
            never a label, since nothing stands before it.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_labels(self) -> int:
        """Tokens that take part in the loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class SFTOptions:
    """The options that decide what is trained on; the names are those of the flags.

    Attributes:
        max_len: longest sequence, in tokens (``--data.max_len``).
        input_key, output_key: columns (``--data.input_key``, ``--data.output_key``).
        input_template: text with one ``{}`` around the input (``--data.input_template``), or None.
        apply_chat_template: render messages instead (``--data.apply_chat_template``).
        multiturn: every assistant turn is trained, not the last one only (``--data.multiturn``).
        pretrain_mode: the bare input, every token trained, nothing added (``--model.pretrain_mode_enable``).
    """

    max_len: int = 2048
    input_key: str = "input"
    output_key: str | None = None
    input_template: str | None = None
    apply_chat_template: bool = False
    multiturn: bool = False
    pretrain_mode: bool = False

    @classmethod
    def from_config(cls, config: Any) -> SFTOptions:
        """From a resolved configuration of ``train_sft`` (its ``data`` and ``model`` groups)."""
        data = config.data
        return cls(
            max_len=data.max_len,
            input_key=data.input_key,
            output_key=data.output_key,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
            multiturn=data.multiturn,
            pretrain_mode=config.model.pretrain_mode_enable,
        )


def build_sft_examples(
    records: Iterable[Record], tokenizer: Any, options: SFTOptions
) -> tuple[list[SFTExample], DataStats]:
    """Tokenize every record; prompt and answer apart, so that a prompt's ids do not depend on its answer.

    The end token closes what is trained: the template's own end-of-turn marker, and the tokenizer's end token behind
    it unless it is the same. A sequence beyond ``max_len`` is cut at the right (an end token that is cut off is not
    put back: the answer did not end there); one that loses every label is dropped and counted, with one warning.

    Raises:
        UserError: options that contradict each other; a record with a missing, empty or mistyped column.
    """
    _check(options, tokenizer)
    stats = DataStats()
    examples: list[SFTExample] = []
    rows = iter(records)
    while chunk := list(islice(rows, _CHUNK)):
        pieces = [_pieces(record, tokenizer, options) for record in chunk]
        for ids, mask in _encode_pieces(pieces, tokenizer, options):
            _keep(ids, mask, options.max_len, examples, stats)
    if stats.num_dropped:
        logger.warning(
            "%d of %d records dropped: --data.max_len %d leaves no token of the answer",
            stats.num_dropped,
            stats.total,
            options.max_len,
        )
    if not examples:
        raise UserError(
            f"--data.max_len {options.max_len}: all {stats.total} records were dropped, no label is left in any; "
            "raise it or shorten the prompts"
        )
    return examples, stats


def _check(options: SFTOptions, tokenizer: Any) -> None:
    if options.max_len < 2:
        raise UserError(f"--data.max_len {options.max_len}: must be at least 2")
    if options.pretrain_mode:
        if options.multiturn:
            raise UserError("--data.multiturn: has no meaning with --model.pretrain_mode_enable; leave one out")
        return
    if options.apply_chat_template:
        require_chat_template(tokenizer)
    elif options.multiturn:
        raise UserError("--data.multiturn: needs --data.apply_chat_template to render the turns; add it")
    elif options.output_key:
        check_input_template(options.input_template)


def _pieces(record: Record, tokenizer: Any, options: SFTOptions) -> list[Piece]:
    """The record's text, cut where training starts and stops."""
    if options.pretrain_mode:
        return [Piece(text_column(record, options.input_key, _INPUT_FLAG), True)]
    if options.apply_chat_template:
        messages = _conversation(record, options)
        try:
            return _close(conversation_pieces(tokenizer, messages, last_only=not options.multiturn), tokenizer)
        except UserError as error:
            raise UserError(f"{record.where}: key {options.input_key!r} ({_INPUT_FLAG}): {error}") from error
    text = text_column(record, options.input_key, _INPUT_FLAG)
    if not options.output_key:
        return _close([Piece(text, True)], tokenizer)
    answer = text_column(record, options.output_key, _OUTPUT_FLAG).rstrip("\n")
    prompt = options.input_template.format(text) if options.input_template else text
    return _close([Piece(prompt, False), Piece(answer, True)], tokenizer)


def _close(pieces: list[Piece], tokenizer: Any) -> list[Piece]:
    """Put the end token behind the last piece unless it is there: exactly one."""
    if pieces and not pieces[-1].text.endswith(tokenizer.eos_token):
        return [*pieces[:-1], Piece(pieces[-1].text + tokenizer.eos_token, True)]
    return pieces


def _conversation(record: Record, options: SFTOptions) -> list[dict[str, Any]]:
    """The messages of a record, the output column's joined to the input's."""
    messages = messages_column(record, options.input_key, _INPUT_FLAG)
    if options.output_key:
        messages = messages + _answer_messages(record, options.output_key)
    key = options.output_key or options.input_key
    if not any(m["role"] == "assistant" for m in messages):
        raise UserError(
            f"{record.where}: key {key!r}: the conversation has no assistant turn to train on; "
            "give messages with one, or --data.output_key"
        )
    if not options.multiturn and messages[-1]["role"] != "assistant":
        raise UserError(
            f"{record.where}: key {key!r}: the last message must be the assistant's, it is of role "
            f"{messages[-1]['role']!r}; or use --data.multiturn"
        )
    return messages


def _answer_messages(record: Record, key: str) -> list[dict[str, Any]]:
    value = column(record, key, _OUTPUT_FLAG)
    if isinstance(value, str):
        return [{"role": "assistant", "content": text_column(record, key, _OUTPUT_FLAG)}]
    if isinstance(value, dict):
        value = [value]
        record = Record({**record.data, key: value}, record.source, record.row, record.where)
    return messages_column(record, key, _OUTPUT_FLAG)


def _encode_pieces(
    rows: Sequence[Sequence[Piece]], tokenizer: Any, options: SFTOptions
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids and mask of each row; the tokenizer is called once for all first pieces and once for all others."""
    is_chat = options.apply_chat_template and not options.pretrain_mode
    firsts = iter(encode_first(tokenizer, [row[0].text for row in rows], is_chat))
    others = iter(encode_next(tokenizer, [piece.text for row in rows for piece in row[1:]]))
    for row in rows:
        ids: list[int] = []
        mask: list[int] = []
        for index, piece in enumerate(row):
            part = next(others) if index else next(firsts)
            ids += part
            mask += [int(piece.trained)] * len(part)
        # Nothing stands before the first token (a BOS, usually) to predict it from.
        mask[:1] = [0]
        yield ids, mask


def _keep(ids: list[int], mask: list[int], max_len: int, examples: list[SFTExample], stats: DataStats) -> None:
    """Cut to length; keep and count, or drop and count."""
    stats.total += 1
    example = SFTExample(np.asarray(ids[:max_len], dtype=np.int32), np.asarray(mask[:max_len], dtype=np.int8))
    if not example.num_labels:
        stats.drop("no_label_within_max_len")
        return
    stats.kept += 1
    stats.truncated += len(ids) > max_len
    stats.tokens += len(example)
    stats.label_tokens += example.num_labels
    examples.append(example)
