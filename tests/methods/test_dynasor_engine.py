"""Dynasor-CoT on the engine: the main chain is untouched, and probes cost what they must."""

import operator
import time

import pytest
from openai import AsyncOpenAI

from engines import expect_empty
from forethought import LLM, AsyncLLM, SamplingParams
from forethought.answers.answers import TextEquivalence
from forethought.assets import drafter_dir, problems
from forethought.errors import RequestCancelled
from forethought.methods import (
    DynasorGenerationController,
    MajorityVoteController,
    worker_tags,
)
from forethought.methods.parts.probe import ANSWER_END, ANSWER_SUFFIX, PROBE_SUFFIX
from forethought.scaffolding import (
    AsCompleted,
    Branch,
    ComputeTask,
    Controller,
    EngineWorker,
    GenerationTokenCounter,
    NativeGenerationController,
    OpenaiWorker,
    ScaffoldingLlm,
    extract_answer_from_boxed,
    with_task_collection,
)
from forethought.training.chat_tokenizer import prompt_text
from openai_server import EngineServer, serving
from tokens import speaking

PROMPTS = ["Hello world", "How are you? I am fine.", "ok: 你好"]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "ignore_eos": True, "max_tokens": 70}
FIELDS = {
    "dtype": "float32",
    "kv_cache_config": {"max_tokens": 8192, "page_size": 4, "enable_block_reuse": False},
}
PROBE_LENGTH = 6


class Always:
    """Whatever two probes say, it is the same: so that a random model reaches an agreement."""

    def quick(self, one, other):
        return True

    def __call__(self, one, other):
        return True


@pytest.fixture(scope="module")
def plain():
    """The unprobed chains, as (text, tokens)."""
    llm = LLM(speaking(), **FIELDS)
    outputs = [out.outputs[0] for out in llm.generate(PROMPTS, SamplingParams(**GREEDY))]
    llm.shutdown()
    return [(output.text, output.token_ids) for output in outputs]


@pytest.fixture
def worker():
    with EngineWorker(LLM(speaking(), **FIELDS)) as worker:
        yield worker


def dynasor(**settings):
    settings = {"chunk_size": 10, "probe_length": PROBE_LENGTH, **settings}
    settings.setdefault("equivalence", TextEquivalence())
    return DynasorGenerationController(**settings)


def solve(controller, worker, prompts=PROMPTS, **options):
    tags = dict.fromkeys(["generation_with_dynasor_cot", "generation"], worker)
    with ScaffoldingLlm(controller, tags) as llm:
        return llm.generate(prompts, sampling_params=options or GREEDY)


def count(worker, text):
    return len(worker.tokenizer(text, add_special_tokens=False).input_ids)


def test_the_main_chain_equals_the_unprobed_one_token_for_token(worker, plain):
    results = solve(dynasor(certainty_threshold=100), worker)
    for result, (text, tokens) in zip(results, plain, strict=True):
        assert result.output.token_ids == tokens
        assert result.output.text == text
        assert len(result.output.meta["dynasor"]["answers"]) >= 3


def test_the_work_is_bounded(worker):
    before, suffix = worker.llm.stats, count(worker, PROBE_SUFFIX)
    results = solve(dynasor(certainty_threshold=100), worker)
    spent = worker.llm.stats
    probes = 6 * len(PROMPTS)  # one for each whole chunk of 10 before the end at 70
    prompts = sum(count(worker, prompt) for prompt in PROMPTS)
    assert spent.prefilled - before.prefilled <= prompts + probes * (1 + suffix)
    assert spent.decoded - before.decoded <= 70 * len(PROMPTS) + probes * PROBE_LENGTH
    for result in results:
        usage = result.usage
        assert usage.decoded <= 70 + 6 * PROBE_LENGTH
        assert usage.completion_tokens == usage.decoded
    assert sum(r.usage.prefilled for r in results) == spent.prefilled - before.prefilled
    assert sum(r.usage.decoded for r in results) == spent.decoded - before.decoded


def test_an_early_exit_keeps_exactly_the_tokens_up_to_the_last_probe(worker, plain, monkeypatch):
    # A random model closes no brace: take every probe's words for an answer.
    monkeypatch.setattr("forethought.methods.dynasor.Probe.on_result", accept_anything)
    controller = dynasor(certainty_threshold=2, equivalence=Always(), uncertain_words=[])
    before = worker.llm.stats
    results = solve(controller, worker)
    decoded = worker.llm.stats.decoded - before.decoded
    for result, (text, tokens) in zip(results, plain, strict=True):
        reported = result.output.meta["dynasor"]
        kept = reported["kept_tokens"]
        assert reported["early_exit"]
        assert kept == 20
        assert result.output.token_ids == tokens[:kept]
        head = result.output.text.partition(ANSWER_SUFFIX)[0]
        assert text.startswith(head)
        assert result.output.text.endswith(reported["answers"][-1] + ANSWER_END)
    assert decoded < 3 * (70 + 6 * PROBE_LENGTH)
    assert sum(r.usage.decoded for r in results) == decoded


SOLVING = {"chunk_size": 16, "certainty_threshold": 2}
SLOWLY = {"chunk_size": 48, "certainty_threshold": 4}  # some chains end before


def decisions(settings, fields=None, count=4):
    """What Dynasor makes of the first problems: decision, text and tokens of each."""
    llm = LLM(dtype="float32", **(fields or {}))
    chats = [[{"role": "user", "content": one["question"]}] for one in problems()[:count]]
    prompts = [llm.chat_prompt(chat) for chat in chats]
    controller = DynasorGenerationController(**settings)
    with EngineWorker(llm) as worker:
        results = solve(controller, worker, prompts, temperature=0.0)
    expect_empty(llm._frontend.engine)
    llm.shutdown()
    return [(r.output.meta["dynasor"], r.output.text, r.output.token_ids) for r in results]


@pytest.fixture(scope="module")
def unhurried():
    """Decisions without drafts."""
    return {"often": decisions(SOLVING), "seldom": decisions(SLOWLY)}


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param(
            {"decoding_type": "NGram", "max_draft_len": 8, "is_use_oldest": False},
            id="NGram",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"decoding_type": "Suffix", "max_draft_len": 8, "max_spec_factor": 4.0},
            id="Suffix",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "decoding_type": "Draft_Target",
                "max_draft_len": 5,
                "speculative_model_dir": str(drafter_dir()),
            },
            id="Draft_Target",
        ),
    ],
)
def test_what_is_decided_does_not_depend_on_drafts(drafts, unhurried):
    fields = {"speculative_config": drafts}
    assert decisions(SOLVING, fields) == unhurried["often"]
    assert decisions(SLOWLY, fields) == unhurried["seldom"]


def test_the_problems_show_both_kinds_of_ends(unhurried):
    reported = [meta for meta, _, _ in unhurried["often"] + unhurried["seldom"]]
    assert {meta["early_exit"] for meta in reported} == {True, False}
    assert all(m["kept_tokens"] % 16 == 0 for m in reported if m["early_exit"])


def test_what_is_decided_does_not_depend_on_a_busy_event_loop(unhurried, monkeypatch):
    """The engine is far ahead of what the controller sees."""
    on_probe_result = DynasorGenerationController._on_probe_result

    def slowly(self, *args):
        time.sleep(0.03)
        on_probe_result(self, *args)

    monkeypatch.setattr(DynasorGenerationController, "_on_probe_result", slowly)
    assert decisions(SOLVING) == unhurried["often"]
    assert decisions(SLOWLY) == unhurried["seldom"]


def accept_anything(self):
    self.answer = self.task.output_str.strip() or "x"


def test_with_a_tokenizer_the_written_answer_has_tokens_too(worker, monkeypatch):
    monkeypatch.setattr("forethought.methods.dynasor.Probe.on_result", accept_anything)
    controller = dynasor(
        generation_dir=speaking(), certainty_threshold=1, equivalence=Always(), uncertain_words=[]
    )
    output = solve(controller, worker, PROMPTS[0]).output
    kept = output.meta["dynasor"]["kept_tokens"]
    written = output.text[output.text.index(ANSWER_SUFFIX) :]
    assert worker.tokenizer.decode(output.token_ids[kept:]) == written


def test_probes_do_not_wait_for_places_that_main_chains_have_taken(plain, monkeypatch):
    monkeypatch.setattr("forethought.methods.dynasor.Probe.on_result", accept_anything)
    controller = dynasor(certainty_threshold=1, equivalence=Always(), uncertain_words=[])
    with EngineWorker(LLM(speaking(), max_batch_size=3, **FIELDS)) as worker:
        runner = worker.llm._frontend.engine.runner
        forward = runner.forward

        def slow(rows):  # so that no step is over before a probe has been asked for
            time.sleep(0.02)
            return forward(rows)

        monkeypatch.setattr(runner, "forward", slow)
        results = solve(controller, worker, PROMPTS * 3)
    unprobed = min(len(token_ids) for _, token_ids in plain)
    for result in results:
        assert result.output.meta["dynasor"]["early_exit"]
        assert result.usage.decoded < unprobed


def test_probes_are_seeded_and_the_whole_is_reproducible(worker):
    options = {"seed": 5, "max_tokens": 40, "ignore_eos": True}
    first, second = (solve(dynasor(), worker, PROMPTS[0], **options) for _ in range(2))
    assert first.output.token_ids == second.output.token_ids
    plain = solve(
        NativeGenerationController({"temperature": 0.6, "top_p": 0.95}),
        worker,
        PROMPTS[0],
        **options,
    )
    assert first.output.token_ids == plain.output.token_ids


def test_a_token_counter_and_the_usage_of_a_request_agree(worker, monkeypatch):
    """Chains and probes are cancelled where the engine is ahead of what was seen of them."""
    monkeypatch.setattr("forethought.methods.dynasor.Probe.on_result", accept_anything)
    watched = with_task_collection("n", GenerationTokenCounter)(DynasorGenerationController)
    settings = {"chunk_size": 10, "certainty_threshold": 2, "probe_length": PROBE_LENGTH}
    controller = watched(equivalence=Always(), uncertain_words=[], **settings)
    for result in solve(controller, worker):
        assert result.output.meta["dynasor"]["early_exit"]
        count = result.task_collections["n"].generation_token_count
        assert count == result.usage.completion_tokens == result.usage.decoded


def test_dynasor_under_a_vote_shares_the_prompt(worker):
    controller = MajorityVoteController(dynasor(), 3, early_stop=False)
    before = worker.llm.stats
    result = solve(controller, worker, PROMPTS[1], max_tokens=30, ignore_eos=True)
    spent = worker.llm.stats
    prompt, suffix = count(worker, PROMPTS[1]), count(worker, PROBE_SUFFIX)
    assert spent.prefilled - before.prefilled <= prompt + 2 + 3 * 2 * (1 + suffix)
    assert result.usage.decoded == spent.decoded - before.decoded
    assert len(result.output.token_ids) == 30


def nested(count=2):
    """Votes inside a vote, over Dynasor."""
    inner = MajorityVoteController(dynasor(chunk_size=5), 3, early_stop=False)
    return MajorityVoteController(inner, count, early_stop=False)


@pytest.fixture
def guessing():
    """A worker whose engine drafts; it must leave nothing behind."""
    llm = LLM(speaking(), speculative_config={"decoding_type": "NGram"}, **FIELDS)
    with EngineWorker(llm, max_parked=2) as worker:
        yield worker
        scheduler = llm._frontend.engine.scheduler
        deadline = time.perf_counter() + 60
        while worker.llm._thread.call(lambda: list(scheduler)).result():
            assert time.perf_counter() < deadline, "sequences are left"
            time.sleep(0.01)
    expect_empty(llm._frontend.engine)


def test_samples_of_samples_are_distinct_and_drafts_change_none_of_them(worker, guessing):
    def chains(one):
        said = set()

        class Telling(DynasorGenerationController):
            def process(self, tasks, **kwargs):
                yield from super().process(tasks, **kwargs)
                said.add(tuple(tasks[0].output_tokens))

        inner = MajorityVoteController(Telling(chunk_size=5), 3, early_stop=False)
        controller = MajorityVoteController(inner, 2, early_stop=False)
        output = solve(controller, one, PROMPTS[0], seed=7, max_tokens=20, ignore_eos=True).output
        return said, output.token_ids

    said, chosen = chains(worker)
    assert len(said) == 6
    assert chains(guessing) == (said, chosen)


@pytest.mark.parametrize("steps", [1, 5, 20, 60])
def test_a_controller_that_fails_while_its_branches_run_leaves_no_page(guessing, steps):
    class Fails(Controller):
        def process(self, tasks, **kwargs):
            branches = [Branch(nested(), [tasks[0].copy()]) for _ in range(2)]
            goal = guessing.llm.stats.steps + steps
            running = AsCompleted([*branches, ComputeTask(reached, guessing, goal)])
            yield running  # without a with block
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        solve(Fails(), guessing, PROMPTS[0], max_tokens=200, ignore_eos=True)


def reached(worker, goal):
    deadline = time.perf_counter() + 60
    while worker.llm.stats.steps < goal and time.perf_counter() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("steps", [1, 5, 20, 60])
def test_a_request_that_is_aborted_in_the_middle_leaves_no_page(guessing, steps):
    tags = {"generation_with_dynasor_cot": guessing}
    with ScaffoldingLlm(nested(), tags) as llm:
        options = {"max_tokens": 200, "ignore_eos": True}
        goal = guessing.llm.stats.steps + steps
        results = [llm.generate_async(prompt, sampling_params=options) for prompt in PROMPTS]
        reached(guessing, goal)
        for result in results:
            result.abort()
        for result in results:
            with pytest.raises(RequestCancelled):
                result.result(60)


@pytest.mark.slow
def test_a_server_decodes_little_more_for_it_than_the_engine():
    """Eight chains on four places: probes wait, and chains that ran on meanwhile would be lost."""
    questions = [prompt_text(problem["question"]) for problem in problems()[:8]]
    params = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 400}
    controller = DynasorGenerationController(certainty_threshold=2, chunk_size=32)
    plain = NativeGenerationController()
    answers, decoded = {}, {}

    def ask(name, llm, worker, method):
        tags = dict.fromkeys(worker_tags(method), worker)
        before = llm.stats.decoded
        with ScaffoldingLlm(method, tags) as scaffolding:
            results = scaffolding.generate(questions, sampling_params=params)
        answers[name] = [extract_answer_from_boxed(result.output.text) for result in results]
        decoded[name] = llm.stats.decoded - before

    llm = AsyncLLM(dtype="float32", max_batch_size=4)
    with serving(EngineServer(llm)) as server:
        client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
        remote = OpenaiWorker(client, "reasoner")
        ask("plain", llm, remote, plain)
        ask("server", llm, remote, controller)
    ask("engine", llm, EngineWorker(llm), controller)
    llm.shutdown()
    # Tokens that come in one piece count as one: now and then a probe is made a few tokens later.
    same = sum(map(operator.eq, answers["server"], answers["engine"]))
    assert same >= len(questions) / 2
    assert decoded["server"] < 1.5 * decoded["engine"]  # 1.13 where all probes are made in time
    assert decoded["server"] < 0.8 * decoded["plain"]
