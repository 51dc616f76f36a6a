"""What drafters, resource managers and length policies are called with, and when they fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy
import pytest
import torch

import drafters
from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.engine import LlmArgs
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import ParameterError
from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from models import greedy, prompts, tiny

TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = prompts((4, 9, 5))
PLAIN = {
    tuple(prompt): said
    for prompt, said in zip(PROMPTS, greedy(tiny("llama"), PROMPTS, TOKENS), strict=True)
}
LONG = prompts((60,))[0]


def mine(request: DraftRequest) -> bool:
    """Whether it is the request of the second prompt, which drafters below fail for."""
    return request.tokens[: request.prompt_length] == PROMPTS[1]


def machine(drafter: Drafter, length: int = 3, **more: Any) -> Engine:
    settings = {name: more.pop(name) for name in list(more) if name in ("max_num_tokens", "pages")}
    config = UserProvidedDecodingConfig(max_draft_len=length, drafter=drafter, **more)
    return engine(speculative=[config], **settings)


def run(made: Engine, params: SamplingParams = GREEDY) -> list[Any]:
    """Generations of all prompts, which must be those of plain decoding."""
    samples = [made.add(prompt, params, keep=True)[0] for prompt in PROMPTS]
    assert all(event.error is None for event in drain(made))
    assert outputs(samples) == [said[: params.max_tokens] for said in PLAIN.values()]
    for sample in samples:
        made.close(sample)
    expect_empty(made)
    return samples


def truth(request: DraftRequest) -> list[int]:
    return drafters.truth(PLAIN, request)


class RecordingManager(ResourceManager):
    """Records its calls for each request; may fail in one of its calls."""

    def __init__(self, most: int = 100, broken: str = "") -> None:
        self.most, self.broken = most, broken
        self.calls: list[tuple[str, int]] = []
        self.held: set[int] = set()

    def get_max_resource_count(self) -> int:
        return self.most

    def get_needed_resource_to_completion(self, request: DraftRequest) -> int:
        self._note("need", request)
        self.held.add(request.request_id)
        return 1

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        for request in scheduled_batch.generation_requests:
            self._note("prepare", request)

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        for request in scheduled_batch.generation_requests:
            self._note("update", request)

    def free_resources(self, request: DraftRequest) -> None:
        self.held.remove(request.request_id)
        self._note("free", request)

    def of(self, number: int) -> list[str]:
        return [what for what, request_id in self.calls if request_id == number]

    def _note(self, what: str, request: DraftRequest) -> None:
        self.calls.append((what, request.request_id))
        if what == self.broken:
            raise RuntimeError(what)


# ---- resource managers -----------------------------------------------------------------------


def test_a_resource_manager_is_called_once_per_step() -> None:
    def answer(request: DraftRequest) -> list[int]:
        if mine(request) and len(request.tokens) > request.prompt_length + 5:
            raise RuntimeError("not this one")
        return truth(request)

    manager = RecordingManager()
    made = machine(drafters.PerRequest(answer), resource_manager=manager)
    samples = run(made)
    for sample in samples:
        calls = manager.of(sample.id)
        assert calls[0] == "need"
        assert calls[-1] == "free"
        assert Counter(calls)["free"] == 1
        steps = calls[1:-1]
        assert steps[::2] == ["prepare"] * len(steps[::2])
        assert steps[1::2] == ["update"] * len(steps[1::2])
    disabled = manager.of(samples[1].id)
    assert disabled[-2:] == ["prepare", "free"]
    assert manager.calls.index(("free", samples[1].id)) < len(manager.calls) - 5, "freed at once"
    assert manager.held == set()
    assert not any(drafter.disabled for drafter in made.speculation.drafters), (
        "nothing is remembered of requests that are over"
    )
    assert samples[0].metrics.accepted == samples[2].metrics.accepted > 0


def test_slots_of_a_lost_draft_go_to_a_waiting_request() -> None:
    def answer(request: DraftRequest) -> list[int]:
        return truth(request)[: 1 // (request.request_id != 0)]

    manager = RecordingManager(most=1)
    made = machine(drafters.PerRequest(answer), resource_manager=manager)
    first, second, _ = run(made)
    assert first.metrics.drafted == 0
    assert second.metrics.drafted > 8
    assert manager.of(first.id) == ["need", "prepare", "free"]


@pytest.mark.parametrize("broken", ["need", "prepare", "update"])
def test_a_failing_resource_manager_costs_drafts_only(
    broken: str,
) -> None:
    manager = RecordingManager(broken=broken)
    made = machine(drafters.PerRequest(truth), resource_manager=manager)
    samples = run(made)
    assert all(manager.of(sample.id).count(broken) <= 1 for sample in samples)
    assert made.stats.draft_failures > 0
    if broken != "need":
        assert all(manager.of(sample.id).count("free") == 1 for sample in samples)
        assert manager.held == set()


def test_a_manager_that_is_none_is_refused_before_it_is_needed() -> None:
    class Alike:
        def get_max_resource_count(self) -> int:
            return 1

    with pytest.raises(ParameterError, match=r"not a subclass of forethought\.ResourceManager"):
        machine(drafters.PerRequest(truth), resource_manager=Alike())


def test_generations_that_are_not_over_are_released_before_the_shutdown() -> None:
    manager, drafter = RecordingManager(), drafters.PerRequest(truth)
    made = machine(drafter, resource_manager=manager)
    [sample] = made.add(PROMPTS[0], GREEDY)
    for _ in range(3):
        made.step()
    made.shutdown()
    assert drafter.released == [sample.id]
    assert manager.held == set()
    assert drafter.closed
    made.close(sample)
    assert drafter.released == [sample.id]
    expect_empty(made)


# ---- what drafters are shown -----------------------------------------------------------------


class Witness(Drafter):
    """Proposes the truth, and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self.updated: list[tuple[list[int], list[int]]] = []
        self.prefilled: list[int] = []

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        self.seen.append(_numbers(scheduled_requests))
        for request in scheduled_requests.generation_requests:
            known = tuple(request.tokens[: request.prompt_length]) in PLAIN
            request.py_draft_tokens = truth(request) if known else None
        for request in scheduled_requests.context_requests:
            assert request.table is not None
            assert request.max_draft_len == request.max_nodes == 0
            self.prefilled.append(request.table.length)
            request.py_draft_tokens = [3, 3, 3]  # of no consequence

    def update(self, scheduled_requests: ScheduledRequests) -> None:
        self.updated.append(_numbers(scheduled_requests))


def _numbers(batch: ScheduledRequests) -> tuple[list[int], list[int]]:
    return (
        [request.request_id for request in batch.generation_requests],
        [request.request_id for request in batch.context_requests],
    )


def test_requests_that_prefill_are_shown_beside_those_that_decode() -> None:
    witness = Witness()
    made = machine(witness, max_num_tokens=24)
    [first] = made.add(PROMPTS[0], GREEDY)
    made.step()
    [late] = made.add(LONG, GREEDY)
    quiet = GREEDY.replace(speculation=SpeculationParams(enabled=False))
    [silent] = made.add(PROMPTS[1], quiet)
    drain(made)
    shown = [context for _, context in witness.seen if context]
    assert shown[:3] == [[late.id]] * 3
    assert witness.prefilled[:3] == sorted(witness.prefilled[:3]), "a chunk more in each step"
    assert witness.prefilled[-1] == len(LONG)
    assert witness.updated[:3] == witness.seen[:3] == [([first.id], [late.id])] * 3
    assert not any(silent.id in numbers for seen in witness.seen for numbers in seen)
    assert first.output == PLAIN[tuple(PROMPTS[0])]
    expect_empty(made)


def test_a_drafter_that_writes_to_request_tokens_loses_its_drafts_only() -> None:
    def meddle(request: DraftRequest) -> list[int]:
        if mine(request):
            request.tokens[-1] = 7  # type: ignore[index]
        return truth(request)

    made = machine(drafters.PerRequest(meddle))
    samples = run(made)
    assert samples[1].metrics.drafted == 0
    assert samples[0].metrics.accepted == samples[2].metrics.accepted > 0


def test_tokens_are_a_view_that_reads_like_a_list_and_grows_with_the_text() -> None:
    seen: list[Any] = []

    def look(request: DraftRequest) -> list[int]:
        tokens = request.tokens
        seen.append(tokens)
        assert tokens == list(tokens)
        assert tokens[2:] == list(tokens)[2:]
        assert isinstance(tokens[2:], list)
        assert [1, *tokens] == [1] + tokens  # type: ignore[operator] # noqa: RUF005
        assert [*tokens, 1] == tokens + [1]  # type: ignore[operator] # noqa: RUF005
        assert list(reversed(tokens)) == list(tokens)[::-1]
        assert tokens[-1] in tokens
        assert tokens.index(tokens[-1]) == list(tokens).index(tokens[-1])
        assert tokens.count(tokens[0]) == list(tokens).count(tokens[0])
        assert torch.tensor(tokens).tolist() == numpy.array(tokens).tolist() == list(tokens)
        for write in ("append", "extend", "insert", "pop", "clear", "sort", "__setitem__"):
            assert not hasattr(tokens, write)
        return truth(request)

    run(machine(drafters.PerRequest(look)))
    assert len({id(view) for view in seen}) == len(PROMPTS), "one view per request, no copies"


# ---- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "nodes"), [(None, 9), (9, 9), (5, 5), (3, 3)])
def test_a_tree_has_at_most_as_many_nodes_as_the_configuration_allows(
    most: int | None, nodes: int
) -> None:
    allowed: set[int] = set()
    bush = drafters.bush(PLAIN, 3)
    grow = bush.answer  # type: ignore[attr-defined]

    def note(request: DraftRequest) -> Any:
        if request.max_draft_len == 3:
            allowed.add(request.max_nodes)
        return grow(request)

    bush.answer = note  # type: ignore[attr-defined]
    run(machine(bush, max_total_draft_tokens=most))
    assert allowed == {nodes}


def test_sequences_that_prefill_count_as_running_for_max_concurrency() -> None:
    witness = Witness()
    made = machine(witness, max_concurrency=1, max_num_tokens=8)
    [first] = made.add(PROMPTS[0], GREEDY)
    made.step()
    made.step()
    alone = len(witness.seen)
    assert alone > 0
    [late] = made.add(LONG, GREEDY.replace(max_tokens=1))
    made.step()  # it is admitted
    admitted = len(witness.seen)
    while late.active:
        made.step()
    assert len(witness.seen) == admitted, "no drafts while its prompt is computed"
    drain(made)
    assert len(witness.seen) > admitted
    assert first.output == PLAIN[tuple(PROMPTS[0])]
    expect_empty(made)


# ---- length policies -------------------------------------------------------------------------


class Policy:
    """Fixed lengths, but for what a test makes of it."""

    reason = "test"

    def __init__(self, **broken: Any) -> None:
        self._broken = broken

    def lengths(self, requests: Any, batch_size: int) -> Any:
        if "lengths" in self._broken:
            return self._broken["lengths"](requests)
        return [request.max_draft_len for request in requests]

    def observe(self, record: Any) -> None:
        if "observe" in self._broken:
            self._broken["observe"](record)


@pytest.mark.parametrize(
    "answer",
    [lambda requests: 1 // 0, lambda requests: None, lambda requests: [1], lambda requests: ["3"]],
)
def test_a_length_policy_that_fails_costs_the_drafts_of_the_step(answer: Any, caplog: Any) -> None:
    steps = iter(range(1000))
    policy = Policy(
        lengths=lambda requests: (
            answer(requests) if next(steps) % 2 and len(requests) > 1 else [3] * len(requests)
        )
    )
    made = machine(drafters.PerRequest(truth))
    made.speculation.drafters[0].policy = policy
    samples = run(made)
    assert all(sample.metrics.accepted > 0 for sample in samples)
    assert made.stats.draft_failures > 0
    assert "its length policy failed" in caplog.text


def test_a_length_policy_that_cannot_learn_is_logged_and_goes_on(caplog: Any) -> None:
    made = machine(drafters.PerRequest(truth))
    made.speculation.drafters[0].policy = Policy(observe=lambda record: 1 // 0)
    samples = run(made)
    assert all(sample.metrics.accepted > 0 for sample in samples)
    assert "did not take in what became of a step" in caplog.text


def test_each_drafters_policy_gets_the_seconds_of_its_own_drafting(monkeypatch: Any) -> None:
    draft_seconds: dict[str, list[float]] = {"idle": [], "busy": []}
    clock = [0.0]

    def taking(seconds: float, said: Any) -> Any:
        def answer(request: DraftRequest) -> Any:
            clock[0] += seconds
            return said(request)

        return drafters.PerRequest(answer)

    configs = [
        UserProvidedDecodingConfig(name=name, max_draft_len=3, drafter=drafter)
        for name, drafter in (("idle", taking(10.0, lambda _: ())), ("busy", taking(1.0, truth)))
    ]
    made = engine(speculative=configs)
    for entry in made.speculation.drafters:
        entry.policy = Policy(
            observe=lambda record, name=entry.name: draft_seconds[name].append(record.draft_seconds)
        )
    monkeypatch.setattr("forethought.model.device.time.perf_counter", lambda: clock[0])
    run(made)
    assert set(draft_seconds["idle"]) <= {0.0, 10.0, 20.0, 30.0}
    assert set(draft_seconds["busy"]) <= {0.0, 1.0, 2.0, 3.0}
    assert max(draft_seconds["idle"]) == 30.0
    assert max(draft_seconds["busy"]) == 3.0


def test_a_length_beyond_the_context_of_the_model_is_refused() -> None:
    config = {"decoding_type": "NGram", "max_draft_len": 40}
    args = LlmArgs(dtype="float32", max_seq_len=32, speculative_config=config)
    with pytest.raises(ParameterError, match=r"max_draft_len.*NGramDecodingConfig.*"):
        resolve.build(args, tiny("llama"))
