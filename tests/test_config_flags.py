"""Every flag of OpenRLHF 0.11 parses for its command, with its type and its default."""

from __future__ import annotations

import ast
import csv
from pathlib import Path
from typing import Any

import pytest

from openrlhf_like.config import COMMANDS, default_config, make_config, parse_args
from openrlhf_like.config.tree import get, kinds, no_form

TABLE = Path(__file__).parent / "data" / "openrlhf_flags.tsv"
ROWS = list(csv.DictReader(TABLE.open(encoding="utf-8"), delimiter="\t"))

AUTO = "filled in by what the machine has"
#: Our default where it is not OpenRLHF's, and why.
DEVIATIONS: dict[str, tuple[Any, str]] = {
    "ds.param_dtype": (None, AUTO),
    "ds.attn_implementation": (None, AUTO),
    "actor.num_gpus_per_node": (None, AUTO),
    "ref.num_gpus_per_node": (None, AUTO),
    "reward.num_gpus_per_node": (None, AUTO),
    "critic.num_gpus_per_node": (None, AUTO),
    "vllm.sync_backend": (None, AUTO),
    "logger.wandb.run_name": (None, "the command with its start time, filled in when resolved"),
    "ds.lora.target_modules": (["all-linear"], "always a list"),
    "host": ("127.0.0.1", "a server on all interfaces is the user's decision"),
}


def _default(text: str) -> Any:
    special = {"int(100000000.0)": 10**8, "float('inf')": float("inf")}
    return special[text] if text in special else ast.literal_eval(text)


def _is_clearing(row: dict[str, str]) -> bool:
    return row["flag"].endswith("no_nesterov")


def _id(row: dict[str, str]) -> str:
    return row["command"] + row["flag"]


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 412
    assert {r["command"] for r in ROWS} == {
        "train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm", "lora_combiner"
    }  # fmt: skip


@pytest.mark.parametrize("row", [r for r in ROWS if not _is_clearing(r)], ids=_id)
def test_flag_has_its_default(row: dict[str, str]) -> None:
    name = row["flag"][2:]
    got = get(default_config(row["command"]), name)
    if name in DEVIATIONS:
        assert got == DEVIATIONS[name][0]
        return
    want = _default(row["default"])
    assert (tuple(want) if isinstance(want, list | tuple) else want) == got


SAMPLES = {"int": (["3"], 3), "float": (["1e-6"], 1e-6), "float nargs=2": (["0.25", "0.5"], (0.25, 0.5))}


def _words(row: dict[str, str]) -> tuple[list[str], Any]:
    """Words after the flag, and the value they must become."""
    if row["choices"]:
        # The last choice, so that it is not the default.
        choice = ast.literal_eval(row["choices"])[-1]
        return [choice], choice
    if row["type"] == "str nargs='*'":
        return ["q_proj", "v_proj"], ["q_proj", "v_proj"]
    if row["type"] == "str":
        choice = {"vllm.sync_backend": "ipc"}.get(row["flag"][2:], "some text/with-dash")
        return [choice], choice
    return SAMPLES[row["type"]]


@pytest.mark.parametrize("command", sorted({r["command"] for r in ROWS}))
def test_all_flags_of_a_command_parse_at_once_with_their_types(command: str) -> None:
    argv: list[str] = []
    want: dict[str, Any] = {}
    for row in (r for r in ROWS if r["command"] == command):
        name = row["flag"][2:]
        if _is_clearing(row):
            argv.append(row["flag"])
            want[name.replace("no_nesterov", "nesterov")] = False
        elif row["type"] == "flag":
            if not name.endswith("nesterov"):
                argv.append(row["flag"])
                want[name] = True
        else:
            words, value = _words(row)
            argv += [row["flag"], *words]
            want[name] = value
    # As on a machine with two GPUs, so that no value is replaced by a CPU's.
    cfg = parse_args(command, argv, gpus=2)
    if command == "train_ppo_ray":
        want["vllm.sync_backend"] = "ipc"
    if command == "train_dpo":
        want["ref.model_name_or_path"] = "some text/with-dash"
    wrong = {n: (get(cfg, n), v) for n, v in want.items() if get(cfg, n) != v or type(get(cfg, n)) is not type(v)}
    # Numbers of one kind: ckpt.max_mem is a float for every command.
    wrong = {n: p for n, p in wrong.items() if p[0] != p[1]}
    assert wrong == {}
    assert set(want) <= set(cfg.given)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_one_line_of_help(command: str) -> None:
    """The string under each field is its help: found with ast, class by class through the bases."""
    texts: dict[str, dict[str, str]] = {}
    bases: dict[str, list[str]] = {}
    for file in ("common.py", "offline.py", "rl.py"):
        tree = ast.parse((Path(__file__).parents[1] / "openrlhf_like" / "config" / file).read_text())
        for node in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            bases[node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)]
            texts[node.name] = {}
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(text.value, ast.Constant)
                    texts[node.name][ast.unparse(field.target)] = str(text.value.value)
    cls: Any = COMMANDS[command]
    missing = []
    for name in kinds(cls):
        owner: Any = default_config(command)
        *groups, leaf = name.split(".")
        for group in groups:
            owner = getattr(owner, group)
        if not any(leaf in texts.get(c.__name__, {}) for c in type(owner).__mro__):
            missing.append(name)
    assert missing == []


def test_booleans_take_no_value_and_can_be_cleared() -> None:
    cfg = parse_args("train_sft", ["--ckpt.save_hf", "--muon.no_nesterov"], gpus=0)
    assert cfg.ckpt.save_hf is True and cfg.muon.nesterov is False
    assert set(cfg.given) == {"ckpt.save_hf", "muon.nesterov"}
    assert parse_args("train_sft", ["--ckpt.save_hf", "--ckpt.no_save_hf"], gpus=0).ckpt.save_hf is False
    assert no_form("actor.muon.nesterov") == "actor.muon.no_nesterov"


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--reward.stop_properly_penalty_coef", "-0.5"], "reward.stop_properly_penalty_coef", -0.5),
        (["--reward.clip_range", "-5", "5"], "reward.clip_range", (-5.0, 5.0)),
        (["--data.input_template=--{}"], "data.input_template", "--{}"),
        (["--data.input_template", "a {}\nb: "], "data.input_template", "a {}\nb: "),
        (["--ckpt.best_metric_key", ""], "ckpt.best_metric_key", ""),
        (["--actor.adam.lr=2e-6"], "actor.adam.lr", 2e-6),
        (["--actor.adam.lr", "1", "--actor.adam.lr", "2e-6"], "actor.adam.lr", 2e-6),
        (["--ckpt.max_mem", "inf"], "ckpt.max_mem", float("inf")),
        (["--vllm.num_engines", "None"], "vllm.num_engines", 1),
        (["--vllm.enforce-eager"], "vllm.enforce_eager", True),
    ],
)
def test_values_as_scripts_write_them(words: list[str], name: str, value: Any) -> None:
    assert get(parse_args("train_ppo_ray", words, gpus=0), name) == value


def test_presets_name_themselves_and_leave_the_general_form_alone() -> None:
    grpo = make_config("train_grpo_ray", gpus=0)
    assert grpo.preset == "train_grpo_ray"
    assert (grpo.algo.advantage.estimator, grpo.algo.kl.use_loss, grpo.algo.kl.estimator) == ("group_norm", True, "k3")
    assert make_config("train_rloo_ray", gpus=0).algo.advantage.estimator == "rloo"
    assert make_config("train_reinforce_ray", gpus=0).algo.advantage.estimator == "reinforce"
    ppo = make_config("train_ppo_ray", gpus=0)
    assert ppo.preset is None and ppo.algo.advantage.estimator == "gae"
    # A flag overrides the preset.
    assert parse_args("train_grpo_ray", ["--algo.kl.init_coef", "0"], gpus=0).algo.kl.init_coef == 0
