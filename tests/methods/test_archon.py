"""Archon: what each component makes of the candidates, and what a pipeline may look like."""

from __future__ import annotations

import json

import pytest

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError
from forethought.methods import archon
from forethought.methods.parts import archon_config
from forethought.scaffolding import Budget, ScaffoldingLlm, ScriptedWorker, Stage
from scripted import Together, answer

ANSWERS = ["six", "seven", "eight"]
GENERATOR = [{"type": "generator", "samples": 3}]


def says(prompt, index):
    """What each component is answered with, by how its prompt begins; seven is right."""
    if prompt == "p":
        return ANSWERS[index]
    known = {
        "Criticise": lambda: "right" if "\nseven" in prompt else "wrong",
        "Check an": lambda: "so [Correct]" if "\nseven" in prompt else "[Correct] no: [Incorrect]",
        "Write up": lambda: "Tests:\n- odd\n- prime\n- below 9",
        "Say which": lambda: passing(prompt),
    }
    for begin, reply in known.items():
        if prompt.startswith(begin):
            return reply()
    if "order them" in prompt:
        return "Ranking: [2] > [3]"
    return f"fused {prompt.count('[1]')}{prompt.count('[2]')}{prompt.count('[3]')}"


def passing(prompt):
    odd = "Passed" if "\nseven" in prompt else "Failed"
    return f"Test 1: {odd}\nTest 2: {odd}\nTest 3: Passed"


def run(*layers, worker=None, **options):
    worker = worker or ScriptedWorker(says)
    controller = methods.create("archon", pipeline={"layers": list(layers)})
    return answer(controller, worker, **options), worker


def told(result):
    return result.output.meta["archon"]


def counts(result):
    return [layer["candidates"] for layer in told(result)["layers"]]


def test_a_generator_draws_samples_with_seeds_of_their_own():
    result, worker = run(GENERATOR, sampling_params={"seed": 1, "temperature": 0.9})
    assert result.output.text == "six", "the first of those that are left"
    assert result.output.candidates == ANSWERS
    assert len({call.task.seed for call in worker.calls}) == 3
    assert {call.task.temperature for call in worker.calls} == {0.9}


def test_a_ranker_keeps_the_best_and_those_it_does_not_name_come_last():
    result, _ = run(GENERATOR, [{"type": "ranker", "top_k": 2}])
    assert (result.output.text, counts(result)) == ("seven", [3, 2])
    assert archon.ranking_in("Ranking: [2] > [3]", 3) == [1, 2, 0]
    assert archon.ranking_in("[9] [1]\nranking: [3] > [3] > [7] > [1]", 3) == [2, 0, 1]
    assert archon.ranking_in("none", 2) == [0, 1]


def test_a_verifier_keeps_what_is_correct_and_everything_if_nothing_is():
    result, _ = run(GENERATOR, [{"type": "verifier"}])
    assert (result.output.text, counts(result)) == ("seven", [3, 1])
    wrong = ScriptedWorker(lambda prompt, n: ANSWERS[n] if prompt == "p" else "[Incorrect]")
    result, _ = run(GENERATOR, [{"type": "verifier"}], worker=wrong)
    assert (result.output.text, counts(result)) == ("six", [3, 3])


def test_components_read_what_stands_behind_thoughts_and_the_answer_keeps_its_own():
    def thinks(prompt, index):
        if prompt == "p":
            return f"hidden {index}</think>\n{ANSWERS[index]}"
        assert "hidden" not in prompt
        if prompt.startswith("Write up"):
            return "- hidden draft of a test\n</think>\n- odd"
        if prompt.startswith("Say which"):
            assert "Test 1: odd" in prompt
        return f"hidden [1]</think>{says(prompt, index)}"

    layers = [[{"type": "critic"}], [{"type": "ranker", "top_k": 3}]]
    result, _ = run(GENERATOR, *layers, worker=ScriptedWorker(thinks))
    assert result.output.text == "hidden 1</think>\nseven"
    tests = [[{"type": "unit_test_generator"}], [{"type": "unit_test_evaluator"}]]
    result, _ = run(GENERATOR, *tests, worker=ScriptedWorker(thinks))
    assert result.output.candidates[2] == "hidden 2</think>\neight"


def test_unit_tests_order_the_candidates_by_how_many_they_pass():
    evaluator = [{"type": "unit_test_evaluator", "top_k": 2}]
    result, worker = run(GENERATOR, [{"type": "unit_test_generator", "num_tests": 2}], evaluator)
    # of two tests seven passes both, the others none: their order stays
    assert (result.output.text, counts(result)) == ("seven", [3, 3, 2])
    asked = [call.prompt for call in worker.calls if call.prompt.startswith("Say which")]
    assert len(asked) == 3
    assert "Test 1: odd\nTest 2: prime\n" in asked[0]
    assert "below 9" not in asked[0]
    assert (
        archon.num_passed("Test 1: Passed, Test 1: Failed. test 2: passed; Test 9: passed", 2) == 1
    )


def test_a_fuser_reads_all_candidates_and_their_critiques():
    fuser = [{"type": "fuser"}]
    plain, _ = run(GENERATOR, fuser)
    assert plain.output.text == "fused 111"
    criticised, worker = run(GENERATOR, [{"type": "critic"}], fuser)
    assert criticised.output.text == "fused 222"
    assert "[2] seven\n\nCritique of [2]: right" in worker.prompts[-1]
    assert counts(criticised) == [3, 3, 1]


def test_several_models_generate_side_by_side_and_are_told_by_their_tags():
    layer = [{"type": "generator", "model": "a", "samples": 2}, {"type": "generator", "model": "b"}]
    controller = methods.create("archon", pipeline={"layers": [layer]})
    assert [*map(str, methods.worker_tags(controller))][1:] == ["a", "b"]
    workers = {"a": ScriptedWorker(["1", "2"]), "b": ScriptedWorker(["3"])}
    with ScaffoldingLlm(controller, workers) as llm:
        assert llm.generate("p").output.candidates == ["1", "2", "3"]


def test_calls_of_a_layer_run_at_the_same_time():
    layer = [{"type": "generator", "samples": 2}, {"type": "generator", "samples": 3}]
    result, _ = run(layer, worker=Together(5))
    assert result.output.candidates == ["p"] * 5


def test_a_critic_and_a_unit_test_generator_run_side_by_side():
    notes = [{"type": "unit_test_generator"}, {"type": "critic"}]
    result, worker = run(GENERATOR, notes, [{"type": "unit_test_evaluator"}], [{"type": "ranker"}])
    assert "Critique of [1]: right" in worker.prompts[-1], "seven passes most tests"
    assert counts(result) == [3, 3, 3, 1]


def test_the_settings_of_a_component_win_over_those_of_the_request():
    layer = [{"type": "generator", "temperature": 0.5, "max_tokens": 2}]
    _, worker = run(layer, [{"type": "fuser"}], sampling_params={"temperature": 0.0})
    first, fuser = (call.task for call in worker.calls)
    assert (first.temperature, first.max_tokens, fuser.temperature) == (0.5, 2, 0.7)
    _, worker = run(GENERATOR, [{"type": "ranker"}], sampling_params={"max_tokens": 30})
    assert (worker.calls[-1].task.max_tokens, worker.calls[-1].task.temperature) == (30, 0.0)


def test_the_first_candidate_so_far_is_returned_when_the_budget_ends():
    result, _ = run(GENERATOR, [{"type": "ranker"}], budget=Budget(calls=3))
    assert result.output.text == "six"
    assert told(result) == {
        "layers": [{"types": ["generator"], "candidates": 3}],
        "budget": True,
    }
    result, worker = run(GENERATOR, budget=Budget(calls=2))
    assert (result.output.text, len(worker.calls)) == ("seven", 2), "the longer of two samples"


def test_each_layer_is_told_as_a_stage():
    result, _ = run(GENERATOR, [{"type": "ranker"}])
    stages = [event.output for event in result.events(stages=True)]
    layers = [one.fields for one in stages if isinstance(one, Stage) and one.name == "layer"]
    assert layers == [
        {"number": 0, "types": ["generator"], "candidates": 3},
        {"number": 1, "types": ["ranker"], "candidates": 1},
    ]


# ---- configurations ------------------------------------------------------------------------------


def test_a_pipeline_is_read_from_a_mapping_json_or_yaml(tmp_path):
    given = {"layers": [GENERATOR, [{"type": "ranker", "top_k": 2}]]}
    (tmp_path / "one.json").write_text(json.dumps(given))
    (tmp_path / "one.yaml").write_text(
        "layers:\n- - {type: generator, samples: 3}\n- - {type: ranker, top_k: 2}\n"
    )
    expected = archon_config.load(given)
    assert expected.to_dict() == given
    for name in ("one.json", "one.yaml"):
        assert archon_config.load(tmp_path / name) == expected
    assert methods.create("archon").pipeline == archon_config.load(archon.DEFAULT)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "invalid layers of a pipeline"),
        ([[]], r"invalid layers\[0\]"),
        ([["generator"]], r"invalid layers\[0\]\[0\]"),
        ([GENERATOR, [{"type": "ranker", "top_k": 0}]], r"layers\[1\]\[0\]: .*top_k"),
        ([GENERATOR, [{"type": "ranker", "k": 1}]], r"layers\[1\]\[0\]: .*'k'"),
        ([[{"type": "ranker"}]], r"invalid layers\[0\].*it has ranker"),
        ([GENERATOR, GENERATOR], r"invalid layers\[1\].*it has generator"),
        ([GENERATOR, [{"type": "ranker"}, {"type": "fuser"}]], "cannot run side by side"),
        ([GENERATOR, [{"type": "critic"}, {"type": "critic"}]], "cannot run side by side"),
        ([GENERATOR, [{"type": "unit_test_evaluator"}]], "there are no unit tests yet"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_by_its_layer(layers, message):
    with pytest.raises(ParameterError, match=message):
        methods.create("archon", pipeline={"layers": layers})


def test_other_mistakes_are_refused_by_name(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'ranker'"):
        methods.create("archon", pipeline={"layers": [GENERATOR, [{"type": "rankr"}]]})
    with pytest.raises(ParameterError, match="'layer'"):
        methods.create("archon", pipeline={"layers": [GENERATOR], "layer": 1})
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.yaml", "bad.json", "none.json"):
        with pytest.raises(ParameterError, match="cannot read the pipeline"):
            methods.create("archon", pipeline=tmp_path / name)
    with pytest.raises(ParameterError, match="cannot honour n"):
        run(GENERATOR, sampling_params={"n": 2})
    controller = methods.create("archon")
    with pytest.raises(ParameterError, match="the question as text"):
        answer(controller, ScriptedWorker(says), [1, 2])
