"""What the components of Archon ask a model, and what is read in its replies.

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
    named = [int(each) - 1 for each in re.findall(r"\[(\d+)\]", line)]
    return list(dict.fromkeys(n for n in (*named, *range(count)) if 0 <= n < count))


def is_correct(text: str) -> bool:
    """Whether the last of "[Correct]" and "[Incorrect]" is the first of the two."""
    found = re.findall(r"\[(correct|incorrect)\]", text.lower())
    return bool(found) and found[-1] == "correct"


def unit_tests_in(text: str) -> tuple[str, ...]:
    """The tests in a list with dashes or numbers."""
    found = re.findall(r"^\s*(?:[-*]|\d+[.)])\s+(\S.*)$", text, re.MULTILINE)
    return tuple(each.strip() for each in found)


def num_passed(text: str, num_tests: int) -> int:
    """How many tests are said to be passed; what is said last of a test counts."""
    found = re.findall(r"test\s*(\d+)\W+(passed|failed)", text.lower())
    said = {int(number): word for number, word in found if 1 <= int(number) <= num_tests}
    return sum(word == "passed" for word in said.values())
