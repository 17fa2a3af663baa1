"""KL estimators against exact, enumerated gradients; controllers against their formula."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf_like.algorithms import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    PolicyLossInputs,
    PolicyLossSettings,
    check_kl_mode,
    kl_per_token,
    make_kl_controller,
    ppo,
    token_advantages,
)
from openrlhf_like.algorithms.stats import LOG_RATIO_LIMIT


@pytest.fixture
def categorical():
    """Logits of pi with a graph, and log pi_ref, over 5 symbols."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, generator=g).double().requires_grad_(), torch.randn(5, generator=g).double().log_softmax(0)


def exact(theta, ref, direction):
    logp = theta.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum() if direction == "reverse" else (ref.exp() * (ref - logp)).sum()
    return torch.autograd.grad(kl, theta)[0]


def in_loss(name, theta, ref):
    """sum_x p(x) grad kl(x): the expectation of the gradient, with x drawn from pi and not differentiated."""
    logp = theta.log_softmax(0)
    each = kl_per_token(name, logp, ref, torch.ones(5))
    return torch.autograd.grad((logp.exp().detach() * each).sum(), theta)[0]


def in_reward(name, theta, ref):
    """sum_x p(x) grad ppo(x), with the advantage -kl(x): the term as the reward sees it."""
    logp = theta.log_softmax(0)
    mask = torch.ones(5, 1)
    kl = kl_per_token(name, logp.unsqueeze(1), ref.unsqueeze(1), mask)
    adv = token_advantages(torch.zeros(5), kl, mask, kl_coef=1.0)
    inputs = PolicyLossInputs(logp.unsqueeze(1), adv, mask, old_logprobs=logp.detach().unsqueeze(1))
    loss = ppo(inputs, PolicyLossSettings()).per_token[:, 0]
    return torch.autograd.grad((logp.exp().detach() * loss).sum(), theta)[0]


def test_fault_16_k1_in_the_reward_and_k2_in_the_loss_give_the_reverse_kl_gradient(categorical):
    want = exact(*categorical, "reverse")
    assert want.abs().max() > 0.05
    torch.testing.assert_close(in_reward("k1", *categorical), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(in_loss("k2", *categorical), want, rtol=1e-12, atol=1e-12)


def test_fault_16_k3_in_the_loss_gives_the_forward_kl_gradient(categorical):
    want = exact(*categorical, "forward")
    torch.testing.assert_close(in_loss("k3", *categorical), want, rtol=1e-12, atol=1e-12)
    assert (want - exact(*categorical, "reverse")).abs().max() > 0.01


def test_fault_16_k1_in_the_loss_gives_zero_and_is_refused(categorical):
    assert in_loss("k1", *categorical).abs().max() < 1e-15
    with pytest.raises(ValueError, match="--algo.kl.use_loss"):
        check_kl_mode("k1", use_loss=True)
    for name, use_loss in [("k1", False), ("k2", True), ("k3", True), ("k2", False)]:
        check_kl_mode(name, use_loss)


def test_fault_16_k2_and_k3_in_the_reward_are_biased(categorical):
    reverse, forward = exact(*categorical, "reverse"), exact(*categorical, "forward")
    assert (in_reward("k2", *categorical) - reverse).abs().max() > 0.01
    # k3 = k1 + (1/r - 1), so that in the reward the forward KL's gradient is taken off the reverse KL's.
    torch.testing.assert_close(in_reward("k3", *categorical), reverse - forward, rtol=1e-12, atol=1e-12)


def test_fault_16_values(categorical):
    theta, ref = categorical
    logp = theta.detach().log_softmax(0)
    p, kl = logp.exp(), (logp.exp() * (logp - ref)).sum()
    values = {n: (p * kl_per_token(n, logp, ref, torch.ones(5))).sum() for n in KL_ESTIMATORS.names()}
    torch.testing.assert_close(values["k1"], kl)
    torch.testing.assert_close(values["k3"], kl)
    assert abs(float(values["k2"] - kl)) > 1e-3


def test_k1_in_the_reward_is_the_sequence_level_gradient_too():
    """Two steps: the suffix sums carry the effect of an early token on the KL of later ones."""
    g = torch.Generator().manual_seed(1)
    first, second = (torch.randn(*s, generator=g).double().requires_grad_() for s in ((3,), (3, 3)))
    r1, r2 = torch.randn(3, generator=g).double().log_softmax(0), torch.randn(3, 3, generator=g).double().log_softmax(1)
    l1, l2 = first.log_softmax(0), second.log_softmax(1)
    joint = l1.unsqueeze(1) + l2
    want = torch.autograd.grad((joint.exp() * (joint - r1.unsqueeze(1) - r2)).sum(), (first, second), retain_graph=True)
    logprobs = torch.stack([l1.unsqueeze(1).expand(3, 3), l2], -1).reshape(9, 2)
    ref = torch.stack([r1.unsqueeze(1).expand(3, 3), r2], -1).reshape(9, 2)
    mask = torch.ones(9, 2)
    adv = token_advantages(torch.zeros(9), kl_per_token("k1", logprobs, ref, mask), mask, kl_coef=1.0)
    loss = ppo(PolicyLossInputs(logprobs, adv, mask), PolicyLossSettings()).per_token.sum(1)
    got = torch.autograd.grad((joint.exp().detach().reshape(9) * loss).sum(), (first, second))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_k3_is_its_formula_in_fp32_from_small_differences_to_the_limit():
    d = torch.tensor([1e-4, -1e-4, 1e-3, 0.0, 0.5, -3.0, -6.0, -15.0, -19.5, 8.0]).requires_grad_()
    got = KL_ESTIMATORS.get("k3")(d)
    want = torch.expm1(-d.detach().double()) + d.detach().double()
    torch.testing.assert_close(got.detach().double(), want, rtol=2e-3, atol=0)
    (grad,) = torch.autograd.grad(got.sum(), d)
    torch.testing.assert_close(grad.double(), -torch.expm1(-d.detach().double()), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [200.0, -200.0, 1e4, -1e4])
def test_a_huge_gap_is_finite_and_pulls_back_to_the_reference(name, gap):
    logprobs = torch.tensor([[gap]], requires_grad=True)
    kl = kl_per_token(name, logprobs, torch.zeros(1, 1), torch.ones(1, 1))
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    assert torch.isfinite(kl).all() and torch.isfinite(grad).all()
    if name != "k1":
        assert math.copysign(1, float(grad)) == math.copysign(1, gap)


def test_k3_is_smooth_where_its_tangent_begins():
    d = torch.tensor([-LOG_RATIO_LIMIT - 1e-6, -LOG_RATIO_LIMIT + 1e-6]).double().requires_grad_()
    (grad,) = torch.autograd.grad(KL_ESTIMATORS.get("k3")(d).sum(), d)
    assert float(grad[0]) == pytest.approx(float(grad[1]), rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_masked_tokens_reach_neither_value_nor_gradient(name):
    logprobs = torch.tensor([[-1.0, math.nan, -math.inf, -2.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, 0.0, -math.inf, math.nan]])
    kl = kl_per_token(name, logprobs, ref, torch.tensor([[1, 0, 0, 0]]))
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl[0, 1:].tolist() == [0, 0, 0] and grad[0, 1:].tolist() == [0, 0, 0]
    assert math.isfinite(float(kl[0, 0].detach()))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradients_against_finite_differences(name):
    d = torch.linspace(-3, 3, 7).double().requires_grad_()
    assert torch.autograd.gradcheck(KL_ESTIMATORS.get(name), (d,))


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(ValueError, match="known: k1, k2, k3"):
        kl_per_token("k4", torch.zeros(1), torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize(
    ("kl", "n", "want"),
    [
        (6.0, 1000, 1 + 0.0 * 0.1),
        (6.6, 1000, 1 + 0.1 * 0.1),
        (60.0, 1000, 1 + 0.2 * 0.1),
        (0.0, 1000, 1 - 0.2 * 0.1),
        (-5.0, 10_000, 1 - 0.2),
        (60.0, 1_000_000, 1 + 0.2),
    ],
)
def test_adaptive_controller_follows_its_formula(kl, n, want):
    controller = make_kl_controller(0.5, target=6.0, horizon=10_000)
    assert isinstance(controller, AdaptiveKLController)
    assert controller.update(kl, n) == pytest.approx(0.5 * want) == controller.value


def test_controller_state_survives_a_resume():
    one = AdaptiveKLController(0.1, 1.0, 100)
    for kl in (3.0, 0.2, 1.5):
        one.update(kl, 40)
    two = AdaptiveKLController(0.1, 1.0, 100)
    two.load_state_dict(one.state_dict())
    assert two.update(2.0, 40) == one.update(2.0, 40) != 0.1
    fixed = make_kl_controller(0.1, None, 100)
    assert isinstance(fixed, FixedKLController) and fixed.update(1e9, 10) == 0.1
    fixed.load_state_dict(fixed.state_dict())
    with pytest.raises(ValueError, match="--algo.kl.target"):
        fixed.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("args", "flag"),
    [((-0.1, None, 10), "init_coef"), ((math.nan, None, 10), "init_coef"), ((0.1, 0.0, 10), "target"),
     ((0.1, 1.0, 0), "horizon"), ((0.1, 1.0, -5), "horizon")],
)  # fmt: skip
def test_controllers_refuse_impossible_settings(args, flag):
    with pytest.raises(ValueError, match=f"--algo.kl.{flag}"):
        make_kl_controller(*args)


def test_a_kl_that_is_not_finite_never_moves_beta():
    controller = AdaptiveKLController(0.1, 1.0, 100)
    with pytest.raises(ValueError, match="nan"):
        controller.update(math.nan, 10)
    assert controller.value == 0.1
