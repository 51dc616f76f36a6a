"""``forethought generate``: what it prints where, and what it refuses."""

import argparse
import io
import itertools
import json
import math

import pytest
from safetensors import safe_open
from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

import adapters
import reward_server
from forethought import assets
from forethought.cli.backend import Respondent
from forethought.cli.main import main
from forethought.cli.options import INTRODUCTION, add_model_options, llm_args_of
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.llm import LLM
from forethought.methods import MajorityVoteController
from forethought.scaffolding import NativeGenerationController, Trace
from openai_server import serving
from reward_models import save
from tokens import speaking, thinking

MODEL = speaking("byte_level")
QUESTION = "Hello world"


@pytest.fixture(scope="module")
def expected() -> str:
    """The greedy answer of twelve tokens."""
    with LLM(MODEL, dtype="float32") as llm:
        messages = [{"role": "user", "content": QUESTION}]
        return llm.chat(messages, SamplingParams(temperature=0, max_tokens=12)).outputs[0].text


def generate(*options: str, question: str = QUESTION) -> int:
    settings = ["--model", str(MODEL), "--dtype", "float32", "--max-tokens", "12"]
    return main(["generate", question, *settings, *options])


def refused(capsys, *options: str, question: str = QUESTION) -> str:
    assert main(["generate", question, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "majority_vote@99999999999"], "begin too many generations: up to 99,999,999"),
        (["--method", "dynasor+majority_vote@2000000"], "at most 1,048,576 can be begun"),
        (["--method", ""], "unknown method ''"),
    ],
)
def test_a_method_that_cannot_run_is_refused_before_a_model_is_loaded(capsys, options, said):
    assert said in refused(capsys, "--model", "/nowhere", *options)


def test_the_answer_is_on_standard_output_and_what_it_cost_on_standard_error(capsys, expected):
    assert generate() == 0
    out, err = capsys.readouterr()
    assert out.removesuffix("\n") == expected.removesuffix("\n")
    assert err.count("\n") == 1
    assert err.startswith("12 tokens in ")


def test_json_is_one_object_and_nothing_else(capsys, expected):
    assert generate("--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["text"] == expected
    assert report["token_count"] == report["usage"]["decoded"] == 12
    assert report["finish_reason"] == "length"
    assert (report["method"], report["model"]) == ("plain", str(MODEL))
    assert report["seconds"] > 0


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "dynasor", "--set", "chunk_size=4", "--temperature", "0"],
        ["--method", "majority_vote", "--set", "default_sample_num=1", "--temperature", "0"],
        ["--method", "dynasor+majority_vote@1", "--temperature", "0", "--json"],
    ],
)
def test_a_method_that_changes_nothing_here_gives_the_same_answer(capsys, expected, options):
    assert generate(*options) == 0
    out, _ = capsys.readouterr()
    text = json.loads(out)["text"] if "--json" in options else out.removesuffix("\n")
    assert text.removesuffix("\n") == expected.removesuffix("\n")


def test_the_answer_has_the_shape_that_was_asked_for(capsys, tmp_path):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    assert generate("--json-schema", str(path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(json.loads(report["text"])) <= {1, 2}
    assert generate("--json-schema", '{"enum": ["x"]}') == 0
    assert capsys.readouterr().out == '"x"\n'
    assert generate("--regex", "a{3}b") == 0
    assert capsys.readouterr().out == "aaab\n"
    assert generate("--choice", "yes", "--choice", "no") == 0
    assert capsys.readouterr().out in ("yes\n", "no\n")


def test_a_thinking_budget_closes_the_thought_and_is_told(capsys):
    model = ["--model", str(thinking()), "--dtype", "float32", "--max-tokens", "12"]
    assert main(["generate", QUESTION, *model, "--thinking-budget", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["thinking"] == {"num_tokens": 5, "end": "budget"}
    assert "</think>" in report["text"]
    assert main(["generate", QUESTION, *model, "--thinking-budget", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("</think>")
    assert "0 tokens of thought, closed by budget" in err


def test_a_thinking_budget_that_cannot_be_kept_is_refused(capsys):
    assert "thinking_budget" in refused(capsys, "--thinking-budget", "-1")
    limits = ["--thinking-budget", "3", "--thinking-soft", "5"]
    assert "thinking_soft" in refused(capsys, *limits)
    assert "no thoughts" in refused(capsys, "--model", str(MODEL), "--thinking-budget", "3")
    assert "--thinking-field needs --url" in refused(capsys, "--thinking-field", "budget")


def test_a_server_gets_the_thinking_budget_in_its_own_field(capsys):
    with serving() as server:
        options = ["--url", server.url, "--api-model", "m", "--thinking-budget", "4"]
        assert main(["generate", "Q", *options, "--thinking-field", "thinking_token_budget"]) == 0
        assert server.requests[0]["thinking_token_budget"] == 4
        capsys.readouterr()
        assert main(["generate", "Q", *options]) != 0
        assert "in chats, cannot honour thinking_budget" in capsys.readouterr().err
        unthinking = ["--method", "no_thinking", "--set", "thinking_end=null"]
        field = ["--thinking-field", "thinking_token_budget"]
        assert main(["generate", "Q", *options[:4], *unthinking, *field]) == 0
        assert server.requests[-1]["thinking_token_budget"] == 0


def test_shapes_that_cannot_be_are_refused(capsys):
    assert "regex and choice" in refused(capsys, "--regex", "a", "--choice", "b")
    assert "cannot read the schema" in refused(capsys, "--json-schema", "/no/such/file")
    assert "Invalid type" in refused(capsys, "--json-schema", '{"type": "objct"}')


def test_the_same_seed_gives_the_same_text(capsys):
    texts = []
    for seed in ("5", "5", "6"):
        assert generate("--temperature", "1", "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_raw_leaves_the_chat_template_out(capsys, expected):
    assert generate("--raw") == 0
    with LLM(MODEL, dtype="float32") as llm:
        output = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=12))
    assert capsys.readouterr().out.strip("\n") == output.outputs[0].text.strip("\n")
    assert output.outputs[0].text != expected


def test_a_system_prompt_changes_the_answer(capsys, expected):
    assert generate("--system", "Grüße aus Köln") == 0
    assert capsys.readouterr().out.strip("\n") != expected.strip("\n")


def test_the_prompt_can_come_from_standard_input(capsys, monkeypatch, expected):
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION))
    assert generate(question="-") == 0
    assert capsys.readouterr().out.strip("\n") == expected.strip("\n")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_without_a_model_the_embedded_reasoner_answers_and_says_what_it_is(capsys, options):
    asked = ["generate", "Tom has 3 pens. He buys 4 more.", "--max-tokens", "5", *options]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    first, *more = err.splitlines()
    assert first == INTRODUCTION
    assert len(more) == (not options)
    if options:
        assert json.loads(out)["model"] == "embedded reasoner"


def test_embedded_models_are_chosen_by_name(capsys):
    asked = ["generate", "Tom has 3 pens. He buys 4 more.", "--max-tokens", "5"]
    assert main(asked) == 0
    expected = capsys.readouterr().out
    assert main([*asked, "--model", "forethought/reasoner"]) == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert INTRODUCTION not in err
    asked = ["generate", "Use 2 and 3 to make 6.", "--max-tokens", "5", "--json"]
    assert main([*asked, "--model", "forethought/countdown"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "forethought/countdown"


def test_embedded_models_draft_with_their_own_draft_model_if_they_have_one():
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    asked = ["--speculative", "draft_target", "--model"]
    fields = llm_args_of(parser.parse_args([*asked, "forethought/reasoner"]))
    (config,) = fields["speculative_config"]
    assert str(config.speculative_model) == str(assets.drafter_dir())
    with pytest.raises(ParameterError, match="needs --draft-model"):
        llm_args_of(parser.parse_args([*asked, "forethought/countdown"]))


def test_an_unknown_embedded_model_is_refused_by_name(capsys):
    said = refused(capsys, "--model", "forethought/countdwon")
    assert "did you mean 'forethought/countdown'" in said


def test_the_embedded_model_has_as_many_parameters_as_it_says():
    with safe_open(assets.reasoner_dir() / "model.safetensors", "pt") as weights:
        count = sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.offset_keys())
    assert f"{count / 1e6:.1f} M parameters" in INTRODUCTION


def test_a_vote_draws_eight_samples_unless_it_is_told_otherwise(capsys, monkeypatch):
    seen = []
    process = MajorityVoteController.process

    def counting(self, tasks, **kwargs):
        seen.append(self.default_sample_num)
        return process(self, tasks, **kwargs)

    monkeypatch.setattr(MajorityVoteController, "process", counting)
    assert generate("--method", "majority_vote") == 0
    assert generate("--method", "dynasor+majority_vote", "--set", "default_sample_num=2") == 0
    assert seen == [8, 2]
    assert MajorityVoteController(NativeGenerationController()).default_sample_num == 1


def test_ctrl_c_leaves_the_text_so_far_on_a_line_of_its_own(capsys, monkeypatch):
    def interrupted(self, prompt, params, write, question):
        write("half an ans")
        raise KeyboardInterrupt

    monkeypatch.setattr(Respondent, "answer", interrupted)
    assert generate() == 130
    out, err = capsys.readouterr()
    assert out == "half an ans\n"
    assert err == "forethought: interrupted\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "dynasr"], "did you mean 'dynasor'?"),
        (["--method", "dynasor", "--set", "chunk_sise=3"], "did you mean 'chunk_size'?"),
        (["--method", "dynasor", "--set", "chunk_size"], "key=value"),
        (["--method", "dynasor", "--set", "chunk_size=0"], "at least 1"),
        (["--method", "best_of_n"], "--reward-model DIR"),
        (
            ["--method", "plain+majority_vote@3", "--temperature", "0"],
            "all 3 samples of MajorityVote",
        ),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--seed", str(-(2**64))], "seed"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--url", "http://127.0.0.1:1/v1"], "--api-model"),
        (["--url", "http://127.0.0.1:1/v1", "--api-model", "m", "--model", "d"], "--model"),
        (["--raw", "--system", "s"], "--system"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(capsys, options, said):
    assert said in refused(capsys, *options)


@pytest.mark.parametrize("question", ["", "  \n"])
def test_an_empty_prompt_is_refused(capsys, question):
    assert "empty prompt" in refused(capsys, question=question)


def test_a_prompt_longer_than_the_context_is_refused(capsys):
    assert "context" in refused(capsys, "--model", str(MODEL), question="Hello " * 500)


def test_a_broken_model_directory_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert str(tmp_path) in refused(capsys, "--model", str(tmp_path))


def test_a_model_without_a_chat_template_is_prompted_as_it_stands(capsys):
    common = ["--model", str(speaking("mute")), "--dtype", "float32", "--max-tokens", "5"]
    answers = []
    for options in ([], ["--raw"]):
        assert main(["generate", QUESTION, *common, *options]) == 0
        answers.append(capsys.readouterr())
    assert answers[0].out == answers[1].out
    assert "has no chat template: the prompt is continued as it is\n" in answers[0].err
    assert "chat template" not in answers[1].err
    assert "--system" in refused(capsys, "--system", "s", *common)


@pytest.mark.parametrize("method", [None, "plain", "majority_vote", "plain+majority_vote"])
def test_a_server_is_chatted_with_whatever_the_method(capsys, method):
    with serving() as server:
        options = ["--url", server.url, "--api-model", "m", "--system", "Be kind.", "--seed", "3"]
        chosen = [] if method is None else ["--method", method]
        many = ["--set", "default_sample_num=2"] if "vote" in (method or "") else []
        assert main(["generate", QUESTION, *options, *chosen, *many]) == 0
    assert capsys.readouterr().out == "Hello world\n"
    said = [("system", "Be kind."), ("user", QUESTION)]
    asked = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.requests]
    assert asked == [said] * (2 if many else 1)
    assert len({body["seed"] for body in server.requests}) == len(asked)


def test_a_pipeline_of_layers_chats_with_a_server(capsys):
    with serving() as server:
        options = ["--url", server.url, "--api-model", "m", "--system", "Be kind."]
        assert main(["generate", QUESTION, *options, "--method", "archon"]) == 0
    assert len(server.requests) > 5
    assert all(body["messages"][0]["content"] == "Be kind." for body in server.requests[:5])


def test_a_method_that_continues_text_needs_the_prompt_as_it_stands_on_a_server(capsys):
    with serving() as server:
        server.says = lambda body: ["4}" if body["prompt"].endswith("{") else "so it is "]
        options = ["--url", server.url, "--api-model", "m", "--method", "dynasor"]
        assert "--raw" in refused(capsys, *options)
        assert server.requests == []
        assert main(["generate", QUESTION, *options, "--raw"]) == 0
    assert server.requests[0]["prompt"] == QUESTION


@pytest.mark.parametrize("command", [["generate", "Hello"], ["chat"], ["eval"]])
@pytest.mark.parametrize(
    "url", ["http://[::1", "http://h:x/v1", "http://127.0.0.1:99999/v1", "http://:80/v1", "ftp://h"]
)
def test_what_is_no_url_is_one_line_and_status_2(capsys, command, url):
    assert main([*command, "--url", url, "--api-model", "m"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"invalid --url {url!r}" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--regex", "a+"], "--json-schema"),
        (["--choice", "a", "--choice", "b"], "--json-schema"),
        (["--json-schema", "{}", "--raw"], "Leave out --raw"),
    ],
)
def test_an_unsupported_output_shape_is_refused_in_command_line_terms(capsys, options, said):
    line = refused(capsys, "--url", "http://127.0.0.1:9/v1", "--api-model", "m", *options)
    assert said in line
    assert "Task" not in line
    assert "extra_body" not in line


def test_a_server_that_is_not_there_is_one_line_and_status_1(capsys):
    options = ["--url", "http://127.0.0.1:9/v1", "--api-model", "m"]
    assert main(["generate", QUESTION, *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "settings", [["sleep_time", "--set", "context=Ann has nuts."], ["hogwild_turns"]]
)
def test_a_method_that_takes_text_alone_names_the_option(capsys, settings):
    assert "--raw" in refused(capsys, "--method", *settings)


def test_a_method_that_takes_text_alone_gets_it_with_raw(capsys):
    options = ["--method", "sleep_time", "--set", "context=Ann has nuts.", "--raw"]
    assert main(["generate", QUESTION, "--max-tokens", "12", *options]) == 0


# ---- traces ------------------------------------------------------------------------------------


def test_a_trace_is_written_of_an_answer_and_of_a_failure(capsys, tmp_path):
    file = tmp_path / "trace.json"
    with serving() as server:
        server.says = lambda body: ["answer"]
        url = ["--url", server.url, "--api-model", "tiny", "--trace", str(file)]
        vote = ["--method", "majority_vote@2", "--temperature", "1"]
        assert main(["generate", "question", *url, *vote]) == 0
        trace = Trace.load(file)
        assert trace.scaffolding_outputs[0].text == "answer"
        assert len(trace.tasks()) == 2
        server.fail_with = [400]
        assert main(["generate", "question", *url]) != 0
    assert Trace.load(file).error is not None
    capsys.readouterr()
    missing = str(tmp_path / "none" / "trace.json")
    assert "no such folder" in refused(capsys, "--trace", missing)


# ---- best of N ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["steps", "answers"])
def reward_model(request, tmp_path_factory):
    kind = Qwen2ForTokenClassification
    if request.param == "answers":
        kind = Qwen2ForSequenceClassification
    fields = {} if request.param == "steps" else {"num_labels": 1}
    return str(save(tmp_path_factory.mktemp("reward") / request.param, kind, **fields))


BEST = ["--method", "best_of_n", "--set", "default_sample_num=3", "--temperature", "1"]


@pytest.mark.parametrize("options", [[], ["--raw"]])
def test_best_of_n_is_judged_by_a_reward_model(capsys, reward_model, options):
    texts = []
    for _ in range(2):
        assert generate(*BEST, "--seed", "1", "--reward-model", reward_model, *options) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != "\n"
    assert generate(*BEST, "--seed", "1", "--reward-model", reward_model, "--json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usage"]["decoded"] <= 3 * 12
    assert texts[0].removesuffix("\n") == report["text"].removesuffix("\n")


def test_best_of_n_over_a_server_is_judged_here(capsys, reward_model):
    with serving() as server:
        server.says = lambda body: ["short", f" {len(server.requests)}"]
        url = ["--url", server.url, "--api-model", "tiny"]
        assert main(["generate", "question", *url, *BEST, "--reward-model", reward_model]) == 0
    assert capsys.readouterr().out.startswith("short ")
    assert len(server.requests) == 3


def test_best_of_n_takes_the_scores_of_a_reward_server(capsys):
    def prefer(body):
        return {"probs": [float(body["messages"][1]["content"].endswith("2"))]}

    with serving() as server, reward_server.serving({"/classify": prefer}) as scoring:
        numbers = itertools.count(1)
        server.says = lambda body: ["answer", f" {next(numbers)}"]
        url = ["--url", server.url, "--api-model", "tiny", "--reward-url", scoring.url]
        assert main(["generate", "question", *url, *BEST]) == 0
    assert capsys.readouterr().out == "answer 2\n"
    assert {body["model"] for _, body in scoring.requests} == {"listed"}


def test_options_of_a_reward_server_are_checked_before_anything_is_loaded(capsys):
    url = ["--method", "best_of_n", "--reward-url", "http://127.0.0.1:1/v1"]
    assert "needs --reward-url" in refused(capsys, "--reward-endpoint", "score")
    assert "Give one of them" in refused(capsys, *url, "--reward-model", "dir")
    assert "endpoint" in refused(capsys, *url, "--reward-endpoint", "rerank")
    assert "--reward-tokenizer" in refused(capsys, *url, "--reward-step-format", "chat")
    assert "invalid --reward-url" in refused(capsys, *url[:3], "host:8000")
    assert "--reward-url has nothing to score" in refused(capsys, *url[2:])


def test_a_reward_model_is_asked_for_if_and_only_if_something_is_judged(capsys):
    assert "Give --reward-model DIR" in refused(capsys, "--method", "best_of_n")
    assert "nothing to score" in refused(capsys, "--reward-model", "dir")
    missing = ["--method", "best_of_n", "--reward-model", "no/such/dir"]
    assert "no model at no/such/dir" in refused(capsys, *missing)
    assert "default_samples" in refused(capsys, *missing, "--set", "default_samples=3")
    stacked = ["--method", "dynasor+best_of_n", "--reward-model", "dir"]
    assert "give --raw" in refused(capsys, *stacked)


def test_an_adapter_generates_the_answer(capsys, tmp_path):
    directory = adapters.adapter(tmp_path / "sql", MODEL)
    messages = [{"role": "user", "content": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=12, adapter="sql")
    with LLM(MODEL, dtype="float32", adapters={"sql": directory}) as llm:
        adapted = llm.chat(messages, params).outputs[0].text
    assert generate("--adapter", f"sql={directory}") == 0
    assert capsys.readouterr().out.removesuffix("\n") == adapted.removesuffix("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "sql"], "invalid --adapter 'sql'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "given twice"),
        (["--adapter", "a=x", "--adapter", "b=y"], "several adapters"),
        (["--adapter", "a=/nothing"], "no adapter_config.json"),
        (["--adapter", "a=x", "--url", "http://x/v1", "--api-model", "m"], "contradictory"),
    ],
)
def test_adapters_that_cannot_be_are_refused(capsys, options, message):
    model = [] if "--url" in options else ["--model", str(MODEL)]
    assert message in refused(capsys, *model, *options)
