"""Tokens to text while they arrive: the pieces together are the text of all tokens.

Decoding a token depends on those around it: a character may be spread over several tokens, and a
sentencepiece tokenizer drops the space in front of a text's first word. So a token is decoded in a
short window behind its predecessors, and what may still change is held back.

Knows nothing about requests or stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from forethought.text.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
"""What decoding shows for bytes that are no character, or not yet."""

KEEP = 5
"""Tokens kept as context: one for the spaces; four bytes for the longest character."""


class Detokenizer:
    """The text that continues ``context``.

    ``decode(context) + (all that push and flush return) == decode(context + pushed)``, but for two
    things that cannot be: a character that the context leaves unfinished is returned whole, and
    when one byte of a run of sentencepiece's byte tokens is wrong, decoding makes the whole run
    unreadable, where characters that were returned before stay.
    Work per token is bounded: a window of about ``2 * KEEP`` tokens is decoded.

    Args:
        tokenizer: of the model.
        context: the tokens before; only the last few are looked at.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        tail = context[-8 * KEEP :]
        self._window = [token for token in tail if token not in self._hidden]
        self._held_bytes = 0
        self._shorten()
        self._shown = len(self._decode().rstrip(UNREADABLE))

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after ``tokens`` and was not before."""
        visible = [token for token in tokens if token not in self._hidden]
        if not visible:
            return ""
        if self._tokenizer.byte_values:
            return "".join([self._advance([token]) for token in visible])
        return self._advance(visible)

    def flush(self) -> str:
        """The text held back, as nothing follows."""
        text = self._decode()
        rest, self._shown = text[self._shown :], len(text)
        self._held_bytes = 0
        return rest

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
