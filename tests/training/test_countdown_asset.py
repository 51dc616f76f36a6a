"""The embedded countdown model as shipped: it fits, loads, and solves problems by sampling."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from countdown.evaluate import Sample, Sampler, read_sample, rows, until_accepted, vote
from countdown.problems import record
from forethought.assets import embedded_dir, problems
from forethought.config.sampling import SamplingParams
from forethought.evaluation.generated.countdown import (
    Problem,
    fixed_test_problems,
    is_held_out,
    solve,
)
from forethought.llm.llm import LLM
from forethought.methods.parts.probe import PROBE_SUFFIX
from forethought.rewards.verifier import read_countdown, verifier
from forethought.training.chat_tokenizer import prompt_text


@pytest.fixture(scope="module")
def llm():
    with LLM("forethought/countdown", dtype="float32") as llm:
        yield llm


def test_the_directory_stays_under_eight_megabytes():
    assert sum(path.stat().st_size for path in embedded_dir("countdown").iterdir()) < 8_000_000


def test_the_shipped_problems_are_the_generators_held_out_and_solvable():
    shipped = problems("countdown")
    assert shipped == [record(problem) for problem in fixed_test_problems()]
    accepts = verifier("countdown")
    for fields in shipped:
        problem = Problem(tuple(fields["numbers"]), fields["target"])
        assert is_held_out(problem)
        assert solve(problem) is not None
        assert read_countdown(fields["question"]) == (problem.numbers, problem.target)
        assert accepts(fields["question"], f"\\boxed{{{fields['answer']}}}")
    assert [len(fields["numbers"]) for fields in shipped] == [3] * 150 + [4] * 150


def test_it_solves_held_out_problems_by_sampling_until_the_checker_accepts(llm):
    """8 problems of three numbers, 4 samples each. A model that solves half of them with one sample
    solves fewer than 5 of 8 this way with a chance below 1e-3; the shipped one is better."""
    asked = [fields["question"] for fields in problems("countdown")[:8]]
    drawn = Sampler(llm, temperature=0.8, max_tokens=200).draw(asked, 4)
    assert sum(until_accepted(samples)[-1].accepted for samples in drawn) >= 5
    assert any(len({sample.num_tokens for sample in samples}) > 1 for samples in drawn)


def test_it_searches_in_the_open_and_boxes_an_expression(llm):
    messages = [{"role": "user", "content": "Use 3, 5 and 7 to make 50."}]
    prompt = llm.chat_prompt(messages)
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=300)).outputs[0]
    thought, _, said = output.text.partition("</think>")
    assert " = " in thought
    assert said.startswith("\nThe answer is \\boxed{")
    assert output.finish_reason == "stop"


def test_a_probe_before_the_search_is_answered_with_doubt(llm):
    prompt = prompt_text("Use 3, 5 and 7 to make 50.") + PROBE_SUFFIX
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=12)).outputs[0]
    assert output.text.split("}")[0] == "hmm"


# ---- the measure --------------------------------------------------------------------------------

RIGHT, WRONG, NOTHING = Sample(True, 50, 10), Sample(False, 49, 20), Sample(False, None, 30)
QUESTION = "Use 3, 5 and 7 to make 50."


def test_a_sample_is_worth_the_value_of_its_expression():
    assert read_sample(QUESTION, "\\boxed{(3+7)*5}", 9) == Sample(True, 50, 9)
    assert read_sample(QUESTION, "\\boxed{7*7+1}", 9) == Sample(False, 50, 9)
    assert read_sample(QUESTION, "\\boxed{3+}", 9) == Sample(False, None, 9)
    assert read_sample(QUESTION, "and so on", 9) == Sample(False, None, 9)


def test_a_vote_counts_values_and_leaves_out_what_is_no_expression():
    assert vote([WRONG, RIGHT, RIGHT]) == RIGHT
    assert vote([WRONG, RIGHT]) == WRONG
    assert vote([NOTHING, NOTHING, RIGHT]) == RIGHT
    assert vote([NOTHING]) is None


def test_sampling_until_accepted_pays_for_the_samples_up_to_the_first_right_one():
    assert until_accepted([WRONG, RIGHT, RIGHT]) == [WRONG, RIGHT]
    assert until_accepted([WRONG, NOTHING]) == [WRONG, NOTHING]
    found = {row.method: row for row in rows([WRONG, RIGHT], [[WRONG, RIGHT], [RIGHT, WRONG]])}
    assert found["greedy"].accuracy == 0.5
    assert found["until accepted, at most 2"].accuracy == 1.0
    assert found["until accepted, at most 2"].tokens == (30 + 10) / 2
    assert (found["pass@2"].tokens, found["pass@2"].accuracy_ci) == (30, None)
    assert found["pass@1"].accuracy == 0.5
    assert found["vote of 2"].accuracy == 0.5
    assert found["until accepted, at most 2"].paired_p == 1.0
