"""Log-probabilities of chosen tokens straight from hidden states, a chunk of tokens at a time.

The full [tokens, vocabulary] matrix of a long batch is the largest tensor of a training step by far. Here only
``chunk`` rows of it exist at any moment: the forward keeps one number a token, and the backward computes each chunk's
logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

#: Upper bound on one chunk of fp32 logits; a chunk's few temporaries are of the same size each.
CHUNK_BYTES = 256 * 2**20
MAX_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its lm_head's output before the softmax: multiply, then softly cap.

    Gemma caps (``final_logit_softcapping``), Cohere multiplies (``logit_scale``), Granite divides (``logits_scaling``).
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """From a transformers config; what it does not know is caught by ``loading.check_logprob_path``."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        scale = 1.0
        for name, invert in (("logit_scale", False), ("logits_scaling", True), ("lm_head_multiplier", False)):
            value = getattr(text, name, None)
            if value is not None:
                scale *= 1.0 / float(value) if invert else float(value)
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(scale, float(softcap) if softcap else None)


def chunk_tokens(vocab_size: int) -> int:
    """Tokens a chunk: at most 1024, fewer where the vocabulary is so large that they would pass CHUNK_BYTES."""
    return max(1, min(MAX_CHUNK_TOKENS, CHUNK_BYTES // (4 * vocab_size)))


def token_statistics(logits: Tensor, targets: Tensor, temperature: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """log softmax(logits / T)[target] and, where asked for, the entropy of softmax(logits / T).

    Args:
        logits: [A, V] any float type; computed in fp32.
        targets: int64 [A].
        temperature: float32 [A], > 0.

    Returns:
        log-probs fp32 [A], entropies fp32 [A] (zeros when not asked for), both in nats.
    """
    scaled = logits.float() / temperature.unsqueeze(1)
    log_z = torch.logsumexp(scaled, dim=1)
    logprobs = scaled.gather(1, targets.unsqueeze(1)).squeeze(1) - log_z
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    # H = log Z - sum p x, written so that no [A, V] log-softmax is kept besides the softmax itself.
    probs = torch.softmax(scaled, dim=1)
    return logprobs, log_z - (probs * scaled).sum(dim=1)


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward and backward over chunks; nothing of size [A, V] is ever saved."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        transform: Callable[[Tensor], Tensor],
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = transform(nn.functional.linear(hidden[part], weight, bias))
            logprobs[part], entropies[part] = token_statistics(logits, targets[part], temperature[part], entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)
        ctx.transform, ctx.entropy, ctx.chunk = transform, entropy, chunk
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[1]
        need_bias = bias is not None and ctx.needs_input_grad[2]
        grad_hidden = torch.zeros_like(hidden)
        # fp32 accumulators: many chunks added up in bf16 would lose the small ones.
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if need_bias else None
        w = weight.detach().requires_grad_(need_weight)
        b = bias.detach().requires_grad_(need_bias) if bias is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            with torch.enable_grad():
                h = hidden[part].detach().requires_grad_()
                logits = ctx.transform(nn.functional.linear(h, w, b))
                outputs = token_statistics(logits, targets[part], temperature[part], ctx.entropy)
                total = (outputs[0] * grad_logprobs[part]).sum()
                if ctx.entropy:
                    total = total + (outputs[1] * grad_entropies[part]).sum()
                del logits, outputs
            inputs = [h] + ([w] if need_weight else []) + ([b] if need_bias else [])
            grads = list(torch.autograd.grad(total, inputs))
            grad_hidden[part] = grads.pop(0)
            if grad_weight is not None:
                grad_weight += grads.pop(0)
            if grad_bias is not None:
                grad_bias += grads.pop(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            None,
            None,
            None,
            None,
            None,
        )


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    transform: Callable[[Tensor], Tensor] | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log pi of ``targets`` and the entropy of the distribution each was drawn from.

    Args:
        hidden: [A, H], the final hidden state that predicts each target.
        weight, bias: of the lm_head, [V, H] and [V] or None.
        targets: int64 [A].
        temperature: float32 [A], > 0: divides the logits.
        transform: applied to the raw logits first.
        entropy: compute it (zeros otherwise).
        chunk: tokens at a time; None chooses by vocabulary size.

    Returns:
        fp32 [A] log-probs and fp32 [A] entropies; both carry gradients to hidden, weight and bias.
    """
    chunk = chunk or chunk_tokens(weight.shape[0])
    return _ChunkedLogprobs.apply(
        hidden, weight, bias, targets, temperature, transform or LogitTransform(), entropy, chunk
    )


class ActionHead(nn.Module):
    """The lm_head as a module that answers log-probs.

    It holds the lm_head's parameters as its own, so that a sharding engine's hooks on this module gather the weight
    once a pass, however many chunks a rank happens to have: the ranks' collectives stay in step.
    """

    def __init__(self, lm_head: nn.Linear, transform: LogitTransform):
        super().__init__()
        self.weight = lm_head.weight
        self.bias = lm_head.bias
        self.transform = transform

    def forward(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See :func:`logprobs_from_hidden`."""
        return logprobs_from_hidden(hidden, self.weight, self.bias, targets, temperature, self.transform, entropy)
