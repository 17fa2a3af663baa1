"""The options as one flat table: dotted name -> type, and how text or YAML becomes a value of that type."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from openrlhf_like.types import UserError


@dataclass(frozen=True)
class Kind:
    """What a leaf holds: ``base`` is bool, int, float, str, pair (two floats) or list (of str)."""

    base: str
    optional: bool = False
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """What to give, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        words = {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a number",
            "str": "text",
            "pair": "two numbers",
            "list": "one or more names",
        }
        return words[self.base]


def _kind(hint: Any) -> Kind:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in args if a is not type(None)]
        return dataclasses.replace(_kind(inner[0]), optional=True)
    if origin is Literal:
        return Kind("str", choices=tuple(args))
    if origin is tuple:
        return Kind("pair")
    if origin is list:
        return Kind("list")
    return Kind(hint.__name__)


def kinds(cls: type[Any]) -> dict[str, Kind]:
    """Every leaf of a config class by its dotted name, in the order of help. Do not change what it returns."""
    if cls not in _KINDS:
        _KINDS[cls] = _walk(cls)
    return _KINDS[cls]


_KINDS: dict[Any, dict[str, Kind]] = {}


def _walk(cls: Any) -> dict[str, Kind]:
    out: dict[str, Kind] = {}
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            out.update({f"{f.name}.{name}": kind for name, kind in _walk(hint).items()})
        else:
            out[f.name] = _kind(hint)
    return out


def get(cfg: Any, name: str) -> Any:
    """The value at a dotted name."""
    for part in name.split("."):
        cfg = getattr(cfg, part)
    return cfg


def get_or(cfg: Any, name: str, default: Any = None) -> Any:
    """The value at a dotted name; ``default`` where the command has no such option, or it is None."""
    for part in name.split("."):
        cfg = getattr(cfg, part, None)
        if cfg is None:
            return default
    return cfg


def put(cfg: Any, name: str, value: Any) -> None:
    """Set the value at a dotted name."""
    *groups, leaf = name.split(".")
    for part in groups:
        cfg = getattr(cfg, part)
    setattr(cfg, leaf, value)


def nearest(name: str, known: typing.Iterable[str], dashes: str = "") -> str:
    """What to do about an unknown name: "did you mean ...?" with the known names most like it, or "".

    A name without its group, or without the inner one (``lr`` or ``actor.lr`` for ``actor.adam.lr``), is answered by
    all that end in it, three at most.
    """
    known = list(known)
    top, leaf = name.split(".", 1)[0], name.rsplit(".", 1)[-1]
    tails = [k for k in known if k.endswith(f".{name}")]
    inside = [k for k in known if "." in name and k.startswith(f"{top}.") and k.endswith(f".{leaf}")]
    found = (tails or inside)[:3] or get_close_matches(name, known, n=1, cutoff=0.6)
    if not found:
        found = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][:3]
    return f"did you mean {' or '.join(dashes + k for k in found)}?" if found else ""


def no_form(name: str) -> str:
    """The flag that clears a boolean: ``muon.nesterov`` -> ``muon.no_nesterov``."""
    group, dot, leaf = name.rpartition(".")
    return f"{group}{dot}no_{leaf}"


def from_value(kind: Kind, value: Any, where: str) -> Any:
    """A YAML or Python value as ``kind``.

    Raises:
        UserError: ``where`` (a flag, or file and key), the value, and what to give instead.
    """
    wrong = UserError(f"{where}: {value!r} does not fit; give {kind.describe()}")
    if value is None:
        if kind.optional:
            return None
        raise wrong
    if kind.base == "bool":
        if isinstance(value, bool):
            return value
        raise wrong
    if isinstance(value, bool):
        raise wrong
    if kind.base in ("int", "float"):
        return _number(kind.base, value, wrong)
    if kind.base == "pair":
        if isinstance(value, list | tuple) and len(value) == 2:
            return tuple(_number("float", v, wrong) for v in value)
        raise wrong
    if kind.base == "list":
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            return list(value)
        raise wrong
    if not isinstance(value, str) or (kind.choices and value not in kind.choices):
        raise wrong
    return value


def _number(base: str, value: Any, wrong: UserError) -> int | float:
    # YAML 1.1 reads 1e-6 as text, so text that is a number counts as one.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong
    try:
        number = float(value) if base == "float" or isinstance(value, float) else int(value)
    except ValueError:
        raise wrong from None
    if base == "int":
        if number != number or number in (float("inf"), float("-inf")) or number != int(number):
            raise wrong
        return int(number)
    if number != number:
        raise wrong
    return float(number)


def from_tokens(kind: Kind, tokens: list[str], flag: str) -> Any:
    """The words after a flag as a value of ``kind``; ``flag`` is named in the one-line UserError."""
    count = {"pair": "two values", "list": "one value or more"}.get(kind.base, "one value")
    given = f"--{flag} {' '.join(tokens)}".rstrip()
    if kind.optional and tokens == ["None"]:
        return None
    if not tokens:
        raise UserError(f"--{flag}: needs {count}; give {kind.describe()}")
    if kind.base == "list":
        return list(tokens)
    if kind.base == "pair":
        if len(tokens) != 2:
            raise UserError(f"{given}: takes two values, not {len(tokens)}; give {kind.describe()}")
        return from_value(kind, tokens, f"--{flag}")
    if len(tokens) > 1:
        raise UserError(f"{given}: takes one value, not {len(tokens)}; quote text that holds spaces")
    if kind.base == "int" and not tokens[0].lstrip("+-").replace("_", "").isdigit():
        raise UserError(f"--{flag}: {tokens[0]!r} does not fit; give {kind.describe()}")
    return from_value(kind, tokens[0], f"--{flag}")
