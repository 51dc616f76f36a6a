"""BM25: the documents that share the rare words of a query, without a model.

The score of a document for a query is the sum over the words of the query of ::

    idf(word) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean_length))

with f the occurrences of the word in the document, lengths in words, and
``idf(word) = ln(1 + (N - n + 0.5) / (n + 0.5))`` for a word in n of N documents. The 1 in the
logarithm keeps it above zero for words in more than half of the documents.

Paper: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter

from forethought.errors import ParameterError
from forethought.scaffolding.settings import FUNCTION, POSITIVE_INT, validated

_K1: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0.0, allow_inf_nan=False)])
_B: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0.0, le=1.0)])
_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The runs of letters, digits and underscores of a text, in lower case."""
    return _WORD.findall(text.lower())


class BM25Index:
    """Documents, indexed by their words.

    Args:
        documents: the texts.
        k1: how much further occurrences of a word count: 0: not at all.
        b: how much a long document is discounted: 0: not at all, 1: by its length.
        tokenize: makes words of a text; applied to documents and queries.

    Raises:
        ParameterError: there are no documents, one is no text, or a parameter is out of range.
    """

    def __init__(
        self,
        documents: Sequence[str],
        k1: float = 1.2,
        b: float = 0.75,
        *,
        tokenize: Callable[[str], list[str]] = words,
    ) -> None:
        listed = not isinstance(documents, str) and isinstance(documents, Sequence)
        if not listed or not documents or not all(isinstance(text, str) for text in documents):
            raise ParameterError(
                "invalid documents", f"got {str(documents)[:60]!r}", "Give a list of texts"
            )
        self.documents = tuple(documents)
        self._k1, self._b = validated("k1", k1, _K1), validated("b", b, _B)
        self._tokenize = validated("tokenize", tokenize, FUNCTION)
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        """Word -> document -> occurrences."""
        self._lengths: list[int] = []
        for number, text in enumerate(self.documents):
            tokens = self._tokenize(text)
            self._lengths.append(len(tokens))
            for word, count in Counter(tokens).items():
                self._counts[word][number] = count
        self._mean_length = sum(self._lengths) / len(self._lengths) or 1.0

    def __deepcopy__(self, memo: object) -> BM25Index:
        return self

    def idf(self, word: str) -> float:
        """The weight of a word: high if few documents have it."""
        num_with = len(self._counts.get(word, ()))
        return math.log(1 + (len(self.documents) - num_with + 0.5) / (num_with + 0.5))

    def scores(self, query: str) -> dict[int, float]:
        """The scores of the documents that share a word with the query, by their numbers."""
        scores: dict[int, float] = defaultdict(float)
        for word in self._tokenize(query):
            for number, count in self._counts.get(word, {}).items():
                scores[number] += self.idf(word) * self._weight(count, number)
        return dict(scores)

    def search(self, query: str, num_documents: int) -> list[int]:
        """The numbers of the best documents that share a word with the query, best first.

        Of equal scores the earlier document is first; ``num_documents`` is at least 1.
        """
        most, scores = validated("num_documents", num_documents, POSITIVE_INT), self.scores(query)
        return sorted(scores, key=lambda number: (-scores[number], number))[:most]

    def _weight(self, count: int, number: int) -> float:
        length = self._lengths[number] / self._mean_length
        return count * (self._k1 + 1) / (count + self._k1 * (1 - self._b + self._b * length))
