"""Tiny random models and prompts for tests that run the real trainer; float32, a character tokenizer, seconds a run."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-=#, abcdefghijklmnopqrstuvwxyz"
VOCABULARY = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(seed: int, hidden: int = 32, vocab_size: int = len(VOCABULARY)) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).float()


def prompts(num: int = 24) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i + 1}=" for i in range(num)], "answer": [str(2 * i + 1) for i in range(num)]}
    )


def coin(completions, completion_ids, **columns):
    """A reward that differs between siblings: 1 for an even sum of token ids."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]
