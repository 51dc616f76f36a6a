"""The tokens with which a stop string may end are found, whatever the kind of vocabulary."""

from __future__ import annotations

import asyncio
import random
import string

import pytest

from forethought import LLM, AsyncLLM, SamplingParams
from forethought.llm.stop_candidates import StopCandidates
from tokens import speaking

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def test_tokens_with_the_last_letter_or_its_last_byte_are_candidates() -> None:
    filler = {f"filler{number}": number + 10 for number in range(200)}
    names = {"ab": 0, "b}": 1, "▁x}": 2, "Ċ": 3, "é": 4, "Ã©": 5, "▁": 6, "<0x7D>": 7} | filler
    letters = {"Ċ": 10, "Ã": 0xC3, "©": 0xA9, "}": 0x7D, "b": 0x62, "é": 0xE9, "Ġ": 0x20}
    byte_letters = {chr(256 + byte): byte for byte in range(256)} | letters
    found = StopCandidates(names, byte_letters, {7: 0x7D})
    assert list(found.of(["}"]) or ()) == [1, 2, 7]
    assert list(found.of(["x\n"]) or ()) == [3]
    assert list(found.of(["é"]) or ()) == [4, 5]
    assert list(found.of([" "]) or ()) == [2, 6]
    assert list(found.of(["b", "}"]) or ()) == [0, 1, 2, 7]
    assert found.of(["no filler"]) is None, "it is in every token"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_stop_strings_end_texts_where_single_steps_do(kind: str) -> None:
    rng = random.Random(1)
    with LLM(speaking(kind)) as llm, LLM(speaking(kind), num_continuous_decode_steps=1) as single:
        text = llm.generate("abc", GREEDY).outputs[0].text
        for _ in range(12):
            begin, size = rng.randrange(len(text)), rng.randint(1, 3)
            params = GREEDY.replace(stop=[text[begin : begin + size] or string.ascii_letters])
            output, expected = (one.generate("abc", params).outputs[0] for one in (llm, single))
            assert output.token_ids == expected.token_ids
            assert (output.text, output.stop_reason) == (expected.text, expected.stop_reason)


def test_clients_get_several_steps_and_the_tokens_of_single_ones() -> None:
    with LLM(speaking("byte_level")) as llm:
        params = GREEDY.replace(temperature=0.7, seed=3, logprobs=1)
        prompts = ["abc", "x", "hello there"]
        expected = [output.outputs[0] for output in llm.generate(prompts, params)]
        calls = llm._frontend.engine._step._continuous
        num_steps, advance = list[int](), calls.advance
        calls.advance = lambda plan, by: num_steps.append(plan.num_steps) or advance(plan, by)

        async def ask(engine: AsyncLLM) -> list[object]:
            outputs = await asyncio.gather(*[engine.generate(p, params) for p in prompts])
            return [output.outputs[0] for output in outputs]

        served = AsyncLLM.over(llm)
        assert asyncio.run(ask(served)) == expected
        served.shutdown()
        assert max(num_steps) > 8
