"""Sequences that attend to each other's tokens, in the pages where those were computed."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import pytest
import torch

from engines import GREEDY, drain, engine, engine_over, expect_empty, load, outputs
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence
from forethought.errors import ContextLengthError, ModelError, UsageError
from forethought.model import loader
from forethought.model.attention.concurrent import rotated
from forethought.outputs import FinishReason
from models import prompts, tiny
from turns import by_turns

PREFIX, FIRST, SECOND, OWN = prompts((11, 13, 6, 5), seed=3)
FAMILIES = ("llama", "llama_mha", "llama_mqa", "llama_tied_biased", "qwen2", "qwen3")
NATIVE_ONLY = ("qwen3_moe", "phi3")
LIMITS: dict[str, Any] = {"max_length": 200, "pages": 100}


def written(machine: Engine, tokens: List[int]) -> Sequence:
    """A parked sequence whose tokens but the last one are stored."""
    (sequence,) = machine.add(tokens, GREEDY.replace(max_tokens=1), keep=True)
    drain(machine)
    return sequence


def reader(machine: Engine, others: List[Sequence], own: List[int] = OWN) -> Sequence:
    """A parked sequence that attends to others; nothing of its own is computed."""
    sequence = machine.open([*PREFIX, *own])
    machine.attend_to(sequence, dict.fromkeys(others, len(PREFIX)))
    return sequence


def two_writers(machine: Engine) -> list[Sequence]:
    """Parked sequences that attend to each other."""
    pair = [machine.open([*PREFIX, *own]) for own in (FIRST, OWN)]
    machine.attend_to(pair[0], {pair[1]: len(PREFIX)})
    machine.attend_to(pair[1], {pair[0]: len(PREFIX)})
    return pair


def torch_model(architecture: str) -> Any:
    return loader.load(tiny(architecture), dtype="float32", forward="torch")


def ended(machine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        machine.close(sequence)
    expect_empty(machine)


@pytest.mark.parametrize(
    ("architecture", "forward"), by_turns([*FAMILIES, *NATIVE_ONLY], ["auto", "torch"])
)
def test_tokens_of_others_are_read_as_if_they_stood_before_the_own_ones(
    architecture: str, forward: str
) -> None:
    """Text that does not change any more is as good as a prompt; the second other has read the
    first one."""
    if forward == "torch" and architecture in NATIVE_ONLY:
        pytest.skip("it has no fused forward")
    lm = load(architecture) if forward == "auto" else torch_model(architecture)
    machine = engine_over(lm, **LIMITS)
    (plain,) = machine.add([*PREFIX, *FIRST, *SECOND, *OWN], GREEDY)
    drain(machine)
    first = written(machine, [*PREFIX, *FIRST])
    second = reader(machine, [first], SECOND)
    machine.resume(second, GREEDY.replace(max_tokens=1))
    drain(machine)
    seeing = reader(machine, [first, second])
    computed = machine.stats.prefilled
    machine.resume(seeing, GREEDY)
    drain(machine)
    assert outputs([seeing]) == outputs([plain])
    assert machine.stats.prefilled - computed <= len(PREFIX) + len(OWN)
    alone = machine.open([*PREFIX, *OWN])
    machine.resume(alone, GREEDY)
    drain(machine)
    assert outputs([alone]) != outputs([plain])
    ended(machine, first, second, seeing, alone)


@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_others_are_read_where_their_beginnings_end(forward: str) -> None:
    """One within the own tokens, another one further on: two threads joined one after the other."""
    lm = load("llama") if forward == "auto" else torch_model("llama")
    machine = engine_over(lm, **LIMITS)
    (plain,) = machine.add([*PREFIX, *FIRST, *OWN, *SECOND, 9, 8], GREEDY)
    drain(machine)
    first = written(machine, [*PREFIX, *FIRST])
    middle = reader(machine, [first])
    machine.resume(middle, GREEDY.replace(max_tokens=1))
    drain(machine)
    own = len(PREFIX) + len(OWN)
    second, last = machine.fork(middle, own), machine.fork(middle, own)
    machine.extend(second, SECOND)
    machine.extend(last, [9, 8])
    machine.resume(second, GREEDY.replace(max_tokens=1))
    drain(machine)
    machine.attend_to(last, {second: own, first: len(PREFIX)})
    machine.resume(last, GREEDY)
    drain(machine)
    assert outputs([last]) == outputs([plain])
    again = machine.open(last.tokens[: own + 2])  # with nothing computed
    machine.attend_to(again, {first: len(PREFIX), second: own})
    machine.resume(again, GREEDY)
    drain(machine)
    assert outputs([again]) == outputs([plain])
    ended(machine, first, middle, second, last, again)


def turns_of(lm: Any, **limits: Any) -> list[list[int]]:
    """What two sequences write that read each other while they write."""
    machine = engine_over(lm, **{**LIMITS, **limits})
    pair = two_writers(machine)
    for sequence in pair:
        machine.resume(sequence, GREEDY.replace(max_tokens=40))
    drain(machine)
    ended(machine, *pair)
    return outputs(pair)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_forward_in_cpp_writes_what_the_reference_does(architecture: str) -> None:
    native, fused = load(architecture), torch_model(architecture)
    assert (native.path.kind, fused.path.kind) == ("native", "fused")
    assert turns_of(native) == turns_of(fused)


def test_who_reads_each_other_writes_something_else_than_alone() -> None:
    machine = engine(**LIMITS)
    pair = [machine.open([*PREFIX, *own]) for own in (FIRST, OWN)]
    for sequence in pair:
        machine.resume(sequence, GREEDY.replace(max_tokens=40))
    drain(machine)
    together = turns_of(load("llama"))
    assert all(a != b for a, b in zip(outputs(pair), together, strict=True))
    ended(machine, *pair)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_sizes_do_not_change_a_token(page_size: int) -> None:
    lm = load("qwen3")
    assert turns_of(lm, page_size=page_size, pages=400) == turns_of(lm)


def test_a_token_is_read_from_the_step_after_it_was_stored() -> None:
    """Written out step by step: each forward of one reads what the other one had before it."""
    machine = engine(**LIMITS)
    pair = two_writers(machine)
    seen: list[list[int]] = []
    forward = machine.runner.forward

    def watched(rows: Any, *readers: Any) -> Any:
        seen.append([row.concurrent.counts[0] for row in rows if row.concurrent is not None])
        return forward(rows, *readers)

    machine.runner.forward = watched  # type: ignore[method-assign]
    for sequence in pair:
        machine.resume(sequence, GREEDY.replace(max_tokens=4))
    drain(machine)
    own, first = len(OWN), len(FIRST)
    decoding = [counts for counts in seen if len(counts) == 2][-3:]
    assert decoding == [[own + n, first + n] for n in range(3)]
    ended(machine, *pair)


def test_pages_that_depend_on_others_are_not_found_by_prompts_with_the_same_tokens() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY)
    drain(machine)
    copy = machine.fork(seeing)  # it has such pages as well
    machine.resume(copy, GREEDY)
    drain(machine)
    text = seeing.tokens
    machine.close(copy)
    (again,) = machine.add(text, GREEDY)
    drain(machine)
    assert again.usage.cached <= len(PREFIX)
    fresh = engine(**LIMITS)
    (expected,) = fresh.add(text, GREEDY)
    drain(fresh)
    assert outputs([again]) == outputs([expected])
    ended(machine, other, seeing)


def test_pages_of_prompts_with_the_same_tokens_are_not_found_where_others_are_read() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    machine.add([*PREFIX, *OWN, *SECOND], GREEDY)
    drain(machine)
    seeing = reader(machine, [other], [*OWN, *SECOND])
    machine.resume(seeing, GREEDY)
    drain(machine)
    assert 0 < seeing.usage.cached <= len(PREFIX)
    (plain,) = machine.add([*PREFIX, *FIRST, *OWN, *SECOND], GREEDY)
    drain(machine)
    assert outputs([seeing]) == outputs([plain])
    ended(machine, other, seeing)


def test_a_fork_reads_what_its_parent_reads() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY)
    drain(machine)
    fork = machine.fork(seeing, len(PREFIX) + len(OWN))
    machine.resume(fork, GREEDY)
    drain(machine)
    assert outputs([fork]) == [seeing.tokens[len(PREFIX) + len(OWN) :]]
    earlier = machine.fork(seeing, len(PREFIX) - 1)  # behind no token of its own
    assert earlier.others == ()
    machine.attend_to(fork, {})
    assert fork.others == ()
    ended(machine, other, seeing, fork, earlier)


def test_a_sequence_that_is_computed_again_reads_the_others_again() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY)
    for _ in range(6):
        machine.step()
    machine.scheduler.restart(seeing)  # as if its pages were needed
    drain(machine)
    (plain,) = machine.add([*PREFIX, *FIRST, *OWN], GREEDY)
    drain(machine)
    assert outputs([seeing]) == outputs([plain])
    ended(machine, other, seeing)


def test_it_has_no_drafts_while_the_others_have() -> None:
    config = NGramDecodingConfig(max_draft_len=3)
    machine = engine(speculative=[config], **LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    text = [*PREFIX, *OWN, *OWN, *OWN]
    seeing = machine.open(text)
    machine.attend_to(seeing, {other: len(PREFIX)})
    (beside,) = machine.add([*OWN, *OWN, *OWN], GREEDY.replace(max_tokens=30))
    machine.resume(seeing, GREEDY.replace(max_tokens=30))
    drain(machine)
    assert seeing.metrics.drafted == 0 < beside.metrics.drafted
    ended(machine, other, seeing)


def test_the_context_holds_the_tokens_of_all() -> None:
    machine = engine(max_length=60, pages=100)
    pair = two_writers(machine)
    for sequence in pair:
        machine.resume(sequence, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    drain(machine)
    total = len(PREFIX) + sum(len(sequence.tokens) - len(PREFIX) for sequence in pair)
    assert 60 - 2 <= total <= 60 + 2
    assert {sequence.finish_reason for sequence in pair} == {FinishReason.LENGTH}
    ended(machine, *pair)


@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_others_that_alone_exceed_the_context_fail_the_reader(forward: str) -> None:
    """Queries would be rotated by more positions than there are rotary embeddings of."""
    lm = load("llama") if forward == "auto" else torch_model("llama")
    machine = engine_over(lm, max_length=64, pages=100)
    text = [*PREFIX, *FIRST]
    others = [written(machine, [*text, *([7 + n] * 16)]) for n in range(2)]
    others.append(written(machine, [*text, *([9] * 16)]))
    seeing = reader(machine, others)
    (beside,) = machine.add(PREFIX, GREEDY)
    machine.resume(seeing, GREEDY)
    errors = [event.error for event in drain(machine) if event.error is not None]
    assert [type(error) for error in errors] == [ContextLengthError]
    assert beside.finish_reason is FinishReason.LENGTH
    ended(machine, *others)


def test_who_is_started_again_does_not_wait_for_who_waits_for_it() -> None:
    machine = engine(**LIMITS)
    first, second = two_writers(machine)
    machine.resume(first, GREEDY)
    machine.resume(second, GREEDY)  # it waits for what they begin with
    machine.abort(first)
    machine.resume(first, GREEDY)
    drain(machine)
    assert [len(each) for each in outputs([first, second])] == [16, 16]
    ended(machine, first, second)


def test_what_fails_beside_its_reader_is_read_as_far_as_it_is_stored() -> None:
    """Its last page, which is copied in this step, is given back before the reader is computed."""
    machine = engine(**LIMITS)
    original = written(machine, [*PREFIX, *FIRST, 9])
    copy = machine.fork(original)  # the last page is shared, and not full
    assert copy.table.length % machine.pool.page_size
    seeing = reader(machine, [copy])
    forward = machine.runner.forward

    def fails_with_the_copy(rows: Any, *readers: Any) -> Any:
        if any(row.table is copy.table for row in rows):
            raise RuntimeError("no forward of this one")
        return forward(rows, *readers)

    machine.runner.forward = fails_with_the_copy  # type: ignore[method-assign]
    machine.resume(copy, GREEDY)
    machine.resume(seeing, GREEDY.replace(max_tokens=1))
    drain(machine)
    kept = copy.tokens[: len(copy.tokens) - 1]
    del machine.runner.forward  # type: ignore[method-assign]
    whole = len(kept) // machine.pool.page_size * machine.pool.page_size
    (plain,) = machine.add([*kept[:whole], *OWN], GREEDY.replace(max_tokens=1))
    drain(machine)
    assert outputs([seeing]) == outputs([plain])
    ended(machine, original, seeing)


def test_a_beginning_is_not_shared_with_who_reads_something_else_in_it() -> None:
    machine = engine(**LIMITS)
    text = written(machine, [*PREFIX[:5], *FIRST])
    first = machine.open(PREFIX)
    machine.attend_to(first, {text: 5})
    second = reader(machine, [first])
    machine.resume(first, GREEDY.replace(max_tokens=1))  # nothing of its own is ever stored
    machine.resume(second, GREEDY)
    drain(machine)
    (plain,) = machine.add([*PREFIX, *OWN], GREEDY)
    drain(machine)
    assert outputs([second]) == outputs([plain])
    ended(machine, text, first, second)


def test_what_is_read_may_be_extended_meanwhile() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY)
    machine.step()
    machine.extend(other, [9, 8, 7])
    drain(machine)
    (plain,) = machine.add([*PREFIX, *FIRST, *OWN], GREEDY)
    drain(machine)
    assert outputs([seeing]) == outputs([plain])
    ended(machine, other, seeing)


def test_what_a_waiting_sequence_reads_keeps_its_pages_while_others_run() -> None:
    """Of two requests that run, one gives up its pages: the reader would fail without them."""
    machine = engine(pages=14, max_length=56, page_size=4, max_batch_size=2)
    other = written(machine, [*PREFIX, *FIRST])
    beside = [machine.add([n, 8, 7, 6], GREEDY.replace(max_tokens=20))[0] for n in (8, 9)]
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY.replace(max_tokens=4))
    events = drain(machine)
    assert [event.error for event in events if event.error is not None] == []
    assert [len(each) for each in outputs([*beside, seeing])] == [20, 20, 4]
    assert machine.stats.preemptions > 0
    ended(machine, other, seeing)


def test_what_cannot_be_read_any_more_fails_the_reader_alone() -> None:
    machine = engine(**LIMITS)
    other = written(machine, [*PREFIX, *FIRST])
    unread = machine.open([*PREFIX, *SECOND])
    first, second = reader(machine, [other]), reader(machine, [unread])
    (beside,) = machine.add(PREFIX, GREEDY)
    machine.close(other)
    for sequence in (first, second):
        machine.resume(sequence, GREEDY)
    events = drain(machine)
    failures = {event.sequence.id: event.error for event in events if event.error is not None}
    assert set(failures) == {first.id, second.id}
    assert all(isinstance(error, UsageError) for error in failures.values())
    assert beside.finish_reason is FinishReason.LENGTH
    ended(machine, unread)


def test_what_is_read_is_the_last_to_lose_its_pages() -> None:
    machine = engine(pages=13, max_length=52, page_size=4)
    other = written(machine, [*PREFIX, *FIRST])
    idle = written(machine, [9, 8, 7, 6, 5, 4])
    seeing = reader(machine, [other])
    machine.resume(seeing, GREEDY)
    drain(machine)
    assert other.table.pages
    assert not idle.table.pages
    ended(machine, other, idle, seeing)


def test_wrong_uses_are_refused() -> None:
    machine = engine(**LIMITS)
    other, same = machine.open([*PREFIX, *FIRST]), machine.open(PREFIX)
    for beginning in (len(PREFIX), len(PREFIX) + 1):  # nothing of its own; another beginning
        with pytest.raises(UsageError, match="begins alike"):
            machine.attend_to(same, {other: beginning})
    with pytest.raises(UsageError, match="cannot be attended to"):
        machine.attend_to(other, {other: 1})
    foreign = engine(**LIMITS).open([*PREFIX, *FIRST])
    with pytest.raises(UsageError, match="another engine"):
        machine.attend_to(other, {foreign: 1})
    machine.close(same)
    with pytest.raises(UsageError, match="cannot be attended to"):
        machine.attend_to(other, {same: 1})
    seeing = reader(machine, [written(machine, [*PREFIX, *SECOND])])
    machine.resume(seeing, GREEDY)
    drain(machine)
    with pytest.raises(UsageError, match="cannot be saved"):
        machine.capture(seeing, seeing.tokens)
    ended(machine, other, *(each.sequence for each in seeing.others), seeing)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "deepseek_v3"])
def test_models_whose_attention_cannot_are_refused_by_name(architecture: str) -> None:
    machine = engine(architecture, **LIMITS)
    pair = [machine.open([*PREFIX, *own]) for own in (FIRST, OWN)]
    with pytest.raises(ModelError, match="cannot attend to each other"):
        machine.attend_to(pair[0], {pair[1]: len(PREFIX)})
    ended(machine, *pair)


def test_turning_a_query_is_rotating_it_at_a_later_position() -> None:
    table = load("llama").network.rotations
    assert table is not None
    q = torch.randn(3, 2, table.shape[-1], generator=torch.Generator().manual_seed(0))
    scaled = torch.cat([table * 1.5, torch.zeros(0, *table.shape[1:])])  # with a factor, as of YaRN

    def at(position: int) -> torch.Tensor:
        cos, sin = scaled[position]
        return q * cos + q.roll(q.shape[-1] // 2, -1) * sin

    torch.testing.assert_close(rotated(at(5), scaled, 12), at(17))
