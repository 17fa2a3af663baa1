"""Real actors for the rollout tests: a trainer of one rank that holds a transformers model."""

from __future__ import annotations

from typing import Any

import openrlhf_like  # noqa: F401 - readies torchvision before transformers asks for it


class ModuleGather:
    """A module's weights in checkpoint form; tied weights once."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def names_and_shapes(self) -> list[tuple[str, Any, tuple[int, ...]]]:
        return [(n, p.dtype, tuple(p.shape)) for n, p in self.model.named_parameters()]

    def iter_full(self) -> Any:
        return ((n, p.detach()) for n, p in self.model.named_parameters())


def reference_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> list[float]:
    """log pi(t | before t) for t = 1 .. T-1, in float64 from the logits on."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double() / temperature
    table = torch.log_softmax(logits, -1)
    return [table[t - 1, ids[t]].item() for t in range(1, len(ids))]


class Trainer:
    """One rank; weights move by noise instead of by learning."""

    def __init__(self, cfg: Any, model_path: str, engines: list[Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from openrlhf_like.cluster.transfer.sender import WeightSender

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.sender = WeightSender(engines, cfg, rank=0, world_size=1, gather=ModuleGather(self.model))

    def perturb(self, seed: int, scale: float = 0.02) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * scale)

    def send(self, version: int) -> dict[str, float]:
        return self.sender.send(version)

    def send_corrupted(self, name: str, version: int) -> None:
        """Send with one value of one tensor changed after the source gave it out."""
        transfer = self.sender._transfer
        source = transfer.source

        class Corrupting:
            def metadata(self) -> Any:
                return source.metadata()

            def __iter__(self) -> Any:
                for key, tensor in source:
                    if key == name:
                        tensor = tensor.clone()
                        tensor.view(-1)[0] += 1
                    yield key, tensor

        transfer.source = Corrupting()
        try:
            self.sender.send(version)
        finally:
            transfer.source = source

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> list[float]:
        return reference_logprobs(self.model, ids, temperature)

    def shutdown(self) -> None:
        self.sender.shutdown()


class Deaf:
    """Stands where an engine should be and does not answer in time."""

    async def start_weight_update(self) -> None:
        import asyncio

        await asyncio.sleep(30)
