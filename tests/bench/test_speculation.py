"""The benchmark of speculation: interleaved runs that share no prefixes and no drafts."""

import pytest

from forethought.bench import speculation
from forethought.bench.speculation import MIN_PROMPTS, BenchRun, SpeculationBench
from forethought.bench.variant import PLAIN, Variant
from forethought.config.drafters import NGramDecodingConfig, SuffixDecodingConfig
from forethought.errors import ParameterError, UnknownNameError
from forethought.llm.llm import LLM
from forethought.outputs import SpeculationMetrics
from tokens import speaking

NGRAM, SUFFIX = Variant("ngram", 3), Variant("suffix", 2)
PROMPTS = [f"Hello {number} " * 3 for number in range(MIN_PROMPTS + 2)]


@pytest.fixture(scope="module")
def llm():
    drafters = [NGramDecodingConfig(), SuffixDecodingConfig()]
    model = speaking("byte_level")
    with LLM(model, dtype="float32", max_batch_size=16, speculative_config=drafters) as llm:
        yield llm


@pytest.fixture
def runs(monkeypatch):
    """Nothing is decoded: what would be is noted."""
    seen = []

    seconds = {None: 2.0, "ngram": 1.0, "suffix": 4.0}
    outputs = {None: [[1], [2]], "ngram": [[1], [2]], "suffix": [[1], [3]]}

    def run(llm, variant, prompts, *, batch, max_tokens, salt):
        seen.append((variant, batch, len(prompts), max_tokens, salt))
        metrics = SpeculationMetrics(4, 8, 2, [2])
        return BenchRun(outputs[variant.drafter], metrics, seconds[variant.drafter], 0.25, 0.5)

    monkeypatch.setattr(speculation, "run_once", run)
    return seen


def test_every_row_of_a_real_run_equals_plain_decoding_in_float32(llm):
    bench = SpeculationBench(llm, PROMPTS, max_tokens=24, rounds=1)
    reported = []
    rows = bench.run([NGRAM, SUFFIX], [1, 10], lambda *run: reported.append(run))
    assert [(row.variant, row.batch) for row in rows] == reported
    assert len(rows) == bench.num_runs([NGRAM, SUFFIX], [1, 10]) == 6
    for row in rows:
        assert row.identical_share == 1.0
        assert row.tokens == 24 * (10 if row.batch == 10 else MIN_PROMPTS)
        assert row.tokens_per_second > 0
        assert 0 < row.verify_share < 1
        assert (row.metrics.drafted == 0) == (row.variant == PLAIN)
        assert row.variant == PLAIN or row.draft_share > 0
        assert len(row.acceptance_by_position) <= row.variant.max_draft_len
    assert [row.ratio for row in rows if row.variant == PLAIN] == [1.0, 1.0]


def test_what_one_run_has_said_is_no_draft_for_the_next(llm):
    bench = SpeculationBench(llm, PROMPTS, max_tokens=24, rounds=3)
    first, again = (bench.run([SUFFIX], [10])[1] for _ in range(2))
    assert first.metrics == again.metrics


def test_a_drafter_that_the_engine_does_not_have_is_refused(llm):
    with pytest.raises(UnknownNameError, match="drafter"):
        SpeculationBench(llm, PROMPTS, max_tokens=4).run([Variant("telepathy", 2)], [1])


def test_every_round_begins_with_another_variant_and_no_two_runs_share_a_salt(runs):
    prompts = PROMPTS[:1] * 20
    SpeculationBench(None, prompts, max_tokens=32, rounds=3).run([NGRAM, SUFFIX], [4, 16])
    for place, (batch, count) in enumerate(((4, MIN_PROMPTS), (16, 16))):
        block = runs[12 * place : 12 * (place + 1)]
        assert [run[1:3] for run in block] == [(batch, count)] * 12
        assert [run[3] for run in block[:3]] == [8] * 3, "warming up"
        assert [run[3] for run in block[3:]] == [32] * 9
        order = [PLAIN, NGRAM, SUFFIX]
        timed = [run[0] for run in block[3:]]
        assert timed == [*order, NGRAM, SUFFIX, PLAIN, SUFFIX, PLAIN, NGRAM]
    salts = [run[4] for run in runs]
    assert len(set(salts)) == len(salts)


def test_ratios_shares_and_equality_come_from_the_runs(runs):
    bench = SpeculationBench(None, PROMPTS, max_tokens=32, rounds=2)
    plain, ngram, suffix = bench.run([NGRAM, SUFFIX], [1])
    assert (plain.ratio, ngram.ratio, suffix.ratio) == (1.0, 2.0, 0.5)
    assert (ngram.draft_share, ngram.verify_share, ngram.rest_share) == (0.25, 0.5, 0.25)
    assert (ngram.identical_share, suffix.identical_share) == (1.0, 0.5)
    assert ngram.metrics == SpeculationMetrics(8, 16, 4, [4])
    assert (ngram.tokens, ngram.tokens_per_second) == (2, 2.0)


@pytest.mark.parametrize("batch", [0, 11])
def test_a_batch_without_enough_prompts_is_refused(runs, batch):
    with pytest.raises(ParameterError, match="there are 10 different prompts"):
        SpeculationBench(None, PROMPTS, max_tokens=4).run([NGRAM], [1, batch])
    assert runs == []


def test_no_rounds_are_refused():
    with pytest.raises(ParameterError, match="invalid rounds"):
        SpeculationBench(None, PROMPTS, max_tokens=4, rounds=0)
