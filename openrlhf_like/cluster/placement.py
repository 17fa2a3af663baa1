"""From the configuration to placement groups, as a pure function, and the check that the cluster can hold them.

A *role* (actor, ref, engine, ...) needs workers; a *group* is one Ray placement group, a list of bundles; colocated
roles share a group's bundles.

- On GPUs a bundle holds one GPU and one CPU (an engine's own bundle: its tensor-parallel GPUs). k roles that share a
  bundle each ask Ray for about 1/k of it, so that Ray lets them in together; Ray does not divide memory. Who is on the
  GPU when is decided by sleep and wake, not here.
- On a CPU a worker process takes a quarter of a logical CPU: at most four worker processes a core, which is the supply
  rule of a laptop and of a cluster alike. Roles take turns, so this does not mean four busy processes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf_like.config.tree import get_or
from openrlhf_like.types import UserError

logger = logging.getLogger(__name__)

CPU_PER_WORKER = 0.25


@dataclass(frozen=True)
class Demand:
    """What one role needs.

    Attributes:
        role: "actor", "critic", "ref", "reward_model", "engine" or "reward" (user functions and verifiers, no GPU).
        num_workers: its processes.
        flags: the flags that say so, for messages.
        gpus_each: GPUs of one worker on a GPU run; an engine's tensor-parallel size, 0 for "reward".
    """

    role: str
    num_workers: int
    flags: str
    gpus_each: int = 1

    @property
    def processes(self) -> int:
        """Worker processes: a tensor-parallel engine has one a GPU, or on a CPU one a shard."""
        return self.num_workers * max(1, self.gpus_each)


@dataclass(frozen=True)
class GroupPlan:
    """One placement group: ``bundles[i]`` is a Ray resource mapping."""

    name: str
    bundles: tuple[Mapping[str, float], ...]
    strategy: str = "PACK"


@dataclass(frozen=True)
class RolePlan:
    """Where a role's workers go: worker i lies in ``bundles[i]`` of group ``group`` (several: it spans them)."""

    role: str
    group: str
    bundles: tuple[tuple[int, ...], ...]
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class PlacementPlan:
    """All groups and roles of a run on ``device``."""

    device: str
    groups: tuple[GroupPlan, ...]
    roles: tuple[RolePlan, ...]
    demands: tuple[Demand, ...]

    def role(self, name: str) -> RolePlan:
        """The role's plan; KeyError when the run has no such role."""
        for role in self.roles:
            if role.role == name:
                return role
        raise KeyError(f"no role {name!r} in this run; it has {[r.role for r in self.roles]}")

    def has(self, name: str) -> bool:
        """Whether the run has the role."""
        return any(role.role == name for role in self.roles)

    def total(self) -> dict[str, float]:
        """Resources of all groups together."""
        out: dict[str, float] = {"CPU": 0.0, "GPU": 0.0}
        for group in self.groups:
            for bundle in group.bundles:
                for name, amount in bundle.items():
                    out[name] = out.get(name, 0.0) + amount
        return {name: round(amount, 4) for name, amount in out.items()}


def plan_placement(cfg: Any) -> PlacementPlan:
    """The plan of a resolved configuration (``cfg.device`` is "cpu" or "cuda").

    Raises:
        UserError: colocated roles differ in size, naming the flags.
    """
    device = "cpu" if get_or(cfg, "device", "cpu") == "cpu" else "cuda"
    demands = {demand.role: demand for demand in demands_of(cfg)}
    shared = _shared_groups(cfg, demands, device)
    groups: list[GroupPlan] = []
    roles: list[RolePlan] = []
    placed: set[str] = set()
    for name, members in shared:
        group, plans = _shared(name, [demands[m] for m in members], device)
        groups.append(group)
        roles += plans
        placed.update(members)
    for role, demand in demands.items():
        if role not in placed:
            group, plan = _own(demand, device)
            groups.append(group)
            roles.append(plan)
    return PlacementPlan(device, tuple(groups), tuple(roles), tuple(demands.values()))


def demands_of(cfg: Any) -> list[Demand]:
    """The roles a configuration calls for. Without engines: ``--train.num_gpus_per_node`` workers."""
    if get_or(cfg, "vllm", None) is None:
        return [_workers(cfg, "actor", "train")]
    out = [_workers(cfg, "actor", "actor")]
    if get_or(cfg, "algo.advantage.estimator", "") == "gae":
        out.append(_workers(cfg, "critic", "critic"))
    if get_or(cfg, "algo.kl.init_coef", 0.0) > 0:
        out.append(_workers(cfg, "ref", "ref"))
    by_function = any(get_or(cfg, name, None) for name in ("reward.remote_url", "reward.verifier"))
    agent = bool(get_or(cfg, "train.agent_func_path", None))
    if not by_function and not agent and get_or(cfg, "reward.model_name_or_path", None):
        out.append(_workers(cfg, "reward_model", "reward"))
    engines = get_or(cfg, "vllm.num_engines", 1) or 1
    tensor_parallel = get_or(cfg, "vllm.tensor_parallel_size", 1)
    out.append(
        Demand("engine", engines, f"--vllm.num_engines {engines} --vllm.tensor_parallel_size {tensor_parallel}",
               tensor_parallel)
    )  # fmt: skip
    if by_function:
        workers = get_or(cfg, "reward.num_workers", 1)
        out.append(Demand("reward", workers, f"--reward.num_workers {workers}", 0))
    return out


def check_supply(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]], where: str = "the cluster") -> None:
    """Refuse what can never be placed.

    Args:
        nodes: total resources of each node ("CPU", "GPU").
        where: what is short, for the message.

    Raises:
        UserError: a table of demand and supply, and the flags to lower.
    """
    demand = plan.total()
    supply = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    short = [name for name, amount in demand.items() if amount > supply.get(name, 0.0) + 1e-6]
    if short:
        logger.error("demand and supply:\n%s", supply_table(plan, supply))
        raise UserError(_refusal(plan, supply, where, short[-1]))
    for group in plan.groups:
        for bundle in group.bundles:
            if not any(all(node.get(k, 0.0) + 1e-6 >= v for k, v in bundle.items()) for node in nodes):
                raise UserError(
                    f"{where} has no node that holds one worker of {group.name} "
                    f"({_amounts(bundle)}; the largest node has {_amounts(max(nodes, key=_size))}); "
                    "lower --vllm.tensor_parallel_size"
                )


def _refusal(plan: PlacementPlan, supply: Mapping[str, float], where: str, resource: str) -> str:
    counted = [d for d in plan.demands if resource != "GPU" or d.gpus_each > 0]
    by_role = ", ".join(f"{d.processes} {d.role}" for d in counted)
    flag = max(plan.demands, key=lambda d: d.processes).flags.split()
    fix = f"lower {flag[0]} (now {flag[1]})"
    if plan.device == "cpu":
        have = int(supply.get("CPU", 0.0) / CPU_PER_WORKER)
        asked = sum(d.processes for d in plan.demands)
        return f"this run asks for {asked} worker processes ({by_role}), {where} holds {have}, four a core; {fix}"
    asked_, have_ = plan.total()[resource], supply.get(resource, 0.0)
    colocate = ", or share GPUs with --train.colocate_all" if len(plan.groups) > 1 else ""
    return f"this run asks for {asked_:g} {resource}s ({by_role}), {where} has {have_:g}; {fix}{colocate}"


def supply_table(plan: PlacementPlan, supply: Mapping[str, float]) -> str:
    """Demand by role and the supply, as a small text table."""
    rows = [("role", "workers", "GPUs each", "flags")]
    for d in plan.demands:
        rows.append((d.role, str(d.num_workers), str(d.gpus_each if plan.device != "cpu" else 0), d.flags))
    total = plan.total()
    width = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  " + "  ".join([*(row[i].ljust(width[i]) for i in range(3)), row[3]]) for row in rows]
    lines.append(f"  demand: {_amounts(total)}   supply: {_amounts(supply)}")
    return "\n".join(lines)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))


def _size(node: Mapping[str, float]) -> tuple[float, float]:
    return node.get("GPU", 0.0), node.get("CPU", 0.0)


def _workers(cfg: Any, role: str, section: str) -> Demand:
    nodes = get_or(cfg, f"{section}.num_nodes", 1) or 1
    each = get_or(cfg, f"{section}.num_gpus_per_node", 1) or 1
    return Demand(role, nodes * each, f"--{section}.num_gpus_per_node {each} --{section}.num_nodes {nodes}")


def _shared_groups(cfg: Any, demands: Mapping[str, Demand], device: str) -> list[tuple[str, list[str]]]:
    """Groups that several roles share, by the colocation flags: (name, roles)."""
    if get_or(cfg, "train.colocate_all", False):
        members = [r for r in ("actor", "critic", "ref", "reward_model", "engine") if r in demands]
        if get_or(cfg, "train.async_enable", False):
            members.remove("engine")  # generation overlaps training: engines keep GPUs of their own
        _check_equal(demands, members, "--train.colocate_all", device)
        return [("all", members)] if len(members) > 1 else []
    out = []
    pairs = (("train.colocate_actor_ref", "actor", "ref"), ("train.colocate_critic_reward", "critic", "reward_model"))
    for flag, first, second in pairs:
        if get_or(cfg, flag, False) and first in demands and second in demands:
            _check_equal(demands, [first, second], f"--{flag}", device)
            out.append((f"{first}_{second}", [first, second]))
    return out


def _check_equal(demands: Mapping[str, Demand], members: Sequence[str], flag: str, device: str) -> None:
    first = demands[members[0]]
    for member in members[1:]:
        other = demands[member]
        if member == "engine" and device == "cpu":
            continue  # an engine is one process there, and spreads over the bundles it is given
        if other.num_workers * other.gpus_each != first.num_workers * first.gpus_each:
            raise UserError(
                f"{flag} puts {first.role} and {member} on the same devices, so they must need equally many: "
                f"{first.flags} against {other.flags}; make them equal"
            )


def _shared(name: str, members: Sequence[Demand], device: str) -> tuple[GroupPlan, list[RolePlan]]:
    size = members[0].num_workers
    if device == "cpu":
        group_bundles: list[dict[str, float]] = [{"CPU": 0.0} for _ in range(size)]
        plans = []
        for demand in members:
            cpus = CPU_PER_WORKER * max(1, demand.gpus_each)
            spots = [i * size // demand.num_workers % size for i in range(demand.num_workers)]
            for spot in spots:
                group_bundles[spot]["CPU"] += cpus
            plans.append(RolePlan(demand.role, name, tuple((spot,) for spot in spots), cpus, 0.0))
        return GroupPlan(name, tuple(group_bundles)), plans
    share = math.floor(99 / len(members)) / 100  # a rest stays for the probe that asks which GPU a bundle is
    plans = []
    for demand in members:
        span = demand.gpus_each
        spans = tuple(tuple(range(i * span, (i + 1) * span)) for i in range(demand.num_workers))
        # A Ray actor lives in one bundle: a worker that spans several is told its devices and asks for none.
        plans.append(RolePlan(demand.role, name, spans, share, share if span == 1 else 0.0))
    return GroupPlan(name, tuple({"GPU": 1.0, "CPU": 1.0} for _ in range(size))), plans


def _own(demand: Demand, device: str) -> tuple[GroupPlan, RolePlan]:
    gpus = 0.0 if device == "cpu" else float(demand.gpus_each)
    bundle = {"GPU": gpus, "CPU": 1.0} if gpus else {"CPU": CPU_PER_WORKER * max(1, demand.gpus_each)}
    bundles = tuple(dict(bundle) for _ in range(demand.num_workers))
    spots = tuple((i,) for i in range(demand.num_workers))
    return GroupPlan(demand.role, bundles), RolePlan(demand.role, demand.role, spots, bundle["CPU"], gpus)
