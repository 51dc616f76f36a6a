"""DRAG and IterDRAG: which documents are in the prompt, where, and what is asked next."""

from __future__ import annotations

import pytest

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import BudgetExceeded, ParameterError
from forethought.methods.iterdrag import FINAL, FOLLOW_UP, INTERMEDIATE
from forethought.methods.parts.bm25 import BM25Index
from forethought.scaffolding import Budget, EngineWorker, ScriptedWorker
from scripted import answer
from tokens import speaking

DOCUMENTS = [
    "Rome is the capital of Italy.",
    "The mayor of Rome is Ann.",
    "Ann was born in Bari.",
    "Paris is the capital of France.",
]
QUESTION = "Where was the mayor of the capital of Italy born?"
EXAMPLE = {
    "question": "Which is the capital of France?",
    "answer": "Paris",
    "steps": [("Which city is in France?", "Paris")],
}


def run(name, worker, *, prompt=QUESTION, params=None, budget=None, **settings):
    settings = {"documents": DOCUMENTS, "instruction": "", **settings}
    controller = methods.create(name, **settings)
    options = {"sampling_params": params, "budget": budget}
    if not isinstance(prompt, str):
        options["question"] = QUESTION
    return answer(controller, worker, prompt, **options)


def told(name, result):
    return result.output.meta[name]


# ---- DRAG ----------------------------------------------------------------------------------------


def test_the_best_documents_stand_next_to_the_question_and_examples_have_their_own():
    worker = ScriptedWorker(lambda prompt, _: " Bari")
    result = run("drag", worker, num_documents=2, examples=[EXAMPLE, ("Q?", "A")])
    ranked = BM25Index(DOCUMENTS).search(QUESTION, 2)
    of_example = BM25Index(DOCUMENTS).search(EXAMPLE["question"], 2)
    assert of_example == [3, 0]
    assert worker.prompts == [
        "Documents:\n[1] Rome is the capital of Italy.\n[4] Paris is the capital of France.\n"
        "Question: Which is the capital of France?\nAnswer: Paris\n\n"
        "Question: Q?\nAnswer: A\n\n"
        f"Documents:\n[{ranked[1] + 1}] {DOCUMENTS[ranked[1]]}\n"
        f"[{ranked[0] + 1}] {DOCUMENTS[ranked[0]]}\nQuestion: {QUESTION}\nAnswer:"
    ]
    assert result.output.text == " Bari"
    assert told("drag", result) == {"documents": ranked}


def test_an_answer_of_drag_that_the_budget_cuts_is_returned_without_its_prompt():
    result = run("drag", ScriptedWorker(lambda prompt, _: " Bari"), budget=Budget(tokens=3))
    assert (result.output.text, result.output.finish_reason) == (" Ba", "length")


@pytest.mark.parametrize(("num_documents", "num_examples"), [(1, 0), (3, 1), (4, 2)])
def test_documents_and_examples_scale_the_prompt(num_documents, num_examples):
    worker = ScriptedWorker(lambda prompt, _: "x")
    examples = [EXAMPLE, EXAMPLE, EXAMPLE]
    settings = {"num_documents": num_documents, "num_examples": num_examples}
    run("drag", worker, examples=examples, **settings)
    (prompt,) = worker.prompts
    assert prompt.count("Answer: Paris") == num_examples
    assert prompt.rpartition("Documents:")[2].count("\n[") == num_documents


def test_any_controller_may_write_the_answer_to_a_prompt_of_token_ids():
    vote = {"method": "majority_vote", "default_sample_num": 3}
    worker = ScriptedWorker(lambda prompt, _: r"\boxed{4}")
    result = run("drag", worker, prompt=[7, 8], generation_controller=vote)
    assert result.output.meta["majority_vote"]
    assert worker.prompts[0].endswith(f"Question: {QUESTION}\nAnswer:")


def test_a_question_that_finds_no_document_is_asked_without():
    worker = ScriptedWorker(lambda prompt, _: "x")
    result = run("drag", worker, prompt="Xyzzy?")
    assert worker.prompts == ["Question: Xyzzy?\nAnswer:"]
    assert told("drag", result) == {"documents": []}


# ---- IterDRAG ------------------------------------------------------------------------------------

LINES = [
    (f"{FOLLOW_UP} Who is the mayor of Rome?", " Ann"),
    (f"{FOLLOW_UP} Where was Ann born?", " Bari"),
]


def asks(prompt, index=0):
    """Two follow-ups, their answers, and the final answer."""
    own = prompt.rpartition("Question:")[2]
    if prompt.endswith(FINAL):
        return " forced\nmore"
    num_asked = own.count(FOLLOW_UP)
    if prompt.endswith(INTERMEDIATE):
        return LINES[num_asked - 1][1] + "\nmore"
    return f"{LINES[num_asked][0] if num_asked < 2 else f'{FINAL} Bari'}\nmore"


def test_each_follow_up_gets_documents_that_are_not_in_the_prompt_yet():
    worker = ScriptedWorker(asks)
    result = run("iterdrag", worker, num_documents=1)
    first = f"Documents:\n[1] {DOCUMENTS[0]}\nQuestion: {QUESTION}\n"
    second = f"{first}{LINES[0][0]}\nDocuments:\n[2] {DOCUMENTS[1]}\n{INTERMEDIATE}"
    third = f"{second} Ann\n"
    fourth = f"{third}{LINES[1][0]}\nDocuments:\n[3] {DOCUMENTS[2]}\n{INTERMEDIATE}"
    assert worker.prompts == [first, second, third, fourth, f"{fourth} Bari\n"]
    assert result.output.text == "Bari"
    assert told("iterdrag", result) == {
        "queries": ["Who is the mayor of Rome?", "Where was Ann born?"],
        "answers": ["Ann", "Bari"],
        "documents": [[0], [1], [2]],
        "forced": False,
        "budget_ended": False,
    }


def test_a_follow_up_finds_documents_that_the_question_does_not():
    documents = ["The mayor of Rome is Ann.", "The mayor was born.", "Ann came from Bari to Rome."]
    lines = {"?\n": f"{FOLLOW_UP} From where did Ann come?\n", INTERMEDIATE: " Bari\n"}
    worker = ScriptedWorker(
        lambda prompt, _: next((said for end, said in lines.items() if prompt.endswith(end)), "x")
    )
    question = "Where was the mayor born?"
    result = run("iterdrag", worker, prompt=question, documents=documents, num_documents=1)
    assert BM25Index(documents).search(question, 3)[:2] == [1, 0]
    assert told("iterdrag", result)["documents"] == [[1], [2]]
    assert f"[3] {documents[2]}\n{INTERMEDIATE}" in worker.prompts[1]


def test_a_follow_up_finds_the_best_document_that_is_not_shown_yet():
    documents = ["The mayor of Rome is Ann.", "The mayor was born.", "A boat."]
    lines = {"?\n": f"{FOLLOW_UP} When was the mayor born?\n", INTERMEDIATE: " In May\n"}
    worker = ScriptedWorker(
        lambda prompt, _: next((said for end, said in lines.items() if prompt.endswith(end)), "x")
    )
    question = "Where was the mayor born?"
    result = run("iterdrag", worker, prompt=question, documents=documents, num_documents=1)
    assert told("iterdrag", result)["documents"] == [[1], [0]]


@pytest.mark.parametrize("max_iterations", [0, 1, 2])
def test_the_final_answer_is_forced_behind_the_last_iteration(max_iterations):
    worker = ScriptedWorker(asks)
    result = run("iterdrag", worker, max_iterations=max_iterations)
    assert len(told("iterdrag", result)["queries"]) == max_iterations
    assert len(worker.calls) == 2 * max_iterations + 1
    assert worker.prompts[-1].endswith(f"\n{FINAL}")
    assert (result.output.text, told("iterdrag", result)["forced"]) == ("forced", True)


@pytest.mark.parametrize("line", ["I think so.", "", FOLLOW_UP])
def test_a_line_that_is_neither_forces_the_final_answer_in_its_place(line):
    def script(prompt, index):
        if prompt.endswith(" Ann\n"):
            return f"{line}\n"
        return asks(prompt)

    worker = ScriptedWorker(script)
    result = run("iterdrag", worker)
    assert worker.prompts[-1].endswith(f" Ann\n{FINAL}")
    assert told("iterdrag", result)["forced"] is True
    worker = ScriptedWorker(lambda prompt, _: line if prompt.endswith("born?\n") else asks(prompt))
    run("iterdrag", worker)
    assert worker.prompts[-1].endswith(f"born?\n{FINAL}")


def test_examples_show_follow_ups_with_their_documents():
    worker = ScriptedWorker(asks)
    run("iterdrag", worker, num_documents=1, examples=[EXAMPLE], max_iterations=0)
    assert worker.prompts[0].startswith(
        f"Documents:\n[4] {DOCUMENTS[3]}\nQuestion: Which is the capital of France?\n"
        f"{FOLLOW_UP} Which city is in France?\nDocuments:\n[3] {DOCUMENTS[2]}\n"
        f"{INTERMEDIATE} Paris\n{FINAL} Paris\n\nDocuments:"
    )


def test_lines_are_as_long_as_set_and_the_final_answer_as_the_request_says():
    worker = ScriptedWorker(asks)
    run("iterdrag", worker, max_iterations=1, line_tokens=60, params={"max_tokens": 5, "seed": 1})
    assert [call.task.max_tokens for call in worker.calls] == [60, 60, 5]
    assert all(call.task.stop == ["\n"] and call.task.seed == 1 for call in worker.calls)


def test_the_last_intermediate_answer_is_returned_when_the_budget_is_spent():
    result = run("iterdrag", ScriptedWorker(asks), budget=Budget(calls=3))
    assert (result.output.text, result.output.finish_reason) == ("Ann", "length")
    assert told("iterdrag", result)["budget_ended"] is True
    with pytest.raises(BudgetExceeded):
        run("iterdrag", ScriptedWorker(asks), budget=Budget(calls=1))


@pytest.mark.parametrize("name", ["drag", "iterdrag"])
def test_mistakes_are_refused_by_name(name):
    wrong = [
        {"documents": []},
        {"num_documents": 0},
        {"examples": "text"},
        {"examples": ["text"]},
        {"examples": [{"question": "q"}]},
        {"examples": [{"question": "q", "answer": "a", "steps": [1]}]},
        {"num_examples": -1},
    ]
    for settings in wrong:
        with pytest.raises(ParameterError, match=f"invalid {next(iter(settings))}"):
            methods.create(name, **{"documents": DOCUMENTS, **settings})
    controller = methods.create(name, documents=DOCUMENTS)
    with pytest.raises(ParameterError, match="words of the question"):
        answer(controller, ScriptedWorker(), [1, 2])


def test_on_the_engine_a_follow_up_prefills_only_what_is_new(monkeypatch):
    """The tiny model asks no questions, so every second line counts as one, whatever it says."""
    cache = {"max_tokens": 2048, "page_size": 4, "enable_block_reuse": False}
    monkeypatch.setattr("forethought.methods.iterdrag.FOLLOW_UP", "")
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
    with LLM(speaking(), dtype="float32", kv_cache_config=cache) as llm:
        worker = EngineWorker(llm)
        settings = {"documents": ["a one", "b two"], "max_iterations": 2, "line_tokens": 8}
        result = run("iterdrag", worker, prompt="Is a b?", params=params, **settings)
        worker.shutdown()
        expect_empty(llm._frontend.engine)
    assert len(told("iterdrag", result)["queries"]) == 2
    # Of five parts each continues the one before: all prompts together are far longer.
    assert result.usage.prefilled < result.usage.prompt_tokens / 2
