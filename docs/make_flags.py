"""Writes what the docs say about flags from the option classes themselves, so that the two cannot differ.

``python docs/make_flags.py`` writes docs/flags.md, and the table of what is not built in docs/openrlhf.md; with
``--check`` it writes nothing, and ends with exit code 1 where a file is out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from pathlib import Path
from typing import Any

from openrlhf_like.config import COMMANDS, PRESETS, default_config
from openrlhf_like.config.tree import Kind, get, kinds
from openrlhf_like.config.unbuilt import UNBUILT, UNBUILT_COMMANDS, Unbuilt

DOCS = Path(__file__).parent
BEGIN, END = "<!-- not built: begin -->", "<!-- not built: end -->"
#: Commands that share train_ppo_ray's flags are listed with what their preset changes.
GENERAL = "train_ppo_ray"


def help_texts(cls: Any) -> dict[str, str]:
    """Dotted name -> the string under the field, found through all bases and groups."""
    own: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(base)).body[0]).body
        for node, after in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                own[typing.cast(ast.Name, node.target).id] = typing.cast(str, ast.literal_eval(after.value))
    out: dict[str, str] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            out.update({f"{field.name}.{name}": text for name, text in help_texts(hints[field.name]).items()})
        else:
            out[field.name] = own[field.name]
    return out


def shown_type(kind: Kind) -> str:
    """What stands after the flag on a command line."""
    if kind.choices:
        return " \\| ".join(f"`{choice}`" for choice in kind.choices)
    words = {"bool": "flag", "int": "int", "float": "float", "str": "text", "pair": "float float", "list": "text ..."}
    return words[kind.base]


def shown_default(value: Any) -> str:
    """A default as it would be typed; a dash where the machine or another option decides, or where there is none."""
    if value is None or value is False or value == "":
        return "-"
    if value is True:
        return "on"
    if isinstance(value, tuple | list):
        return f"`{' '.join(shown_default(v).strip('`') for v in value)}`"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{text}`".replace("\n", "\\n").replace("|", "\\|")


def not_built(entry: Unbuilt) -> str:
    """Which values of a flag are refused."""
    return ", ".join(f"`{v}`" for v in entry.values) if entry.values else "any value but the default"


def flag_table(command: str, names: list[str], texts: dict[str, str]) -> list[str]:
    """A Markdown table of these options."""
    cfg = default_config(command)
    unbuilt = {entry.name: entry for entry in UNBUILT}
    lines = ["| flag | takes | default | what it does |", "|---|---|---|---|"]
    for name in names:
        text = texts[name].replace("|", "\\|").replace("\n", " ")
        if name in unbuilt:
            entry = unbuilt[name]
            text += " **Not built yet" + (f": {not_built(entry)}.**" if entry.values else ".**")
        kind = kinds(type(cfg))[name]
        lines.append(f"| `--{name}` | {shown_type(kind)} | {shown_default(get(cfg, name))} | {text} |")
    return lines


def command_section(command: str) -> list[str]:
    """Heading, status and tables of a command, a table a group."""
    lines = [f"## {command}", ""]
    if command in UNBUILT_COMMANDS:
        lines += ["Not built yet: it parses its flags, prints its configuration, and ends with exit code 2.", ""]
    if command in PRESETS:
        changes = [f"| `--{n}` | {shown_default(v)} |" for n, v in PRESETS[command].items()]
        return [*lines, f"The flags of [{GENERAL}](#{GENERAL}), with these defaults:", "", "| flag | default |",
                "|---|---|", *changes, ""]  # fmt: skip
    cls = COMMANDS[command]
    texts = help_texts(cls)
    groups: dict[str, list[str]] = {}
    for name in kinds(cls):
        groups.setdefault(name.partition(".")[0] if "." in name else "", []).append(name)
    for group, names in groups.items():
        lines += [f"**`--{group}.*`**" if group else "**Without a group**", "", *flag_table(command, names, texts), ""]
    return lines


def flags_page() -> str:
    """All of docs/flags.md."""
    lines = [
        "# Flags",
        "",
        "Every flag of every command, with its default. Made by `python docs/make_flags.py` from the option classes in",
        "`openrlhf_like/config/`; do not edit. How flags, files and defaults work together:",
        "[configuration](configuration.md).",
        "",
        "A dash stands for a flag that is off, and for a value that is not set or that the machine decides; the text",
        "says which. *flag* takes no value; its `no_` form (`--muon.no_nesterov`) clears it.",
        "",
        "Commands: " + ", ".join(f"[{c}](#{c})" for c in COMMANDS) + ".",
        "",
    ]
    for command in sorted(COMMANDS, key=lambda c: c in UNBUILT_COMMANDS):
        lines += command_section(command)
    return "\n".join(lines).rstrip() + "\n"


def unbuilt_table() -> str:
    """The part of docs/openrlhf.md between the markers."""
    lines = ["| flag | refused | instead |", "|---|---|---|"]
    lines += [f"| `--{e.name}` | {not_built(e)} | {e.fix} |" for e in UNBUILT]
    commands = ", ".join(f"`{c}`" for c in UNBUILT_COMMANDS)
    return "\n".join([f"Whole commands: {commands}.", "", *lines])


def openrlhf_page() -> str:
    """docs/openrlhf.md with its generated part renewed."""
    text = (DOCS / "openrlhf.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{unbuilt_table()}\n{END}{after}"


def pages() -> dict[Path, str]:
    """File -> what it should hold."""
    return {DOCS / "flags.md": flags_page(), DOCS / "openrlhf.md": openrlhf_page()}


def main() -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path} is out of date; run python docs/make_flags.py\n")
        return int(bool(stale))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
