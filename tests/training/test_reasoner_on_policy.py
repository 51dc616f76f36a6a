"""Samples of the reasoner, continued by the solver from where they go astray."""

import random

import pytest
from tokenizers import Tokenizer

from forethought.assets import reasoner_dir
from forethought.evaluation.generated.arithmetic import Problem, Step, sample_problem
from forethought.evaluation.generated.arithmetic_questions import sample_chain, sample_varied
from forethought.training.chat_tokenizer import END
from reasoner.labels import label_lines
from reasoner.on_policy import Continued, continue_sample, continued
from reasoner.samples import Sample
from reasoner.traces import closing, write_trace

STEPS = (Step("He buys 5 more", 10, "+", 5), Step("He uses 3", 15, "-", 3))
PROBLEM = Problem(
    "collection",
    "Tom has 10 nuts. He buys 5 more. He uses 3. How many?",
    STEPS,
    (None, None, 0, None),
)
DERIVATION = "He buys 5 more: 10 + 5 = 15.\nHe uses 3: 15 - 3 = 12.\nSo the answer is 12.\n"
SLIPPED = "He buys 5 more: 10 + 5 = 16.\nHe uses 3: 16 - 3 = 13.\nSo the answer is 13.\n"
OPENING = "Let me go through it once more.\n"
END_OF_12 = "</think>\nThe answer is \\boxed{12}."
CHECKED = "5 + 10 = 15, I had 15, yes.\n"
RECHECK = f"{OPENING}{CHECKED}15 - 3 = 12, I had 12, yes.\nSo it is still 12.\n"


def gone_on(text, seed=0):
    found = continue_sample(Sample(PROBLEM, text), random.Random(seed))
    return None if found is None else (found.kept, found.gold)


@pytest.mark.parametrize("slip_rate", [0.0, 1.0])
def test_what_the_solver_writes_never_goes_astray(slip_rate):
    rng = random.Random(0)
    for _ in range(200):
        problem = sample_problem(rng)
        trace = write_trace(problem, rng, slip_rate)
        if slip_rate and any(not piece.trained for piece in trace.rechecks):
            continue  # a re-check that goes wrong itself
        found = continue_sample(Sample(problem, trace.text), rng)
        derivation = "".join(piece.text for piece in trace.derivation)
        is_right = all(piece.trained for piece in trace.derivation)
        assert found.kept == ("" if is_right else derivation)
        assert found.kept + found.gold == trace.text


def test_a_wrong_value_of_a_recheck_is_doubted_and_the_derivation_stands():
    wrong = "5 + 10 = 16, I had 16, yes.\n16 - 3 = 13, I had 13, yes.\nSo it is still 13.\n"
    text = f"{DERIVATION}{OPENING}{wrong}</think>\n"
    kept, gold = gone_on(text)
    assert kept == f"{DERIVATION}{OPENING}5 + 10 = 16"
    third = ", I had 15. Again: He buys 5 more: 10 + 5 = 15, I had 15, yes.\n"
    assert gold.startswith(f"{third}15 - 3 = 12, I had 12, yes.\n")
    assert gold.endswith(END_OF_12)


def test_a_slip_of_the_derivation_that_a_recheck_passes_over_is_named():
    wrong = "5 + 10 = 15, I had 15, yes.\n16 - 3 = 13, I had 13, yes.\nSo it is still 13.\n"
    text = f"{SLIPPED}{OPENING}{wrong}</think>\n"
    kept, gold = gone_on(text)
    assert kept == f"{SLIPPED}{OPENING}5 + 10 = 15"
    named = ", I had 16. Again: He buys 5 more: 10 + 5 = 15, I had 16. That was a slip.\n"
    assert gold == f"{named}15 - 3 = 12.\nSo the answer is 12.\n{END_OF_12}"


def test_a_slip_that_stands_beside_the_right_value_is_named():
    kept, gold = gone_on(f"{SLIPPED}{OPENING}5 + 10 = 15, I had 16, yes.\n16 - 3 = 13\n</think>\n")
    assert kept == f"{SLIPPED}{OPENING}5 + 10 = 15, I had 16"
    assert gold.startswith(
        ". Again: He buys 5 more: 10 + 5 = 15, I had 16. That was a slip.\n15 - 3 = 12.\n"
    )


def test_a_slip_that_the_recheck_repeats_is_calculated_anew():
    kept, gold = gone_on(
        f"{SLIPPED}{OPENING}5 + 10 = 16, I had 16, yes.\n16 - 3 = 13, I had 13, yes.\n</think>\n"
    )
    assert kept == SLIPPED + OPENING
    assert gold.startswith(
        "5 + 10 = 15, I had 16. Again: He buys 5 more: 10 + 5 = 15, I had 16. That was a slip.\n"
    )


def test_a_doubt_without_a_cause_is_not_begun_or_not_believed():
    doubt = ", I had 15. Again: He buys 5 more: "
    text = f"{DERIVATION}{OPENING}5 + 10 = 15{doubt}10 + 5 = 18. That was a slip.\n18 - 3 = 15.\n"
    found = {gone_on(f"{text}So the answer is 15.\n</think>\n", seed) for seed in range(8)}
    kept = {kept for kept, _ in found}
    begun = f"{DERIVATION}{OPENING}5 + 10 = 15"
    assert kept == {f"{begun}, I had 15", begun + doubt}
    for kept, gold in found:
        assert gold.startswith(
            "10 + 5 = 15, I had 15, yes.\n15" if kept.endswith(doubt) else ", yes.\n15"
        )


def test_a_third_calculation_that_goes_wrong_is_calculated_once_more():
    doubt = ", I had 15. Again: He buys 5 more: "
    kept, gold = gone_on(
        f"{DERIVATION}{OPENING}5 + 10 = 17{doubt}10 + 5 = 17. That was a slip.\n17\n"
    )
    assert kept.endswith(doubt)
    assert gold.startswith("10 + 5 = 15, I had 15, yes.\n")


@pytest.mark.parametrize(
    "claim", ["So it is still 13.\n", "That gives 2 again.\n", "15 - 3 = 12, I had 12, yes.\n"]
)
def test_another_answer_than_that_of_the_recheck_is_not_said(claim):
    checked = f"{DERIVATION}{OPENING}{CHECKED}15 - 3 = 12, I had 12, yes.\n"
    kept, gold = gone_on(f"{checked}{claim}</think>\n")
    assert kept == checked
    assert "12" in gold.splitlines()[0]
    assert gold.endswith(END_OF_12)


def test_an_answer_misquoted_after_a_right_derivation_is_corrected():
    misquoted = DERIVATION.replace("is 12", "is 21")
    checked = f"{misquoted}{OPENING}{CHECKED}15 - 3 = 12, I had 12, yes.\n"
    assert gone_on(f"{checked}So it is still 21.\n</think>\n") == (
        checked,
        f"So the answer is 12.\n{END_OF_12}",
    )


def test_thoughts_do_not_end_before_a_slip_is_found():
    kept, gold = gone_on(f"{SLIPPED}</think>\nThe answer is \\boxed{{13}}.")
    assert kept == SLIPPED
    assert "That was a slip." in gold
    assert gold.endswith(END_OF_12)


def test_a_spoken_answer_that_is_misquoted_is_said_right_once():
    begun = f"{DERIVATION}</think>\n"
    assert gone_on(f"{begun}The answer is \\boxed{{21}}.") == (begun, "The answer is \\boxed{12}.")


REREAD = "Hmm, did I read the question right?\nTom has 10 nuts.\n"
STORY = "He buys 5 more.\nHe uses 3.\nHow many?\nRight, that is 12.\n"


def test_a_story_read_again_is_quoted():
    checked = f"{DERIVATION}{RECHECK}{REREAD}"
    kept, gold = gone_on(f"{checked}He buys 15 more.\nHe uses 3.\n</think>\n")
    assert (kept, gold) == (checked, STORY + END_OF_12)


@pytest.mark.parametrize("before", ["", f"{RECHECK}{REREAD}{STORY}"], ids=["at first", "twice"])
def test_the_story_is_read_again_once_and_behind_a_recheck(before):
    kept, gold = gone_on(f"{DERIVATION}{before}{REREAD}{STORY}{END_OF_12}")
    assert (kept, gold) == (DERIVATION + before, END_OF_12)


@pytest.mark.parametrize(
    "text",
    [
        "He uses 3: 10 - 3 = 7.\nHe buys 5 more: 7 + 5 = 12.\nSo the answer is 12.\n",
        "He buys 5 more: 10 + 5 = 15.\n",
        f"{DERIVATION}{OPENING}5 + 1",
        DERIVATION,
        "",
    ],
    ids=["other steps", "no answer", "cut off", "not begun", "nothing"],
)
def test_a_sample_without_a_place_to_go_on_from_gives_no_example(text):
    assert gone_on(text) is None


def test_what_is_calculated_again_in_vain_ends_instead():
    """Bare sums and long chains are answered after their derivation; a wrong one gives nothing."""
    rng = random.Random(0)
    for problem in (sample_varied(rng, "sum"), sample_chain(rng, 6)):
        trace = write_trace(problem, rng)
        derivation = "".join(piece.text for piece in trace.derivation)
        assert continue_sample(Sample(problem, trace.text), rng).kind == "right"
        found = continue_sample(Sample(problem, f"{derivation}{OPENING}1 + 1 = 2.\n"), rng)
        assert (found.kind, found.kept) == ("astray", derivation)
        assert found.gold == closing(problem)
        slipped = derivation.replace(f"= {problem.answer}.", "= 1.")
        assert continue_sample(Sample(problem, f"{slipped}{OPENING}"), rng) is None


def test_every_continuation_is_good_to_its_end():
    """Whatever token of a trace is replaced."""
    rng, number = random.Random(1), 0
    while number < 150:
        problem = sample_problem(rng)
        trace = write_trace(problem, rng, slip_rate=0.5).text
        places = [n for n, character in enumerate(trace) if character.isdigit()]
        place = rng.choice(places)
        text = trace[:place] + rng.choice("123456789") + trace[place + 1 :]
        found = continue_sample(Sample(problem, text), rng)
        if found is None or not found.kept:
            continue
        number += 1
        whole = found.kept + found.gold
        assert whole.endswith(f"\\boxed{{{problem.answer}}}.")
        assert all(label_lines(problem, whole)[-2:])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(reasoner_dir() / "tokenizer.json"))


def test_loss_is_taken_on_the_words_of_the_solver_alone(tokenizer):
    sample = Sample(
        PROBLEM,
        f"{DERIVATION}{OPENING}5 + 10 = 16, I had 16, yes.\n16 - 3 = 13, yes.\n</think>\n",
    )
    found = continue_sample(sample, random.Random(0))
    example = continued(tokenizer, sample, found)
    told = [n for n, mark in zip(example.ids, example.trained, strict=True) if mark]
    assert tokenizer.decode(told, skip_special_tokens=False) == tokenizer.decode(
        tokenizer.encode(found.gold + END).ids, skip_special_tokens=False
    )


def test_samples_are_sorted_by_their_derivation_and_by_whether_they_went_astray(tokenizer):
    texts = {
        "right": f"{DERIVATION}{END_OF_12}",
        "astray": f"{DERIVATION}</think>\nThe answer is \\boxed{{13}}.",
        "slipped": f"{SLIPPED}</think>\nThe answer is \\boxed{{13}}.",
    }
    samples = {kind: Sample(PROBLEM, text) for kind, text in texts.items()}
    examples = Continued([*samples.values(), Sample(PROBLEM, "")], random.Random(0))
    assert examples.pairs.keys() == samples.keys()
    for kind, pairs in examples.pairs.items():
        assert [sample for sample, _ in pairs] == [samples[kind]]
        tokenizer = Tokenizer.from_file(str(reasoner_dir() / "tokenizer.json"))
        assert examples.example(tokenizer, random.Random(0), kind) == continued(
            tokenizer, *pairs[0]
        )
