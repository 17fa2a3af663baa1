"""The order in which samples are seen: a pure function of (seed, epoch), resumable at any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from openrlhf_like.types import UserError


def num_batches(n: int, batch_size: int, epochs: int = 1) -> int:
    """Batches in ``epochs`` passes over ``n`` samples: an epoch's incomplete last batch counts as one.

    The same rule as the sampler's, so that a schedule of this length ends with the last update: 1,000 samples in
    batches of 128 for 3 epochs are 24.
    """
    if n < 0 or batch_size < 1 or epochs < 0:
        raise ValueError(f"num_batches(n={n}, batch_size={batch_size}, epochs={epochs}): nothing may be negative")
    return epochs * math.ceil(n / batch_size)


class ResumableSampler:
    """Yields batches of indices, epoch after epoch.

    A batch never crosses an epoch; the last one of an epoch is kept though it may be smaller, so that every sample is
    seen once an epoch. The place is counted in samples, so that a run may be resumed with another batch size.

    Args:
        n: number of samples.
        batch_size: of the whole batch, over all workers.
        seed: of the permutations; each epoch has its own, drawn from (seed, epoch).
        shuffle: False gives 0, 1, 2, ...
        epochs: passes over the data; None goes on for ever.
        fingerprint: of the data, stored in the state and compared on resume; None compares the number only.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        seed: int = 42,
        shuffle: bool = True,
        epochs: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if n < 1:
            raise ValueError("a sampler needs at least one sample")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.n = n
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = epochs
        self.fingerprint = fingerprint
        self.epoch = 0
        self.position = 0  # samples of this epoch already handed out

    def __len__(self) -> int:
        """Batches still to come; TypeError when there is no end."""
        if self.epochs is None:
            raise TypeError("a sampler without epochs has no length")
        if self.epoch >= self.epochs:
            return 0
        rest = math.ceil((self.n - self.position) / self.batch_size)
        return rest + num_batches(self.n, self.batch_size, self.epochs - self.epoch - 1)

    def order(self, epoch: int) -> np.ndarray:
        """int64 [n]: the order of one epoch."""
        if not self.shuffle:
            return np.arange(self.n, dtype=np.int64)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        return rng.permutation(self.n)

    def __iter__(self) -> Iterator[list[int]]:
        """Batches from the present place on. The place moves when a batch is handed out."""
        while self.epochs is None or self.epoch < self.epochs:
            epoch, order = self.epoch, self.order(self.epoch)
            while self.epoch == epoch:
                batch = order[self.position : self.position + self.batch_size]
                self.position += len(batch)
                if self.position >= self.n:
                    self.epoch, self.position = epoch + 1, 0
                yield batch.tolist()

    def state_dict(self) -> dict[str, Any]:
        """The place: what has been handed out so far, and what data and order it refers to."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "n": self.n,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: the data, the seed or the shuffling changed since, so that "where" has no meaning.
        """
        if state["n"] != self.n:
            raise UserError(
                f"--ckpt.load_enable: the checkpoint was written on {state['n']} samples, the data now has {self.n}; "
                "give the same data, or start without --ckpt.load_enable"
            )
        if None not in (state["fingerprint"], self.fingerprint) and state["fingerprint"] != self.fingerprint:
            raise UserError(
                f"--ckpt.load_enable: the data changed since the checkpoint (fingerprint {state['fingerprint']} is now "
                f"{self.fingerprint}); give the same data, or start without --ckpt.load_enable"
            )
        for name, mine in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != mine:
                raise UserError(
                    f"--ckpt.load_enable: the checkpoint was written with {name} {state[name]}, now it is {mine}, "
                    "which is another sample order; use the same --train.seed"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
