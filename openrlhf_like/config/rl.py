"""Policy training: train_ppo_ray and its presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openrlhf_like.config.common import (
    AdamConfig,
    CommonConfig,
    LoggerConfig,
    OptimConfig,
    RLCkptConfig,
    RLDSConfig,
    RLEvalConfig,
    TimeoutConfig,
    WandbConfig,
)
from openrlhf_like.config.offline import TextDataConfig, TrainConfig

PolicyLoss = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "gpg"]
Estimator = Literal[
    "gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "opo", "remax", "grpo_passk"
]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


@dataclass
class WorkersConfig:
    """How many workers a role has."""

    num_nodes: int = 1
    """Machines of this role."""
    num_gpus_per_node: int | None = None
    """Workers a machine: GPUs, or processes on a CPU. Default: a share of the visible GPUs, one process on a CPU."""


@dataclass
class ActorConfig(OptimConfig, WorkersConfig):
    model_name_or_path: str | None = None
    """Model to train: folder or hub name."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass."""
    gradient_checkpointing_reentrant: bool = False
    """Reentrant form of gradient checkpointing."""
    policy_loss_type: PolicyLoss = "ppo"
    """Policy loss."""
    eps_clip: float = 0.2
    """The ratio is clipped to [1 - eps, 1 + eps]."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Lower and upper eps of the clip (clip-higher); replaces eps_clip."""
    dual_clip: float | None = None
    """Bound above 1 of the loss at negative advantages (dual-clip PPO)."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; 0 only measures it, not given does not compute it."""
    aux_loss_coef: float = 0.0
    """Weight of the router's auxiliary loss (mixture of experts)."""
    freeze_visual_encoder: bool = False
    """Leave the visual encoder as it is."""


@dataclass
class CriticConfig(OptimConfig, WorkersConfig):
    model_name_or_path: str | None = None
    """Model the critic starts from."""
    value_clip: float = 0.5
    """Clip of the value's change."""
    freezing_steps: int = -1
    """Steps in which only the critic trains."""
    save_value_network: bool = False
    """Save the critic with the model."""


@dataclass
class RefConfig(WorkersConfig):
    offload: bool = False
    """Keep the reference in host memory."""


@dataclass
class RewardConfig(WorkersConfig):
    remote_url: str | None = None
    """Python file with reward_func, or http(s) addresses; several with commas."""
    verifier: Literal["math"] | None = None
    """Built-in verifier that compares the answer with the label."""
    model_name_or_path: str | None = None
    """Reward model: folder or hub name."""
    offload: bool = False
    """Keep the reward model in host memory."""
    normalize_enable: bool = False
    """Normalize the reward model's score by its stored mean and deviation."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range before group statistics."""
    overlong_buffer_len: float | None = None
    """Tokens before the limit in which the overlong penalty grows (DAPO)."""
    overlong_penalty_factor: float = 1.0
    """Overlong penalty at the limit."""
    stop_properly_penalty_coef: float | None = None
    """Reward of a truncated sample: 0 and above multiplies it, below 0 replaces it."""
    num_workers: int = 1
    """Processes that run reward functions and verifiers."""
    batch_size: int = 64
    """Samples a call."""
    max_failure_fraction: float = 0.5
    """Share of failed samples among those of the last 32 blocks above which the run stops."""
    http_retries: int = 3
    """Attempts again after a 5xx answer or a lost connection."""


@dataclass
class VLLMConfig:
    num_engines: int | None = None
    """Engines. Default: one on a CPU; on GPUs what the actor and the reference leave, or all when colocated."""
    tensor_parallel_size: int = 1
    """GPUs an engine."""
    backend: Literal["auto", "inprocess", "async"] = "auto"
    """How an engine runs. auto: stepped in its own actor on a CPU, AsyncLLM on GPUs."""
    sync_backend: Literal["nccl", "ipc", "shm"] | None = None
    """How weights travel to the engines. Default: nccl on GPUs, ipc when colocated, shared memory on a CPU."""
    sync_with_ray: bool = False
    """Accepted for OpenRLHF's scripts; weights travel through vLLM's transfer framework."""
    enable_prefix_caching: bool = False
    """Reuse the key-value cache of equal prefixes."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation."""
    enable_sleep: bool = False
    """Engines give GPU memory back while the actor trains (colocated)."""
    gpu_memory_utilization: float = 0.95
    """Share of GPU memory an engine may use."""
    check_weight_sync: bool = False
    """Compare checksums and log-probabilities after each transfer of weights."""
    kv_cache_gib: float = 1.0
    """GiB of key-value cache an engine has on a CPU."""
    max_num_seqs: int | None = None
    """Sequences an engine runs at once. Default: vLLM's."""
    num_threads: int = 0
    """CPU threads an engine; 0 lets it choose."""


@dataclass
class RolloutConfig:
    batch_size: int = 1024
    """Prompts a rollout."""
    n_samples_per_prompt: int = 1
    """Samples a prompt."""
    micro_batch_size: int = 1
    """Samples a forward pass for reference and old log-probabilities."""
    vllm_generate_batch_size: int | None = None
    """Prompts sent to the engines at once; above batch_size it samples ahead."""
    max_tokens_per_gpu: int | None = None
    """Tokens of a forward pass for log-probabilities, with dynamic batching. Default: train.max_tokens_per_gpu."""
    max_new_tokens: int | None = None
    """Tokens an answer may have. Default: what the prompt leaves of data.max_len."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling."""
    no_request_seed: bool = False
    """Drop each request's own seed: a little faster, but runs no longer repeat."""


@dataclass
class KLConfig:
    init_coef: float = 0.01
    """Weight of the KL to the reference; 0 loads no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """KL estimator: k1 in the reward, k2 or k3 in the loss."""
    use_loss: bool = False
    """Put the KL in the loss instead of the reward."""
    target: float | None = None
    """KL the adaptive controller aims at; not given keeps the weight fixed."""
    horizon: int = 10000
    """Trajectories over which the adaptive controller acts."""


@dataclass
class AdvantageConfig:
    estimator: Estimator = "gae"
    """Advantage estimator."""
    gamma: float = 1.0
    """Discount."""
    lambd: float = 1.0
    """GAE's lambda."""
    no_std_norm: bool = False
    """Leave out the division by the deviation."""
    is_correction_enable: bool = False
    """Correct for the difference between engine and trainer."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Range of the correction's weight."""
    is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """What happens outside the range."""


@dataclass
class AlgoConfig:
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages and engine-trainer correction."""
    loss_aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    dynamic_filtering_enable: bool = False
    """Sample until enough groups have a mean score inside the range."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Open range of a kept group's mean score."""
    dynamic_filtering_max_rounds: int = 10
    """Rounds in a row without a group to train on after which the run ends, filtered or not."""


@dataclass
class RLTrainConfig(TrainConfig):
    num_episodes: int = 1
    """Passes over the prompts."""
    colocate_all: bool = False
    """All roles and engines share the same machines' GPUs."""
    colocate_actor_ref: bool = False
    """Actor and reference share GPUs."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs."""
    async_enable: bool = False
    """Generate while training."""
    async_queue_size: int = 1
    """Rollouts that may wait: the staleness limit."""
    partial_rollout_enable: bool = False
    """Go on with unfinished samples under new weights."""
    enable_ema: bool = False
    """Keep an average of the weights."""
    ema_beta: float = 0.992
    """Decay of the average."""
    agent_func_path: str | None = None
    """Python file with an AgentExecutor."""


@dataclass
class PromptDataConfig(TextDataConfig):
    prompt_dataset: str | None = None
    """Prompts: path, folder or hub name; several with commas."""
    prompt_probs: str | None = None
    """Share of each prompt dataset, with commas."""
    prompt_split: str = "train"
    """Split of the prompts."""
    input_key: str = "input"
    """Key of the prompt."""
    label_key: str | None = None
    """Key of the label handed to the reward."""
    image_key: str = "images"
    """Key of the images."""
    max_images_per_prompt: int = 0
    """Images a prompt may have; 0 is text only."""


@dataclass
class PPOConfig(CommonConfig):
    """Policy training with PPO, GRPO, REINFORCE++ or RLOO."""

    actor: ActorConfig = field(default_factory=lambda: ActorConfig(adam=AdamConfig(lr=1e-6)))
    """Policy."""
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(adam=AdamConfig(lr=9e-6)))
    """Critic (gae)."""
    ref: RefConfig = field(default_factory=RefConfig)
    """Reference model."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """Engines."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """Algorithm."""
    train: RLTrainConfig = field(default_factory=lambda: RLTrainConfig(micro_batch_size=1))
    """Batches and placement."""
    data: PromptDataConfig = field(default_factory=lambda: PromptDataConfig(max_samples=100_000_000))
    """Prompts."""
    ds: RLDSConfig = field(default_factory=RLDSConfig)
    """DeepSpeed and model loading."""
    eval: RLEvalConfig = field(default_factory=RLEvalConfig)
    """Evaluation."""
    ckpt: RLCkptConfig = field(
        default_factory=lambda: RLCkptConfig(path="./ckpt/checkpoints_ppo_ray", max_mem=float("inf"))
    )
    """Checkpoints and output."""
    logger: LoggerConfig = field(default_factory=lambda: LoggerConfig(wandb=WandbConfig(project="train_ppo")))
    """Logs and trackers."""
    timeout: TimeoutConfig = field(default_factory=TimeoutConfig)
    """Limits of waits."""
