"""Tiny tokenizers of the kinds that models have, and tiny models that speak."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from models import _BASE, _directory, save_random

TEXT = [
    "Hello world, how are you? I am fine, thank you, and how are the others?",
    "Grüße aus Köln: 你好，世界 🙂 ok.",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@functools.cache
def byte_level(chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as GPT-2 and most newer models have; 300 ids, 0 to 2 special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE if chat else None,
    )


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """Characters with a leading-space mark and byte fallback, as Llama 2 has; adds ``<s>``."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for character in "▁abcdefghijklmnopqrstuvwxyzé":
        vocabulary[character] = len(vocabulary)
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁", "▁")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@functools.cache
def speaking(kind: str = "byte_level", **config: Any) -> Path:
    """Directory of a tiny random Llama with a tokenizer: byte_level, sentencepiece or mute."""
    names = [kind, *(f"{name}={value}" for name, value in config.items())]
    path = Path(_directory().name) / "-".join(["speaking", *names])  # no other test's
    save_random(CONFIG_MAPPING["llama"](**{**_BASE, "vocab_size": 300, **config}), path)
    hf = sentencepiece() if kind == "sentencepiece" else byte_level(chat=kind != "mute")
    hf.save_pretrained(path)
    return path


@functools.cache
def thinking(single: bool = True) -> Path:
    """Directory of a tiny random Llama that knows ``<think>`` and ``</think>``.

    Its chat template opens the thought, and writes two line ends behind earlier ones.

    Args:
        single: the markers are tokens of the vocabulary; else several tokens each.
    """
    path = Path(_directory().name) / f"thinking-{single}"
    save_random(CONFIG_MAPPING["llama"](**{**_BASE, "vocab_size": 304}), path)
    hf = copy.deepcopy(byte_level())
    if single:
        hf.add_tokens(["<think>", "</think>"])
    hf.chat_template = THINKING_TEMPLATE
    hf.save_pretrained(path)
    return path
