"""Dynasor-CoT on the engine: the main chain is untouched, and probes cost what they must."""

import pytest

from forethought import LLM, SamplingParams
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.methods.dynasor import ANSWER_END, PROBE_SUFFIX
from forethought.scaffolding import EngineWorker, NativeGenerationController, ScaffoldingLlm
from forethought.scaffolding.equivalence import TextEquivalence
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
    assert spent.prefilled - before.prefilled <= prompts + probes * suffix
    assert spent.decoded - before.decoded <= 70 * len(PROMPTS) + probes * PROBE_LENGTH
    for result in results:
        usage = result.usage
        assert usage.decoded <= 70 + 6 * PROBE_LENGTH
        assert usage.completion_tokens == usage.decoded
    assert sum(r.usage.prefilled for r in results) == spent.prefilled - before.prefilled
    assert sum(r.usage.decoded for r in results) == spent.decoded - before.decoded


def test_an_early_exit_keeps_exactly_the_tokens_up_to_the_last_probe(worker, plain, monkeypatch):
    # A random model closes no brace: take every probe's words for an answer.
    monkeypatch.setattr("forethought.methods.probes.Probe.hear", hear_anything)
    controller = dynasor(certainty_threshold=2, equivalence=Always(), uncertain_words=[])
    before = worker.llm.stats
    results = solve(controller, worker)
    decoded = worker.llm.stats.decoded - before.decoded
    for result, (text, tokens) in zip(results, plain, strict=True):
        told = result.output.meta["dynasor"]
        kept = told["kept_tokens"]
        assert told["early_exit"]
        assert 20 <= kept < 50
        assert result.output.token_ids == tokens[:kept]
        head = result.output.text.partition("\n\n...</think>")[0]
        assert text.startswith(head)
        assert result.output.text.endswith(told["answers"][-1] + ANSWER_END)
    assert decoded < 3 * (70 + 6 * PROBE_LENGTH)
    assert sum(r.usage.decoded for r in results) == decoded


def hear_anything(self):
    self.answer = self.task.output_str.strip() or "x"


def test_with_a_tokenizer_the_written_answer_has_tokens_too(worker, monkeypatch):
    monkeypatch.setattr("forethought.methods.probes.Probe.hear", hear_anything)
    controller = dynasor(
        generation_dir=speaking(), certainty_threshold=1, equivalence=Always(), uncertain_words=[]
    )
    output = solve(controller, worker, PROMPTS[0]).output
    kept = output.meta["dynasor"]["kept_tokens"]
    written = output.text[output.text.index("\n\n...</think>") :]
    assert worker.tokenizer.decode(output.token_ids[kept:]) == written


def test_probes_do_not_wait_for_places_that_main_chains_have_taken(plain, monkeypatch):
    monkeypatch.setattr("forethought.methods.probes.Probe.hear", hear_anything)
    controller = dynasor(certainty_threshold=1, equivalence=Always(), uncertain_words=[])
    with EngineWorker(LLM(speaking(), max_batch_size=3, **FIELDS)) as worker:
        results = solve(controller, worker, PROMPTS * 3)
    for result in results:
        assert result.output.meta["dynasor"]["early_exit"]
        assert result.usage.decoded < 10 + PROBE_LENGTH + 30


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


def test_dynasor_under_a_vote_shares_the_prompt(worker):
    controller = MajorityVoteController(dynasor(), 3, early_stop=False)
    before = worker.llm.stats
    result = solve(controller, worker, PROMPTS[1], max_tokens=30, ignore_eos=True)
    spent = worker.llm.stats
    prompt, suffix = count(worker, PROMPTS[1]), count(worker, PROBE_SUFFIX)
    assert spent.prefilled - before.prefilled <= prompt + 2 + 3 * 2 * suffix
    assert result.usage.decoded == spent.decoded - before.decoded
    assert len(result.output.token_ids) == 30
