"""Answer spaces: where answers stand, and which mean the same."""

import pytest

from forethought.answers.answer_spaces import (
    ChoiceAnswers,
    CodeAnswers,
    JsonEquivalence,
    answer_space,
    last_json,
)
from forethought.errors import ParameterError, UnknownNameError
from forethought.methods import MajorityVoteController
from forethought.scaffolding import (
    AssistantMessage,
    ChatTask,
    Controller,
    NativeGenerationController,
    ScriptedWorker,
    Worker,
)
from forethought.scaffolding.base_task import TaskStatus
from forethought.scaffolding.task import GenerationTask
from scripted import answer


def found(space, text):
    task = GenerationTask(input_str="p")
    task.output_str = text
    return answer_space(space).answer_of(task)


def vote(texts, **settings):
    controller = MajorityVoteController(NativeGenerationController(), len(texts), **settings)
    return answer(controller, ScriptedWorker(texts), "p").output


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"so \boxed{B}", "B"),
        (r"\boxed{\text{(C) 5}}", "C"),
        ("(A) is wrong. The answer is (D).", "D"),
        ("Answer: **B**", "B"),
        ("first (A), rather (C)", "C"),
        ("E", "E"),
        ("E. ", "E"),
        ("**B**", "B"),
        ("The answer is option B.", "B"),
        ('the answer is "D"', "D"),
        (r"\boxed{\mathbf{B}}", "B"),
        (r"\boxed{B}, that is, \boxed{}", "B"),
        ("<think>the answer is A</think>It is (B)", "B"),
        ("<think>the answer is A", None),
        ("A man went", None),
        ("The answer is Berlin", None),
        (r"\boxed{7}", None),
    ],
)
def test_the_letter_of_a_choice(text, letter):
    assert found("choice", text) == letter


def test_the_letters_may_be_others():
    assert found(ChoiceAnswers("XY"), "answer: Y") == "Y"
    assert vote(["(A)", "the answer is B", r"\boxed{B}"], answer_space="choice").text == (
        "the answer is B"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('so {"a": [1, {"b": 2}]} it is', '{"a": [1, {"b": 2}]}'),
        ("[1] then\n```json\n[2, 3]\n```", "[2, 3]"),
        ("a set {x} and [1", None),
        ("none", None),
        ("<think>[1]</think>none", None),
        ("[" * 5000 + "]" * 5000, None),
    ],
)
def test_the_last_json_value(text, value):
    assert found("json", text) == value


def test_json_values_pool_whatever_the_order_of_keys():
    texts = ['{"a": 1, "b": true}', '{"a": 1, "b": 1}', '{"b": true,  "a": 1.0}']
    output = vote(texts, answer_space="json", early_stop=False)
    assert output.text == texts[0]
    assert vote(["[1, 2]", "[2, 1]", "[2, 1]"], answer_space="json").text == "[2, 1]"


def test_json_that_is_nested_too_deeply_is_compared_as_text():
    deep = "[" * 500 + "]" * 500
    assert vote([f"{deep} ", "[1]", deep], answer_space="json").text == f"{deep} "
    far_too_deep = '{"a":' * 5000 + "1" + "}" * 5000
    assert JsonEquivalence().canonical_form(far_too_deep) == ("text", far_too_deep)


@pytest.mark.parametrize("text", ["[1,", "[[],", "[", '{"a":', '["', '{"x ', "{"])
@pytest.mark.timeout(60)
def test_brackets_that_begin_no_json_take_no_time(text):
    assert last_json(text * 200_000) in (None, "[]")


def test_programs_pool_by_what_they_print():
    """Two programs print n^2, one 2n; 2 alone as an input cannot tell them apart."""
    square = "```python\nn = int(input())\nprint(n * n)\n```"
    double = "n = int(input())\nprint(n + n)"
    power = "so:\n```\nprint(int(input()) ** 2, end=' ')\n```"
    fails = "```\nraise ValueError\n```"
    texts = [fails, fails.replace("Value", "Type"), double, square, power]
    output = vote(texts, answer_space=CodeAnswers(["2", "3"]), early_stop=False)
    assert output.text == square
    output = vote(texts, answer_space=CodeAnswers(["2"]), early_stop=False)
    assert output.text == double
    assert vote([fails, power], answer_space=CodeAnswers(["1"])).text == fails, "a tie"
    form_feed = CodeAnswers(["1"]).canonical_form("print('a\\x0cb')")
    assert form_feed != CodeAnswers(["1"]).canonical_form("print('a\\nb')")
    with pytest.raises(ParameterError, match="at least one"):
        CodeAnswers([])


class Caller(Worker):
    """Answers chats with the next of these tool calls."""

    def __init__(self, calls):
        self.calls = iter(calls)

    async def chat(self, task):
        name, arguments = next(self.calls)
        call = {"id": "1", "function": {"name": name, "arguments": arguments}}
        task.output_str, task.finish_reason = "", "tool_calls"
        task.add_message(AssistantMessage(None, tool_calls=[call] if name else None))
        return TaskStatus.SUCCESS

    task_handlers = {ChatTask: chat}  # noqa: RUF012


def test_tool_calls_pool_by_name_and_arguments_and_the_winner_joins_the_chat():
    class Chatting(Controller):
        WorkerTag = NativeGenerationController.WorkerTag

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def process(self, tasks, **kwargs):
            self.chat = ChatTask.create_from_prompt("weather?")
            yield from self.inner.process([self.chat])
            tasks[0].result = self.chat.result
            tasks[0].output_str = str([len(self.chat.messages), self.chat.messages[-1].to_dict()])

    calls = [
        ("", ""),
        ("get", '{"city": "Rome"}'),
        ("get", "{bad"),
        ("find", '{"city":"Paris","n":1}'),
        ("find", '{"n": 1, "city": "Paris"}'),
    ]
    inner = MajorityVoteController(
        NativeGenerationController(), 5, early_stop=False, answer_space="tool_calls"
    )
    output = answer(Chatting(inner), Caller(calls)).output
    assert output.text.startswith("[2, ")
    assert "find" in output.text


def test_tool_calls_are_found_in_a_text_too():
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert found("tool_calls", text) == '[["f", {"x": 1}]]'
    assert found("tool_calls", "no call") is None


def test_what_is_no_answer_space_is_refused():
    with pytest.raises(UnknownNameError, match="choice"):
        answer_space("choise")
    with pytest.raises(ParameterError, match="answer_of"):
        answer_space(ChoiceAnswers)
