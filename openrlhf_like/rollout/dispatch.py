"""The driver's side of a rollout: prompts to engines, references to trajectories back."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf_like.rollout.seeds import request_seed
from openrlhf_like.types import Prompt, SamplingSpec, TrajectorySummary, WaitTimeout

logger = logging.getLogger(__name__)

BLOCK_TRAJECTORIES = 64
_POLL_SECONDS = 0.5
# Enough to keep an engine's batch full; what is beyond waits here, for the engine that is done first.
_OUTSTANDING_PER_ENGINE = 512

BlockResult = tuple[Any, list[TrajectorySummary]]
"""An ObjectRef of ``list[Trajectory]`` and the summaries of those trajectories."""


@dataclass
class _Block:
    """Whole groups that travel together."""

    index: int
    prompts: list[Prompt]
    group_ids: list[str]
    seeds: list[list[int]] | None
    num_samples: int
    engine: int = -1
    ref: Any = None


class RolloutDispatcher:
    """Splits prompts into blocks of whole groups and gives each to the engine with the fewest outstanding samples."""

    def __init__(self, engine_handles: Sequence[Any], cfg: Any, on_poll: Callable[[], None] | None = None) -> None:
        """``engine_handles`` are Ray handles of ``EngineActor``, all of them ready.

        ``on_poll`` is called a few times a second while waiting; what it raises (an interrupt, say) ends the wait.
        """
        self.on_poll = on_poll
        self.engines = list(engine_handles)
        self.run_seed = int(cfg.train.seed)
        self.request_seeds = not cfg.rollout.no_request_seed
        self.timeout = float(cfg.timeout.generate)

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingSpec,
        step: int,
        phase: str = "train",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[BlockResult]:
        """Sample ``n`` answers to each prompt.

        Args:
            sampling: ``max_tokens`` 0 takes what the context leaves after each prompt.
            step, phase: name the trajectories and enter the seeds.
            on_progress: called with (samples done, samples in all), a few times a second.

        Returns:
            Blocks in the order of the prompts. The blocks belong to this process and outlive the engines.

        Raises:
            WaitTimeout: past ``--timeout.generate`` for the whole call.
            RuntimeError: an engine died or failed as a whole.
        """
        import ray

        blocks = self._blocks(prompts, n, step, phase)
        total = sum(b.num_samples for b in blocks)
        waiting = deque(blocks)
        running: dict[Any, _Block] = {}
        results: dict[int, BlockResult] = {}
        outstanding = [0] * len(self.engines)
        done, reported, began = 0, -1, time.monotonic()
        before = self._finished() if on_progress else []
        while waiting or running:
            self._submit(waiting, running, outstanding, n, sampling, step, phase)
            if self.on_poll is not None:
                self.on_poll()
            left = self.timeout - (time.monotonic() - began)
            if left <= 0:
                raise self._timed_out(running, done, total)
            finished, _ = ray.wait(list(running), num_returns=1, timeout=min(left, _POLL_SECONDS))
            for ref in finished:
                block = running.pop(ref)
                results[block.index] = (block.ref, self._get(ref, block))
                outstanding[block.engine] -= block.num_samples
                done += block.num_samples
            if on_progress:
                counted = done if finished else max(done, sum(self._finished()) - sum(before))
                if min(counted, total) > reported:
                    reported = min(counted, total)
                    on_progress(reported, total)
        return [results[i] for i in range(len(blocks))]

    def _blocks(self, prompts: Sequence[Prompt], n: int, step: int, phase: str) -> list[_Block]:
        """Groups never split; small batches still reach every engine."""
        share = -(-len(prompts) * n // len(self.engines)) if prompts else 1
        per_block = max(1, min(BLOCK_TRAJECTORIES, share) // n)
        seen: Counter[str] = Counter()
        out: list[_Block] = []
        for start in range(0, len(prompts), per_block):
            part = list(prompts[start : start + per_block])
            group_ids, seeds = [], []
            for prompt in part:
                # A prompt drawn twice in one batch is two groups, with seeds of their own.
                again = seen[prompt.prompt_id]
                seen[prompt.prompt_id] += 1
                group_ids.append(f"{prompt.prompt_id}#{again}" if again else prompt.prompt_id)
                seeds.append(
                    [request_seed(self.run_seed, step, prompt.prompt_id, again * n + j, phase=phase) for j in range(n)]
                )
            out.append(
                _Block(len(out), part, group_ids, seeds if self.request_seeds else None, num_samples=len(part) * n)
            )
        return out

    def _submit(
        self,
        waiting: deque[_Block],
        running: dict[Any, _Block],
        outstanding: list[int],
        n: int,
        sampling: SamplingSpec,
        step: int,
        phase: str,
    ) -> None:
        while waiting:
            engine = min(range(len(self.engines)), key=lambda e: outstanding[e])
            if outstanding[engine] and outstanding[engine] + waiting[0].num_samples > _OUTSTANDING_PER_ENGINE:
                return
            block = waiting.popleft()
            block.engine = engine
            block.ref, summaries = (
                self.engines[engine]
                .generate_block.options(num_returns=2)
                .remote(block.prompts, n, sampling, block.seeds, step, phase, block.group_ids)
            )
            outstanding[engine] += block.num_samples
            running[summaries] = block

    def _get(self, ref: Any, block: _Block) -> list[TrajectorySummary]:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"engine {block.engine} died while it generated: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(f"engine {block.engine} failed while it generated: {error}") from error

    def _finished(self) -> list[int]:
        """Samples each engine has finished since it started; an engine too busy to answer counts with none."""
        import ray

        refs = [e.stats.remote() for e in self.engines]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_SECONDS)
        try:
            return [s["finished"] for s in ray.get(ready)]
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"an engine died while it generated: {error}") from error

    def _timed_out(self, running: dict[Any, _Block], done: int, total: int) -> WaitTimeout:
        late = ", ".join(str(e) for e in sorted({b.engine for b in running.values()}))
        for engine in {b.engine for b in running.values()}:
            self.engines[engine].abort_all.remote()
        return WaitTimeout(
            f"generation: the driver waited {self.timeout:g} s for engine {late}, {done} of {total} samples done; "
            "--timeout.generate changes the limit"
        )
