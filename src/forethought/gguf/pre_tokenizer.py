"""How byte-level tokenizers split a text before they merge bytes, by ``tokenizer.ggml.pre``.

A file has the vocabulary and the merges of a tokenizer, and of its split only a name. Each name
here has the split of the models' own ``tokenizer.json``; an unknown name is refused, because
another split gives other tokens than those that the model was trained with, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """The split of a byte-level tokenizer.

    Attributes:
        patterns: regular expressions; each splits what the ones before it have left.
        splits_as_gpt2: whether GPT-2's expression splits last.
        ignores_merges: a part that is a token is not merged from bytes.
        normalizes: whether texts are brought to NFC.
        begins_text: whether the first token begins a text, where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    splits_as_gpt2: bool = False
    ignores_merges: bool = False
    normalizes: bool = False
    begins_text: bool = False

    def to_json(self) -> dict[str, Any]:
        """As ``pre_tokenizer`` of a ``tokenizer.json``."""
        splits: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.splits_as_gpt2,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


_GPT2 = PreTokenizer(splits_as_gpt2=True)
_DIGITS_AND_GPT2 = PreTokenizer((r"\p{N}",), splits_as_gpt2=True)
_LLAMA3_MERGED = PreTokenizer((_LLAMA3,))
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), ignores_merges=True, begins_text=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "mellum", "a.x-4.0", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), _DIGITS_AND_GPT2),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_MERGED),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_WHOLE),
    **dict.fromkeys(("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3_WHOLE),
    "qwen2": PreTokenizer((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), normalizes=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, begins_text=True),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}
"""By ``tokenizer.ggml.pre``."""
