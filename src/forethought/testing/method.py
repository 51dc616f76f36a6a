"""``check_method``: a test suite for inference-time methods.

::

    from forethought.testing import check_method

    check_method(lambda: MyController(NativeGenerationController()))
    check_method(lambda: methods.create("majority_vote", default_sample_num=4))

The method runs on a scripted worker, on a server over HTTP and on the built-in engine. All three
generate the same samples (``samples.py``), one token per character: the engine runs a tiny model
whose output is constrained to them. So the results have to be the same, whatever the worker and
the order in which samples finish. Then branches fail, hang and are cancelled, and budgets end.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams
from forethought.errors import BudgetExceeded, RequestCancelled, RequestTimeout
from forethought.llm.async_llm import AsyncLLM
from forethought.rewards.confidence import confidence_of
from forethought.scaffolding.base_task import RewardTask, TaskStatus
from forethought.scaffolding.budget import Budget
from forethought.scaffolding.controller import Controller, NativeGenerationController
from forethought.scaffolding.result import ScaffoldingResult
from forethought.scaffolding.sampling import derived_seed
from forethought.scaffolding.scaffolding_llm import ScaffoldingLlm
from forethought.scaffolding.task import ChatTask, GenerationTask, StreamGenerationTask
from forethought.scaffolding.worker import Worker
from forethought.testing.answer_server import answering
from forethought.testing.samples import (
    Respond,
    sample_answer,
    sample_logprobs,
    sample_score,
)
from forethought.transformers_loading import without_progress_bars
from forethought.workers.local import EngineWorker
from forethought.workers.openai import EXTENSIONS, OpenaiWorker
from forethought.workers.scripted import Call, Reply, ScriptedWorker

PROMPT = "Q: which number?\nA: "
PARAMS: Mapping[str, Any] = MappingProxyType({"seed": 7, "max_tokens": 400, "temperature": 0.8})
TIMEOUT = 0.05
"""Seconds of a request that hangs."""
WAIT = 120.0
"""Seconds until a request that should end is given up."""
_SETTLE_SECONDS = 10.0
"""For what is ending when a request is over."""
_FOREVER = 1e6
BACKENDS = ("script", "server", "engine")


def check_method(
    create: Callable[[], Controller],
    *,
    prompt: Any = PROMPT,
    respond: Respond = sample_answer,
    score: Callable[[str, str], float] = sample_score,
    backends: tuple[str, ...] = BACKENDS,
    params: Mapping[str, Any] | None = None,
    counts: tuple[str, ...] = (),
    min_calls: int | None = None,
) -> list[str]:
    """Run the suite; returns the sentences that hold, one per check.

    Candidates are compared where both runs have one: which samples are ended early may depend on
    their order, what is returned may not.

    Args:
        create: makes the method, with settings under which it generates a few samples. Its tags
            for rewards are those named ``reward``; all others generate.
        prompt: what it is asked.
        respond: the samples: a function of prompt and seed. A prompt that ends within a sample
            should be continued with its rest.
        score: what reward tasks are answered with: a function of question and answer.
        backends: those that the method can run on, ``script`` among them.
        params: sampling parameters of the request; by default a seed, ``max_tokens`` of 400 and a
            temperature.
        counts: names in ``meta`` that count work, which differs from worker to worker or with the
            order in which samples end; they are not compared.
        min_calls: of a worker that the method is to make on these samples: with fewer, what
            distinguishes it has not run, and the checks say nothing. None: one for a plain
            generation, and two for all others.

    Raises:
        AssertionError: with the sentence that does not hold.
    """
    with tempfile.TemporaryDirectory(prefix="check-method-") as directory:
        sampling_params = PARAMS if params is None else dict(params)
        settings = {
            "prompt": prompt,
            "params": sampling_params,
            "counts": counts,
            "min_calls": min_calls,
        }
        suite = _Suite(create, respond, score, Path(directory), settings)
        return suite.run(backends)


class _Suite:
    """The checks, each a method named by what it expects."""

    def __init__(
        self,
        create: Callable[[], Controller],
        respond: Respond,
        score: Callable[[str, str], float],
        directory: Path,
        settings: Mapping[str, Any],
    ) -> None:
        self._create, self._respond, self._score = create, respond, score
        self._directory, self._settings = directory, settings
        self._expected: Any = None
        self._num_calls = 0

    def run(self, backends: tuple[str, ...]) -> list[str]:
        checks: list[Callable[[], None]] = [
            self.the_same_samples_give_the_same_result,
            self.the_order_in_which_samples_finish_changes_nothing,
        ]
        checks += [self.a_server_gives_the_same_result] if "server" in backends else []
        checks += [
            self.a_branch_that_fails_ends_the_request_or_is_left_out,
            self.a_branch_that_hangs_is_ended_by_the_timeout,
            self.a_request_can_be_cancelled_at_any_call,
            self.a_budget_of_calls_is_kept,
        ]
        if "engine" in backends:
            checks.append(self.the_engine_gives_the_same_result_and_no_page_is_left)
        held = []
        for check in checks:
            sentence = check.__name__.replace("_", " ")
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"it does not hold that {sentence}: {error}") from error
            held.append(sentence)
        return held

    # ---- what must hold -----------------------------------------------------------------------

    def the_same_samples_give_the_same_result(self) -> None:
        """Twice on a script."""
        worker = self._scripted()
        self._expected = self._decided(worker)
        self._num_calls = len(worker.calls)
        assert self._num_calls, "it has generated nothing"
        least = self._min_calls()
        few = f"{self._num_calls} calls were made, not {least}; give samples that ask for more"
        assert self._num_calls >= least, few
        self._expect(self._decided(self._scripted()))

    def the_order_in_which_samples_finish_changes_nothing(self) -> None:
        """Answers wait for turns of the event loop, so that they finish in other orders."""
        for factor in (7, 5):
            worker = self._scripted()
            worker.turns = partial(_turns, factor)
            self._expect(self._decided(worker))

    def a_server_gives_the_same_result(self) -> None:
        """Over HTTP, and no request stays open."""
        with answering(self._respond) as server:
            worker = self._client(server.url)
            self._expect(self._decided(worker))
            self._wait(lambda: not server.num_open, "requests are still open on the server")

    def a_branch_that_fails_ends_the_request_or_is_left_out(self) -> None:
        """The request fails with the branch's error, or goes on without it; it never hangs."""
        for failing in self._some_calls():
            error = RuntimeError("this branch fails")
            worker = self._scripted(partial(_at, failing, Reply("", error=error)))
            outcome = self._outcome(worker)
            is_named = not isinstance(outcome, Exception) or "this branch fails" in str(outcome)
            assert is_named, f"call {failing} failed, and the request with {outcome!r}"
        worker = self._scripted(lambda number, text: Reply("", error=RuntimeError("all fail")))
        outcome = self._outcome(worker)
        assert isinstance(outcome, Exception), f"all calls failed, and the result is {outcome!r}"

    def a_branch_that_hangs_is_ended_by_the_timeout(self) -> None:
        """The request fails with ``RequestTimeout``, unless it does not need the branch."""
        for hanging in self._some_calls():
            worker = self._scripted(partial(_at, hanging, Reply("x", delay=_FOREVER)))
            outcome = self._outcome(worker, timeout=TIMEOUT)
            is_timeout = isinstance(outcome, RequestTimeout)
            assert is_timeout or not isinstance(outcome, Exception), repr(outcome)

    def a_request_can_be_cancelled_at_any_call(self) -> None:
        """It fails with ``RequestCancelled``, and nothing of it runs on."""
        for number in self._some_calls():
            reached = threading.Event()
            worker = self._scripted(partial(_hang, number, reached))
            outcome = self._outcome(worker, cancel_at=reached)
            is_cancelled = isinstance(outcome, RequestCancelled)
            assert is_cancelled or not isinstance(outcome, Exception), repr(outcome)

    def a_budget_of_calls_is_kept(self) -> None:
        """Beyond it the request fails with ``BudgetExceeded``, or has the best answer so far."""
        for limit in sorted({1, max(1, self._num_calls // 2)}):
            worker = self._scripted()
            outcome = self._outcome(worker, budget=Budget(calls=limit))
            assert len(worker.calls) <= limit, f"{len(worker.calls)} calls of {limit} were made"
            is_spent = isinstance(outcome, BudgetExceeded)
            assert is_spent or not isinstance(outcome, Exception), repr(outcome)

    def the_engine_gives_the_same_result_and_no_page_is_left(self) -> None:
        """With samples forced on a tiny model; also when the request is cancelled."""
        with self._engine() as worker:
            self._expect(self._decided(worker))
            self._expect_empty(worker)
            for number in self._some_calls():
                reached = threading.Event()
                worker.expect(number, reached)
                outcome = self._outcome(worker, cancel_at=reached)
                is_cancelled = isinstance(outcome, RequestCancelled)
                assert is_cancelled or not isinstance(outcome, Exception), repr(outcome)
                self._expect_empty(worker)

    # ---- running ------------------------------------------------------------------------------

    def _outcome(
        self, worker: Worker, *, cancel_at: threading.Event | None = None, **options: Any
    ) -> Any:
        """The error or the decisions of a request; nothing of it is left running."""
        controller = self._create()
        workers = worker
        params = self._settings["params"]
        with ScaffoldingLlm(controller, workers) as llm:
            prompt = self._settings["prompt"]
            result = llm.generate_async(prompt, sampling_params=params, **options)
            if cancel_at is not None:
                result.on_finish(cancel_at.set)
                assert cancel_at.wait(WAIT), "the request hangs"
                result.abort()
            outcome = _result_of(result, self._settings["counts"])
            task_names = asyncio.run_coroutine_threadsafe(_running_tasks(), llm.loop).result(WAIT)
            assert not task_names, f"asyncio tasks are left: {task_names}"
        return outcome

    def _decided(self, worker: Worker) -> Any:
        outcome = self._outcome(worker)
        if isinstance(outcome, Exception):
            raise AssertionError(f"it fails: {outcome!r}") from outcome
        return outcome

    def _expect(self, outcome: Any) -> None:
        assert _agree(outcome, self._expected), f"{outcome} is not {self._expected}"

    def _min_calls(self) -> int:
        setting: int | None = self._settings["min_calls"]
        if setting is not None:
            return setting
        return 1 if isinstance(self._create(), NativeGenerationController) else 2

    def _some_calls(self) -> list[int]:
        """Numbers of the first, a middle and the last call."""
        return sorted({0, self._num_calls // 2, self._num_calls - 1})

    @staticmethod
    def _wait(holds: Callable[[], bool], what: str) -> None:
        turns, pause = 0, threading.Event()
        while not holds():
            turns += 1
            assert turns < WAIT * 100, what
            pause.wait(0.01)

    # ---- workers ------------------------------------------------------------------------------

    def _scripted(self, disturb: Callable[[int, str], str | Reply] | None = None) -> _SampleWorker:
        return _SampleWorker(self._respond, self._score, disturb)

    def _client(self, url: str) -> Worker:
        openai = importlib.import_module("openai")
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0)
        extensions = [name for name in EXTENSIONS if name != "guided_decoding"]
        return self._scoring(OpenaiWorker(client, "samples", extensions=extensions))

    @contextmanager
    def _engine(self) -> Iterator[_ForcedWorker]:
        path = self._directory / "model"
        if not path.exists():
            _save_model(path)
        cache = {"max_tokens": 16384, "page_size": 4, "enable_block_reuse": False}
        llm = AsyncLLM(path, dtype="float32", kv_cache_config=cache)
        worker = _ForcedWorker(llm, self._respond)
        try:
            yield self._scoring(worker)
        finally:
            llm.shutdown()

    def _scoring(self, worker: Any) -> Any:
        async def score(worker: Worker, task: RewardTask) -> TaskStatus:
            task.score = self._score(task.input_str or "", task.output_str or "")
            return TaskStatus.SUCCESS

        worker.register_task_handler(RewardTask, score)
        return worker

    def _expect_empty(self, worker: EngineWorker) -> None:
        frontend = worker.llm._frontend
        self._wait(lambda: not frontend.is_busy, "the engine is still busy")
        engine = frontend.local_engine

        def is_empty() -> bool:
            gc.collect()  # closes sessions of cancelled tasks, which frames of their errors hold
            return not list(engine.scheduler)

        self._wait(is_empty, "sequences are still open")
        engine.check_integrity()
        assert not engine.pool.in_use, f"{engine.pool.in_use} pages are still held"


class _SampleWorker(ScriptedWorker):
    """Answers with the samples of ``respond``, and reward tasks with ``score``.

    ``disturb`` answers in place of a sample, by the number of the call; ``turns`` of the event loop
    pass before a call, by its number, is answered.
    """

    def __init__(
        self,
        respond: Respond,
        score: Callable[[str, str], float],
        disturb: Callable[[int, str], str | Reply] | None,
    ) -> None:
        super().__init__(score=score)
        self._respond, self._disturb = respond, disturb
        self.turns: Callable[[int], int] = lambda number: 0
        self._num_begun = 0

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        await self._wait()
        return await super().generation_handler(task)

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        if not task.under_way:
            await self._wait()
        return await super().stream_handler(task)

    task_handlers = {  # noqa: RUF012
        **ScriptedWorker.task_handlers,
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
    }

    async def _wait(self) -> None:
        number, self._num_begun = self._num_begun, self._num_begun + 1
        for _ in range(self.turns(number)):
            await asyncio.sleep(0)

    def _answer(self, call: Call) -> Reply:
        number = sum(other.task is call.task for other in self.calls) - 1
        text = self._respond(call.prompt, _seed(call.task, number))
        answer = text if self._disturb is None else self._disturb(len(self.calls) - 1, text)
        reply = answer if isinstance(answer, Reply) else Reply(answer)
        wants_logprobs = call.task.num_logprobs is not None or call.task.confidence is not None
        return replace(reply, logprobs=sample_logprobs(reply.text)) if wants_logprobs else reply


class _ForcedWorker(EngineWorker):
    """Has the engine generate the samples, whatever its model would say."""

    def __init__(self, llm: AsyncLLM, respond: Respond) -> None:
        super().__init__(llm)
        self._respond = respond
        self._num_calls, self._awaited, self._reached = 0, -1, threading.Event()

    def expect(self, number: int, reached: threading.Event) -> None:
        """Set ``reached`` at the call of this number from now."""
        self._num_calls, self._awaited, self._reached = 0, number, reached

    def thinking(self, task: GenerationTask) -> None:
        """Left unset: the samples say whether there is a thought."""

    async def generation_handler(self, task: GenerationTask) -> TaskStatus:
        """Generate, with the log-probabilities of the samples in place of the model's."""
        status = await super().generation_handler(task)
        _score(task)
        return status

    async def stream_handler(self, task: StreamGenerationTask) -> TaskStatus:
        status = await super().stream_handler(task)
        _score(task)
        return status

    task_handlers = {  # noqa: RUF012
        **EngineWorker.task_handlers,
        GenerationTask: generation_handler,
        StreamGenerationTask: stream_handler,
    }

    def _params(self, task: GenerationTask, number: int = 0) -> SamplingParams:
        if self._num_calls == self._awaited:
            self._reached.set()
        self._num_calls += 1
        params = super()._params(task, number)
        prompt = task.messages[-1].content if isinstance(task, ChatTask) else task.input_str
        if prompt is None:
            prompt = self._text.decode(task.input_tokens or ())
        text = self._respond(prompt, _seed(task, number))
        return params.replace(guided_decoding=GuidedDecodingParams(choice=(text,)))


def _score(task: GenerationTask) -> None:
    """Give a task the log-probabilities and confidences of its text."""
    scores = sample_logprobs(task.output_str or "")
    if task.logprobs is not None:
        task.logprobs = scores[: len(task.logprobs)]
    if task.confidences is not None and task.confidence is not None:
        confidences = [confidence_of(logprobs, task.confidence) for logprobs in scores]
        task.confidences = [*confidences[: len(task.confidences)]]


def _seed(task: GenerationTask, number: int) -> int:
    """The seed of sample ``number`` of a task."""
    seed = task.seed or 0
    return derived_seed(seed, -number) if number else seed


def _turns(factor: int, number: int) -> int:
    """Turns of the event loop that differ by more than samples do in length."""
    return 20 * ((number + 1) * factor % 8)


def _at(number: int, reply: Reply, call: int, text: str) -> str | Reply:
    return reply if call == number else text


def _hang(number: int, reached: threading.Event, call: int, text: str) -> str | Reply:
    if call != number:
        return text
    reached.set()
    return Reply(text, delay=_FOREVER)


def _result_of(result: ScaffoldingResult, counts: tuple[str, ...]) -> Any:
    """The error of a request, or what it has decided."""
    ended = threading.Event()
    result.on_finish(ended.set)
    assert ended.wait(WAIT), "the request hangs"
    try:
        result.result()
    except Exception as error:
        return error
    return _decisions(result, counts)


def _decisions(result: ScaffoldingResult, counts: tuple[str, ...]) -> Any:
    """What the method has decided: texts, candidates and what it says about them."""
    return [
        (output.text, output.finish_reason, list(output.candidates), _plain(output.meta, counts))
        for output in result.outputs
    ]


def _agree(outcome: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether two runs have decided the same, up to the order of the samples. A candidate is None
    where its sample was ended early.
    """
    if len(outcome) != len(expected):
        return False
    return all(
        (one[:2], one[3]) == (other[:2], other[3])
        and len(one[2]) == len(other[2])
        and all(a == b for a, b in zip(one[2], other[2], strict=True) if None not in (a, b))
        for one, other in zip(outcome, expected, strict=True)
    )


def _plain(meta: Any, counts: tuple[str, ...]) -> Any:
    """Plain values, without those named in ``counts``."""

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in counts}

    text = json.dumps(meta, default=str, sort_keys=True)
    return json.loads(text, object_pairs_hook=kept)


async def _running_tasks() -> list[str]:
    """Names of asyncio tasks that are still there, after those that are ending have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_SETTLE_SECONDS)
    return [str(task.get_coro()) for task in others if not task.done()]


def _save_model(path: Path) -> None:
    """A tiny random model with one token per byte."""
    transformers = importlib.import_module("transformers")
    tokenizers = importlib.import_module("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    )
    with without_progress_bars():
        transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
