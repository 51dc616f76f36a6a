"""Scripts for ``tensorrt_llm.scaffolding.contrib``: DeepConf and tree inference.

Code as users have it; only imports and models are changed.
"""

import pytest

from forethought.compat.tensorrt_llm.contrib.DeepConf import (
    ConfidenceInfo,
    DeepConfOfflineController,
    DeepConfOfflineMajorityVoteController,
    DeepConfOnlineController,
    DeepConfOnlineMajorityVoteController,
)
from forethought.compat.tensorrt_llm.contrib.TreeInference import MCTSController, TOTController
from forethought.errors import ParameterError
from forethought.outputs import Logprob
from forethought.scaffolding import (
    CheckerController,
    NativeGenerationController,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
    extract_answer_from_boxed,
)


def sure(answer, *values):
    """A reply of this answer whose tokens have these confidences; the last one for all others."""
    text = rf"\boxed{{{answer}}}"
    values = [*values, *[values[-1]] * (len(text) - len(values))]
    return Reply(text, logprobs=[{1: Logprob(-value, 1)} for value in values])


def made(kind, **settings):
    """A vote, as ``run_generation.py`` makes either of them from one set of arguments."""
    generation_controller = NativeGenerationController(
        sampling_params={"temperature": 0.6, "max_tokens": 64, "num_logprobs": 20, "top_p": 0.95}
    )
    kwargs = {
        "generation_controller": generation_controller,
        "conf_group_size": 2,
        "conf_threshold": 0.5,
    }
    warmup_generation_controller = DeepConfOfflineController(**kwargs)
    final_generation_controller = DeepConfOnlineController(**kwargs)
    return kind(
        generation_controller=warmup_generation_controller,
        warmup_generation_controller=warmup_generation_controller,
        final_generation_controller=final_generation_controller,
        **{"sample_num": 4, "warmup_sample_num": 2, "confidence_percentile": 90, **settings},
    )


def voted(controller, replies):
    worker = ScriptedWorker(replies)
    llm = ScaffoldingLlm(controller, {NativeGenerationController.WorkerTag.GENERATION: worker})
    (result,) = llm.generate(["What is 3 + 4?"])
    llm.shutdown(shutdown_workers=True)
    return result, worker


SAMPLES = [sure(5, 2.0), sure(7, 3.0), sure(5, 2.0), sure(8, 1.0, 1.0, 90.0)]


@pytest.mark.parametrize("kind", [DeepConfOfflineController, DeepConfOnlineController])
def test_a_sample_has_its_confidence_with_it(kind):
    generation = NativeGenerationController(sampling_params={"num_logprobs": 20})
    controller = kind(generation_controller=generation, conf_group_size=2, conf_threshold=0.5)
    result, _ = voted(controller, [sure(7, 3.0, 1.0)])
    assert extract_answer_from_boxed(result.outputs[0].text) == "7"
    info = result.output.meta["confidence_info"]
    assert info.conf_list == [3.0] + [1.0] * 8
    assert (info.get_min_conf_grouped(), info.conf_group_size) == (1.0, 2)


def test_the_online_sample_ends_at_its_first_group_below_the_threshold():
    generation = NativeGenerationController(sampling_params={"num_logprobs": 20})
    controller = DeepConfOnlineController(generation, 2, 1.5)
    result, _ = voted(controller, [sure(7, 9.0, 2.0, 0.5)])
    assert result.output.text == r"\box", "the group of 2.0 and 0.5 is in the second step"
    assert len(result.output.meta["confidence_info"].conf_list) == 4


def test_a_vote_has_the_winners_under_every_policy():
    """5 has two votes of 2, 7 one of 3, and 8 the mean (1 + 1 + 7 x 90) / 9."""
    result, worker = voted(made(DeepConfOfflineMajorityVoteController), SAMPLES)
    output = result.cur_output
    answers = {
        policy: task.customized_result_fields["extracted_answer"]
        for policy, task in output.vote_policy_to_voted_task.items()
    }
    assert answers == {
        "majority": "5",
        "mean_confidence_weighted": "8",
        "tail_confidence_weighted": "8",
        "bottom_window_weighted": "5",
        "min_window_weighted": "5",
        "top10_tail_filtered": "8",
        "top10_bottom_window_filtered": "7",
    }
    assert extract_answer_from_boxed(output.text) == "5"
    assert output.output_token_num == 4 * 9
    assert len(worker.calls) == 4


def test_the_policy_chooses_the_output():
    policy = "top10_bottom_window_filtered"
    controller = made(DeepConfOfflineMajorityVoteController, vote_policy=policy)
    assert voted(controller, SAMPLES)[0].output.text == r"\boxed{7}"


def test_the_online_vote_takes_its_threshold_from_the_warm_up():
    """The 10th percentile of 2.0 and 3.0 is 2.1: the third sample is ended, the fourth is not."""
    replies = [sure(5, 2.0), sure(7, 3.0), sure(5, 2.0), sure(7, 3.0)]
    result, _ = voted(made(DeepConfOnlineMajorityVoteController), replies)
    assert result.output.candidates == [r"\boxed{5}", r"\boxed{7}", r"\b", r"\boxed{7}"]
    assert extract_answer_from_boxed(result.outputs[0].text) == "7"
    assert result.cur_output.output_token_num == 9 + 9 + 2 + 9


def test_what_cannot_be_is_refused_by_name():
    generation = NativeGenerationController()
    with pytest.raises(ParameterError, match="no log-probabilities"):
        voted(DeepConfOfflineController(generation, 2, 0.5), ["7"])
    with pytest.raises(ParameterError, match="vote_policies"):
        made(DeepConfOfflineMajorityVoteController, vote_policies="majority")
    with pytest.raises(ParameterError, match="unanimous"):
        made(DeepConfOfflineMajorityVoteController, vote_policy="unanimous")
    with pytest.raises(ParameterError, match="warmup_sample_num"):
        made(DeepConfOnlineMajorityVoteController, warmup_sample_num=5)
    with pytest.raises(ParameterError, match="'best' or 'vote'"):
        TOTController(generation, selection_strategy="random")
    with pytest.raises(ParameterError, match="max_iterations"):
        TOTController(generation, max_iterations=6)
    assert ConfidenceInfo(conf_threshold=0.5).get_min_conf_grouped() == 0.5


# ---- tree inference ------------------------------------------------------------------------------


def says(prompt, index):
    if not prompt.endswith("?"):
        return "That is it."
    return ["6 x 6 = 30.\n\n", "6 x 6 = 36.\n\n", "6 x 6 = 12.\n\n"][index % 3]


@pytest.mark.parametrize("kind", [MCTSController, TOTController])
def test_a_tree_search_goes_on_from_the_step_with_the_best_reward(kind):
    controller = kind(
        generation_controller=NativeGenerationController({"max_tokens": 64, "temperature": 0.8}),
        reward_controller=CheckerController(lambda _, text: 0.9 if "36" in text else 0.1),
        max_depth=3,
        max_iterations=15,
        num_thoughts_per_step=3,
    )
    worker = ScriptedWorker(says)
    llm = ScaffoldingLlm(
        controller, workers={NativeGenerationController.WorkerTag.GENERATION: worker}
    )
    results = llm.generate(["6 x 6?"])
    llm.shutdown(shutdown_workers=True)
    assert results[0].outputs[0].text == "6 x 6 = 36.\n\nThat is it."
    assert sum(call.prompt.endswith("?") for call in worker.calls) == 3


def test_settings_of_a_tree_search_are_those_of_the_method():
    generation = NativeGenerationController()
    tree = MCTSController(generation, None, 4, 20, 0.5, 3, expansion_parallel_samples=2)
    found = (tree.default_sample_num, tree.width, tree.exploration)
    assert found == (20, 6, 0.5)
    thoughts = TOTController(generation, selection_strategy="vote", branch_factor=3)
    assert (thoughts.default_sample_num, thoughts.num_thoughts) == (3, 3)
    assert thoughts.evaluation == "vote"
