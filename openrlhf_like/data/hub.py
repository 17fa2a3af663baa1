"""Whether a name is a path, and whether the hub can be asked at all."""

from __future__ import annotations

import functools
import logging
import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def looks_like_path(name: str) -> bool:
    """A hub name is ``name`` or ``owner/name``; whatever looks like a path is never asked for on the hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")


def check_model_path(path: str | None, flag: str = "--model.model_name_or_path") -> str:
    """Refuse a model path that cannot be one, at once; returns it.

    Raises:
        UserError: none given, a path that does not exist, or one without a config.json.
    """
    if not path:
        raise UserError(f"{flag}: no model given; name a folder in Hugging Face format, or a hub name")
    place = Path(path).expanduser()
    if place.is_dir() and not (place / "config.json").is_file():
        raise UserError(f"{flag} {path}: the folder has no config.json; give a model in Hugging Face format")
    if place.is_file() or (looks_like_path(path) and not place.exists()):
        raise UserError(f"{flag} {path}: no such folder; give a model in Hugging Face format, or a hub name")
    return path


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub's host name resolves (or a proxy does it for us).

    The hub's client retries for most of a minute before it says that there is no network. Where the name does not
    resolve, its cache alone is asked instead, and a missing name is told at once.
    """
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname or "huggingface.co"
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        logger.info("%s does not resolve: using local files only", host)
        return False
    return True
