"""The pages about flags are those that the option classes make."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from openrlhf_like.config import COMMANDS
from openrlhf_like.config.tree import kinds
from openrlhf_like.config.unbuilt import UNBUILT, UNBUILT_COMMANDS
from tests.test_config_flags import DEVIATIONS

DOCS = Path(__file__).parents[1] / "docs"


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("make_flags", DOCS / "make_flags.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_pages_are_up_to_date() -> None:
    for path, text in generator().pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run python docs/make_flags.py"


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray", "train_dpo", "serve_rm"])
def test_every_flag_has_a_row_with_help(command: str) -> None:
    text = (DOCS / "flags.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    for name in kinds(COMMANDS[command]):
        (row,) = (line for line in section.splitlines() if line.startswith(f"| `--{name}` |"))
        assert len(row.rstrip("| ").rsplit("|", 1)[-1].strip()) > 5, row


def test_what_is_not_built_is_listed() -> None:
    text = (DOCS / "openrlhf.md").read_text(encoding="utf-8").split("## Not built yet")[1]
    for entry in UNBUILT:
        assert f"| `--{entry.name}` |" in text
    for command in UNBUILT_COMMANDS:
        assert f"`{command}`" in text


@pytest.mark.parametrize("name", DEVIATIONS)
def test_every_other_default_is_told(name: str) -> None:
    """Each default that is not OpenRLHF's stands on the page for those who come from it."""
    text = (DOCS / "openrlhf.md").read_text(encoding="utf-8")
    lora = "ds.lora.target_modules"  # the same modules, as a list
    assert name == lora or f"`--{name}`" in text
