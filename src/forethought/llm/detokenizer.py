"""Token ids to text as they arrive, up to a stop string.

``Transcript`` is the text side of one sample: tokens in, a ``CompletionOutput`` out at any time. It
decodes when the text is asked for, or with each token if there are stop strings.

``Detokenizer`` makes the text of all tokens in pieces. Decoding a token depends on those around it:
a character may be spread over several tokens, and a sentencepiece tokenizer drops the space before
a text's first word. So tokens are decoded in a short window after the preceding ones, and text
that may still change is held back.

``find_stop`` gives the same result however the text was cut into tokens: that of matching one
character at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forethought.config.sampling import SamplingParams
from forethought.llm.tokenizer import UNREADABLE, Tokenizer
from forethought.outputs import (
    GRAMMAR_COMPLETE,
    CompletionOutput,
    FinishReason,
    TokenConfidence,
    TokenLogprobs,
)

KEEP = 5
"""Tokens kept as context: one for the spaces; four bytes for the longest character."""
CONTEXT = 8 * KEEP
"""Last tokens of a context that are read, as hidden ones are among them."""


class Detokenizer:
    """The text that continues ``context``, of which only the last few tokens are read.

    ``decode(context) + (all that push and flush return) == decode(context + pushed)``, with two
    exceptions: a character that the context leaves unfinished is returned whole, and one wrong byte
    makes a whole run of sentencepiece's byte tokens unreadable, of which earlier characters were
    returned. Each token costs the decoding of about ``2 * KEEP`` tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail = context[-CONTEXT:]
        self._window = [token for token in tail if token not in self._hidden]
        self._held_bytes = 0
        self._shorten()
        self._shown = len(self._decode().rstrip(UNREADABLE))

    def hides(self, token: int) -> bool:
        """Whether the text is without a token."""
        return token in self._hidden

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after ``tokens`` and was not before."""
        visible = [token for token in tokens if token not in self._hidden]
        if not visible:
            return ""
        if self._tokenizer.byte_values:
            return "".join([self._advance([token]) for token in visible])
        return self._advance(visible)

    def flush(self) -> str:
        """The text held back, at the end of the tokens."""
        text = self._decode()
        rest, self._shown = text[self._shown :], len(text)
        self._held_bytes = 0
        return rest

    def checkpoint(self) -> tuple[Any, ...]:
        """What ``restore`` needs to take back the tokens pushed afterwards."""
        return list(self._window), self._held_bytes, self._shown

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Take back what was pushed, or flushed, since the checkpoint."""
        self._window, self._held_bytes, self._shown = checkpoint

    def _advance(self, tokens: list[int]) -> str:
        self._window += tokens
        text = self._decode()
        certain = self._certain(text, tokens[-1])
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) > 2 * KEEP and self._held_bytes == 0:
            unsure = len(text) - self._shown
            self._shorten()
            self._shown = len(self._decode()) - unsure
        return new

    def _certain(self, text: str, last: int) -> int:
        """How many characters of the window's text no further token can change."""
        if last in self._tokenizer.byte_values:
            # The run shows as unreadable until its last character is complete, at most 4 bytes.
            self._held_bytes = (self._held_bytes + 1) % 4 if text.endswith(UNREADABLE) else 0
            return self._shown if self._held_bytes else len(text)
        self._held_bytes = 0
        return len(text) - 1 if text.endswith(UNREADABLE) else len(text)

    def _shorten(self) -> None:
        """Drop all but the last few tokens, not starting inside a character of byte tokens."""
        start = max(0, len(self._window) - KEEP)
        for _ in range(3):
            if start and self._tokenizer.byte_values.get(self._window[start], 0) & 0xC0 == 0x80:
                start -= 1
        del self._window[:start]

    def _decode(self) -> str:
        # Special tokens that are to be hidden are not in the window.
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string found."""

    text: str
    start: int
    """Where it begins; the text before is the answer."""

    @property
    def end(self) -> int:
        """The position after it."""
        return self.start + len(self.text)


def find_stop(text: str, num_searched: int, stops: Sequence[str]) -> Stop | None:
    """The stop string completed first after ``text[:num_searched]``; of several, the longest.

    A match may begin in the part that was searched before, but not end there.
    """
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, num_searched - len(stop) + 1))
        if start >= 0:
            matches.append(Stop(stop, start))
    return min(matches, key=lambda stop: (stop.end, stop.start), default=None)


def count_held(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1)
    for count in range(min(len(text), longest - 1), 0, -1):
        if any(len(stop) > count and text.endswith(stop[:count]) for stop in stops):
            return count
    return 0


class Transcript:
    """The text of one sample, which continues that of ``context``.

    ``token_ids`` are all tokens up to the one that ended it, the token that completed a stop string
    included; ``text`` ends before the stop string and before an end-of-sequence or stop token,
    unless ``include_stop_str_in_output``. Stop strings completed before ``min_tokens`` tokens are
    ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, context: Sequence[int], index: int = 0
    ) -> None:
        self._tokenizer, self._params, self._index = tokenizer, params, index
        self._context = context[-CONTEXT:]
        self._detokenizer: Detokenizer | None = None
        """None until text is decoded: a replica tells tokens alone."""
        self.token_ids: list[int] = []
        self._num_shown = self._num_decoded = 0
        """First tokens that belong to the text; those that ``_text`` is of."""
        self._text, self._has_tail = "", False
        """Of the decoded tokens; whether what they hold back is text too, as it has ended."""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._confidences: list[TokenConfidence] | None = None if params.confidence is None else []
        self._cumulative = 0.0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        *,
        confidences: Sequence[TokenConfidence] | None = None,
    ) -> None:
        """Append the tokens that the engine sampled, with one entry of logprobs and confidences
        each.

        A completed stop string ends the transcript: ``finish_reason`` is set then, and the tokens
        after it are left out. If the engine's ``finish_reason`` is ``STOP``, the last token is the
        one that ended the generation.
        """
        ended_by_token = finish_reason is FinishReason.STOP and stop_reason != GRAMMAR_COMPLETE
        is_end_hidden = ended_by_token and not self._params.include_stop_str_in_output
        num_tokens = len(tokens)
        is_stopped = not self._decode_ahead(tokens[: num_tokens - is_end_hidden])
        size = 1 if is_stopped else max(1, num_tokens)
        for start in range(0, num_tokens, size):
            new = slice(start, start + size)
            self.token_ids += tokens[new]
            if self._logprobs is not None and logprobs is not None:
                self._add_logprobs(tokens[new], logprobs[new])
            if self._confidences is not None and confidences is not None:
                self._confidences += confidences[new]
            self._num_shown += size - (is_end_hidden and new.stop == num_tokens)
            if is_stopped and (stop := self._find_stop()):
                end = stop.end if self._params.include_stop_str_in_output else stop.start
                self._text, self._num_decoded = self._text[:end], self._num_shown
                self.finish_reason, self._stop_reason = FinishReason.STOP, stop.text
                return
        if finish_reason is not None:
            self.finish(finish_reason, stop_reason)

    def checkpoint(self) -> tuple[Any, ...]:
        """What ``restore`` needs to take back the ``add`` that follows."""
        sizes = len(self._logprobs or ()), len(self._confidences or ())
        decoding = self._text, self._has_tail, self._num_shown, self._num_decoded
        states = decoding, self._detokenizer and self._detokenizer.checkpoint()
        return len(self.token_ids), sizes, self._cumulative, states

    def restore(self, checkpoint: tuple[Any, ...]) -> None:
        """Take back an ``add`` that was interrupted."""
        num_tokens, sizes, self._cumulative, (decoding, detokenizer) = checkpoint
        del self.token_ids[num_tokens:]
        for scores, size in zip((self._logprobs, self._confidences), sizes, strict=True):
            if scores is not None:
                del scores[size:]
        self._text, self._has_tail, self._num_shown, self._num_decoded = decoding
        if detokenizer is None:
            self._detokenizer = None
        else:
            self._decoder.restore(detokenizer)
        self.finish_reason = self._stop_reason = None

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End the sample; the text held back becomes part of it."""
        self._has_tail = True
        self.finish_reason, self._stop_reason = reason, stop_reason

    @property
    def text(self) -> str:
        """The text so far, without an end that may be the beginning of a stop string."""
        self._decode()
        if self._has_tail:
            self._text, self._has_tail = self._text + self._decoder.flush(), False
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - count_held(self._text, self._params.stop)]

    def output(self, with_text: bool = True) -> CompletionOutput:
        """A copy of everything so far; without the text nothing is decoded for it."""
        return CompletionOutput(
            index=self._index,
            text=self.text if with_text else "",
            token_ids=list(self.token_ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            confidences=None if self._confidences is None else list(self._confidences),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _decode(self) -> None:
        if self._num_decoded < self._num_shown:
            undecoded = self.token_ids[self._num_decoded : self._num_shown]
            self._text += self._decoder.push(undecoded)
            self._num_decoded = self._num_shown

    @property
    def _decoder(self) -> Detokenizer:
        if self._detokenizer is None:
            skip = self._params.skip_special_tokens
            self._detokenizer = Detokenizer(self._tokenizer, self._context, skip)
        return self._detokenizer

    def _decode_ahead(self, tokens: Sequence[int]) -> bool:
        """Decode at once the tokens that are about to be shown, if they complete no stop string."""
        if not self._params.stop:
            return True
        self._decode()
        before = self._decoder.checkpoint()
        text = self._text + self._decoder.push(tokens)
        if find_stop(text, len(self._text), self._params.stop):
            self._decoder.restore(before)
            return False
        self._text, self._num_decoded = text, self._num_decoded + len(tokens)
        return True

    def _find_stop(self) -> Stop | None:
        num_searched = len(self._text)
        self._decode()
        if len(self.token_ids) < self._params.min_tokens:
            return None
        return find_stop(self._text, num_searched, self._params.stop)

    def _add_logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        assert self._logprobs is not None
        for token, entries in zip(tokens, logprobs, strict=True):
            self._cumulative += entries[token].logprob
            self._logprobs.append(name_tokens(entries, self._tokenizer))


def name_tokens(entries: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """Set the text of each token in its log-probability, and its bytes if they are no text; returns
    the same dictionary.
    """
    for token, entry in entries.items():
        entry.token, entry.raw = tokenizer.spelling(token)
    return entries
