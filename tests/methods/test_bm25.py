"""BM25: scores as worked out by hand, and the order of the documents."""

import math

import pytest

from forethought.errors import ParameterError
from forethought.methods.parts.bm25 import BM25Index, words

DOCUMENTS = ["the cat sat", "the dog sat on the dog", "a bird"]
"""Lengths 3, 6 and 2; the mean is 11/3."""


def test_the_score_of_a_document_is_that_of_the_formula():
    index = BM25Index(DOCUMENTS, k1=1.2, b=0.75)
    # "dog" is in one of three documents, twice in the second, whose length is 6 / (11/3) = 18/11.
    idf = math.log(1 + 2.5 / 1.5)
    expected = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 18 / 11))
    assert index.scores("dog") == {1: pytest.approx(expected)}
    assert expected == pytest.approx(1.1439, abs=1e-4)
    # "sat" is in two of them, once each.
    idf = math.log(1 + 1.5 / 2.5)
    short = idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 9 / 11))
    long = idf * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 18 / 11))
    assert index.scores("sat") == {0: pytest.approx(short), 1: pytest.approx(long)}
    assert index.scores("sat dog")[1] == pytest.approx(long + expected)


def test_k1_and_b_switch_repetition_and_length_off():
    assert BM25Index(DOCUMENTS, k1=0.0).scores("dog") == {1: pytest.approx(math.log(1 + 2.5 / 1.5))}
    flat = BM25Index(DOCUMENTS, b=0.0).scores("sat")
    assert flat[0] == pytest.approx(flat[1]) == pytest.approx(math.log(1 + 1.5 / 2.5))


def test_a_word_in_most_documents_still_counts_a_little():
    index = BM25Index(["x y", "x", "x z"])
    assert 0 < index.idf("x") < index.idf("y") < index.idf("nowhere")


def test_the_best_documents_come_first_and_of_equals_the_earlier_one():
    index = BM25Index(["a b", "b c", "c a", "d"])
    assert index.search("b", 2) == [0, 1]
    assert index.search("C b", 3) == [1, 0, 2]
    assert index.search("C b", 1) == [1]
    assert index.search("nothing known", 4) == []


def test_words_are_compared_without_case_and_punctuation():
    assert words("Don't PANIC, it's 42!") == ["don", "t", "panic", "it", "s", "42"]
    own = BM25Index(["a-b", "b"], tokenize=str.split)
    assert own.search("a", 2) == []
    assert own.search("a-b", 2) == [0]


@pytest.mark.parametrize(
    "settings",
    [
        {"documents": []},
        {"documents": "one text"},
        {"documents": ["x", 3]},
        {"k1": -1.0},
        {"b": 1.5},
        {"tokenize": 3},
    ],
)
def test_mistakes_are_refused_by_name(settings):
    with pytest.raises(ParameterError, match=f"invalid {next(iter(settings))}"):
        BM25Index(**{"documents": DOCUMENTS, **settings})
    with pytest.raises(ParameterError, match="invalid num_documents"):
        BM25Index(DOCUMENTS).search("x", 0)
