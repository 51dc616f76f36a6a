r"""Answer spaces: how the answer of a sample is extracted, and which answers mean the same.

A vote takes one by name or as an object: ``MajorityVoteController(..., answer_space="choice")``.

==============  ===================================  ==============================================
name            the answer                           two mean the same if
==============  ===================================  ==============================================
``math``        by a rule, ``answer_extraction``     they are mathematically equal
``choice``      the last letter of a choice          it is the same letter
``json``        the last JSON object or array        they are equal, whatever the order of keys
``tool_calls``  the functions that a message calls   names and arguments are equal, in their order
``text``        the whole text                       it is the same but for spaces around it
==============  ===================================  ==============================================

``CodeAnswers(inputs)`` has no name, as it needs inputs: programs mean the same if they print the
same for each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from forethought.answers.answer_extraction import (
    ANSWER_RULE,
    AnswerRule,
    ExtractedAnswer,
    extract_answer,
    without_open_thought,
)
from forethought.answers.answers import (
    Equivalence,
    MathEquivalence,
    PairwiseEquivalence,
    TextEquivalence,
)
from forethought.answers.code_blocks import program_in
from forethought.errors import ParameterError, UnknownNameError
from forethought.sandbox.sandbox import Sandbox
from forethought.scaffolding.messages import AssistantMessage
from forethought.scaffolding.settings import FUNCTION, TEXT, validated
from forethought.scaffolding.task import ChatTask, GenerationTask


@runtime_checkable
class AnswerSpace(Protocol):
    """Extracts the answer of a sample, and decides which answers mean the same.

    Attributes:
        equivalence: decides which answers mean the same.
    """

    equivalence: Equivalence | PairwiseEquivalence

    def answer_of(self, task: GenerationTask) -> str | None:
        """The answer of a sample that has ended; None: it has none, and does not vote."""


class TextAnswers:
    """Answers that a function finds in the text of a sample.

    Args:
        extract: finds the answer in a text; None: it has none. By default it is the whole text.
        equivalence: decides which answers mean the same; by default equal text does.
    """

    def __init__(
        self,
        extract: Callable[[str], str | None] = str.strip,
        equivalence: Equivalence | PairwiseEquivalence | None = None,
    ) -> None:
        self.extract = extract
        self.equivalence = TextEquivalence() if equivalence is None else equivalence

    def answer_of(self, task: GenerationTask) -> str | None:
        """The result of ``extract``; raises ParameterError if it is neither text nor None."""
        answer = None if task.output_str is None else self.extract(task.output_str)
        if not isinstance(answer, str | None):
            raise ParameterError(
                "the answer that was extracted is no text",
                f"extract_answer returned {answer!r:.80}",
                "Return a text, or None where there is no answer",
            )
        return answer


class MathAnswers:
    """Final answers that a rule finds in the text of a sample, as mathematics.

    Args:
        answer: the rule, see ``answer_extraction``.

    Raises:
        ParameterError: there is no such rule.
    """

    equivalence: Equivalence | PairwiseEquivalence = MathEquivalence()

    def __init__(self, answer: AnswerRule = "auto") -> None:
        self.answer = validated("answer", answer, ANSWER_RULE)

    def extracted(self, task: GenerationTask) -> ExtractedAnswer | None:
        """The answer of a sample, and the rule that extracts it."""
        is_cut = task.finish_reason == "length"
        return extract_answer(task.output_str, self.answer, is_cut=is_cut)

    def answer_of(self, task: GenerationTask) -> str | None:
        """The answer alone."""
        extracted = self.extracted(task)
        return None if extracted is None else extracted.text


class ChoiceAnswers(TextAnswers):
    r"""The letter of a choice.

    The last ``\boxed{B}``; else, after the thought, the letter that follows the last "answer is" or
    "answer:", else the last ``(B)``, else a text that is one letter.

    Args:
        letters: of the choices, as they are written.

    Raises:
        ParameterError: there is none.
    """

    def __init__(self, letters: str = "ABCDE") -> None:
        kind = f"[{re.escape(validated('letters', letters, TEXT))}]"
        self._patterns = [
            re.compile(
                rf"(?i:answer\s*(?:is|:)?[\s:*]*(?:(?:option|choice)\s*)?)[\"'$*]*\(?({kind})\b"
            ),
            re.compile(rf"\(({kind})\)"),
            re.compile(rf"^[\s*]*({kind})[\s.)*]*$"),
        ]
        self._boxed = re.compile(rf"^\W*(?:\\(?:text\w*|math[a-z]+)\s*\{{)?\W*({kind})\b")
        super().__init__(self._letter)

    def _letter(self, text: str) -> str | None:
        boxed, visible = extract_answer(text, "boxed"), without_open_thought(text)
        letters = [] if boxed is None else self._boxed.findall(boxed.text)
        for pattern in self._patterns:
            letters = letters or pattern.findall(visible)
        return letters[-1] if letters else None


class JsonEquivalence:
    """JSON texts are the same if their values are: 1 and 1.0 are equal, 1 and true are not."""

    def canonical_form(self, answer: str) -> Hashable:
        """The value as something hashable; the text, if that is nested too deeply."""
        try:
            return _hashable(json.loads(answer))
        except RecursionError:
            return "text", answer.strip()


class JsonAnswers(TextAnswers):
    """The last JSON object or array in the text or after its thought, the outermost one."""

    def __init__(self) -> None:
        super().__init__(lambda text: last_json(without_open_thought(text)), JsonEquivalence())


class ToolCallAnswers:
    """The tools that a chat's message calls, or a text in ``<tool_call>`` marks.

    A message without calls does not vote, nor does one whose arguments are no JSON.
    """

    equivalence: Equivalence | PairwiseEquivalence = JsonEquivalence()
    _MARKED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

    def answer_of(self, task: GenerationTask) -> str | None:
        """The calls as JSON: a list of names and arguments."""
        try:
            calls = list(self._calls(task))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return json.dumps(calls) if calls else None

    def _calls(self, task: GenerationTask) -> list[tuple[str, Any]]:
        message = task.messages[-1] if isinstance(task, ChatTask) and task.messages else None
        if isinstance(message, AssistantMessage) and message.tool_calls:
            called = [call.function for call in message.tool_calls]
            return [(call.name, json.loads(call.arguments or "{}")) for call in called]
        marked = map(json.loads, self._MARKED.findall(task.output_str or ""))
        return [(str(call["name"]), call.get("arguments", {})) for call in marked]


class CodeAnswers(TextAnswers):
    """Python programs, run in a sandbox: they mean the same if they print the same.

    The program is the last fenced block of the text, or else the whole text, see ``program_in``. It
    reads an input as its standard input. Its result is its output without spaces at the end of
    lines; a failure or timeout on an input counts as an output. A program that fails on every input
    means the same as no other.

    Args:
        inputs: standard inputs to run each program on, at least one.
        sandbox: runs them; None: one with its default limits.

    Raises:
        ParameterError: there is no input.
        IsolationError: programs cannot be isolated on this machine.
    """

    def __init__(self, inputs: Sequence[str], sandbox: Sandbox | None = None) -> None:
        self._inputs = tuple(inputs) if not isinstance(inputs, str) else ()
        if not self._inputs:
            raise ParameterError(
                "CodeAnswers takes inputs", f"got {inputs!r}", "Give a list of at least one text"
            )
        self._sandbox = Sandbox() if sandbox is None else sandbox
        super().__init__(self._program, self)

    def canonical_form(self, answer: str) -> Hashable:
        """The output of the program for each input; takes as long as the program does."""
        results = [self._sandbox.run(answer, stdin) for stdin in self._inputs]
        if all(result.status != "ok" for result in results):
            return ("fails", answer)
        return tuple(
            _lines(result.stdout) if result.status == "ok" else (result.status,)
            for result in results
        )

    def _program(self, text: str) -> str | None:
        program = program_in(text)
        return None if program is None else program.code


_SPACES: Mapping[str, Callable[[], AnswerSpace]] = {
    "math": MathAnswers,
    "choice": ChoiceAnswers,
    "json": JsonAnswers,
    "tool_calls": ToolCallAnswers,
    "text": TextAnswers,
}


def answer_space(
    space: AnswerSpace | str,
    answer: AnswerRule = "auto",
    extract_answer: Callable[[str], str | None] | None = None,
) -> AnswerSpace:
    """The space itself, or the one of that name.

    Args:
        space: an object or a name.
        answer: the rule by which ``"math"`` extracts answers.
        extract_answer: extracts the answer of a text, in place of the space's rule.

    Raises:
        UnknownNameError: there is none of this name.
        ParameterError: it is neither, or ``answer`` has no effect beside the others.
    """
    validated("answer", answer, ANSWER_RULE)
    if answer != "auto" and (space != "math" or extract_answer is not None):
        raise ParameterError(
            "answer goes with the answer space 'math' alone",
            f"got answer={answer!r}, and something else finds the answers",
            "Leave one of them out",
        )
    chosen = _space(space, answer)
    if extract_answer is None:
        return chosen
    return TextAnswers(validated("extract_answer", extract_answer, FUNCTION), chosen.equivalence)


def _space(space: AnswerSpace | str, answer: AnswerRule) -> AnswerSpace:
    if isinstance(space, str):
        if space not in _SPACES:
            raise UnknownNameError("answer space", space, _SPACES)
        return MathAnswers(answer) if space == "math" else _SPACES[space]()
    if isinstance(space, type) or not isinstance(space, AnswerSpace):
        raise ParameterError(
            "invalid answer_space",
            f"got {space!r}",
            "Give a name, or an object with answer_of(task) and an equivalence",
        )
    return space


def rule_of(space: AnswerSpace, task: GenerationTask) -> str | None:
    """The rule that extracts the answer of a sample; None where the space has no rules."""
    extracted = space.extracted(task) if isinstance(space, MathAnswers) else None
    return None if extracted is None else extracted.rule


def last_json(text: str) -> str | None:
    """The last JSON object or array that is inside no other; None without one.

    Brackets that begin none may take ``_MAX_READ`` characters of reading, then the search ends.
    """
    decoder, result, position, num_read = json.JSONDecoder(), None, 0, 0
    while num_read < _MAX_READ and (begin := _OPENING.search(text, position)):
        try:
            _, position = decoder.raw_decode(text, begin.start())
            result = text[begin.start() : position]
        except json.JSONDecodeError as error:
            position = begin.end()
            # The error counts the lines of the text before it, which is quick.
            num_read += 1 + error.pos - begin.start() + error.pos // 16
        except (ValueError, RecursionError):
            position = begin.end()
            num_read += _MAX_READ // 100
    return result


_OPENING = re.compile(r"[{\[]")
_MAX_READ, _MAX_NESTING = 2_000_000, 100


def _hashable(value: Any, depth: int = 0) -> Hashable:
    if depth > _MAX_NESTING:
        raise RecursionError
    match value:
        case dict():
            members = value.items()
            return "object", frozenset((name, _hashable(one, depth + 1)) for name, one in members)
        case list():
            return "array", tuple(_hashable(one, depth + 1) for one in value)
        case bool() | None | str():
            return type(value).__name__, value
    number: Hashable = value
    return number


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.rstrip() for line in text.rstrip().split("\n"))
