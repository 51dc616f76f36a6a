r"""Exact values: rational numbers, roots, powers, factorials, and polynomials in letters.

A value is a sum of terms ``coefficient * product of generator^exponent``. The generators are primes
(with exponents from 0 to 1), ``pi``, letters (with integers for exponents), and -1 (whose exponent
1/2 is the imaginary unit)::

    \sqrt{8}                  2 * 2^(1/2)
    \frac{4}{\sqrt{2}}        2 * 2^(1/2)
    (x+1)^2 - 1               1 * x^2  +  2 * x^1

Different products of such roots are linearly independent over the rational numbers (Besicovitch
1940, "On the linear independence of fractional powers of integers"), and ``pi`` is transcendental:
so two values are equal if, and only if, their terms are. A power that is too large to be written in
digits is a term of its primes alone: ``10^{10^{10}}`` takes no more time than ``10``.

Every number has at most ``MAX_BITS`` bits, and every value ``MAX_TERMS`` terms. This file imports
nothing of the package: ``sympy_process`` loads it by its path.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from itertools import product

MAX_BITS = 1 << 15
MAX_TERMS = 128
_MAX_EXPONENT = 10**6
"""Of a letter and of pi."""
_MAX_FACTORIAL = 3000
MAX_DIVISOR = 1 << 16
"""Trial division ends here; what remains is a prime if it is below the square."""
_MAX_BASIS = 16
"""Products of roots in a denominator."""
_PRECISION = 60
"""Decimal digits by which irrational numbers are identified."""
_MAX_DIGITS = 1 << 14
"""Decimal digits of all terms that are worked out together."""
NUM_POINTS = 3
"""Values of its letters at which a formula is evaluated."""

Generator = int | str
Monomial = tuple[tuple[Generator, Fraction], ...]
Terms = Mapping[Monomial, Fraction]
Form = str | Fraction | tuple["Form", ...]
IMAGINARY_UNIT: Monomial = ((-1, Fraction(1, 2)),)


class NotExact(Exception):
    """The formula is no such value, or takes more than exact arithmetic."""


class TooLarge(Exception):
    """A number in the formula is beyond the bounds."""


# ---- terms ---------------------------------------------------------------------------------------


def bits(number: Fraction) -> int:
    """Length of a number."""
    return number.numerator.bit_length() + number.denominator.bit_length()


def _term(powers: Mapping[Generator, Fraction], coefficient: Fraction) -> Terms:
    """One term in its only form: whole powers of primes are part of the coefficient."""
    powers = dict(powers)
    sign = powers.pop(-1, Fraction(0)) % 2
    coefficient = -coefficient if sign >= 1 else coefficient
    whole = {base: math.floor(power) for base, power in powers.items() if isinstance(base, int)}
    size = sum(abs(power) * math.log2(base) for base, power in whole.items())
    if size <= MAX_BITS:
        for base, power in whole.items():
            coefficient *= Fraction(base**power) if power >= 0 else Fraction(1, base**-power)
            powers[base] -= power
    elif abs(coefficient) != 1:
        for prime, exponent in _factors(abs(coefficient)).items():
            powers[prime] = powers.get(prime, Fraction(0)) + exponent
        return _term(powers, Fraction(1 if coefficient > 0 else -1))
    exponents = [abs(power) for base, power in powers.items() if isinstance(base, str)]
    if bits(coefficient) > MAX_BITS + 2 or max(exponents, default=0) > _MAX_EXPONENT:
        raise TooLarge
    if sign % 1:
        powers[-1] = sign % 1
    monomial = tuple(sorted((one for one in powers.items() if one[1]), key=str))
    return {monomial: coefficient} if coefficient else {}


def is_short_power(number: Fraction, exponent: Fraction) -> bool:
    """Whether a power can be written in digits."""
    return exponent.denominator == 1 and abs(exponent) * bits(number) <= MAX_BITS


def _is_huge(monomial: Monomial) -> bool:
    """Whether whole powers of primes are left, as they are too large for a coefficient."""
    return any(isinstance(base, int) and base > 0 and abs(power) >= 1 for base, power in monomial)


def _factors(number: Fraction) -> dict[int, Fraction]:
    """The exponents of the primes in a positive number; ``NotExact`` if they are not computed."""
    if bits(number) > MAX_BITS // 4:
        raise NotExact
    powers: dict[int, Fraction] = {}
    for whole, sign in ((number.numerator, 1), (number.denominator, -1)):
        for divisor in (2, 3, *range(5, MAX_DIVISOR, 2)):
            if divisor * divisor > whole:
                break
            while whole % divisor == 0:
                powers[divisor] = powers.get(divisor, Fraction(0)) + sign
                whole //= divisor
        if whole > MAX_DIVISOR**2:
            raise NotExact
        if whole > 1:
            powers[whole] = powers.get(whole, Fraction(0)) + sign
    return powers


class ExactValue:
    """A sum of terms, by monomial; see the module. Immutable."""

    def __init__(self, terms: Terms) -> None:
        if len(terms) > MAX_TERMS:
            raise TooLarge
        self.terms = terms

    @classmethod
    def of(cls, number: int | Fraction) -> ExactValue:
        """The value of a rational number."""
        return cls(_term({}, Fraction(number)))

    @classmethod
    def generator(cls, name: str) -> ExactValue:
        """The value of ``pi``, or of a letter."""
        return cls({((name, Fraction(1)),): Fraction(1)})

    @property
    def rational(self) -> Fraction | None:
        """The number, if it is a rational one that can be written in digits."""
        if not self.terms:
            return Fraction(0)
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def letters(self) -> set[str]:
        """The letters in it."""
        bases = {base for monomial in self.terms for base, _ in monomial}
        return {base for base in bases if isinstance(base, str) and base != "pi"}

    def __add__(self, other: ExactValue) -> ExactValue:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            total = terms.pop(monomial, Fraction(0)) + coefficient
            if total:
                terms[monomial] = total
        return ExactValue(terms).checked()

    def __neg__(self) -> ExactValue:
        return ExactValue({monomial: -value for monomial, value in self.terms.items()})

    def __mul__(self, other: ExactValue) -> ExactValue:
        terms: dict[Monomial, Fraction] = {}
        for one, another in product(self.terms.items(), other.terms.items()):
            powers: dict[Generator, Fraction] = dict(one[0])
            for base, power in another[0]:
                powers[base] = powers.get(base, Fraction(0)) + power
            for monomial, coefficient in _term(powers, one[1] * another[1]).items():
                terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
        return ExactValue({monomial: value for monomial, value in terms.items() if value}).checked()

    def checked(self) -> ExactValue:
        """Itself; raises TooLarge where a power that is not written in digits is part of a sum, or
        a coefficient is too long."""
        if len(self.terms) > 1 and any(map(_is_huge, self.terms)):
            raise TooLarge
        if any(bits(value) > MAX_BITS + 2 for value in self.terms.values()):
            raise TooLarge
        return self

    @property
    def work(self) -> int:
        """Work that a product with one short term takes."""
        return sum(1 + (bits(value) >> 10) ** 2 for value in self.terms.values())

    def inverse(self) -> ExactValue:
        """One divided by it; raises NotExact where that is no sum of such terms."""
        if not self.terms:
            raise NotExact
        if len(self.terms) > 1:
            return self._inverse_of_sum()
        [(monomial, coefficient)] = self.terms.items()
        return ExactValue(_term({base: -power for base, power in monomial}, 1 / coefficient))

    def _inverse_of_sum(self) -> ExactValue:
        """The solution of ``self * x = 1`` over the products of the roots in it."""
        degrees: dict[Generator, int] = {}
        for base, power in (one for monomial in self.terms for one in monomial):
            if isinstance(base, str) or _is_huge(((base, power),)):
                raise NotExact
            degrees[base] = math.lcm(degrees.get(base, 1), power.denominator)
        if math.prod(degrees.values()) > _MAX_BASIS:
            raise NotExact
        exponents = [[Fraction(n, degree) for n in range(degree)] for degree in degrees.values()]
        powers = [dict(zip(degrees, one, strict=True)) for one in product(*exponents)]
        basis = [next(iter(_term(one, Fraction(1)))) for one in powers]
        images = [(self * ExactValue({one: Fraction(1)})).terms for one in basis]
        rows = [
            [image.get(one, Fraction(0)) for image in images] + [Fraction(one == ())]
            for one in basis
        ]
        solution = zip(basis, _solved(rows), strict=True)
        return ExactValue({one: value for one, value in solution if value})

    def power(self, exponent: Fraction, *, is_root: bool = False) -> ExactValue:
        """It raised to an exponent, if it is a single term; of ``is_root`` with an odd degree the
        real value is taken."""
        if not self.terms and exponent > 0:
            return self
        if len(self.terms) != 1:
            raise NotExact
        [(monomial, coefficient)] = self.terms.items()
        is_whole = exponent.denominator == 1
        if not is_whole and any(base == -1 or isinstance(base, str) for base, _ in monomial):
            raise NotExact
        powers = {base: power * exponent for base, power in monomial}
        if is_short_power(coefficient, exponent):
            return ExactValue(_term(powers, coefficient ** int(exponent)))
        for base, power in _factors(abs(coefficient)).items():
            powers[base] = powers.get(base, Fraction(0)) + power * exponent
        value = ExactValue(_term(powers, Fraction(1)))
        if coefficient > 0:
            return value
        if is_whole or (is_root and exponent.denominator % 2):
            return -value if exponent.numerator % 2 else value
        if exponent.denominator == 2:
            return value * ExactValue(_term({-1: exponent}, Fraction(1)))
        raise NotExact

    def factorial(self) -> ExactValue:
        """Its factorial, if it is a natural number."""
        return ExactValue.of(math.factorial(self._natural()))

    def binomial(self, other: ExactValue) -> ExactValue:
        """The number of ways to choose ``other`` of it."""
        total, chosen = self._natural(1 << 64), other._natural(1 << 64)
        if min(chosen, abs(total - chosen)) * total.bit_length() > MAX_BITS:
            raise TooLarge
        return ExactValue.of(math.comb(total, chosen))

    def _natural(self, limit: int = _MAX_FACTORIAL) -> int:
        number = self.rational
        if number is None or number.denominator != 1 or number < 0:
            raise NotExact
        if number > limit:
            raise TooLarge
        return int(number)


def _solved(rows: list[list[Fraction]]) -> list[Fraction]:
    """The solution of linear equations, one per row, with the constant at its end."""
    for column in range(len(rows)):
        pivot = next((n for n in range(column, len(rows)) if rows[n][column]), None)
        if pivot is None:
            raise NotExact
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [value / scale for value in rows[column]]
        for n, row in enumerate(rows):
            if n != column and row[column]:
                rows[n] = [a - row[column] * b for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


# ---- canonical forms -----------------------------------------------------------------------------


def value_form(value: ExactValue) -> Form:
    """The canonical form: a fraction, or digits; with letters the values at fixed points.

    That of a formula which ``sympy_process`` works out is made in the same way, so formulas that
    are equal have one form, whichever way they are written.
    """
    if any(map(_is_huge, value.terms)):
        [(monomial, sign)] = value.terms.items()
        return ("power", sign, tuple((str(base), power) for base, power in monomial))
    if value.rational is not None:
        return value.rational
    return values_form([number_form(*_evaluated(value, n)) for n in range(_num_points(value))])


def relation_form(kind: str, difference: ExactValue) -> Form:
    """The form of an equation or inequality, by the difference of its sides, up to a factor.

    Args:
        kind: ``==``, ``!=``, ``<`` or ``<=``.
        difference: with a letter.
    """
    values = [_evaluated(difference, number) for number in range(NUM_POINTS)]
    scale = values[0][0] if kind in {"==", "!="} else abs(values[0][0])
    if not scale or any(imaginary for _, imaginary in values):
        raise NotExact
    with localcontext(_context(_PRECISION * 2)):
        return (kind, *(number_form(real / scale, Decimal(0)) for real, _ in values))


def values_form(values: list[Form]) -> Form:
    """The form of a formula with these values at the points: the number, if it is always one."""
    return values[0] if all(value == values[0] for value in values) else ("values", *values)


def number_form(real: Fraction | Decimal, imaginary: Fraction | Decimal) -> Form:
    """The form of a number, which is a short fraction if it is one to within rounding."""
    written, other = _written(real), _written(imaginary)
    if other != 0:
        return ("complex", written, other)
    return written if isinstance(written, Fraction) else ("real", written)


def _written(part: Fraction | Decimal) -> Fraction | str:
    if isinstance(part, Fraction):
        if bits(part) <= MAX_BITS:
            return part
        part = _decimal(part, 2 * _PRECISION)
    if not part or part.adjusted() < -90:
        return Fraction(0)
    if abs(part.adjusted()) < 1000:
        exact = Fraction(part)
        short = exact.limit_denominator(10**9)
        if abs(short - exact) < abs(exact) / 10**_PRECISION:
            return short
    with localcontext(_context(_PRECISION)):
        return f"{part:.{_PRECISION - 1}e}"


def point(name: str, number: int) -> Fraction:
    """A value for a letter: between 0.5 and 2.5 in size, of either sign."""
    digest = hashlib.sha256(f"{number}/{name}".encode()).digest()
    size = Fraction(1, 2) + Fraction(int.from_bytes(digest[:6], "big"), 2**47)
    return -size if number == NUM_POINTS - 1 else size


def _num_points(value: ExactValue) -> int:
    return NUM_POINTS if value.letters else 1


def _evaluated(value: ExactValue, number: int) -> tuple[Decimal, Decimal]:
    """Real and imaginary part at a point, to twice the digits that forms keep."""
    precision = 3 * _PRECISION
    while precision * len(value.terms) < _MAX_DIGITS:
        with localcontext(_context(precision)):
            parts: dict[bool, list[Decimal]] = {False: [Decimal(0)], True: [Decimal(0)]}
            for monomial, coefficient in value.terms.items():
                factors = [_factor(*one, number, precision) for one in monomial if one[0] != -1]
                numeric = _decimal(coefficient, precision)
                for factor in factors:
                    numeric *= factor
                parts[len(factors) < len(monomial)].append(numeric)
            sums = sum(parts[False]), sum(parts[True])
            largest = max(abs(one) for part in parts.values() for one in part)
            smallest = min((abs(one) for one in sums if one), default=Decimal(0))
        cancelled = largest.adjusted() - smallest.adjusted() if smallest else precision
        if cancelled < precision - 2 * _PRECISION:
            return Decimal(sums[0]), Decimal(sums[1])
        precision *= 4
    raise TooLarge


def _factor(base: Generator, power: Fraction, number: int, precision: int) -> Decimal:
    if base == "pi":
        return _pi(precision) ** int(power)
    if isinstance(base, str):
        return _decimal(point(base, number), precision) ** int(power)
    if power == Fraction(1, 2):
        return Decimal(base).sqrt()
    return Decimal(base) ** (Decimal(power.numerator) / Decimal(power.denominator))


def _pi(precision: int) -> Decimal:
    """By Machin's formula, pi = 16 arctan(1/5) - 4 arctan(1/239)."""
    one: int = 10 ** (precision + 10)

    def arctan(divisor: int) -> int:
        term = total = one // divisor
        for odd in range(3, 2 * precision + 40, 2):
            term = -term // (divisor * divisor)
            total += term // odd
        return total

    return Decimal(16 * arctan(5) - 4 * arctan(239)) / Decimal(one)


def _decimal(number: Fraction, precision: int) -> Decimal:
    with localcontext(_context(precision)):
        return Decimal(number.numerator) / Decimal(number.denominator)


def _context(precision: int) -> Context:
    return Context(prec=precision, Emax=MAX_EMAX, Emin=MIN_EMIN)
