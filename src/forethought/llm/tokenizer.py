"""A Hugging Face tokenizer, and the prompts that callers may give: text, or token ids."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from forethought.assets import is_embedded_dir
from forethought.config.sampling import SamplingParams
from forethought.config.thoughts import MARKERS
from forethought.errors import (
    ContextLengthError,
    ModelError,
    ParameterError,
    RequestError,
    UsageError,
)
from forethought.llm.breakers import BreakerTokens
from forethought.llm.stop_candidates import StopCandidates
from forethought.model_dir import check_tokenizer_files, first_words, gguf_files, read_json

_logger = logging.getLogger(__name__)
UNREADABLE = "\ufffd"
"""What decoding gives for bytes that are no character, or not yet."""
_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = tuple(byte for byte in range(256) if byte not in _SHOWN)
_BYTE_LETTERS = MappingProxyType(
    {
        **{chr(byte): byte for byte in _SHOWN},
        **{chr(256 + number): byte for number, byte in enumerate(_OTHERS)},
    }
)
"""Letter -> byte, as byte-level BPE names its tokens: printable ones stand for themselves."""
SHORT_TEXT = 256
"""Characters of a text up to which its ids are remembered: methods append the same ones often."""
LONG_TEXT = 1 << 14
"""Characters beyond which a text is tokenised beside an event loop."""
_DENSE = 16
"""Characters for each token of the context that are tokenised to see whether a text is too long."""
_NO_FILES = (
    "The directory needs the tokenizer's files, such as tokenizer.json; if they are in another "
    "one, name it with tokenizer=..."
)


def _model_config(path: Path) -> PreTrainedConfig | None:
    """What transformers reads of a model's configuration to choose the class of its tokenizer;
    None: it has to read the file. Its own class of the configuration imports the model's code.
    """
    file = path / "config.json"
    written = read_json(file) if file.exists() else {}
    if "auto_map" in written or not isinstance(written.get("model_type"), str):
        return None
    config = PreTrainedConfig(name_or_path=str(path))
    config.model_type = written["model_type"]
    for name in ("model_name", "tokenizer_class"):
        if name in written:
            setattr(config, name, written[name])
    return config


def _from_files(path: Path, trust_remote_code: bool) -> Any:
    """transformers' tokenizer in a directory."""
    # Of a GGUF file, another class may put its own split in the place of the file's.
    if gguf_files(path) is not None or is_embedded_dir(path):
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    from transformers import AutoTokenizer  # it reads the names of all models' modules

    return AutoTokenizer.from_pretrained(
        path,
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        config=None if trust_remote_code else _model_config(path),
    )


def _check_template(hf: Any, path: Path) -> None:
    """Raises ModelError, with the place, for a chat template that does not parse."""
    if not hf.chat_template:
        return
    try:
        hf.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        if isinstance(error.__cause__, LookupError):  # a codec of Python that may not be read
            _logger.debug("the chat template of %s is not checked", path, exc_info=True)
            return
        raise ModelError(
            f"cannot load the tokenizer of {path}",
            f"its chat template cannot be read (line {error.lineno}: {error.message})",
            "Correct it: chat_template.jinja, or chat_template in tokenizer_config.json",
        ) from error
    except Exception:
        _logger.debug("the chat template of %s refuses an empty message", path, exc_info=True)


class Tokenizer:
    """Text to ids and back by ``hf``, the Hugging Face tokenizer. Safe to use from several
    threads.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self._lock = threading.Lock()  # encoding by hf may reset its padding and truncation
        self.longest_token = max(map(len, hf.get_vocab()), default=1)
        """Most characters of a text that one token has, but for unknown words and spaces
        that a tokenizer drops."""
        added = hf.added_tokens_decoder.items()
        self.special_ids = frozenset(token for token, entry in added if entry.special)
        """The ids that ``skip_special_tokens`` leaves out of a text."""
        self.byte_values = self._find_byte_values()
        """Token id -> byte, for tokens of one raw byte (sentencepiece's byte fallback)."""
        self._prepends_space = self.decode([*self._ids("a"), *self._ids("a")]) == "a a"
        self._short_ids = lru_cache(maxsize=64)(lambda text: tuple(self._encode_more(text)))
        self._spellings: dict[int, tuple[str, bytes | None]] = {}
        self._pieces: dict[int, str] = {}
        self._pieces_within: dict[int, str] = {}

    @classmethod
    def load(cls, path: Path, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer in a local directory; raises ModelError if it cannot be read."""
        if not path.is_dir():
            raise ModelError(
                f"no tokenizer at {path}",
                "there is no such directory",
                "Give the path of a local Hugging Face directory",
            )
        check_tokenizer_files(path)
        try:
            hf = _from_files(path, trust_remote_code)
        except Exception as error:
            raise ModelError(
                f"cannot load the tokenizer of {path}", first_words(error), _NO_FILES
            ) from error
        _check_template(hf, path)
        if len(hf.get_vocab()) <= len(hf.added_tokens_decoder):
            raise ModelError(
                f"cannot load the tokenizer of {path}",
                "it has no vocabulary, as transformers makes one when it finds no files",
                _NO_FILES,
            )
        return cls(hf)

    @cached_property
    def thinking_markers(self) -> tuple[str, str] | None:
        """What opens and closes a thought; None: the model has no such markers.

        They are tokens of the vocabulary, or texts of the chat template.
        """
        vocabulary, template = self.hf.get_vocab(), self.template_text
        for start, end in MARKERS:
            if start in vocabulary and end in vocabulary:
                return start, end
        return next(((start, end) for start, end in MARKERS if end in template), None)

    @cached_property
    def stop_candidates(self) -> StopCandidates:
        """Finds the tokens with which stop strings may end."""
        return StopCandidates(self.hf.get_vocab(), _BYTE_LETTERS, self.byte_values)

    @cached_property
    def breakers(self) -> BreakerTokens:
        """Finds the tokens of sequence breakers."""
        return BreakerTokens(self.hf.get_vocab, _BYTE_LETTERS, self.byte_values, self.encode_more)

    @property
    def template_text(self) -> str:
        """The chat template, or several of them together; empty if there is none."""
        template = self.hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def expect_ids_below(self, vocab_size: int, path: Path) -> None:
        """Raises ModelError if the model has fewer tokens than the tokenizer's own vocabulary.

        Added tokens may be beyond: a prompt that has them is refused.
        """
        if self.hf.vocab_size > vocab_size:
            raise ModelError(
                f"the tokenizer of {path} is not the model's",
                f"it has {self.hf.vocab_size} tokens, and the model {vocab_size}",
                "Give the tokenizer that the model was trained with",
            )

    def encode(self, text: str) -> list[int]:
        """Ids of a whole text, with the special tokens that the model's own tokenizer adds.

        Raises ParameterError for invalid Unicode, RequestError if the tokenizer failed.
        """
        return self._ids(text, add_special_tokens=True)

    def check_length(self, text: str, max_length: int) -> None:
        """Raises ContextLengthError for a text that is certain to have more than ``max_length``
        tokens, by encoding only a beginning of it; else as ``encode``.
        """
        why = ""
        if len(text) > max_length * self.longest_token:
            why = f"no token has more than {self.longest_token}"
        elif len(text) > _DENSE * max_length:
            count = len(self._ids(text[: _DENSE * max_length]))
            if count > 2 * max_length:
                why = f"the first {_DENSE * max_length:,} have {count:,} tokens"
        if why:
            raise ContextLengthError(
                f"the prompt has {len(text):,} characters",
                f"{why}, and the context holds {max_length:,} tokens",
                "Shorten the prompt",
            )

    def encode_more(self, text: str) -> list[int]:
        """Ids of a text that continues another one: nothing is added at its beginning. Raises as
        ``encode``.
        """
        if len(text) > SHORT_TEXT:
            return self._encode_more(text)
        return list(self._short_ids(text))

    def _encode_more(self, text: str) -> list[int]:
        if self._prepends_space:  # as sentencepiece does at the start of a text: encode mid-text
            head, whole = self._ids("\n"), self._ids("\n" + text)
            if whole[: len(head)] == head:
                return whole[len(head) :]
        return self._ids(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, never tidied up. Raises RequestError if the tokenizer failed."""
        try:
            return self._decode(ids, skip_special_tokens)
        except Exception as error:
            raise _failure("decode tokens", error) from error

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self.hf.is_fast:
            text: str = self.hf.backend_tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens
            )
            return text
        return str(
            self.hf.decode(
                ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def piece(self, token: int) -> str:
        """The text of one token on its own, special or not."""
        if token not in self._pieces:
            self._pieces[token] = self.decode([token], skip_special_tokens=False)
        return self._pieces[token]

    def piece_within(self, token: int) -> str:
        """The text of one token after others, with the space that sentencepiece drops at the start
        of a text.
        """
        if not self._prepends_space:
            return self.piece(token)
        if token not in self._pieces_within:
            before = self._ids("a")
            whole = self.decode([*before, token], skip_special_tokens=False)
            self._pieces_within[token] = whole[len(self.decode(before)) :]
        return self._pieces_within[token]

    def spelling(self, token: int) -> tuple[str, bytes | None]:
        """``piece_within`` and ``raw``."""
        if token not in self._spellings:
            self._spellings[token] = self.piece_within(token), self.raw(token)
        return self._spellings[token]

    def raw(self, token: int) -> bytes | None:
        """The bytes of a token that is a part of a character; None of one that is text."""
        if UNREADABLE not in self.piece(token):
            return None
        if token in self.byte_values:
            return bytes([self.byte_values[token]])
        name = self.hf.convert_ids_to_tokens(token)
        raw = name if isinstance(name, bytes) else _bytes_of(str(name))
        is_raw = raw is not None and raw.decode(errors="replace") == self.piece(token)
        return raw if is_raw else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of a conversation, with messages as in
        OpenAI's API; ``add_generation_prompt`` is True by default.

        Raises UsageError if the model has no chat template, or it refuses the messages.
        """
        if not self.hf.chat_template:
            raise UsageError(
                "this model cannot chat",
                "its tokenizer has no chat template",
                "Use generate with a plain prompt, or an instruction-tuned model",
            )
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise ParameterError(
                "invalid messages",
                f"got {messages!r}",
                "Give a list such as [{'role': 'user', 'content': 'Hello'}]",
            )
        arguments = {"add_generation_prompt": True, **(template_args or {})}
        try:
            return str(
                self.hf.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, **arguments
                )
            )
        except Exception as error:
            raise UsageError(
                "the chat template refuses these messages",
                str(error).strip() or type(error).__name__,
                "Check roles, their order and contents",
            ) from error

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        try:
            ids = self._encoded(text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise ParameterError(
                "the text cannot be tokenised", _invalidity(text) or str(error), "Give Unicode text"
            ) from error
        except Exception as error:
            raise _failure("encode a text", error) from error
        return ids

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encoded by the Rust library, without the GIL and concurrently with other threads, where
        hf only calls it: no short text waits for a long one.
        """
        backend: Any = self.hf.backend_tokenizer if self.hf.is_fast else None
        cuts = (getattr(backend, name, "unknown") for name in ("truncation", "padding"))
        ids: list[int]
        if all(cut is None for cut in cuts) and not self._encodes_itself:
            # As a batch, as ``encode`` holds the GIL; fast: without offsets.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        else:
            with self._lock:  # verbose: admission refuses what is too long, without a warning
                ids = self.hf(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
        return ids

    @cached_property
    def _encodes_itself(self) -> bool:
        """Whether hf makes other ids of a text than the library in Rust."""
        sample = " A sample,\n of  text: 12 \u00e9 "
        with self._lock:
            expected = [
                self.hf(sample, add_special_tokens=s, verbose=False).input_ids
                for s in (True, False)
            ]
        encode = self.hf.backend_tokenizer.encode
        return expected != [encode(sample, add_special_tokens=s).ids for s in (True, False)]

    def _find_byte_values(self) -> dict[int, int]:
        vocabulary = self.hf.get_vocab()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        if any(name not in vocabulary for name in names):
            return {}
        if self.decode([vocabulary["<0x41>"]]) != "A":
            return {}
        return {vocabulary[name]: byte for byte, name in enumerate(names)}


def _bytes_of(name: str) -> bytes | None:
    """The bytes of a token of byte-level BPE; None of another name."""
    values = [_BYTE_LETTERS.get(letter) for letter in name]
    return None if None in values else bytes(value for value in values if value is not None)


def _failure(what: str, error: Exception) -> RequestError:
    return RequestError(
        f"the tokenizer failed to {what}",
        f"{type(error).__name__}: {error}",
        "Other requests go on; the cause is attached",
    )


def _invalidity(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair"
    return ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens."""

    text: str | None
    """None if ids were given."""
    token_ids: list[int]


def read_prompt(prompt: Any, tokenizer: Tokenizer) -> Prompt:
    """The tokens of a prompt: a string or a list of ids. Admission refuses an empty list.

    Raises ParameterError if it is neither, or an empty string.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("empty prompt", "there is no text to continue", "Give some text")
        return Prompt(prompt, tokenizer.encode(prompt))
    return Prompt(None, read_ids(prompt))


def read_ids(ids: Any) -> list[int]:
    """Token ids as plain integers; raises ParameterError if it is not a list of integers."""
    if isinstance(ids, Sequence) and all(map(_is_id, ids)) and not isinstance(ids, bytes):
        return [int(token) for token in ids]
    fix = "Call .tolist() on arrays; give several prompts as a list of strings or of lists of ids"
    if isinstance(ids, Mapping):
        fix = "Give its text, or its list of token ids, alone"
    raise ParameterError(
        "invalid prompt",
        f"expected a string or a list of token ids, got {type(ids).__name__}: {str(ids)[:60]}",
        fix,
    )


def read_length(length: Any) -> int:
    """A number of tokens as a plain integer; raises ParameterError if it is not a whole number."""
    if not _is_id(length):
        raise ParameterError("invalid length", f"got {length!r}", "Give a whole number of tokens")
    return int(length)


def is_batch(prompts: Any) -> bool:
    """Whether a list holds prompts rather than the ids of one."""
    return (
        isinstance(prompts, Sequence)
        and not isinstance(prompts, str | bytes)
        and not (prompts and all(map(_is_id, prompts)))
    )


def read_params(params: Any) -> SamplingParams:
    """The params of one prompt; None: the defaults. Raises ParameterError for anything else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ParameterError(
            "invalid sampling_params",
            f"expected SamplingParams, got {type(params).__name__}",
            "Build them with SamplingParams(...) or SamplingParams.from_dict({...})",
        )
    return params


def _is_id(value: Any) -> TypeGuard[int]:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
