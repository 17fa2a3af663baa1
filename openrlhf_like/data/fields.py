"""Columns of a record, checked: every complaint names the file, the line, the key and the option that chose the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from openrlhf_like.data.load import Record
from openrlhf_like.types import UserError


@dataclass
class DataStats:
    """What became of the records: ``total`` read, ``kept``, and ``dropped`` by reason.

    ``truncated`` counts kept records that were cut at the right; ``tokens`` and ``label_tokens`` are sums over what
    was kept (labels are the tokens that take part in the loss; 0 for prompts).
    """

    total: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    tokens: int = 0
    label_tokens: int = 0

    def drop(self, reason: str) -> None:
        """Count one dropped record."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @property
    def num_dropped(self) -> int:
        """Dropped records, all reasons together."""
        return sum(self.dropped.values())


def column(record: Record, key: str, flag: str) -> Any:
    """The value under ``key``.

    Raises:
        UserError: no such column, or null.
    """
    if key not in record.data:
        have = ", ".join(map(str, record.data)) or "none"
        raise UserError(f"{record.where}: no key {key!r} ({flag}); the record has: {have}")
    if record.data[key] is None:
        raise UserError(f"{record.where}: key {key!r} ({flag}) is null; fill it or leave the record out")
    return record.data[key]


def text_column(record: Record, key: str, flag: str) -> str:
    """A non-empty string.

    Raises:
        UserError: missing, another type, or nothing but white space.
    """
    value = column(record, key, flag)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise UserError(
            f"{record.where}: key {key!r} ({flag}) is a list of messages; add --data.apply_chat_template, or give text"
        )
    if not isinstance(value, str):
        raise UserError(f"{record.where}: key {key!r} ({flag}) must be text, got {type(value).__name__}")
    if not value.strip():
        raise UserError(f"{record.where}: key {key!r} ({flag}) is empty; fill it or leave the record out")
    return value


def messages_column(record: Record, key: str, flag: str) -> list[dict[str, Any]]:
    """A conversation: a non-empty list of messages, or a string, which becomes one user message.

    Raises:
        UserError: missing, another type, a message without role or content.
    """
    value = column(record, key, flag)
    if isinstance(value, str):
        return [{"role": "user", "content": text_column(record, key, flag)}]
    if not isinstance(value, list):
        raise UserError(
            f"{record.where}: key {key!r} ({flag}) must be text or a list of messages, got {type(value).__name__}"
        )
    if not value:
        raise UserError(f"{record.where}: key {key!r} ({flag}) is an empty list of messages")
    for index, message in enumerate(value):
        _check_message(message, f"{record.where}: key {key!r}[{index}] ({flag})")
    # Columnar formats fill a message's absent fields with null; a template should see them as absent.
    return [{name: part for name, part in m.items() if part is not None or name == "content"} for m in value]


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise UserError(f"{where} must be a message with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where} has no role; a message is {{'role': 'user', 'content': '...'}}")
    content = message.get("content")
    acts = bool(message.get("tool_calls"))
    if not isinstance(content, str | list) and not (content is None and acts):
        raise UserError(f"{where} (role {role}) has no text in content, got {type(content).__name__}")
    if role == "assistant" and not acts and (not content or (isinstance(content, str) and not content.strip())):
        raise UserError(f"{where}: the assistant's content is empty; fill it or leave the record out")
