"""Tiny models for tests: the builder of the examples, under a name that tests import."""

from __future__ import annotations

import sys
from pathlib import Path

import openrlhf_like  # noqa: F401 - readies torchvision before transformers asks for it

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "python"))

from tiny_model import CHAT_TEMPLATE, build_tiny_model, build_tokenizer  # noqa: E402

__all__ = ["CHAT_TEMPLATE", "build_tiny_model", "build_tokenizer"]
