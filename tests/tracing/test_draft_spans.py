"""Streams tell which of their characters were drafted, and what was rejected."""

from forethought import AsyncLLM
from forethought.methods import DynasorGenerationController
from forethought.outputs import DraftSpan, spans_within
from forethought.scaffolding import (
    EngineWorker,
    NativeGenerationController,
    ScaffoldingLlm,
)
from forethought.scaffolding.result import Delta


def test_spans_are_cut_at_the_ends_of_a_text_and_counted_from_its_beginning():
    spans = [DraftSpan(0, 3, "a", "x"), DraftSpan(4, 8, "b", "y"), DraftSpan(9, 9, "c", "z")]
    assert spans_within(spans, 0, 4) == [(0, 3, "a", "x")]
    assert spans_within(spans, 2, 6) == [(0, 1, "a", "x"), (2, 4, "b", "")]
    assert spans_within(spans, 6, 9) == [(0, 2, "b", "y")]
    assert spans_within(spans, 9, 12) == [(0, 0, "c", "z")]
    assert spans_within(spans, 10, 12) == []


QUESTION = "Sam has 110 nuts. He uses 84. He uses 12. He uses 8. How many nuts does Sam have now?"


def streamed(worker, controller, tag):
    """The text that a request streams, with the drafts in it, and its result."""
    prompt = worker.llm.chat_prompt([{"role": "user", "content": QUESTION}])
    params = {"temperature": 0.0, "max_tokens": 120}
    with ScaffoldingLlm(controller, {tag: worker}) as llm:
        result = llm.generate_async(prompt, sampling_params=params)
        deltas = [event.output for event in result.events() if isinstance(event.output, Delta)]
        result.result(timeout=240)
    text, spans = "", []
    for delta in deltas:
        before = len(text)
        spans += [(before + d.start, before + d.end, d.drafter, d.rejected) for d in delta.drafts]
        text += delta.text
    return text, spans, result


def test_a_stream_tells_which_characters_were_drafted_and_what_was_rejected():
    fields = {"speculative_config": {"decoding_type": "NGram"}, "dtype": "float32"}
    with EngineWorker(AsyncLLM(**fields)) as worker:
        native = NativeGenerationController(streaming=True)
        tag = NativeGenerationController.WorkerTag.GENERATION
        text, spans, result = streamed(worker, native, tag)
        assert text == result.output.text
        assert {drafter for _, _, drafter, _ in spans} == {"ngram"}
        offsets = worker.llm.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        drafted = [o for o in offsets for begin, end, *_ in spans if begin <= o[0] < o[1] <= end]
        assert 0 < result.metrics.accepted == len(drafted)
        assert any(rejected for *_, rejected in spans)
        for start, end, _, rejected in spans:
            assert not rejected or not text[end:].startswith(rejected), (start, end, rejected)

        chain = DynasorGenerationController(chunk_size=16, streaming=True, temperature=0.0)
        cut, same, _ = streamed(worker, chain, DynasorGenerationController.WorkerTag.GENERATION)
        kept = len(cut) if text.startswith(cut) else cut.index("\n\n...")
        assert text[:kept] == cut[:kept]
        assert same, "the chain's drafts are told too"
        assert all(end <= kept and drafter == "ngram" for _, end, drafter, _ in same)
        assert same == sorted(same, key=lambda span: span[:2])
        worker.llm.shutdown()
