"""Verification on a GPU: the results of the CPU, with one wait, whatever is asked for.

The device is one that is not there (``fake_cuda.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda import DEVICE, fake_cuda
from forethought.config.sampling import SamplingParams
from forethought.engine.packing import pending_samples
from forethought.engine.scheduler import PlannedRow
from forethought.engine.sequence import Sequence as LiveSequence
from forethought.kv.pool import PagePool
from forethought.kv.table import PageTable
from forethought.model.sampling import DevicePath, TokenContext, logits_to_probs
from forethought.speculative.drafter import NO_DRAFT, DeviceTokens, Draft, DraftKind
from forethought.speculative.verify.accept import VerificationResult, verify_argmax
from forethought.speculative.verify.rules import (
    RelaxedAcceptance,
    SyntheticAcceptance,
    TypicalAcceptance,
)
from forethought.speculative.verify.verify import (
    AcceptanceRule,
    VerificationRequest,
    verify,
)

WIDTH = 12
EXCLUDING = SamplingParams(top_n_sigma=2.0, xtc_probability=0.5, xtc_threshold=0.05)
SAMPLED, GREEDY = SamplingParams(), SamplingParams(temperature=0.0)
ASKED: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"confidence": 3}]
ASKED += [{"logprobs": 0, "confidence": 1, "top_p": 0.9}]
PARENTS = [(-1, 0, 1), (-1, -1, 0, 0, 1, 2), (-1,)]
RULES: dict[str, tuple[SamplingParams, AcceptanceRule | None]] = {
    "exact": (SAMPLED, None),
    "greedy": (GREEDY, None),
    "excluding": (EXCLUDING, None),
    "relaxed": (GREEDY, RelaxedAcceptance(4, 0.3, "probability", 3, 4)),
    "typical": (SAMPLED, TypicalAcceptance(0.09, 0.3)),
    "synthetic": (SAMPLED, SyntheticAcceptance.of_rate(0.7)),
}


def drafted(parents: tuple[int, ...], kind: DraftKind, source: torch.Generator) -> Draft:
    """Tokens of which siblings differ, with what they were drawn from."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[other] for other in range(node) if parents[other] == parent}
        free = [token for token in range(WIDTH) if token not in taken]
        tokens.append(free[int(torch.randint(len(free), (1,), generator=source))])
    q = torch.rand(len(parents), WIDTH, generator=source) + 0.1
    return Draft(tokens, parents, kind, None if kind is DraftKind.POINT else q / q.sum(1)[:, None])


def given(
    name: str, kind: DraftKind, source: torch.Generator
) -> tuple[Tensor, list[VerificationRequest]]:
    """Requests of all shapes and of all that may be asked for; some logits are not finite."""
    params, rule = RULES[name]
    requests, begin = list[VerificationRequest](), 0
    for parents, asked in itertools.product((*PARENTS, ()), ASKED):
        draft = drafted(parents, kind, source) if parents else NO_DRAFT
        context = TokenContext(params.replace(**asked), (), (), frozenset())
        rows = range(begin, begin + 1 + len(parents))
        seed, past = int(torch.randint(1000, (1,), generator=source)), (3, 5)
        contexts = [context] * len(rows)
        own = rule if parents else None
        requests.append(VerificationRequest(draft, rows, contexts, seed, 0, 9, past, own))
        begin += len(rows)
    logits = torch.randn(begin, WIDTH, generator=source)
    for each in requests:
        for node, token in enumerate(each.draft.tokens):
            logits[each.rows[1 + each.draft.parent(node)], token] += 2.0
    logits[torch.rand(begin, generator=source) < 0.1] = math.nan
    return logits, requests


def there(each: VerificationRequest) -> VerificationRequest:
    """The same, with every second draft on the device."""
    if not len(each.draft) or each.seed % 2:
        return each
    q = None if each.draft.q is None else each.draft.q.to(DEVICE)
    on_device = DeviceTokens(torch.tensor(list(each.draft.tokens), device=DEVICE))
    return replace(each, draft=replace(each.draft, tokens=on_device, q=q))


def expect_equal(
    found: Sequence[VerificationResult], expected: Sequence[VerificationResult]
) -> None:
    assert [(each.path, each.tokens) for each in found] == [
        (each.path, each.tokens) for each in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-5, abs=1e-6)


def numbers(result: VerificationResult) -> list[float]:
    """All scores of a result."""
    logprobs = [
        number
        for entry in result.logprobs or ()
        for token, each in entry.items()
        for number in (token, each.logprob, each.rank)
    ]
    confidences = [
        number
        for each in result.confidences or ()
        for number in (each.value, each.logprob, each.entropy, each.self_certainty)
    ]
    return [*logprobs, 1e9, *confidences]


@pytest.mark.parametrize("kind", DraftKind)
@pytest.mark.parametrize("name", RULES)
def test_results_are_those_of_the_cpu_and_wait_once(name: str, kind: DraftKind) -> None:
    """Exact or by a rule, greedy or sampled, with scores or without, drafts here or there."""
    source, num_accepted = torch.Generator().manual_seed(5), 0
    for _ in range(12):
        logits, requests = given(name, kind, source)
        expected = verify(logits, requests)
        num_accepted += sum(len(each.path) for each in expected)
        with fake_cuda() as device:
            on_device, asked = logits.to(DEVICE), [there(each) for each in requests]
            device.reset()
            found = verify(on_device, asked)
            assert device.counts["waits"] == 1, device.sites
        expect_equal(found, expected)
    assert num_accepted > 20


@pytest.mark.parametrize("kind", DraftKind)
def test_argmaxes_are_those_of_the_cpu_and_wait_once(kind: DraftKind) -> None:
    source, num_accepted = torch.Generator().manual_seed(5), 0
    for _ in range(12):
        logits, requests = given("greedy", kind, source)
        expected = verify_argmax(logits, [each.draft for each in requests])
        num_accepted += sum(len(each.path) for each in expected)
        with fake_cuda() as device:
            on_device, drafts = logits.to(DEVICE), [there(each).draft for each in requests]
            device.reset()
            found = verify_argmax(on_device, drafts)
            assert device.counts["waits"] == 1, device.sites
        assert found == expected
    assert num_accepted > 20


def test_drafted_tokens_are_read_where_dry_looks_for_repeats_in_them() -> None:
    fields = {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()}
    for params, waits in ((SAMPLED.replace(**fields), 1), (SAMPLED, 0)):
        sequence = LiveSequence(0, [4, 9, 4], 2, params, PageTable(PagePool(4, 4)))
        with fake_cuda() as device:
            drafts = DeviceTokens(torch.tensor([9, 4, 9], device=DEVICE))
            row = PlannedRow(sequence, 2, 3, 1, num_nodes=3, draft=Draft(drafts))
            device.reset()
            (pending,) = pending_samples([row], frozenset({2}))
            assert device.counts["waits"] == waits, device.sites
        outputs = [list(context.output) for context in pending.request.contexts]
        if waits:
            assert outputs == [[4], [4, 9], [4, 9, 4], [4, 9, 4, 9]]
            assert set(pending.request.contexts[-1].dry_penalties) == {4}


def test_penalties_see_drafted_tokens_that_the_host_does_not_know() -> None:
    """As if they were in the output, of drafts of several requests; nothing is waited for."""
    source = torch.Generator().manual_seed(3)
    params = SAMPLED.replace(
        repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=5
    )
    eos, output = frozenset({2}), [1, 7, 7]
    here, moved = list[TokenContext](), list[list[TokenContext]]()
    for parents in PARENTS:
        draft = drafted(parents, DraftKind.POINT, source)
        known = TokenContext(params, [4, 9], output, eos)
        prefixes = [output]
        for node, token in enumerate(draft.tokens):
            prefixes.append([*prefixes[1 + draft.parent(node)], token])
        here += [replace(known, output=prefix) for prefix in prefixes]
        moved.append([known, *(replace(known, output=output) for _ in parents)])
        for context, path in zip(
            moved[-1][1:], DevicePath.of_nodes(torch.tensor(draft.tokens), parents), strict=True
        ):
            context.path = path
    logits = torch.randn(len(here), WIDTH, generator=source)
    expected = logits_to_probs(logits, here)
    assert torch.equal(logits_to_probs(logits, [each for own in moved for each in own]), expected)
    with fake_cuda() as device:
        on_device = logits.to(DEVICE)
        for own in moved:
            paths = [each.path for each in own if each.path is not None]
            tokens = paths[0].tokens.to(DEVICE)
            for each, path in zip(own[1:], paths, strict=True):
                each.path = path._replace(tokens=tokens)
        device.reset()
        found = logits_to_probs(on_device, [each for own in moved for each in own])
        assert device.counts["waits"] == device.counts["uploads"] == 0
        assert torch.equal(found.cpu(), expected)
    plain = [replace(each, path=None) for own in moved for each in own]
    assert not torch.equal(logits_to_probs(logits, plain), expected)
