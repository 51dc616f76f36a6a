"""Chains that are written in parts, and scorers of their steps."""

import copy
import math

import pytest

from forethought.errors import ParameterError
from forethought.methods.parts.steps import LikelihoodScorer, PromptScorer, StepChain
from forethought.scaffolding import GenerationTask


def chain(max_tokens=None, stop=(), step_tokens=8):
    task = GenerationTask(input_str="Q: ", max_tokens=max_tokens, stop=list(stop))
    return StepChain(task, "\n\n", "</think>", step_tokens)


def ended(part, text, stop_reason=None, num_tokens=3, finish_reason="stop"):
    part.output_str, part.output_tokens = text, [0] * num_tokens
    part.finish_reason, part.stop_reason = finish_reason, stop_reason
    return part


def driven(process):
    """What a generator returns whose yields need no answer, and what it has yielded."""
    yielded = []
    while True:
        try:
            yielded.append(next(process))
        except StopIteration as stop:
            return stop.value, yielded


def test_a_step_ends_with_its_separator_and_the_next_part_stands_behind_it():
    written = chain(max_tokens=20, stop=["!"])
    part = written.part("model")
    assert (part.input_str, part.max_tokens) == ("Q: ", 8)
    assert part.stop == ["\n\n", "</think>", "!"]
    assert written.add(ended(part, "one", "\n\n")) == "one\n\n"
    assert written.part("model").input_str == "Q: one\n\n"
    assert written.finish_reason is None


def test_after_the_thought_the_answer_is_one_part():
    written = chain(max_tokens=20)
    written.add(ended(written.part("model"), "one", "</think>"))
    assert not written.is_thinking
    rest = written.part("model", in_steps=False)
    assert (rest.max_tokens, rest.stop) == (17, [])
    written.add(ended(rest, "so 7"), in_steps=False)
    assert (written.text, written.finish_reason) == ("one</think>so 7", "stop")


def test_a_step_goes_on_at_its_length_limit_and_ends_at_max_tokens():
    written = chain(max_tokens=12)
    written.add(ended(written.part("model"), "x" * 8, None, 8, "length"))
    assert written.finish_reason is None
    written.add(ended(written.part("model"), "yyyy", None, 4, "length"))
    assert written.finish_reason == "length"


def test_a_copy_of_a_chain_goes_on_by_itself():
    written = chain()
    later = copy.copy(written)
    later.add(ended(written.part("model"), "one", "\n\n"))
    assert (written.text, later.text) == ("", "one\n\n")


@pytest.mark.parametrize(("said", "score"), [(" 7", 7), ("9", 9), ("10", 0), ("high", 0)])
def test_what_is_no_digit_scores_zero(said, score):
    written, scorer = chain(), PromptScorer("base", " Score: ")
    judged, _ = driven(scorer.judgement(written, ended(written.part("small"), "one", "\n\n")))
    assert (judged.input_str, judged.worker_tag) == ("Q: one Score: ", "base")
    assert scorer.score(ended(judged, said)) == score


@pytest.mark.parametrize(("aggregation", "score"), [("min", 0.25), ("mean", math.sqrt(0.25 * 0.5))])
def test_the_likelihood_of_a_step_is_that_of_its_tokens(aggregation, score):
    written, scorer = chain(), LikelihoodScorer("base", aggregation)
    draft = ended(written.part("small"), "one", "\n\n")
    judged, opened = driven(scorer.judgement(written, draft))
    assert [task.input_str for [task] in opened] == ["Q: "], "the sequence of the base model"
    assert (judged.input_str, judged.score_suffix) == ("Q: one\n\n", True)
    judged.suffix_logprobs = [math.log(0.25), math.log(0.5)]
    assert scorer.score(judged) == pytest.approx(score)
    scorer.keep(judged)
    part = written.part("base")
    scorer.follow(part)
    assert part.input_str == "Q: one\n\n", "it goes on behind the step that was kept"
    assert part.fork_point is not None


def test_an_empty_step_is_not_scored_and_a_worker_without_likelihoods_is_refused():
    written, scorer = chain(), LikelihoodScorer("base", "min")
    empty = ended(written.part("small"), "")
    assert driven(scorer.judgement(written, empty)) == (None, [])
    with pytest.raises(ParameterError, match="likelihood"):
        scorer.score(GenerationTask())
