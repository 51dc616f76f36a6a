"""The tokenizer in the metadata of a GGUF file, as the JSON files that transformers reads.

Two models of tokenizers are read: ``gpt2``, byte-level BPE with its merges, and ``llama``,
sentencepiece BPE, whose merges follow from the scores of its tokens: of two neighbours, those whose
joined token has the highest score are merged first. Both become the BPE of the tokenizers library,
and nothing of them is code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

from forethought.gguf.metadata import Metadata
from forethought.gguf.pre_tokenizer import PRE_TOKENIZERS, PreTokenizer

_logger = logging.getLogger(__name__)
_SPACE = "\u2581"
"""What stands for a space in the tokens of sentencepiece."""
_MAX_TOKEN_LENGTH = 256
"""Characters of a token that is merged from others; the longest of real models have 128."""
_TEMPLATE = "tokenizer.chat_template"
_GEMMA = ("gemma2", "gemma3")
_PHI3_STAYS = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that do not take the spaces after them along."""


class TokenType(IntEnum):
    """What a token is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Name of a file of a tokenizer -> its content.

    Raises ModelError for a split (``tokenizer.ggml.pre``) that is not known, and for a vocabulary
    and merges that do not fit each other.
    """
    kind = vocabulary.metadata.text("tokenizer.ggml.model")
    tokenizer = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(vocabulary)}


class Vocabulary:
    """The tokens of a file; raises ModelError for a kind of tokenizer that is not read.

    Attributes:
        metadata: of the file.
        tokens: their texts, by id; Gemma's of spaces alone are stored as they are, and written here
            as sentencepiece writes them.
        types: of the tokens; all are normal where the file does not say.
    """

    def __init__(self, metadata: Metadata) -> None:
        kind = metadata.text("tokenizer.ggml.model", "none")
        if kind not in ("gpt2", "llama"):
            why = f"its tokenizer is of the model {kind!r:.40}; gpt2 and llama are read"
            raise metadata.unsupported(why)
        self.metadata = metadata
        self.tokens: Sequence[str] = metadata.strings("tokenizer.ggml.tokens")[:]
        if metadata.architecture in _GEMMA:
            self.tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in self.tokens]
        count = len(self.tokens)
        has_types = "tokenizer.ggml.token_type" in metadata.file.metadata
        self.types: Sequence[int] = (
            metadata.numbers("tokenizer.ggml.token_type", count)
            if has_types
            else (TokenType.NORMAL,) * count
        )

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, without those that only fill the vocabulary up. Of equal tokens the first
        has the text.
        """
        ids: dict[str, int] = {}
        num_repeated = 0
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind == TokenType.UNUSED and token == f"[PAD{token_id}]":
                continue
            if ids.setdefault(token, token_id) != token_id:
                num_repeated += 1
        if num_repeated:
            path = self.metadata.file.path
            _logger.warning("%s has %d tokens twice in its vocabulary", path, num_repeated)
        return ids

    def of_type(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        """Ids and texts of the tokens that have their text."""
        for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in types and self.ids.get(token) == token_id:
                yield token_id, token

    def text(self, token_id: int | None) -> str | None:
        """Of a token; None for an id that is no token."""
        is_token = token_id is not None and 0 <= token_id < len(self.tokens)
        return self.tokens[token_id] if is_token and token_id is not None else None

    def token(self, name: str) -> str | None:
        """The text of ``tokenizer.ggml.<name>_token_id``."""
        return self.text(self.metadata.token_id(name))


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    split = _pre_tokenizer(vocabulary.metadata)
    return {
        **_common(vocabulary, begins_text=split.begins_text),
        "normalizer": {"type": "NFC"} if split.normalizes else None,
        "pre_tokenizer": split.to_json(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocabulary.ids, _stored_merges(vocabulary), split.ignores_merges),
    }


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "")
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    why = f"how its tokenizer splits texts is unknown (tokenizer.ggml.pre is {name!r:.40})"
    if not name:
        why = "it does not say how its tokenizer splits texts (it has no tokenizer.ggml.pre)"
    raise metadata.unsupported(f"{why}; known are {', '.join(PRE_TOKENIZERS)}")


def _stored_merges(vocabulary: Vocabulary) -> list[list[str]]:
    """The pairs that ``tokenizer.ggml.merges`` has, first those that are merged first."""
    ids, merges = vocabulary.ids, []
    for merge in vocabulary.metadata.strings("tokenizer.ggml.merges")[:]:
        first, _, second = merge.partition(" ")
        if first not in ids or second not in ids or f"{first}{second}" not in ids:
            raise vocabulary.metadata.refused(
                "tokenizer.ggml.merges", merge, "two tokens of its vocabulary that make a third"
            )
        merges.append([first, second])
    return merges


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    metadata = vocabulary.metadata
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] | None = spaces
    pre_tokenizer: dict[str, Any] | None = None
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        prefix = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prefix, spaces]}
    if has_prefix and _has_control_instructions(vocabulary):
        normalizer = None
        pre_tokenizer = {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first",
            "split": False,
        }
    unknown = _unknown_token(vocabulary)
    return {
        **_common(vocabulary, begins_text=True),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_bpe(vocabulary.ids, _scored_merges(vocabulary), False),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _has_control_instructions(vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary is of Mistral's later models of sentencepiece, where a text that
    follows a control token gets no space before it.
    """
    token_id = vocabulary.ids.get("[INST]")
    return token_id is not None and vocabulary.types[token_id] == TokenType.CONTROL


def _unknown_token(vocabulary: Vocabulary) -> str | None:
    unknown = vocabulary.token("unknown")
    first = next(vocabulary.of_type(TokenType.UNKNOWN), (None, None))[1]
    token = unknown if unknown is not None else first
    return token if token in vocabulary.ids else None


def _scored_merges(vocabulary: Vocabulary) -> list[list[str]]:
    """All pairs of tokens that make a token, first those of the highest score, and of one token
    first those with the longest left part. Gemma's scores are not in the order of its merges;
    there the first token is merged first.
    """
    metadata = vocabulary.metadata
    if metadata.architecture in _GEMMA:
        kinds: tuple[TokenType, ...] = (TokenType.NORMAL, TokenType.USER_DEFINED)
        scores: Sequence[float] = range(0, -len(vocabulary.tokens), -1)
    else:
        kinds = (TokenType.NORMAL,)
        scores = metadata.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    types = vocabulary.types
    parts = {token: number for token, number in vocabulary.ids.items() if types[number] in kinds}
    merges = []
    for token, token_id in parts.items():
        if len(token) > _MAX_TOKEN_LENGTH:
            continue
        for length in range(1, len(token)):
            first, second = token[:length], token[length:]
            if first in parts and second in parts:
                merges.append((-scores[token_id], -length, length - len(token), first, second))
    merges.sort(key=lambda merge: merge[:3])
    return [[first, second] for *_, first, second in merges]


def _bpe(ids: Mapping[str, int], merges: list[list[str]], ignores_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignores_merges,
        "vocab": dict(ids),
        "merges": merges,
    }


def _common(vocabulary: Vocabulary, *, begins_text: bool) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        "post_processor": _post_processor(vocabulary, begins_text),
    }


def _added_tokens(vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    """The tokens that are found in a text before it is split: special ones, and those that are
    whole words of the model's own.
    """
    is_phi3 = vocabulary.metadata.architecture == "phi3"
    is_phi3 &= vocabulary.metadata.text("tokenizer.ggml.model") == "llama"
    special = (TokenType.UNKNOWN, TokenType.CONTROL)
    for token_id, token in vocabulary.of_type(*special, TokenType.USER_DEFINED):
        if not token:
            continue
        is_special = vocabulary.types[token_id] in special
        yield {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi3 and is_special and token not in _PHI3_STAYS,
            "normalized": False,
            "special": is_special,
        }


def _post_processor(vocabulary: Vocabulary, begins_text: bool) -> dict[str, Any] | None:
    """Adds the tokens that begin and end each text; None: there are none."""
    bos = _added(vocabulary, "bos", begins_text)
    eos = _added(vocabulary, "eos", False)
    if bos is None and eos is None:
        return None
    special = {token: _template_token(vocabulary, token) for token in (bos, eos) if token}

    def template(*names: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for kind, name in enumerate(names):
            parts += [{"SpecialToken": {"id": bos, "type_id": kind}}] if bos else []
            parts.append({"Sequence": {"id": name, "type_id": kind}})
            parts += [{"SpecialToken": {"id": eos, "type_id": kind}}] if eos else []
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _template_token(vocabulary: Vocabulary, token: str) -> dict[str, Any]:
    return {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]}


def _added(vocabulary: Vocabulary, name: str, default: bool) -> str | None:
    """The token that is added to each text; None: there is none."""
    metadata, token = vocabulary.metadata, vocabulary.token(name)
    key = f"tokenizer.ggml.add_{name}_token"
    adds = metadata.flag(key)
    if adds and token not in vocabulary.ids:
        raise metadata.refused(key, True, f"false: it has no token for it ({name}_token_id)")
    wants = default if adds is None else adds
    return token if wants and token in vocabulary.ids else None


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    metadata = vocabulary.metadata
    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token"}
    if metadata.text("tokenizer.ggml.model") == "llama":
        names["unknown"] = "unk_token"
    tokens = {field: vocabulary.token(name) for name, field in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{field: token for field, token in tokens.items() if token},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size("context_length"),
    }
    template = _chat_template(metadata)
    return config if template is None else {**config, "chat_template": template}


def _chat_template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """The template; a list with names, if there are several. None: there is none."""
    prefix = f"{_TEMPLATE}."
    named = {
        key.removeprefix(prefix): metadata.text(key)
        for key in metadata.file.metadata
        if key.startswith(prefix)
    }
    default = metadata.text(_TEMPLATE, "")
    if not named:
        return default or None
    templates = {"default": default, **named} if default else named
    return [{"name": name, "template": text} for name, text in templates.items()]
