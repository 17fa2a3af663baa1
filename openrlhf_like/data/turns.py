"""Which characters of a rendered conversation the assistant has to produce.

The final rendering of the whole conversation is the only text that counts: some templates rewrite earlier turns (they
drop ``<think>`` text), so a mask made from renderings of prefixes would point at text that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from openrlhf_like.data.templates import Message, render_chat
from openrlhf_like.types import UserError

# Stand-in for an assistant's text: nothing that a template might trim or treat specially, and not to be met in data.
_PROBE = "qAzprobexQ7Wk"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Piece:
    """A stretch of the rendering; ``trained`` where the assistant produces it."""

    text: str
    trained: bool


def conversation_pieces(tokenizer: Any, messages: Sequence[Message], last_only: bool) -> list[Piece]:
    """Cut the final rendering into pieces, up to the end of the last trained turn.

    A trained piece runs from the end of the generation prompt (the role header) to the end-of-turn marker, inclusive,
    without the white space behind it. What follows the last trained turn is left out: nothing there is learned.

    Args:
        tokenizer: with a chat template.
        messages: the conversation.
        last_only: train the last assistant turn only (it must be the last message), else every assistant turn.

    Raises:
        UserError: the template refuses the messages or does not render an assistant's text.
    """
    text, spans = assistant_spans(tokenizer, messages)
    if last_only:
        spans = spans[-1:]
    pieces: list[Piece] = []
    place = 0
    for start, end in spans:
        pieces.append(Piece(text[place:start], False))
        pieces.append(Piece(text[start:end], True))
        place = end
    return pieces


def assistant_spans(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The final rendering, and the half-open character span of each assistant turn in it, in order."""
    if _GENERATION.search(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""):
        return _marked_spans(tokenizer, messages)
    text = render_chat(tokenizer, messages)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        spans.append(_find_span(tokenizer, messages, index, text, floor=spans[-1][1] if spans else 0))
    return text, spans


def _marked_spans(tokenizer: Any, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The template says itself, with ``{% generation %}``, what the assistant produces."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        result: Any = render_jinja_template(
            [list(messages)],
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"the chat template refuses these messages ({error})") from error
    text, marks = result[0][0], result[1][0]
    spans = []
    for start, end in marks:
        if text.startswith(tokenizer.eos_token, end):
            # A template that closes its block before the end token would leave the model without one to learn.
            end += len(tokenizer.eos_token)
        else:
            end = start + len(text[start:end].rstrip())
        spans.append((start, end))
    return text, spans


def _find_span(tokenizer: Any, messages: Sequence[Message], index: int, text: str, floor: int) -> tuple[int, int]:
    """Span of one assistant turn: the rendering is compared with renderings in which this turn alone is another."""
    head, tail = _fixed_ends(tokenizer, messages, index, text)
    start, end = max(head, floor), len(text) - tail
    # The role header ends where the generation prompt ends, if the final rendering still agrees with it: a template
    # may write fixed text (an empty <think> block) that the model has to produce itself.
    header = _generation_prompt(tokenizer, messages[:index])
    if header and text.startswith(header) and len(header) >= floor:
        start = len(header)
    end = max(end, start)
    return start, end + _marker_length(tokenizer, messages, index, text, end)


def _generation_prompt(tokenizer: Any, before: Sequence[Message]) -> str:
    """What the model is given before it answers; empty where the template does not render these messages alone."""
    try:
        return render_chat(tokenizer, before, add_generation_prompt=True) if before else ""
    except UserError:
        return ""


def _fixed_ends(tokenizer: Any, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
    """How many characters of ``text`` before and after turn ``index`` do not depend on what the assistant said."""
    other = render_chat(tokenizer, _with_probe(messages, index))
    if _PROBE not in other:
        raise UserError(f"the chat template does not render the assistant's text of message {index}")
    before, after = other[: other.index(_PROBE)], other[other.rindex(_PROBE) + len(_PROBE) :]
    head = len(before) if text.startswith(before) else len(commonprefix([text, before]))
    tail = len(after) if text.endswith(after) else len(commonprefix([text[::-1], after[::-1]]))
    return head, tail


def _with_probe(messages: Sequence[Message], index: int) -> list[Message]:
    """The conversation with one assistant message replaced by plain text (its tool calls and reasoning go too)."""
    parts = isinstance(messages[index].get("content"), list)
    content: Any = [{"type": "text", "text": _PROBE}] if parts else _PROBE
    return [*messages[:index], {"role": "assistant", "content": content}, *messages[index + 1 :]]


def _marker_length(tokenizer: Any, messages: Sequence[Message], index: int, text: str, end: int) -> int:
    """Characters of the end-of-turn marker that stands at ``end``.

    The marker is what the template writes behind an answer that ends the conversation, without closing white space:
    ``<|im_end|>``, `` </s>``. Where that is longer than what an earlier turn gets (``<|end|>\\n<|endoftext|>``), its
    first line is. A template that closes a turn only when something follows it is asked with a generation prompt.
    """
    ended = messages[: index + 1]
    marker = _behind_probe(tokenizer, ended, index, add_generation_prompt=False).rstrip()
    for candidate in (marker, _first_line(marker), tokenizer.eos_token):
        if candidate and text.startswith(candidate, end):
            return len(candidate)
    candidate = _first_line(_behind_probe(tokenizer, ended, index, add_generation_prompt=True))
    return len(candidate) if candidate and text.startswith(candidate, end) else 0


def _behind_probe(tokenizer: Any, messages: Sequence[Message], index: int, add_generation_prompt: bool) -> str:
    rendering = render_chat(tokenizer, _with_probe(messages, index), add_generation_prompt)
    return rendering[rendering.rindex(_PROBE) + len(_PROBE) :]


def _first_line(text: str) -> str:
    return text.split("\n")[0].rstrip()
