"""``LLM`` and its sessions, on tiny random models with real tokenizers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines import expect_empty
from forethought.backends.cpu.native_steps import NativeSteps
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.engine.sequence import Sequence
from forethought.engine.step import Event
from forethought.errors import (
    CapacityError,
    ContextLengthError,
    DependencyError,
    EngineStopped,
    ModelError,
    ParameterError,
    RequestError,
    UsageError,
)
from forethought.llm.llm import LLM
from forethought.model.runner import ModelRunner
from forethought.outputs import FinishReason
from forethought.speculative.drafter import Drafter
from models import greedy
from tokens import speaking

MODEL = speaking("byte_level")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=7)
PROMPTS = ["Hello world", "How are you?", "你好"]


def build(kind: str = "byte_level", **fields) -> LLM:
    settings = {"dtype": "float32", "kv_cache_config": {"max_tokens": 2048, "page_size": 4}}
    return LLM(speaking(kind), **{**settings, **fields})


@pytest.fixture(scope="module")
def shared() -> LLM:
    return build()


@pytest.fixture
def llm(shared):
    """One LLM for all tests, found and left without sequences."""
    yield shared
    if shared._frontend.engine.pool.in_use:
        gc.collect()  # a session that only a traceback held
    shared._frontend.step()
    expect_empty(shared._frontend.engine)


# --- generate ------------------------------------------------------------------------------------


def test_greedy_generation_is_that_of_transformers(llm):
    ids = [llm.tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = greedy(MODEL, ids, 12)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.prompt_token_ids for output in outputs] == ids
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert completion.finish_reason is FinishReason.LENGTH
        whole = llm.tokenizer.decode(
            output.prompt_token_ids + completion.token_ids, skip_special_tokens=True
        )
        assert output.prompt + completion.text == whole


def test_text_and_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer(PROMPTS[0]).input_ids
    from_text, from_ids = llm.generate(PROMPTS[0], GREEDY), llm.generate(ids, GREEDY)
    assert from_text.outputs[0] == from_ids.outputs[0]
    assert (from_text.prompt, from_ids.prompt) == (PROMPTS[0], None)
    (from_list,) = llm.generate([ids], GREEDY)
    assert from_list.outputs[0] == from_ids.outputs[0]


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_params(llm):
    short = GREEDY.replace(max_tokens=3)
    outputs = llm.generate(PROMPTS[:2], [GREEDY, short])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 3]


def test_a_seeded_request_gives_the_same_tokens_alone_and_in_a_batch(llm):
    alone = llm.generate(PROMPTS[0], SAMPLED).outputs[0]
    others = [SamplingParams(max_tokens=20, seed=3, n=2), SAMPLED, GREEDY]
    batched = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], others)
    assert batched[1].outputs[0].token_ids == alone.token_ids


def test_samples_of_one_prompt_differ_and_prefill_it_once(llm):
    before = llm.stats.prefilled
    output = llm.generate("A prompt like no other one", SAMPLED.replace(n=4))
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    assert llm.stats.prefilled - before == len(output.prompt_token_ids)
    assert output.usage.prompt_tokens == output.usage.prefilled == len(output.prompt_token_ids)
    assert output.usage.completion_tokens == output.usage.decoded == 48


def test_a_stop_string_ends_the_generation_and_frees_its_pages(llm):
    text = llm.generate(PROMPTS[0], GREEDY).outputs[0].text
    stop = text[4:6]
    decoded = llm.stats.decoded
    completion = llm.generate(PROMPTS[0], GREEDY.replace(stop=[stop])).outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    assert llm.stats.decoded - decoded == len(completion.token_ids)  # none was drawn in vain


def test_a_stop_token_ends_the_generation(llm):
    ids = llm.generate(PROMPTS[0], GREEDY).outputs[0].token_ids
    completion = llm.generate(PROMPTS[0], GREEDY.replace(stop_token_ids=[ids[5]])).outputs[0]
    assert completion.token_ids == ids[: ids.index(ids[5]) + 1]
    assert completion.stop_reason == ids[5]


def test_logprobs_of_output_and_prompt_come_with_their_text(llm):
    params = GREEDY.replace(logprobs=2, prompt_logprobs=1, max_tokens=4)
    output = llm.generate(PROMPTS[0], params)
    completion = output.outputs[0]
    assert len(completion.logprobs) == 4
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token].rank == 1
        assert entries[token].token == llm.tokenizer.decode([token])
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entries[token].token == llm.tokenizer.decode([token])


def test_confidences_come_with_the_tokens_that_are_kept(llm):
    params = GREEDY.replace(confidence=3, max_tokens=8)
    whole = llm.generate(PROMPTS[0], params).outputs[0]
    assert len(whole.confidences) == len(whole.token_ids) == 8
    stopped = llm.generate(PROMPTS[0], params.replace(stop=[whole.text[4:6]])).outputs[0]
    assert len(stopped.confidences) == len(stopped.token_ids) < 8
    for kept, same in zip(stopped.confidences, whole.confidences, strict=False):
        assert kept == pytest.approx(same, abs=1e-5)
    assert llm.generate(PROMPTS[0], GREEDY).outputs[0].confidences is None


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, GREEDY)
    assert output.prompt == "<|user|>Hi<|assistant|>"
    assert output.outputs == llm.generate(llm.chat_prompt(messages), GREEDY).outputs


def test_a_model_without_a_template_cannot_chat():
    with build("mute") as llm, pytest.raises(UsageError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_a_sentencepiece_model_keeps_the_space_between_prompt_and_answer():
    with build("sentencepiece") as llm:
        output = llm.generate("hello", GREEDY)
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        whole = llm.tokenizer.decode(tokens, skip_special_tokens=True)
        assert "hello" + output.outputs[0].text == whole


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ("", ParameterError, "empty prompt"),
        ([[]], ParameterError, "prompt 0: empty prompt"),
        (None, ParameterError, "expected a string or a list of token ids, got NoneType"),
        (5, ParameterError, "got int"),
        ({"prompt_token_ids": [5]}, ParameterError, "Give its text, or its list of token ids"),
        (b"Hello", ParameterError, "got bytes"),
        ([1, "a"], ParameterError, "prompt 0"),
        ([True], ParameterError, "prompt 0"),
        ([1.5, 2.0], ParameterError, "prompt 0"),
        ([300], ParameterError, "token id 300 in prompt"),
        ([-1], ParameterError, "token id -1 in prompt"),
        ([5] * 256, ContextLengthError, "257 tokens do not fit"),
        (["Hello", "", "you"], ParameterError, "prompt 1: empty prompt"),
        (["Hello", [5] * 900], ContextLengthError, "prompt 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, error, says):
    steps = llm.stats.steps
    with pytest.raises(error, match=says):
        llm.generate(prompt, GREEDY)
    assert llm.stats.steps == steps


def test_a_prompt_that_cannot_fit_into_the_kv_cache_is_refused():
    with build(kv_cache_config={"max_tokens": 32, "page_size": 4}) as llm:
        with pytest.raises(CapacityError, match="it holds 32"):
            llm.generate([5] * 40, GREEDY)
        endless = SamplingParams(ignore_eos=True)
        assert len(llm.generate([5] * 4, endless).outputs[0].token_ids) == 28


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temperature": 0}, "expected SamplingParams, got dict"),
        (SamplingParams(logit_bias={300: 1.0}), "token id 300 in logit_bias"),
        (SamplingParams(stop_token_ids=(300,)), "token id 300 in stop_token_ids"),
    ],
    ids=["dict", "bias", "stop"],
)
def test_bad_params_are_refused_before_anything_runs(llm, params, says):
    with pytest.raises(ParameterError, match=says):
        llm.generate("Hello", params)
    with pytest.raises(ParameterError, match=says):
        llm.stream("Hello", params)  # at once, not with the first item


def test_as_many_params_as_prompts_are_needed(llm):
    with pytest.raises(ParameterError, match="params 1, prompts 2"):
        llm.generate(["a", "b"], [GREEDY])


def test_use_tqdm_shows_how_many_prompts_are_done_and_changes_nothing(llm, capfd):
    expected = [output.outputs for output in llm.generate(["Hello", "world"], GREEDY)]
    assert capfd.readouterr().err == ""
    outputs = llm.generate(["Hello", "world"], GREEDY, use_tqdm=True)
    assert [output.outputs for output in outputs] == expected
    assert "2/2" in capfd.readouterr().err


def test_use_tqdm_without_tqdm_is_told_before_anything_runs(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    before = llm.stats
    with pytest.raises(DependencyError, match=r"forethought\[eval\]"):
        llm.generate("Hello", GREEDY, use_tqdm=True)
    assert llm.stats == before


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ParameterError, match=r"'max_num_token'.*did you mean 'max_num_tokens'"):
        LLM(MODEL, max_num_token=5)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no model at .*no such directory"):
        LLM(tmp_path / "nothing")


def test_a_kv_cache_larger_than_the_memory_is_refused():
    with pytest.raises(CapacityError, match="does not fit into memory"):
        build(kv_cache_config={"max_tokens": 10**15})


def test_after_shutdown_every_call_says_so():
    llm = build()
    session = llm.start("Hello")
    llm.shutdown()
    llm.shutdown()
    for call in (
        lambda: llm.generate("Hello"),
        lambda: llm.start("Hello"),
        lambda: llm.stats,
        session.generate,
    ):
        with pytest.raises(EngineStopped, match="shut down"):
            call()


def test_a_closed_session_cannot_be_forked(llm):
    session = llm.start("Hello")
    session.close()
    with pytest.raises(UsageError, match="cannot fork this sequence: it is closed"):
        session.fork()


def test_a_session_may_outlive_its_llm_and_is_closed_in_silence():
    llm = build()
    with llm.start("Hello") as session, session.fork():
        llm.shutdown()
    session.close()


# --- stream --------------------------------------------------------------------------------------


def test_a_stream_grows_to_the_whole(llm):
    whole = llm.generate(PROMPTS[0], SAMPLED)
    pieces = list(llm.stream(PROMPTS[0], SAMPLED))
    texts = [piece.outputs[0].text for piece in pieces]
    assert all(late.startswith(early) for early, late in itertools.pairwise(texts))
    assert [len(piece.outputs[0].token_ids) for piece in pieces] == list(range(1, 13))
    assert [piece.finished for piece in pieces] == [False] * 11 + [True]
    assert pieces[-1].outputs == whole.outputs


def test_two_streams_and_a_call_share_the_steps(llm):
    first = llm.stream(PROMPTS[0], GREEDY)
    second = llm.stream(PROMPTS[1], GREEDY)
    next(first), next(second)
    steps = llm.stats.steps
    llm.generate(PROMPTS[2], GREEDY.replace(max_tokens=30))  # both finish on the way
    assert llm.stats.steps - steps == 30
    ends = list(first)[-1], list(second)[-1]
    alone = llm.generate(PROMPTS[:2], GREEDY)
    assert [end.outputs for end in ends] == [output.outputs for output in alone]


def test_leaving_a_stream_early_aborts_it(llm):
    stream = llm.stream(PROMPTS[0], GREEDY.replace(max_tokens=200))
    next(stream)
    stream.close()
    assert not llm._frontend.has_work


@pytest.mark.parametrize(
    ("owner", "name", "num_calls"),
    [(ModelRunner, "forward", 1), (NativeSteps, "advance", 1), (NativeSteps, "advance", 2)],
)
def test_an_interrupted_call_aborts_its_requests(llm, monkeypatch, owner, name, num_calls):
    compute, calls = getattr(owner, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == num_calls:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY.replace(max_tokens=40))
    expect_empty(llm._frontend.engine)


class InterruptAt:
    """Raises KeyboardInterrupt before the ``count``-th line that runs in some files."""

    def __init__(self, count: int, *files: str) -> None:
        self.count, self.files = count, files

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.count -= 1
            if self.count == 0:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)


def test_an_interrupted_step_loses_no_token_of_other_requests(llm):
    """A step in the main thread is also one for the requests of other threads."""
    frontend, prompts = llm._frontend, PROMPTS[:2]
    each = [GREEDY.replace(max_tokens=4, logprobs=1), GREEDY.replace(max_tokens=9)]
    whole = llm.generate(prompts[1], each[1]).outputs[0].text
    each[1] = each[1].replace(stop=[whole[3:5]])
    expected = [out.outputs for out in llm.generate(prompts, each)]
    for count in itertools.count(1, 7):
        interrupt = InterruptAt(count, "llm/frontend.py", "llm/detokenizer.py")
        generations = [
            frontend.submit(*llm._read(*pair)) for pair in zip(prompts, each, strict=True)
        ]
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            while not all(generation.finished for generation in generations):
                frontend.step()
        while frontend.has_work:
            frontend.step()
        assert [generation.output().outputs for generation in generations] == expected
        expect_empty(frontend.engine)
        if interrupt.count > 0:
            break


def test_the_ids_of_a_prompt_are_checked_once(llm, monkeypatch):
    engine, checked = llm._frontend.engine, []
    check_ids = engine._check_ids

    def noted(what, ids):
        checked.append(what)
        check_ids(what, ids)

    monkeypatch.setattr(engine, "_check_ids", noted)
    llm.generate(PROMPTS, GREEDY)
    with llm.start(PROMPTS[0]) as session:
        session.generate(GREEDY)
    assert checked.count("prompt") == len(PROMPTS) + 1


def test_a_failing_step_is_told_to_the_caller(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm._frontend.engine.runner, "forward", lambda rows: 1 / 0)
        with pytest.raises(RequestError, match="division by zero") as caught:
            llm.generate(PROMPTS, GREEDY)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert llm.generate(PROMPTS[0], GREEDY).finished


@contextlib.contextmanager
def hurried():
    """Threads are switched between as often as the interpreter can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def in_threads(work, count: int = 5) -> None:
    """Run ``work(number)`` in several threads at once; what any raises is raised here."""
    with hurried(), ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result(120)


def test_threads_share_an_llm_and_each_gets_what_it_would_get_alone(llm):
    expected = [llm.generate(prompt, GREEDY).outputs[0].token_ids for prompt in PROMPTS]
    short = GREEDY.replace(max_tokens=3)

    def work(number):
        for turn in range(8):
            which = (number + turn) % 3
            prompt, whole = PROMPTS[which], expected[which]
            assert llm.generate(prompt, GREEDY).outputs[0].token_ids == whole
            *_, last = llm.stream(prompt, GREEDY)
            assert last.outputs[0].token_ids == whole
            next(llm.stream(prompt, GREEDY))  # left early
            with llm.start(prompt) as session, session.fork() as fork:
                start = len(session.tokens)
                session.generate(short)
                next(session.stream(short))
                session.rewind(start + 3)
                assert fork.generate(GREEDY).token_ids == whole
                assert session.tokens[start:] == whole[:3]
            llm.start(prompt).fork()  # forgotten, both of them
            batch = llm.generate(PROMPTS, [GREEDY, short, GREEDY])
            assert [output.outputs[0].token_ids for output in batch] == [
                expected[0],
                expected[1][:3],
                expected[2],
            ]

    in_threads(work)


def test_threads_that_wait_together_share_steps(llm):
    before, params = llm.stats.steps, GREEDY.replace(max_tokens=60)
    with ThreadPoolExecutor(4) as pool:
        with llm._lock:  # so that all four ask at the same time
            works = [pool.submit(llm.generate, PROMPTS[0], params) for _ in range(4)]
            while len(llm._lock._waiting) < 4:
                time.sleep(0.001)
        for work in works:
            work.result(120)
    assert llm.stats.steps - before < 3 * 60


def test_iterators_and_sessions_that_the_garbage_collector_finds_in_any_thread_are_ended(llm):
    class Cycle:
        def __init__(self, *held):
            self.me, self.held = self, held

    def work(number):
        for turn in range(10):
            stream = llm.stream(PROMPTS[turn % 3], GREEDY)
            next(stream)
            session = llm.start("Hello")
            under_way = session.stream(GREEDY)
            next(under_way)
            Cycle(stream, session, under_way)
            del stream, session, under_way
            llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=2))

    usual = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        in_threads(work, 4)
    finally:
        gc.set_threshold(*usual)
    gc.collect()
    assert not llm._frontend.has_abandoned
    expect_empty(llm._frontend.engine)


def test_an_llm_that_is_called_from_within_its_own_step_says_so(llm, monkeypatch):
    errors = []

    def forward(rows):
        with pytest.raises(UsageError, match="from within its own step") as caught:
            llm.generate(PROMPTS[0], GREEDY)
        errors.append(caught.value)
        return real(rows)

    real = llm._frontend.engine.runner.forward
    with monkeypatch.context() as patch:
        patch.setattr(llm._frontend.engine.runner, "forward", forward)
        llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=2))
    assert errors


FORKED = '''
import asyncio, os, signal, sys, torch
from forethought import LLM, AsyncLLM, SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=3)

def in_child(use, end=os._exit):
    """Most children end at once: to take torch down takes each a second."""
    if not (child := os.fork()):
        signal.alarm(60)
        try:
            print(use(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        end(0)
    assert os.waitpid(child, 0)[1] == 0

torch.set_num_threads(1)
llm = LLM({model!r}, dtype="float32")
ask = lambda: llm.generate("Hello", params).outputs[0].token_ids
print(ask(), flush=True)
in_child(ask, sys.exit)
torch.set_num_threads(2)
in_child(ask)
clients = AsyncLLM.over(llm)
in_child(lambda: asyncio.run(clients.generate("Hello", params)))
in_child(lambda: clients.start("Hello"))
print(asyncio.run(clients.generate("Hello", params)).outputs[0].token_ids)
'''


def test_in_a_forked_process_an_llm_works_or_says_that_it_cannot():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED.format(model=str(MODEL))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    parent, alone, threads, *clients, after = done.stdout.splitlines()
    assert parent == alone == after
    assert threads.startswith("EngineStopped this LLM does not run in a forked process: the 2")
    assert len(clients) == 2
    for told in clients:
        assert told.startswith("EngineStopped this AsyncLLM does not run in a forked process")
    assert done.returncode == 0, done.stderr


FORKED_IN_USE = (
    FORKED.split("print(ask()")[0]
    + """
import threading, time
from forethought.llm.grammar import MAX_COMPILERS, GrammarCompiler
ask()

def elsewhere(work):
    inside = threading.Semaphore(0)
    threading.Thread(target=work, args=(inside,), daemon=True).start()
    inside.acquire()

def use(inside, leave=threading.Event()):
    with llm._lock:
        inside.release()
        leave.wait()

compile_ = GrammarCompiler._compile
def stand_still(self, shape, *rest):
    if shape.regex.startswith("still"):
        standing.release()
        threading.Event().wait()
    return compile_(self, shape, *rest)

GrammarCompiler._compile, standing = stand_still, threading.Semaphore(0)
guided = lambda regex: params.replace(guided_decoding=dict(regex=regex))
for number in range(MAX_COMPILERS + 1):
    still = guided(f"still{{number}}")
    threading.Thread(target=lambda: llm.generate("Hello", still), daemon=True).start()
    number == MAX_COMPILERS or standing.acquire()
while not llm._frontend.grammars._queue:
    time.sleep(0.001)
in_child(lambda: llm.generate("Hello", guided("[ab]")).outputs[0].text in "ab", sys.exit)
llm._lock._locked = True  # as while one thread leaves and the next one has not come in yet
in_child(ask)
llm._lock._locked = False
llm._lock._lock.acquire()
in_child(ask)
llm._lock._lock.release()
elsewhere(use)
in_child(lambda: in_child(ask))
os._exit(0)
"""
)


@pytest.mark.slow
def test_in_a_forked_process_an_llm_that_another_thread_was_using_says_so():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_IN_USE.format(model=str(MODEL))],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    compiled, *told = done.stdout.splitlines()
    assert compiled == "True", done.stderr
    says = "EngineStopped this LLM does not run in a forked process: another thread was using it"
    assert [line.startswith(says) for line in told[:3]] == [True] * 3, done.stderr
    assert done.returncode == 0, done.stderr


class Failing:
    """A Hugging Face tokenizer that fails on one text and one token."""

    def __init__(self, hf, text="", token=-1):
        self._hf, self._text, self._token = hf, text, token

    def __getattr__(self, name):
        return getattr(self._hf, name)

    def __call__(self, text, **kwargs):
        if text == self._text:
            raise RuntimeError("cannot encode this")
        return self._hf(text, **kwargs)

    @property
    def backend_tokenizer(self):
        return self

    def decode(self, ids, **kwargs):
        if self._token in ids:
            raise RuntimeError("cannot decode this")
        return self._hf.backend_tokenizer.decode(ids, **kwargs)


def test_a_tokenizer_that_fails_fails_that_request_with_an_error_of_ours(llm, monkeypatch):
    poison = llm.generate(PROMPTS[1], GREEDY).outputs[0].token_ids[3]
    good = llm.generate(PROMPTS[0], GREEDY)
    assert poison not in [*good.prompt_token_ids, *good.outputs[0].token_ids]
    failing = Failing(llm.tokenizer, PROMPTS[2], poison)
    monkeypatch.setattr(llm._frontend.tokenizer, "hf", failing)
    other = llm.stream(PROMPTS[0], GREEDY)
    next(other)
    with pytest.raises(RequestError, match="failed to encode a text: RuntimeError") as caught:
        llm.generate(PROMPTS[2], GREEDY)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with llm.start("a") as session:
        for call in (
            lambda: llm.generate(PROMPTS[1], GREEDY),
            lambda: list(llm.stream(PROMPTS[1], GREEDY)),
            lambda: llm.generate([*good.prompt_token_ids, poison], GREEDY),
            lambda: session.extend(PROMPTS[2]),
        ):
            with pytest.raises(RequestError, match=r"cannot .*code this"):
                call()
    *_, last = other
    assert last.outputs[0].token_ids == good.outputs[0].token_ids


# --- sessions ------------------------------------------------------------------------------------


def test_a_session_goes_on_where_it_stopped(llm):
    whole = llm.generate(PROMPTS[0], GREEDY).outputs[0]
    with llm.start(PROMPTS[0]) as session:
        prompt_length = session.prompt_length
        first = session.generate(GREEDY.replace(max_tokens=5))
        second = session.generate(GREEDY.replace(max_tokens=7))
        assert first.token_ids + second.token_ids == whole.token_ids
        assert session.tokens[prompt_length:] == whole.token_ids
        assert session.prompt_length == prompt_length + 5
        assert session.usage.decoded == 12
        # Nothing was computed twice but for the last token of each part.
        assert session.usage.prefilled + session.usage.cached <= prompt_length + 1


def test_an_extended_session_is_like_a_prompt_of_all_its_tokens(llm):
    with llm.start(PROMPTS[0]) as session:
        session.generate(GREEDY)
        session.extend(" and")
        session.extend([5, 6])
        tokens = session.tokens
        assert session.text.endswith(" and" + llm.tokenizer.decode([5, 6]))
        answer = session.generate(GREEDY)
    assert answer.token_ids == llm.generate(tokens, GREEDY).outputs[0].token_ids


def test_a_fork_costs_its_own_tokens_only_and_leaves_its_parent_alone(llm):
    with llm.start("A rather long prompt to start with, and how!") as session:
        session.generate(GREEDY)
        tokens, prefilled = session.tokens, llm.stats.prefilled
        with session.fork(len(tokens) - 3) as probe:
            probe.extend([7])
            answer = probe.generate(GREEDY)
        assert llm.stats.prefilled - prefilled == 1
        assert session.tokens == tokens
        expected = llm.generate([*tokens[:-3], 7], GREEDY).outputs[0]
        assert answer.token_ids == expected.token_ids


def test_a_stream_can_be_forked_while_it_runs(llm):
    expected = llm.generate(PROMPTS[0], GREEDY).outputs[0]
    with llm.start(PROMPTS[0]) as session:
        probes = []
        for output in session.stream(GREEDY):
            if len(output.token_ids) in (3, 6):
                with session.fork() as probe:
                    probes.append(probe.generate(GREEDY.replace(max_tokens=2)).token_ids)
        assert output.token_ids == expected.token_ids
        assert probes == [expected.token_ids[3:5], expected.token_ids[6:8]]


def test_a_rewound_session_draws_the_same_tokens_again(llm):
    with llm.start(PROMPTS[0]) as session:
        length = session.prompt_length
        first = session.generate(SAMPLED)
        session.rewind(length)
        assert session.tokens == llm.tokenizer(PROMPTS[0]).input_ids
        assert session.generate(SAMPLED).token_ids == first.token_ids


def test_a_stop_string_leaves_the_session_at_the_token_that_completed_it(llm):
    text = llm.generate(PROMPTS[0], GREEDY).outputs[0].text
    with llm.start(PROMPTS[0]) as session:
        length = session.prompt_length
        completion = session.generate(GREEDY.replace(stop=[text[3:5]]))
        assert completion.stop_reason == text[3:5]
        assert session.tokens[length:] == completion.token_ids
        rest = session.generate(GREEDY.replace(max_tokens=12 - len(completion.token_ids)))
        assert session.tokens[length:] == completion.token_ids + rest.token_ids


def test_tokens_drawn_behind_a_stop_string_in_the_same_step_are_taken_back(llm, monkeypatch):
    """As when a step accepts several drafted tokens."""
    engine, step = llm._frontend.engine, llm._frontend.engine.step

    def several(max_steps: float) -> list[Event]:
        merged: dict[Sequence, Event] = {}
        for event in itertools.chain(*[step() for _ in range(4)]):
            tokens = merged[event.sequence].tokens if event.sequence in merged else []
            merged[event.sequence] = dataclasses.replace(event, tokens=tokens + event.tokens)
        return list(merged.values())

    plain = llm.generate(PROMPTS[0], GREEDY).outputs[0]
    stop = plain.text[3:5]
    monkeypatch.setattr(engine, "step", several)
    assert llm.generate(PROMPTS[0], GREEDY).outputs[0] == plain
    with llm.start(PROMPTS[0]) as session:
        length = session.prompt_length
        completion = session.generate(GREEDY.replace(stop=[stop]))
        assert completion.text == plain.text[: plain.text.index(stop)]
        assert len(completion.token_ids) % 4 != 0
        assert session.tokens[length:] == completion.token_ids
        assert session.usage.discarded > 0
        rest = session.generate(GREEDY.replace(max_tokens=12 - len(completion.token_ids)))
        assert completion.token_ids + rest.token_ids == plain.token_ids


@pytest.fixture
def sizes(llm, monkeypatch):
    """Tokens of each event of the engine."""
    engine, found = llm._frontend.engine, []
    step = engine.step

    def stepped(max_steps: float) -> list[Event]:
        events = step(max_steps)
        found.extend(len(event.tokens) for event in events)
        return events

    monkeypatch.setattr(engine, "step", stepped)
    return found


def test_a_call_gets_its_tokens_together_and_a_stream_one_by_one(llm, sizes):
    output = llm.generate(PROMPTS[0], GREEDY).outputs[0]
    assert sizes == [1, 11]
    sizes.clear()
    steps = [step.outputs[0] for step in llm.stream(PROMPTS[0], GREEDY)]
    assert sizes == [1] * 12
    assert [len(step.token_ids) for step in steps] == list(range(1, 13))
    assert steps[-1] == output
    sizes.clear()
    with llm.start(PROMPTS[0]) as session:
        *_, last = session.stream(GREEDY.replace(max_tokens=4))
        assert sizes == [1] * 4
        rest = session.generate(GREEDY.replace(max_tokens=8))
        assert last.token_ids + rest.token_ids == output.token_ids
        assert len(sizes) < 4 + 8


def test_a_stop_string_ends_a_call_where_single_steps_do(llm, sizes):
    plain = llm.generate(PROMPTS[0], GREEDY).outputs[0]
    sizes.clear()
    with llm.start(PROMPTS[0]) as session:
        completion = session.generate(GREEDY.replace(stop=[plain.text[3:5]]))
        assert sum(sizes) == len(completion.token_ids)
        assert session.tokens[session.prompt_length :] == completion.token_ids
        assert session.usage.discarded == 0
        assert session.usage.decoded == len(completion.token_ids)


@pytest.mark.parametrize("number", [0, -1, 1.5, "many"])
def test_a_number_of_decode_steps_that_cannot_be_is_refused(number):
    with pytest.raises(ParameterError, match="num_continuous_decode_steps"):
        build(num_continuous_decode_steps=number)


def test_a_number_of_decode_steps_holds_for_streams_and_clients_as_well():
    with build(num_continuous_decode_steps=3) as llm:
        sizes = [len(step.outputs[0].token_ids) for step in llm.stream(PROMPTS[0], GREEDY)]
    assert sizes == [1, 4, 7, 10, 12]


def test_a_session_in_the_middle_of_a_stream_cannot_be_changed(llm):
    with llm.start(PROMPTS[0]) as session:
        stream = session.stream(GREEDY)
        next(stream)
        for change in (
            session.generate,
            lambda: session.rewind(2),
            lambda: session.extend("x"),
        ):
            with pytest.raises(UsageError, match="it is running"):
                change()
        stream.close()
        session.rewind(2)


def test_what_a_live_sequence_cannot_do_is_refused(llm):
    with llm.start(PROMPTS[0]) as session:
        for params in (GREEDY.replace(n=2), GREEDY.replace(prompt_logprobs=1)):
            with pytest.raises(ParameterError):
                session.generate(params)
        with pytest.raises(UsageError, match="cannot rewind"):
            session.rewind(99)
        with pytest.raises(UsageError, match=r"cannot fork.*length 99 is not between 1 and its"):
            session.fork(99)
        with pytest.raises(ContextLengthError):
            session.extend([5] * 300)


def test_a_stream_that_cannot_be_is_refused_when_it_is_asked_for(llm):
    with llm.start(PROMPTS[0]) as session:
        with pytest.raises(ParameterError, match="invalid n"):
            session.stream(GREEDY.replace(n=2))
        with pytest.raises(ParameterError, match="invalid sampling_params"):
            session.stream({"max_tokens": 3})
        session.stream(GREEDY)  # not iterated, so nothing runs
        assert len(session.generate(GREEDY).token_ids) == GREEDY.max_tokens
    with pytest.raises(UsageError, match="closed"):
        session.stream(GREEDY)


@pytest.mark.parametrize("length", [2.5, "2", True, [2]])
def test_a_length_that_is_no_whole_number_is_refused(llm, length):
    with llm.start(PROMPTS[0]) as session:
        for change in (session.fork, session.rewind):
            with pytest.raises(ParameterError, match="invalid length"):
                change(length)


def test_a_closed_session_says_so(llm):
    session = llm.start(PROMPTS[0])
    session.close()
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.generate()


def test_a_forgotten_session_gives_its_pages_back(llm):
    session = llm.start(PROMPTS[0])
    session.generate(GREEDY)
    assert llm._frontend.engine.pool.in_use > 0
    del session
    llm.generate(PROMPTS[1], GREEDY)
    expect_empty(llm._frontend.engine)


def test_a_session_and_a_call_run_in_the_same_batches(llm):
    with llm.start(PROMPTS[0]) as session:
        stream = session.stream(GREEDY)
        next(stream)
        steps = llm.stats.steps
        llm.generate(PROMPTS[1], GREEDY)
        assert llm.stats.steps - steps == 12
        assert len(list(stream)[-1].token_ids) == 12
        assert llm.stats.steps - steps == 12


def test_tokens_behind_a_stop_string_in_an_accepted_draft_are_discarded() -> None:
    plain, prompt, params = build(), PROMPTS[0], GREEDY.replace(max_tokens=40)
    said = plain.generate(prompt, params).outputs[0]
    stop = said.text[4:6]

    class Oracle(Drafter):
        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> None:
            for request in scheduled_requests.generation_requests:
                done = len(request.tokens) - request.prompt_length
                request.py_draft_tokens = said.token_ids[done : done + request.max_draft_len]

    config = UserProvidedDecodingConfig(max_draft_len=8, drafter=Oracle())
    llm = build(speculative_config=config)
    params = params.replace(stop=stop)
    expected, found = plain.generate(prompt, params), llm.generate(prompt, params)
    assert found.outputs[0].text == expected.outputs[0].text
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].stop_reason == stop
    assert found.usage.decoded - found.usage.discarded == len(found.outputs[0].token_ids)
    with llm.start(prompt) as session, plain.start(prompt) as other:
        session.generate(params)
        other.generate(params)
        assert session.tokens == other.tokens
    llm.shutdown()
    plain.shutdown()


def test_an_llm_takes_the_model_alone_without_a_name() -> None:
    with pytest.raises(ParameterError, match=r"got 'tokenizer' after it.*LLM\(model, dtype="):
        LLM("model", "tokenizer")  # type: ignore[call-arg]


def test_sampling_params_are_given_by_the_name_that_other_engines_have_for_them() -> None:
    with build() as llm:
        prompt, expected = PROMPTS[0], llm.generate(PROMPTS[0], GREEDY).outputs[0].token_ids
        assert llm.generate(prompt, sampling_params=GREEDY).outputs[0].token_ids == expected
        *_, last = llm.stream(prompt, sampling_params=GREEDY)
        assert last.outputs[0].token_ids == expected
        with llm.start(prompt) as session:
            assert session.generate(sampling_params=GREEDY).token_ids == expected
