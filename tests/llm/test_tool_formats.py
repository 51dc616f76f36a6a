"""Formats of tool calls: told by the chat template, read from whole texts and streams, forced."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from forethought.config.engine import ToolFormatName
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.llm.call_reader import MAX_CALLS
from forethought.llm.grammar import GrammarCompiler
from forethought.llm.tokenizer import Tokenizer
from forethought.llm.tool_format import ANY, FORMATS, ToolFormat, tool_format_of, with_tools
from tokens import byte_level

FUNCTIONS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    },
    "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "set": {
        "properties": {
            "flag": {"type": "boolean"},
            "share": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"$ref": "#/$defs/Place"},
            "level": {"enum": [1, 2]},
            "note": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    },
}
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALLED, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
SAID = r"a </tool_call> \"[TOOL_CALLS]\" é {"
"""Marks of calls in text."""
TWO: dict[str, str] = {
    "hermes": f"""<tool_call>
{{"name": "add", "arguments": {{"a": 1}}}}
</tool_call>
<tool_call>
{{"name": "say", "arguments": {{"text": "{SAID}"}}}}
</tool_call>""",
    "qwen3_coder": """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
<tool_call>
<function=say>
<parameter=text>
a </tool_call> "[TOOL_CALLS]" é {
</parameter>
</function>
</tool_call>""",
    "llama3": f"""{{"name": "add", "parameters": {{"a": 1}}}}; \
{{"name": "say", "parameters": {{"text": "{SAID}"}}}}""",
    "mistral": f"""[TOOL_CALLS] [{{"name": "add", "arguments": {{"a": 1}}, "id": "123456789"}}, \
{{"name": "say", "arguments": {{"text": "{SAID}"}}}}]""",
    "mistral_args": f"""[TOOL_CALLS]add[ARGS]{{"a": 1}}\
[TOOL_CALLS]say[CALL_ID]123456789[ARGS]{{"text": "{SAID}"}}""",
    "deepseek_v3": f"""{BEGIN}{CALL}function{SEP}add
```json
{{"a": 1}}
```{CALLED}
{CALL}function{SEP}say
```json
{{"text": "{SAID}"}}
```{CALLED}{END}""",
    "deepseek_v3_1": f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{CALLED}{CALL}say{SEP}{{"text": "{SAID}"}}'
    f"{CALLED}{END}",
    "harmony": f"""<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}\
<|call|><|start|>assistant to=functions.say<|channel|>commentary json<|message|>\
{{"text": "{SAID}"}}<|call|>""",
}
"""Two calls in each format."""
CALLS = [("add", {"a": 1}), ("say", {"text": 'a </tool_call> "[TOOL_CALLS]" é {'})]
TEMPLATES: dict[str, str] = {
    "hermes": """<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>""",
    "qwen3_coder": """<tool_call>
<function={{ f.name }}>
{% for k, v in f.arguments | items %}<parameter={{ k }}>
{{ v }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    "llama3": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "mistral": '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    "mistral_args": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "deepseek_v3": "{{ '" + BEGIN + CALL + "function" + SEP + "' + f.name + '\n```json\n' + "
    "f.arguments + '\n```" + CALLED + END + "' }}",
    "deepseek_v3_1": "{{ '" + BEGIN + CALL + "' + f.name + '" + SEP + "' + f.arguments + '"
    "" + CALLED + END + "' }}",
    "harmony": "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>",
}
"""What chat templates write for a call."""
FRAME = (
    "{% for t in tools or [] %}{{ t | tojson }} <tool_call> [TOOL_CALLS]{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% set f = c.function %}@{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
TOKENS = ("<tool_call>", "</tool_call>", BEGIN, END, CALL, CALLED, SEP)
SPECIAL = (
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|start|>", "<|end|>", "<|call|>"),
)


def tokenizer(template: str) -> Any:
    """A tokenizer with the marks of all formats as tokens."""
    hf = copy.deepcopy(byte_level())
    hf.chat_template = template
    hf.add_tokens([AddedToken(token, special=False) for token in TOKENS])
    hf.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return hf


def read(
    form: ToolFormat, parts: Sequence[str], is_cut: bool = False, **arguments: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, content and calls of a text in parts; what was streamed of the calls is the same."""
    reader = form.reader(FUNCTIONS, **arguments)
    sorted_parts = [reader.push(part) for part in parts] + [reader.finish(is_cut)]
    thought, content = ("".join(texts) for texts in zip(*sorted_parts, strict=True))
    streamed: dict[int, tuple[str, str]] = {}
    for number, name, new in reader.take_deltas():
        assert (name is None) == (number in streamed)
        streamed[number] = (name or streamed[number][0], streamed.get(number, ("", ""))[1] + new)
    calls = [(call.name, call.arguments) for call in reader.whole_calls]
    if not any(call.is_withdrawn for call in reader.calls):
        assert list(streamed.values()) == calls
    return thought, content, calls


def read_everywhere(form: ToolFormat, text: str, is_cut: bool = False) -> Any:
    """``read`` of a whole text, which is that of each cut of it and of single characters."""
    whole = read(form, [text], is_cut)
    for place in range(1, len(text)):
        assert read(form, [text[:place], text[place:]], is_cut) == whole
    assert read(form, list(text), is_cut) == whole
    return whole


# ---- which format --------------------------------------------------------------------------------


def test_every_format_has_a_name_for_the_option() -> None:
    assert set(FORMATS) == set(get_args(ToolFormatName))


@pytest.mark.parametrize("name", FORMATS)
def test_the_chat_template_tells_the_format_by_the_call_that_it_writes(name: str) -> None:
    form = tool_format_of(tokenizer(FRAME.replace("@", TEMPLATES[name])))
    assert form is not None
    assert form.name == name
    assert form.is_native


def test_a_template_that_refuses_calls_tells_the_format_by_its_text() -> None:
    refusing = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    template = FRAME.replace(" <tool_call> ", "").replace("@", TEMPLATES["mistral"])
    form = tool_format_of(tokenizer(refusing + template))
    assert form is not None
    assert (form.name, form.is_native) == ("mistral", False)


def test_the_option_wins_and_an_unknown_name_is_refused() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["mistral"]))
    form = tool_format_of(hf, "llama3")
    assert form is not None
    assert form.name == "llama3"
    with pytest.raises(ParameterError, match="deepseek_v3_1, qwen3_coder"):
        tool_format_of(hf, "no_such_format")


def test_a_response_template_comes_before_the_chat_template() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["mistral"]))
    hf.response_template = {}
    assert tool_format_of(hf) is None
    assert tool_format_of(hf, "mistral") is not None


def test_a_template_without_a_place_for_tools_gets_them_in_hermes_form() -> None:
    hf = tokenizer("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    form = tool_format_of(hf)
    assert form is not None
    assert form.name == "hermes"
    messages, arguments = with_tools(hf, form, [{"role": "user", "content": "?"}], [{}])
    assert '<tool_call>\n{"name"' in messages[0]["content"]
    assert arguments == {}


def test_a_template_that_writes_calls_but_takes_no_tools_gets_their_description_in_its_form() -> (
    None
):
    template = FRAME.replace("tools or []", "[]").replace("@", TEMPLATES["deepseek_v3_1"])
    hf = tokenizer(template)
    form = tool_format_of(hf)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    messages, _ = with_tools(hf, form, turns, [{"name": "add"}])
    assert f"{BEGIN}{CALL}<name of the function>{SEP}" in messages[0]["content"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert f'{CALL}add{SEP}{{"a": 1}}' in hf.apply_chat_template(messages, tokenize=False)


def test_arguments_are_objects_where_the_template_writes_their_json() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["hermes"]))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages, arguments = with_tools(hf, tool_format_of(hf), [turn], [])
    text = hf.apply_chat_template(messages, tokenize=False, **arguments)
    assert '"arguments": {"a": 1}}' in text


# ---- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("before", ["", "I call. "])
def test_calls_are_the_same_whole_and_cut_anywhere(name: str, before: str) -> None:
    if before and name == "llama3":
        before = "<|python_tag|>"
    elif before and name == "harmony":
        before = "<|channel|>commentary<|message|>I call.<|end|><|start|>assistant"
    thought, content, calls = read_everywhere(FORMATS[name], before + TWO[name])
    assert (thought, content.strip()) == ("", "I call." if "I call." in before else "")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == CALLS


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_anywhere_leaks_no_mark_and_is_never_whole(name: str) -> None:
    text, form = TWO[name], FORMATS[name]
    for place in range(1, text.index("say")):
        thought, content, calls = read(form, list(text[:place]), is_cut=True)
        is_plain = name == "llama3" and not calls  # JSON that may be an answer
        if is_plain:
            continue
        assert thought == ""
        assert len(content) <= 1  # the first character of a mark may be content
        assert [called for called, _ in calls] in ([], ["add"])


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_in_fragments(name: str) -> None:
    reader = FORMATS[name].reader(FUNCTIONS)
    num_deltas = 0
    for character in TWO[name]:
        reader.push(character)
        num_deltas += len(reader.take_deltas())
    assert num_deltas > 20


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("change", [("add", "subtract"), ('{"a": 1}', "{a: 1}")])
def test_a_call_that_is_none_is_content(name: str, change: tuple[str, str]) -> None:
    if name == "qwen3_coder" and change[0] != "add":
        change = ("<parameter=a>", "<parametre=a>")
    text = TWO[name].replace(*change).split("say")[0]
    _, content, calls = read_everywhere(FORMATS[name], text)
    assert calls == []
    assert change[1] in content


def test_a_call_that_goes_wrong_late_is_content_and_the_next_one_a_call() -> None:
    wrong, right = '<tool_call>{"name": "add", "arguments": {"a": 1, b}}</tool_call>', TWO["hermes"]
    _, content, calls = read_everywhere(FORMATS["hermes"], wrong + right)
    assert content == wrong
    assert [called for called, _ in calls] == ["add", "say"]


def test_a_thought_of_gpt_oss_and_its_answer_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Two, I <think>.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is 2.\n\nYes.<|return|>"
    )
    assert read_everywhere(FORMATS["harmony"], text) == (
        "Two, I <think>.",
        "It is 2.\n\nYes.",
        [],
    )


def test_a_call_of_a_tool_that_gpt_oss_has_not_is_content() -> None:
    text = "<|channel|>commentary to=browser.open <|message|>{}<|call|>"
    assert read_everywhere(FORMATS["harmony"], text) == ("", text, [])


DEEP = '{"a": ' * 200 + "1" + "}" * 200
NO_JSON = (r'{"a": "\x"}', r'{"a": "\u12g4"}', "{a}", '{"a" 1}', '{"a": 01}', '{"a": 1,}', "[1 2]")


@pytest.mark.parametrize("value", [*NO_JSON, DEEP, '{"a": ' + "9" * 600 + "}"])
def test_what_is_no_json_is_content(value: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>'
    assert read(FORMATS["hermes"], [text]) == read(FORMATS["hermes"], list(text)) == ("", text, [])


def test_a_call_that_breaks_at_once_is_never_given_to_a_client() -> None:
    reader = FORMATS["hermes"].reader(FUNCTIONS)
    for character in '<tool_call>{"name": "add", "arguments": { a}}':
        reader.push(character)
        assert reader.take_deltas() == []
    assert reader.calls == []


def test_a_mark_that_begins_as_a_list_does_is_a_mark() -> None:
    assert read_everywhere(ANY, TWO["mistral"])[1] == ""
    assert read_everywhere(ANY, "[1, 2]") == ("", "[1, 2]", [])


def test_members_of_a_call_may_have_any_order_and_further_ones_are_left_out() -> None:
    calls = '{"id": [1, {}], "arguments": {"a": 1}, "type": "function", "name": "add"}'
    text = f"<tool_call>{calls}</tool_call>"
    assert read_everywhere(FORMATS["hermes"], text) == ("", "", [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("null", "{}"),
        ('""', "{}"),
        ("{}", "{}"),
        (r'"{\"a\": 1}"', '{"a": 1}'),
        ("[1]", "[1]"),
        ('{"a": "line\nend"}', r'{"a": "line\nend"}'),
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
    ],
)
def test_arguments_are_json(written: str, arguments: str) -> None:
    text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    assert read_everywhere(FORMATS["hermes"], text) == ("", "", [("add", arguments)])


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("flag", "True", True),
        ("flag", "false", False),
        ("share", "0.5", 0.5),
        ("share", "null", None),
        ("share", "NaN", "NaN"),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "a, b", "a, b"),
        ("place", '{"x": 1}', {"x": 1}),
        ("level", "2", 2),
        ("note", "7", 7),
        ("note", "7 of <b>9</b>", "7 of <b>9</b>"),
        ("other", "7", "7"),
    ],
)
def test_parameters_have_the_types_of_the_schema(key: str, value: str, argument: Any) -> None:
    text = f"<function=set>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    [(_, arguments)] = read_everywhere(FORMATS["qwen3_coder"], text)[2]
    assert json.loads(arguments) == {key: argument}


def test_types_of_schemas_that_refer_to_themselves_are_found_at_once() -> None:
    many = [{"$ref": "#/$defs/A"}] * 20
    loop = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"anyOf": many}}}
    reader = FORMATS["qwen3_coder"].reader({"f": loop})
    reader.push("<function=f><parameter=x>7</parameter></function>")
    assert [call.arguments for call in reader.calls] == ['{"x": "7"}']


def test_a_closing_mark_within_a_parameter_belongs_to_it() -> None:
    value = "<a>\n</parameter> and\n\n</function>\n"
    text = f"<function=say><parameter=text>\n{value}\n</parameter></function></tool_call>Done."
    _, content, [(_, arguments)] = read_everywhere(FORMATS["qwen3_coder"], text)
    assert json.loads(arguments) == {"text": value}
    assert content == "Done."


def test_no_more_calls_than_are_allowed_count() -> None:
    one = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    form = FORMATS["hermes"]
    assert len(read(form, [one * 3], max_calls=1)[2]) == 1
    _, content, calls = read(form, [one * (MAX_CALLS + 2)])
    assert (content, len(calls)) == (one * 2, MAX_CALLS)


def test_long_runs_of_white_space_take_little_time() -> None:
    blanks = "\n" * 100_000
    reader = FORMATS["qwen3_coder"].reader(FUNCTIONS)
    parts = [reader.push(blank)[1] for blank in blanks] + [reader.finish()[1]]
    assert "".join(parts) == blanks
    reader = FORMATS["qwen3_coder"].reader(FUNCTIONS)
    reader.push("<function=say><parameter=text>x</parameter>")
    for blank in blanks:
        reader.push(blank)
    reader.push("</function>")
    assert [call.arguments for call in reader.calls] == ['{"text": "x"}']


@pytest.mark.parametrize(
    "text", ["[" * 5000, '{"a":' * 5000, "<tool_call>" * 2000, "<function=" * 9]
)
def test_deep_and_repeated_marks_are_content(text: str) -> None:
    for parts in ([text], [text[:2000], text[2000:]]):
        assert read(ANY, parts) == ("", text, [])
        assert read(FORMATS["qwen3_coder"], parts) == ("", text, [])


PARTS = st.sampled_from(
    ['"', "{", "}", "[", "]", ":", ",", "1", "true", "\\", "a", " ", "name", "add", "<|end|>"]
    + [mark for form in FORMATS.values() for mark in form.openings]
    + ['{"name": "add", "arguments": {"a"', "[ARGS]", SEP, "</tool_call>", "<|message|>", ">"]
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*FORMATS, "any"]), st.lists(PARTS, max_size=12), st.booleans(), st.data())
def test_any_text_is_read_as_a_whole_however_it_is_cut(
    name: str, parts: list[str], is_cut: bool, data: st.DataObject
) -> None:
    form, text = FORMATS.get(name, ANY), "".join(parts)
    whole = read(form, [text], is_cut)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    cuts = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert read(form, cuts, is_cut) == whole


# ---- forcing -------------------------------------------------------------------------------------


def accepted(form: ToolFormat, hf: Any, text: str, functions: Any = None) -> bool:
    """Whether a text is a whole forced call."""
    compiler = GrammarCompiler(Tokenizer(hf), len(hf), frozenset({hf.eos_token_id}))
    params = SamplingParams(guided_decoding=form.shape(functions or FUNCTIONS))
    constraints = compiler.constraints(params)
    assert constraints is not None
    [constraint] = constraints([], 1)
    assert constraint is not None
    ids, path = hf(text, add_special_tokens=False).input_ids, list[int]()
    for token in ids:
        mask = constraint.mask(path)
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return False
        path.append(token)
    return bool(constraint.is_complete(path))


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_one_in_the_format_and_keeps_to_the_schema(name: str) -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES[name]))
    form = tool_format_of(hf)
    assert form is not None
    value = "<parameter=a>\n%s\n</parameter>\n" if form.has_parameters else '{"a": %s}'
    text = form.head.replace("%s", "add") + value + form.tail
    assert accepted(form, hf, text % "12")
    assert not accepted(form, hf, text % '"x"')
    assert not accepted(form, hf, (text % "12").replace("add", "all"))
    assert read_everywhere(form, text % "12") == ("", "", [("add", '{"a": 12}')])
    assert form.begins_forced(form.head[:3], ["add", "say"]) == ["add", "say"]
    assert form.begins_forced(form.head.replace("%s", "sa"), ["add", "say"]) in (["say"], [])


def test_gpt_oss_may_think_before_a_forced_call() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["harmony"]))
    form = tool_format_of(hf)
    assert form is not None
    thought = "<|channel|>analysis<|message|>Two.\nSo: add.<|end|><|start|>assistant"
    call = form.head.replace("%s", "add") + '{"a": 1}'
    assert accepted(form, hf, thought + call)
    assert not accepted(form, hf, thought * 2 + call)
    assert read_everywhere(form, thought + call) == (
        "Two.\nSo: add.",
        "",
        [("add", '{"a": 1}')],
    )


def test_forced_parameters_are_optional_where_they_are_not_required_and_text_is_free() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["qwen3_coder"]))
    form = tool_format_of(hf)
    assert form is not None
    said = form.head.replace("%s", "say") + "<parameter=text>\n%s\n</parameter>\n" + form.tail
    assert accepted(form, hf, said % 'any "text"\n\n<b> </parameter> 7')
    assert not accepted(form, hf, form.head.replace("%s", "say") + form.tail)
    chosen = {"pick": {"properties": {"x": {"type": "string", "enum": ["a", "b"]}}}}
    text = form.head.replace("%s", "pick") + "<parameter=x>\n%s\n</parameter>\n" + form.tail
    assert accepted(form, hf, text % "b", chosen)
    assert not accepted(form, hf, text % "c", chosen)
    assert accepted(form, hf, form.head.replace("%s", "pick") + form.tail, chosen)


def test_a_schema_that_parameters_cannot_keep_to_is_forced_as_json() -> None:
    hf = tokenizer(FRAME.replace("@", TEMPLATES["qwen3_coder"]))
    form = tool_format_of(hf)
    assert form is not None
    dated = {"on": {"properties": {"day": {"type": "string", "pattern": "[0-9]{4}"}}}}
    call = '<tool_call>\n{"name": "on", "arguments": {"day": "%s"}}\n</tool_call>'
    assert accepted(form, hf, call % "2026", dated)
    assert not accepted(form, hf, call % "june", dated)
    assert read(form, [call % "2026"]) == ("", call % "2026", [])  # "on" is none of FUNCTIONS
