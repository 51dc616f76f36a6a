"""Named KV snapshots: a restored session goes on as the saved one would have."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle_heads import random_head
from engines import GREEDY as GREEDY_IDS
from engines import drain, engine, expect_empty
from forethought import (
    LLM,
    AsyncLLM,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    SamplingParams,
)
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import (
    CapacityError,
    ContextLengthError,
    ParameterError,
    SnapshotError,
    UnknownNameError,
    UsageError,
)
from tokens import speaking, thinking

TEXT = "Hello world, how are you?"
MORE = " And how are the others?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)
CACHE = {"max_tokens": 1024, "page_size": 4, "enable_block_reuse": False}  # counts are then exact


def build(directory, **fields):
    settings = {"dtype": "float32", "kv_cache_config": CACHE, "snapshot_dir": directory}
    return LLM(speaking(), **{**settings, **fields})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the snapshot ``"chat"``; and what the saved session went on with."""
    directory = tmp_path_factory.mktemp("snapshots") / "made"
    with build(directory) as llm, llm.start(TEXT) as session:
        session.generate(GREEDY)
        session.extend(MORE)
        session.save("chat")
        tokens = session.tokens
        assert llm.snapshots == ["chat"]
        with session.fork() as fork:
            sampled = fork.generate(SAMPLED)
        greedy = session.generate(GREEDY)
        expect_no_page_is_lost(llm, session)
    return directory, tokens, greedy, sampled


def expect_no_page_is_lost(llm, *sessions):
    llm._frontend.engine.check_integrity()
    for session in sessions:
        session.close()
    expect_empty(llm._frontend.engine)


def stored_kv(llm, session, length):
    """The keys and values of the first positions, as the engine has them."""
    table, storage = session._sequence.table, llm._frontend.engine.runner.storage
    return storage.read_slots(table.slots(0, length))


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_restored_session_goes_on_with_the_same_tokens_and_prefills_only_the_last(
    saved, page_size
):
    directory, tokens, greedy, sampled = saved
    with build(directory, kv_cache_config={**CACHE, "page_size": page_size}) as llm:
        session = llm.restore("chat")
        assert session.tokens == tokens
        with session.fork() as fork:
            assert fork.generate(SAMPLED).token_ids == sampled.token_ids
        assert session.generate(GREEDY).token_ids == greedy.token_ids
        assert session.usage.prefilled == 1
        assert session.usage.cached == len(tokens) - 1
        expect_no_page_is_lost(llm, session)


def test_the_restored_kv_is_that_of_the_saved_session_bit_for_bit(tmp_path):
    with build(tmp_path) as llm, llm.start(TEXT) as session:
        session.generate(GREEDY)
        length = len(session.tokens) - 1
        session.save("bits")
        with llm.restore("bits") as restored:
            pairs = zip(
                stored_kv(llm, session, length), stored_kv(llm, restored, length), strict=True
            )
            for kept, loaded in pairs:
                assert torch.equal(kept, loaded)


def test_a_prompt_that_was_never_computed_is_computed_for_its_snapshot(tmp_path):
    with build(tmp_path) as llm:
        with llm.start(TEXT) as session:
            session.save("prompt")
            assert session.tokens == llm.tokenizer(TEXT).input_ids
        before = llm.stats.prefilled
        with llm.restore("prompt") as restored:
            restored.generate(GREEDY)
        assert llm.stats.prefilled == before + 1
        expect_no_page_is_lost(llm)


def test_a_session_of_a_single_token_can_be_saved(tmp_path):
    with build(tmp_path) as llm, llm.start([65]) as session:
        session.save("one")
        with llm.restore("one") as restored:
            assert restored.generate(GREEDY).token_ids == session.generate(GREEDY).token_ids


def test_saving_under_a_name_again_replaces_the_snapshot(tmp_path):
    with build(tmp_path) as llm, llm.start(TEXT) as session:
        first = session.save("x")
        session.extend(MORE)
        assert session.save("x") == first
        assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
        with llm.restore("x") as restored:
            assert restored.tokens == session.tokens


async def _saved_while_generating(llm):
    session, other = llm.start(TEXT), llm.start(MORE)
    params = GREEDY.replace(max_tokens=60)
    stream, beside = session.stream(params), other.stream(params)
    await stream.reach(5)
    await session.save("running")
    whole, alone = await stream.finish(), await beside.finish()
    restored = await llm.restore("running")
    known, missing = restored.tokens, len(session.tokens) - len(restored.tokens)
    assert len(known) >= len(llm.tokenizer(TEXT).input_ids) + 5
    if missing:  # else the engine had come to the end before the command to save
        known += (await restored.generate(params.replace(max_tokens=missing))).token_ids
    assert session.tokens == known
    for each in (session, other, restored):
        await each.close()
    return whole.token_ids, alone.token_ids


def test_a_session_is_saved_while_it_and_others_generate(tmp_path):
    with build(tmp_path) as direct:
        params = GREEDY.replace(max_tokens=60)
        expected = [direct.generate(text, params).outputs[0].token_ids for text in (TEXT, MORE)]
        llm = AsyncLLM.over(direct)
        found = asyncio.run(_saved_while_generating(llm))
        llm.shutdown()
        assert list(found) == expected
        expect_no_page_is_lost(direct)


def test_a_draft_model_drafts_for_a_restored_session_as_for_the_saved_one(tmp_path):
    drafts = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(speaking()))
    with build(tmp_path, speculative_config=drafts) as llm:
        with llm.start(TEXT) as session:
            session.generate(GREEDY)
            session.save("drafted")
            expected = session.generate(GREEDY)
        with llm.restore("drafted") as restored:
            output = restored.generate(GREEDY)
        assert output.token_ids == expected.token_ids
        assert output.metrics.accepted == output.metrics.drafted > 0  # it is the same model
        expect_no_page_is_lost(llm)


def test_hidden_states_that_a_drafter_reads_are_part_of_the_snapshot():
    config = Eagle3DecodingConfig(max_draft_len=2, speculative_model=random_head())
    machine = engine(speculative=[config])
    sequence = machine.open([5, 6, 7, 8, 9, 10, 11])
    machine.resume(sequence, GREEDY_IDS)
    drain(machine)
    saved = machine.capture(sequence, sequence.tokens)
    assert list(saved.hidden_states) == [machine.speculation.hidden_state_caches[0].layer_ids]
    machine.resume(sequence, GREEDY_IDS)
    drain(machine)
    restored = machine.restore(saved)
    machine.resume(restored, GREEDY_IDS)
    drain(machine)
    assert restored.output == sequence.output
    assert restored.metrics == sequence.metrics
    assert restored.metrics.drafted > 0
    machine.close(sequence)
    machine.close(restored)
    expect_empty(machine)


def test_what_was_never_computed_is_computed_when_a_snapshot_of_it_goes_on():
    machine = engine()
    sequence = machine.open([5, 6, 7, 8, 9])
    saved = machine.capture(sequence, sequence.tokens)
    assert saved.num_stored == 0
    restored = machine.restore(saved)
    for each in (sequence, restored):
        machine.resume(each, GREEDY_IDS)
    drain(machine)
    assert restored.output == sequence.output
    machine.close(sequence)
    machine.close(restored)
    expect_empty(machine)


def test_a_snapshot_that_cannot_be_stored_leaves_no_page_behind():
    machine = engine()
    sequence = machine.open([5, 6, 7, 8, 9])
    machine.resume(sequence, GREEDY_IDS)
    drain(machine)
    saved = machine.capture(sequence, sequence.tokens)
    machine.close(sequence)
    with pytest.raises(AssertionError):
        machine.restore(SequenceSnapshot(saved.token_ids, saved.kv[:1]))
    expect_empty(machine)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "..", "../chat", "a/b", "a\\b", ".hidden", "a\0b", "x" * 101, "né", None, 7]
)
def test_a_name_that_could_leave_the_directory_is_refused(saved, name):
    with build(saved[0]) as llm, llm.start(TEXT) as session:
        with pytest.raises(ParameterError, match="invalid name of a snapshot"):
            session.save(name)
        with pytest.raises(ParameterError, match="invalid name of a snapshot"):
            llm.restore(name)


def test_without_a_directory_nothing_is_saved(tmp_path):
    with build(None) as llm, llm.start(TEXT) as session:
        for refused in (lambda: session.save("x"), lambda: llm.restore("x"), lambda: llm.snapshots):
            with pytest.raises(ParameterError, match="snapshot_dir is not set"):
                refused()


def test_an_unknown_name_is_an_error_that_names_the_snapshots_there_are(saved):
    with build(saved[0]) as llm, pytest.raises(UnknownNameError, match="did you mean 'chat'"):
        llm.restore("chad")


def test_a_snapshot_of_another_model_or_dtype_is_refused(saved):
    with (
        LLM(thinking(), snapshot_dir=saved[0], dtype="float32") as other,
        pytest.raises(SnapshotError, match="its model is"),
    ):
        other.restore("chat")
    with (
        build(saved[0], dtype="bfloat16") as other,
        pytest.raises(SnapshotError, match="its dtype is float32"),
    ):
        other.restore("chat")


def change_a_value(file, _):
    tensors, metadata = load_file(file), metadata_of(file)
    tensors["kv.0"][0, 3, 0, 0] += 1
    save_file(tensors, file, metadata)


def metadata_of(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def change_the_layout(file, _):
    layers = json.loads(metadata_of(file)["layers"])
    save_file(load_file(file), file, {**metadata_of(file), "layers": json.dumps(layers[1:])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, whole: file.write_bytes(whole[:-9]), "is damaged"),
        (lambda file, whole: file.write_bytes(whole[:40]), "is damaged"),
        (lambda file, whole: file.write_bytes(b""), "is damaged"),
        (lambda file, whole: file.write_bytes(b"no safetensors at all"), "is damaged"),
        (change_a_value, "its tensors are not those that were saved"),
        (change_the_layout, "its layers is"),
        (lambda file, _: save_file({"x": torch.zeros(1)}, file), "does not fit this model"),
    ],
)
def test_a_damaged_file_is_refused_and_costs_no_page(saved, tmp_path, damage, message):
    file = tmp_path / "chat.safetensors"
    whole = (saved[0] / "chat.safetensors").read_bytes()
    file.write_bytes(whole)
    damage(file, whole)
    with build(tmp_path) as llm:
        with pytest.raises(SnapshotError, match=message):
            llm.restore("chat")
        expect_no_page_is_lost(llm)


def test_a_snapshot_for_which_there_are_too_few_pages_is_refused(saved):
    directory, tokens, *_ = saved
    room = {**CACHE, "max_tokens": len(tokens) + 8}
    with build(directory, kv_cache_config=room) as llm:
        with llm.start(TEXT) as session:
            session.generate(GREEDY)
            with pytest.raises(CapacityError, match=r"pages, and \d are free"):
                llm.restore("chat")
            llm._frontend.engine.check_integrity()
        with llm.restore("chat") as restored:
            assert restored.tokens == tokens
    with (
        build(directory, max_seq_len=20) as llm,
        pytest.raises(ContextLengthError),
    ):
        llm.restore("chat")


def test_a_closed_session_is_not_saved(tmp_path):
    with build(tmp_path) as llm:
        session = llm.start(TEXT)
        session.close()
        with pytest.raises(UsageError):
            session.save("x")
        assert llm.snapshots == []


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory")
    with (
        build(file) as llm,
        llm.start(TEXT) as session,
        pytest.raises(SnapshotError, match="cannot write the snapshot 'x'"),
    ):
        session.save("x")
