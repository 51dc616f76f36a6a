"""The corpus of a draft model: the target's own text and laws, in shards, never a test problem."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forethought import LLM, SamplingParams  # noqa: E402
from forethought.assets import problems, reasoner_dir  # noqa: E402
from forethought.training.drafter import corpus, prompts  # noqa: E402
from forethought.training.reasoner.traces import PROBE_SUFFIX  # noqa: E402
from forethought.training.reasoner.vocabulary import prompt_text  # noqa: E402


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def sample(llm):
    prompt = corpus.encode(llm, prompt_text(problems()[0]["question"]))
    params = SamplingParams(max_tokens=40, temperature=0.0)
    return corpus.answers(llm, [prompt], [params])[0]


def make_samples(lengths):
    return [
        corpus.Sample(
            torch.full((length,), index, dtype=torch.int32),
            torch.zeros(length, corpus.TOP, dtype=torch.int32),
            torch.ones(length, corpus.TOP, dtype=torch.float16),
        )
        for index, length in enumerate(lengths)
    ]


def test_no_prompt_is_a_shipped_test_problem_or_shares_its_calculations(monkeypatch):
    """The wall is the generator's; here every problem must come from its training side."""
    asked = []
    draw = prompts.sample_problem

    def listening(rng, *, held_out):
        asked.append(held_out)
        return draw(rng, held_out=held_out)

    monkeypatch.setattr(prompts, "sample_problem", listening)
    texts = set(prompts.problem_prompts(random.Random(0), 2000))
    assert asked == [False] * 2000
    assert not texts & {prompt_text(problem["question"]) for problem in problems()}


def test_a_law_is_the_targets_and_greedy_text_follows_its_first_choice(llm, sample):
    taught = sample.probs[:, 0] > 0
    first = int(taught.nonzero()[0])
    assert taught[first:-1].all()
    assert not taught[:first].any()
    assert torch.equal(sample.choices[first:-1, 0], sample.tokens[first + 1 :])
    assert (sample.probs[first:-1].sum(1) <= 1.01).all()
    assert (sample.probs[first:-1].sum(1) > 0.9).all()


def test_a_probe_keeps_the_laws_before_the_cut_and_teaches_the_answer_but_not_the_suffix(
    llm, sample, monkeypatch
):
    monkeypatch.setattr(corpus, "probe_suffix", lambda text, rng: PROBE_SUFFIX)
    probe = corpus.probes(llm, [sample], random.Random(4))[0]
    text = llm.tokenizer.decode(probe.tokens.tolist(), skip_special_tokens=False)
    before, answer = text.split(PROBE_SUFFIX)
    cut = len(corpus.encode(llm, before))
    suffix = len(corpus.encode(llm, PROBE_SUFFIX))
    assert torch.equal(probe.probs[:cut], sample.probs[:cut])
    taught = probe.probs[:, 0] > 0
    assert not taught[cut : cut + suffix - 1].any()
    assert taught[cut + suffix - 1 : -1].all()
    assert "}" in answer


def test_shards_that_lie_there_are_read_and_the_others_are_the_same_as_ever(
    llm, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpus, "LONGEST_OUTPUT", 8)

    def written(directory, shards):
        return corpus.write_corpus(reasoner_dir(), directory, seed=0, shards=shards, problems=4)

    straight = written(tmp_path / "straight", 2)
    first = written(tmp_path / "resumed", 1)
    resumed = written(tmp_path / "resumed", 2)
    assert len(straight) == len(resumed) == 2 * len(first) == 10
    for left, right in zip(straight, resumed, strict=True):
        assert torch.equal(left.tokens, right.tokens)
        assert torch.equal(left.probs, right.probs)


def test_an_epoch_shows_every_sample_once_where_batches_come_out_even():
    batches = corpus.Batches(make_samples([100] * 8 + [200] * 4), tokens=256, seed=0)
    assert batches.per_epoch == 4 + 4
    for epoch in range(2):
        seen = []
        for step in range(epoch * 8, epoch * 8 + 8):
            batch = batches(step)
            assert batch.tokens.numel() == 256
            seen += batch.tokens[:, 0].tolist()
        assert sorted(seen) == list(range(12))


def test_a_batch_depends_on_seed_and_step_alone():
    samples = make_samples([100] * 16)
    straight = corpus.Batches(samples, 256, seed=0)
    shown = [straight(step).tokens for step in range(20)]
    assert torch.equal(corpus.Batches(samples, 256, seed=0)(13).tokens, shown[13])
    other = corpus.Batches(samples, 256, seed=1)
    assert not all(torch.equal(other(step).tokens, shown[step]) for step in range(20))


def test_filling_has_no_law():
    batch = corpus.pad(make_samples([3, 5]), 8)
    assert batch.probs[0, 3:].sum() == 0
    assert batch.probs[1, :5].sum() == 5 * corpus.TOP
