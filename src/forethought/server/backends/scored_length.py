"""``ScoredLength``: how much text a reward model reads, told before much of it is tokenised."""

from __future__ import annotations

from forethought.errors import ContextLengthError
from forethought.llm.tokenizer import Tokenizer


class ScoredLength:
    """That of a reward model on this machine: at most ``max_length`` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        self._drops_spaces = tokenizer.encode("a        a") == tokenizer.encode("a a")

    def check_text(self, text: str) -> None:
        """Raises ContextLengthError for a text that is certain to be too long."""
        try:
            shown = " ".join(text.split()) if self._drops_spaces else text
            self._tokenizer.check_length(shown, self._max_length)
        except ContextLengthError as error:
            raise self._refusal(f"it has {len(text):,} characters") from error

    def check_tokens(self, count: int) -> None:
        """Raises ContextLengthError for a pair of more tokens."""
        if count > self._max_length:
            raise self._refusal(f"it has {count:,} tokens with the other one")

    def _refusal(self, why: str) -> ContextLengthError:
        return ContextLengthError(
            "a text is too long for the reward model",
            f"{why}, and the context holds {self._max_length:,} tokens",
            "Shorten it, or score its parts",
        )
