"""Which rows meet in which optimizer step, on which worker, in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdatePlan:
    """One optimizer step.

    Attributes:
        micro_batches: ``micro_batches[rank][k]`` lists the row indices of that worker's k-th micro-batch. Every rank
            has equally many entries; a rank with less to do has empty ones (it still takes part in collectives).
        num_tokens: action tokens of the step over all workers, the N of a token mean.
        num_sequences: trajectories of the step over all workers.
    """

    micro_batches: list[list[list[int]]]
    num_tokens: int
    num_sequences: int
