"""``forethought chat``: turns, commands, Ctrl-C and Ctrl-D."""

import builtins
import json
import shutil
import sys

import pytest

from forethought.cli import chat
from forethought.cli.backend import ConversationController, Respondent
from forethought.cli.main import main
from forethought.cli.options import INTRODUCTION
from forethought.errors import ContextLengthError
from forethought.scaffolding import ChatTask, ScriptedWorker
from openai_server import serving
from tokens import speaking


class Typed:
    """What the user types; Ctrl-D when nothing is left."""

    def __init__(self, *lines):
        self._lines = iter(lines)

    def __call__(self, prompt=""):
        line = next(self._lines, EOFError)
        if not isinstance(line, str):
            raise line
        return line


@pytest.fixture
def talk(monkeypatch):
    """Let the given lines be typed; returns the conversations that reached the worker."""

    def start(script, *lines, system=None):
        seen = []

        def record(task: ChatTask):
            seen.append([(message.role, message.content) for message in task.messages])

        class Recording(ScriptedWorker):
            async def run_task(self, task):
                record(task)
                return await super().run_task(task)

        monkeypatch.setattr(builtins, "input", Typed(*lines))
        respondent = Respondent(ConversationController(streaming=True), Recording(script))
        try:
            chat.Conversation(respondent, {}, system).talk()
        finally:
            respondent.close()
        return seen

    return start


def test_every_turn_knows_the_turns_before(talk, capsys):
    second = talk(["one", "two"], "first?", "second?")[1]
    assert second == [("user", "first?"), ("assistant", "one"), ("user", "second?")]
    out, err = capsys.readouterr()
    assert "one\n" in out
    assert "two\n" in out
    assert err.count("tokens in") == 2


def test_clear_forgets_everything_but_the_system_prompt(talk):
    seen = talk(["one", "two"], "first?", "/clear", "second?", system="be brief")
    assert seen[1] == [("system", "be brief"), ("user", "second?")]


def test_exit_leaves_and_nothing_after_it_is_read(talk):
    assert len(talk(["one", "two"], "first?", "/exit", "second?")) == 1


def test_blank_lines_and_unknown_commands_are_no_turns(talk, capsys):
    assert talk(["one"], "", "  ", "/help") == []
    assert "/clear" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_leaves(talk):
    with pytest.raises(KeyboardInterrupt):
        talk(["one"], KeyboardInterrupt)


class Interrupted(Respondent):
    """A respondent whose first answer is stopped by Ctrl-C half way."""

    def __init__(self):
        self.turns = []

    def answer(self, prompt, params, write):
        self.turns.append(list(prompt))
        write("half an ans")
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_answer_keeps_what_was_said_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", Typed("first?", "second?"))
    respondent = Interrupted()
    chat.Conversation(respondent, {}, None).talk()
    assert respondent.turns[1][1] == {"role": "assistant", "content": "half an ans"}
    assert "stopped" in capsys.readouterr().err


def test_a_conversation_that_is_too_long_is_one_line_and_goes_on(monkeypatch, capsys):
    class Full(Respondent):
        def __init__(self):
            pass

        def answer(self, prompt, params, write):
            raise ContextLengthError("too many tokens")

    monkeypatch.setattr(builtins, "input", Typed("first?", "second?"))
    chat.Conversation(Full(), {}, None).talk()
    err = capsys.readouterr().err
    assert err.count("too many tokens") == err.count("/clear") == err.count("\n") == 2


def test_a_server_that_fails_once_ends_one_answer_and_not_the_chat(monkeypatch, capsys):
    with serving() as server:
        options = ["--url", server.url, "--api-model", "m"]

        def says(body):
            server.breaks_off = body["messages"][-1]["content"] == "second?"
            return ["an", "swer"]

        server.says = says
        monkeypatch.setattr(builtins, "input", Typed("first?", "second?", "third?"))
        assert main(["chat", *options]) == 1
    asked = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert asked[-1] == ["first?", "answer", "third?"]
    out, err = capsys.readouterr()
    assert err.count("the answer broke off") == 1
    assert out.splitlines()[-1] == "answer"


@pytest.mark.parametrize(
    ("typed", "shown", "asked", "err"),
    [
        (True, True, "> ", ""),
        (True, False, "", "> "),
        (False, True, "", ""),
        (False, False, "", ""),
    ],
)
def test_a_prompt_is_shown_to_a_user_and_never_goes_into_a_pipe(
    monkeypatch, capsys, typed, shown, asked, err
):
    prompts = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: typed, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: shown, raising=False)
    monkeypatch.setattr(builtins, "input", lambda prompt="": prompts.append(prompt) or "/exit")
    chat.Conversation(Interrupted(), {}, None).talk()
    assert prompts == [asked]
    assert capsys.readouterr() == ("", err)


def test_the_embedded_model_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", Typed("/exit"))
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == INTRODUCTION


def test_the_whole_command_talks_to_a_model(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", Typed("Hello", "How are you?"))
    options = ["--model", str(speaking("byte_level")), "--dtype", "float32", "--max-tokens", "4"]
    assert main(["chat", *options]) == 0
    assert capsys.readouterr().err.count("tokens in") == 2


def test_a_chat_samples_as_the_maker_of_the_model_advises(monkeypatch, capsys, tmp_path):
    shutil.copytree(speaking(), tmp_path / "m")
    advice = {"do_sample": True, "temperature": 5.0, "top_k": 1}
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(advice))

    def talked(*options):
        monkeypatch.setattr(builtins, "input", Typed("Hello"))
        model = ["--model", str(tmp_path / "m"), "--dtype", "float32", "--max-tokens", "8"]
        assert main(["chat", *model, *options]) == 0
        return capsys.readouterr()

    greedy = talked("--temperature", "0").out
    advised = talked()
    assert advised.out == greedy
    assert "advises: temperature 5, top_k 1" in advised.err
    neutral = talked("--generation-config", "neutral", "--seed", "1")
    assert "advises" not in neutral.err
    assert neutral.out != greedy


def test_a_model_without_a_chat_template_is_refused(capsys):
    assert main(["chat", "--model", str(speaking("mute"))]) == 2
    assert "chat template" in capsys.readouterr().err
