"""Tiny random models and a tokenizer trained on the spot; nothing is downloaded."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.teachers.fake_vllm import connect, server, start  # noqa: F401 - fixtures

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def train_tokenizer(corpus, special=("<|bos|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=special[0], eos_token=special[1], pad_token=special[2]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(["three plus four is seven", "what is two plus two", "the answer is nine"] * 3)


def build_qwen(seed=0, vocab_size=64, dtype=torch.float32, scale=0.4):
    """Weights of size `scale`, so that distributions are far from flat."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=scale,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    return nn.Module.to(model, dtype=dtype)


@pytest.fixture
def make_qwen():
    return build_qwen
