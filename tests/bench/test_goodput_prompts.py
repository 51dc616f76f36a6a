"""The benchmark of goodput control asks no question twice under one cache salt."""

from benchmarks.goodput import asked


def test_no_question_is_asked_twice_under_a_salt_within_or_across_rounds() -> None:
    questions = [f"question {number}" for number in range(5)]
    rounds = [asked(questions, number, 7) for number in range(4)]  # more than there are in each
    together = [each for chosen in rounds for each in chosen]
    assert [len(chosen) for chosen in rounds] == [7] * 4
    assert len(set(together)) == len(together)
    assert [question for question, _ in together] == (questions * 6)[:28]
