"""What every training worker does: join, load a model under DeepSpeed, save, export, leave.

Plain classes; the pipeline makes actors of them. One worker is one process with one model.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from openrlhf_like.data.templates import check_vocab, load_tokenizer
from openrlhf_like.models.loading import load_causal_lm
from openrlhf_like.models.policy import PolicyModel, check_logprob_path
from openrlhf_like.training import device as dev
from openrlhf_like.training.gather import WeightGather
from openrlhf_like.training.options import EngineOptions, engine_options

logger = logging.getLogger(__name__)


class TrainWorker:
    """One data-parallel worker.

    Args:
        cfg: the command's resolved configuration, or an :class:`EngineOptions`.
        rank, world_size: among the workers of this role.
        local_rank: which GPU of this process's visible ones; None reads LOCAL_RANK.
        role: "sft", "actor" or "ref".
    """

    role = "sft"

    def __init__(self, cfg: Any, rank: int, world_size: int, local_rank: int | None = None, role: str | None = None):
        self.cfg, self.rank, self.world_size = cfg, rank, world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
        self.role = role or type(self).role
        self.options = cfg if isinstance(cfg, EngineOptions) else engine_options(cfg, self.role)
        dev.prepare_process(self.options.device)
        self.device = dev.torch_device(self.options.device, self.local_rank)
        self.engine: Any = None
        self.tokenizer: Any = None

    # -- life ---------------------------------------------------------------------------------------------------

    def rendezvous_info(self) -> tuple[str, int]:
        """(address, port) at which this worker could be rank 0."""
        from openrlhf_like.training.strategy import free_address

        return free_address()

    def setup(self, master_addr: str, master_port: int) -> None:
        """Join the group of this role's workers; all of them call it at the same time."""
        from openrlhf_like.training.strategy import init_distributed

        dev.seed_everything(self.options.seed, self.options.full_determinism)
        init_distributed(self.options, self.rank, self.world_size, self.local_rank, master_addr, master_port)

    def load(self, model_path: str, total_steps: int, trainable: bool = True) -> dict[str, Any]:
        """Load a model and build its engine. ``total_steps`` is the schedule's horizon in optimizer updates.

        Returns:
            ``{"parameters": int, "vocab_size": int}``.
        """
        from openrlhf_like.training.strategy import TrainEngine, deepspeed_config

        options = self.options
        dtype = dev.param_dtype(options.param_dtype, options.device)
        flag = f"--{options.flag}.model_name_or_path"
        # Alive while the model loads, it makes transformers shard the weights as they are read.
        sharding = self._zero3_context(deepspeed_config(options, self.world_size, trainable))
        model: Any = load_causal_lm(
            model_path,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            gradient_checkpointing=options.gradient_checkpointing and trainable,
            gradient_checkpointing_reentrant=options.gradient_checkpointing_reentrant,
            disable_dropout=options.disable_dropout or not trainable,
            flag=flag,
        )
        del sharding
        self.tokenizer = load_tokenizer(
            model_path, use_fast=not options.slow_tokenizer, chat_template=options.chat_template, flag=flag
        )
        vocab_size = int(model.config.get_text_config().vocab_size)
        check_vocab(vocab_size, self.tokenizer, model_path, flag)
        policy = PolicyModel(model)
        if not trainable:
            policy.requires_grad_(False)
        optimizer = self.make_optimizer(policy) if trainable else None
        self.engine = TrainEngine(policy, options, total_steps, self.world_size, trainable, optimizer)
        check_logprob_path(self.engine.module, self.device)
        # Workers draw different dropout, and the same everything else.
        dev.seed_everything(options.seed + self.rank, options.full_determinism)
        total = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
        return {"parameters": int(total), "vocab_size": vocab_size}

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of this worker's model."""
        from openrlhf_like.training.optim import build_optimizer

        return build_optimizer(model, self.options)

    def _zero3_context(self, ds_config: dict[str, Any]) -> Any:
        if ds_config["zero_optimization"]["stage"] != 3:
            return None
        from transformers.integrations import HfDeepSpeedConfig

        return HfDeepSpeedConfig(ds_config)

    def shutdown(self) -> None:
        """Drop the model and leave the group."""
        from openrlhf_like.training.strategy import shutdown_distributed

        self.engine = None
        dev.empty_cache(self.device)
        shutdown_distributed()

    # -- state --------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """State of this worker beyond engine and RNGs."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Put back :meth:`extra_state`."""

    def save_checkpoint(self, folder: str) -> bool:
        """Write this worker's part into ``folder`` (a staging folder that the caller commits). All ranks take part.

        False, and nothing written, with ``--ckpt.disable_ds``.
        """
        from openrlhf_like.training.checkpoint import save_worker_state

        if self.options.disable_ds_ckpt:
            return False
        save_worker_state(Path(folder), self.rank, self.engine, self.extra_state())
        return True

    def load_checkpoint(self, folder: str) -> None:
        """Continue from a complete checkpoint folder. All ranks take part."""
        from openrlhf_like.training.checkpoint import load_worker_state

        self.load_extra_state(load_worker_state(Path(folder), self.rank, self.engine))

    def export_hf(self, output_dir: str) -> None:
        """Write the model in Hugging Face form. All ranks take part."""
        from openrlhf_like.training.checkpoint import export_hf

        export_hf(self.engine, output_dir, self.tokenizer, self.rank)

    # -- weights ------------------------------------------------------------------------------------------------

    def gather(self) -> WeightGather:
        """Full weights by name, for export and transfer."""
        return WeightGather(self.engine)

    def weights_checksum(self) -> str:
        """SHA-256 over names and bytes of every full weight; all ranks take part."""
        import hashlib

        digest = hashlib.sha256()
        for name, tensor in self.gather().iter_full():
            digest.update(name.encode())
            digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
