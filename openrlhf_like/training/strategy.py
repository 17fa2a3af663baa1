"""The DeepSpeed engine of one worker: one model, one optimizer, gradients of the global batch.

Two things about DeepSpeed are settled here and nowhere else. It averages gradients over data-parallel workers, so a
worker's loss, which is already its share of the global batch's, is multiplied by the number of workers. And it
divides by its accumulation steps, a constant: with ``managed_gradient_accumulation`` off, the caller decides when an
optimizer step ends, so any number of micro-batches may make one, and nothing is divided.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openrlhf_like.training import device as dev
from openrlhf_like.training.optim import build_optimizer
from openrlhf_like.training.options import EngineOptions
from openrlhf_like.training.schedule import check_schedule, lr_factor, warmup_updates

logger = logging.getLogger(__name__)


def free_address() -> tuple[str, int]:
    """(address, port) of this machine that the other workers can meet at."""
    try:
        import ray

        host = ray.util.get_node_ip_address() if ray.is_initialized() else socket.gethostbyname(socket.gethostname())
    except (ImportError, OSError):
        host = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.bind(("", 0))
        return host, int(s.getsockname()[1])


def init_distributed(
    options: EngineOptions, rank: int, world_size: int, local_rank: int, address: str, port: int
) -> None:
    """Join the training process group (tcp rendezvous at address:port). Collectives give up after the timeout."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank),
        MASTER_ADDR=address, MASTER_PORT=str(port),
    )  # fmt: skip
    dev.set_current_device(dev.torch_device(options.device, local_rank))
    import deepspeed

    # On a CPU DeepSpeed would compile its shared-memory all-reduce with the first worker ever started. A worker that
    # is killed meanwhile leaves the build's lock behind, and every later one waits for it for ever. gloo serves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    if not dist.is_initialized():
        dist.init_process_group(
            dev.collective_backend(options.device),
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=options.collective_timeout),
        )
    deepspeed.init_distributed(
        dist_backend=dev.collective_backend(options.device),
        timeout=datetime.timedelta(seconds=options.collective_timeout),
        verbose=False,
    )


def deepspeed_config(options: EngineOptions, world_size: int, trainable: bool = True) -> dict[str, Any]:
    """DeepSpeed's configuration. Batch sizes are placeholders: this project counts its own micro-batches."""
    stage = options.zero_stage if trainable or options.zero_stage == 3 else 0
    zero: dict[str, Any] = {"stage": stage}
    if stage >= 2:
        zero["overlap_comm"] = options.overlap_comm
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        zero["zero_hpz_partition_size"] = options.zpg
    if trainable and options.adam_offload and options.device != "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage == 3 and options.param_offload and options.device != "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0 if _clips_itself(options) else options.optim.max_norm,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if trainable:
        config["managed_gradient_accumulation"] = False
        if options.grad_accum_dtype:
            config["data_types"] = {"grad_accum_dtype": options.grad_accum_dtype}
    if options.param_dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif options.param_dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    return config


def _clips_itself(options: EngineOptions) -> bool:
    """ZeRO 0 in fp32: DeepSpeed wraps nothing around the optimizer, and its own clipping tells no norm."""
    return options.zero_stage == 0 and options.param_dtype == "fp32"


class TrainEngine:
    """A model under DeepSpeed.

    Args:
        model: module whose forward is the training pass.
        options: see :class:`EngineOptions`.
        total_updates: the schedule's horizon.
        world_size: data-parallel workers.
        trainable: False builds no optimizer (a reference model).
        optimizer: used instead of the one that ``options`` describe; its rate still follows their schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        total_updates: int,
        world_size: int,
        trainable: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        import deepspeed

        self.options, self.world_size, self.trainable = options, world_size, trainable
        self.total_updates = max(1, total_updates)
        self.warmup = warmup_updates(self.total_updates, options.optim.lr_warmup_ratio)
        self.updates = 0
        check_schedule(options.optim.lr_scheduler, f"{options.optim_flag}lr_scheduler")
        kwargs: dict[str, Any] = {"optimizer": optimizer or build_optimizer(model, options)} if trainable else {}
        self._plain_norm: float | None = None
        self._clips_itself = trainable and _clips_itself(options)
        if self._clips_itself:
            kwargs["optimizer"].register_step_pre_hook(self._clip)
        self.engine, _, _, _ = deepspeed.initialize(
            model=model, config=deepspeed_config(options, world_size, trainable), dist_init_required=False, **kwargs
        )
        self.module: Any = self.engine.module

    @property
    def lr(self) -> float:
        """The rate that the next update uses."""
        opt = self.options.optim
        return opt.lr * lr_factor(opt.lr_scheduler, self.updates, self.total_updates, self.warmup, opt.min_lr_ratio)

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage as it runs."""
        return int(self.engine.zero_optimization_stage())

    def train(self) -> None:
        """Training mode (gradient checkpointing is only active in it)."""
        self.engine.train()

    def eval(self) -> None:
        """Inference mode."""
        self.engine.eval()

    def forward(self, **inputs: Any) -> Any:
        """The model's forward through DeepSpeed, so that its hooks run."""
        return self.engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient. ``loss`` is its share of the global batch's loss (already divided)."""
        self.engine.backward(loss * self.world_size, scale_wrt_gas=False)

    def step(self) -> float:
        """Apply the accumulated gradient; returns its norm before clipping (NaN if DeepSpeed skipped the step).

        Every rank calls it after equally many backward passes.
        """
        rate = self.lr
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        skipped = self.engine.skipped_steps
        self.engine.step()
        if self.engine.skipped_steps > skipped:  # fp16 overflow: the loss scale went down, the weights stay
            return float("nan")
        self.updates += 1
        norm = self._plain_norm if self._clips_itself else self.engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def _clip(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Runs between the reduction and the update where DeepSpeed leaves the optimizer bare (ZeRO 0 in fp32)."""
        limit = self.options.optim.max_norm or float("inf")
        params = [p for g in optimizer.param_groups for p in g["params"]]
        self._plain_norm = float(torch.nn.utils.clip_grad_norm_(params, limit))

    def full_parameters(self, params: list[nn.Parameter], modifier_rank: int | None = None) -> AbstractContextManager:
        """Context in which these parameters are whole on every rank (they always are below ZeRO-3)."""
        if self.zero_stage != 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(params, modifier_rank=modifier_rank)

    def state_dict(self) -> dict[str, Any]:
        """What DeepSpeed does not keep: how many updates were made."""
        return {"updates": self.updates, "total_updates": self.total_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back :meth:`state_dict`; the horizon is this run's own."""
        self.updates = int(state["updates"])


def shutdown_distributed() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum over all workers, in place and in the given dtype (float64 for statistics)."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
