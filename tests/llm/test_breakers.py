"""Sequence breakers are found in the tokens of a vocabulary, and DRY does not reach across them."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from forethought import LLM, AsyncLLM, SamplingParams
from forethought.errors import ParameterError
from forethought.llm.breakers import BreakerTokens
from forethought.llm.tokenizer import Tokenizer
from tokens import byte_level, sentencepiece, speaking

KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}
DRY = SamplingParams(
    temperature=0.0, max_tokens=40, ignore_eos=True, dry_multiplier=5.0, dry_allowed_length=1
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["e", "\n", " ", "re", "ü", "🙂", "how are", "好，"])
def test_tokens_that_contain_a_breaker_are_those_whose_text_does(kind: str, text: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    breakers = tokenizer.breakers.of((text,))
    for token in range(len(tokenizer.hf)):
        if token not in tokenizer.special_ids:
            assert breakers.breaks(token) == (text in tokenizer.piece_within(token)), token


@pytest.mark.parametrize("kind", KINDS)
def test_a_breaker_is_seen_wherever_the_tokenizer_puts_its_borders(kind: str) -> None:
    tokenizer, rng = Tokenizer(KINDS[kind]()), random.Random(2)
    breaker = "\nu:"
    breakers = tokenizer.breakers.of((breaker,))
    for _ in range(60):
        before, after = ("".join(rng.choices("helo ,\n:uw", k=5)) for _ in range(2))
        ids = tokenizer.encode_more(before + breaker + after)
        ends = [at for at in range(len(ids) + 1) if breaker in tokenizer.decode(ids[:at])]
        text = tokenizer.decode(ids)
        if text.count(breaker) == 1 and tokenizer.decode(ids[: ends[0]]).endswith(breaker):
            assert breakers.distance(ids[::-1]) == len(ids) - ends[0], (before, after)


def test_several_breakers_and_repeated_ones_are_one_set() -> None:
    tokenizer = Tokenizer(byte_level())
    both, first, second = map(tokenizer.breakers.of, (("e", "h", "e"), ("e",), ("h",)))
    marks = zip(both.is_breaker, first.is_breaker, second.is_breaker, strict=True)
    assert all(mark == (one | other) for mark, one, other in marks)
    assert tokenizer.breakers.of(()).distance([5, 6, 7]) == 3


def test_breakers_that_begin_alike_share_what_they_may_begin_in() -> None:
    names = {letter: number for number, letter in enumerate("abcdefgh")}
    breakers = BreakerTokens(lambda: names, {" ": 32}, {}, lambda text: [names[c] for c in text])
    tree = breakers.of(("ab", "ac", "ad")).tree
    heads = [tree.branches[names[letter]].heads for letter in "bcd"]
    assert heads == [{names["a"]}] * 3
    assert len({id(shared) for shared in heads}) == 1


def test_only_so_many_sets_are_remembered() -> None:
    names = {"a": 0, "Ġ": 1}
    breakers = BreakerTokens(lambda: names, {"a": 97, "Ġ": 32}, {}, lambda text: [0] * len(text))
    sets = [("a" * (1 + number % 30), "a" * (1 + number // 30)) for number in range(100)]
    for texts in sets:
        breakers.of(texts)
    assert [breakers.knows(texts) for texts in sets] == [False] * 36 + [True] * 64


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_end_at_breakers_in_an_answer(kind: str) -> None:
    """A model that would say one word for ever says others under DRY, unless the word is one."""
    with LLM(speaking(kind)) as llm:
        (token,) = llm._frontend.tokenizer.encode_more("e")
        params = DRY.replace(logit_bias={token: 30.0})
        plain = llm.generate("abc", params.replace(dry_multiplier=0.0)).outputs[0].token_ids
        assert plain == [token] * 40
        for breakers, changes in (((), True), (("q", "\n"), True), (("x", "e"), False)):
            one = params.replace(dry_sequence_breakers=breakers)
            result = llm.generate("abc", one).outputs[0].token_ids
            assert (result != plain) == changes
            assert llm.start("abc").generate(one).token_ids == result
            assert llm.generate("abc", one.replace(n=2)).outputs[1].token_ids == result
        llm._frontend.local_engine.check_integrity()


def test_clients_of_an_event_loop_get_the_same_and_do_not_make_it_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, find = list[Any](), BreakerTokens._find

    def noted(self: BreakerTokens, texts: tuple[str, ...]) -> Any:
        threads.append(threading.current_thread())
        return find(self, texts)

    with LLM(speaking("byte_level")) as llm:
        params = DRY.replace(dry_sequence_breakers=["e", "lo"])
        expected = llm.generate("abc", params).outputs[0].token_ids
        llm._frontend.tokenizer.breakers._known.clear()
        monkeypatch.setattr(BreakerTokens, "_find", noted)

        async def ask(engine: AsyncLLM) -> list[list[int]]:
            session = engine.start("abc")
            first = await session.generate(params)
            llm._frontend.tokenizer.breakers._known.clear()
            second = (await engine.generate("abc", params)).outputs[0]
            return [first.token_ids, second.token_ids, (await session.generate(params)).token_ids]

        served = AsyncLLM.over(llm)
        first, second, _ = asyncio.run(ask(served))
        served.shutdown()
        assert first == second == expected
        assert ["asyncio" in thread.name for thread in threads] == [True, True]


def test_an_engine_without_a_tokenizer_refuses_texts_by_name() -> None:
    with LLM(speaking("byte_level")) as llm:
        engine = llm._frontend.local_engine
        with pytest.raises(ParameterError, match="dry_sequence_breakers in text"):
            engine.add([5, 6], DRY)
        engine.add([5, 6], DRY.replace(dry_multiplier=0.0))
        engine.add([5, 6], DRY.replace(dry_sequence_breakers=[]))
