r"""The canonical form of an answer: two answers mean the same if their forms are equal.

A form is a function of one answer alone, so equal forms make classes: being the same is transitive
whatever is compared, and a class is found with one hash look-up. What a form is:

==========================  ====================================================================
``1/2``  ``0.50``  ``50\%``  the number one half; a percentage is a hundredth, so never ``50``
``12,345``  ``12\,345``      the number 12345; ``1,2`` is a list, and in brackets a comma parts
``1.234,56``  ``12,34,567``  the numbers 1234.56 and 1234567, where nothing else can be meant
``0.\dot{3}``  ``0.333...``  one third; so is ``0.(3)``
``x = 5``  ``5 = y``  ``5``  the number five: the name on one side of an equation is left out
``5 cm``  ``5\text{ m}``     the number five: a unit, a degree or a currency is left out
``36 trees``  ``2 million``  the numbers 36 and 2000000: what is counted is left out, scales count
``yes``  ``\text{Yes}``      the word, small letters; ``(A)``, ``A.`` and ``(A) 5`` are choice ``a``
``1, 2``  ``\{2, 1\}``       a set; so are ``1 or 2``, ``\pm 1`` and what ``\cup`` joins
``x=1, y=2``                 a set of named values, since there are several names
``(1, 2)``  ``[1, 2)``       values in order, with their brackets: a point, vector or interval
``1 < x \le 2``  ``x > 1``   the interval ``(1, 2]``, ``(1, \infty)``
``x+1``  ``\sqrt{8}``        a formula: its values at a few points, by ``arithmetic``
``\sin x``  ``\int_0^1 x``    a formula: its values at a few points, by ``sympy_process``
==========================  ====================================================================

Anything else stands for itself as text. An element of a set or of a list has such a form in turn.
All but the last takes less than a millisecond and no other library.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from forethought.answers.arithmetic import exact_value
from forethought.answers.brackets import brackets, matches_outside, split_outside, unbraced
from forethought.answers.exact_value import (
    ExactValue,
    NotExact,
    TooLarge,
    relation_form,
    value_form,
)

_LONGEST = 1000
"""Characters; longer answers are compared as text."""
_DEEPEST = 10
"""Brackets in brackets; what lies deeper is compared as text."""

Form = Hashable
"""A ``Fraction``, a text, a ``Formula``, or a tuple of a kind and forms."""


class Formula(NamedTuple):
    """A part of a form that only sympy can bring to its canonical form."""

    text: str


_UNCOMPARED = "uncompared"


def uncompared(text: str) -> Form:
    """The form of a formula that takes too much work: its text."""
    return _UNCOMPARED, text


def is_uncompared(form: Form) -> bool:
    """Whether a part of ``form`` is a text in place of the value of a formula."""
    if isinstance(form, tuple) and form[:1] == (_UNCOMPARED,):
        return True
    return isinstance(form, tuple | frozenset) and any(map(is_uncompared, form))


def canonical_form(answer: str) -> Form:
    """The form of ``answer``; formulas in it are left as ``Formula``."""
    if len(answer) > _LONGEST:
        return answer.strip()
    return _read(_tidy(answer), 0)


def formulas(form: Form) -> Iterator[str]:
    """The texts of all formulas in ``form``."""
    if isinstance(form, Formula):
        yield form.text
    elif isinstance(form, tuple | frozenset):
        for part in form:
            yield from formulas(part)


def completed(form: Form, forms: Mapping[str, Form]) -> Form:
    """``form`` with its formulas replaced by their ``forms``, or by their text."""
    if isinstance(form, Formula):
        return forms.get(form.text, form.text)
    if isinstance(form, frozenset):
        return frozenset(completed(part, forms) for part in form)
    if isinstance(form, tuple):
        parts = tuple(completed(part, forms) for part in form)
        return _set(parts[1]) if parts[0] == "set" and isinstance(parts[1], frozenset) else parts
    return form


# ---- spelling ------------------------------------------------------------------------------------

_SPELLINGS = {
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\cfrac": "\\frac",
    "\\leqslant": "\\le ",
    "\\geqslant": "\\ge ",
    "\\leq": "\\le ",
    "\\geq": "\\ge ",
    "\\neq": "\\ne ",
    "\\lt": "<",
    "\\gt": ">",
    "<=": "\\le ",
    ">=": "\\ge ",
    "\\approx": "=",
    "\\lbrace": "\\{",
    "\\rbrace": "\\}",
    "\\langle": "(",
    "\\rangle": ")",
    "\\%": "%",
    "\\varnothing": "\\emptyset ",
    "\N{EMPTY SET}": "\\emptyset ",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{VULGAR FRACTION ONE HALF}": "\\frac{1}{2}",
    "\N{VULGAR FRACTION ONE THIRD}": "\\frac{1}{3}",
    "\N{VULGAR FRACTION TWO THIRDS}": "\\frac{2}{3}",
    "\N{VULGAR FRACTION ONE QUARTER}": "\\frac{1}{4}",
    "\N{VULGAR FRACTION THREE QUARTERS}": "\\frac{3}{4}",
    "\N{MULTIPLICATION SIGN}": "\\times ",
    "\N{MIDDLE DOT}": "\\cdot ",
    "\N{GREEK SMALL LETTER PI}": "\\pi ",
    "\N{INFINITY}": "\\infty ",
    "\N{PLUS-MINUS SIGN}": "\\pm ",
    "\N{LESS-THAN OR EQUAL TO}": "\\le ",
    "\N{GREATER-THAN OR EQUAL TO}": "\\ge ",
    "\N{NOT EQUAL TO}": "\\ne ",
    "\N{UNION}": "\\cup ",
    "\N{ELEMENT OF}": "\\in ",
}
_RAISED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_SUPERSCRIPT = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_ROOT = re.compile(r"\N{SQUARE ROOT} ?(\d+(?:\.\d+)?|[A-Za-z])?")
_COMMANDS = "|".join(
    re.escape(name) + (r"(?![A-Za-z])" if name[1:].isalpha() else "") for name in _SPELLINGS
)
_SPELLED = re.compile(_COMMANDS)
_SPACING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|q?quad)(?![A-Za-z])|(?<!\\)\\[,;:! ()\[\]]|\\?\$|[€£~]|\s+"
)
_CROSS = re.compile(r"(?<=\d) ?[xX] ?(?=10 ?\^)|(?<=\d) [xX] (?=\d)")
"""A letter in the place of a sign of multiplication: ``3 x 10^5``."""
_DECIMAL_COMMA = re.compile(
    r"(?<=\N{EURO SIGN})( ?\d+),(\d\d)(?!\d)|(?<![\d,.])(\d+),(\d\d)(?= ?\N{EURO SIGN})"
)
_ELLIPSIS = re.compile(
    r"(?<=\.)(\d{0,20}?)(?:(\d)\2{2,}|(\d{2,12}?)\3+)(?:\.\.\.|\N{HORIZONTAL ELLIPSIS}|\\l?dots)\W*"
)
_DEGREE = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|°|\\degree(?![A-Za-z])")
_GROUPED = re.compile(r"(?<=\d)\{,\}(?=\d{3})")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\*? ?\{([^{}]*)\}"
    r"(\^ ?(?:\{ ?[23] ?\}|[23]))?"
)
_UNITS = frozenset(
    re.findall(
        r"\w+",
        """
        mm cm dm km in ft yd mi inch inches foot feet yard yards mile miles meter meters metre
        metres centimeter centimeters kilometer kilometers millimeter millimeters mg kg lb lbs
        oz gram grams kilogram kilograms pound pounds ounce ounces ton tons ml liter liters
        litre litres gallon gallons ms sec secs second seconds min mins minute minutes hr hrs
        hour hours day days week weeks month months year years mph kph kmh hz khz mhz pa kpa kj
        kw kwh watt watts joule joules newton newtons volt volts amp amps mol moles degree
        degrees deg rad radian radians cent cents dollar dollars usd eur euro euros unit units
        sq square cubic people person students student ways times points items
    """,
    )
)
_LETTER_UNITS = frozenset("mgshljnwvakcf")
"""Units of one letter count only in ``\\text{}``: elsewhere the letter is a variable."""
_AFTER_NUMBER = re.compile(
    r"(.*[\d.})]) ?([A-Za-z]+(?:(?: ?/ ?| )[A-Za-z]+)*)(?:\^ ?(?:\{ ?[23] ?\}|[23]))?"
)


_COUNTED = re.compile(
    r"(.*(?:[\d})]|[mbtr]illion|thousand|hundred|dozen)) "
    r"((?:[A-Za-z]{3,}|of|in)(?:[ -](?:[A-Za-z]{3,}|of|in))*)"
)
"""A number and the names of what is counted."""
_NO_UNITS = frozenset(
    re.findall(
        r"\w+",
        """
        and than less more not percent below above under over minus plus times divided squared cubed
        dozen hundred thousand million billion trillion half halves third thirds quarter quarters
        fifths sixths eighths tenths hundredths factorial mod modulo sin cos tan cot sec csc log exp
        sqrt base out bce north south east west
    """,
    )
)
"""Words after a number that are no names of what is counted."""


def _tidy(answer: str) -> str:
    """The answer in one spelling, without spacing."""
    answer = with_decimal_point(answer.strip())
    if (ellipsis := _ELLIPSIS.search(answer)) and ellipsis.end() == len(answer):
        answer = _ELLIPSIS.sub(r"\1\\overline{\2\3}", answer)
    answer = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_RAISED)}}}", answer)
    answer = _ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt", answer)
    answer = _GROUPED.sub("", _SPACING.sub(" ", answer))
    answer = _CROSS.sub(r"\\times ", answer)
    answer = _DEGREE.sub("°", _SPELLED.sub(lambda match: _SPELLINGS[match[0]], answer))
    return re.sub(r"\s+", " ", _TEXT.sub(_plain, answer)).strip().rstrip(".").strip()


def with_decimal_point(text: str) -> str:
    """``text`` with a point for the decimal comma of amounts with the sign of the euro."""
    return _DECIMAL_COMMA.sub(r"\1\3.\2\4", text)


def _plain(match: re.Match[str]) -> str:
    r"""The text of a ``\text{}``; nothing if it is the unit of the number before it."""
    before, content = match.string[: match.start()].rstrip(), match[1].strip()
    behind_value = before[-1:].isalnum() or before[-1:] in {"}", ")"}
    if behind_value and _is_unit(content.rstrip("."), _UNITS | _LETTER_UNITS):
        return " "
    return f" {content} {match[2] or ''}"


def _without_unit(text: str) -> str:
    """``text`` without a unit after its number."""
    match = _AFTER_NUMBER.fullmatch(text)
    return match[1].strip() if match is not None and _is_unit(match[2], _UNITS) else text


def _is_unit(text: str, first: frozenset[str]) -> bool:
    """Whether ``text`` is a unit; ``first``: those it may begin with, as in ``km/h``."""
    words = re.split(r"[/ ]+", text.casefold())
    return words[0] in first and set(words[1:]) <= _UNITS | _LETTER_UNITS | {"per"}


# ---- numbers -------------------------------------------------------------------------------------

_DECIMAL = re.compile(r"(?=\.?\d)(?:\d{1,3}(?:[ ,]\d{3})+|\d+)?(?:\.\d*)?(?:[eE][+-]?\d{1,3})?")
"""Digits in one piece or in groups of three; no other space may stand between two digits."""
_FOREIGN = re.compile(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}|\d{1,2}(?:,\d\d)+,\d{3}")
"""Separators of other countries: ``1.234,56``, ``1.000.000``, ``12,34,567``."""
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\overline ?(?:\{ ?(\d+) ?\}|(\d))|\( ?(\d+) ?\))")
_DOTTED = re.compile(r"\\dot ?\{? ?(\d) ?\}?(?:(\d*)\\dot ?\{? ?(\d) ?\}?)?")
_FRACTION = re.compile(r"\\frac ?(?:\{([^{}]*)\}|(\d)) ?(?:\{([^{}]*)\}|(\d))")
_RATIO = re.compile(r"(\d+) ?/ ?(\d+)")
_MIXED = re.compile(r"(\d+)(?: (?=\d)| ?(?=\\))(\d+ ?/ ?\d+|\\frac.+)")
_POWER = re.compile(r"(?:(.+?) ?(?:\\times|\\cdot|\*) ?)?10 ?\^ ?(?:\{ ?(-?\d{1,3}) ?\}|(\d))")


def _number(text: str) -> Fraction | None:
    """The value of a decimal, a fraction, a mixed number or a power of ten; else None."""
    if text[:1] in {"+", "-"}:
        value = _number(text[1:].strip()) if text[1:2] not in {"+", "-"} else None
        return -value if value is not None and text[0] == "-" else value
    if _DECIMAL.fullmatch(text):
        return Fraction(re.sub("[ ,]", "", text))
    if _FOREIGN.fullmatch(text):
        whole, _, decimals = text.partition(",") if "." in text else (text, "", "")
        return Fraction(f"{re.sub('[.,]', '', whole)}.{decimals}0")
    text = _DOTTED.sub(r"\\overline{\1\2\3}", text)
    for pattern, value_of in _NUMBERS:
        if match := pattern.fullmatch(text):
            return value_of(match)
    return None


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4] or match[5]
    return Fraction(f"{whole}.{fixed}0") + Fraction(
        int(period), 10 ** len(fixed) * (10 ** len(period) - 1)
    )


def _fraction(match: re.Match[str]) -> Fraction | None:
    above, below = (
        _number((one or other).strip()) for one, other in (match.group(1, 2), match.group(3, 4))
    )
    return above / below if above is not None and below else None


def _ratio(match: re.Match[str]) -> Fraction | None:
    return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None


def _mixed(match: re.Match[str]) -> Fraction | None:
    part = _number(match[2])
    return None if part is None else int(match[1]) + part


def _power(match: re.Match[str]) -> Fraction | None:
    factor = Fraction(1) if match[1] is None else _number(match[1])
    return None if factor is None else factor * Fraction(10) ** int(match[2] or match[3])


_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_SCALES |= {"billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(.+?) ?({'|'.join(_SCALES)})")


def _scaled(match: re.Match[str]) -> Fraction | None:
    factor = _number(match[1])
    return None if factor is None else factor * _SCALES[match[2]]


_NUMBERS = (
    (_RATIO, _ratio),
    (_FRACTION, _fraction),
    (_MIXED, _mixed),
    (_POWER, _power),
    (_REPEATING, _repeating),
    (_SCALED, _scaled),
)


# ---- what an answer is made of -------------------------------------------------------------------

_WORDS = re.compile(r"[A-Za-z]+(?:[ '-][A-Za-z]+)*")
_DIFFERENCE = re.compile(r"[A-Za-z](?: ?- ?[A-Za-z])+|[a-z]{1,2}(?: ?- ?[a-z]{1,2})+")
"""Hyphens between letters are signs: ``p-q``, ``xy-z``."""
_CHOICE = re.compile(r"(?:\( ?([A-J]) ?\)|([A-J])[.):])(?: (?![-+*/=^<>\\]).*)?")
_NAME = re.compile(
    r"(?:[A-Za-z]+|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|omega|sigma|rho|tau|ell))'*"
    r"(?: ?_ ?(?:\w|\{\w+\}))?(?: ?\( ?[A-Za-z](?: ?, ?[A-Za-z])* ?\))?"
    r"|\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)"
)
_MATRIX = re.compile(r"\\begin ?\{[pbvBV]?matrix\}(.*)\\end ?\{[pbvBV]?matrix\}")
_JOINTS = re.compile(r" or | and |\\cup(?![A-Za-z])|;| \\lor | \\land ")
_LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))|(?<!\d),")
"""A comma that parts two things, not thousands."""
_COMMA = re.compile(",")
_RELATION = re.compile(r"\\(?:le|ge|ne|in)(?![A-Za-z])|[=<>]")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_CLOCK = re.compile(r"(\d{1,2})(?: ?: ?(\d\d))?(?: ?: ?(\d\d))? ?([aApP])\.? ?[mM]")
_SETS: dict[str, Form] = {"\\emptyset": ("set", frozenset())}
_SETS |= dict.fromkeys(("\\mathbb{R}", "\\mathbbR"), ("(", ")", "-\\infty", "\\infty"))
_INFINITIES = {"\\infty": "\\infty", "+\\infty": "\\infty", "-\\infty": "-\\infty"}
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|pi)"
    r"(?![A-Za-z])"
)
_ANGLE = re.compile(r"([\d.]+) ?°")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]{2,}")
_LETTER_RUN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_OPAQUE = re.compile(
    r"\d ?_|'|\\(?:[bp]?mod|equiv)(?![A-Za-z])|\d\.\d+\.|\d{4}-\d\d?-\d|\d\d?-\d\d?-\d{4}|\d ?: ?\d"
)
"""A number to another base, a prime, a congruence, a version, a date, a time: parsers drop a part
of each."""
_DIGITS, _SPACED = re.compile(r"[-+./\d ]*"), re.compile(r"\d \d")


def _read(text: str, depth: int) -> Form:
    """The form of a tidy text."""
    text = unbraced(text)
    if depth > _DEEPEST:
        return text
    for reader in (_value, _choice, _joined, _matrix, _bracketed, _listed, _related, _either):
        form = reader(text, depth)
        if form is not None:
            return form
    return _formula(text)


def _value(text: str, depth: int) -> Form | None:
    """A number, percentage or infinity, or words."""
    value = _number(text)
    if value is not None:
        return value
    bare = _without_unit(text).removesuffix("°").strip()
    if bare != text and (text[-1] != "°" or _number(bare) is not None):
        return _read(bare, depth + 1)
    if text.endswith(("%", " percent")):
        value = _number(text.removesuffix("%").removesuffix("percent").strip())
        return None if value is None else value / 100
    if depth == 0 and (counted := _COUNTED.fullmatch(text)):
        words = set(re.split("[ -]", counted[2].casefold()))
        value = None if words & _NO_UNITS else _number(counted[1])
        if value is not None:
            return value
    compact = text.replace(" ", "")
    if compact in _INFINITIES or compact in _SETS:
        return _INFINITIES.get(compact) or _SETS[compact]
    if clock := _CLOCK.fullmatch(text):
        return ("time", clock[4].casefold(), *(int(part or 0) for part in clock.group(1, 2, 3)))
    if _WORDS.fullmatch(text) and not _FUNCTION.fullmatch(text) and not _DIFFERENCE.fullmatch(text):
        parted = _JOINTS.search(f" {text} ")
        return None if parted else text.casefold()
    # Of several numbers a parser would make one, or their product.
    return text if _DIGITS.fullmatch(text) and (not text or _SPACED.search(text)) else None


def _choice(text: str, depth: int) -> Form | None:
    match = _CHOICE.fullmatch(text)
    return None if match is None else (match[1] or match[2]).casefold()


def _joined(text: str, depth: int) -> Form | None:
    parts = split_outside(text, _JOINTS)
    return None if parts is None else _members(parts, depth)


def _matrix(text: str, depth: int) -> Form | None:
    match = _MATRIX.fullmatch(text)
    if match is None or "\\begin" in match[1]:
        return None
    rows = [row.split("&") for row in match[1].strip().removesuffix("\\\\").split("\\\\")]
    return ("matrix", *(tuple(_read(cell.strip(), depth + 1) for cell in row) for row in rows))


def _bracketed(text: str, depth: int) -> Form | None:
    """A set, or values in order; for brackets around one thing, its form."""
    ends = brackets(text)
    if ends is None:
        return None
    inside = text[len(ends[0]) : -len(ends[1])].strip()
    parts = split_outside(inside, _COMMA) or [inside]
    if ends == ("\\{", "\\}"):
        return _members([part for part in parts if part], depth)
    if len(parts) == 1 and ends == ("(", ")"):
        return _read(inside, depth + 1)
    return (*ends, *(_read(part, depth + 1) for part in parts))


def _listed(text: str, depth: int) -> Form | None:
    parts = split_outside(text, _LIST_COMMA)
    return None if parts is None else _members(parts, depth)


def _related(text: str, depth: int) -> Form | None:
    """The value of an equation or an inequality with one name on one side."""
    signs = [sign for sign, _ in matches_outside(text, _RELATION)]
    sides = split_outside(text, _RELATION)
    if sides is None or not all(sides):
        return None
    if set(signs) == {"="}:
        named = [side for side in sides if _NAME.fullmatch(side)]
        values = [side for side in sides if not _NAME.fullmatch(side)]
        if not named or not values or any(_mentions(values[-1], name) for name in named):
            return None
        return _read(values[-1], depth + 1)
    name, kind = sides[1] if len(sides) == 3 else sides[0], signs[0]
    if len(sides) == 2 and all(map(_NAME.fullmatch, sides)) and kind in _FLIPPED:
        return None
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and kind in _FLIPPED:
        sides, name, kind = sides[::-1], sides[1], _FLIPPED[kind]
    if not _NAME.fullmatch(name):
        return None
    if len(sides) == 3:
        return _between(sides, signs, depth)
    value = _read(sides[1], depth + 1)
    if kind in {"\\in", "\\ne"}:
        return value if kind == "\\in" else (kind, value)
    if kind in {"<", "\\le"}:
        return ("(", ")" if kind == "<" else "]", "-\\infty", value)
    return ("(" if kind == ">" else "[", ")", value, "\\infty")


def _between(sides: list[str], signs: list[str], depth: int) -> Form | None:
    """The interval of ``1 < x < 2``."""
    if set(signs) <= {">", "\\ge"}:
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", "\\le"}:
        return None
    ends = ("(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]")
    return (*ends, _read(sides[0], depth + 1), _read(sides[2], depth + 1))


def _either(text: str, depth: int) -> Form | None:
    r"""Both values of a formula with one ``\pm``."""
    before, sign, after = text.partition("\\pm")
    if not sign or "\\pm" in after or after[:1].isalpha():
        return None
    values = (f"{before}+{after.strip()}", f"{before}-{after.strip()}")
    return _set(frozenset(_read(value, depth + 1) for value in values))


def _formula(text: str) -> Form:
    """A formula, if it looks like one; else the text."""
    marked = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", _FUNCTION.sub(r"\\\1 ", text))
    words = (word for word in _LETTERS.findall(marked) if word[0] != "\\" and word != "sqrt")
    if any(len(word) > 2 or not word.islower() for word in words) or '"' in text:
        return text.casefold()
    if _OPAQUE.search(text):
        return re.sub(r"_ ?\{ ?(\w+) ?\}", r"_\1", text).replace(" ", "")
    return _worked_out(_LETTER_RUN.sub(_product, marked))


_KINDS = {"=": "==", "\\ne": "!=", "<": "<", "\\le": "<=", ">": "<", "\\ge": "<="}


def _worked_out(text: str) -> Form:
    """The form of a formula; itself if that takes sympy, and its text if it is too large."""
    try:
        sides = [exact_value(side) for side in split_outside(text, _RELATION) or [text]]
        if len(sides) == 1:
            return value_form(sides[0])
        return _relation([sign for sign, _ in matches_outside(text, _RELATION)], sides)
    except TooLarge:
        return Formula(text) if _LETTER.search(text) else uncompared(text)
    except NotExact:
        return Formula(text)


def _relation(signs: list[str], sides: list[ExactValue]) -> Form:
    """The form of an equation or inequality; of ``2+3=5`` it is the number five."""
    differences = [one + -other for one, other in pairwise(sides)]
    if set(signs) == {"="} and not any(difference.terms for difference in differences):
        return value_form(sides[-1])
    if len(signs) > 1 or signs[0] not in _KINDS or not differences[0].letters:
        raise NotExact
    is_flipped = signs[0] in {">", "\\ge"}
    return relation_form(_KINDS[signs[0]], -differences[0] if is_flipped else differences[0])


def _product(match: re.Match[str]) -> str:
    """A run of letters as a product; a parser takes ``ab`` for a unit and drops it."""
    run = match[0]
    is_differential = run[0] == "d" and len(run) == 2 and "\\int" in match.string
    if run[0] == "\\" or run == "sqrt" or is_differential:
        return run
    factor = re.search(r"(?:^|[^\d^])[\d.]+ ?$", match.string[: match.start()])
    return ("\\cdot " if factor else "") + "\\cdot ".join(run)


# ---- sets, brackets and where they part ----------------------------------------------------------


def _members(parts: list[str], depth: int) -> Form:
    """A set of the values of ``parts``; equations for several names keep them."""
    equations = [part.partition("=") for part in parts]
    names = {name.strip() for name, sign, _ in equations if sign}
    if len(names) > 1 and all(map(_NAME.fullmatch, names)) and all(e[1] for e in equations):
        values = ((name.strip(), _read(value.strip(), depth + 1)) for name, _, value in equations)
        return ("set", frozenset(("=", *value) for value in values))
    if len(names) == 1 and all(map(_NAME.fullmatch, names)) and equations[0][1]:
        parts = [
            value.strip() if sign else part
            for part, (_, sign, value) in zip(parts, equations, strict=True)
        ]
    return _set(frozenset(_read(part, depth + 1) for part in parts))


def _set(members: frozenset[Form]) -> Form:
    """A set: sets in it are taken apart, and one of a single member is that member."""
    flat: set[Form] = set()
    for member in members:
        inner = member[1] if isinstance(member, tuple) and member[:1] == ("set",) else None
        flat |= inner if isinstance(inner, frozenset) else {member}
    return next(iter(flat)) if len(flat) == 1 else ("set", frozenset(flat))


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"(?<![\\A-Za-z]){re.escape(name)}(?![A-Za-z])", text) is not None
