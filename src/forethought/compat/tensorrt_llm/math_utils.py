"""The functions of ``answers`` under their module name in ``tensorrt_llm.scaffolding``."""

from forethought.answers.answer_extraction import (
    extract_answer_from_boxed,
    extract_answer_with_regex,
)
from forethought.answers.answers import (
    get_digit_majority_vote_result,
    get_majority_result,
)

__all__ = [
    "extract_answer_from_boxed",
    "extract_answer_with_regex",
    "get_digit_majority_vote_result",
    "get_majority_result",
]
