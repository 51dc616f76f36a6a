"""Methods as models of inspect_ai; skipped where it is not installed."""

import asyncio
import importlib
import tomllib
from pathlib import Path

import pytest

inspect_ai = pytest.importorskip(
    "inspect_ai", reason='inspect_ai is not installed: pip install "forethought[inspect]"'
)
from inspect_ai import Task  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    get_model,
)
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.tool import ToolInfo  # noqa: E402

from forethought.assets import problems  # noqa: E402
from forethought.errors import ParameterError, UnknownNameError  # noqa: E402
from tokens import speaking  # noqa: E402

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of inspect_ai are its own
FIELDS = {"dtype": "float32", "max_batch_size": 8}


@pytest.fixture(autouse=True, scope="module")
def provider():
    """What the entry point of the package names, imported as inspect_ai does it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return importlib.import_module(project["entry-points"]["inspect_ai"]["forethought"])


def model(name, **args):
    return get_model(f"forethought/{name}", memoize=False, **FIELDS, **args)


def generate(made, messages, tools=(), **config):
    return asyncio.run(made.generate(messages, list(tools), config=GenerateConfig(**config)))


@pytest.mark.parametrize("method", ["plain", "majority_vote@3"])
def test_a_method_is_evaluated_on_a_task_of_inspect_ai(method, tmp_path):
    data = [
        Sample(input=problem["question"], target=f"\\boxed{{{problem['answer']}}}")
        for problem in problems()[:4]
    ]
    made = model(method)
    [log] = inspect_ai.eval(
        Task(dataset=data, scorer=includes()),
        model=made,
        temperature=0.8,
        seed=3,
        max_tokens=64,
        display="none",
        log_dir=str(tmp_path),
    )
    made.api.close()
    assert log.status == "success", log.error
    used = log.stats.model_usage[f"forethought/{method}"]
    assert 0 < used.output_tokens <= 4 * 64 * (3 if "vote" in method else 1)
    assert len(log.samples) == 4
    for sample in log.samples:
        told = sample.output.metadata or {}
        assert ("majority_vote" in told) == ("vote" in method)
        assert sample.output.completion
        assert sample.output.stop_reason in ("stop", "max_tokens")


def test_settings_go_to_the_method_and_the_engine_and_the_question_to_its_verifier():
    asked = []
    made = model(
        f"repeated_sampling@2-{speaking()}",
        verifier=lambda question, answer: bool(asked.append(question)),
        early_stop=False,
    )
    try:
        messages = [ChatMessageUser(content="first"), ChatMessageAssistant(content="no")]
        output = generate(made, [*messages, ChatMessageUser(content="second")], max_tokens=4)
        assert asked == ["second", "second"]
        assert output.metadata["repeated_sampling"]["verified"] == [False, False]
        assert output.stop_reason == "max_tokens"
        long = generate(made, "many words " * 2000)
        assert long.stop_reason == "model_length"
        for config in ({"num_choices": 2}, {"logprobs": True}, {"best_of": 3}):
            with pytest.raises(ParameterError, match=next(iter(config))):
                generate(made, "question", **config)
        image = [ContentImage(image="data:image/png;base64,")]
        for message in (ChatMessageUser(content=image), ChatMessageTool(content="4")):
            with pytest.raises(ParameterError, match="text alone"):
                generate(made, [message])
        with pytest.raises(ParameterError, match="tools"):
            generate(made, "question", [ToolInfo(name="add", description="adds")])
    finally:
        made.api.close()


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("nonsense", {}, UnknownNameError),
        ("plain@3", {}, ParameterError),
        ("plain", {"base_url": "http://127.0.0.1"}, ParameterError),
        ("plain", {"chunk_size": 3}, ParameterError),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(name, args, error):
    with pytest.raises(error):
        model(name, **args)
