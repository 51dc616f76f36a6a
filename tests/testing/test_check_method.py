"""``check_method`` passes every built-in method, and finds what is wrong with others."""

import asyncio

import pytest

from forethought import methods
from forethought.methods.compute_optimal import Policy
from forethought.scaffolding import (
    AsCompleted,
    Controller,
    NativeGenerationController,
    NativeRewardController,
)
from forethought.testing import check_method
from forethought.testing.samples import sample_answer

REWARD = NativeRewardController
LENGTHS = {"default_sample_num": 4, "width": 2}
TEXTS = ["The mayor of Rome is Ann.", "Ann was born in Bari.", "Paris is in France."]
RETRIEVAL = {"documents": TEXTS, "num_documents": 1}
ALL = {
    "plain": {},
    "dynasor": {"chunk_size": 16, "certainty_threshold": 2},
    "majority_vote": {"default_sample_num": 4},
    "best_of_n": {"default_sample_num": 3, "reward_controller": REWARD()},
    "repeated_sampling": {"default_sample_num": 4, "verifier": "math", "concurrency": 2},
    "budget_forcing": {},
    "first_answer": {},
    "beam_search": {**LENGTHS, "reward_controller": REWARD()},
    "dvts": {**LENGTHS, "reward_controller": REWARD()},
    "particle_filtering": {"default_sample_num": 3, "reward_controller": REWARD()},
    "particle_gibbs": {"default_sample_num": 2, "reward_controller": REWARD()},
    "mcts": {"default_sample_num": 3, "width": 2, "reward_controller": REWARD()},
    "tree_of_thoughts": {"default_sample_num": 2, "num_thoughts": 2},
    "self_refine": {"num_refinements": 2},
    "sequential_revision": {"num_revisions": 2},
    "specreason": {},
    "compute_optimal": {"policy": Policy(2, (0.0,), ("probes", "majority_vote@2"))},
    "archon": {
        "pipeline": {"layers": [[{"type": "generator", "samples": 2}], [{"type": "ranker"}]]}
    },
    "drag": RETRIEVAL,
    "iterdrag": {**RETRIEVAL, "max_iterations": 2},
    "sleep_time": {"context": "Ann has 3 bags of 4 nuts."},
    "deepconf": {"default_sample_num": 4},
    "deepconf_online": {"default_sample_num": 4, "num_warmup": 2, "window": 8},
    "adaptive_compute": {"default_sample_num": 2, "prune_after": None},
    "fork_think": {"default_sample_num": 3, "num_points": 1, "window": 8},
    "genrm": {"reward_controller": "genrm", "default_sample_num": 2},
    "spct": {"reward_controller": "spct", "default_sample_num": 2},
    "judge": {"reward_controller": "judge", "default_sample_num": 2},
    "compare": {"reward_controller": "compare", "default_sample_num": 2},
    "confidence": {"reward_controller": "confidence", "default_sample_num": 2},
    "checker": {
        "reward_controller": {"method": "checker", "checker": lambda question, text: len(text)}
    },
    "hogwild_turns": {"workers": ["Alice", "Bob"], "turn_tokens": 40, "max_turns": 2},
    "parallel_thinking": {},
    "budget_vote": {"total_tokens": 2000, "default_sample_num": 3},
    "no_thinking": {},
}
"""Settings of each."""
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
OPTIONS = {
    "deepconf": {"params": {"seed": 11, "max_tokens": 400, "confidence": 2}},
    "deepconf_online": {"params": {"seed": 11, "max_tokens": 400, "confidence": 2}},
    "budget_vote": {"params": {"seed": 11}},
    "hogwild_turns": {"counts": ("exchanged_tokens",)},  # servers do not tell what is prefilled
    "parallel_thinking": {"counts": ("join_tokens", "longest_path", "thread_tokens")},
}
"""Arguments of ``check_method`` beside the settings."""
WITHOUT_ENGINE = {
    "budget_vote": "the model on which samples are forced has no thoughts to limit",
    "no_thinking": "the same",
}


def criticise(prompt, seed):
    """Critiques of two answers."""
    return "Scores: [6, 4]" if "Scores" in prompt else sample_answer(prompt, seed)


def grade(prompt, seed):
    """A judge's score of an answer."""
    return f"Score: {len(prompt) % 11}" if "Score: N" in prompt else sample_answer(prompt, seed)


def spawn(prompt, seed):
    """A model that spawns two threads."""
    if prompt.endswith("</Parallel>"):
        return " The sum is 117."
    if "<Thread>" in prompt:
        return " 36.</Thread>"
    return "<Parallel><Outlines><Outline>1: a</Outline><Outline>2: b</Outline></Outlines>"


def think(prompt, seed):
    """A thought and an answer."""
    return "It is 3." if "</think>" in prompt else "2 + 1</think>It is 3."


RESPOND = {
    "spct": criticise,
    "judge": grade,
    "parallel_thinking": spawn,
    "no_thinking": think,
}
"""What is generated in place of the samples."""


def settings_of(name):
    if name == "repeated_sampling":
        return {**ALL[name], "verifier": lambda question, text: "boxed{3}" in text}
    return ALL[name]


def check(name, **options):
    method = "best_of_n" if name in methods.REWARDS else name
    options = {"respond": RESPOND.get(name, sample_answer), **OPTIONS.get(name, {}), **options}
    return check_method(lambda: methods.create(method, **settings_of(name)), **options)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in SLOW else ())
        for n in ALL
        if n not in WITHOUT_ENGINE
    ],
)
def test_a_built_in_method_decides_alike_on_a_script_a_server_and_the_engine(name):
    assert len(check(name)) == 8


@pytest.mark.parametrize("name", WITHOUT_ENGINE)
def test_a_method_that_closes_thoughts_decides_alike_on_a_script_and_a_server(name):
    held = check(name, backends=("script", "server"), prompt="Q: which number?\nA: <think>")
    assert len(held) == 7


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
