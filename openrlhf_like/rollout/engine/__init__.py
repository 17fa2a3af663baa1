"""Inference engines. Importing this package imports no vLLM; starting an engine does."""

from openrlhf_like.rollout.engine.base import Engine, EngineDead, EngineStats, GenerationRequest
from openrlhf_like.rollout.engine.options import EngineOptions

__all__ = ["Engine", "EngineDead", "EngineOptions", "EngineStats", "GenerationRequest", "build_engine"]


def build_engine(options: EngineOptions, backend: str = "auto") -> Engine:
    """The engine for ``--vllm.backend``: "auto" steps LLMEngine in this process on a CPU, runs AsyncLLM on GPUs."""
    if backend == "auto":
        backend = "inprocess" if options.device == "cpu" else "async"
    if backend == "inprocess":
        from openrlhf_like.rollout.engine.inprocess import InProcessEngine

        return InProcessEngine(options)
    if backend == "async":
        from openrlhf_like.rollout.engine.async_engine import AsyncEngine

        return AsyncEngine(options)
    raise ValueError(f"--vllm.backend {backend}: unknown; give auto, inprocess or async")
