"""Runs in the child process: loads the user's reward file and calls ``reward_func``. Standard library only."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

_MODULE = "openrlhf_like_reward_file"


def load(path: str) -> Callable[[dict[str, Any]], Any]:
    """The handler for the file at ``path``: payload dict of lists in, ``reward_func``'s answer as plain values out."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look the module up by name
    spec.loader.exec_module(module)
    function = getattr(module, "reward_func", None)
    if not callable(function):
        raise AttributeError("it defines no function reward_func(queries, prompts, labels, **kwargs)")
    return _Caller(function)


class _Caller:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop: asyncio.AbstractEventLoop | None = None
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = set(named[3:] if len(named) >= 3 else named)
        try:
            inspect.signature(function).bind([], [], [], **dict.fromkeys(self._required(), None))
        except TypeError as error:
            raise TypeError(f"reward_func cannot be called with (queries, prompts, labels): {error}") from None

    def _required(self) -> list[str]:
        """Extra arguments without a default: filled from the columns at each call, so allowed here."""
        parameters = list(inspect.signature(self._function).parameters.values())[3:]
        wanted = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [p.name for p in parameters if p.kind in wanted and p.default is p.empty]

    def __call__(self, payload: dict[str, Any]) -> Any:
        extra: dict[str, list[Any]] = payload["extra"]
        if not self._takes_all:
            extra = {k: v for k, v in extra.items() if k in self._names}
        answer = self._function(payload["queries"], payload["prompts"], payload["labels"], **extra)
        if inspect.isawaitable(answer):
            answer = self._await(answer)
        return plain(answer)

    def _await(self, awaitable: Any) -> Any:
        """One loop for the child's life, so that the user's client sessions live on between calls."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)

        async def wait() -> Any:
            return await awaitable

        return self._loop.run_until_complete(wait())


def plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as Python lists and numbers; other objects as their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)[:1000]
