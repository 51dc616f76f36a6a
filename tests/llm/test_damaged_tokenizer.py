"""A damaged tokenizer, or another model's, is refused with the file that is wrong."""

import json
import re
import shutil

import pytest

from forethought import LLM, SamplingParams
from forethought.assets import reasoner_dir
from forethought.errors import ModelError


@pytest.fixture
def reasoner(tmp_path):
    """A directory of its own, to be damaged."""
    return shutil.copytree(reasoner_dir(), tmp_path / "reasoner")


def expect_refusal(directory, named):
    with pytest.raises(ModelError, match=re.escape(named)) as refused:
        LLM(directory, num_threads=1)
    assert str(directory) in refused.value.what


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_holds_no_object_is_named(name, content, reasoner):
    (reasoner / name).write_text(content)
    expect_refusal(reasoner, f"{name} ")


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_a_further_file_that_cannot_be_read_is_named(name, reasoner):
    (reasoner / name).write_bytes(b"\xff{")
    expect_refusal(reasoner, f"{name} ")


def test_a_cut_tokenizer_is_named(reasoner):
    file = reasoner / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-40])
    expect_refusal(reasoner, "tokenizer.json cannot be read")


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages ", "{% if true %}x"])
def test_a_chat_template_that_is_none_is_refused_with_its_line(template, reasoner):
    (reasoner / "chat_template.jinja").write_text(f"\n{template}")
    expect_refusal(reasoner, "its chat template cannot be read (line")


def test_a_chat_template_that_refuses_some_messages_is_none_of_these(reasoner):
    (reasoner / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    with LLM(reasoner, num_threads=1) as llm:
        assert llm.generate("1 + 1", SamplingParams(max_tokens=1)).outputs[0].token_ids


def test_the_tokenizer_of_a_model_with_more_tokens_is_refused(reasoner):
    file = reasoner / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"new{number}": len(vocabulary) + number for number in range(4000)}
    file.write_text(json.dumps(content))
    expect_refusal(reasoner, "tokens, and the model")
