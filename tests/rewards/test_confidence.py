"""Confidence of samples: hand-computed windows, and the same figures from every worker."""

import math

import pytest

from forethought.errors import ParameterError
from forethought.llm.async_llm import AsyncLLM
from forethought.methods import BestOfNController, MajorityVoteController, create
from forethought.outputs import Logprob, TokenConfidence
from forethought.rewards.confidence import (
    bottom_groups,
    confidence_of,
    group_means,
    lowest_group,
    mean,
    stop_threshold,
    tail_mean,
)
from forethought.scaffolding import (
    ConfidenceRewardController,
    Controller,
    EngineWorker,
    GenerationTask,
    NativeGenerationController,
    Reply,
    ScaffoldingOutput,
    ScriptedWorker,
    StreamGenerationTask,
)
from scripted import answer

VALUES = [4.0, 2.0, 6.0, 1.0, 7.0]


def test_groups_are_all_windows_of_that_many_tokens():
    assert group_means(VALUES, 2) == [3.0, 4.0, 3.5, 4.0]
    assert group_means(VALUES, 5) == group_means(VALUES, 99) == [4.0]
    assert group_means(VALUES, 1) == VALUES


def test_aggregations_of_a_hand_computed_sample():
    assert mean(VALUES) == 4.0
    assert tail_mean(VALUES, 2) == 4.0
    assert tail_mean(VALUES, 9) == 4.0
    assert lowest_group(VALUES, 2) == 3.0
    assert bottom_groups(VALUES, 2) == 3.0  # a tenth of four groups is one group
    assert bottom_groups(VALUES, 2, share=0.5) == 3.25
    many = [float(number) for number in range(20)]
    assert bottom_groups(many[::-1], 1) == 0.5


def test_the_stop_threshold_is_the_percentile_that_keeps_the_share():
    lowest = [3.0, 1.0, 2.0, 5.0, 4.0]
    assert [stop_threshold(lowest, kept) for kept in (0.0, 0.5, 1.0)] == [5.0, 3.0, 1.0]
    assert stop_threshold(lowest, 0.9) == pytest.approx(1.4)
    assert stop_threshold([7.0], 0.1) == 7.0


def test_confidence_of_a_servers_log_probabilities_is_over_its_most_probable_tokens():
    entries = {7: Logprob(-3.0), -2: Logprob(-0.5, 1), -3: Logprob(-1.5, 2)}
    assert confidence_of(entries, 20) == TokenConfidence(1.0, -3.0)
    assert confidence_of(entries, 1) == TokenConfidence(0.5, -3.0)
    assert confidence_of({7: Logprob(-3.0)}, 5).value == 3.0
    impossible = {**entries, -4: Logprob(-math.inf, 3)}
    assert confidence_of(impossible, 20).value == 1.0


# ---- as a reward -------------------------------------------------------------------------------


def sure(text, *values):
    """A reply whose tokens have these confidences."""
    scores = [{ord(c): Logprob(-value, 1)} for c, value in zip(text, values, strict=True)]
    return Reply(text, logprobs=scores)


def best(replies, **settings):
    controller = BestOfNController(
        NativeGenerationController(), ConfidenceRewardController(**settings), len(replies)
    )
    worker = ScriptedWorker(replies)
    return answer(controller, worker), worker


REPLIES = [sure("aaaa", 5, 5, 5, 1), sure("bbbb", 3, 3, 3, 3), sure("cccc", 9, 1, 1, 9)]


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({"aggregation": "mean"}, [4.0, 3.0, 5.0]),
        ({"aggregation": "tail_mean", "window": 2}, [3.0, 3.0, 5.0]),
        ({"aggregation": "lowest_group", "window": 2}, [3.0, 3.0, 1.0]),
        ({"aggregation": "bottom_groups", "window": 1}, [1.0, 3.0, 1.0]),
        ({"aggregation": "mean", "measure": "logprob"}, [-4.0, -3.0, -5.0]),
    ],
)
def test_best_of_n_chooses_by_confidence(settings, scores):
    result, worker = best(REPLIES, **settings)
    found = result.output.meta["best_of_n"]
    assert found["scores"] == pytest.approx(scores)
    assert found["index"] == scores.index(max(scores))
    assert [call.task.confidence for call in worker.calls] == [20] * 3, "it was asked for"


def test_best_of_n_by_name_takes_confidence_as_its_reward():
    path = "forethought.rewards.confidence:ConfidenceRewardController"
    reward = {"method": path, "aggregation": "mean", "top_k": 5}
    controller = create("best_of_n", generation_controller="plain", reward_controller=reward)
    worker = ScriptedWorker(REPLIES * 2)
    assert answer(controller, worker, sample_num=3).output.text == "cccc"
    assert worker.calls[0].task.confidence == 5


def test_what_the_request_asks_for_is_not_changed_by_the_reward():
    controller = BestOfNController(NativeGenerationController(), ConfidenceRewardController(), 2)
    worker = ScriptedWorker(REPLIES)
    answer(controller, worker, sampling_params={"confidence": 3})
    assert [call.task.confidence for call in worker.calls] == [3, 3]


def test_a_sample_without_confidences_is_refused_by_name():
    controller = BestOfNController(NativeGenerationController(), ConfidenceRewardController(), 2)
    with pytest.raises(ParameterError, match=r"no confidences.*log-probabilities"):
        answer(controller, ScriptedWorker(["a", "b"]))
    with pytest.raises(ParameterError, match=r"self_certainty is not known"):
        best(REPLIES, measure="self_certainty")


@pytest.mark.parametrize(
    "field", [{"aggregation": "sum"}, {"measure": "x"}, {"window": 0}, {"top_k": 65}]
)
def test_settings_out_of_range_are_refused(field):
    with pytest.raises(ParameterError, match=next(iter(field))):
        ConfidenceRewardController(**field)


def test_inserted_tokens_have_no_confidence_and_count_in_none():
    one = ScaffoldingOutput("a", [1], confidences=[TokenConfidence(2.0, -1.0)])
    whole = ScaffoldingOutput.join([one, ScaffoldingOutput.inserted("+", [3]), one])
    assert whole.confidences == [one.confidences[0], None, one.confidences[0]]
    assert whole.without_last(1).confidences == whole.confidences[:2]
    task = GenerationTask(input_str="p")
    task.result = whole
    assert ConfidenceRewardController("mean").score(task) == 2.0
    assert task.copy().confidences is None


# ---- from workers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_worker():
    with EngineWorker(AsyncLLM(dtype="float32")) as worker:
        yield worker


FIELDS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "confidence": 4}


def test_the_engine_gives_confidences_to_tasks_streams_and_forks(engine_worker):
    class Play(Controller):
        def process(self, tasks, **kwargs):
            whole = GenerationTask(input_str="Hello", worker_tag="generation", **FIELDS, n=2)
            yield [whole]
            stream = StreamGenerationTask(
                input_str="Hello", worker_tag="generation", streaming_step=5, **FIELDS
            )
            seen = []
            while not stream.end_flag:
                yield [stream]
                seen.append(list(stream.confidences))
            yield [silent := GenerationTask(input_str="Hello", worker_tag="generation")]
            half = StreamGenerationTask(
                input_str="Hello", worker_tag="generation", streaming_step=5, **FIELDS
            )
            yield [half]
            fork = half.fork(max_tokens=7)
            yield [fork]
            tasks[0].output_str = ""
            tasks[0].customized_result_fields |= {"whole": whole, "seen": seen, "fork": fork}
            assert silent.confidences is None

    found = answer(Play(), engine_worker).output.meta
    whole = found["whole"].confidences
    assert [len(sample.confidences) for sample in found["whole"].samples] == [12, 12]
    assert [len(each) for each in found["seen"]] == [5, 10, 12], "they come with the tokens"
    for each in (found["seen"][-1], found["fork"].joined.confidences):
        for here, there in zip(each, whole, strict=True):
            assert here == pytest.approx(there, abs=1e-4)


def test_confidences_of_the_engine_are_those_of_its_log_probabilities(engine_worker):
    fields = {**FIELDS, "num_logprobs": 4}
    output = answer(NativeGenerationController(fields), engine_worker, "Hello").output
    for entries, confidence in zip(output.logprobs, output.confidences, strict=True):
        assert confidence[:2] == pytest.approx(confidence_of(entries, 4)[:2], abs=1e-4)


def test_samples_of_a_vote_keep_their_confidences(engine_worker):
    controller = MajorityVoteController(NativeGenerationController(FIELDS), 2)
    output = answer(controller, engine_worker, "Hello").output
    assert len(output.confidences) == len(output.token_ids)
