"""Predicted outputs: the request's own draft, which changes the speed and never a token."""

import pytest

from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.speculative.drafter import DraftRequest, ScheduledRequests, TokenView
from forethought.speculative.prediction import MAX_DRAFT_LEN, PredictionDrafter
from models import greedy, prompts, tiny

PROMPT = prompts((5,))[0]
SAID = greedy(tiny("llama"), [PROMPT], 40)[0]
GREEDY = SamplingParams(temperature=0.0, max_tokens=len(SAID), ignore_eos=True)
NGRAM = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2, is_public_pool=False)


def predicted(tokens, params=GREEDY, **fields):
    return params.replace(speculation=SpeculationParams(prediction=tuple(tokens), **fields))


def run(params, speculative=()):
    """The output for the prompt, its metrics, and the number of steps."""
    made = engine(speculative=speculative)
    (sample,) = made.add(PROMPT, params, keep=True)
    assert all(event.error is None for event in drain(made))
    metrics, steps = sample.metrics, made.stats.steps
    [said] = outputs([sample])
    made.close(sample)
    expect_empty(made)
    return said, metrics, steps


@pytest.mark.parametrize("speculative", [(), (NGRAM,)], ids=["no drafter", "ngram"])
def test_what_is_predicted_rightly_is_accepted_and_saves_steps(speculative):
    said, metrics, steps = run(predicted(SAID), speculative)
    assert said == SAID
    assert metrics.accepted >= len(SAID) - 4
    assert steps <= 2 + len(SAID) // MAX_DRAFT_LEN + 1


@pytest.mark.parametrize(
    "prediction",
    [
        [7],
        [9, 9, 9, 9],
        SAID[:3],
        SAID + SAID + [1, 2, 3],
        SAID[20:],
        [3, *SAID],
        [*SAID[:10], 1, 1, *SAID[12:]],
    ],
    ids=["one", "wrong", "short", "long", "from the middle", "shifted", "edited"],
)
def test_a_wrong_or_partly_wrong_prediction_changes_no_token(prediction):
    assert run(predicted(prediction))[0] == SAID


def test_drafts_go_on_behind_what_was_edited():
    edited = [*SAID[:10], 1 + SAID[10] % 20, 1 + SAID[11] % 20, *SAID[12:]]
    _, metrics, steps = run(predicted(edited))
    assert metrics.accepted >= len(SAID) - 12
    assert steps < len(SAID) // 2


def test_seeded_samples_are_the_same_with_a_prediction():
    params = GREEDY.replace(temperature=1.0, seed=5, n=1)
    plain, _, _ = run(params)
    said, metrics, _ = run(predicted(plain, params))
    assert said == plain
    assert metrics.accepted > 0
    assert run(predicted(SAID, params))[0] == plain


def test_requests_without_a_prediction_beside_it_are_not_drafted_for():
    made = engine()
    own, other = (made.add(PROMPT, params, keep=True)[0] for params in (predicted(SAID), GREEDY))
    drain(made)
    assert outputs([own, other]) == [SAID, SAID]
    assert own.metrics.accepted > 0
    assert other.metrics.drafted == 0
    made.close(own)
    made.close(other)
    assert not made.speculation.takes_part(made.scheduler.running)
    expect_empty(made)


def test_drafts_are_no_longer_than_the_request_allows():
    _, metrics, _ = run(predicted(SAID, max_draft_len=2))
    assert metrics.accepted > 0
    assert len(metrics.accepted_by_position) == 2


def test_the_longest_match_is_followed_and_then_the_nearest_one():
    prediction = (1, 2, 3, 4, 1, 2, 9, 5, 1, 2, 8)
    drafter = PredictionDrafter()
    tokens = [6, 1, 2, 3, 4, 7, 5, 1, 2]
    params = predicted(prediction)
    request = DraftRequest(1, TokenView(tokens), 1, params, 0, 0, 0, 3, 3)
    drafter.prepare_draft_tokens(ScheduledRequests([request]))
    assert request.py_draft_tokens == [8]
    drafter.release(request)
    assert drafter.idle
    near = DraftRequest(2, TokenView([6, 1, 2, 3, 7, 1, 2]), 1, params, 0, 0, 0, 2, 2)
    drafter.prepare_draft_tokens(ScheduledRequests([near]))
    assert near.py_draft_tokens == [9, 5]


def test_a_prediction_that_would_not_be_drafted_is_refused():
    for fields in ({"enabled": False}, {"drafter": "ngram"}, {"drafter": "prediction"}):
        with pytest.raises(ParameterError, match="prediction"):
            SpeculationParams(prediction=(1, 2), **fields)
    with pytest.raises(ParameterError, match="prediction"):
        SpeculationParams(prediction=())
    made = engine()
    with pytest.raises(ParameterError, match=r"speculation\.prediction"):
        made.add(PROMPT, predicted([10**6]))
    with pytest.raises(ParameterError, match="no tokenizer"):
        made.add(PROMPT, GREEDY.replace(speculation={"prediction": "text"}))


def test_a_prediction_may_be_text():
    params = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(dtype="float32", max_batch_size=2) as llm:
        question = [{"role": "user", "content": "Tom has 10 nuts. He buys 5 more. How many now?"}]
        prompt = llm.chat_prompt(question)
        plain = llm.generate(prompt, params).outputs[0]
        guided = params.replace(speculation={"prediction": plain.text})
        said = llm.generate(prompt, guided).outputs[0]
    assert said.token_ids == plain.token_ids
    assert said.metrics.accepted > 10
