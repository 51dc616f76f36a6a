"""The reference evaluation: votes, intervals, and Dynasor-CoT replayed on finished traces."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought.evaluation.generated.arithmetic import is_held_out
from reasoner.evaluate import (
    Replay,
    answered_by_sentence,
    boxed_answer,
    kinds_of_problem,
    larger_test_problems,
    skill,
    vote,
    wilson,
)
from reasoner.other import SENTENCE


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

    def complete(self, prompts, limit, temperature=0.0):
        self.temperature = temperature
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


class WritingSolver:
    """Replies with given texts, in turn; a letter is a token."""

    class Tokenizer(LetterTokenizer):
        def decode(self, ids, skip_special_tokens=False):
            return super().decode(ids)

    tokenizer = Tokenizer()

    def __init__(self, texts):
        self.texts = texts

    def encode(self, text):
        return []

    def complete(self, prompts, limit, temperature=0.0):
        self.temperature = temperature
        return [[ord(c) for c in text] for text, _ in zip(self.texts, prompts, strict=True)]


def test_rechecks_that_fix_and_break_are_counted_as_shares_of_all_problems():
    problems = larger_test_problems(5)
    told = [
        (problem.answer if first else "1", problem.answer if last else "2")
        for problem, first, last in zip(problems, (1, 1, 0, 0, 0), (1, 0, 1, 1, 0), strict=True)
    ]
    texts = [f"So the answer is {a}.\n...\nSo the answer is {b}.\n\\boxed{{{b}}}." for a, b in told]
    solver = WritingSolver(texts)
    row = skill(solver, "larger", problems, 0.8)
    assert solver.temperature == 0.8
    assert (row.first, row.accuracy) == (2 / 5, 3 / 5)
    assert (row.fixed, row.broken) == (2 / 5, 1 / 5)


def test_only_the_sentence_alone_answers_other_text():
    texts = [f"x</think>\n{SENTENCE}", "x</think>\nThe answer is 3.", f"x</think>\n{SENTENCE} 3"]
    assert answered_by_sentence(WritingSolver(texts), ["Hello!"] * 3).accuracy == 1 / 3


def test_every_kind_is_measured_on_held_out_problems_but_the_small_sums():
    kinds = kinds_of_problem(4)
    assert {"shipped problems", "larger operands", "chain of 8", "unasked"} <= set(kinds)
    for kind, problems in kinds.items():
        assert len(problems) == 4
        if "trained" not in kind:
            assert all(is_held_out(problem.family, problem.steps) for problem in problems)
