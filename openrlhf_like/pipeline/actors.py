"""The processes of a policy run, where classes of several folders meet."""

from __future__ import annotations

from typing import Any

import numpy as np

from openrlhf_like.cluster.transfer.sender import WeightSender
from openrlhf_like.rollout.engine.engine_actor import EngineActor
from openrlhf_like.training.policy_worker import PolicyWorker, ReferenceWorker


class ActorWorker(PolicyWorker):
    """The policy under training, with its half of the weight transfer."""

    def old_logprobs(self, micro_batches: list[list[int]]) -> int:
        """Compute log pi_old and keep it on the rows; the driver gets the number of tokens only."""
        return sum(len(values) for values in self.compute_logprobs(micro_batches, "old").values())

    def connect(self, engines: list[Any]) -> None:
        """Build this rank's sender to the engines (Ray handles)."""
        self.attach_sender(
            lambda gather, rank, world_size: WeightSender(engines, self.cfg, rank, world_size, gather)
        )


class RefWorker(ReferenceWorker):
    """The frozen reference."""

    def reference_logprobs(self, micro_batches: list[list[int]]) -> tuple[dict[int, np.ndarray], int]:
        """(row id -> float32 [actions], number of tokens): call with ``num_returns=2``, the first stays where it is."""
        values = self.compute_logprobs(micro_batches, "ref")
        return values, sum(len(v) for v in values.values())


class RolloutEngine(EngineActor):
    """An engine that is warm when it says that it is ready."""

    async def start(self) -> int:
        """Load the model and run one request: the first is many times slower than the rest."""
        index = await self.ready()
        await self.warmup()
        return index
