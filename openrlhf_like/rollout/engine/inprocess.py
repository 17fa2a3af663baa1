"""vLLM's LLMEngine in this process, stepped by a thread of ours: the engine for a CPU.

The engine belongs to its thread. Everything else reaches it as a command that the thread runs between two steps:
adding requests, aborting, a weight update. The event loop of the caller stays free all the while.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from openrlhf_like.rollout.engine.base import EngineDead, EngineStats, GenerationRequest, PauseMode, request_field
from openrlhf_like.rollout.engine.options import EngineOptions, prepare_environment
from openrlhf_like.rollout.engine.sampling import scoring_params, to_completion, to_prompt_logprobs, to_vllm
from openrlhf_like.types import Completion, SamplingSpec

logger = logging.getLogger(__name__)

_STOP = object()


@dataclass
class _Pending:
    """A request under way: who waits for it, and which weights it began with."""

    future: Future[Any]
    finish: Callable[[Any], Any]
    num_prompt: int


class InProcessEngine:
    """See ``Engine``; one per process, as vLLM keeps global state."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.version = 0
        self._engine: Any = None
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: dict[str, _Pending] = {}
        self._internal_ids: dict[str, str] = {}
        self._paused = False
        self._updating = False
        self._dead: BaseException | None = None
        self._closing = threading.Lock()  # no command may slip in behind the last look at the queue
        self._finished = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._idle_waiters: list[Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    # ---- what callers see ----

    async def start(self) -> None:
        self._thread.start()
        await self._call(lambda: None)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingSpec, request_id: str) -> Completion:
        result = (await self.generate_many([GenerationRequest(request_id, token_ids, sampling)]))[0]
        if isinstance(result, BaseException):
            raise result
        return result

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Completion | BaseException]:
        futures: list[Future[Any]] = [Future() for _ in requests]

        # One command for all: what runs beside what does not depend on how fast the caller is.
        def add() -> None:
            for request, future in zip(requests, futures, strict=True):
                finish = functools.partial(to_completion, sampling=request.sampling, version=self.version)
                self._add(request.request_id, request.token_ids, to_vllm(request.sampling), future, finish)

        try:
            await self._call(add)
            results = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        except asyncio.CancelledError:
            self._post(lambda: self._abort([r.request_id for r in requests]))
            raise
        for result in results:
            if isinstance(result, EngineDead):
                raise result
        return list(results)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        future: Future[Any] = Future()
        name = f"score-{id(future)}"
        await self._call(lambda: self._add(name, token_ids, scoring_params(), future, to_prompt_logprobs))
        return await asyncio.wrap_future(future)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call(lambda: self._abort(request_ids))

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode == "wait":
            idle: Future[None] = Future()
            await self._call(lambda: self._idle_waiters.append(idle))
            await asyncio.wrap_future(idle)
        if mode == "abort":
            await self.abort()
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        await self._call(lambda: self._set_paused(False))

    async def reset_prefix_cache(self, reset_running: bool = True) -> None:
        await self._call(lambda: self._reset_cache(reset_running))

    async def sleep(self, level: int = 1) -> None:
        """A CPU has no memory to give back: generation pauses."""
        await self.pause("keep")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        await self.resume()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        init_info = request_field(request, "init_info")
        await self._call(lambda: self._rpc("init_weight_transfer_engine", init_info=init_info))

    async def start_weight_update(self) -> None:
        def start() -> None:
            self._updating = True
            self._rpc("start_weight_update")

        await self._call(start)

    async def update_weights(self, request: Any) -> None:
        update_info = request_field(request, "update_info")
        await self._call(lambda: self._rpc("update_weights", update_info=update_info))

    async def finish_weight_update(self, weight_version: str | int | None = None) -> None:
        def finish() -> None:
            self._rpc("finish_weight_update")
            self._reset_cache(reset_running=True)
            if weight_version is not None:
                self.version = int(weight_version)
            self._updating = False

        await self._call(finish)

    async def update_weight_version(self, new_version: str | int) -> None:
        def name() -> None:
            self.version = int(new_version)

        await self._call(name)

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        return await self._call(lambda: self._engine.collective_rpc(method, args=args))

    async def stats(self) -> EngineStats:
        return EngineStats(
            outstanding=len(self._pending),
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            version=self.version,
            paused=self._paused,
        )

    async def shutdown(self) -> None:
        if self._thread.ident is None:
            return
        self._commands.put(_STOP)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # ---- to the thread ----

    def _post(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._closing:
            if self._dead is None:
                self._commands.put((function, future))
                return future
        future.set_exception(EngineDead(f"the engine is not running: {self._dead!r}"))
        return future

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._post(function))

    # ---- in the thread ----

    def _run(self) -> None:
        error: BaseException = RuntimeError("it was shut down")
        try:
            self._engine = self._build()
            while self._run_commands():
                if self._may_step():
                    self._step()
        except BaseException as caught:  # noqa: BLE001 - whatever ends the thread must reach those who wait
            logger.exception("the engine thread ended")
            error = caught
        finally:
            self._end(error)

    def _build(self) -> Any:
        prepare_environment(self.options, in_process=True)
        from openrlhf_like import vllm_plugin

        vllm_plugin.ensure_discoverable()
        vllm_plugin.register()
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if self.options.num_threads > 0:
            # The number of OpenMP threads belongs to the thread that asks, which is this one.
            torch.set_num_threads(self.options.num_threads)
        return LLMEngine.from_engine_args(EngineArgs(**self.options.engine_kwargs()))

    def _may_step(self) -> bool:
        return bool(self._pending) and not self._paused and not self._updating

    def _run_commands(self) -> bool:
        """Run what is queued, waiting for something if there is nothing to step. False at shutdown."""
        while True:
            try:
                command = self._commands.get(block=not self._may_step())
            except queue.Empty:
                return True
            if command is _STOP:
                return False
            function, future = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - belongs to the caller
                future.set_exception(error)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._deliver(output)
        if not self._pending:
            for waiter in self._idle_waiters:
                waiter.set_result(None)
            self._idle_waiters.clear()

    def _deliver(self, output: Any) -> None:
        pending = self._pending.pop(output.request_id, None)
        self._internal_ids.pop(output.request_id, None)
        if pending is None:
            return
        self._finished += 1
        self._prompt_tokens += pending.num_prompt
        self._generated_tokens += len(output.outputs[0].token_ids)
        try:
            result = pending.finish(output)
        except Exception as error:  # noqa: BLE001 - belongs to the one who waits for this request
            _settle(pending.future, error=error)
        else:
            _settle(pending.future, result=result)

    def _add(
        self, name: str, token_ids: Sequence[int], params: Any, future: Future[Any], finish: Callable[[Any], Any]
    ) -> None:
        """Hand one request to vLLM; a refusal goes to the request's own future."""
        try:
            if name in self._pending:
                raise ValueError(f"request id {name!r} is in use")
            ids = [int(t) for t in token_ids]
            self._internal_ids[name] = self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        except Exception as error:  # noqa: BLE001 - belongs to the one who waits for this request
            self._finished += 1
            self._internal_ids.pop(name, None)
            future.set_exception(error)
            return
        self._pending[name] = _Pending(future, finish, len(ids))

    def _abort(self, names: Sequence[str] | None) -> None:
        chosen = [n for n in (list(self._pending) if names is None else names) if n in self._pending]
        self._engine.abort_request([self._internal_ids[n] for n in chosen], internal=True)
        for name in chosen:
            pending = self._pending.pop(name)
            self._internal_ids.pop(name, None)
            self._finished += 1
            _settle(pending.future, result=Completion([], [], "abort", self.version))

    def _reset_cache(self, reset_running: bool) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=reset_running)
        self._engine.reset_mm_cache()
        self._engine.reset_encoder_cache()

    def _rpc(self, method: str, **kwargs: Any) -> None:
        self._engine.collective_rpc(method, kwargs=kwargs)

    def _set_paused(self, value: bool) -> None:
        self._paused = value

    def _end(self, error: BaseException) -> None:
        with self._closing:
            self._dead = error
        dead = EngineDead(f"the engine is not running: {error!r}")
        waiting = [p.future for p in self._pending.values()] + list(self._idle_waiters)
        self._pending.clear()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not _STOP:
                waiting.append(command[1])
        for future in waiting:
            _settle(future, error=dead)
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Resolve a future whose waiter may have gone."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
