"""A causal language model seen as a policy: token rows in, log-probs of the chosen tokens out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf_like.models.logprobs import ActionHead, LogitTransform
from openrlhf_like.types import UserError


class PolicyModel(nn.Module):
    """Wraps a transformers causal LM; its backbone runs on the rows, its lm_head on the action tokens only.

    ``self.model`` is the LM itself: its parameter names are the checkpoint's.
    """

    def __init__(self, model: Any):
        super().__init__()
        lm_head = model.get_output_embeddings()
        if not isinstance(lm_head, nn.Linear):
            raise UserError(
                f"model {type(model).__name__}: its output layer is {type(lm_head).__name__}, not a linear lm_head;"
                " use a decoder-only causal language model"
            )
        if model.base_model is model:
            raise UserError(f"model {type(model).__name__}: has no backbone apart from its head; use a causal LM")
        self.model: Any = model
        self.head = ActionHead(lm_head, LogitTransform.of(model.config))

    @property
    def config(self) -> Any:
        """The LM's configuration (DeepSpeed and transformers look it up on the module)."""
        return self.model.config

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        source_index: Tensor,
        target_ids: Tensor,
        temperature: Tensor,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the action tokens of a batch of rows.

        Args:
            input_ids: int64 [B, T].
            position_ids: int64 [B, T]; several sequences in one row restart at 0, and see only themselves.
            source_index: int64 [A], where in the flattened [B*T] rows the state lies that predicts each target.
            target_ids: int64 [A].
            temperature: float32 [A].
            entropy: compute it too.

        Returns:
            fp32 [A] log-probs, fp32 [A] entropies (zeros where not asked for).
        """
        # No attention mask: rows are padded on the right, where causal attention never looks, and packed rows are
        # told apart by their restarting positions, for every attention implementation alike.
        hidden = self.model.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False
        ).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, source_index)
        return self.head(chosen, target_ids, temperature, entropy)


@torch.no_grad()
def check_logprob_path(policy: PolicyModel, device: torch.device, tolerance: float | None = None) -> None:
    """Compare the chunked log-probs with those of the model's own full logits on a short probe.

    A model that does something to its logits that :class:`LogitTransform` does not know would train on a wrong
    distribution without a sign of it. Raises UserError naming the model class.
    """
    vocab = int(policy.config.get_text_config().vocab_size)
    ids = (torch.arange(8, device=device) * 37 + 1).remainder(vocab).unsqueeze(0)
    positions = torch.arange(8, device=device).unsqueeze(0)
    was_training = policy.training
    policy.eval()
    try:
        logits = policy.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        expected = torch.log_softmax(logits.float(), dim=-1).gather(1, ids[0, 1:, None]).squeeze(1)
        got, _ = policy(ids, positions, torch.arange(7, device=device), ids[0, 1:], torch.ones(7, device=device))
    finally:
        policy.train(was_training)
    limit = tolerance if tolerance is not None else (1e-3 if logits.dtype == torch.float32 else 0.1)
    gap = float((expected - got).abs().max())
    if not gap <= limit:
        raise UserError(
            f"model {type(policy.model).__name__}: its logits are not lm_head(hidden) (log-probs differ by {gap:.3g});"
            " this architecture is not supported"
        )
