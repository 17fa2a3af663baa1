"""Command line and YAML file to a resolved configuration. tyro draws the help and builds the dataclasses.

Errors are one line: every flag is looked at here first (known? as many values as it takes? of its type?), which also
records what the user gave.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from typing import Any

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.presets import COMMANDS, PRESETS
from openrlhf_like.config.resolve import resolve
from openrlhf_like.config.tree import Kind, from_tokens, from_value, get, kinds, nearest, no_form, put
from openrlhf_like.config.yaml_io import MASK, SECRETS, parse_tree, read_tree, split_header, values_of
from openrlhf_like.types import UserError

COMMAND_LINE = "command line"


def default_config(command: str, preset: str | None = None) -> CommonConfig:
    """The command's defaults with its preset applied, before anything is resolved."""
    cfg = COMMANDS[command]()
    cfg.command = command
    cfg.preset = command if command in PRESETS else preset
    for name, value in PRESETS.get(cfg.preset or "", {}).items():
        put(cfg, name, value)
    return cfg


def parse_args(command: str, argv: list[str], *, gpus: int | None = None) -> Any:
    """Parse a command line (without the program's name), file under ``--config`` included.

    Prints the help and raises SystemExit(0) on ``-h``/``--help``.

    Returns:
        The resolved configuration: SFTConfig, PPOConfig, ... by the command. ``given`` says what came from the user.

    Raises:
        UserError: one line naming flag or file and key, the value, and the fix.
    """
    known = kinds(COMMANDS[command])
    if any(a in ("-h", "--help") for a in argv):
        _tyro(default_config(command), ["--help"], command)
    flags = _scan(argv, known)
    path = flags["config"][-1] if flags.get("config") else None
    cfg = _with_file(command, read_tree(path), path, gpus) if path else default_config(command)
    parsed = _tyro(cfg, _rebuild(flags, known), command)
    parsed.command, parsed.preset, parsed.notes = cfg.command, cfg.preset, cfg.notes
    parsed.given = {**cfg.given, **{_target(name, known): COMMAND_LINE for name in flags}}
    return resolve(parsed, gpus)


def make_config(command: str, overrides: Mapping[str, Any] | None = None, *, gpus: int | None = None) -> Any:
    """A resolved configuration from Python: dotted names to values. Types are checked, combinations are not.

    ``validate`` does the latter. Lists and tuples both stand for pairs.
    """
    cfg = default_config(command)
    known = kinds(type(cfg))
    for name, value in (overrides or {}).items():
        if name not in known:
            raise UserError(f"{name}: unknown option of {command}; {nearest(name, known) or 'see --help'}")
        put(cfg, name, from_value(known[name], value, name))
        cfg.given[name] = "overrides"
    return resolve(cfg, gpus)


def from_yaml(command: str, text: str, source: str = "<yaml>", *, gpus: int | None = None) -> Any:
    """A resolved configuration from YAML text, as ``--config`` would read it."""
    return resolve(_with_file(command, parse_tree(text, source), source, gpus), gpus)


def _with_file(command: str, tree: dict[str, Any], source: str, gpus: int | None) -> CommonConfig:
    header, options = split_header(tree, source)
    preset = header.get("preset")
    if preset is not None:
        # train_ppo_ray is the general form and takes any preset's file; a preset command only its own.
        if preset not in PRESETS or command not in (preset, "train_ppo_ray"):
            raise UserError(f"{source}: preset: {preset} does not belong to {command}; run that command, or remove it")
    cfg = default_config(command, preset)
    values = values_of(type(cfg), options, source)
    for name in [n for n in values if n in SECRETS and values[n] == MASK]:
        del values[name]
        cfg.notes.append(f"{source}: {name} is masked in this file: give --{name} again where it is needed")
    for name, value in values.items():
        default = get(cfg, name)
        # A value that would be filled in from the others (as in a printed configuration) is not the user's choice.
        fillable = default in (None, "auto")
        if value != default and not (fillable and value == _filled_in(command, preset, values, name, gpus)):
            cfg.given[name] = source
    for name, value in values.items():
        put(cfg, name, value)
    return cfg


def _filled_in(command: str, preset: str | None, values: Mapping[str, Any], name: str, gpus: int | None) -> Any:
    """What ``name`` becomes when all the other values are given and it is not."""
    cfg = default_config(command, preset)
    for other, value in values.items():
        if other != name:
            put(cfg, other, value)
    return get(resolve(cfg, gpus), name)


def _target(flag: str, known: dict[str, Kind]) -> str:
    """The option a flag writes: the ``no_`` form writes the same one."""
    if flag in known:
        return flag
    group, dot, leaf = flag.rpartition(".")
    return f"{group}{dot}{leaf.removeprefix('no_')}"


def _scan(argv: list[str], known: dict[str, Kind]) -> dict[str, list[str]]:
    """Flag -> its words, checked; of a repeated flag the last one counts."""
    bools = {no_form(name) for name, kind in known.items() if kind.base == "bool"}
    found: dict[str, list[str]] = {}
    current: str | None = None
    closed = False  # --flag=value takes no further words
    for token in argv:
        if token.startswith("--") and token[2:3].isalpha():
            name, equals, value = token[2:].partition("=")
            name = name.replace("-", "_")
            if name not in known and name not in bools:
                raise UserError(f"--{name}: unknown flag; {nearest(name, [*known, *bools], '--') or 'see --help'}")
            found.pop(name, None)
            if known.get(name, Kind("bool")).base == "bool":
                other = no_form(name) if name in known else _target(name, known)
                found.pop(other, None)
            found[name] = [value] if equals else []
            current, closed = name, bool(equals)
        elif current is None or closed:
            raise UserError(f"{token!r}: not a flag; flags start with --, values follow their flag")
        else:
            found[current].append(token)
    for name, words in found.items():
        _check(name, words, known)
    return found


def _check(name: str, words: list[str], known: dict[str, Kind]) -> None:
    kind = known.get(name)
    if kind is not None and kind.base != "bool":
        from_tokens(kind, words, name)
    elif words:
        target = _target(name, known)
        fix = f"write --{target} to set it or --{no_form(target)} to clear it"
        raise UserError(f"--{name} {' '.join(words)}: takes no value; {fix}")


def _rebuild(flags: dict[str, list[str]], known: dict[str, Kind]) -> list[str]:
    """The checked flags as words for tyro; a single value is attached, so that it may start with a dash."""
    argv: list[str] = []
    for name, words in flags.items():
        kind = known.get(name)
        if kind is not None and len(words) == 1 and kind.base not in ("pair", "list"):
            value = str(int(words[0])) if kind.base == "int" and words[0] != "None" else words[0]
            argv.append(f"--{name}={value}")
        else:
            argv.extend([f"--{name}", *words])
    return argv


def _tyro(cfg: CommonConfig, argv: list[str], command: str) -> Any:
    import tyro

    prog = f"python -m openrlhf_like.cli.{command}"
    caught = io.StringIO()
    try:
        with contextlib.redirect_stderr(caught):
            return tyro.cli(
                type(cfg), prog=prog, description=type(cfg).__doc__, args=argv, default=cfg, use_underscores=True
            )
    except SystemExit as error:
        if not error.code:
            raise
        # Whatever the checks above let through, still one line.
        text = " ".join(caught.getvalue().translate({ord(c): " " for c in "╭╮╰╯│─"}).split())
        raise UserError(text or f"{command}: the command line cannot be read; see --help") from None
    finally:
        sys.stdout.flush()
