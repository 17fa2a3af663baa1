"""Option groups that every training command shares: optimizer, DeepSpeed, checkpoints, trackers, limits of waits.

A group is written once. Where a command's default differs, its root class builds the group with another value
(``field(default_factory=lambda: CkptConfig(path=...))``). The string under a field is its help text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass
class AdamConfig:
    lr: float = 5e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass
class MuonConfig:
    lr: float = 0.02
    """Learning rate of the matrices."""
    momentum: float = 0.95
    """Momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations a step."""
    nesterov: bool = True
    """Nesterov momentum; the no_ form clears it."""


@dataclass
class OptimConfig:
    """Optimizer and schedule: at the root of the offline trainers, and in the groups of actor and critic."""

    optim: Literal["adam", "muon"] = "adam"
    """Optimizer."""
    lr_scheduler: str = "cosine_with_min_lr"
    """Learning-rate schedule, by its transformers name."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps spent warming up."""
    min_lr_ratio: float = 0.1
    """Lowest learning rate as a share of the peak (cosine_with_min_lr)."""
    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 leaves them alone."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    """AdamW."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Muon."""


@dataclass
class LoraConfig:
    rank: int = 0
    """LoRA rank; 0 trains all weights."""
    alpha: int = 16
    """LoRA scale."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Modules that get an adapter: names, or all-linear."""
    dropout: float = 0.0
    """Dropout before the adapter."""


@dataclass
class DtypeConfig:
    """The one DeepSpeed flag that every command has."""

    param_dtype: Dtype | None = None
    """Precision of the forward and backward pass. Default: bf16 on GPUs, fp32 on a CPU."""


@dataclass
class ModelLoadConfig(DtypeConfig):
    """How a model is loaded and run; shared with serve_rm."""

    attn_implementation: str | None = None
    """Attention kernel, by its transformers name. Default: flash_attention_2 on GPUs with flash_attn, else sdpa."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = None
    """Kernel of mixture-of-experts layers."""
    load_in_4bit: bool = False
    """Load weights in 4 bits (needs LoRA to train)."""
    packing_samples: bool = False
    """Several samples a row without padding; flash attention keeps them apart at no cost, sdpa by a mask."""


@dataclass
class DSConfig(ModelLoadConfig):
    zero_stage: int = 2
    """ZeRO stage, 0 to 3."""
    zpg: int = 1
    """ZeRO++ secondary partition size."""
    adam_offload: bool = False
    """Keep optimizer state in host memory."""
    overlap_comm: bool = False
    """Overlap gradient reduction with the backward pass."""
    grad_accum_dtype: str | None = None
    """Type gradients are accumulated in: fp32, bf16 or fp16; default DeepSpeed's."""
    deepcompile: bool = False
    """DeepSpeed's compiler."""
    use_liger_kernel: bool = False
    """Liger's fused kernels."""
    use_universal_ckpt: bool = False
    """Load from DeepSpeed's universal checkpoint form."""
    tensor_parallel_size: int = 1
    """Workers that share one copy of each layer."""
    ring_attn_size: int = 1
    """Workers that share one sequence (ring attention)."""
    ring_attn_head_stride: int = 1
    """Heads a ring step handles at once."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters."""


@dataclass
class RewardModelDSConfig(DSConfig):
    value_head_prefix: str = "score"
    """Name of the reward or value head in the checkpoint."""


@dataclass
class RLDSConfig(RewardModelDSConfig):
    enable_sleep: bool = False
    """Move training state off the GPU while engines generate (colocated)."""


@dataclass
class ServeDSConfig(ModelLoadConfig):
    value_head_prefix: str = "score"
    """Name of the reward head in the checkpoint."""


@dataclass
class CkptConfig:
    output_dir: str = "./ckpt"
    """Where the final model and the run's records go."""
    path: str = "./ckpt/checkpoints"
    """Where resumable state goes."""
    save_steps: int = -1
    """Steps between checkpoints (optimizer steps; in the RL commands rollouts); -1 saves none on the way."""
    save_hf: bool = False
    """Also write each checkpoint in Hugging Face form."""
    disable_ds: bool = False
    """Write no resumable state."""
    max_num: int = 3
    """Checkpoints kept; the oldest goes first."""
    max_mem: float = 1e8
    """Gigabytes of checkpoints kept."""
    load_enable: bool = False
    """Resume from the newest checkpoint under the checkpoint path."""


@dataclass
class RLCkptConfig(CkptConfig):
    best_metric_key: str = ""
    """Evaluation metric whose best checkpoint is kept; empty takes the first pass1, none keeps no best."""


@dataclass
class WandbConfig:
    key: str | None = None
    """W&B API key, or True where it is already logged in. Never printed or stored."""
    org: str | None = None
    """W&B entity."""
    group: str | None = None
    """W&B group."""
    project: str = "openrlhf_like"
    """W&B project."""
    run_name: str | None = None
    """W&B run name. Default: the command with the time it started."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """How W&B runs; offline needs no key. Default: online when a key is given, else off."""


@dataclass
class LoggerConfig:
    logging_steps: int = 1
    """Steps between log lines."""
    tensorboard_dir: str | None = None
    """Where TensorBoard events go; default none."""
    rollouts_every: int = 1
    """Steps between written rollouts; 0 writes none."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights and Biases."""


@dataclass
class EvalConfig:
    dataset: str | None = None
    """Evaluation data: path, folder or hub name; several with commas."""
    split: str = "train"
    """Split of the evaluation data."""
    steps: int = -1
    """Steps between evaluations (optimizer steps; in the RL commands rollouts). -1: after each epoch of train_sft, or
    after the last step of an RL command."""
    before_train: bool = False
    """Evaluate once before the first step."""


@dataclass
class RLEvalConfig(EvalConfig):
    temperature: float = 0.6
    """Sampling temperature of evaluation; 0 is greedy."""
    n_samples_per_prompt: int = 4
    """Samples a prompt in evaluation."""
    max_samples: int = 100_000_000
    """Evaluation prompts used at most."""


@dataclass
class TimeoutConfig:
    """Seconds each wait may take before it ends with a message that names this flag."""

    placement: float = 300.0
    """Seconds the cluster has to place all workers and engines."""
    init: float = 1200.0
    """Seconds a worker or engine has to start and load its model."""
    generate: float = 1800.0
    """Seconds one rollout has."""
    reward: float = 60.0
    """Seconds one call of a reward function, server or verifier has."""
    weight_sync: float = 600.0
    """Seconds one transfer of weights to the engines has."""
    collective: float = 1800.0
    """Seconds one collective among workers has."""
    shutdown: float = 15.0
    """Seconds everything has to end."""


@dataclass
class CommonConfig:
    """Flags of every command."""

    config: str | None = None
    """YAML file with the same dotted tree; flags override it."""
    print_config: bool = False
    """Print the resolved configuration as YAML and exit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run. auto: GPUs where the machine has them, else the CPU."""
    local_rank: int = -1
    """Accepted for launchers that pass it; workers are placed by Ray."""
    use_ms: bool = False
    """Read models from ModelScope."""

    def __post_init__(self) -> None:
        # Not options: what the parser adds. Plain attributes, so that neither help nor YAML lists them.
        self.command: str = ""
        self.preset: str | None = None
        #: dotted name -> where the user gave it: "command line", or the YAML file
        self.given: dict[str, str] = {}
        #: warnings from resolving defaults: a value the user gave that this machine replaces
        self.notes: list[str] = []
