"""Text of prompts and its token ids: tokenizers, input templates, chat templates, one BOS.

Two rules hold everywhere. A chat template is the authority on its special tokens: its rendering is tokenized as it
stands, without adding any, as transformers and vLLM's chat endpoint do. Plain text gets the BOS that the tokenizer
itself would put in front, unless it already starts with one, and never an EOS.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from openrlhf_like.data.hub import hub_reachable
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

# Tokenizers without a real limit report 1e30 or 1e18.
_NO_LIMIT = 10_000_000

Message = dict[str, Any]


def load_tokenizer(
    path: str,
    use_fast: bool = True,
    chat_template: str | None = None,
    flag: str = "--model.model_name_or_path",
) -> Any:
    """The tokenizer of a model.

    A tokenizer without a pad token pads with its end token. That is harmless: which positions count is always said by
    a mask, never by comparing ids with the pad id, so a true end token is trained and padding is not.

    Args:
        path: folder or hub name.
        use_fast: False asks for the slow one, where there still is one.
        chat_template: replaces the tokenizer's own: the template, or a file that holds it.
        flag: the option that gave ``path``, for messages.

    Raises:
        UserError: no tokenizer there, or one without an end token.
    """
    from transformers import AutoTokenizer

    try:
        local_only = not Path(path).expanduser().exists() and not hub_reachable()
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=use_fast, local_files_only=local_only)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{flag} {path}: no tokenizer can be loaded from there ({reason})") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{flag} {path}: the tokenizer has no eos_token; set one in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.model_max_length > _NO_LIMIT:
        # Kept from overflowing whatever computes with it; the true limit is the model's (see model_context).
        tokenizer.model_max_length = _NO_LIMIT
    if chat_template:
        tokenizer.chat_template = _template_text(chat_template)
    return tokenizer


def _template_text(value: str) -> str:
    """The template itself, or the contents of the file of that name."""
    if "{" in value:
        return value
    path = Path(value).expanduser()
    if not path.is_file():
        raise UserError(f"--data.tokenizer_chat_template {value}: neither a Jinja template nor an existing file")
    return path.read_text(encoding="utf-8")


def read_model_config(path: str) -> dict[str, Any]:
    """config.json of a model folder or hub name, as it stands; {} where there is none. Does not import torch."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file() and not Path(path).expanduser().exists():
        from transformers.utils import cached_file

        try:
            file = Path(cached_file(path, "config.json", local_files_only=not hub_reachable()) or "")
        except OSError:
            return {}
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8") as handle:
        return json.load(handle)


def model_context(path: str, tokenizer: Any = None) -> int | None:
    """The longest sequence the model takes: its config's ``max_position_embeddings``, else the tokenizer's limit.

    None where neither says.
    """
    limit = _text_config(read_model_config(path)).get("max_position_embeddings")
    if limit:
        return int(limit)
    length = getattr(tokenizer, "model_max_length", None)
    return int(length) if length and length < _NO_LIMIT else None


def model_vocab_size(path: str) -> int | None:
    """Rows of the model's embedding by its config.json; None where it does not say."""
    size = _text_config(read_model_config(path)).get("vocab_size")
    return int(size) if size else None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part: vision-language configs nest it."""
    return {**config, **(config.get("text_config") or {})}


def check_vocab(
    model_vocab_size: int | None, tokenizer: Any, path: str, flag: str = "--model.model_name_or_path"
) -> None:
    """Refuse a model whose embedding has no row for some id of its tokenizer.

    A larger embedding is usual (padded to a multiple) and fine. None (unknown size) is not checked.

    Raises:
        UserError: naming both sizes.
    """
    if model_vocab_size is None:
        return
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if needed > model_vocab_size:
        raise UserError(
            f"{flag} {path}: the model's vocabulary has {model_vocab_size} entries, its tokenizer needs {needed}; "
            "use the tokenizer that belongs to the model, or resize the model's embedding"
        )


def check_input_template(template: str | None, flag: str = "--data.input_template") -> None:
    """Refuse an input template that does not hold exactly one ``{}`` (``{{`` and ``}}`` stand for braces).

    Raises:
        UserError: naming the template and the fix.
    """
    if template is None:
        return
    shown = json.dumps(template, ensure_ascii=False)
    try:
        fields = [(name, spec) for _, name, spec, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"{flag} {shown}: {error}; write other braces doubled, as {{{{ and }}}}") from error
    if not fields:
        raise UserError(f"{flag} {shown}: has no {{}} where the input goes; write for example 'User: {{}} Assistant: '")
    if fields != [("", "")]:
        raise UserError(f"{flag} {shown}: must hold one plain {{}}; write other braces doubled, as {{{{ and }}}}")
    if "\\n" in template:
        logger.warning(
            "%s %s holds a backslash and an n, not a line break: in a shell write $'User: {}\\nAssistant: '",
            flag,
            shown,
        )


def require_chat_template(tokenizer: Any, flag: str = "--data.apply_chat_template") -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        UserError: naming what to give.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{flag}: the tokenizer has no chat template; give one with --data.tokenizer_chat_template, "
            "or use --data.input_template instead"
        )


def as_messages(value: str | Sequence[Message]) -> list[Message]:
    """A plain string becomes the one user message of a conversation."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return list(value)


def render_chat(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The chat template's text for these messages.

    Raises:
        UserError: the template refuses them; the caller puts the record's place in front.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(f"the chat template refuses these messages ({error})") from error


def render_prompt(
    prompt: str | Sequence[Message],
    tokenizer: Any,
    apply_chat_template: bool = False,
    input_template: str | None = None,
) -> tuple[str, list[int]]:
    """A prompt's text and ids, as every stage (SFT, preference, RL, evaluation) sees them.

    Args:
        prompt: a string, or (with ``apply_chat_template``) a list of messages.
        tokenizer: its chat template is used with ``apply_chat_template``.
        apply_chat_template: render the messages and the header of the answer; ``input_template`` is then not used.
        input_template: text with one ``{}``, or None for the bare string.
    """
    if apply_chat_template:
        text = render_chat(tokenizer, as_messages(prompt), add_generation_prompt=True)
        return text, encode_first(tokenizer, [text], is_chat=True)[0]
    if not isinstance(prompt, str):
        raise UserError("is a list of messages; add --data.apply_chat_template, or give a string")
    text = input_template.format(prompt) if input_template else prompt
    return text, encode_first(tokenizer, [text], is_chat=False)[0]


def encode_first(tokenizer: Any, texts: Sequence[str], is_chat: bool) -> list[list[int]]:
    """Ids of texts that start a sequence: exactly one BOS where the template or the tokenizer wants one, no EOS."""
    rows = _encode(tokenizer, texts)
    bos = None if is_chat else own_bos(tokenizer)
    if bos is None:
        return rows
    return [row if row and row[0] == bos else [bos, *row] for row in rows]


def encode_next(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that go on after something else: no BOS, and not the space some tokenizers put before a text.

    Tokenized apart from what stands before, as a sampled answer is: the ids of the prompt never depend on the answer.
    """
    if not _prefixes_space(tokenizer):
        return _encode(tokenizer, texts)
    # Behind a line break the tokenizer has nothing to put in front; the line break's own ids are cut off again.
    anchor = _encode(tokenizer, ["\n"])[0]
    rows = _encode(tokenizer, ["\n" + text for text in texts])
    plain = _encode(tokenizer, texts)
    return [row[len(anchor) :] if row[: len(anchor)] == anchor else bare for row, bare in zip(rows, plain, strict=True)]


def own_bos(tokenizer: Any) -> int | None:
    """The BOS id if this tokenizer by itself puts it before a text, else None."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bos if ids and ids[0] == bos else None


def _prefixes_space(tokenizer: Any) -> bool:
    """Whether the tokenizer treats the start of a text as if a space stood there (SentencePiece's dummy prefix)."""
    pieces = tokenizer.convert_ids_to_tokens(_encode(tokenizer, ["a"])[0])
    return bool(pieces) and str(pieces[0]).startswith("\u2581")


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, padding=False, truncation=False)["input_ids"]
