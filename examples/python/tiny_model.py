"""Build a small causal language model and its tokenizer from nothing: no download, no pretrained weights.

The tokenizer is byte-level: any text can be encoded, nothing is unknown. The model is a Qwen2 architecture with
head_dim 32, the smallest that vLLM's CPU attention takes.

    python examples/python/tiny_model.py ./tiny_model --hidden 128 --layers 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import openrlhf_like  # noqa: F401 - readies torchvision before transformers asks for it

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def build_tokenizer(merges: list[tuple[str, str]] | None = None, chat_template: str = CHAT_TEMPLATE, bos: bool = False):
    """A byte-level tokenizer: 256 bytes, the merges asked for, and three special tokens.

    ``<|im_end|>`` ends a turn (eos); ``<|endoftext|>`` pads, and opens a sequence when ``bos`` is set.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    for left, right in merges or []:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges or [])))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>" if bos else None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = chat_template
    return fast


def build_tiny_model(
    path: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    tie: bool = True,
    max_position: int = 1024,
    merges: list[tuple[str, str]] | None = None,
    chat_template: str = CHAT_TEMPLATE,
    bos: bool = False,
    initializer_range: float = 0.05,
) -> str:
    """Write a random Qwen2 model (``hidden`` / ``heads`` = head_dim, at least 32) and its tokenizer to ``path``."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = build_tokenizer(merges, chat_template, bos)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie,
        initializer_range=initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="folder to write")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_tiny_model(args.path, hidden=args.hidden, layers=args.layers, heads=args.heads, seed=args.seed)


if __name__ == "__main__":
    main()
