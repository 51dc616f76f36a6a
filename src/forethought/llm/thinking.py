r"""Thinking budgets: a ``Constraint`` that closes a thought at its cap.

The thought is what is between the model's markers, such as ``<think>`` and ``</think>``; either
of them may be one token or several. How far a thought is depends on the tokens of the sequence
alone, so it holds at every node of a draft tree, and in a fork, a rewound session or a generation
that goes on where another one ended::

    prompt        output
    ... <think>\n Let me see. ... 12. </think>\n\n The answer is 12.
               [ thought: counted     )[ closing text )[ answer: under the grammar, if there is one

* Below the cap every token is allowed. A token of white space directly after the opening marker,
  as in ``<think>\n``, belongs to the marker, whether the model or the chat template has written it.
* With ``thinking_budget`` tokens of thought, or at the first natural boundary from
  ``thinking_soft`` tokens on, the tokens of the closing text are forced, one by one: the
  distribution is a point mass.
* Where the model opens another thought in the same output, its tokens are counted with those of the
  first one.
* A grammar begins after the thought. In the thought it only forbids end-of-sequence, so that the
  output does not end without its shape.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forethought.config.sampling import SamplingParams
from forethought.config.thoughts import MARKERS
from forethought.errors import ParameterError
from forethought.llm.tokenizer import Tokenizer
from forethought.model.sampling import Constraint, Constraints
from forethought.outputs import ThinkingOutput, ThoughtEnd

BOUNDARY = re.compile(r"(?:\n|[。！？]|[^\W\d_][)\]*\"'”’]*[.!?…][)\]*\"'”’]*)[^\S\n]*$")
"""The end of a line, or of a sentence; not a point after a digit, which may be a decimal point or
the number of an item."""

STATES = 512
"""States along one path that are kept, so that a draft's nodes find theirs."""


class Progress(NamedTuple):
    """The state of the thought after some tokens."""

    thinking: bool
    """Within a thought, or in the text that closes it."""
    num_tokens: int = 0
    """Number of tokens of thought."""
    num_forced: int = 0
    """Tokens of the closing text that have been written."""
    end: ThoughtEnd | None = None
    """How the last thought was, or is being closed."""
    num_answered: int = 0
    """Tokens after the last thought; all, if there was none."""
    tail: tuple[str, ...] = ()
    """The texts of the last tokens, in which a marker may have begun."""


@dataclass(frozen=True, slots=True)
class ThinkingRule:
    """The markers of a model and the limits of one request.

    Attributes:
        closing: ids of the text that is forced.
        budget, soft: ``thinking_budget`` and ``thinking_soft`` of the params.
        opening: ids of the opening marker; under a grammar, only these at the very beginning of the
            output open a thought. None: there is no grammar.
        eos_ids: end-of-sequence tokens, which close the thoughts of earlier turns in a prompt.
        never: tokens that may not be drawn in a thought.
    """

    start: str
    end: str
    closing: tuple[int, ...]
    budget: int | None
    soft: int | None
    piece: Callable[[int], str]
    opening: tuple[int, ...] | None
    eos_ids: frozenset[int]
    vocab_size: int
    never: frozenset[int] = frozenset()

    def due(self, progress: Progress) -> ThoughtEnd | None:
        """Why the next token has to be one of the closing text; None if it need not."""
        if not progress.thinking:
            return None
        if self.budget is not None and progress.num_tokens >= self.budget:
            return ThoughtEnd.BUDGET
        is_soft = self.soft is not None and progress.num_tokens >= self.soft
        return ThoughtEnd.SOFT if is_soft and BOUNDARY.search("".join(progress.tail)) else None

    def advance(self, progress: Progress, token: int) -> Progress:
        """The progress after one more token."""
        if not progress.thinking:
            return self._answer(progress, token)
        due = self.due(progress)
        if due is not None and token == self.closing[progress.num_forced]:
            if progress.num_forced + 1 == len(self.closing):
                return Progress(False, progress.num_tokens, end=due)
            return progress._replace(num_forced=progress.num_forced + 1, end=due)
        tail = self._tail(progress, token)
        # Only the author of a prompt can break off a closing text. It then counts as thought.
        written = "".join(map(self.piece, self.closing[: progress.num_forced]))
        if self.end in written:
            return self._answer(Progress(False, progress.num_tokens, end=due), token)
        count = progress.num_tokens + progress.num_forced + 1
        if not progress.tail and self.piece(token).isspace():
            count -= 1
        if self.end in (text := "".join(tail)):
            begin = text.rindex(self.end)
            num_marker = sum(end > begin for end in accumulate(map(len, tail)))
            return Progress(False, max(0, count - num_marker), end=ThoughtEnd.NATURAL)
        return Progress(True, count, end=None, tail=tail)

    def begin(self, prompt_ids: Sequence[int]) -> Progress:
        """The progress at the end of a prompt: within a thought if its last one is open."""
        pieces = [self.piece(token) for token in prompt_ids]
        opened = "".join(pieces).rfind(self.start)
        if opened < 0:
            return Progress(False)
        ends = accumulate(map(len, pieces))
        first = next(n for n, end in enumerate(ends, 1) if end >= opened + len(self.start))
        progress = Progress(True)
        for token in prompt_ids[first:]:
            progress = self.advance(progress, token)
        is_over = not self.eos_ids.isdisjoint(prompt_ids[first:])
        return progress if progress.thinking and not is_over else Progress(False)

    def constraints(self, grammar: Constraints | None) -> Constraints:
        """Makes the constraints of generations; ``grammar`` makes those of their answers."""

        def make(prompt_ids: Sequence[int], count: int) -> list[ThinkingConstraint]:
            answers = grammar(prompt_ids, count) if grammar else [None] * count
            return self.samples(prompt_ids, answers)

        return make

    def samples(
        self, prompt_ids: Sequence[int], answers: Sequence[Constraint | None]
    ) -> list[ThinkingConstraint]:
        """The constraints of the samples of a prompt, with the grammars of their answers."""
        begin, rule = self.begin(prompt_ids), self
        if self.opening and (self.budget == 0 or self._is_closed(prompt_ids)):
            rule = replace(self, opening=())
        return [ThinkingConstraint(rule, begin, answer) for answer in answers]

    def _is_closed(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with a closing marker: there is to be no thought."""
        text = "".join([self.piece(token) for token in prompt_ids[-2 * len(self.end) :]])
        return text.rstrip().endswith(self.end)

    def _answer(self, progress: Progress, token: int) -> Progress:
        """Advance outside of a thought, where a marker may open one."""
        count = progress.num_answered + 1
        tail = self._tail(progress, token)
        may_open = self.opening is None or (progress.end is None and count <= len(self.opening))
        if may_open and self.start in "".join(tail):
            return Progress(True, progress.num_tokens)
        return progress._replace(num_answered=count, tail=tail)

    def _tail(self, progress: Progress, token: int) -> tuple[str, ...]:
        piece, size = self.piece(token), max(len(self.start), len(self.end))
        return (*progress.tail, piece)[-size:] if piece else progress.tail


class ThinkingConstraint:
    """A ``Constraint`` that keeps to a ``ThinkingRule``, and to a grammar after the thought.
    ``begin`` is the progress at the end of the prompt.
    """

    def __init__(self, rule: ThinkingRule, begin: Progress, grammar: Constraint | None) -> None:
        self._rule, self._begin, self._grammar = rule, begin, grammar
        self._path: list[int] = []
        """The tokens of the last query that had new ones."""
        self._states, self._first = [begin], 0
        """The progress after ``_first`` tokens of the path, and after each further one."""

    def mask(self, output: Sequence[int]) -> NDArray[np.uint8] | None:
        """Which tokens may come after ``output``; see ``Constraint``."""
        output = list(output)
        progress, rule = self.progress(output), self._rule
        if rule.due(progress):
            return self._only([rule.closing[progress.num_forced]])
        if self._grammar is None:
            return None
        if progress.thinking:
            return ~self._only(rule.never)
        mask = self._grammar.mask(output[len(output) - progress.num_answered :])
        if mask is not None and (token := self._opening(output)) is not None:
            return mask | self._only([token])
        return mask

    def is_complete(self, output: Sequence[int]) -> bool:
        """Whether no text may follow ``output``; see ``Constraint``."""
        if self._grammar is None:
            return False
        output = list(output)
        progress = self.progress(output)
        if progress.thinking:
            return False
        answer = output[len(output) - progress.num_answered :]
        if not answer and output:
            return False  # the grammar does not accept the empty output alone
        try:
            return self._grammar.is_complete(answer)
        except ParameterError:
            if self._opening(output) is not None:
                return False
            raise

    def progress(self, output: Sequence[int]) -> Progress:
        """The progress after ``output``. Prefixes that share most tokens cost little."""
        size, shared = len(output), self._shared(output)
        if shared < self._first:
            self._path, self._states, self._first, shared = [], [self._begin], 0, 0
        if size > shared:
            del self._path[shared:], self._states[shared - self._first + 1 :]
            for token in output[shared:]:
                self._path.append(token)
                self._states.append(self._rule.advance(self._states[-1], token))
                if len(self._states) > 2 * STATES:
                    del self._states[:STATES]
                    self._first += STATES
        return self._states[size - self._first]

    def output(self, output: Sequence[int]) -> ThinkingOutput:
        """The state of the thought after ``output``, for the caller."""
        progress = self.progress(output)
        return ThinkingOutput(progress.num_tokens, progress.end)

    def _shared(self, output: Sequence[int]) -> int:
        path, size = self._path, min(len(self._path), len(output))
        if path[:size] == output[:size]:
            return size
        return next(index for index in range(size) if path[index] != output[index])

    def _opening(self, output: list[int]) -> int | None:
        """The token with which an output may go on to open a thought under a grammar."""
        opening = self._rule.opening or ()
        size = len(output)
        begun = size < len(opening) and list(opening[:size]) == output
        return opening[size] if begun and not self._begin.thinking else None

    def _only(self, tokens: Any) -> NDArray[np.uint8]:
        bits = np.zeros(self._rule.vocab_size, np.bool_)
        bits[list(tokens)] = True
        return np.packbits(bits, bitorder="little")


class ThinkingBudgets:
    """Makes the rules of requests to one model, whose logits are ``vocab_size`` wide."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)

    @functools.cached_property
    def markers(self) -> tuple[str, str] | None:
        """What opens and closes a thought; None: the model has no such markers."""
        return self._tokenizer.thinking_markers

    def check(self, params: SamplingParams) -> None:
        """Raises ParameterError if the model has no markers or ``thinking_end`` closes no
        thought.
        """
        self.rule(params)

    def rule(self, params: SamplingParams) -> ThinkingRule | None:
        """The rule of a request; None without a limit. Raises as ``check``."""
        if not params.limits_thinking:
            return None
        if self.markers is None:
            raise ParameterError(
                "this model has no thoughts to limit",
                "neither its vocabulary nor its chat template has markers such as "
                f"{' '.join(MARKERS[0])}",
                "Leave out thinking_budget and thinking_soft, and use max_tokens",
            )
        start, end = self.markers
        guided = params.guided_decoding is not None
        return ThinkingRule(
            start,
            end,
            closing=self._closing(params.thinking_end, end),
            budget=params.thinking_budget,
            soft=params.thinking_soft,
            piece=self._tokenizer.piece,
            opening=tuple(self._tokenizer.encode_more(start)) if guided else None,
            eos_ids=self._eos_ids,
            vocab_size=self._vocab_size,
            never=frozenset() if params.ignore_eos else self._eos_ids,
        )

    def _closing(self, closing: str | tuple[int, ...] | None, end: str) -> tuple[int, ...]:
        if closing is None:
            closing = end + self._space_after(end)
        ids = tuple(self._tokenizer.encode_more(closing)) if isinstance(closing, str) else closing
        if end not in "".join(map(self._tokenizer.piece, ids)):
            raise ParameterError(
                "thinking_end does not end the thought",
                f"it is {closing!r}, without the model's marker {end}",
                f"Put {end} after it",
            )
        if any(token >= self._vocab_size for token in ids):
            raise ParameterError(
                "thinking_end cannot be written",
                f"some of its tokens {list(ids)} are not among the model's {self._vocab_size}",
                "Use another text",
            )
        return ids

    def _space_after(self, end: str) -> str:
        """The line ends that the chat template writes after the closing marker."""
        line_ends = re.findall(rf"{re.escape(end)}((?:\\n|\n)*)", self._tokenizer.template_text)
        return max((lines.replace("\\n", "\n") for lines in line_ends), key=len, default="")
