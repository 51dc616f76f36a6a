r"""Dynasor-CoT's decisions, on scripted chains of thought: one character is one token."""

import asyncio
import logging
import random
import time
from types import SimpleNamespace

import pytest

from forethought.errors import (
    ModelError,
    ParameterError,
    TaskError,
    UnknownNameError,
)
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.methods.dynasor import _settled_prefix
from forethought.methods.parts.probe import (
    ANSWER_END,
    ANSWER_SUFFIX,
    ANSWER_SUFFIX_WITH_MARKER,
    PROBE_SUFFIX,
)
from forethought.scaffolding import (
    Budget,
    ComputeTask,
    Controller,
    GenerationTask,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from scripted import answer, chain

PROMPT = "P<think>"
THOUGHT = "".join(f"step {i:02}; " for i in range(20))  # 180 characters
WRITTEN = ANSWER_SUFFIX_WITH_MARKER


def solve(probe, text=THOUGHT, prompt=PROMPT, options=None, **settings):
    """Dynasor on one chain; a probe that knows k characters is answered with ``probe(k)``."""
    worker = ScriptedWorker(chain(prompt, text, probe))
    settings = {"chunk_size": 10, "certainty_threshold": 3, **settings}
    controller = DynasorGenerationController(**settings)
    return answer(controller, worker, prompt, **(options or {})), worker


def after(*answers):
    """A script of probe answers, one per chunk of 10; the last one is repeated."""

    def probe(known):
        assert known % 10 == 0
        return answers[min(known // 10, len(answers)) - 1]

    return probe


def never(known):
    """Probes that never agree."""
    return f"{known}}}"


def kept(result):
    return result.output.meta["dynasor"]["kept_tokens"]


def test_it_stops_at_the_last_of_enough_agreeing_probes():
    result, _ = solve(after("1}", "2}", "42}", "42}", "42}"))
    assert kept(result) == 50
    assert result.output.text == THOUGHT[:50] + WRITTEN + "42" + ANSWER_END
    assert result.output.token_ids == [ord(c) for c in THOUGHT[:50]]
    assert result.output.finish_reason == "stop"
    told = result.output.meta["dynasor"]
    assert told == {
        "early_exit": True,
        "answers": ["1", "2", "42", "42", "42"],
        "kept_tokens": 50,
    }


class Held(ScriptedWorker):
    """Answers the first probe when the second one has been asked."""

    async def _generate(self, task, generation, step):
        while len(self.calls) == 2 and generation.call is self.calls[1]:
            await asyncio.sleep(0)
        await super()._generate(task, generation, step)


def test_text_written_during_the_last_probe_is_left_out():
    worker = Held(lambda asked, _: "4}" if asked.endswith(PROBE_SUFFIX) else THOUGHT)
    controller = DynasorGenerationController(chunk_size=10, certainty_threshold=1)
    result = answer(controller, worker, PROMPT)
    assert worker.calls[0].task.num_generated == 20
    assert result.output.text == THOUGHT[:10] + WRITTEN + "4" + ANSWER_END
    assert result.output.token_ids == [*map(ord, THOUGHT[:10])]


def test_a_chain_that_has_stopped_thinking_gets_the_answer_without_the_marker():
    text = "think</think>so " * 10
    result, _ = solve(after("7}"), text)
    assert result.output.text == text[:30] + ANSWER_SUFFIX + "7" + ANSWER_END


def test_a_natural_end_stops_at_once():
    result, worker = solve(after("1}", "2}", "3}"), THOUGHT[:35])
    assert result.output.text == THOUGHT[:35]
    assert result.output.token_ids == [ord(c) for c in THOUGHT[:35]]
    assert not result.output.meta["dynasor"]["early_exit"]
    assert len(worker.calls) <= 1 + 3


@pytest.mark.parametrize(
    ("last", "text", "kept_tokens"),
    [("5}", THOUGHT[:35], 35), ("4}", THOUGHT[:30] + WRITTEN + "4" + ANSWER_END, 30)],
)
def test_probes_that_are_under_way_at_a_natural_end_count(last, text, kept_tokens):
    """As if they had taken no time. No further ones are asked, be the chain ever so fast."""

    def script(asked, index):
        if not asked.endswith(PROBE_SUFFIX):
            return THOUGHT[:35]
        known = len(asked.removeprefix(PROMPT).partition(PROBE_SUFFIX)[0])
        return Reply(last if known == 30 else "4}", delay=0.05 if known > 10 else 0.0)

    worker = ScriptedWorker(script)
    result = answer(DynasorGenerationController(chunk_size=10), worker, PROMPT)
    assert result.output.text == text
    assert result.output.meta["dynasor"] == {
        "early_exit": kept_tokens == 30,
        "answers": ["4", "4", last[0]],
        "kept_tokens": kept_tokens,
    }
    assert len(worker.calls) == 1 + 3


def test_a_chain_that_ends_with_a_whole_chunk_is_not_probed_at_its_end():
    result, worker = solve(never, THOUGHT[:30])
    assert result.output.meta["dynasor"]["answers"] == ["10", "20"]
    assert len(worker.calls) == 1 + 2


def test_a_budget_spent_after_the_chain_keeps_the_chain():
    def script(asked, index):
        if not asked.endswith(PROBE_SUFFIX):
            return THOUGHT[:35]
        return Reply("1234567890}", seconds_per_token=0.02)

    def ask(said, tokens):
        controller = DynasorGenerationController(chunk_size=10)
        budget = Budget(tokens=tokens)
        return answer(controller, ScriptedWorker(said), PROMPT, budget=budget)

    assert ask(script, 58).output.text == THOUGHT[:35]


def test_a_budget_spent_in_a_probe_ends_the_chain_with_its_text():
    says = chain(PROMPT, THOUGHT, lambda known: "1234567890}")
    for streamed in (False, True):
        for tokens in range(1, 60):
            controller = DynasorGenerationController(chunk_size=10, streaming=streamed)
            result = answer(controller, ScriptedWorker(says), PROMPT, budget=Budget(tokens=tokens))
            assert result.usage.completion_tokens <= tokens
            text, _, written = result.output.text.partition(WRITTEN)
            assert text
            assert THOUGHT.startswith(text)
            answered = bool(result.output.meta["dynasor"]["answers"])
            assert written == ("1234567890" + ANSWER_END if answered else "")
            assert (result.output.finish_reason, result.spent_budget) == ("length", "tokens")


@pytest.mark.parametrize("streamed", [False, True])
def test_the_chain_is_never_more_than_a_chunk_ahead_of_its_probes(streamed):
    """Here a probe takes longer than all of the chain would."""
    forks, waiting = [], []

    def script(asked, index):
        if PROBE_SUFFIX not in asked:
            return THOUGHT
        forks.append(len(asked.partition(PROBE_SUFFIX)[0].removeprefix(PROMPT)))
        waiting.append(sum(call.ended is None for call in worker.calls[1:]) - 1)
        return Reply(f"{len(forks)}}}", delay=0.05)

    worker = ScriptedWorker(script)
    controller = DynasorGenerationController(chunk_size=10, streaming=streamed)
    answer(controller, worker, PROMPT, sampling_params={"max_tokens": 55})
    assert forks == [10, 20, 30, 40, 50]
    assert max(waiting) == 1  # when a probe begins, only the one before it is under way


def test_the_main_chain_is_ended_with_the_decision_and_not_with_the_request():
    """Also if it has just come back with another chunk: here it does so together with a probe."""
    worker = ScriptedWorker(chain(PROMPT, THOUGHT, lambda known: "123456789}"))
    ends = []

    class Goes(Controller):
        def process(self, tasks, **kwargs):
            inner = DynasorGenerationController(chunk_size=10, certainty_threshold=2)
            yield from inner.process(tasks)
            for _ in range(3):
                yield [ComputeTask(time.sleep, 0.01)]
            ends.append(worker.calls[0].ended)

    with ScaffoldingLlm(Goes(), {"generation_with_dynasor_cot": worker}) as llm:
        assert kept(llm.generate(PROMPT)) == 20
    assert ends == ["cancelled"]


def test_disagreeing_probes_never_exit():
    result, _ = solve(after(*[f"{n % 2}}}" for n in range(18)]))
    assert result.output.text == THOUGHT


@pytest.mark.parametrize("said", ["}", "  }", "no brace at all within length", ""])
def test_probes_without_an_answer_never_exit(said):
    result, _ = solve(after(said))
    assert result.output.text == THOUGHT
    assert set(result.output.meta["dynasor"]["answers"]) == {""}


@pytest.mark.parametrize("said", ["wait, 42}", "42 HMM}", r"\text{no}}", "okay}"])
def test_uncertain_probes_never_exit(said):
    result, _ = solve(after(said))
    assert result.output.text == THOUGHT


@pytest.mark.parametrize("said", ["now}", "know 4}", "button}", r"\text{nothing}}", "householder}"])
def test_uncertain_words_match_as_words(said):
    result, _ = solve(after(said))
    assert kept(result) == 30


def test_the_uncertain_words_can_be_chosen():
    assert kept(solve(after("hmm 4}"), uncertain_words=["WAIT"])[0]) == 30
    assert kept(solve(after("hmm 4}"), uncertain_words=[])[0]) == 30
    assert solve(after("wait 4}"), uncertain_words=["WAIT"])[0].output.text == THOUGHT


def test_one_uncertain_probe_breaks_the_row():
    answers = ["4}", "4}", "wait 4}", "4}", "4}", "4}"]
    assert kept(solve(after(*answers))[0]) == 60


def test_an_answer_is_not_compared_with_one_that_did_not_count():
    compared = []

    def same(first, other):
        compared.append((first, other))
        return first == other

    solve(after("wait 4}", "4}", "5}", "wait 5}", "6}"), THOUGHT[:55], equivalence=same)
    assert compared == [("4", "5"), ("4", "6"), ("5", "6")]


def test_answers_agree_by_what_they_mean():
    result, _ = solve(after("0.5}", r"\frac{1}{2}}", "1/2}"))
    assert kept(result) == 30
    assert WRITTEN + "1/2" + ANSWER_END in result.output.text


def test_probes_agree_in_whatever_way_they_write_an_answer():
    assert kept(solve(after("7}", r"50\%}", "x = .5}", r"\frac{1}{2}}"))[0]) == 40
    assert kept(solve(after(r"50\%}", "0.5}", "50}", "50 cm}", "y = 50}"))[0]) == 50


def test_any_function_of_two_answers_may_say_whether_they_agree():
    def near(first, other):
        return abs(int(first) - int(other)) <= 1

    answers = after("1}", "2}", "3}", "4}", "3}", "9}")
    result, _ = solve(answers, equivalence=near)  # 1 and 2 are one class, 3 and 4 another
    assert kept(result) == 50


def test_formulas_agree_by_what_they_mean():
    assert kept(solve(after("x+1}", "1+x}", "x+1}"))[0]) == 30


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (r"\frac{1}{2}} and more", r"\frac{1}{2}"),
        (r"\{1, 2\}} so", r"\{1, 2\}"),
        ("{{1}}}", "{{1}}"),
        ("7}}}", "7"),
    ],
)
def test_the_answer_ends_at_the_first_unpaired_brace(said, heard):
    result, _ = solve(after(said))
    assert result.output.meta["dynasor"]["answers"] == [heard] * 3
    assert result.output.text.endswith(heard + ANSWER_END)


def test_a_probe_never_generates_more_than_its_length():
    _, worker = solve(after("{1}{2}{3}{4}{5}{6}{7}{8}{9}}"), probe_length=12)
    spent = {}
    for call in worker.calls:
        if PROBE_SUFFIX in call.prompt:
            head = call.prompt.partition(PROBE_SUFFIX)[0]
            spent[head] = spent.get(head, 0) + call.task.num_generated
    assert spent
    assert max(spent.values()) <= 12


def test_a_probe_goes_on_as_long_as_a_token_of_its_length_is_left():
    """``{1}`` ends at its brace after two tokens, and the third closes the box."""
    assert solve(after("{1}}"), probe_length=3)[0].output.meta["dynasor"]["early_exit"]
    told = solve(after("{1}}"), THOUGHT[:35], probe_length=2)[0].output.meta["dynasor"]
    assert told["answers"] == ["", "", ""]


def test_the_main_chain_is_asked_for_once_and_never_sent_again():
    _, worker = solve(never)
    main = [call for call in worker.calls if PROBE_SUFFIX not in call.prompt]
    assert [call.prompt for call in main] == [PROMPT]


@pytest.mark.parametrize(("threshold", "chunk"), [(1, 7), (2, 32), (5, 10)])
def test_threshold_and_chunk_size_decide_when(threshold, chunk):
    result, _ = solve(lambda known: "4}", certainty_threshold=threshold, chunk_size=chunk)
    assert kept(result) == threshold * chunk


def test_the_effort_levels_are_dynasors():
    levels = {"mild": (8, 64), "low": (5, 64), "mid": (3, 64), "high": (2, 64), "crazy": (2, 32)}
    for effort, numbers in levels.items():
        controller = DynasorGenerationController(effort=effort)
        assert (controller.certainty_threshold, controller.chunk_size) == numbers
    with pytest.raises(UnknownNameError, match="unknown effort 'mad'"):
        DynasorGenerationController(effort="mad")


def test_numbers_that_are_given_win_over_the_effort_even_if_they_are_the_defaults():
    def numbers(**settings):
        controller = DynasorGenerationController(**settings)
        return controller.certainty_threshold, controller.chunk_size

    assert numbers() == (3, 64)
    assert numbers(effort="low", certainty_threshold=3) == (3, 64)
    assert numbers(effort="crazy", certainty_threshold=3) == (3, 32)
    assert numbers(effort="crazy", chunk_size=64) == (2, 64)


@pytest.mark.parametrize("name", ["max_tokens", "certainty_threshold", "chunk_size"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ParameterError, match=f"invalid {name}"):
        DynasorGenerationController(**{name: 0})


@pytest.mark.parametrize(
    ("limit", "settings"),
    [(45, {"max_tokens": 45}), (25, {"options": {"sampling_params": {"max_tokens": 25}}})],
)
def test_a_chain_cut_at_max_tokens_is_followed_by_the_last_probes_answer(limit, settings):
    result, _ = solve(never, **settings)
    output, details = result.output, result.output.meta["dynasor"]
    assert output.text.startswith(THOUGHT[:limit])
    assert output.text.endswith(f"\\boxed{{{details['answers'][-1]}}}\n\\]")
    assert (output.finish_reason, details["kept_tokens"]) == ("length", limit)
    assert not details["early_exit"]


def test_a_chain_cut_before_its_first_probe_stays_as_it_is():
    result, _ = solve(never, max_tokens=5)
    assert (result.output.text, result.output.finish_reason) == (THOUGHT[:5], "length")


def test_sampling_is_the_blogs_unless_the_task_or_the_settings_say_otherwise():
    def seen(options=None, **settings):
        _, worker = solve(after("4}"), options=options, **settings)
        return {(call.task.temperature, call.task.top_p, call.task.seed) for call in worker.calls}

    assert seen() == {(0.6, 0.95, None)}
    assert seen(temperature=0.0, top_p=1.0) == {(0.0, 1.0, None)}
    assert seen({"sampling_params": {"temperature": 0.1, "seed": 4}}) == {(0.1, 0.95, 4)}


def test_probes_go_ahead_of_main_chains():
    _, worker = solve(never, options={"priority": 5})
    probes = {call.task.priority for call in worker.calls if PROBE_SUFFIX in call.prompt}
    assert probes == {4}


def test_stop_strings_of_the_task_end_the_main_chain_and_not_the_probes():
    result, _ = solve(lambda known: f"{known}5;}}", options={"sampling_params": {"stop": "5;"}})
    assert result.output.text == THOUGHT.partition("5;")[0]
    assert result.output.meta["dynasor"]["answers"][0] == "105;"


def test_several_samples_are_the_business_of_a_vote():
    with pytest.raises(ParameterError, match="cannot honour n"):
        solve(after("4}"), options={"sampling_params": {"n": 2}})


def test_a_probe_that_fails_counts_as_one_without_an_answer(caplog):
    def script(asked, index):
        if asked.endswith(PROBE_SUFFIX):
            failing = len(asked.partition(PROBE_SUFFIX)[0]) == len(PROMPT) + 20
            return Reply("4}", error=OSError("gone") if failing else None)
        return THOUGHT

    worker = ScriptedWorker(script)
    controller = DynasorGenerationController(chunk_size=10, certainty_threshold=2)
    with caplog.at_level(logging.WARNING):
        result = answer(controller, worker, PROMPT)
    assert result.output.meta["dynasor"]["answers"] == ["4", "", "4", "4"]
    assert "a probe failed" in caplog.text


def test_a_main_chain_that_fails_fails_the_request():
    worker = ScriptedWorker([Reply("x", error=OSError("gone"))])
    with pytest.raises(TaskError, match="gone"):
        answer(DynasorGenerationController(), worker)


def test_probes_are_judged_in_the_order_of_their_forks_however_late_they_come():
    def script(asked, index):
        if not asked.endswith(PROBE_SUFFIX):
            return Reply(THOUGHT, seconds_per_token=0.002)
        number = len(asked.removeprefix(PROMPT).partition(PROBE_SUFFIX)[0]) // 10
        return Reply(f"{min(number, 3)}}}", delay=0.15 if number == 2 else 0.0)

    worker = ScriptedWorker(script)
    controller = DynasorGenerationController(chunk_size=10, certainty_threshold=2)
    result = answer(controller, worker, PROMPT)
    assert result.output.meta["dynasor"]["answers"] == ["1", "2", "3", "3"]
    assert kept(result) == 40
    # The chain was ahead by then; what it said behind the fork is not in the output.
    assert result.output.token_ids == [ord(c) for c in THOUGHT[:40]]
    assert result.output.text == THOUGHT[:40] + WRITTEN + "3" + ANSWER_END


def test_the_decision_does_not_depend_on_timing():
    """15 random chains under random delays: the exit is that of the obvious rule."""
    source = random.Random(3)
    for _ in range(15):
        answers = [source.choice(["4", "5", "wait 4"]) for _ in range(18)]

        def script(asked, index, answers=answers):
            if not asked.endswith(PROBE_SUFFIX):
                return Reply(THOUGHT, seconds_per_token=0.001)
            number = len(asked.removeprefix(PROMPT).partition(PROBE_SUFFIX)[0]) // 10
            return Reply(answers[number - 1] + "}", delay=source.choice([0, 0.01]))

        controller = DynasorGenerationController(chunk_size=10, certainty_threshold=2)
        result = answer(controller, ScriptedWorker(script), PROMPT)
        exits = [
            n for n in range(1, 17) if answers[n - 1] == answers[n] and "wait" not in answers[n]
        ]
        assert kept(result) == ((exits[0] + 1) * 10 if exits else len(THOUGHT)), answers


def test_several_tasks_are_solved_side_by_side():
    tasks = [GenerationTask(input_str=PROMPT) for _ in range(3)]

    class Three(Controller):
        def process(self, given, **kwargs):
            yield from DynasorGenerationController(chunk_size=10).process(tasks)

    worker = ScriptedWorker(chain(PROMPT, THOUGHT, after("4}")))
    with ScaffoldingLlm(Three(), {"generation_with_dynasor_cot": worker}) as llm:
        llm.generate(PROMPT)
    assert [task.output_str for task in tasks] == [THOUGHT[:30] + WRITTEN + "4" + ANSWER_END] * 3


def test_under_a_vote_each_sample_exits_by_itself():
    def script(asked, index):
        known = asked.removeprefix(PROMPT).partition(PROBE_SUFFIX)[0]
        if asked.endswith(PROBE_SUFFIX):
            return "5}" if "odd" in known else "4}"
        return ("odd " if index == 1 else "even ") * 40

    inner = DynasorGenerationController(chunk_size=10, certainty_threshold=2)
    worker = ScriptedWorker(script)
    result = answer(MajorityVoteController(inner, 3), worker, PROMPT)
    assert result.output.text == "even even even even " + WRITTEN + "4" + ANSWER_END
    assert result.output.meta["majority_vote"]["answer"] == "4"
    assert result.output.meta["dynasor"]["early_exit"]


# ---- streaming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_what_is_streamed_is_the_output_and_is_never_taken_back(threshold):
    settings = {"chunk_size": 10, "certainty_threshold": threshold, "streaming": True}
    script = chain(PROMPT, THOUGHT, after("1}", "2}", "42}", "42}", "42}"))
    controller = DynasorGenerationController(**settings)
    tag = controller.WorkerTag.GENERATION
    with ScaffoldingLlm(controller, {tag: ScriptedWorker(script)}) as llm:
        result = llm.generate_async(PROMPT)
        events = [event.output for event in result.events()]
    assert "".join(event.text for event in events) == result.output.text
    assert [t for event in events for t in event.token_ids] == result.output.token_ids
    assert kept(result) == {1: 10, 2: 40, 3: 50}[threshold]
    assert len(events) > kept(result) / 2


def test_nothing_is_streamed_that_the_first_of_several_probes_under_way_may_cut_off():
    def script(asked, index):
        if not asked.endswith(PROBE_SUFFIX):
            return THOUGHT
        return Reply("42}", delay=0.05)  # the whole chain is there by then

    controller = DynasorGenerationController(chunk_size=10, certainty_threshold=2, streaming=True)
    with ScaffoldingLlm(controller, {"generation_with_dynasor_cot": ScriptedWorker(script)}) as llm:
        result = llm.generate_async(PROMPT)
        text = "".join(event.output.text for event in result.events())
    assert text == result.output.text == THOUGHT[:20] + WRITTEN + "42" + ANSWER_END


def test_what_is_settled_prefix_ends_where_the_next_probes_could_first_complete_a_run():
    main = SimpleNamespace(output_str="abcde", num_generated=5)
    probes = [SimpleNamespace(kept_text="abcd"[:n], kept_tokens=n) for n in (1, 2, 3)]
    for count, certain in ((0, ("ab", 2)), (1, ("a", 1))):
        assert _settled_prefix(main, probes, SimpleNamespace(needed=2, count=count)) == certain
    assert _settled_prefix(main, probes, SimpleNamespace(needed=4, count=0)) == ("abcde", 5)


def test_a_chain_that_ends_by_itself_is_streamed_to_its_end():
    controller = DynasorGenerationController(chunk_size=10, streaming=True)
    script = chain(PROMPT, THOUGHT, never)
    with ScaffoldingLlm(controller, {"generation_with_dynasor_cot": ScriptedWorker(script)}) as llm:
        events = [event.output.text for event in llm.generate_async(PROMPT).events()]
    assert "".join(events) == THOUGHT


def test_a_task_that_is_to_be_streamed_is_streamed():
    task = GenerationTask(input_str=PROMPT, streaming_output_flag=True)

    class One(Controller):
        def process(self, given, **kwargs):
            yield from DynasorGenerationController(chunk_size=10).process([task])

    worker = ScriptedWorker(chain(PROMPT, THOUGHT, after("4}")))
    with ScaffoldingLlm(One(), {"generation_with_dynasor_cot": worker}) as llm:
        told = [event.output for event in llm.generate_async(PROMPT).events()]
    assert "".join(delta.text for delta in told) == task.output_str
    assert task.streaming_output_list == told


def test_a_task_that_wants_no_text_is_refused_by_name():
    task = GenerationTask(input_str=PROMPT, skip_detokenizer=True)
    for controller in (DynasorGenerationController(), MajorityVoteController(Controller(), 2)):
        with pytest.raises(ParameterError, match="skip_detokenizer"):
            next(controller.process([task]))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        solve(after("4}"), generation_dir=tmp_path)


def test_arguments_that_would_change_nothing_are_refused():
    with pytest.raises(ParameterError, match=r"sampling_params=.*top_k"):
        answer(DynasorGenerationController(), ScriptedWorker(["x"]), top_k=5)


def test_probes_guess_ahead_as_their_chain_does():
    params = {"sampling_params": {"speculation": {"enabled": False}}}
    _, worker = solve(after("4}"), options=params)
    assert {call.task.speculation["enabled"] for call in worker.calls} == {False}


def test_an_uncertain_word_may_be_a_sign():
    assert solve(after("4?}"), uncertain_words=["?"])[0].output.text == THOUGHT
    assert kept(solve(after("4}"), uncertain_words=["?"])[0]) == 30


@pytest.mark.parametrize("words", ["wait", [""], ["wait", " "], [3], None])
def test_uncertain_words_that_are_none_are_refused(words):
    """An empty one would be found in every answer, and no chain would ever exit."""
    with pytest.raises(ParameterError, match="invalid uncertain_words"):
        DynasorGenerationController(uncertain_words=words)
