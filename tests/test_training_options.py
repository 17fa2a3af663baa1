"""Options reach the engine: each is picked from the command's configuration under the name that users write."""

from __future__ import annotations

import pytest
import torch

from openrlhf_like.config import PPOConfig, SFTConfig
from openrlhf_like.training import device as dev
from openrlhf_like.training.options import EngineOptions, engine_options
from openrlhf_like.training.policy_options import policy_options
from openrlhf_like.training.strategy import deepspeed_config
from openrlhf_like.types import UserError


def set_path(cfg: object, dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        cfg = getattr(cfg, name)
    assert hasattr(cfg, last), dotted
    setattr(cfg, last, value)


SHARED = {
    "ds.param_dtype": ("param_dtype", "bf16"),
    "ds.zero_stage": ("zero_stage", 3),
    "ds.attn_implementation": ("attn_implementation", "eager"),
    "ds.packing_samples": ("packing", True),
    "ds.grad_accum_dtype": ("grad_accum_dtype", "fp32"),
    "ds.overlap_comm": ("overlap_comm", True),
    "ds.adam_offload": ("adam_offload", True),
    "ds.zpg": ("zpg", 2),
    "train.seed": ("seed", 7),
    "train.full_determinism_enable": ("full_determinism", True),
    "ckpt.disable_ds": ("disable_ds_ckpt", True),
    "data.disable_fast_tokenizer": ("slow_tokenizer", True),
    "data.tokenizer_chat_template": ("chat_template", "{{ messages }}"),
    "timeout.collective": ("collective_timeout", 11.0),
}
OPTIM = {
    "adam.lr": ("lr", 0.5),
    "adam.betas": ("betas", (0.1, 0.2)),
    "adam.eps": ("eps", 1e-3),
    "adam.weight_decay": ("weight_decay", 0.3),
    "lr_scheduler": ("lr_scheduler", "linear"),
    "lr_warmup_ratio": ("lr_warmup_ratio", 0.5),
    "min_lr_ratio": ("min_lr_ratio", 0.7),
    "max_norm": ("max_norm", 3.0),
}


@pytest.mark.parametrize(("make", "role", "group"), [(SFTConfig, "sft", "model"), (PPOConfig, "actor", "actor")])
def test_every_option_is_read_from_its_flag(make: type, role: str, group: str) -> None:
    prefix = "" if role == "sft" else "actor."
    for dotted, (name, value) in SHARED.items():
        cfg = make()
        set_path(cfg, dotted, value)
        assert getattr(engine_options(cfg, role), name) == value, dotted
    for dotted, (name, value) in OPTIM.items():
        cfg = make()
        set_path(cfg, prefix + dotted, value)
        assert getattr(engine_options(cfg, role).optim, name) == value, dotted
    cfg = make()
    set_path(cfg, f"{group}.gradient_checkpointing_enable", True)
    set_path(cfg, f"{group}.gradient_checkpointing_reentrant", True)
    options = engine_options(cfg, role)
    assert options.gradient_checkpointing and options.gradient_checkpointing_reentrant


def test_policy_options_are_read_from_their_flags() -> None:
    cases = {
        "actor.eps_clip": ("eps_high", 0.4),
        "actor.dual_clip": ("dual_clip", 3.0),
        "algo.loss_aggregation": ("aggregation", "seq_mean_token_sum"),
        "algo.kl.use_loss": ("kl_in_loss", True),
        "algo.kl.estimator": ("kl_estimator", "k3"),
        "actor.entropy_coef": ("entropy_coef", 0.0),
        "algo.advantage.estimator": ("estimator", "dr_grpo"),
        "algo.advantage.gamma": ("gamma", 0.9),
        "algo.advantage.no_std_norm": ("no_std_norm", True),
    }
    for dotted, (name, value) in cases.items():
        cfg = PPOConfig()
        set_path(cfg, dotted, value)
        assert getattr(policy_options(cfg), name) == value, dotted
    cfg = PPOConfig()
    set_path(cfg, "actor.eps_clip_low_high", (0.2, 0.28))
    assert (policy_options(cfg).eps_low, policy_options(cfg).eps_high) == (0.2, 0.28)
    assert policy_options(cfg).correction is None
    set_path(cfg, "algo.advantage.is_correction_enable", True)
    set_path(cfg, "algo.advantage.is_correction_type", "icepop")
    set_path(cfg, "algo.advantage.is_correction_threshold", (0.1, 2.0))
    assert (policy_options(cfg).correction, policy_options(cfg).correction_range) == ("icepop", (0.1, 2.0))


def test_policies_and_references_have_no_dropout() -> None:
    assert engine_options(PPOConfig(), "actor").disable_dropout
    assert engine_options(PPOConfig(), "ref").disable_dropout
    assert not engine_options(SFTConfig(), "sft").disable_dropout


def test_fp16_is_refused_in_one_line_where_the_cpu_has_none() -> None:
    if dev.cpu_supports_fp16():
        pytest.skip("this CPU computes in fp16")
    with pytest.raises(UserError, match="--ds.param_dtype fp16: .*use fp32"):
        dev.param_dtype("fp16", "cpu")
    assert dev.param_dtype("fp16", "cuda") is torch.float16


def test_the_caller_owns_the_accumulation_boundary() -> None:
    config = deepspeed_config(EngineOptions(), 2)
    assert config["managed_gradient_accumulation"] is False and config["gradient_accumulation_steps"] == 1
