"""PEARL: a failure of one request costs the others no draft, and no page is lost."""

from __future__ import annotations

from typing import Any

import pytest

from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import PearlDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.engine.engine import Engine
from forethought.speculative.drafters import pearl
from models import greedy, prompts, tiny

TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = prompts((4, 9, 5))
SAID = greedy(tiny("llama"), PROMPTS, TOKENS)


def machine(overlap: bool) -> Engine:
    """The draft model is the target: everything that is drafted is accepted."""
    config = PearlDecodingConfig(max_draft_len=4, overlap=overlap, speculative_model=tiny("llama"))
    return engine(speculative=[config], pages=128)


def run(made: Engine) -> list[Any]:
    samples = [made.add(prompt, GREEDY, keep=True)[0] for prompt in PROMPTS]
    assert all(event.error is None for event in drain(made))
    assert outputs(samples) == SAID
    drafter = made.speculation.drafters[0].drafter
    assert drafter._pool.in_use == 0  # type: ignore[attr-defined]
    for sample in samples:
        made.close(sample)
    expect_empty(made)
    made.shutdown()
    return samples


def failing_choice(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    choose = pearl._choose

    def guarded(job: pearl.DraftJob, logits: Any) -> int:
        if when(job):
            raise ValueError("there is no choice")
        return choose(job, logits)

    monkeypatch.setattr(pearl, "_choose", guarded)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("after", [0, 6, 17])
def test_a_request_that_cannot_be_drafted_for_leaves_the_others_their_drafts(
    overlap: bool, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [sample.metrics for sample in run(machine(overlap))]

    def is_second(job: pearl.DraftJob) -> bool:
        done = len(job.tokens) + len(job.drafted) - job.request.prompt_length
        return job.tokens[: job.request.prompt_length] == PROMPTS[1] and done > after

    failing_choice(monkeypatch, is_second)
    made = machine(overlap)
    samples = run(made)
    metrics = [sample.metrics for sample in samples]
    for index in (0, 2):
        assert metrics[index].accepted == whole[index].accepted > 25
        assert metrics[index].steps == whole[index].steps
    assert metrics[1].accepted < whole[1].accepted
    assert metrics[1].accepted <= after
    assert made.stats.draft_failures == 2  # of all together, then of that one alone


@pytest.mark.parametrize("overlap", [True, False])
def test_a_forward_that_fails_for_several_at_once_is_made_for_each_alone(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [sample.metrics for sample in run(machine(overlap))]
    made = machine(overlap)
    model = made.speculation.drafters[0].drafter._model  # type: ignore[attr-defined]
    forward = model.forward

    def narrow(rows: Any, *more: Any) -> Any:
        if len(rows) > 1:
            raise RuntimeError("out of memory")
        return forward(rows, *more)

    monkeypatch.setattr(model, "forward", narrow)
    samples = run(made)
    assert [sample.metrics for sample in samples] == whole
    assert made.stats.draft_failures == 0


def test_an_interrupt_while_drafting_leaves_nothing_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = [sample.metrics.accepted for sample in run(machine(False))]
    made = machine(False)
    samples = [made.add(prompt, GREEDY)[0] for prompt in PROMPTS]
    made.step()  # the prompts, which the draft model is to see next
    compute = made.speculation.drafters[0].drafter._model.compute  # type: ignore[attr-defined]

    def interrupted(pasts: Any) -> Any:
        raise KeyboardInterrupt

    model = made.speculation.drafters[0].drafter._model  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.check_integrity()
    monkeypatch.setattr(model, "compute", compute)
    drain(made)
    assert outputs(samples) == SAID
    assert [sample.metrics.accepted for sample in samples] == whole
    expect_empty(made)
