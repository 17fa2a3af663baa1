"""Example scripts parse, links resolve, docs name no flag that does not exist, and their snippets run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_like.config import COMMANDS, from_yaml, parse_args
from openrlhf_like.config.checks import check_offline, check_rl
from openrlhf_like.config.effects import flags_without_effect
from openrlhf_like.config.ranges import check_ranges
from openrlhf_like.config.rl import PPOConfig
from openrlhf_like.config.tree import kinds, no_form
from openrlhf_like.config.unbuilt import refuse_unbuilt

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "scripts").glob("*.sh"))
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
)
#: Flags of other programs that the docs and scripts name.
OTHERS = {"help", "head", "port", "address", "signal", "check"}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.name != "common.sh"], ids=_name)
def test_script_makes_a_configuration_without_fault_or_warning(script: Path, tmp_path: Path) -> None:
    # A Python that says what it was asked for: the flags as the script gives them.
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    env = {**_clean_environment(), "DRY_RUN": "1", "PYTHON": str(stub)}
    words = ["bash", str(script), "--train.seed", "7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [stub]  # a dry run makes nothing
    _, module, *argv = done.stdout.splitlines()
    cfg = parse_args(module.rsplit(".", 1)[-1], argv)
    assert cfg.print_config and cfg.train.seed == 7  # what follows the script's name is passed on
    check_ranges(cfg)
    refuse_unbuilt(cfg)
    warnings = check_rl(cfg) if isinstance(cfg, PPOConfig) else check_offline(cfg)
    assert [*cfg.notes, *warnings, *flags_without_effect(cfg)] == []


def test_a_dry_run_prints_yaml(tmp_path: Path) -> None:
    env = {**_clean_environment(), "DRY_RUN": "1", "PYTHON": sys.executable}
    words = ["bash", str(ROOT / "examples" / "scripts" / "train_grpo.sh"), "--rollout.n_samples_per_prompt", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert from_yaml("train_grpo_ray", done.stdout).rollout.n_samples_per_prompt == 4  # and wins


def _clean_environment() -> dict[str, str]:
    """Without what the scripts would take their variables from."""
    ours = {"MODEL", "DATA", "EVAL", "OUT", "LR", "TOY", "REWARD", "PROMPTS", "MAX_LEN", "MAX_NEW", "SAVE_STEPS"}
    return {k: v for k, v in os.environ.items() if k not in ours}


@pytest.mark.parametrize("script", SCRIPTS, ids=_name)
def test_script_is_valid_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    if script.name != "common.sh":
        assert "set -euo pipefail" in script.read_text() and os.access(script, os.X_OK)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{_name(page)}: {link}"
        if anchor:
            assert anchor in _anchors(target), f"{_name(page)}: {link}"


def _known_flags() -> set[str]:
    flags: set[str] = set(OTHERS)
    for cls in COMMANDS.values():
        flags.update(kinds(cls))
        flags.update(no_form(name) for name, kind in kinds(cls).items() if kind.base == "bool")
    for file in (ROOT / "examples").rglob("*.py"):
        flags.update(re.findall(r'add_argument\("--([a-z_]+)"', file.read_text(encoding="utf-8")))
    return flags


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=_name)
def test_flags_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        text = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, flags=re.DOTALL))
    known = _known_flags()
    unknown = []
    for name, star in re.findall(r"(?<![\w-])--([a-z][a-z0-9_.-]*)(\*?)", text):
        name = name.rstrip(".-") if not star else name
        if not (any(flag.startswith(name) for flag in known) if star else name in known):
            unknown.append(f"--{name}{star}")
    # A slip that an error message shows.
    assert set(unknown) <= {"--actor.adam.lrr"}


@pytest.mark.parametrize("page", ["extending.md", "configuration.md"])
def test_snippets_run(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    program = ["import openrlhf_like"]
    for i, block in enumerate(blocks):
        program.append(f"exec(compile({block!r}, '{page}, snippet {i}', 'exec'), {{}})")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_metrics_page_lists_what_a_run_writes() -> None:
    """Every metric that the code names literally has a row, or stands in the text."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: set[str] = set()
    # time/* of the workers stays in the workers: the loop takes its own times.
    groups = "reward|policy|rollout|train|batch|throughput|advantage"
    for folder in ("pipeline", "training"):
        for file in (ROOT / "openrlhf_like" / folder).glob("*.py"):
            names.update(re.findall(rf'"((?:{groups})/[a-z_0-9]+)"', file.read_text(encoding="utf-8")))
    assert len(names) > 25
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
