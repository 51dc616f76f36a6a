r"""Finding the final answer in a text.

=============  =================================================================================
rule           the answer
=============  =================================================================================
``"boxed"``    the last ``\boxed{...}`` or ``\fbox{...}``
``"hash"``     what follows the last ``####``, as in GSM8K
``"phrase"``   what follows the last "answer is" or "answer:", up to the end of the sentence
``"number"``   the last number
``"auto"``     by the first of these rules, in this order, that finds one
=============  =================================================================================

A correction comes later, so of several places the last counts. What a model thinks is no answer but
for a box: the other rules read what follows the thought. A text that was cut at its limit has no
last number, since the one that it ends with belongs to the way, and its last word counts for no
other rule, as there may be more of it.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from forethought.answers.canonical_form import with_decimal_point
from forethought.config.thoughts import after_thought, markers_in

AnswerRule = Literal["auto", "boxed", "hash", "phrase", "number"]
ANSWER_RULE: TypeAdapter[AnswerRule] = TypeAdapter(AnswerRule)


class ExtractedAnswer(NamedTuple):
    """An answer, and the rule that finds it."""

    text: str
    rule: str


def extract_answer(
    text: str | None, rule: AnswerRule = "auto", *, is_cut: bool = False
) -> ExtractedAnswer | None:
    """The final answer of a text; None if there is none.

    Args:
        text: of the model.
        rule: where the answer is looked for.
        is_cut: whether the text ends at its limit of tokens.
    """
    names = _RULES if rule == "auto" else (rule,)
    for name in names:
        answer = _by_rule(name, text or "", is_cut)
        if answer:
            return ExtractedAnswer(answer, name)
    return None


_RULES: tuple[Literal["boxed", "hash", "phrase", "number"], ...] = (
    "boxed",
    "hash",
    "phrase",
    "number",
)


_TAIL = 10_000
"""Characters in which the last number is looked for."""
_PHRASE_LENGTH, _MAX_PHRASES = 1000, 100
"""Characters after a phrase that are read, and phrases from the last one on."""


def _by_rule(rule: str, text: str, is_cut: bool) -> str | None:
    if rule == "boxed":
        return _last_box(text)
    visible = without_open_thought(text)
    if is_cut and not text[-1:].isspace():
        visible = _LAST_WORD.sub("", visible)
    if rule == "hash":
        return _after_hashes(visible)
    if rule == "phrase":
        return _after_phrase(visible)
    return None if is_cut or _BOX.search(visible) else _last_number(visible[-_TAIL:])


_LAST_WORD = re.compile(r"(?<![^\s$*])[^\s$*]+\Z")
"""What may go on after the limit: 12 of 125."""


def without_thought(text: str | None) -> str:
    """What follows the last thought in a text; all of it where none is closed."""
    return after_thought(text or "").strip()


def without_open_thought(text: str) -> str:
    """What follows the thought, without calls of tools; nothing if the text ends in a thought."""
    visible, markers = without_thought(text), markers_in(text)
    if markers is not None:
        visible = visible.partition(markers[0])[0]
    return _TOOL_CALL.sub(" ", visible) if "<tool_call>" in visible else visible


_TOOL_CALL = re.compile(
    r"<tool_call>(?:(?!<tool_call>).)*?(?:</tool_call>|\Z|(?=<tool_call>))", re.DOTALL
)


# ---- boxes ---------------------------------------------------------------------------------------

_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s*\{|(?![A-Za-z])\s*(?=[-+]?\.?\d|\$+[^\s$]|\\[A-Za-z(]|[A-Za-z]\b(?!\s+[a-z])))"
)


def extract_answer_from_boxed(text: str) -> str | None:
    r"""The content of the last closed box that is not empty; None without one."""
    boxes = list(_BOX.finditer(text))
    return _content(text, boxes[-1]) if boxes else None


def _last_box(text: str) -> str | None:
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content = _content(text, box, end)
        if content is None:  # a box around this one is not closed either
            end = box.start()
        if content and content not in {"...", r"\dots", r"\ldots", r"\cdots"}:
            return content
    return None


def _content(text: str, box: re.Match[str], limit: int | None = None) -> str | None:
    if text[box.end() - 1] != "{":
        return _unbraced(text[box.end() : box.end() + _PHRASE_LENGTH])
    end = unpaired_brace(text, box.end(), limit)
    return None if end is None else text[box.end() : end].strip()


def _unbraced(text: str) -> str | None:
    r"""The content of a box without braces, as in ``\boxed 7`` and ``\boxed $7$``."""
    if span := _MATH_SPAN.match(text):
        return _bare(_span_content(span))
    words = text.partition("$")[0].split()
    return words[0][: unpaired_brace(words[0])] if words else None


def unpaired_brace(text: str, begin: int = 0, end: int | None = None) -> int | None:
    r"""Index of the first ``}`` without its ``{``; None if there is none. ``\}`` is text."""
    depth, position = 0, begin
    limit = len(text) if end is None else end
    while position < limit:
        match text[position]:
            case "\\":
                position += 1
            case "{":
                depth += 1
            case "}":
                if depth == 0:
                    return position
                depth -= 1
        position += 1
    return None


# ---- marks and phrases ---------------------------------------------------------------------------

FINAL_ANSWER = r"The final answer is (.+)$"
_HASHES = re.compile(r"####[ \t]*([^#\n]+)")
_HEADING = re.compile(r"\d+[.)]\s|[A-Za-z]+ \d+\s*:|.*:\s*$")
"""What makes a line with ``####`` a heading of Markdown: ``#### Step 2: Add``."""
_PHRASE = re.compile(
    r"""(?<![A-Za-z])answers?(?![A-Za-z])
        (?:\s+(?:to|of|for)\s+(?:the|this|your|our)\s+(?:\w+\s+){0,2}\w+)?
        (?:\s*+[*_]{1,3})?
        (?: \s*(?: \s(?:is|are|was|(?:would|will|should|must)\s+be|equals)\b
                 | [:=\N{FULLWIDTH COLON}] )+
          | [ \t]*+[*_]*+[ \t]*+\n\s*+(?=[*_$\\(\d+-]) )
        (?:\s+(?:that|simply|just|thus|therefore|now|exactly|equal\s+to|given\s+by)\b)*
        \s*:?\s*
    """,
    re.IGNORECASE | re.VERBOSE,
)
_MATH_SPAN = re.compile(
    r"\$\$(.+?)\$\$|\$(?=\S)([^$\n]+?)(?<=\S)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_EMPHASIS = re.compile(r"(\*{1,3}|_{2,3}|`+)(?=\S)(.+?)(?<=\S)\1")
_SENTENCE_END = re.compile(
    r"[.!?;](?=\s|$)|\n|,?\s+(?:because|since|so|which|as|where|and\s+(?:the|this|we)|but|making|if)\s"
    r"|\s\(|\s[-\N{EN DASH}\N{EM DASH}]+\s(?=[A-Za-z]{2})",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(r"(?:not|unclear|unknown|wrong|correct|incorrect|below|above)\b", re.I)
_CHOICE = re.compile(r"\(?[A-J][).:] ")
_WORD_ANSWER = re.compile(r"[\w'\u2019-]+(?:\s+[\w'\u2019-]+){0,4}")


def extract_answer_with_regex(text: str, pattern: str = FINAL_ANSWER) -> str | None:
    """The first group of the last match of ``pattern`` (lines apart); None without a match."""
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    return matches[-1].group(1).strip() if matches else None


def _after_hashes(text: str) -> str | None:
    """What follows the last ``####`` that begins no heading."""
    for mark in reversed(list(_HASHES.finditer(text))):
        content = _bare(mark[1])
        is_last = not text[mark.end() :].strip()
        begins_as_value = re.match(r"[-+$\\(\[{.\d\N{EURO SIGN}\N{POUND SIGN}]", content)
        if content and not _HEADING.match(content) and (begins_as_value or is_last):
            return content
    return None


def _after_phrase(text: str) -> str | None:
    """The answer after the last phrase that announces one."""
    for phrase in reversed(deque(_PHRASE.finditer(text), _MAX_PHRASES)):
        answer = _stated(text[phrase.end() : phrase.end() + _PHRASE_LENGTH])
        if answer is not None:
            return answer
    return None


def _stated(text: str) -> str | None:
    """The answer that a text begins with; None if it states none."""
    text = with_decimal_point(text)
    text = re.sub(r"^[*_`\s]+", "", text) if not _EMPHASIS.match(text) else text
    if match := _MATH_SPAN.match(text):
        return _bare(_span_content(match))
    if match := _EMPHASIS.match(text):
        return _bare(match[2])
    sentence = _with_signs(_bare(_sentence(text)))
    if not sentence or _NO_ANSWER.match(sentence):
        return None
    if _SEVERAL.fullmatch(sentence) or _CHOICE.match(sentence) or _COMPOSED.match(sentence):
        return sentence
    if number := _NUMBER_FIRST.match(sentence):
        return number[0].strip("$ ")
    if span_inside := list(_MATH_SPAN.finditer(sentence)):
        return _bare(_span_content(span_inside[-1]))
    if re.search(r"[\\^=+*/(\[{<>|\N{SQUARE ROOT}\u00b2\u00b3]", sentence) or not re.search(
        r"\d", sentence
    ):
        is_short = _WORD_ANSWER.fullmatch(sentence) or re.search(
            r"[\\^=+*/(\[{<>|,\N{SQUARE ROOT}\u00b2\u00b3]", sentence
        )
        return sentence if is_short else None
    return _last_number(sentence)


def _sentence(text: str) -> str:
    """The text up to the end of its first sentence or clause; brackets are not split."""
    depth = 0
    for position, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth <= 0 and (match := _SENTENCE_END.match(text, position)) and position:
            return text[: match.start()]
    return text


def _span_content(span: re.Match[str]) -> str:
    return next(group for group in span.groups() if group)


def _bare(text: str) -> str:
    """The text without the marks and stops around it."""
    text = text.strip()
    while True:
        shorter = text.strip("*_`~ \t\"'\u201c\u201d").rstrip(".,;:!? ")
        if match := _MATH_SPAN.fullmatch(shorter):
            shorter = _span_content(match).strip()
        if shorter == text:
            return text
        text = shorter


# ---- numbers -------------------------------------------------------------------------------------

_SCALE = r"(?: (?:hundred|thousand|million|billion|trillion|dozen)\b)?"
_FRACTIONS = "\N{VULGAR FRACTION ONE HALF}\N{VULGAR FRACTION ONE QUARTER}" + (
    "\N{VULGAR FRACTION THREE QUARTERS}\N{VULGAR FRACTION ONE THIRD}\N{VULGAR FRACTION TWO THIRDS}"
)
_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?"
    r"|(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|\.\d+)"
)
"""Also with the separators of other countries: ``1.234,56``, ``1.000.000``, ``12,34,567``."""
_GROUP = r"\s*(?:\{\s*-?\d+\s*\}|\d)\s*"
_LATEX = rf"\\[dt]?frac(?:{_GROUP}){{2}}|\d*\s?\\sqrt(?:\[\d\])?(?:\s*\{{\s*\d+\s*\}}|\s*\d)"
_CLOCK = r"\d{4}-\d\d-\d\d|\d+:\d+(?::\d+)?"
"""A date, a time, or a ratio."""
_POWER = r"\s?(?:x|\N{MULTIPLICATION SIGN}|\\times|\\cdot|\*)\s?10\s?\^\s?(?:\{\s?-?\d+\s?\}|-?\d+)"
_VALUE = (
    rf"{_LATEX}|{_CLOCK}|\d+(?: \d+/\d+(?![\d/])|\s?[{_FRACTIONS}])|[{_FRACTIONS}]"
    rf"|{_DIGITS}(?:{_POWER}|\^(?:\{{-?\d+\}}|-?\d+)|(?:\s?/\s?\d+(?![\d/]))?"
    rf"(?:\s?\\?%|\s?percent\b)?{_SCALE})"
)
_UNIT = r"(?:[mck]?m|m?l|L|[mk]?g|lbs?|oz|ft|mph|hrs?|h|min|s|sec)\b"
_MINUS = "\N{MINUS SIGN}\N{EN DASH}"
_CURRENCY = r"(?:\\?[$\N{EURO SIGN}\N{POUND SIGN}]\s?)?"
_NUMBER = re.compile(
    rf"(?<![A-Za-z0-9_.^{{}}\\])(?P<sign>[-+{_MINUS}]?{_CURRENCY})(?P<value>{_VALUE})"
    rf"(?:(?![A-Za-z0-9_^]|\.\d|,\d{{3}})|(?={_UNIT}))"
    rf"|(?<=[{{}}])(?P<braced>{_VALUE})(?![A-Za-z0-9_^]|\.\d)"
)
_NUMBER_FIRST = re.compile(
    rf"[-+{_MINUS}]?{_CURRENCY}(?:{_VALUE})(?=$|\s+[A-Za-z]|[,;:)](?!\s?[-\d])|\s*\()"
    r"(?!\s+(?:[aApP]\.?[mM]|to|and|or|x|times|plus|minus|over|divided)\b)"
)
_SEVERAL = re.compile(
    rf"[-+]?(?:{_VALUE})(?:(?:,? (?:and|or|to) |, ?)[-+]?(?:{_VALUE}))+"
    r"|\d{1,2}(?::\d\d)? ?[aApP]\.?[mM]|\d{1,3}(?: \d{3})+"
)
"""Several numbers, a time, or one number in groups."""
_COMPOSED = re.compile(
    r"(?:half|twice|double|triple|between|(?:a|one) (?:half|third|quarter))\b(?: of)? "
    rf"{_CURRENCY}\d|(?:{_VALUE}) (?:squared|cubed|and an? (?:half|third|quarter))\b"
    rf"|(?:{_VALUE}) (?:times|plus|minus|over|divided by) {_CURRENCY}\d"
    rf"|(?:{_VALUE}) [A-Za-z]+,? and (?:{_VALUE}) [A-Za-z]+$"
    rf"|(?:{_VALUE}) (?:days?|hours?|hrs?|h|minutes?|mins?|feet|ft) (?:{_VALUE}) [A-Za-z]+$",
    re.IGNORECASE,
)
"""What words make of a number, or of several quantities: no number in it is the answer."""
_SIGN_WORD = re.compile(rf"\b(minus|negative) {{1,4}}(?={_CURRENCY}[.\d])", re.IGNORECASE)
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3}(?!\d))")
_UNDERLINED = re.compile(r"(?<![A-Za-z0-9_])(_{1,2})(?=\S)([^_\n]{1,100})(?<=\S)\1(?![A-Za-z0-9_])")
_LIST_MARK = re.compile(r"^[ \t]*(?:[-*>][ \t]+)?\**\d{1,3}[.)](?=\s)", re.MULTILINE)


def _with_signs(text: str) -> str:
    """The text with signs that it has in words, as in "minus 5"; not with those of differences."""
    return _SIGN_WORD.sub(_sign_of, text)


def _sign_of(word: re.Match[str]) -> str:
    before = word.string[max(0, word.start() - 8) : word.start()].rstrip()
    is_operand = re.search(r"[\d)}\]%]$|(?<![A-Za-z])[A-Za-z]$", before)
    return word[0] if is_operand and word[1].lower() == "minus" else "-"


def _last_number(text: str) -> str | None:
    """The last number, with its sign, fraction, percentage or scale."""
    text = _with_signs(text)
    text = _UNDERLINED.sub(r"\2", _GROUPED.sub(",", with_decimal_point(text)))
    text = _LIST_MARK.sub(lambda mark: " " * len(mark[0]), text)
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if last["braced"]:
        return last["braced"]
    sign = "-" if last["sign"][:1] in {"-", *_MINUS} else ""
    before = text[: last.start()].rstrip()
    is_difference = sign and before[-1:].isalnum() and text[last.start() - 1 :][:1] != " "
    return ("" if is_difference else sign) + last["value"].strip()
