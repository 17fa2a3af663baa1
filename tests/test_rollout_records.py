"""Pure parts of the rollout: seeds, and completions that become trajectories."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from openrlhf_like.rollout.seeds import request_seed
from openrlhf_like.rollout.single_turn import build_trajectory, failed_trajectory
from openrlhf_like.types import Completion, Prompt, SamplingSpec, TrajectorySummary
from tests.tiny import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(merges=[("a", "b"), ("ab", "c")])


def test_fault_22_seeds_are_distinct_stable_and_fit_63_bits() -> None:
    seeds = {
        request_seed(run, step, prompt, sample, turn, phase)
        for run in (0, 1)
        for step in (1, 12)
        for prompt in ("1", "2", "12")
        for sample in range(8)
        for turn in (0, 1)
        for phase in ("train", "eval")
    }
    assert len(seeds) == 2 * 2 * 3 * 8 * 2 * 2
    assert all(0 <= s < 2**63 for s in seeds)
    # Neighbouring fields do not run into each other.
    assert request_seed(1, 11, "1", 0) != request_seed(11, 1, "1", 0)
    # Another process, with another hash seed, agrees.
    code = "from openrlhf_like.rollout.seeds import request_seed; print(request_seed(7, 3, 'p', 2))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(out.stdout) == request_seed(7, 3, "p", 2)


def test_fault_01_a_split_that_is_not_the_tokenizers_own_is_kept(tokenizer: Any) -> None:
    a, b, c = (tokenizer.convert_tokens_to_ids(x) for x in "abc")
    middle, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    sampled = [a, b, c, middle, a, b, end]
    assert tokenizer(tokenizer.decode(sampled)).input_ids != sampled
    prompt = Prompt("p", [c, c], "cc", label="x", metadata={"k": 1}, datasource="d")
    completion = Completion(sampled, [-0.1 * i for i in range(1, 8)], "stop", weight_version=4)
    t = build_trajectory(
        prompt, completion, SamplingSpec(9, temperature=0.7), tokenizer, trajectory_id="t", group_id="g"
    )
    (segment,) = t.segments
    assert segment.token_ids.tolist() == [c, c, *sampled] and segment.token_ids.dtype == np.int32
    assert segment.action_mask.tolist() == [0, 0] + [1] * 7
    np.testing.assert_allclose(segment.behavior_logprobs, [0, 0, *completion.logprobs], rtol=1e-6)
    assert segment.weight_version.tolist() == [-1, -1] + [4] * 7
    np.testing.assert_allclose(segment.temperatures(), [1, 1] + [0.7] * 7, rtol=1e-6)
    assert (t.response, t.prompt, t.label) == ("abcab", "cc", "x")
    assert t.metadata == {"k": 1, "datasource": "d"}
    assert not t.truncated and t.num_actions == 7


def test_fault_09_length_means_truncated(tokenizer: Any) -> None:
    for reason, truncated in (("length", True), ("stop", False)):
        t = build_trajectory(
            Prompt("p", [1], ""), Completion([2], [-1.0], reason, 0), SamplingSpec(1), tokenizer,
            trajectory_id="t", group_id="g",
        )  # fmt: skip
        assert t.truncated is truncated and TrajectorySummary.of(t).truncated is truncated


def test_what_could_not_be_sampled_is_marked_and_counts_no_tokens(tokenizer: Any) -> None:
    prompt = Prompt("p", [1], "")
    names = {"trajectory_id": "t", "group_id": "g"}
    aborted = build_trajectory(prompt, Completion([], [], "abort", 0), SamplingSpec(1), tokenizer, **names)
    for t in (aborted, failed_trajectory(prompt, "boom", **names)):
        assert t.error and t.segments == [] and t.num_actions == 0
        assert TrajectorySummary.of(t).error == t.error


def test_torchvision_imports_beside_this_torch() -> None:
    code = (
        "import openrlhf_like, torch, torchvision\n"
        "from torchvision.transforms import functional as F\n"
        "assert F.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)\n"
        "from openrlhf_like import torchvision_compat as c\n"
        "assert c.apply() is False\n"
        "from transformers import AutoProcessor\n"
        "assert c.apply_torchaudio() is False\n"
        "try:\n    import torchcodec\nexcept (ImportError, RuntimeError):\n    pass\n"
    )
    pytest.importorskip("torchvision", exc_type=ImportError)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, openrlhf_like, openrlhf_like.rollout.engine, openrlhf_like.rollout.dispatch\n"
        "print([m for m in ('torch', 'vllm', 'torchvision', 'transformers', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
