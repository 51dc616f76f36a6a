"""Tokenizing, detokenizing in pieces, and stopping at strings."""

from __future__ import annotations

import logging

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from forethought.errors import ContextLengthError, ModelError, ParameterError, UsageError
from forethought.llm.detokenizer import KEEP, Detokenizer, count_held, find_stop
from forethought.llm.tokenizer import Tokenizer
from models import tiny
from tokens import byte_level, sentencepiece, speaking

BYTES = Tokenizer(byte_level())
PIECES = Tokenizer(sentencepiece())
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer.hf) - 1), max_size=40)


def in_pieces(tokenizer, context, pieces, skip=True):
    detokenizer = Detokenizer(tokenizer, context, skip)
    return [*[detokenizer.push(piece) for piece in pieces], detokenizer.flush()]


# --- the tokenizer -------------------------------------------------------------------------------


def test_only_whole_texts_get_the_model_s_special_tokens():
    assert PIECES.encode("he")[0] == PIECES.hf.bos_token_id
    assert PIECES.encode("he") == PIECES.hf("he").input_ids
    assert PIECES.hf.bos_token_id not in PIECES.encode_more("he")


@BOTH
@pytest.mark.parametrize("more", ["he", " he", "x\ny", "é", ""])
def test_a_continuation_adds_exactly_its_own_text(tokenizer, more):
    start = tokenizer.encode("he ll")
    assert tokenizer.decode([*start, *tokenizer.encode_more(more)]) == "he ll" + more


def test_special_tokens_are_left_out_only_if_asked_for():
    ids = [1, *BYTES.encode("Hello"), 2]
    assert BYTES.decode(ids) == "Hello"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<s>Hello</s>"
    assert BYTES.piece(2) == "</s>"


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(ParameterError, match="character 1 is half of a surrogate pair"):
        BYTES.encode("a\ud800b")


def test_the_chat_template_makes_the_prompt():
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert BYTES.render(messages) == "<|system|>Be kind.<|user|>Hi<|assistant|>"
    assert BYTES.render(messages[1:], {"add_generation_prompt": False}) == "<|user|>Hi"


def test_a_model_without_a_chat_template_says_so():
    with pytest.raises(UsageError, match="no chat template"):
        PIECES.render([{"role": "user", "content": "Hi"}])


def test_what_the_template_refuses_is_told_in_its_words():
    with pytest.raises(UsageError, match="no tools here"):
        BYTES.render([{"role": "tool", "content": "42"}])


@pytest.mark.parametrize("messages", [[], ["Hi"], [{"content": "Hi"}]])
def test_messages_without_a_role_are_refused(messages):
    with pytest.raises(ParameterError, match="invalid messages"):
        BYTES.render(messages)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_transformers_made_out_of_nothing_is_refused():
    with pytest.raises(ModelError, match=r"cannot load the tokenizer of .*tokenizer=\.\.\."):
        Tokenizer.load(tiny("qwen3"))  # a directory without tokenizer files


def test_a_text_beyond_the_models_length_is_tokenised_without_a_word(caplog):
    hf = Tokenizer.load(speaking("byte_level")).hf
    hf.model_max_length = 4
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        assert len(Tokenizer(hf).encode("Hello world, how are you?")) > 4
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_tokenizer_loads_from_a_model_directory():
    tokenizer = Tokenizer.load(speaking("sentencepiece"))
    assert tokenizer.encode("he llo é") == PIECES.encode("he llo é")
    assert len(tokenizer.byte_values) == 256


# --- detokenising in pieces ----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(ids_of(BYTES), st.booleans(), st.integers(0, 12))
@example([200, 210, 220, 230] * 8, True, 0)
def test_the_pieces_together_are_the_text_of_all_tokens_for_any_bytes(ids, skip, cut):
    context, ids = ids[:cut], ids[cut:]
    before = BYTES.decode(context, skip)
    assume(not before.endswith("\ufffd"))  # the context ends inside a character
    pieces = in_pieces(BYTES, context, [[token] for token in ids], skip)
    assert before + "".join(pieces) == BYTES.decode([*context, *ids], skip)


@settings(max_examples=300, deadline=None)
@given(st.text("hel é你🙂\n ", max_size=20), st.booleans(), st.integers(0, 9), st.data())
def test_the_pieces_together_are_the_text_of_all_tokens_for_any_characters(text, skip, cut, data):
    ids = PIECES.encode(text)
    for place in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)), reverse=True):
        ids.insert(place, data.draw(st.sampled_from([0, 1, 2])))  # special tokens anywhere
    context, ids = ids[:cut], ids[cut:]
    before = PIECES.decode(context, skip)
    whole = PIECES.decode([*context, *ids], skip)
    # Neither does the context end inside a character, nor does a special token split one.
    assume(not before.endswith("\ufffd") and "\ufffd" not in whole)
    pieces = in_pieces(PIECES, context, [[token] for token in ids], skip)
    assert before + "".join(pieces) == whole


@settings(max_examples=100, deadline=None)
@given(ids_of(PIECES))
def test_any_pieces_at_all_make_some_text(ids):
    assert "".join(in_pieces(PIECES, [], [[token] for token in ids])).count("<s>") == 0


@BOTH
@settings(max_examples=50, deadline=None)
@given(text=st.text("hel é你🙂 ", min_size=1, max_size=30), size=st.integers(1, 9))
def test_it_does_not_matter_how_many_tokens_come_at_once(tokenizer, text, size):
    ids = tokenizer.encode(text)
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    assert "".join(in_pieces(tokenizer, [], chunks)) == tokenizer.decode(ids)


@BOTH
def test_a_character_appears_when_its_last_byte_does(tokenizer):
    ids = tokenizer.encode("x🙂y")
    *pieces, rest = in_pieces(tokenizer, [], [[token] for token in ids])
    assert [piece for piece in pieces if piece] == ["x", "🙂", "y"]
    assert rest == ""


def test_a_space_in_front_of_the_first_new_word_is_kept():
    context, ids = PIECES.encode("he"), PIECES.encode_more(" he")
    assert in_pieces(PIECES, context, [ids]) == [" he", ""]
    assert in_pieces(PIECES, [*context, 2], [ids]) == [" he", ""]  # behind a hidden token too


def test_an_unfinished_character_is_shown_at_the_end():
    ids = BYTES.encode("x🙂")[:-1]
    assert "".join(in_pieces(BYTES, [], [ids])) == "x\ufffd"


def test_a_character_that_the_context_began_is_returned_whole():
    ids = BYTES.encode("x🙂y")
    assert "".join(in_pieces(BYTES, ids[:3], [[token] for token in ids[3:]])) == "🙂y"


@BOTH
def test_the_work_per_token_is_bounded(tokenizer, monkeypatch):
    sizes = []
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer,
        "decode",
        lambda ids, skip_special_tokens=True: sizes.append(len(ids)) or decode(ids, False),
    )
    garbage = [tokenizer.encode("🙂")[-1]] * 200  # continuation bytes only
    specials = [2] * 200
    words = tokenizer.encode("hello " * 100)
    for ids in (garbage, specials, words):
        in_pieces(tokenizer, words, [[token] for token in ids])
    assert max(sizes) <= 2 * KEEP + 4
    assert len(sizes) < 2 * 1000 + 100


# --- stop strings --------------------------------------------------------------------------------

callbacks = st.text("ab", max_size=14)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def search(text, pieces, stops):
    """Text before the stop, feeding ``pieces`` letters at a time, and what was shown on the way."""
    seen, shown, position = "", "", 0
    while position < len(text):
        size = pieces[position % len(pieces)]
        known, seen = len(seen), text[: position + size]
        stop = find_stop(seen, known, stops)
        if stop:
            return seen[: stop.start], stop.text, shown
        shown = seen[: len(seen) - count_held(seen, stops)]
        position += size
    return seen, None, shown


@settings(max_examples=300, deadline=None)
@given(callbacks, stop_strings, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_stopping_does_not_depend_on_how_the_text_was_cut(text, stops, pieces):
    answer, stop, _ = search(text, [1], stops)
    assert search(text, pieces, stops)[:2] == (answer, stop)
    if stop is None:
        assert not any(stop in text for stop in stops)


@settings(max_examples=300, deadline=None)
@given(callbacks, stop_strings, st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_nothing_is_shown_that_a_stop_string_takes_back(text, stops, pieces):
    answer, _, shown = search(text, pieces, stops)
    assert answer.startswith(shown)


def test_only_a_possible_beginning_of_a_stop_string_is_held_back():
    assert count_held("the end", ["\n\n", "dx"]) == 1
    assert count_held("the end\n", ["\n\n"]) == 1
    assert count_held("the end\n ", ["\n\n"]) == 0
    assert count_held("aab", ["aabaa", "bb"]) == 3
    assert count_held("the end", []) == 0


# --- lengths and threads -------------------------------------------------------------------------


def counting(tokenizer, monkeypatch):
    """The lengths of the texts that it is given from now on."""
    lengths, ids = [], tokenizer._ids

    def counted(text, *args, **kwargs):
        lengths.append(len(text))
        return ids(text, *args, **kwargs)

    monkeypatch.setattr(tokenizer, "_ids", counted)
    return lengths


def test_a_text_with_more_characters_than_the_context_may_hold_is_refused_unread(monkeypatch):
    tokenizer = Tokenizer(byte_level())
    lengths = counting(tokenizer, monkeypatch)
    tokenizer.check_length("a" * 10 * tokenizer.longest_token, 10)
    with pytest.raises(ContextLengthError, match="the context holds 10 tokens"):
        tokenizer.check_length("a" * (10 * tokenizer.longest_token + 1), 10)
    assert not [length for length in lengths if length > 160]


def test_of_a_dense_text_a_beginning_is_read_and_no_more(monkeypatch):
    tokenizer = Tokenizer(byte_level())
    monkeypatch.setattr(tokenizer, "longest_token", 1000)
    lengths = counting(tokenizer, monkeypatch)
    with pytest.raises(ContextLengthError, match="the first 160 have"):
        tokenizer.check_length("1 2 " * 2000, 10)
    assert lengths == [160]


def test_a_text_that_fits_is_never_refused():
    for tokenizer in (BYTES, PIECES):
        for text in ("a", "he ll" * 50, " " * 300, "é" * 100, "\n" * 200):
            tokenizer.check_length(text, len(tokenizer.encode(text)))


@BOTH
def test_the_library_in_rust_makes_the_ids_of_hf(tokenizer):
    assert not tokenizer._encodes_itself
    for text in ("he ll", " he", "", "\n\n a", "é \t1 23", "<s>he</s>"):
        assert tokenizer.encode(text) == tokenizer.hf(text).input_ids
        assert tokenizer.encode_more(text).__class__ is list


@BOTH
def test_a_tokenizer_that_cuts_or_pads_is_told_not_to(tokenizer):
    expected = tokenizer.encode("he ll he ll")
    tokenizer.hf.backend_tokenizer.enable_truncation(2)
    assert tokenizer.encode("he ll he ll") == expected
    assert tokenizer.encode("he ll he ll") == expected
    tokenizer.hf.backend_tokenizer.no_truncation()


def test_a_short_text_does_not_wait_for_a_long_one_in_another_thread():
    tokenizer = Tokenizer(byte_level())
    tokenizer.encode("x")
    with tokenizer._lock:
        assert tokenizer.encode("he")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte level", "sentencepiece"])
def test_the_bytes_of_tokens_that_are_parts_of_characters_join_to_the_text(tokenizer):
    text = "na\u00efve \U0001f980 \u65e5\u672c \u0416\u0436 ok"
    ids = tokenizer.encode_more(text)
    raws = [tokenizer.raw(token) for token in ids]
    assert any(raws)
    assert all(
        raw is None or "\ufffd" in tokenizer.piece(token)
        for token, raw in zip(ids, raws, strict=True)
    )
    pieces = [tokenizer.piece_within(token).encode() for token in ids]
    whole = b"".join(piece if raw is None else raw for piece, raw in zip(pieces, raws, strict=True))
    assert whole.decode() == text


def test_a_replacement_character_that_is_a_token_of_its_own_is_text():
    token = BYTES.encode_more("\ufffd")
    assert (
        b"".join(BYTES.raw(each) or BYTES.piece(each).encode() for each in token)
        == "\ufffd".encode()
    )


def test_ids_of_short_texts_are_remembered_and_not_shared():
    tokenizer = Tokenizer.load(speaking("byte_level"))
    first = tokenizer.encode_more("hello there")
    first.append(0)
    assert tokenizer.encode_more("hello there") == first[:-1]
    assert tokenizer._short_ids.cache_info().hits == 1
    with pytest.raises(ParameterError):
        tokenizer.encode_more("\ud800")
