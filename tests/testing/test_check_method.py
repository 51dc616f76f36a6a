"""``check_method`` passes every built-in method, and finds what is wrong with others."""

import asyncio

import pytest

from forethought import methods
from forethought.scaffolding import (
    AsCompleted,
    Controller,
    NativeGenerationController,
)
from forethought.testing import check_method
from forethought.testing.samples import sample_answer
from method_cases import (
    ALL,
    OPTIONS,
    WITHOUT_ENGINE,
    WITHOUT_SERVER,
    create,
    prompt_of,
    respond_of,
)

SLOW = {
    "dvts",
    "mcts",
    "particle_filtering",
    "particle_gibbs",
    "repeated_sampling",
    "self_refine",
    "tree_of_thoughts",
    "compute_optimal",
    "archon",
    "iterdrag",
    "sleep_time",
    "deepconf",
    "genrm",
    "spct",
    "judge",
    "compare",
    "confidence",
    "fork_think",
}
"""Those like one of the others in what they ask of a worker."""


def check(name, **options):
    options = {"respond": respond_of(name), "prompt": prompt_of(name), **options}
    return check_method(lambda: create(name), **OPTIONS.get(name, {}), **options)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in SLOW else ())
        for n in ALL
        if n not in {*WITHOUT_ENGINE, *WITHOUT_SERVER}
    ],
)
def test_a_built_in_method_decides_alike_on_a_script_a_server_and_the_engine(name):
    assert len(check(name)) == 8


@pytest.mark.parametrize("name", WITHOUT_ENGINE)
def test_a_method_that_closes_thoughts_decides_alike_on_a_script_and_a_server(name):
    held = check(name, backends=("script", "server"))
    assert len(held) == 7


@pytest.mark.parametrize("name", WITHOUT_SERVER)
def test_a_method_that_shares_pages_decides_alike_on_a_script_and_the_engine(name):
    assert len(check(name, backends=("script", "engine"))) == 7


def test_no_method_is_forgotten():
    assert set(methods.names()) <= set(ALL)


# ---- what it finds -----------------------------------------------------------------------------


class Sampling(Controller):
    """Four samples; subclasses choose among them."""

    WorkerTag = NativeGenerationController.WorkerTag

    def process(self, tasks, **kwargs):
        samples = tasks[0].samples_of(4)
        for sample in samples:
            sample.worker_tag = self.WorkerTag.GENERATION
        chosen = yield from self.choose(samples)
        tasks[0].result = chosen.result


class FirstToFinish(Sampling):
    def choose(self, samples):
        return (yield AsCompleted(samples))


class Swallowing(Sampling):
    def choose(self, samples):
        try:
            yield samples
        except Exception:
            samples[0].output_str = "it went well"
        return samples[0]


class Leaking(Sampling):
    def choose(self, samples):
        yield samples
        asyncio.get_running_loop().create_task(asyncio.sleep(3600), name="left alone")
        return samples[0]


class Forgetful(Sampling):
    """Its answer depends on what earlier requests have said."""

    clone_shares = ("seen",)

    def __init__(self):
        super().__init__()

    seen: list = []  # noqa: RUF012

    def choose(self, samples):
        yield samples
        self.seen.append(1)
        samples[0].output_str += str(len(self.seen))
        return samples[0]


class Idle(Controller):
    def process(self, tasks, **kwargs):
        yield []
        tasks[0].output_str = "42"


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FirstToFinish, "order in which samples finish"),
        (Swallowing, "a branch that fails"),
        (Leaking, "asyncio tasks are left"),
        (Forgetful, "the same samples give the same result"),
        (Idle, "it has generated nothing"),
    ],
)
def test_what_is_wrong_with_a_method_is_named(method, sentence, monkeypatch):
    monkeypatch.setattr("forethought.testing.method._SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("forethought.scaffolding.scaffolding_llm._SETTLE_SECONDS", 0.05)
    with pytest.raises(AssertionError, match=sentence):
        check_method(method, backends=("script",))


def test_samples_are_continued_with_their_rest():
    whole = sample_answer("Q", 5)
    for length in range(1, len(whole)):
        assert sample_answer("Q" + whole[:length], 9) == whole[length:] or whole[length - 1] == "{"
    assert len({sample_answer("Q", seed) for seed in range(40)}) == 8
    assert sample_answer(f"Q{whole}. So \\boxed{{", 1)[1:] == "}"
