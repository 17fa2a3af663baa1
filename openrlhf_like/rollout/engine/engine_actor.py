"""The Ray actor around an engine: prompts in, trajectories out, weights updated in between.

A plain class with async methods; the caller wraps it with ``ray.remote`` and gives it enough concurrency that stats
and weight updates are answered while it generates.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from openrlhf_like.data.budget import prompt_budget
from openrlhf_like.rollout.engine import EngineOptions, GenerationRequest, build_engine
from openrlhf_like.rollout.single_turn import build_trajectory, failed_trajectory
from openrlhf_like.types import Completion, Prompt, SamplingSpec, Trajectory, TrajectorySummary

logger = logging.getLogger(__name__)


class EngineActor:
    """One engine, its tokenizer, and the building of trajectories from what it samples."""

    def __init__(self, cfg: Any, model_path: str, index: int = 0, env: dict[str, str] | None = None) -> None:
        """``env`` is set before anything heavy is imported; ``index`` names the engine."""
        os.environ.update(env or {})
        self.cfg = cfg
        self.index = index
        self.model_path = str(model_path)
        self.options = EngineOptions.from_config(cfg, model_path, index)
        self.engine = build_engine(self.options, cfg.vllm.backend)
        self._tokenizer: Any = None
        self._model_context: int | None = None
        self._calls = 0

    async def ready(self) -> int:
        """Start the engine; returns its index when it can generate."""
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(self.model_path)
        self._model_context = getattr(config.get_text_config(), "max_position_embeddings", None)
        if self._model_context is not None and self.options.max_model_len is not None:
            longest = min(self.options.max_model_len, self._model_context)
            self.options = self.engine.options = dataclasses.replace(self.options, max_model_len=longest)
        self._tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        await self.engine.start()
        return self.index

    async def warmup(self) -> None:
        """Run one short request: the first is many times slower than the rest."""
        await self.engine.generate([0, 1], SamplingSpec(max_tokens=2, seed=0), f"warmup-{self.index}")

    async def generate_block(
        self,
        prompts: list[Prompt],
        n: int,
        sampling: SamplingSpec,
        seeds: list[list[int]] | None = None,
        step: int = 0,
        phase: str = "train",
        group_ids: list[str] | None = None,
    ) -> tuple[list[Trajectory], list[TrajectorySummary]]:
        """Sample ``n`` answers to each prompt; call with ``num_returns=2``: the block stays in the object store.

        Args:
            prompts: whole groups: a group is never split over blocks.
            n: samples a prompt.
            sampling: ``max_tokens`` above 0 is the answer's length; 0 takes what the context leaves.
            seeds: ``seeds[i][j]`` of sample j of prompt i; None leaves the engine's own random stream.
            step, phase: name the trajectories.
            group_ids: one a prompt; by default the prompt's id.

        Returns:
            Trajectories (prompt-major) and their summaries. A request that failed is a trajectory with ``error`` set.
        """
        groups = group_ids or [p.prompt_id for p in prompts]
        self._calls += 1
        slots = [(i, j) for i in range(len(prompts)) for j in range(n)]
        specs = [self._spec(prompts[i], sampling, None if seeds is None else seeds[i][j]) for i, j in slots]
        requests = [
            GenerationRequest(f"{phase}-{step}-{self._calls}-{groups[i]}-{j}", prompts[i].token_ids, spec)
            for (i, j), spec in zip(slots, specs, strict=True)
            if spec is not None
        ]
        answers = iter(await self.engine.generate_many(requests))
        trajectories = [
            self._trajectory(prompts[i], None if spec is None else next(answers), spec, groups[i], j, step, phase)
            for (i, j), spec in zip(slots, specs, strict=True)
        ]
        return trajectories, [TrajectorySummary.of(t) for t in trajectories]

    async def generate(self, request: GenerationRequest) -> Completion:
        """One request as it stands; see ``Engine.generate``."""
        return await self.engine.generate(request.token_ids, request.sampling, request.request_id)

    # ---- weights: vLLM's protocol, passed on ----

    async def world_size(self) -> int:
        """Workers of this engine."""
        return self.options.tensor_parallel_size

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        await self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await self.engine.update_weights(request)

    async def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        await self.engine.finish_weight_update(weight_version)

    async def update_weight_version(self, new_version: str | int) -> None:
        await self.engine.update_weight_version(new_version)

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        return await self.engine.worker_call(method, *args)

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """See ``Engine.prompt_logprobs``."""
        return await self.engine.prompt_logprobs(token_ids)

    # ---- control ----

    async def pause(self, mode: str = "keep") -> None:
        await self.engine.pause(mode)  # type: ignore[arg-type]

    async def resume(self) -> None:
        await self.engine.resume()

    async def reset_prefix_cache(self) -> None:
        await self.engine.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        await self.engine.sleep(level)

    async def wake(self, tags: list[str] | None = None) -> None:
        await self.engine.wake(tags)

    async def stats(self) -> dict[str, int]:
        """``EngineStats`` as a dict: outstanding and finished samples, tokens, version."""
        return dataclasses.asdict(await self.engine.stats())

    async def abort_all(self) -> None:
        await self.engine.abort()

    async def shutdown(self) -> None:
        await self.engine.shutdown()

    # ---- inside ----

    def _spec(self, prompt: Prompt, sampling: SamplingSpec, seed: int | None) -> SamplingSpec | None:
        """The sampling of one request, its length by the same rule as the prompt filter's; None if there is no room."""
        context = self._model_context
        max_len = self.options.max_model_len or context or len(prompt.token_ids) + sampling.max_tokens
        budget = prompt_budget(len(prompt.token_ids), max_len, sampling.max_tokens or None, context)
        return None if budget <= 0 else sampling.with_(max_tokens=budget, seed=seed)

    def _trajectory(
        self,
        prompt: Prompt,
        answer: Completion | BaseException | None,
        spec: SamplingSpec | None,
        group_id: str,
        sample: int,
        step: int,
        phase: str,
    ) -> Trajectory:
        names = {"trajectory_id": f"{phase}-{step}-{group_id}-{sample}", "group_id": group_id}
        if answer is None or spec is None:
            return failed_trajectory(prompt, "the prompt leaves no room for an answer (--data.max_len)", **names)
        if isinstance(answer, BaseException):
            logger.warning("request %s failed: %s", names["trajectory_id"], answer)
            return failed_trajectory(prompt, f"{type(answer).__name__}: {answer}", **names)
        return build_trajectory(prompt, answer, spec, self._tokenizer, **names)
