"""Typed options of every command, their defaults, presets and checks. Nothing here imports torch.

``parse_args(command, argv)`` reads a command line; ``make_config(command, {dotted: value})`` builds the same object in
Python; ``validate(cfg)`` refuses what cannot work and returns the warnings.
"""

from openrlhf_like.config.checks import validate
from openrlhf_like.config.common import CommonConfig
from openrlhf_like.config.offline import DPOConfig, LoraCombinerConfig, RMConfig, ServeRMConfig, SFTConfig
from openrlhf_like.config.parse import default_config, from_yaml, make_config, parse_args
from openrlhf_like.config.presets import COMMANDS, GROUP_ESTIMATORS, PRESETS
from openrlhf_like.config.resolve import uses_reference, visible_gpus
from openrlhf_like.config.rl import PPOConfig
from openrlhf_like.config.yaml_io import to_dict, to_yaml

__all__ = [
    "COMMANDS",
    "GROUP_ESTIMATORS",
    "PRESETS",
    "CommonConfig",
    "DPOConfig",
    "LoraCombinerConfig",
    "PPOConfig",
    "RMConfig",
    "SFTConfig",
    "ServeRMConfig",
    "default_config",
    "from_yaml",
    "make_config",
    "parse_args",
    "to_dict",
    "to_yaml",
    "uses_reference",
    "validate",
    "visible_gpus",
]
