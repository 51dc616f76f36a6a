"""The reference evaluation: votes, intervals, and Dynasor-CoT replayed on finished traces."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought.training.reasoner.evaluate import (
    Replay,
    boxed_answer,
    vote,
    wilson,
)


class LetterTokenizer:
    """One letter, one token."""

    def decode(self, ids):
        return "".join(map(chr, ids))


class ScriptedSolver:
    """Answers a probe by the length of the trace that it is cut from."""

    tokenizer = LetterTokenizer()

    def __init__(self, answers):
        self.answers = answers

    def encode(self, text):
        return []

    def complete(self, prompts, limit):
        return [[ord(c) for c in self.answers[len(prompt)] + "}\n\\]"] for prompt in prompts]


def replay(answers):
    return Replay(ScriptedSolver(answers), prompts=[[]], traces=[[0] * 50], every=10)


def test_two_agreeing_probes_end_the_run_and_every_probe_token_is_counted():
    answer, tokens = replay({10: "hmm", 20: "7", 30: "42", 40: "42"}).run(0, 10, threshold=2)
    assert answer == "42"
    probes = 4 + 2 + 3 + 3
    assert tokens == 40 + 3 + probes


def test_probes_that_never_agree_leave_the_trace_to_its_natural_end():
    answer, tokens = replay({10: "1", 20: "2", 30: "3", 40: "4"}).run(0, 10, threshold=2)
    assert answer is None
    assert tokens == 50 + 4 * 2


def test_agreement_in_doubt_or_on_nothing_is_not_certainty():
    assert replay(dict.fromkeys((10, 20, 30, 40), "hmm")).run(0, 10, 2)[0] is None
    assert replay(dict.fromkeys((10, 20, 30, 40), "")).run(0, 10, 2)[0] is None


def test_uncertain_words_match_as_words_only():
    assert replay(dict.fromkeys((10, 20, 30, 40), "now")).run(0, 10, 2)[0] == "now"


def test_the_threshold_is_the_number_of_agreeing_probes():
    answers = {10: "1", 20: "5", 30: "5", 40: "5"}
    assert replay(answers).run(0, 10, threshold=2)[1] < replay(answers).run(0, 10, threshold=3)[1]
    assert replay(answers).run(0, 10, threshold=4)[0] is None


def test_votes_leave_empty_answers_out_and_ties_go_to_the_first_seen():
    assert vote(["", "", "3", "4", "4", "3"]) == "3"
    assert vote(["", ""]) == ""


def test_the_last_box_is_the_answer():
    assert boxed_answer("\\boxed{1} no, \\boxed{ 23 }.") == "23"
    assert boxed_answer("nothing") == ""


def test_the_interval_is_the_one_of_wilson():
    """Eight of ten: 0.490 to 0.943."""
    low, high = wilson(8, 10)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
