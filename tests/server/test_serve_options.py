"""The options of ``forethought serve``, and the section ``server`` of its configuration."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import adapters
import reward_server
from forethought.assets import REASONER
from forethought.cli import serve
from forethought.errors import ParameterError, UsageError
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.server.settings import Settings
from http_servers import scripted, served
from openai_server import serving
from tokens import speaking


def options(*given_options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return parser.parse_args(given_options)


@pytest.mark.parametrize(
    "given_options",
    [
        ["m", "--model", "m"],
        ["m", "--upstream", "http://localhost/v1"],
        ["--upstream", "http://localhost/v1", "--worker", "scripted", "x"],
        ["--worker", "other", "x"],
        ["--worker", "scripted", "/nothing.json"],
        ["--api-model", "m"],
        ["--thinking-field", "f"],
        ["--upstream-fields", "top_k"],
        ["--upstream", "http://a", "--upstream-fields", "nothing"],
        ["--upstream", "localhost", "--api-model", "m"],
        ["--upstream", "http://a", "--reward-api-model", "m"],
        ["--upstream", "http://a", "--reward-url", "http://b/v1", "--reward-model", "m"],
        ["--worker", "scripted", "x", "--reward-url", "http://b/v1"],
        ["--worker", "scripted", "x", "--generation-config", "auto"],
        ["--ray-address", "auto"],
        ["--no-rebalance"],
        ["--replicas", "0"],
        ["--prefill-replicas", "1"],
        ["--replicas", "2", "--prefill-replicas", "2"],
        ["--replicas", "2", "--prefill-replicas", "-1"],
        ["--upstream", "http://a", "--prefill-replicas", "1"],
        ["--upstream", "http://a", "--replicas", "2"],
    ],
)
def test_options_that_contradict_each_other_are_refused(given_options: list[str]) -> None:
    with pytest.raises(UsageError):
        serve.opener(options(*given_options))


def test_a_format_of_calls_is_for_a_model_or_the_tokenizer_of_another_servers(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.json"
    script.write_text('["1"]')
    with pytest.raises(ParameterError, match="exclude each other"):
        serve.opener(options("--worker", "scripted", str(script), "--tool-format", "hermes"))
    upstream = ("--upstream", "http://a", "--api-model", "m", "--tool-format", "llama3")
    with pytest.raises(ParameterError, match="--tool-format needs --tokenizer"):
        serve.opener(options(*upstream))
    backend = serve.opener(options(*upstream, "--tokenizer", REASONER))()
    assert backend.tool_format.name == "llama3"
    backend.close()


def test_the_help_has_the_defaults_of_the_settings() -> None:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    helps = {action.dest: action.help or "" for action in parser._actions}
    names = ("max_running", "max_waiting", "drain_seconds", "max_generations", "stream_interval")
    for name in names:
        assert f"(default: {getattr(Settings(), name):g})" in helps[name]
    assert f"(default: {Settings().max_body_bytes >> 20} MiB)" in helps["max_body_bytes"]


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETHOUGHT_API_KEYS", "b,c")
    assert serve.settings_of(options("--api-key", "a")).api_keys == ["a", "b", "c"]
    with pytest.raises(ParameterError):
        serve.settings_of(options("--max-running", "0"))


def test_the_fields_of_the_servers_behind_are_options() -> None:
    given = ("--upstream", "http://a", "--api-model", "m", "--thinking-field", "f")
    further = ("--upstream-fields", "top_k,response_format", "--thinks", "no")
    backend = serve.opener(options(*given, *further))()
    assert isinstance(backend, RemoteBackend)
    assert (backend.worker.thinks, backend.thinks) == (False, False)
    assert backend.worker.thinking_field == "f"
    assert backend.worker.extensions == {"top_k", "guided_decoding"}
    backend.close()


def test_the_context_length_is_requested_at_the_start() -> None:
    given = ("--api-model", "m", "--tokenizer", REASONER)
    with serving() as behind:
        behind.model_fields = {"max_model_len": 77}
        backend = serve.opener(options("--upstream", behind.url, *given))()
        assert backend.max_length == 77
        backend.close()
    backend = serve.opener(options("--upstream", behind.url, *given))()  # it may start later
    assert backend.max_length is None
    backend.close()


def test_requests_to_other_servers_are_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for logger in (None, "httpx", "httpx2"):
        caplog.set_level(logging.INFO, logger)  # and back at the end
    monkeypatch.setattr("forethought.server.runner.serve", lambda *_: 0)
    with serving() as behind:
        behind.models = ["listed"]
        with caplog.at_level(logging.INFO):
            given = options("--port", "0", "--upstream", behind.url)
            assert serve.run(given) == 0  # asks for the models
    assert behind.url not in caplog.text


def test_the_server_listens_on_this_machine_alone_by_default() -> None:
    assert serve.address(options()) == ("127.0.0.1", 8000)


SECTION = """
max_batch_size: 4
server:
  host: 0.0.0.0
  port: 81
  api_key: k
  served_model_name: [a, b]
  max_running: 3
  timeout: 9
  max_stored: 5
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "config.yaml").write_text(text)
        return str(tmp_path / "config.yaml")

    return write


def test_the_file_of_the_configuration_has_a_section_for_the_server(
    config: Callable[[str], str],
) -> None:
    given = options("--config", config(SECTION), "--port", "82", "--served-model-name", "c")
    assert serve.read_config(given) == {"max_batch_size": 4}
    assert serve.address(given) == ("0.0.0.0", 82)
    settings = serve.settings_of(given)
    assert (settings.served_model_names, settings.api_keys) == (["c"], ["k"])
    assert (settings.max_running, settings.timeout, settings.max_stored) == (3, 9, 5)


def test_a_file_with_that_section_alone_goes_with_servers_behind(
    config: Callable[[str], str],
) -> None:
    text = "server: {upstream: [http://a/v1, http://b/v1], api_model: m, upstream_fields: top_k}"
    given = options("--config", config(text))
    left = serve.read_config(given)
    assert (given.upstream, given.api_model) == ("http://a/v1,http://b/v1", "m")
    assert given.upstream_fields == "top_k"
    assert serve.opener(given, left)
    with pytest.raises(UsageError, match="contradictory"):
        serve.opener(given, {"max_batch_size": 4})


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("{prot: 80}", "prot"),
        ("[80]", "section server"),
        ("{port: many}", "port"),
        ("{host: 7}", "host"),
        ("{api_key: [7]}", "api_key"),
        ("{reasoning_in_content: 1}", "reasoning_in_content"),
        ("{max_running: 0}", "max_running"),
        ("{timeout: soon}", "timeout"),
        ("{port: 65536}", "port"),
    ],
)
def test_a_setting_of_the_section_that_cannot_be_is_named(
    config: Callable[[str], str], section: str, told: str
) -> None:
    given = options("--config", config(f"server: {section}"))

    def read() -> None:
        serve.read_config(given)
        serve.address(given)
        serve.settings_of(given)

    with pytest.raises(UsageError, match=told):
        read()


def test_best_of_n_in_front_of_servers_is_scored_by_a_reward_server():
    def prefer(body):
        return {"probs": [float(body["messages"][1]["content"] == "right")]}

    with (
        scripted(["wrong", "right", "wrong"]) as behind,
        reward_server.serving({"/classify": prefer}) as scoring,
    ):
        given = ("--upstream", behind.url, "--reward-url", scoring.url)
        backend = serve.opener(options(*given))()
        with served(backend) as running:
            answer = running.send(
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "q"}],
                    "method": "best_of_n",
                    "temperature": 1.0,
                    "method_params": {"default_sample_num": 3},
                },
            )
        backend.close()
    assert answer.json["choices"][0]["message"]["content"] == "right"
    assert len(scoring.requests) >= 3


def test_adapters_are_options_and_fields_of_the_configuration(tmp_path: Path) -> None:
    directory = adapters.adapter(tmp_path / "sql", speaking())
    given = ("--model", str(speaking()), "--dtype", "float32", "--adapter", f"sql={directory}")
    backend = serve.opener(options(*given))()
    with closing(backend):
        assert backend.adapters == ["sql"]
    config = {"model": str(speaking()), "dtype": "float32", "adapters": {"b": str(directory)}}
    backend = serve.opener(options(), config)()
    with closing(backend):
        assert backend.adapters == ["b"]
    for option in ("sql", "sql=", "=x"):
        with pytest.raises(ParameterError, match="invalid --adapter"):
            serve.opener(options("--adapter", option))
    with pytest.raises(ParameterError, match="contradictory"):
        serve.opener(options("--upstream", "http://a", "--adapter", f"a={directory}"))


def test_chats_go_on_elsewhere_where_the_servers_are_said_to_continue_messages() -> None:
    for fields, is_known in (("top_k", False), ("top_k,continue_final_message", True)):
        given = ["--upstream", "http://a", "--api-model", "m", "--upstream-fields", fields]
        backend = serve.opener(options(*given))()
        assert isinstance(backend, RemoteBackend)
        assert backend.worker.upstream.continues_chats is is_known
        assert backend.worker.extensions == {"top_k"}
        backend.close()


def test_kv_events_are_a_json_object_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--kv-events-config", '{"endpoint": "tcp://*:5557"}']
    assert options(*given).kv_events_config == {"endpoint": "tcp://*:5557"}
    with pytest.raises(UsageError, match="exclude each other"):
        serve.opener(options(*given, "--upstream", "http://a"))
    with pytest.raises(ParameterError, match="replicas publish no KV events"):
        serve.opener(options(*given, "--replicas", "2"))
    with pytest.raises(UsageError, match="endpoint"):
        serve.opener(options("--kv-events-config", "{}"))
    for text in ("{", "[]"):
        with pytest.raises(SystemExit):
            options("--kv-events-config", text)
        assert "JSON" in capsys.readouterr().err
