"""A vocabulary of 30 words and its tokenizer, for the tests of TRL. Imports Transformers when it is used."""

from __future__ import annotations

from typing import Any

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]


def tokenizer() -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
