"""The text side of one generation: tokens in, a ``CompletionOutput`` out, at any time.

Cuts at stop strings. Decodes when the text is asked for, or with each token if a stop string may
end the generation. Knows nothing about engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from forethought.outputs import (
    GRAMMAR_COMPLETE,
    CompletionOutput,
    FinishReason,
    Logprob,
    TokenLogprobs,
)
from forethought.params import SamplingParams
from forethought.text.detokenizer import Detokenizer
from forethought.text.stops import Stop, count_held, find_stop
from forethought.text.tokenizer import Tokenizer


class Transcript:
    """What one sample has said.

    ``token_ids`` are all tokens up to the one that ended it, the token that completed a stop string
    included; ``text`` ends before the stop string and before an end-of-sequence or stop token,
    unless ``include_stop_str_in_output``. Stop strings completed before ``min_tokens`` tokens are
    passed over.

    Args:
        tokenizer: of the model.
        params: of the request.
        context: the tokens before the generation; its text continues theirs.
        index: which of the ``n`` samples.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, context: Sequence[int], index: int = 0
    ) -> None:
        self._tokenizer, self._params, self._index = tokenizer, params, index
        self._detokenizer = Detokenizer(tokenizer, context, params.skip_special_tokens)
        self.token_ids: list[int] = []
        self._undecoded: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Append what the engine drew.

        A completed stop string ends the transcript; the caller then finds ``finish_reason`` set and
        tokens behind the completing one left out.

        Args:
            tokens: in order; the last one ended the generation if ``finish_reason`` is ``STOP``.
            logprobs: one entry per token, if asked for.
            finish_reason: of the engine; None: it goes on.
            stop_reason: of the engine.
        """
        ended_by_token = finish_reason is FinishReason.STOP and stop_reason != GRAMMAR_COMPLETE
        for place, token in enumerate(tokens):
            self.token_ids.append(token)
            if self._logprobs is not None and logprobs is not None:
                self._add_logprobs(token, logprobs[place])
            is_end = ended_by_token and place == len(tokens) - 1
            if not is_end or self._params.include_stop_str_in_output:
                self._undecoded.append(token)
            if self._params.stop and (stop := self._find_stop()):
                end = stop.end if self._params.include_stop_str_in_output else stop.start
                self._text = self._text[:end]
                self._end(FinishReason.STOP, stop.text)
                return
        if finish_reason is not None:
            self.finish(finish_reason, stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Nothing follows; text that was held back is certain now."""
        self._decode()
        self._text += self._detokenizer.flush()
        self._end(reason, stop_reason)

    @property
    def text(self) -> str:
        """The text so far, without what may turn out to be the beginning of a stop string."""
        self._decode()
        if self.finish_reason is not None:
            return self._text
        return self._text[: len(self._text) - count_held(self._text, self._params.stop)]

    def output(self) -> CompletionOutput:
        """A copy of everything so far."""
        return CompletionOutput(
            index=self._index,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self._undecoded.clear()
        self.finish_reason, self._stop_reason = reason, stop_reason

    def _decode(self) -> None:
        if self._undecoded:
            self._text += self._detokenizer.push(self._undecoded)
            self._undecoded.clear()

    def _find_stop(self) -> Stop | None:
        known = len(self._text)
        self._decode()
        if len(self.token_ids) < self._params.min_tokens:
            return None
        return find_stop(self._text, known, self._params.stop)

    def _add_logprobs(self, token: int, entries: TokenLogprobs) -> None:
        assert self._logprobs is not None
        self._cumulative += entries[token].logprob
        self._logprobs.append(name_tokens(entries, self._tokenizer))


def name_tokens(entries: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """The same log-probabilities with the text of each token."""
    return {
        token: Logprob(entry.logprob, entry.rank, tokenizer.piece(token))
        for token, entry in entries.items()
    }
