"""Keeps secrets out of everything that is written down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

# The last part of a dotted name: "logger.wandb.key", "hf_token", "api_key". Not "input_key", which names a column.
_SECRET_NAME = re.compile(r"(^|_)(api_key|apikey|token|password|passwd|secret|credential|credentials)$", re.IGNORECASE)
_EXACT_NAMES = {"key"}
# user:password@host inside a URL.
_URL_PASSWORD = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]+@", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """True where a configuration field of that (dotted) name holds a secret."""
    last = name.rsplit(".", 1)[-1]
    return last in _EXACT_NAMES or _SECRET_NAME.search(last) is not None


def mask_secrets(tree: Any, secrets: tuple[str, ...] = ()) -> Any:
    """A copy of a configuration tree without secrets.

    Args:
        tree: dicts, lists and scalars.
        secrets: values known to be secret; wherever one occurs inside a string it is masked, whatever the name.

    Returns:
        The same tree; values under secret names, passwords inside URLs and ``secrets`` become ``***``.
    """
    if isinstance(tree, Mapping):
        return {
            key: MASK if value and isinstance(value, str) and is_secret_name(str(key)) else mask_secrets(value, secrets)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [mask_secrets(value, secrets) for value in tree]
    if isinstance(tree, str):
        return mask_text(tree, secrets)
    return tree


def mask_text(text: str, secrets: tuple[str, ...] = ()) -> str:
    """``text`` with passwords inside URLs and each of ``secrets`` replaced by ``***``."""
    text = _URL_PASSWORD.sub(rf"\g<scheme>{MASK}@", text)
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    return text
