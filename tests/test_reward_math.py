"""The math verifier: right answers, killed on endless ones, usable off the main thread."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from openrlhf_like.reward import math_verifier
from openrlhf_like.reward.base import RewardRequest
from openrlhf_like.reward.math_verifier import MathReward
from openrlhf_like.types import UserError

pytest.importorskip("math_verify")

CASES = [
    ("so the answer is \\boxed{57}", "57", 1.0),
    ("so the answer is \\boxed{58}", "57", 0.0),
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("we get $\\frac{2}{4}$", "\\frac{1}{2}", 1.0),
    ("we get $\\frac{2}{4}$", "$\\frac{1}{2}$", 1.0),
    ("12 apples and 30 pears make 42", "42", 1.0),
    ("12 apples and 30 pears make 42", "12", 0.0),
    ("42 is wrong, it is \\boxed{41}", "42", 0.0),
    ("<think>\\boxed{7}</think> It is \\boxed{8}", "8", 1.0),
    ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    ("the total is 1,000", "First 10 * 100 = 1000.\n#### 1,000", 1.0),
    ("\\boxed{72}", 72, 1.0),
    ("\\boxed{4}", ["3", "4"], 1.0),
    ("I do not know", "5", 0.0),
    ("", "5", 0.0),
]


@pytest.fixture(scope="module")
def verifier():
    made = MathReward(item_limit_s=10.0, load_limit_s=60.0)
    yield made
    made.close()


def ask(verifier: MathReward, pairs):
    responses = [r for r, _ in pairs]
    request = RewardRequest(["p" + r for r in responses], ["p"] * len(pairs), [x for _, x in pairs], responses)
    return asyncio.run(verifier.score(request))


def test_boxed_latex_and_last_number_answers_are_judged_right(verifier):
    results = ask(verifier, [(r, label) for r, label, _ in CASES])
    got = [(r, label, x.reward) for (r, label, _), x in zip(CASES, results, strict=True)]
    assert got == CASES and all(x.error is None and x.score == x.reward for x in results)


def test_a_label_without_an_answer_is_an_error_of_the_sample(verifier):
    results = ask(verifier, [("\\boxed{5}", None), ("\\boxed{5}", ""), ("\\boxed{5}", "5")])
    assert [r.error is not None for r in results] == [True, True, False]
    assert "label None" in results[0].error


def test_fault_30_off_the_main_thread_the_verifier_is_right(verifier):
    got = []
    thread = threading.Thread(target=lambda: got.extend(ask(verifier, [("\\boxed{1/3}", "\\frac{2}{6}"), ("9", "8")])))
    thread.start()
    thread.join(60)
    assert [r.reward for r in got] == [1.0, 0.0]


def test_fault_30_an_expression_that_would_take_for_ever_is_killed_at_the_limit():
    verifier = MathReward(item_limit_s=1.0, load_limit_s=60.0)
    endless = "\\boxed{\\int_0^1 x^{x^{x^x}} \\sin(x^x) dx + 9^{9^{9}}}"
    try:
        asyncio.run(verifier.check())
        started = time.monotonic()
        results = ask(verifier, [("\\boxed{3}", "3"), (endless, "7"), ("\\boxed{4}", "4")])
        seconds = time.monotonic() - started
    finally:
        verifier.close()
    assert [r.reward for r in results] == [1.0, 0.0, 1.0]
    assert results[1].metrics["verifier_killed"] == 1.0 and "killed" in results[1].logs["verifier"]
    assert seconds < 1.0 + 4.0  # the limit, and the start of another child


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(math_verifier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--reward.verifier math: .*openrlhf_like\[math\]"):
        MathReward()
