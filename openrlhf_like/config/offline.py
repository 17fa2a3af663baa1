"""Commands that learn from fixed data (train_sft, train_rm, train_dpo), and the tools serve_rm and lora_combiner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openrlhf_like.config.common import (
    AdamConfig,
    CkptConfig,
    CommonConfig,
    DSConfig,
    DtypeConfig,
    EvalConfig,
    LoggerConfig,
    OptimConfig,
    RewardModelDSConfig,
    ServeDSConfig,
    TimeoutConfig,
    WandbConfig,
)


@dataclass
class TokenizerConfig:
    max_len: int = 2048
    """Longest sequence, prompt and answer together, in tokens."""
    disable_fast_tokenizer: bool = False
    """Use the Python tokenizer."""


@dataclass
class TextDataConfig(TokenizerConfig):
    dataloader_num_workers: int = 0
    """Processes that prepare data; 0 does it in line."""
    max_samples: int = 1_000_000
    """Records used at most."""
    input_template: str | None = None
    """Text around each prompt, with {} where it goes; apply_chat_template takes precedence."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Chat template that replaces the tokenizer's own."""


@dataclass
class OfflineDataConfig(TextDataConfig):
    dataset: str | None = None
    """Training data: path, folder or hub name; several with commas."""
    dataset_probs: str | None = None
    """Share of each dataset, with commas."""
    dataset_split: str = "train"
    """Split of the training data."""


@dataclass
class SFTDataConfig(OfflineDataConfig):
    multiturn: bool = False
    """Each record is a conversation; the loss is on the assistant's turns only."""
    input_key: str = "input"
    """Key of the prompt."""
    output_key: str | None = None
    """Key of the answer; without it the input holds both."""


@dataclass
class PreferenceDataConfig(OfflineDataConfig):
    prompt_key: str | None = None
    """Key of the prompt; without it chosen and rejected hold it."""
    chosen_key: str = "chosen"
    """Key of the preferred answer."""
    rejected_key: str = "rejected"
    """Key of the other answer."""


@dataclass
class TrainConfig:
    batch_size: int = 128
    """Samples an optimizer step, over all workers."""
    micro_batch_size: int = 8
    """Samples a forward pass, on one worker."""
    max_epochs: int = 1
    """Passes over the data."""
    seed: int = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Deterministic kernels, at some cost."""
    dynamic_batch_enable: bool = False
    """Fill micro-batches by tokens instead of by samples."""
    max_tokens_per_gpu: int = 16192
    """Tokens of a micro-batch on one worker, with dynamic batching."""


@dataclass
class OfflineTrainConfig(TrainConfig):
    num_nodes: int = 1
    """Machines."""
    num_gpus_per_node: int | None = None
    """Workers a machine: GPUs, or processes on a CPU. Default: the visible GPUs, one process on a CPU."""


@dataclass
class ModelConfig:
    model_name_or_path: str | None = None
    """Model to train: folder or hub name."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass."""
    gradient_checkpointing_reentrant: bool = False
    """Reentrant form of gradient checkpointing."""
    aux_loss_coef: float = 0.0
    """Weight of the router's auxiliary loss (mixture of experts)."""


@dataclass
class SFTModelConfig(ModelConfig):
    pretrain_mode_enable: bool = False
    """Loss on every token, prompt included."""


@dataclass
class RewardTrainModelConfig(ModelConfig):
    compute_fp32_loss_enable: bool = False
    """Take the loss in fp32."""
    margin_loss_enable: bool = False
    """Subtract the record's margin."""
    loss_type: str = "sigmoid"
    """Pairwise loss: sigmoid or logexp."""


@dataclass
class DPOModelConfig(ModelConfig):
    beta: float = 0.1
    """Strength of the pull to the reference."""
    loss_type: Literal["sigmoid", "ipo", "ipo_mean", "robust", "hinge", "simpo", "orpo"] = "sigmoid"
    """Preference loss."""
    ipo_enable: bool = False
    """IPO's loss; the same as loss type ipo."""
    label_smoothing: float = 0.0
    """Assumed share of swapped pairs (cDPO)."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen answer's own likelihood."""


@dataclass
class DPORefConfig:
    model_name_or_path: str | None = None
    """Reference model. Default: the starting model."""
    offload: bool = False
    """Keep the reference in host memory."""
    precompute: bool = False
    """Take the reference's log-probabilities once, before training."""


@dataclass
class OfflineConfig(OptimConfig, CommonConfig):
    """What the three offline trainers share; a command replaces a group by its own class or its own defaults."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model."""
    data: OfflineDataConfig = field(default_factory=OfflineDataConfig)
    """Data."""
    train: OfflineTrainConfig = field(default_factory=OfflineTrainConfig)
    """Batches and workers."""
    ds: DSConfig = field(default_factory=DSConfig)
    """DeepSpeed and model loading."""
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    """Checkpoints and output."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Logs and trackers."""
    timeout: TimeoutConfig = field(default_factory=TimeoutConfig)
    """Limits of waits."""


def _logger(project: str) -> LoggerConfig:
    return LoggerConfig(wandb=WandbConfig(project=project))


@dataclass
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning."""

    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    """Model."""
    data: SFTDataConfig = field(default_factory=lambda: SFTDataConfig(input_template="User: {}\nAssistant: "))
    """Data."""
    train: OfflineTrainConfig = field(default_factory=lambda: OfflineTrainConfig(max_epochs=2))
    """Batches and workers."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_sft"))
    """Checkpoints and output."""
    logger: LoggerConfig = field(default_factory=lambda: _logger("train_sft"))
    """Logs and trackers."""


@dataclass
class RMConfig(OfflineConfig):
    """Reward-model training."""

    model: RewardTrainModelConfig = field(default_factory=RewardTrainModelConfig)
    """Model and loss."""
    data: PreferenceDataConfig = field(default_factory=lambda: PreferenceDataConfig(max_len=512))
    """Data."""
    train: OfflineTrainConfig = field(default_factory=lambda: OfflineTrainConfig(micro_batch_size=1))
    """Batches and workers."""
    ds: RewardModelDSConfig = field(default_factory=RewardModelDSConfig)
    """DeepSpeed and model loading."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_rm"))
    """Checkpoints and output."""
    logger: LoggerConfig = field(default_factory=lambda: _logger("train_rm"))
    """Logs and trackers."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    """AdamW."""


@dataclass
class DPOConfig(OfflineConfig):
    """Direct preference optimization."""

    model: DPOModelConfig = field(default_factory=DPOModelConfig)
    """Model and loss."""
    ref: DPORefConfig = field(default_factory=DPORefConfig)
    """Reference model."""
    data: PreferenceDataConfig = field(default_factory=lambda: PreferenceDataConfig(max_len=512))
    """Data."""
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_dpo"))
    """Checkpoints and output."""
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(split="test"))
    """Evaluation."""
    logger: LoggerConfig = field(default_factory=lambda: _logger("train_dpo"))
    """Logs and trackers."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    """AdamW."""


@dataclass
class ServeRewardConfig:
    model_name_or_path: str | None = None
    """Reward model to serve."""
    normalize_enable: bool = False
    """Subtract the mean and divide by the deviation stored with the model."""


@dataclass
class ServeRMConfig(CommonConfig):
    """Serve a reward model over HTTP."""

    reward: ServeRewardConfig = field(default_factory=ServeRewardConfig)
    """Model."""
    ds: ServeDSConfig = field(default_factory=ServeDSConfig)
    """Model loading."""
    data: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer."""
    host: str = "127.0.0.1"
    """Address to listen on; the default answers this machine only."""
    port: int = 5000
    """Port to listen on."""
    batch_size: int | None = None
    """Texts scored at once. Default: all of a request."""


@dataclass
class LoraCombinerConfig(CommonConfig):
    """Merge a LoRA adapter into its model."""

    model_path: str | None = None
    """Base model."""
    lora_path: str | None = None
    """Adapter."""
    output_path: str | None = None
    """Where the merged model goes."""
    is_rm: bool = False
    """The model is a reward model."""
    ds: DtypeConfig = field(default_factory=DtypeConfig)
    """Precision."""
