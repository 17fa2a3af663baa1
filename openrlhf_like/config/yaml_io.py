"""YAML in and out: the resolved tree with secrets masked, and a file's values checked key by key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.presets import COMMANDS
from openrlhf_like.config.tree import from_value, kinds, nearest
from openrlhf_like.types import UserError

MASK = "***"
SECRETS = ("logger.wandb.key",)
# These say what to do with the command line, not how to train.
NOT_STORED = ("config", "print_config")
# Written for the reader and read back: what made this file.
HEADER = ("command", "preset")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def to_dict(cfg: CommonConfig) -> dict[str, Any]:
    """The nested tree of plain values, secrets masked."""
    tree = _plain(dataclasses.asdict(cfg))
    for name in NOT_STORED:
        tree.pop(name)
    for name in SECRETS:
        group: Any = tree
        *parts, leaf = name.split(".")
        for part in parts:
            group = group.get(part) if isinstance(group, dict) else None
        if isinstance(group, dict) and group.get(leaf):
            group[leaf] = MASK
    return {"command": cfg.command, "preset": cfg.preset, **tree}


def to_yaml(cfg: CommonConfig) -> str:
    """The configuration as YAML; ``--config`` reads it back."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    """A key given twice is an error; plain YAML keeps the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(getattr(key_node, "value", ""))
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key} appears twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_tree(path: str) -> dict[str, Any]:
    """A YAML file's nested mapping.

    Raises:
        UserError: the file is missing, or is not a YAML mapping; one line with file, line and cause.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"--config {path}: cannot be read ({reason}); give an existing YAML file") from None
    return parse_tree(text, path)


def parse_tree(text: str, source: str) -> dict[str, Any]:
    """YAML text as a nested mapping; ``source`` names it in errors."""
    try:
        tree = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{source}:{line}: not valid YAML ({error.problem}); fix that line") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML ({str(error).splitlines()[0]})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{source}: holds a {type(tree).__name__}; give a mapping of option names to values")
    return tree


def split_header(tree: dict[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(header, options): ``command`` and ``preset`` are apart from the options."""
    header = {k: tree[k] for k in HEADER if tree.get(k) is not None}
    for key, value in header.items():
        if value not in COMMANDS:
            raise UserError(f"{source}: {key}: {value!r} is not a command; give one of {', '.join(COMMANDS)}")
    return header, {k: v for k, v in tree.items() if k not in HEADER}


def values_of(cls: type, tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Flat dotted name -> value of the right type.

    Nested (``actor: {adam: {lr: 1}}``) and dotted keys (``actor.adam.lr: 1``) both count.

    Raises:
        UserError: an unknown key (with the nearest one), or a value of the wrong type; the file and key are named.
    """
    known = {name: kind for name, kind in kinds(cls).items() if name not in NOT_STORED}
    groups = {name[:i] for name in known for i in range(len(name)) if name[i] == "."}
    out: dict[str, Any] = {}

    def walk(node: dict[Any, Any], prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            if name in known:
                out[name] = from_value(known[name], value, f"{source}: {name}")
            elif name in groups:
                if value is None:
                    continue
                if not isinstance(value, dict):
                    raise UserError(f"{source}: {name}: {value!r} does not fit; it is a group of options")
                walk(value, f"{name}.")
            else:
                fix = nearest(name, [*known, *sorted(groups)]) or "remove it"
                raise UserError(f"{source}: unknown key {name}; {fix}")

    walk(tree, "")
    return out
