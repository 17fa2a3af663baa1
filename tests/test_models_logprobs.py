"""Chunked log-probs of action tokens against the full logits: values, gradients, entropy, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openrlhf_like.models.loading import load_causal_lm, unique_parameters
from openrlhf_like.models.logprobs import LogitTransform, chunk_tokens, logprobs_from_hidden
from openrlhf_like.models.policy import PolicyModel, check_logprob_path
from openrlhf_like.types import UserError
from tests.tiny import build_tiny_model

A, H, V = 37, 16, 101


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(A, H, generator=g, dtype=dtype).requires_grad_(),
        "weight": torch.randn(V, H, generator=g, dtype=dtype).requires_grad_(),
        "bias": torch.randn(V, generator=g, dtype=dtype).requires_grad_(),
        "targets": torch.randint(0, V, (A,), generator=g),
        "temperature": torch.rand(A, generator=g) + 0.5,
    }


def full_reference(x: dict[str, torch.Tensor], transform: LogitTransform) -> tuple[torch.Tensor, torch.Tensor]:
    logits = transform(x["hidden"] @ x["weight"].T + x["bias"]) / x["temperature"].unsqueeze(1)
    log_p = torch.log_softmax(logits.double(), -1)
    return log_p.gather(1, x["targets"][:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.25, 5.0)])
def test_chunked_logprobs_and_entropy_equal_full_logits_in_value_and_gradient(
    chunk: int, transform: LogitTransform
) -> None:
    x = inputs()
    weights = torch.randn(2, A, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = full_reference(x, transform)
    leaves = [x["hidden"], x["weight"], x["bias"]]
    want_grads = torch.autograd.grad((weights[0] * want[0] + weights[1] * want[1]).sum(), leaves)
    got = logprobs_from_hidden(**x, transform=transform, entropy=True, chunk=chunk)
    got_grads = torch.autograd.grad((weights[0] * got[0] + weights[1] * got[1]).sum(), leaves)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b.double(), a, atol=1e-5, rtol=1e-5)
    for a, b in zip(want_grads, got_grads, strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-5)


def test_entropy_that_takes_no_gradient_changes_no_gradient() -> None:
    x = inputs()
    plain, _ = logprobs_from_hidden(**x, chunk=8)
    with_entropy, entropy = logprobs_from_hidden(**x, entropy=True, chunk=8)
    assert entropy.detach().min() > 0
    a = torch.autograd.grad(plain.sum(), x["hidden"])[0]
    b = torch.autograd.grad(with_entropy.sum(), x["hidden"])[0]
    torch.testing.assert_close(a, b)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation produced."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.most = max(self.most, leaf.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made_forward_or_backward() -> None:
    tokens, vocab, hidden, chunk = 512, 2000, 8, 32
    h = torch.randn(tokens, hidden, requires_grad=True)
    w = torch.randn(vocab, hidden, requires_grad=True)
    with LargestTensor() as seen:
        logprobs, entropy = logprobs_from_hidden(
            h, w, None, torch.zeros(tokens, dtype=torch.long), torch.ones(tokens), entropy=True, chunk=chunk
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert chunk * vocab <= seen.most < 2 * chunk * vocab
    assert h.grad is not None and w.grad is not None


def test_chunks_shrink_with_the_vocabulary() -> None:
    assert chunk_tokens(32_000) == 1024
    assert chunk_tokens(256_000) * 256_000 * 4 <= 256 * 2**20
    assert chunk_tokens(10**10) == 1


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return load_causal_lm(str(build_tiny_model(path, tie=request.param)))


def test_policy_logprobs_and_parameter_gradients_equal_the_models_own_logits(model: torch.nn.Module) -> None:
    ids = torch.randint(0, 250, (3, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(11).expand(3, 11)
    source = torch.tensor([0, 4, 9, 11, 20, 30])
    targets = ids.flatten()[source + 1]
    temperature = torch.tensor([1.0, 0.6, 0.6, 1.3, 1.0, 0.7])
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)[source] / temperature[:, None]
    want = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)
    params = [p for _, p in unique_parameters(model)]
    want_grads = torch.autograd.grad(want.sum(), params)
    got, _ = PolicyModel(model)(ids, positions, source, targets, temperature)
    got_grads = torch.autograd.grad(got.sum(), params)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for a, b in zip(want_grads, got_grads, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-4)


def test_policy_holds_every_parameter_once(model: torch.nn.Module) -> None:
    assert sum(1 for _ in PolicyModel(model).parameters()) == sum(1 for _ in unique_parameters(model))


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    path = str(build_tiny_model(tmp_path / "tiny"))
    ids = torch.arange(12).unsqueeze(0)
    grads = []
    for on, reentrant in [(False, False), (True, False), (True, True)]:
        policy = PolicyModel(
            load_causal_lm(path, gradient_checkpointing=on, gradient_checkpointing_reentrant=reentrant)
        ).train()
        assert policy.model.is_gradient_checkpointing is on
        logprobs, _ = policy(ids, torch.arange(12).unsqueeze(0), torch.arange(11), ids[0, 1:], torch.ones(11))
        logprobs.sum().backward()
        grads.append({n: p.grad for n, p in policy.named_parameters()})
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("llama", {}),
        ("gpt_neox", {}),
    ],
)
def test_models_that_change_their_logits_are_followed(family: str, change: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
             "intermediate_size": 32, "vocab_size": 64, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **change}))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # far from uniform, so that a missed transform shows
    check_logprob_path(PolicyModel(model), torch.device("cpu"))


def test_a_model_with_an_unknown_change_to_its_logits_is_refused(model: torch.nn.Module) -> None:
    policy = PolicyModel(model)
    policy.head.transform = LogitTransform(scale=3.0)
    with pytest.raises(UserError, match="Qwen2ForCausalLM.*not supported"):
        check_logprob_path(policy, torch.device("cpu"))
