"""The text of one sample: what ends it, what is cut, what is kept."""

from __future__ import annotations

import pytest

from forethought.config.sampling import SamplingParams
from forethought.llm.detokenizer import Transcript
from forethought.llm.tokenizer import Tokenizer
from forethought.outputs import GRAMMAR_COMPLETE, FinishReason, Logprob
from tokens import byte_level, sentencepiece

TOKENIZER = Tokenizer(byte_level())
EOS = 2


def say(text: str, finish: FinishReason | None = None, at_once: bool = False, **fields):
    """A transcript that was told ``text`` token by token, and the texts seen on the way."""
    transcript = Transcript(TOKENIZER, SamplingParams(**fields), [])
    tokens, seen = TOKENIZER.encode(text), []
    pieces = [tokens] if at_once else [[token] for token in tokens]
    for piece in pieces:
        if transcript.finish_reason is None:
            transcript.add(piece, None)
            seen.append(transcript.text)
    if finish is not None:
        transcript.finish(finish)
    return transcript, seen


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_string_ends_the_text_before_it(at_once):
    transcript, _ = say("Hello world, how are you?", stop=["w are"], at_once=at_once)
    output = transcript.output()
    assert output.text == "Hello world, ho"
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "w are")
    # The token that completed the stop string is the last one kept.
    assert "w are" in TOKENIZER.decode(output.token_ids)
    assert "w are" not in TOKENIZER.decode(output.token_ids[:-1])


def test_a_stop_string_is_kept_if_asked_for():
    transcript, _ = say("Hello world, how", stop=["wor"], include_stop_str_in_output=True)
    assert transcript.text == "Hello wor"


def test_text_that_may_begin_a_stop_string_is_held_back():
    transcript, seen = say("Hello world?", FinishReason.LENGTH, stop=["o world!"])
    assert "Hello world" not in seen
    assert "Hell" in seen
    assert transcript.text == "Hello world?"


def test_a_held_back_beginning_appears_when_nothing_follows():
    transcript, seen = say("Hello", FinishReason.LENGTH, stop=["o w"])
    assert seen[-1] == "Hell"
    assert transcript.text == "Hello"


def test_stop_strings_before_min_tokens_are_passed_over():
    length = len(TOKENIZER.encode("Hello hello"))
    early, _ = say("Hello hello hello", stop=["ello"], min_tokens=length)
    assert early.text == "Hello h"


def test_the_stop_token_is_in_the_ids_and_not_in_the_text():
    for params, text in (
        (SamplingParams(), "Hi"),
        (SamplingParams(skip_special_tokens=False), "Hi"),
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True), "Hi</s>"),
    ):
        transcript = Transcript(TOKENIZER, params, [])
        transcript.add(TOKENIZER.encode("Hi"), None)
        transcript.add([EOS], None, FinishReason.STOP)
        output = transcript.output()
        assert output.text == text
        assert output.token_ids == [*TOKENIZER.encode("Hi"), EOS]
        assert output.stop_reason is None


def test_a_stop_token_is_named_as_the_reason():
    token = TOKENIZER.encode("!")[0]
    transcript = Transcript(TOKENIZER, SamplingParams(stop_token_ids=(token,)), [])
    transcript.add([*TOKENIZER.encode("Hi"), token], None, FinishReason.STOP, stop_reason=token)
    output = transcript.output()
    assert (output.text, output.stop_reason) == ("Hi", token)


def test_the_token_that_completes_a_shape_belongs_to_the_text():
    transcript = Transcript(TOKENIZER, SamplingParams(), [])
    transcript.add(TOKENIZER.encode("Hi!"), None, FinishReason.STOP, GRAMMAR_COMPLETE)
    assert (transcript.text, transcript.output().stop_reason) == ("Hi!", GRAMMAR_COMPLETE)


def test_a_stop_string_completed_by_the_last_token_wins_over_the_length():
    transcript = Transcript(TOKENIZER, SamplingParams(stop=["you"]), [])
    transcript.add(TOKENIZER.encode("are you"), None, FinishReason.LENGTH)
    assert transcript.output().stop_reason == "you"


def test_the_text_continues_that_of_the_prompt():
    pieces = Tokenizer(sentencepiece())
    transcript = Transcript(pieces, SamplingParams(), pieces.encode("he"))
    transcript.add(pieces.encode_more(" he"), None)
    assert transcript.text == " he"


def test_logprobs_carry_the_text_of_their_tokens_and_add_up():
    first, second = TOKENIZER.encode("ab")
    transcript = Transcript(TOKENIZER, SamplingParams(logprobs=1), [])
    transcript.add([first], [{first: Logprob(-0.5, 1)}])
    transcript.add([second], [{second: Logprob(-2.0, 2), first: Logprob(-0.1, 1)}])
    output = transcript.output()
    assert output.cumulative_logprob == pytest.approx(-2.5)
    assert [entry.token for entry in output.logprobs[1].values()] == ["b", "a"]
    assert Transcript(TOKENIZER, SamplingParams(), []).output().cumulative_logprob is None


def test_an_output_is_a_copy():
    transcript, _ = say("Hello")
    output = transcript.output()
    transcript.add(TOKENIZER.encode(" world"), None)
    assert output.text == "Hello"
    assert output.token_ids == TOKENIZER.encode("Hello")
