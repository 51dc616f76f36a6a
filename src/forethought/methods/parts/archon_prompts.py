"""The prompts of Archon's components, and the parsers of the replies.

The components are those of Saad-Falcon et al. 2024 (arXiv 2409.15254); the texts are ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PROMPTS: Mapping[str, str] = {
    "critic": """\
Criticise an answer to a question. Name its strengths, then its weaknesses, in a few sentences.

Question:
{question}

Answer:
{answer}""",
    "ranker": """\
Here are {count} answers to a question. Compare them and order them from best to worst.

Question:
{question}

{answers}

End with one line of the form "Ranking: [2] > [1] > [3]", with the numbers of all answers.""",
    "fuser": """\
Here are {count} answers to a question. Some may be wrong. Write one answer that is better than each
of them: check what they say, keep what is right and leave out what is not. Write the answer alone.

Question:
{question}

{answers}""",
    "verifier": """\
Check an answer to a question, step by step.

Question:
{question}

Answer:
{answer}

End with "[Correct]" if the answer is right and complete, and with "[Incorrect]" if it is not.""",
    "unit_test_generator": """\
Write up to {count} statements that every right answer to the question has to satisfy and that can
be checked one by one. Write each on a line of its own that begins with "- ".

Question:
{question}""",
    "unit_test_evaluator": """\
Say which of the tests an answer to a question passes.

Question:
{question}

Answer:
{answer}

Tests:
{tests}

End with one line per test, of the form "Test 1: Passed" or "Test 1: Failed".""",
}


def ranking_in(text: str, count: int) -> list[int]:
    """The indices of the candidates, best first; those that are not named come last."""
    line = text[text.lower().rfind("ranking") :] if "ranking" in text.lower() else text
    named = [int(number) - 1 for number in re.findall(r"\[(\d+)\]", line)]
    return list(dict.fromkeys(n for n in (*named, *range(count)) if 0 <= n < count))


def is_correct(text: str) -> bool:
    """Whether the last of "[Correct]" and "[Incorrect]" is the first of the two."""
    matches = re.findall(r"\[(correct|incorrect)\]", text.lower())
    return bool(matches) and matches[-1] == "correct"


def unit_tests_in(text: str) -> tuple[str, ...]:
    """The tests in a list with dashes or numbers."""
    items = re.findall(r"^\s*(?:[-*]|\d+[.)])\s+(\S.*)$", text, re.MULTILINE)
    return tuple(item.strip() for item in items)


def num_passed(text: str, num_tests: int) -> int:
    """The number of tests that the text reports as passed; of several reports of a test the last
    counts.
    """
    matches = re.findall(r"test\s*(\d+)\W+(passed|failed)", text.lower())
    results = {int(number): word for number, word in matches if 1 <= int(number) <= num_tests}
    return sum(word == "passed" for word in results.values())
