"""Which class a command has, and what its preset changes."""

from __future__ import annotations

from typing import Any

from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.offline import DPOConfig, LoraCombinerConfig, RMConfig, ServeRMConfig, SFTConfig
from openrlhf_like.config.rl import PPOConfig

#: Group estimators compare the samples of one prompt: they need two and more of them.
GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo", "grpo_passk")

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath's GRPO, with the values of OpenRLHF's GRPO script: the KL in the loss as k3.
    "train_grpo_ray": {
        "algo.advantage.estimator": "group_norm",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "algo.kl.init_coef": 1e-3,
        "rollout.n_samples_per_prompt": 8,
    },
    # REINFORCE++: one sample a prompt is enough, the KL in the reward as k1.
    "train_reinforce_ray": {"algo.advantage.estimator": "reinforce"},
    # RLOO: the other samples of the prompt are the baseline, the KL in the reward as k1.
    "train_rloo_ray": {"algo.advantage.estimator": "rloo", "rollout.n_samples_per_prompt": 8},
}

COMMANDS: dict[str, type[CommonConfig]] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_ppo_ray": PPOConfig,
    "train_grpo_ray": PPOConfig,
    "train_reinforce_ray": PPOConfig,
    "train_rloo_ray": PPOConfig,
    "serve_rm": ServeRMConfig,
    "lora_combiner": LoraCombinerConfig,
}
