"""Placement plans of the common topologies, and refusals, without Ray."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest

from openrlhf_like.cluster.placement import check_supply, plan_placement
from openrlhf_like.types import UserError


def rl_config(device: str = "cuda", **changes) -> Namespace:
    """A configuration of the fields that placement reads, by dotted name with "__"."""
    values = {
        "device": device,
        "actor__num_nodes": 1,
        "actor__num_gpus_per_node": 2,
        "ref__num_nodes": 1,
        "ref__num_gpus_per_node": 2,
        "critic__num_nodes": 1,
        "critic__num_gpus_per_node": 2,
        "reward__num_nodes": 1,
        "reward__num_gpus_per_node": 2,
        "reward__num_workers": 1,
        "reward__remote_url": "reward.py",
        "reward__verifier": None,
        "reward__model_name_or_path": None,
        "vllm__num_engines": 2,
        "vllm__tensor_parallel_size": 1,
        "algo__kl__init_coef": 0.01,
        "algo__advantage__estimator": "group_norm",
        "train__colocate_all": False,
        "train__colocate_actor_ref": False,
        "train__colocate_critic_reward": False,
        "train__async_enable": False,
        "train__agent_func_path": None,
        **changes,
    }
    root = Namespace()
    for dotted, value in values.items():
        node, *rest = dotted.split("__")
        at = root
        for part in rest:
            if not hasattr(at, node):
                setattr(at, node, Namespace())
            at, node = getattr(at, node), part
        setattr(at, node, value)
    return root


def test_separate_roles_get_a_gpu_each():
    plan = plan_placement(rl_config())
    assert plan.total() == {"CPU": 6.25, "GPU": 6.0}
    assert {r.role for r in plan.roles} == {"actor", "ref", "engine", "reward"}
    assert all(plan.role(r).num_gpus == 1 for r in ("actor", "ref", "engine"))
    assert plan.role("reward").num_gpus == 0


def test_colocate_all_shares_each_gpu_between_all_roles():
    plan = plan_placement(rl_config(train__colocate_all=True))
    assert plan.total()["GPU"] == 2
    shared = [plan.role(r) for r in ("actor", "ref", "engine")]
    assert {r.group for r in shared} == {"all"}
    assert all(r.bundles == ((0,), (1,)) for r in shared)
    assert 0.9 < sum(r.num_gpus for r in shared) < 1, "all roles fit a GPU together, with a rest for the probe"


def test_colocate_all_with_asynchronous_rollout_leaves_engines_gpus_of_their_own():
    plan = plan_placement(rl_config(train__colocate_all=True, train__async_enable=True))
    assert plan.total()["GPU"] == 4
    assert plan.role("engine").group == "engine" and plan.role("engine").num_gpus == 1


def test_colocate_actor_ref_shares_two_roles_only():
    plan = plan_placement(rl_config(train__colocate_actor_ref=True))
    assert plan.total()["GPU"] == 4
    assert plan.role("actor").group == plan.role("ref").group != plan.role("engine").group


def test_critic_and_reward_model_share_when_asked():
    changes = {"reward__remote_url": None, "reward__model_name_or_path": "rm", "algo__advantage__estimator": "gae"}
    assert plan_placement(rl_config(**changes)).total()["GPU"] == 10
    plan = plan_placement(rl_config(train__colocate_critic_reward=True, **changes))
    assert plan.total()["GPU"] == 8
    assert plan.role("critic").group == plan.role("reward_model").group


def test_no_reference_worker_without_a_kl_coefficient():
    assert not plan_placement(rl_config(algo__kl__init_coef=0.0)).has("ref")


def test_a_tensor_parallel_engine_takes_one_bundle_apart_and_spans_bundles_when_colocated():
    plan = plan_placement(rl_config(vllm__num_engines=1, vllm__tensor_parallel_size=2))
    assert plan.role("engine").bundles == ((0,),) and plan.role("engine").num_gpus == 2
    plan = plan_placement(
        rl_config(
            actor__num_gpus_per_node=4,
            ref__num_gpus_per_node=4,
            vllm__num_engines=2,
            vllm__tensor_parallel_size=2,
            train__colocate_all=True,
        )
    )
    assert plan.role("engine").bundles == ((0, 1), (2, 3))
    assert plan.role("engine").num_gpus == 0, "it is told its devices; Ray's own choice is one bundle's GPU"


@pytest.mark.parametrize(
    "changes, flags",
    [
        ({"train__colocate_all": True, "vllm__num_engines": 1}, ["--train.colocate_all", "--vllm.num_engines 1"]),
        ({"train__colocate_all": True, "ref__num_gpus_per_node": 1}, ["--ref.num_gpus_per_node 1"]),
        ({"train__colocate_actor_ref": True, "ref__num_gpus_per_node": 1}, ["--train.colocate_actor_ref"]),
    ],
)
def test_colocated_roles_of_unequal_size_are_refused_with_their_flags(changes, flags):
    with pytest.raises(UserError) as error:
        plan_placement(rl_config(**changes))
    assert all(flag in str(error.value) for flag in flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("colocated", [False, True])
def test_a_default_run_on_a_laptop_of_one_core_fits(colocated):
    config = rl_config(
        "cpu",
        actor__num_gpus_per_node=1,
        ref__num_gpus_per_node=1,
        vllm__num_engines=1,
        train__colocate_all=colocated,
    )
    plan = plan_placement(config)
    assert plan.total() == {"CPU": 1.0, "GPU": 0.0}
    check_supply(plan, [{"CPU": 1.0}])


def test_one_engine_on_a_cpu_may_serve_two_colocated_actors():
    plan = plan_placement(rl_config("cpu", vllm__num_engines=1, train__colocate_all=True))
    assert plan.role("engine").bundles == ((0,),)
    bundles = next(g for g in plan.groups if g.name == "all").bundles
    assert [b["CPU"] for b in bundles] == [0.75, 0.5]


@pytest.mark.parametrize("workers", [1, 3, 4, 7])
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("colocated", [False, True])
def test_fault_31_every_cpu_plan_reserves_exactly_what_its_workers_take(workers, engines, colocated):
    config = rl_config(
        "cpu",
        actor__num_gpus_per_node=workers,
        ref__num_gpus_per_node=workers,
        vllm__num_engines=engines,
        train__colocate_all=colocated,
    )
    plan = plan_placement(config)
    for group in plan.groups:
        used = [0.0] * len(group.bundles)
        for role in (r for r in plan.roles if r.group == group.name):
            for (spot,) in role.bundles:
                used[spot] += role.num_cpus
        assert used == [b["CPU"] for b in group.bundles]


def test_fault_33_more_worker_processes_than_a_laptop_holds_are_refused_with_demand_and_supply(caplog):
    plan = plan_placement(rl_config("cpu", actor__num_gpus_per_node=64))
    with pytest.raises(UserError) as error:
        check_supply(plan, [{"CPU": 2.0, "GPU": 0.0}], "this machine")
    message = str(error.value)
    assert "\n" not in message
    assert "69 worker processes" in message and "64 actor" in message and "this machine holds 8" in message
    assert "lower --actor.num_gpus_per_node (now 64)" in message
    table = caplog.text
    assert "actor" in table and "demand: 17.25 CPU" in table and "supply: 2 CPU" in table


def test_fault_33_more_gpus_than_the_cluster_has_are_refused():
    plan = plan_placement(rl_config(vllm__num_engines=4, vllm__tensor_parallel_size=2))
    with pytest.raises(UserError, match=r"12 GPUs \(2 actor, 2 ref, 8 engine\), the cluster has 8; lower --vllm"):
        check_supply(plan, [{"CPU": 64, "GPU": 8}])
    check_supply(plan, [{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}])


def test_fault_33_an_engine_larger_than_any_node_is_refused_though_the_sum_fits():
    plan = plan_placement(rl_config(vllm__num_engines=1, vllm__tensor_parallel_size=8))
    with pytest.raises(UserError, match="lower --vllm.tensor_parallel_size"):
        check_supply(plan, [{"CPU": 64, "GPU": 4}] * 4)


def test_a_command_without_engines_places_its_workers_by_train_flags():
    config = Namespace(device="cpu", train=Namespace(num_nodes=2, num_gpus_per_node=3))
    plan = plan_placement(config)
    assert [r.role for r in plan.roles] == ["actor"] and len(plan.role("actor").bundles) == 6
