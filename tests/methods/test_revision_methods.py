"""Methods that revise an answer: self-refine and sequential revisions.

Their decisions are worked out by hand for scripted answers; a server and the engine lead to the
same ones.
"""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods.parts.revision import RevisionEnd
from forethought.methods.self_refine import FEEDBACK_PROMPT, REFINE_PROMPT
from forethought.methods.sequential_revision import REVISE_PROMPT
from forethought.methods.stack import stack
from forethought.scaffolding import (
    Budget,
    EngineWorker,
    NativeChatController,
    NativeRewardController,
    OpenaiWorker,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from openai_server import serving
from scripted import TimeEnds, answer
from tokens import thinking

FEEDBACK = ["It is wrong: 3 + 4 is 7.", "Say which.", "it is CORRECT, well done."]
ANSWERS = [r"\boxed{8}", r"\boxed{7}", r"so \boxed{7}", r"\boxed{9}"]


def turns(prompt: str) -> tuple[int, int, bool]:
    """How many answers and comments a prompt has, and whether it asks for a comment."""
    refined = prompt.count(REFINE_PROMPT) + prompt.count(REVISE_PROMPT)
    return refined, prompt.count(FEEDBACK_PROMPT), prompt.endswith(FEEDBACK_PROMPT)


def says(prompt: str, index: int = 0) -> str:
    """Answers and comments in turn."""
    num_answers, num_comments, asks_for_feedback = turns(prompt)
    return FEEDBACK[num_comments - 1] if asks_for_feedback else ANSWERS[num_answers]


def run(name, worker=None, *, budget=None, params=None, streaming=False, **settings):
    controller = methods.create(name, **settings)
    worker = worker or ScriptedWorker(says, score=lambda question, text: 0.0)
    return answer(controller, worker, "p", sampling_params=params, budget=budget)


# ---- self-refine ---------------------------------------------------------------------------------


def test_an_answer_is_refined_until_the_feedback_accepts_it():
    worker = ScriptedWorker(says)
    output = run("self_refine", worker).output
    assert output.text == ANSWERS[2]
    assert output.meta["self_refine"] == {
        "feedback": FEEDBACK,
        "end": RevisionEnd.ACCEPTED,
        "answers": 3,
        "index": 2,
    }
    assert output.candidates == ANSWERS[:3]
    chain = "p"
    expected = [chain]
    for said, comment in zip(ANSWERS, FEEDBACK, strict=False):
        expected.append(chain := chain + said + FEEDBACK_PROMPT)
        expected.append(chain := chain + comment + REFINE_PROMPT)
    assert worker.prompts == expected[:6]


@pytest.mark.parametrize(("num_refinements", "num_calls"), [(0, 1), (1, 3), (2, 5)])
def test_there_are_no_more_refinements_than_allowed(num_refinements, num_calls):
    worker = ScriptedWorker(says)
    output = run("self_refine", worker, num_refinements=num_refinements).output
    assert output.text == ANSWERS[num_refinements]
    assert output.meta["self_refine"]["end"] is RevisionEnd.LIMIT
    assert len(worker.calls) == num_calls


def test_the_prompts_the_stop_phrase_and_the_length_of_feedback_can_be_set():
    script = {"p": "a", "pa|f|": "done", "pa|f|do|r|": "b", "pa|f|do|r|b|f|": "ok"}
    settings = {"feedback_prompt": "|f|", "refine_prompt": "|r|", "feedback_tokens": 2}
    output = run("self_refine", ScriptedWorker(script), stop_phrase="OK", **settings).output
    assert (output.text, output.meta["self_refine"]["feedback"]) == ("b", ["do", "ok"])


def test_a_refinement_that_is_cut_off_is_left_out():
    params = {"max_tokens": len(ANSWERS[1])}
    output = run("self_refine", params=params).output
    told = output.meta["self_refine"]
    assert (output.text, told["end"], told["answers"]) == (ANSWERS[1], RevisionEnd.LENGTH, 2)


TURN = len(ANSWERS[0]) + len(FEEDBACK[0])


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(tokens=len(ANSWERS[0])), ANSWERS[0]),
        (Budget(tokens=TURN - 3), ANSWERS[0]),
        (Budget(tokens=TURN + 4), ANSWERS[0]),
        (Budget(tokens=TURN + len(ANSWERS[1]) + 5), ANSWERS[1]),
        (Budget(calls=2), ANSWERS[0]),
        (Budget(calls=3), ANSWERS[1]),
    ],
)
def test_the_last_whole_answer_is_returned_when_the_budget_is_spent(budget, text):
    result = run("self_refine", budget=budget)
    assert result.output.text == text
    assert result.output.meta["self_refine"]["end"] is RevisionEnd.BUDGET
    if budget.tokens is not None:
        assert result.usage.completion_tokens <= budget.tokens


def test_without_a_first_answer_the_budget_is_an_error():
    worker = TimeEnds(lambda prompt, index: Reply("x", delay=60.0))
    with pytest.raises(BudgetExceeded):
        run("self_refine", worker, budget=Budget(seconds=600))
    assert [call.ended for call in worker.calls] == ["cancelled"]


def test_a_turn_that_fails_fails_the_request():
    worker = ScriptedWorker(["a", Reply("", error=OSError("gone"))])
    with pytest.raises(TaskError, match="gone"):
        run("self_refine", worker)


def test_what_cannot_be_revised_is_refused():
    for name in ("self_refine", "sequential_revision"):
        with pytest.raises(ParameterError, match=f"{name} cannot honour n"):
            run(name, params={"n": 2})


def test_only_the_chosen_answer_is_streamed():
    controller = methods.create("self_refine")
    workers = dict.fromkeys(methods.worker_tags(controller), ScriptedWorker(says))

    class Streamed(type(controller)):
        def process(self, tasks, **kwargs):
            tasks[0].streaming_output_flag = True
            yield from super().process(tasks, **kwargs)

    controller = Streamed(controller.generation_controller)
    with ScaffoldingLlm(controller, workers) as llm:
        pieces = [event.output.text for event in llm.generate_async("p").events()]
    assert "".join(pieces) == ANSWERS[2]


def test_refined_answers_are_samples_of_a_vote():
    controller = methods.create(
        "majority_vote", generation_controller="self_refine", default_sample_num=2, early_stop=False
    )
    worker = ScriptedWorker(says)
    output = answer(controller, worker, "p", sampling_params={"seed": 1}).output
    assert output.text == ANSWERS[2]
    assert len({call.task.seed for call in worker.calls}) == 2


# ---- sequential revisions ------------------------------------------------------------------------


def test_each_answer_is_written_behind_all_earlier_ones_and_the_most_frequent_is_chosen():
    worker = ScriptedWorker(says)
    output = run("sequential_revision", worker).output
    assert output.text == ANSWERS[2]  # 8, 7, 7, 9: the later one of those that say 7
    told = output.meta["sequential_revision"]
    assert told.pop("vote")["num_voters"] == 4
    assert told == {"end": RevisionEnd.LIMIT, "answers": 4, "index": 2}
    assert worker.prompts[3] == "p" + "".join(said + REVISE_PROMPT for said in ANSWERS[:3])


def test_a_tie_goes_to_the_latest_answer_and_no_answer_to_the_last():
    assert run("sequential_revision", num_revisions=1).output.text == ANSWERS[1]
    most = ScriptedWorker([r"\boxed{7}", r"so \boxed{7}", r"\boxed{9}"])
    assert run("sequential_revision", most, num_revisions=2).output.text == r"so \boxed{7}"
    output = run("sequential_revision", ScriptedWorker(["a", "b"]), num_revisions=1).output
    assert output.text == "b"


def test_the_last_answer_or_the_best_scored_one_can_be_chosen():
    assert run("sequential_revision", selection="last").output.text == ANSWERS[3]
    asked = []

    def score(question, text):
        asked.append(question)
        return 1.0 if "7" in text else 0.5

    output = run(
        "sequential_revision",
        ScriptedWorker(says, score=score),
        selection="reward",
        reward_controller=NativeRewardController(),
    ).output
    assert output.text == ANSWERS[2]
    assert output.meta["sequential_revision"]["scores"] == [0.5, 1.0, 1.0, 0.5]
    assert asked == ["p"] * 4


def test_the_chain_votes_with_what_the_budget_has_left_of_it():
    result = run("sequential_revision", budget=Budget(tokens=len(ANSWERS[0]) + 4))
    assert result.output.text == ANSWERS[0]
    assert result.output.meta["sequential_revision"]["end"] is RevisionEnd.BUDGET


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "reward"},
        {"reward_controller": NativeRewardController()},
        {"selection": "best"},
        {"num_revisions": -1},
        {"revise_prompt": ""},
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings):
    with pytest.raises(ParameterError):
        methods.create("sequential_revision", **settings)


# ---- the same on a server, and on the engine -----------------------------------------------------


class Client(OpenaiWorker):
    """A worker for the server, with a client that it closes."""

    def __init__(self, server):
        super().__init__(AsyncOpenAI(base_url=server.url, api_key="none", timeout=60), "tiny")

    async def async_shutdown(self):
        await super().async_shutdown()
        await self.async_client.close()


@pytest.mark.parametrize("name", ["self_refine", "sequential_revision"])
def test_a_server_leads_to_the_same_decisions(name):
    with serving() as server:
        server.says = lambda body: [*says(body["prompt"])]
        output = run(name, Client(server)).output
    expected = run(name).output
    assert (output.text, output.meta) == (expected.text, expected.meta)
    assert output.candidates == expected.candidates


@pytest.fixture(scope="module")
def engine_worker():
    fields = {"kv_cache_config": {"max_tokens": 4096, "page_size": 4}, "dtype": "float32"}
    llm = LLM(thinking(), **fields)
    with EngineWorker(llm) as worker:
        yield worker
        expect_empty(llm._frontend.engine)


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_engine_continues_one_sequence_and_prefills_nothing_twice(engine_worker, as_ids):
    settings = {"feedback_prompt": " check", "refine_prompt": " again", "num_refinements": 2}
    every_token = [*range(len(engine_worker.tokenizer))]
    params = {"temperature": 0.0, "stop_token_ids": every_token, "include_stop_str_in_output": True}
    controller = methods.create("self_refine", **settings)
    ids = engine_worker.tokenizer("a b c").input_ids
    before = engine_worker.llm.stats
    prompt = ids if as_ids else "a b c"
    output = answer(controller, engine_worker, prompt, sampling_params=params).output
    after = engine_worker.llm.stats
    assert output.meta["self_refine"]["answers"] == 3
    inserted = sum(len(engine_worker.tokenizer(text).input_ids) for text in (" check", " again"))
    assert after.prefilled - before.prefilled <= len(ids) + 2 * inserted + 2 * 5


@pytest.mark.parametrize(
    ("outer", "settings"),
    [
        ("self_refine", {"feedback_prompt": " check", "refine_prompt": " again"}),
        ("sequential_revision", {"num_revisions": 2, "revise_prompt": " again"}),
    ],
)
def test_what_a_method_made_of_several_sequences_is_gone_on_with_from_ids_as_from_text(
    engine_worker, outer, settings
):
    every_token = [*range(len(engine_worker.tokenizer))]
    params = {"temperature": 0.0, "stop_token_ids": every_token, "include_stop_str_in_output": True}
    ids = engine_worker.tokenizer("a b c").input_ids
    outputs = []
    for prompt in ("a b c", ids):
        method = stack(f"dynasor+{outer}", **settings)
        outputs.append(answer(method, engine_worker, prompt, sampling_params=params).output)
    text, ids = (output.meta[outer] for output in outputs)
    assert text["answers"] == ids["answers"] > 1
    assert outputs[0].candidates[:2] == outputs[1].candidates[:2]


@pytest.mark.parametrize("name", ["self_refine", "sequential_revision"])
def test_in_a_chat_answers_and_instructions_are_messages(name):
    with serving() as server:
        client = AsyncOpenAI(base_url=server.url, api_key="key", timeout=60)
        inner = NativeChatController(system="Be brief.")
        method = methods.create(name, generation_controller=inner)
        worker = OpenaiWorker(client, "m")
        llm = ScaffoldingLlm(method, dict.fromkeys(methods.worker_tags(method), worker))
        llm.generate("Q")
        llm.shutdown(shutdown_workers=True)
    longest = max(server.requests, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest[:4]] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in longest[:3]] == ["Be brief.", "Q", "Hello world"]
    assert longest[3]["content"] in (FEEDBACK_PROMPT.strip(), REVISE_PROMPT.strip())
    assert all(message["content"] for message in longest)
