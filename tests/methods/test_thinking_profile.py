"""Methods made for models that think: on others they do without thoughts, or refuse by name."""

import shutil
from pathlib import Path

import pytest

from forethought import AsyncLLM, methods
from forethought.assets import reasoner_dir
from forethought.cli.main import main
from forethought.errors import ParameterError
from forethought.methods.parts.probe import ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER, PROBE_SUFFIX
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    GenerationTask,
    OpenaiWorker,
    ScaffoldingLlm,
    ScriptedWorker,
    Trace,
    replay,
)
from forethought.scaffolding.thinking import ThinkingProfile

THINK = ("<think>", "</think>")
OTHER = ("[THINK]", "[/THINK]")
REQUIRED = {"budget_forcing": {}, "no_thinking": {}}
ADAPTING = {
    "dynasor": {"chunk_size": 10, "certainty_threshold": 2},
    "first_answer": {},
    "budget_vote": {"total_tokens": 400, "default_sample_num": 2},
    "specreason": {"score_threshold": 0, "max_steps": 4, "step_tokens": 64},
}
TEXT = "3 + 4 is 7, and so the answer is 7.\nLet me check that.\n\nIt is 7. \\boxed{7}"


def says(prompt, index):
    if prompt.endswith(PROBE_SUFFIX):
        return "7}"
    return TEXT


def run(name, worker, prompt="3 + 4?", settings=None, **options):
    settings = {**REQUIRED, **ADAPTING}[name] if settings is None else settings
    controller = methods.create(name, **settings)
    workers = dict.fromkeys(methods.worker_tags(controller), worker)
    with ScaffoldingLlm(controller, workers, **options.pop("llm", {})) as llm:
        result = llm.generate_async(prompt, **options)
        return result.result(60)


# ---- the profile -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "thinking"),
    [
        ("p", "so", False),
        ("p", "<think>so", True),
        ("p", "<think>so</think>", False),
        ("p<think>", "so", True),
        ("p<think>", "so</think> 7", False),
        ("<think>a</think>p", "so", False),
    ],
)
def test_the_last_marker_says_whether_a_text_ends_within_a_thought(prompt, output, thinking):
    profile = ThinkingProfile.of_text(prompt, THINK)
    assert profile.is_thinking(output) == thinking
    assert not ThinkingProfile.of_text(prompt, None).is_thinking(output)


def silent(directory, markers):
    """The embedded reasoner with other markers of thoughts, or with none."""
    shutil.copytree(reasoner_dir(), directory)
    start, end = markers or ("(", ")")
    for name in ("tokenizer.json", "chat_template.jinja"):
        file = directory / name
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("<think>", start).replace("</think>", end), encoding="utf-8")
    return directory


@pytest.mark.parametrize("markers", [THINK, OTHER, None])
def test_the_engine_tells_it_by_vocabulary_and_template(markers, tmp_path):
    llm = AsyncLLM(silent(tmp_path / "model", markers), num_threads=1)
    with EngineWorker(llm) as worker:
        ids = llm.chat_prompt([{"role": "user", "content": "3 + 4?"}])
        opened = worker.thinking(GenerationTask(input_tokens=ids))
        closed = worker.thinking(GenerationTask(input_str="3 + 4?"))
    assert (opened.markers, closed.markers) == (markers, markers)
    assert (opened.is_open, closed.is_open) == (markers is not None, False)


@pytest.mark.parametrize("thinks", [True, False, None])
def test_a_server_is_told_what_its_model_does(thinks):
    worker = OpenaiWorker(lambda: None, "m", thinks=thinks, thinking_markers=OTHER)
    profile = worker.thinking(GenerationTask(input_str="p[THINK]"))
    expected = {True: ThinkingProfile(OTHER, True), False: ThinkingProfile(None), None: None}
    assert profile == expected[thinks]


def test_whether_a_server_thinks_is_yes_or_no():
    with pytest.raises(ParameterError, match="invalid thinks"):
        OpenaiWorker(lambda: None, "m", thinks="maybe")


# ---- methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUIRED)
def test_a_method_that_is_for_thoughts_alone_refuses_a_model_without(name):
    worker = ScriptedWorker(says, markers=False)
    with pytest.raises(ParameterError, match=f"{name} needs a model that thinks"):
        run(name, worker)
    assert not worker.calls, "it is refused before anything is generated"


@pytest.mark.parametrize("name", ADAPTING)
def test_a_method_that_can_do_without_thoughts_writes_no_marker(name):
    worker = ScriptedWorker(says, markers=False)
    text = run(name, worker).output.text
    assert "7" in text
    assert not any("</" in prompt for prompt in worker.prompts)
    assert "</" not in text
    for call in worker.calls:
        assert call.task.thinking_budget is None
        assert not any("</" in stop for stop in call.task.stop or ())


@pytest.mark.parametrize("name", [*REQUIRED, *ADAPTING])
@pytest.mark.parametrize("markers", [THINK, OTHER])
def test_every_method_uses_the_markers_of_its_model(name, markers):
    start, end = markers
    worker = ScriptedWorker(lambda prompt, index: says(prompt, index) + f" {end}7", markers=markers)
    text = run(name, worker, f"3 + 4?{start}").output.text
    seen = "".join([text, *worker.prompts])
    seen += "".join(str(call.task.stop) + str(call.task.thinking_end) for call in worker.calls)
    assert {THINK: OTHER, OTHER: THINK}[markers][1] not in seen


def test_dynasor_closes_a_thought_that_is_open_and_no_other():
    text = run("dynasor", ScriptedWorker(says, markers=THINK), "3 + 4?<think>").output.text
    assert text == f"{TEXT[:20]}{ANSWER_SUFFIX_WITH_MARKER}7}}\n\\]"
    for prompt, markers in (("3 + 4?", THINK), ("3 + 4?<think>", False), ("3 + 4?", None)):
        text = run("dynasor", ScriptedWorker(says, markers=markers), prompt).output.text
        assert text == f"{TEXT[:20]}{ANSWER_SUFFIX}7}}\n\\]"


def test_where_the_model_does_not_think_the_first_answer_ends_the_output():
    worker = ScriptedWorker(says, markers=False)
    output = run("first_answer", worker).output
    assert output.text == TEXT[: TEXT.index("\n") + 1]
    assert output.finish_reason == "stop"
    assert output.meta["first_answer"]["marker"] == "answer is"
    assert len(worker.calls) == 1


def test_an_answer_without_a_thought_is_warned_of(caplog):
    run("budget_forcing", ScriptedWorker("7"))
    assert "budget_forcing has changed nothing: the answer has no thought" in caplog.text


@pytest.mark.parametrize("method", ["dynasor", "first_answer", "budget_vote"])
def test_the_engine_writes_no_marker_for_a_model_that_has_none(method, tmp_path):
    llm = AsyncLLM(silent(tmp_path / "model", None), num_threads=1)
    with EngineWorker(llm) as worker:
        prompt = llm.chat_prompt([{"role": "user", "content": "3 + 4?"}])
        settings = {"dynasor": {"chunk_size": 4, "certainty_threshold": 1}}.get(method)
        text = run(
            method,
            worker,
            prompt,
            settings,
            sampling_params={"temperature": 0.0} if method != "budget_vote" else {},
        ).output.text
        assert "</think>" not in text
        for name in REQUIRED:
            with pytest.raises(ParameterError, match="needs a model that thinks"):
                run(name, worker, prompt)


# ---- budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_budget_that_ends_the_chain_leaves_the_answer_of_the_last_probe(streaming):
    answers = iter(["5}", "7}", "7}", "wait}", "1}"])

    def script(prompt, index):
        return next(answers) if prompt.endswith(PROBE_SUFFIX) else TEXT

    settings = {"chunk_size": 10, "certainty_threshold": 3, "streaming": streaming}
    worker = ScriptedWorker(script, markers=False)
    result = run("dynasor", worker, settings=settings, budget=Budget(tokens=46))
    output = result.output
    chain, _, written = output.text.partition(ANSWER_SUFFIX)
    assert TEXT.startswith(chain)
    assert written == "7}\n\\]"
    assert (output.finish_reason, result.spent_budget) == ("length", "tokens")
    assert output.meta["dynasor"]["early_exit"] is False
    assert output.meta["dynasor"]["kept_tokens"] == len(chain)


def test_a_budget_spent_before_any_probe_returns_the_chain():
    result = run("dynasor", ScriptedWorker(says, markers=False), budget=Budget(tokens=10))
    assert TEXT.startswith(result.output.text)


# ---- what is told ------------------------------------------------------------------------------


def test_a_trace_has_the_profile_and_its_replay_decides_alike(tmp_path):
    options = {"llm": {"trace": True}}
    result = run("dynasor", ScriptedWorker(says, markers=OTHER), "3 + 4?[THINK]", **options)
    result.trace.save(tmp_path / "trace.json")
    again = replay(
        Trace.load(tmp_path / "trace.json"), methods.create("dynasor", **ADAPTING["dynasor"])
    )
    assert again.output.text == result.output.text
    assert "...[/THINK]" in again.output.text


def test_methods_say_what_thoughts_are_to_them(capsys):
    uses = {name: methods.describe(name).uses_thinking for name in methods.names()}
    assert {name for name, use in uses.items() if use == "required"} == {*REQUIRED}
    assert {name for name, use in uses.items() if use == "adapts"} == {*ADAPTING}
    assert main(["methods", "budget_forcing"]) == 0
    assert "Thinking: only for models that think." in capsys.readouterr().out
    assert main(["methods", "dynasor"]) == 0
    assert "does without where the model has none" in capsys.readouterr().out


def test_the_page_of_methods_has_their_use_of_thoughts():
    text = (Path(__file__).parents[2] / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    for name in (*REQUIRED, *ADAPTING):
        assert f"| `{name}` |" in text, name
