"""Placement groups in Ray from a ``PlacementPlan``, and the slots they give the workers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf_like.cluster import nodes, signals
from openrlhf_like.cluster.host import Slot
from openrlhf_like.cluster.placement import PlacementPlan, RolePlan, supply_table
from openrlhf_like.cluster.wait import wait_for
from openrlhf_like.types import UserError, WaitTimeout

logger = logging.getLogger(__name__)

_PROBE_GPU = 0.005


class Placement:
    """The placement groups of one run, held until ``remove``.

    Args:
        plan: what to place.
        timeout: seconds Ray has for all of it (``--timeout.placement``).

    Raises:
        WaitTimeout: not placed in time (others use the cluster): demand and free resources are in the message.
    """

    def __init__(self, plan: PlacementPlan, timeout: float, flag: str = "timeout.placement") -> None:
        self.plan = plan
        self._timeout, self._flag = timeout, flag
        self._groups: dict[str, Any] = {}
        self._order: dict[str, list[int]] = {}
        try:
            for group in plan.groups:
                self._groups[group.name] = placement_group([dict(b) for b in group.bundles], strategy=group.strategy)
            self._wait()
        except BaseException:
            self.remove()
            raise
        for name, group in self._groups.items():
            self._order[name] = by_node(placement_group_table(group)["bundles_to_node_id"])

    def _wait(self) -> None:
        start = time.monotonic()
        for name, group in self._groups.items():
            while not group.wait(timeout_seconds=1):
                signals.raise_if_received()
                if time.monotonic() - start > self._timeout:
                    free = ray.available_resources()
                    logger.error("demand, and what is free now:\n%s", supply_table(self.plan, free))
                    raise WaitTimeout(
                        f"the driver waited {self._timeout:g} s for the cluster to place the workers of {name}, "
                        f"in vain: others use it ({free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU free); "
                        f"--{self._flag} changes the limit"
                    )

    def slots(self, role: str) -> list[Slot]:
        """One slot a worker of the role, in rank order: ranks of one node are neighbours."""
        plan = self.plan.role(role)
        return [self._slot(plan, spots) for spots in plan.bundles]

    def has(self, role: str) -> bool:
        """Whether the run has the role."""
        return self.plan.has(role)

    def _slot(self, plan: RolePlan, spots: tuple[int, ...]) -> Slot:
        order = self._order[plan.group]
        indices = [order[spot] for spot in spots]
        group = self._groups[plan.group]
        devices = self._devices(plan, indices) if len(indices) > 1 else ()
        return Slot(group, indices[0], plan.num_cpus, plan.num_gpus, devices)

    def _devices(self, plan: RolePlan, indices: Sequence[int]) -> tuple[str, ...]:
        """Physical GPUs of several bundles: asked by one tiny task in each, since Ray does not tell otherwise."""
        group = self._groups[plan.group]
        where = placement_group_table(group)["bundles_to_node_id"]
        if len({where[i] for i in indices}) > 1:
            raise UserError(
                f"--vllm.tensor_parallel_size {len(indices)} does not divide the GPUs of a node: an engine would span "
                "two nodes; give a size that divides --actor.num_gpus_per_node"
            )
        probe = ray.remote(nodes.gpu_ids)
        refs = [
            probe.options(
                num_cpus=0,
                num_gpus=_PROBE_GPU,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in indices
        ]
        found = wait_for(refs, f"tell the GPUs of {plan.role}", self._timeout, self._flag)
        return tuple(device for ids in found for device in ids)

    def remove(self) -> None:
        """Give everything back; workers in it are killed by Ray. Safe to call twice."""
        while self._groups:
            _, group = self._groups.popitem()
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                remove_placement_group(group)


def by_node(node_of: Mapping[int, str]) -> list[int]:
    """Bundle indices with those of one node together, nodes in the order of their first bundle."""
    first: dict[str, int] = {}
    for index in sorted(node_of):
        first.setdefault(node_of[index], index)
    return sorted(node_of, key=lambda i: (first[node_of[i]], i))
