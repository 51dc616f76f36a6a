"""Grammars: what they allow, as pure functions of the output, and which are refused."""

from __future__ import annotations

import contextlib
import json
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from forethought.assets import reasoner_dir
from forethought.config.engine import GuidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.errors import DependencyError, ParameterError, RequestError
from forethought.llm.grammar import STACK_BYTES, GrammarCompiler
from forethought.llm.tokenizer import Tokenizer
from forethought.model.sampling.distribution import Constraint, unpack
from tokens import byte_level, sentencepiece

BYTES = Tokenizer(byte_level())
EOS = 2
WIDTH = 304
"""Logits of four more ids than the tokenizer has."""
compiler = GrammarCompiler(BYTES, WIDTH, frozenset({EOS}))

LIST = {"type": "array", "items": {"enum": ["a", "he", 12]}, "maxItems": 3}
SHAPES = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": LIST},
    {"json_object": True},
    {"regex": r"(he|hello|[a-c]+)( wor)*\d?"},
    {"grammar": 'start: "a" start "b" | "Gr" | "ü"'},
    {"grammar": 'root ::= "he" ("l" | "lo")* "!"?'},
    {"choice": ["hello", "help", "hell 你好 🙂", 'quo"te\\\n']},
]


def follow(shape: dict, of: GrammarCompiler = compiler, **params) -> Constraint:
    return of.constraints(SamplingParams(guided_decoding=shape, **params))([], 1)[0]


def allowed(constraint: Constraint, output: list[int], width: int = WIDTH) -> set[int]:
    return set(unpack(constraint.mask(output), width).nonzero()[0].tolist())


def ids(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode_more(text)


# --- purity --------------------------------------------------------------------------------------


@st.composite
def questions(draw):
    """A shape, and outputs to ask about: most of them valid, in any order, with repetitions."""
    shape = draw(st.sampled_from(SHAPES))
    guide, valid = follow(shape), [[]]
    for _ in range(draw(st.integers(1, 12))):
        prefix = draw(st.sampled_from(valid))
        choices = sorted(allowed(guide, prefix))
        if choices:
            valid.append([*prefix, draw(st.sampled_from(choices))])
    invalid = [
        [*draw(st.sampled_from(valid)), *draw(st.lists(st.integers(0, WIDTH - 1), max_size=2))]
        for _ in range(3)
    ]
    return shape, draw(st.lists(st.sampled_from(valid + invalid), min_size=1, max_size=20))


def answer(constraint: Constraint, output: list[int]):
    try:
        return allowed(constraint, output), constraint.is_complete(output)
    except ParameterError:
        return allowed(constraint, output), "broken"


@settings(max_examples=150, deadline=None)
@given(questions())
def test_a_constraint_asked_in_any_order_answers_as_a_new_one_does(asked):
    shape, outputs = asked
    constraint = follow(shape)
    for output in outputs:
        assert answer(constraint, output) == answer(follow(shape), output)


def test_samples_of_one_prompt_have_constraints_of_their_own():
    make = compiler.constraints(SamplingParams(guided_decoding={"choice": ["ab", "cd"]}))
    first, second = make([], 2)
    assert allowed(first, ids("a")) == set(ids("b"))
    assert allowed(second, ids("c")) == set(ids("d"))
    assert allowed(first, ids("a")) == set(ids("b"))


def test_asking_along_a_path_moves_by_one_token_at_a_time():
    """The matcher is not run again from the start; with a long output that is what counts."""
    constraint, taken = follow({"regex": "(he|l)*"}), []
    matcher = constraint._matcher

    class Spy:
        def __getattr__(self, name):
            return getattr(matcher, name)

        def try_consume_tokens(self, tokens):
            taken.append(len(tokens))
            return matcher.try_consume_tokens(tokens)

    constraint._matcher = Spy()
    output = ids("l") * 50
    for end in range(51):
        constraint.mask(output[:end])
        constraint.is_complete(output[:end])
    assert taken == [1] * 50
    constraint.mask([*output[:49], *ids("h")])  # a sibling of the last node
    assert taken == [1] * 51


# --- what is allowed -----------------------------------------------------------------------------


def test_an_end_is_allowed_exactly_where_the_grammar_may_end():
    constraint = follow({"regex": "a(bc)*"})
    assert EOS not in allowed(constraint, [])
    assert EOS in allowed(constraint, ids("a"))
    assert EOS not in allowed(constraint, ids("ab"))
    assert EOS in allowed(constraint, ids("abc"))


def test_every_end_of_sequence_id_of_the_model_may_end_it():
    constraint = follow({"regex": "ab*"}, GrammarCompiler(BYTES, WIDTH, frozenset({1, 2, 999})))
    assert allowed(constraint, ids("a")) == {1, 2, *ids("b")}


def test_with_ignore_eos_the_end_is_never_allowed():
    constraint = follow({"regex": "ab*"}, ignore_eos=True)
    assert allowed(constraint, ids("a")) == set(ids("b"))
    assert allowed(constraint, [*ids("a"), EOS]) == set()


def test_without_an_end_of_sequence_nothing_else_ends_the_output():
    constraint = follow({"regex": "ab*"}, GrammarCompiler(BYTES, WIDTH, frozenset()))
    assert allowed(constraint, ids("a")) == set(ids("b"))


def test_a_grammar_is_complete_where_no_text_may_follow():
    constraint = follow({"choice": ["he", "hello"]})
    assert not constraint.is_complete(ids("he"))
    assert constraint.is_complete(ids("hello"))
    assert constraint.is_complete([*ids("he"), EOS])
    assert allowed(constraint, ids("hello")) == {EOS}


def test_behind_an_output_that_breaks_the_grammar_nothing_may_come():
    constraint = follow({"regex": "ab*"})
    for output in (ids("c"), ids("aba"), [303], [EOS]):
        assert allowed(constraint, output) == set()
        with pytest.raises(ParameterError, match="cannot be kept to its grammar"):
            constraint.is_complete(output)


def test_ids_beyond_the_tokenizer_and_special_tokens_are_not_text():
    found = allowed(follow({"regex": "(?s:.)*"}), [])
    assert found & {0, 1, 300, 301, 302, 303} == set()
    assert set(ids("a")) < found


def test_a_model_narrower_than_its_tokenizer_is_never_asked_for_what_it_lacks():
    wide = allowed(follow({"regex": "[a-zA-Z ,?]*"}), [])
    narrow = follow({"regex": "[a-zA-Z ,?]*"}, GrammarCompiler(BYTES, 290, frozenset({EOS})))
    assert max(wide) > 290
    assert allowed(narrow, [], 290) == {token for token in wide if token < 290}


@pytest.mark.parametrize("tokenizer", [BYTES, Tokenizer(sentencepiece())])
@pytest.mark.parametrize("text", ["hello a he", "é 你好 🙂", 'quo"te\\\n\ttab', "/a/"])
def test_a_choice_is_allowed_to_the_letter(tokenizer, text):
    of = GrammarCompiler(tokenizer, WIDTH, frozenset({EOS}))
    constraint, output = follow({"choice": [text, "other"]}, of), ids(text, tokenizer)
    for i, token in enumerate(output):
        assert token in allowed(constraint, output[:i])
    assert constraint.is_complete(output)
    assert tokenizer.decode([*ids("a", tokenizer), *output]) == "a" + text


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"json": {"type": "objct"}}, "invalid json in guided_decoding: Invalid type: objct"),
        ({"json": {"not": {}}}, 'Unimplemented keys: ."not".'),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "greater than maximum"),
        ({"json": {"$ref": "http://localhost/schema"}}, "does not fetch resources"),
        ({"regex": "a(?=b)"}, "invalid regex in guided_decoding: .*look-around"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "()"}, "only the empty output"),
        ({"grammar": 'start: "a" b'}, "unknown name"),
        ({"grammar": "nonsense"}, "invalid grammar in guided_decoding: .*Expected ::="),
        ({"grammar": "start: <|unknown|>"}, "unknown special token"),
    ],
)
def test_a_shape_that_cannot_be_followed_is_refused_at_once(shape, reason):
    with pytest.raises(ParameterError, match=reason):
        follow(shape)


def test_a_shape_that_the_model_has_no_tokens_for_is_refused_at_once():
    narrow = GrammarCompiler(BYTES, 60, frozenset({EOS}))
    with pytest.raises(ParameterError, match="can be written in it with the model's tokens"):
        follow({"regex": "x+"}, narrow)


def test_an_output_beyond_the_grammar_s_limits_fails_alone(
    monkeypatch,
):
    import llguidance

    limits = llguidance.LLParserLimits
    monkeypatch.setattr(
        llguidance, "LLParserLimits", lambda **kwargs: limits(**{**kwargs, "step_max_items": 30})
    )
    constraint = follow({"json_object": True}, GrammarCompiler(BYTES, WIDTH, frozenset({EOS})))
    easy, hard = ids('{"a": 1'), ids('{"a": [[[[[[[[1')
    before = allowed(constraint, easy)
    sizes = [len(allowed(constraint, hard[:end])) for end in range(len(hard) + 1)]
    assert 0 in sizes
    with pytest.raises(ParameterError, match="Too many items"):
        constraint.is_complete(hard[: sizes.index(0) + 1])
    assert allowed(constraint, easy) == before
    assert not constraint.is_complete(easy)


def test_no_shape_is_no_constraint():
    assert compiler.constraints(SamplingParams()) is None


def test_a_grammar_is_compiled_once():
    params = [SamplingParams(guided_decoding={"json": LIST}, seed=seed) for seed in (1, 2)]
    first, second = (compiler.constraints(each) for each in params)
    assert first.__self__ is second.__self__


def test_a_choice_of_many_matches_each_choice_exactly():
    texts = [f"{n * 7919 % 1000003} o/p.t|{n}" for n in range(20_000)]
    constraint = follow({"choice": texts})
    for text in texts[::4000]:
        output = ids(text)
        for i, token in enumerate(output):
            assert token in allowed(constraint, output[:i])
            assert not constraint.is_complete(output[:i])
        assert constraint.is_complete(output) or EOS in allowed(constraint, output)
    wrong = ids("7919 o/p?")
    assert wrong[-1] not in allowed(constraint, wrong[:-1])


def test_long_enums_are_allowed_and_as_many_open_alternatives_are_not():
    texts = [f"option {n}" for n in range(20_000)]
    constraint = follow({"json": {"enum": texts}})
    output = ids('"option 1999')
    assert all(token in allowed(constraint, output[:n]) for n, token in enumerate(output))
    wide = {"grammar": "start: " + " | ".join(f'"{text}"' for text in texts[:3000])}
    with pytest.raises(ParameterError, match="row has 3001 items; max is 2000"):
        follow(wide)


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether it can be written with the tokens allowed, of which llguidance leaves only one way
    where the text is forced: not always the way in which the tokenizer writes it."""

    def can_write(output: list[int], rest: str) -> bool:
        tokens = allowed(constraint, output)
        pieces = {token: BYTES.hf.convert_ids_to_tokens(token) for token in tokens - {EOS}}
        return (
            EOS in tokens
            if not rest
            else any(
                can_write([*output, token], rest.removeprefix(piece))
                for token, piece in pieces.items()
                if rest.startswith(piece)
            )
        )

    [(letters, _)] = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return can_write([], letters)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(max_size=6).filter(bool), min_size=1, max_size=5, unique=True),
    st.characters(codec="utf-8"),
)
@example(["\U00043e16"], "0")
def test_a_choice_takes_exactly_its_texts_whatever_characters_they_have(texts, other):
    constraint = follow({"choice": texts})
    for text in texts:
        for near in (text, text[:-1], text + other, other + text[1:], text + text):
            assert not near or accepts(constraint, near) == (near in texts)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"regex": "ab" * 600_000}, "regex"),
        ({"json": {"enum": ["x" * 1_100_000]}}, "json"),
        ({"grammar": 'start: "' + "x" * 1_100_000 + '"'}, "grammar"),
        ({"choice": [f"option number {n}" for n in range(70_000)]}, "choice"),
    ],
)
def test_what_is_too_large_is_refused_with_the_limit_and_its_name(shape, kind):
    reason = rf"the {kind} in guided_decoding is too large: .*max_grammar_bytes is 1,048,576"
    with pytest.raises(ParameterError, match=reason):
        follow(shape)


def test_the_limit_of_size_can_be_lowered():
    narrow = GrammarCompiler(
        BYTES, WIDTH, frozenset({EOS}), GuidedDecodingConfig(max_grammar_bytes=5)
    )
    assert follow({"regex": "a+b+"}, narrow)
    with pytest.raises(ParameterError, match="it has 6 bytes"):
        follow({"choice": ["abc", "def"]}, narrow)


def test_what_llguidance_finds_too_large_is_refused_as_such():
    with pytest.raises(ParameterError, match=r"it is too large to be compiled|it takes more than"):
        follow({"regex": "|".join(f"w{n * 7919 % 1000003}.*" for n in range(90_000))})
    with pytest.raises(ParameterError, match=r"too large to be compiled: .*too many expressions"):
        follow({"regex": "a" * 1_000_000})
    parts = [{"type": "object", "properties": {f"k{n}": {}}} for n in range(10_000)]
    with pytest.raises(ParameterError, match="too many parts"):
        follow({"json": {"anyOf": parts}})


def test_a_limit_that_is_met_behind_the_first_token_is_told_before_anything_runs(monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.MAX_ROW_ITEMS", 100)
    wide = {"grammar": "start: " + " | ".join(f'"option {n}"' for n in range(200))}
    with pytest.raises(ParameterError, match="row has 201 items"):
        follow(wide, GrammarCompiler(BYTES, WIDTH, frozenset({EOS})))


def test_a_definition_of_many_intersections_is_refused_before_it_is_compiled():
    parts = [f"/(.|\\n)*w{n}(.|\\n)*/" for n in range(200)]
    with pytest.raises(ParameterError, match=r"has 199 intersections \(&\), and at most 16"):
        follow({"grammar": "start: A\nA: " + " & ".join(parts)})
    few = [f"A{n}: /a*/ & /[ab]*/ & /[^&]/" for n in range(20)]
    assert follow({"grammar": 'start: A0 "&"  // & and &\n' + "\n".join(few)})
    assert follow({"grammar": "start: A\nA: /[a-z]+/" + "".join(f" & ~/x{n}/" for n in range(50))})
    assert follow({"grammar": 'root ::= "he" [' + "&" * 20 + "]"})


def slow(shape: dict) -> object:
    return pytest.param(shape, marks=pytest.mark.slow)


STATES = "((.|\\n)*{}(.|\\n){{60}})*"
"""An expression that follows sixty characters back."""


PATTERNS = [{"type": "string", "pattern": f"w{n}(.|\\n)*x"} for n in range(40)]
NAMES = {"patternProperties": {f"^{n}[a-z]*$": {"type": "integer"} for n in range(1000)}}
DOUBLED = "\n".join(f"A{n}: A{n - 1} A{n - 1}" for n in range(1, 14))


@pytest.mark.parametrize(
    "shape",
    [
        {"json": {"type": "integer", "multipleOf": 1_000_033}},
        slow({"json": '{"type": "integer", "multiple\\u004ff": 1000033}'}),
        slow({"grammar": 'start: %json {"type": "integer", "multipleOf": 1000033}'}),
        slow({"grammar": "start: A\nA: " + " & ".join(f"/{STATES.format(c)}/" for c in "abcd")}),
        slow({"grammar": f"start: A\nA: ~(~/{STATES.format('a{3}')}/ | ~/{STATES.format('b')}/)"}),
        slow({"json": {"allOf": PATTERNS}}),
        {"regex": "(.*)" * 8000},
        {"grammar": "start: /" + "(.*)" * 8000 + "/"},
        {"grammar": f"start: A13\nA0: /.*/\n{DOUBLED}"},
        {"json": {"type": "object", **NAMES}},
    ],
    ids=[
        *("schema", "escaped", "embedded", "intersection", "negation", "patterns"),
        *("empty parts", "empty parts of a grammar", "doubled terminals", "patterns of names"),
    ],
)
def test_what_would_compile_for_ever_is_refused_at_a_limit_of_processor_time(shape, monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.TRIAL_SECONDS", 0.1)
    with pytest.raises(ParameterError, match=r"takes more than 0\.1 seconds of processor time"):
        follow(shape, GrammarCompiler(BYTES, WIDTH, frozenset({EOS})))


def test_what_a_trial_finds_wrong_is_not_compiled_again(monkeypatch):
    import llguidance

    class Reader:
        grammar_from_regex = llguidance.LLMatcher.grammar_from_regex

    of = GrammarCompiler(BYTES, WIDTH, frozenset({EOS}))
    monkeypatch.setattr(llguidance, "LLMatcher", Reader)  # which compiles nothing
    with pytest.raises(ParameterError, match="its expressions have too many states"):
        follow({"regex": "(.*)" * 501}, of)


def test_objects_and_lists_of_enums_are_counted_before_they_are_compiled():
    assert follow({"json": {"enum": [{"a": n, "b": [n]} for n in range(200)]}})
    assert follow({"json": {"enum": list(range(20_000))}})
    many = {"anyOf": [{"enum": [[n] for n in range(30_000)]}]}
    with pytest.raises(ParameterError, match="an enum has 30,000 objects and lists; max is 2000"):
        follow({"json": many})
    with pytest.raises(ParameterError, match="hold 100,002 values, and at most 50,000"):
        follow({"json": {"const": [list(range(99_997)), []]}})


@pytest.mark.slow
def test_what_would_take_all_memory_is_refused(monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.TRIAL_SECONDS", 3600)
    monkeypatch.setattr("forethought.llm.grammar.TRIAL_BYTES", 2**20)
    with pytest.raises(ParameterError, match="or 1 MiB of memory, to be compiled"):
        follow({"json": {"type": "integer", "multipleOf": 1_000_033}})


def test_a_multiple_and_an_intersection_are_kept_to_after_their_trial():
    sevens = follow({"json": {"type": "integer", "multipleOf": 7}})
    both = follow({"grammar": "start: A\nA: /[a-z]+/ & /h.*/"})
    assert EOS in allowed(sevens, ids("14"))
    assert EOS not in allowed(sevens, ids("15"))
    assert EOS in allowed(both, ids("he"))
    assert not allowed(both, []) & {*ids("a"), *ids("1")}


@pytest.mark.parametrize("shape", [{"regex": r"[^\s\S]"}, {"json": {"$ref": "#"}}])
def test_what_allows_no_text_is_refused_in_words(shape):
    with pytest.raises(ParameterError, match="nothing keeps to it"):
        follow(shape)


@pytest.mark.parametrize("depth", [300, 3000, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth):
    text, nested = '{"items": ' * depth + "{}" + "}" * depth, {}
    for _ in range(depth):
        nested = {"items": nested}
    try:
        for schema in (text, nested):
            with pytest.raises(ParameterError, match=r"nested too deeply|too large"):
                follow({"json": schema})
    finally:
        while nested:  # freeing it all at once recurses, too
            nested = nested.pop("items")


def test_a_long_chain_of_references_does_not_end_the_process():
    chain = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(4000)}
    with contextlib.suppress(ParameterError):
        follow({"json": {"$defs": {**chain, "d4000": {}}, "$ref": "#/$defs/d0"}})


def test_text_that_is_no_unicode_is_refused():
    for shape in ({"choice": ["\ud800"]}, {"regex": "\ud800"}, {"grammar": 'start: "\ud800"'}):
        with pytest.raises(ParameterError, match="surrogates"):
            follow(shape)


def test_a_compiler_that_fails_in_its_own_way_fails_with_an_error_of_ours(monkeypatch):
    of = GrammarCompiler(BYTES, WIDTH, frozenset({EOS}))
    monkeypatch.setattr(of, "_compile", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(RequestError, match="ZeroDivisionError"):
            follow({"regex": "a"}, of)
    monkeypatch.undo()
    assert follow({"regex": "a"}, of)


def test_no_more_grammars_are_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.COMPILED", 3)
    of = GrammarCompiler(BYTES, WIDTH, frozenset({EOS}))
    for size in range(1, 8):
        follow({"regex": f"a{{{size}}}"}, of)
    for thread in list(of._compilers):
        thread.join()
    assert [key[0].regex for key in of._compilations] == ["a{5}", "a{6}", "a{7}"]


def stack_size() -> int:
    """Of new threads. Asking alone would set it to the default."""
    size = threading.stack_size()
    threading.stack_size(size)
    return size


def test_only_the_compiling_threads_have_large_stacks(monkeypatch):
    """Two compilers that start a thread at once: each sets the process's size and resets it."""
    first, second = (GrammarCompiler(BYTES, WIDTH, frozenset({EOS})) for _ in range(2))
    other = threading.Thread(target=follow, args=({"regex": "b"}, second))
    met, done, sizes, start = threading.Event(), threading.Event(), [], threading.Thread.start

    def meeting(thread):
        if thread.name == "forethought-grammar":
            sizes.append(stack_size())
            if len(sizes) == 1:
                start(other)
                met.wait(0.3)  # while one starts its thread, the other must not come here
            else:
                met.set()
                done.wait(0.3)
        start(thread)

    before = stack_size()
    monkeypatch.setattr(threading.Thread, "start", meeting)
    follow({"regex": "a"}, first)
    done.set()
    other.join(60)
    assert sizes == [STACK_BYTES] * 2
    assert stack_size() == before


def test_a_grammar_that_is_waited_for_is_kept_however_many_come_after_it(monkeypatch):
    monkeypatch.setattr("forethought.llm.grammar.COMPILED", 1)
    of = GrammarCompiler(BYTES, WIDTH, frozenset({EOS}))
    kept = SamplingParams(guided_decoding={"regex": "kept"})
    with of._compiling(kept) as future:
        future.result(60)
        for size in range(1, 4):
            follow({"regex": f"a{{{size}}}"}, of)
        assert of.find(kept) is not None
    for thread in list(of._compilers):
        thread.join()
    assert len(of._compilations) == 1


def test_a_tokenizer_that_is_not_fast_is_refused():
    class Slow:
        is_fast = False

    slow = Tokenizer.__new__(Tokenizer)
    slow.hf = Slow()
    with pytest.raises(ParameterError, match=r"needs a fast tokenizer.*Slow"):
        follow({"regex": "a"}, GrammarCompiler(slow, WIDTH, frozenset()))


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(DependencyError, match="llguidance is not installed") as caught:
        follow({"regex": "a"}, GrammarCompiler(BYTES, WIDTH, frozenset({EOS})))
    assert "forethought[guided]" in str(caught.value)


def test_the_embedded_model_can_write_what_its_tokenizer_lets_it():
    tokenizer = Tokenizer.load(reasoner_dir())
    of = GrammarCompiler(tokenizer, 512, frozenset({tokenizer.hf.eos_token_id}))
    constraint = follow({"json": {"type": "object"}}, of)
    output = ids(json.dumps({"answer": [12, "yes", None]}), tokenizer)
    for i, token in enumerate(output):
        assert token in allowed(constraint, output[:i], 512)
    assert constraint.is_complete(output)
