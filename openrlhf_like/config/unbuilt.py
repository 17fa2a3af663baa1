"""The one table of what parses but is not built yet. It only shrinks: building a feature deletes its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.parse import default_config
from openrlhf_like.config.tree import get, kinds
from openrlhf_like.types import UserError

#: Commands that parse, print their configuration, and stop.
UNBUILT_COMMANDS = ("train_rm", "train_dpo", "serve_rm", "lora_combiner")


@dataclass(frozen=True)
class Unbuilt:
    """One flag, or some of its values.

    Attributes:
        name: dotted name; in commands without it the line does not apply.
        fix: what to do instead.
        values: the values that are not built; empty: every value but the default.
        when: a further condition on the whole configuration.
        default_too: refuse also where the value is the command's own default.
    """

    name: str
    fix: str
    values: tuple[Any, ...] = ()
    when: Callable[[Any], bool] | None = None
    default_too: bool = False


_LEAVE = "leave it at its default"

UNBUILT: tuple[Unbuilt, ...] = (
    # loops
    Unbuilt("train.async_enable", "leave it out: rollout and training take turns"),
    Unbuilt("train.partial_rollout_enable", "leave it out: samples are finished under the weights that began them"),
    Unbuilt(
        "rollout.vllm_generate_batch_size",
        "leave it out, or give rollout.batch_size",
        when=lambda c: c.rollout.vllm_generate_batch_size != c.rollout.batch_size,
    ),
    Unbuilt("train.enable_ema", "leave it out"),
    Unbuilt("ckpt.best_metric_key", "leave it out: the newest checkpoints are kept, see --ckpt.max_num"),
    Unbuilt("train.agent_func_path", "use --reward.remote_url for single-turn rewards"),
    # algorithms
    Unbuilt(
        "algo.advantage.estimator",
        "use group_norm, dr_grpo, rloo, reinforce_baseline, reinforce or opo (gae needs the critic)",
        values=("gae", "remax", "grpo_passk"),
        default_too=True,
    ),
    Unbuilt(
        "actor.policy_loss_type",
        "use ppo",
        values=("gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "gpg"),
    ),
    Unbuilt("reward.model_name_or_path", "use --reward.remote_url or --reward.verifier"),
    # optimizers
    Unbuilt("optim", "use adam", values=("muon",)),
    Unbuilt("actor.optim", "use adam", values=("muon",)),
    # models
    Unbuilt("model.aux_loss_coef", _LEAVE),
    Unbuilt("actor.aux_loss_coef", _LEAVE),
    Unbuilt("actor.freeze_visual_encoder", _LEAVE),
    Unbuilt("data.max_images_per_prompt", "leave it at 0: prompts are text"),
    Unbuilt("ds.experts_implementation", _LEAVE),
    Unbuilt("ds.load_in_4bit", _LEAVE),
    Unbuilt("ds.lora.rank", "leave it at 0: all weights train"),
    Unbuilt("ds.use_liger_kernel", _LEAVE),
    # DeepSpeed
    Unbuilt("ds.deepcompile", _LEAVE),
    Unbuilt("ds.zpg", "leave it at 1"),
    Unbuilt("ds.tensor_parallel_size", "leave it at 1"),
    Unbuilt("ds.ring_attn_size", "leave it at 1"),
    Unbuilt("ds.use_universal_ckpt", _LEAVE),
    # On a CPU the state is in host memory already, and the flag is named as one without effect.
    Unbuilt("ds.enable_sleep", _LEAVE, when=lambda c: c.device == "cuda"),
    Unbuilt(
        "vllm.enable_sleep",
        "lower --vllm.gpu_memory_utilization instead, so that engine and trainer fit on one GPU",
        when=lambda c: c.device == "cuda",
    ),
    Unbuilt("use_ms", "leave it out: give a local folder or a Hugging Face hub name"),
)


def refuse_unbuilt(cfg: CommonConfig) -> None:
    """Raise UserError naming the first flag that is set and not built yet; a flag left at its default never is."""
    defaults = default_config(cfg.command, cfg.preset)
    known = kinds(type(cfg))
    for entry in UNBUILT:
        if entry.name not in known:
            continue
        value = get(cfg, entry.name)
        if value == get(defaults, entry.name) and not entry.default_too:
            continue
        if entry.values and value not in entry.values:
            continue
        if entry.when is None or entry.when(cfg):
            shown = "" if value is True else f" {value}"
            raise UserError(f"--{entry.name}{shown}: not built yet; {entry.fix}")
    if cfg.command in UNBUILT_COMMANDS:
        raise UserError(f"{cfg.command}: this command is not built yet; --help and --print_config work")
