"""vLLM's AsyncLLM: scheduler and workers in processes of their own. The engine for GPUs; runs on a CPU too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from openrlhf_like.rollout.engine.base import EngineDead, EngineStats, GenerationRequest, PauseMode, request_field
from openrlhf_like.rollout.engine.options import EngineOptions, prepare_environment
from openrlhf_like.rollout.engine.sampling import scoring_params, to_completion, to_prompt_logprobs, to_vllm
from openrlhf_like.types import Completion, SamplingSpec

logger = logging.getLogger(__name__)


class AsyncEngine:
    """See ``Engine``."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.version = 0
        self._llm: Any = None
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._paused = False
        self._finished = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    async def start(self) -> None:
        prepare_environment(self.options, in_process=False)
        from openrlhf_like import vllm_plugin

        vllm_plugin.ensure_discoverable()
        vllm_plugin.register()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        # In the loop's own thread: AsyncLLM ties its tasks to the loop that runs when it is built.
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.options.engine_kwargs()))

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec, request_id: str) -> Completion:
        version = self.version
        final = await self._final_output(token_ids, to_vllm(sampling), request_id)
        if final is None:
            return Completion([], [], "abort", version)
        return to_completion(final, sampling, version)

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion | BaseException]:
        results = await asyncio.gather(
            *(self.generate(r.token_ids, r.sampling, r.request_id) for r in requests), return_exceptions=True
        )
        for result in results:
            if isinstance(result, EngineDead):
                raise result
        return list(results)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        final = await self._final_output(token_ids, scoring_params(), f"score-{id(token_ids)}-{self._finished}")
        if final is None:
            raise EngineDead("the scoring request was aborted")
        return to_prompt_logprobs(final)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        chosen = [r for r in (sorted(self._running) if request_ids is None else request_ids) if r in self._running]
        self._aborted.update(chosen)
        await self._llm.abort(chosen)

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "abort":
            await self.abort()
            mode = "keep"
        await self._llm.pause_generation(mode=mode, clear_cache=False)
        self._paused = True

    async def resume(self) -> None:
        await self._llm.resume_generation()
        self._paused = False

    async def reset_prefix_cache(self, reset_running: bool = True) -> None:
        await self._llm.reset_prefix_cache(reset_running_requests=reset_running)
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()

    async def sleep(self, level: int = 1) -> None:
        await self._llm.sleep(level)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        await self._llm.wake_up(list(tags) if tags is not None else None)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._llm.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": request_field(request, "init_info")}
        )

    async def start_weight_update(self) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.collective_rpc("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._llm.collective_rpc("update_weights", kwargs={"update_info": request_field(request, "update_info")})

    async def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        await self._llm.collective_rpc("finish_weight_update")
        await self.reset_prefix_cache(reset_running=True)
        if weight_version is not None:
            await self.update_weight_version(weight_version)
        if not self._paused:
            await self._llm.resume_generation()

    async def update_weight_version(self, new_version: str | int) -> None:
        await self._llm.update_weight_version(str(new_version))
        self.version = int(new_version)

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        return await self._llm.collective_rpc(method, args=args)

    async def stats(self) -> EngineStats:
        return EngineStats(
            outstanding=len(self._running),
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            version=self.version,
            paused=self._paused,
        )

    async def shutdown(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    async def _final_output(self, token_ids: Sequence[int], params: Any, request_id: str) -> Any:
        """vLLM's finished output; None for a request that was aborted."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm is None:
            raise EngineDead("the engine is not running")
        if request_id in self._running:
            raise ValueError(f"request id {request_id!r} is in use")
        self._running.add(request_id)
        final = None
        try:
            ids = [int(t) for t in token_ids]
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, request_id):
                final = output
        except EngineDeadError as error:
            raise EngineDead(f"the engine is not running: {error}") from error
        finally:
            self._running.discard(request_id)
            self._finished += 1
            aborted = request_id in self._aborted
            self._aborted.discard(request_id)
        if aborted or final is None:
            return None
        self._prompt_tokens += len(ids)
        self._generated_tokens += len(final.outputs[0].token_ids)
        return final
