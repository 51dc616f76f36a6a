"""The same code on a CUDA device: equal to transformers there, and to itself in any company."""

from __future__ import annotations

import pytest

from engines import GREEDY, drain, engine, expect_empty, outputs
from models import ARCHITECTURES, greedy, prompts, tiny

pytestmark = pytest.mark.gpu

PROMPTS = prompts((3, 17, 9, 30, 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_on_cuda_equal_those_of_transformers_on_the_cpu(architecture: str) -> None:
    machine = engine(architecture, device="cuda", max_num_tokens=7, page_size=3)
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    drain(machine)
    assert outputs(sequences) == greedy(tiny(architecture), PROMPTS, 16)
    expect_empty(machine)


def test_a_seeded_sample_on_cuda_is_the_same_in_any_company() -> None:
    params = GREEDY.replace(temperature=1.0, seed=11, n=2)
    alone = engine(device="cuda")
    samples = alone.add(PROMPTS[2], params)
    drain(alone)
    busy = engine(device="cuda", page_size=3, max_num_tokens=9, pages=40)
    for prompt in PROMPTS:
        busy.add(prompt, GREEDY.replace(temperature=0.7))
    same = busy.add(PROMPTS[2], params)
    drain(busy)
    assert outputs(same) == outputs(samples)
    expect_empty(busy)


def test_forks_on_cuda_share_pages_and_disturb_nothing() -> None:
    machine = engine(device="cuda", page_size=4)
    (main,) = machine.add(PROMPTS[1], GREEDY, keep=True)
    for _ in range(6):
        machine.step()
    probe = machine.fork(main)
    machine.extend(probe, [5, 6])
    machine.resume(probe, GREEDY)
    drain(machine)
    starts = [sequence.tokens[: sequence.prompt_length] for sequence in (main, probe)]
    assert outputs((main, probe)) == greedy(tiny("llama"), starts, 16)
    for sequence in (main, probe):
        machine.close(sequence)
    expect_empty(machine)
