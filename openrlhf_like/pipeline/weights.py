"""Weights to the engines, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from openrlhf_like.cluster.group import WorkerGroup
from openrlhf_like.cluster.host import RemoteActor
from openrlhf_like.cluster.wait import wait_for
from openrlhf_like.observe import Timer
from openrlhf_like.pipeline.launch import limit
from openrlhf_like.types import TrainingAborted

#: Largest difference of a log-prob between engine and trainer that two right implementations of one model show.
PROBE_TOLERANCE = {"fp32": 2e-3, "bf16": 0.25, "fp16": 0.1}


class WeightSync:
    """Sends the actor's weights; with ``--vllm.check_weight_sync`` compares what the two sides then compute.

    The bytes themselves are compared by the sender (checksums a tensor); see cluster/transfer.
    """

    def __init__(
        self, cfg: Any, actor: WorkerGroup, engines: Sequence[RemoteActor], probe: Sequence[int], timer: Timer
    ) -> None:
        self.cfg, self.actor, self.engines, self.timer = cfg, actor, list(engines), timer
        # A token has a log-prob given those before it: a prompt of one token probes nothing.
        self.probe = list(probe) if len(probe) > 1 else list(probe) * 2

    def connect(self) -> None:
        """Give every worker the handles of the engines. The first ``send`` makes the connection."""
        handles = [engine.handle for engine in self.engines]
        self.actor.call("connect", handles, what="learn the engines", **limit(self.cfg, "init"))

    def send(self, version: int) -> None:
        """Send the weights as policy ``version``.

        Raises:
            TrainingAborted: the check found engine and trainer apart.
        """
        with self.timer("weight_sync"):
            self.actor.call("send_weights", version, what="send its weights", **limit(self.cfg, "weight_sync"))
            if self.cfg.vllm.check_weight_sync:
                self._compare_logprobs(version)

    def _compare_logprobs(self, version: int) -> None:
        own = self.actor.call(
            "probe_logprobs", self.probe, what="compute the probe's log-probs", **limit(self.cfg, "weight_sync")
        )[0]
        theirs = wait_for(
            [engine.submit("prompt_logprobs", self.probe) for engine in self.engines],
            "compute the probe's log-probs",
            names=[engine.label for engine in self.engines],
            **limit(self.cfg, "weight_sync"),
        )
        tolerance = PROBE_TOLERANCE[self.cfg.ds.param_dtype]
        for engine, values in zip(self.engines, theirs, strict=True):
            gap = float(np.abs(np.asarray(values)[-len(own) :] - np.asarray(own)).max())
            if not gap <= tolerance:
                raise TrainingAborted(
                    f"--vllm.check_weight_sync: after the transfer of version {version}, {engine.label} and the "
                    f"trainer differ by {gap:.3g} in the log-prob of a probe token (at most {tolerance:g} is rounding "
                    f"in {self.cfg.ds.param_dtype}): they do not hold the same model"
                )
