"""The engine in one file generates what the real one does, and what transformers does."""

from __future__ import annotations

import random
from collections.abc import Sequence as List

import pytest
import torch

from engines import GREEDY, drain, engine, engine_over, outputs
from forethought.assets import reasoner_dir
from forethought.config.sampling import SamplingParams
from forethought.model import loader
from forethought.reference.engine import CausalLM, Draft, Engine, Sequence
from forethought.speculative.drafter import DraftKind
from models import greedy, prompts, tiny

PROMPTS = prompts((3, 17, 9, 1))
SAMPLED = GREEDY.replace(temperature=0.9, seed=5)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED.replace(n=3),
    "cut": SAMPLED.replace(top_k=20, top_p=0.8, min_p=0.02),
    "penalties": SAMPLED.replace(repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=5),
    "stop tokens": SAMPLED.replace(stop_token_ids=list(range(40)), max_tokens=40),
}


def reference(drafter: object = None, pages: int = 256) -> Engine:
    return Engine(CausalLM(tiny("llama")), pages, 4, drafter)  # type: ignore[arg-type]


def run(made: Engine) -> None:
    while made.has_work:
        made.step()
        held = [page for sequence in made.sequences for page in sequence.table.pages]
        assert made.pool.refs == [held.count(page) for page in range(len(made.pool.refs))]


def generated(made: Engine, params: SamplingParams) -> list[list[int]]:
    sequences = [sample for prompt in PROMPTS for sample in made.add(prompt, params)]
    run(made)
    found = [sequence.output for sequence in sequences]
    for sequence in sequences:
        made.close(sequence)
    assert made.pool.refs == [0] * len(made.pool.refs)
    return found


@pytest.mark.parametrize("name", PARAMS)
def test_it_generates_what_the_engine_does(name: str) -> None:
    machine = engine()
    sequences = [sample for prompt in PROMPTS for sample in machine.add(prompt, PARAMS[name])]
    drain(machine)
    assert generated(reference(), PARAMS[name]) == outputs(sequences)


def random_tree(sequence: Sequence) -> Draft:
    """Nodes of random tokens, siblings distinct, some of which are right at times."""
    source = random.Random(len(sequence.tokens) * 31 + sequence.index)
    parents = [source.randrange(-1, node) if node else -1 for node in range(6)]
    tokens = source.sample(range(100), 6)
    return Draft(tokens, parents)


def truthful_chain(sequence: Sequence) -> Draft:
    """Three tokens of greedy decoding, then a wrong one."""
    expected = greedy(tiny("llama"), [sequence.tokens[: sequence.prompt_length]], 16)[0]
    tokens = expected[len(sequence.output) :][:3]
    return Draft([*tokens, 7], range(-1, len(tokens)))


@pytest.mark.parametrize("drafter", [random_tree, truthful_chain])
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties"])
def test_points_change_no_token(name: str, drafter: object) -> None:
    assert generated(reference(drafter), PARAMS[name]) == generated(reference(), PARAMS[name])


def test_what_is_accepted_takes_fewer_steps() -> None:
    steps = 0
    made = reference(truthful_chain)
    made.add(PROMPTS[0], GREEDY)
    while made.has_work:
        made.step()
        steps += 1
    assert steps <= 6


def test_drafts_that_were_sampled_are_accepted_by_rejection() -> None:
    """From the target's own distribution all of them are."""
    lm = CausalLM(tiny("llama"))
    proposed: list[int] = []

    def own(sequence: Sequence) -> Draft:
        uniform = [[1 / 101] * 101]
        proposed.append(len(sequence.output))
        return Draft([len(proposed) % 101], [-1], DraftKind.IID, uniform)

    made = Engine(lm, 256, 4, own)
    outputs_with_drafts = generated(made, SAMPLED)
    assert all(len(output) == 16 for output in outputs_with_drafts)
    assert len(proposed) < 16 * len(PROMPTS) + 1


def forked(made: Engine) -> list[list[int]]:
    """A fork in mid-generation, extended; the parent goes on; rewound and resumed."""
    (main,) = made.add(PROMPTS[1], GREEDY)
    for _ in range(6):
        made.step()
    probe = made.fork(main)
    made.extend(probe, [5, 6])
    made.resume(probe, GREEDY)
    run(made)
    made.rewind(main, len(main.tokens) - 7)
    made.resume(main, GREEDY.replace(max_tokens=7))
    run(made)
    return [probe.tokens, main.tokens]


@pytest.mark.parametrize("drafter", [None, random_tree])
def test_forks_and_rewinds_share_pages_and_disturb_nothing(drafter: object) -> None:
    probe, main = forked(reference(drafter))
    whole = PROMPTS[1] + greedy(tiny("llama"), [PROMPTS[1]], 16)[0]
    assert main == whole
    start = [*whole[: len(PROMPTS[1]) + 6], 5, 6]
    assert probe == start + greedy(tiny("llama"), [start], 16)[0]


def test_it_runs_the_embedded_reasoner() -> None:
    lm, params = CausalLM(reasoner_dir()), SamplingParams(temperature=0.0, max_tokens=24)
    prompt: List[int] = [5, 80, 33, 17, 200]
    made = Engine(lm, 8, 16)
    (sequence,) = made.add(prompt, params)
    run(made)
    machine = engine_over(loader.load(reasoner_dir(), dtype="float32"), page_size=16)
    (expected,) = machine.add(prompt, params)
    drain(machine)
    assert sequence.output == list(expected.output)
    assert torch.isfinite(made.storage.keys[0]).all()
