"""Relaxed acceptance: both published readings of its threshold, and only while thinking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines import drain, engine, expect_empty, outputs
from forethought.config.drafters import MTPDecodingConfig
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError
from forethought.model.sampling import Constraint, TokenContext
from forethought.speculative.drafter import Draft
from forethought.speculative.verify.rules import RelaxedAcceptance, rule_of
from forethought.speculative.verify.verify import VerificationRequest, verify
from models import greedy, prompts, tiny
from mtp_modules import saved

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROBS = (0.5, 0.3, 0.15, 0.05)
BEGIN, END = 90, 91
THINKING, SPEAKING = (5, BEGIN, 6), (BEGIN, 6, END, 7)


def verified(
    rule: RelaxedAcceptance,
    draft: Draft,
    distributions: Any = None,
    past: tuple[int, ...] = THINKING,
    params: SamplingParams = GREEDY,
    constraint: Constraint | None = None,
) -> tuple[list[int], list[int]]:
    """The accepted nodes, and what comes out."""
    contexts = [TokenContext(params, (), (), frozenset(), constraint)] * (1 + len(draft))
    rows = range(1 + len(draft))
    request = VerificationRequest(draft, rows, contexts, 3, 0, 5, past=past, rule=rule)
    wide = torch.full((len(rows), 100), -30.0)
    wide[:, :4] = torch.tensor(distributions or [PROBS] * len(rows)).log()
    [result] = verify(wide, [request])
    return result.path, result.tokens


def accepted(rule: RelaxedAcceptance, **more: Any) -> list[int]:
    """Which tokens are accepted behind ``PROBS``, each tried alone."""
    return [token for token in range(4) if verified(rule, Draft([token]), **more)[0]]


@pytest.mark.parametrize(
    ("delta", "rule", "tokens"),
    [
        (0.3, "probability", [0, 1]),
        (0.3, "log_probability", [0]),
        (0.6, "probability", [0, 1, 2, 3]),
        (0.6, "log_probability", [0, 1]),
        (0.0, "probability", [0]),
        (0.0, "log_probability", [0]),
    ],
)
def test_both_readings_of_the_threshold_have_their_worked_numbers(delta, rule, tokens):
    assert accepted(RelaxedAcceptance(10, delta, rule, BEGIN, END)) == tokens


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_only_the_most_probable_tokens_are_tolerated(topk):
    assert accepted(RelaxedAcceptance(topk, 0.6, "probability", BEGIN, END)) == list(range(topk))


def test_of_equally_likely_tokens_none_ranks_before_the_other():
    rule = RelaxedAcceptance(1, 0.0, "probability", BEGIN, END)
    even = [(0.4, 0.4, 0.1, 0.1)] * 2
    assert verified(rule, Draft([1]), even)[0] == [0]
    assert verified(rule, Draft([1]), even, past=SPEAKING)[0] == []


@pytest.mark.parametrize(
    ("past", "thinks"),
    [
        ((), False),
        ((4, 5), False),
        ((BEGIN,), True),
        ((5, BEGIN, 6, 7), True),
        ((BEGIN, 6, END), False),
        ((BEGIN, 6, END, BEGIN, 4), True),
        ((END, 4), False),
    ],
)
def test_outside_of_the_thinking_only_the_most_probable_token_is_accepted(past, thinks):
    rule = RelaxedAcceptance(10, 0.6, "probability", BEGIN, END)
    assert accepted(rule, past=past) == ([0, 1, 2, 3] if thinks else [0])


def test_thinking_begins_and_ends_within_a_draft():
    rule = RelaxedAcceptance(10, 0.6, "probability", BEGIN, END)
    distributions = torch.full((4, 100), -30.0)
    distributions[:, :4] = torch.tensor(PROBS).log()
    for marker, past, path in ((BEGIN, SPEAKING, [0, 1, 2]), (END, THINKING, [0])):
        first = distributions.clone()
        first[0, marker] = 5.0  # the marker is what the target says itself
        contexts = [TokenContext(GREEDY, (), (), frozenset())] * 4
        draft = Draft([marker, 2, 1])
        request = VerificationRequest(draft, range(4), contexts, 3, 0, 5, past=past, rule=rule)
        [result] = verify(first, [request])
        assert result.path == path


def test_it_stops_at_the_first_miss_and_the_most_probable_token_follows():
    rule = RelaxedAcceptance(2, 0.3, "probability", BEGIN, END)
    assert verified(rule, Draft([1, 1, 3, 0])) == ([0, 1], [1, 1, 0])
    assert verified(rule, Draft([1, 0])) == ([0, 1], [1, 0, 0])


def test_of_a_tree_the_longest_tolerable_path_is_taken():
    rule = RelaxedAcceptance(2, 0.3, "probability", BEGIN, END)
    tree = Draft([0, 1, 1], (-1, -1, 1))
    assert verified(rule, tree) == ([1, 2], [1, 1, 0])


def test_a_logit_bias_is_applied_before_tokens_are_compared():
    rule = RelaxedAcceptance(10, 0.3, "probability", BEGIN, END)
    assert accepted(rule, params=GREEDY.replace(logit_bias={0: -50.0})) == [1, 2]


class Only:
    """Allows one token after every output."""

    def __init__(self, token: int) -> None:
        bits = np.zeros(100, np.bool_)
        bits[token] = True
        self._mask = np.packbits(bits, bitorder="little")

    def mask(self, output: Any) -> Any:
        return self._mask

    def is_complete(self, output: Any) -> bool:
        return False


@pytest.mark.parametrize("reading", ["probability", "log_probability"])
def test_what_a_constraint_forbids_is_not_tolerated_at_any_threshold(reading):
    rule = RelaxedAcceptance(100, 1e9, reading, BEGIN, END)
    assert accepted(rule) == [0, 1, 2, 3]
    assert accepted(rule, constraint=Only(2)) == [2]


CONFIG: dict[str, Any] = {
    "max_draft_len": 4,
    "speculative_model": saved(),
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 50,
    "relaxed_delta": 0.9,
    "relaxed_rule": "probability",
    "begin_thinking_phase_token": BEGIN,
    "end_thinking_phase_token": END,
}


def run(config: DecodingBaseConfig, asked: list[list[int]], params: SamplingParams) -> list[Any]:
    machine = engine(pages=128, speculative=[config])
    sequences = [machine.add(prompt, params)[0] for prompt in asked]
    drain(machine)
    expect_empty(machine)
    return sequences


def test_a_thinking_request_accepts_more_and_is_marked():
    asked = [[*prompt, BEGIN] for prompt in prompts((4, 9, 17))]
    loose = run(MTPDecodingConfig(**CONFIG), asked, GREEDY)
    strict = run(MTPDecodingConfig(max_draft_len=4, speculative_model=saved()), asked, GREEDY)
    assert outputs(strict) == greedy(tiny("llama"), asked, 40)
    assert sum(each.metrics.accepted for each in loose) > 20
    assert sum(each.metrics.accepted for each in loose) > sum(e.metrics.accepted for e in strict)
    assert outputs(loose) != outputs(strict)
    assert all(each.metrics.lossy for each in loose)
    assert not any(each.metrics.lossy for each in strict)


def test_requests_that_do_not_think_say_what_plain_decoding_says():
    asked = [[token for token in prompt if token != BEGIN] for prompt in prompts((4, 9, 17))]
    without = GREEDY.replace(logit_bias={BEGIN: -100.0})
    plainly = run(MTPDecodingConfig(max_draft_len=4, speculative_model=saved()), asked, without)
    assert outputs(run(MTPDecodingConfig(**CONFIG), asked, without)) == outputs(plainly)


def test_sampled_requests_stay_exact_and_unmarked():
    sampled = GREEDY.replace(temperature=0.8, seed=3)
    asked = [[*prompt, BEGIN] for prompt in prompts((4, 9))]
    found = run(MTPDecodingConfig(**CONFIG), asked, sampled)
    plain = engine(pages=128)
    expected = [plain.add(prompt, sampled)[0] for prompt in asked]
    drain(plain)
    assert outputs(found) == outputs(expected)
    assert not any(each.metrics.lossy for each in found)


def test_it_is_used_only_where_it_is_asked_for():
    assert rule_of(MTPDecodingConfig(max_draft_len=4)) is None
    rule = rule_of(MTPDecodingConfig(**CONFIG))
    assert isinstance(rule, RelaxedAcceptance)
    assert (rule.topk, rule.delta, rule.rule) == (50, 0.9, "probability")
    with pytest.raises(ParameterError, match=r"relaxed_delta.*acceptance is exact"):
        MTPDecodingConfig(relaxed_delta=0.5)


def test_where_the_rule_is_left_out_it_is_the_documented_one():
    left_out = rule_of(MTPDecodingConfig(**{**CONFIG, "relaxed_rule": None}))
    assert isinstance(left_out, RelaxedAcceptance)
    assert left_out.rule == "log_probability"


def test_the_rule_of_logarithms_is_the_stricter_one():
    distributions = (
        torch.randn(200, 9, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    )
    tokens = torch.arange(200) % 9
    for delta in (0.0, 0.1, 0.6):
        by_log, by_difference = (
            RelaxedAcceptance(5, delta, rule, BEGIN, END).is_tolerable(distributions, tokens)
            for rule in ("log_probability", "probability")
        )
        assert not (by_log & ~by_difference).any()
        assert delta < 0.6 or (by_difference & ~by_log).any()
