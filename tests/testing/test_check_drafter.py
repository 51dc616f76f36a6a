"""The public suite passes for every drafter of ours, and fails for those that break promises."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import drafters
from eagle_heads import random_head as eagle
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.drafter import Draft, Drafter, DraftKind, DraftRequest
from forethought.testing import check_drafter, distribution
from forethought.testing import drafter as drafter_suite
from medusa_heads import shared_heads
from models import tiny, transformers_model
from mtp_modules import saved
from redrafter_heads import random_head

PROMPTS = [[5, 6, 7, 8] * 3, [9], [20, 21] * 6, [5, 6, 7]]
MODEL: dict[str, Any] = {"speculative_model": tiny("llama", seed=7)}
SAME_MODEL: dict[str, Any] = {"speculative_model": tiny("llama")}
TREE = [[0], [1], [2], [0, 0], [1, 0]]


SLOW = pytest.mark.slow
"""Those like another one; ``test_speculation`` has the tokens of all of them."""


@pytest.mark.parametrize(
    "config",
    [
        NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),
        pytest.param(
            NGramDecodingConfig(max_draft_len=4, is_public_pool=False, is_use_oldest=False),
            marks=SLOW,
        ),
        SuffixDecodingConfig(max_draft_len=8),
        pytest.param(DraftTargetDecodingConfig(max_draft_len=4, **MODEL), marks=SLOW),
        pytest.param(DraftTargetDecodingConfig(max_draft_len=4, **SAME_MODEL), marks=SLOW),
        DraftTargetDecodingConfig(max_draft_len=4, draft_sampling="sampled", **SAME_MODEL),
        pytest.param(
            DraftTargetDecodingConfig(draft_choices=TREE, **SAME_MODEL),
            marks=SLOW,
        ),
        pytest.param(
            DraftTargetDecodingConfig(draft_choices=TREE, draft_sampling="sampled", **MODEL),
            marks=SLOW,
        ),
        pytest.param(PearlDecodingConfig(max_draft_len=4, **SAME_MODEL), marks=SLOW),
        pytest.param(PearlDecodingConfig(max_draft_len=3, overlap=False, **MODEL), marks=SLOW),
        pytest.param(
            EagleDecodingConfig(max_draft_len=4, speculative_model=eagle("eagle")), marks=SLOW
        ),
        pytest.param(EagleDecodingConfig(max_draft_len=4, speculative_model=eagle()), marks=SLOW),
        pytest.param(
            EagleDecodingConfig(eagle_choices=TREE, speculative_model=eagle()), marks=SLOW
        ),
        EagleDecodingConfig(
            max_draft_len=4,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=4,
            max_total_draft_tokens=10,
            speculative_model=eagle(),
        ),
        MedusaDecodingConfig(speculative_model=shared_heads()),
        pytest.param(
            MedusaDecodingConfig(speculative_model=shared_heads(), tree="most_probable"),
            marks=SLOW,
        ),
        pytest.param(MTPDecodingConfig(max_draft_len=4, speculative_model=saved()), marks=SLOW),
        pytest.param(
            MTPDecodingConfig(max_draft_len=3, speculative_model=saved(), use_mtp_vanilla=True),
            marks=SLOW,
        ),
        pytest.param(
            MTPDecodingConfig(max_draft_len=4, speculative_model=saved(count=2)), marks=SLOW
        ),
        pytest.param(ReDrafterDecodingConfig(speculative_model=random_head()), marks=SLOW),
        ReDrafterDecodingConfig(num_beams=4, tree="beams", speculative_model=random_head()),
    ],
    ids=lambda config: f"{config.decoding_type}",
)
def test_every_drafter_of_ours_passes(config: DecodingBaseConfig) -> None:
    assert len(check_drafter(config, tiny("llama"), PROMPTS)) == 9


def test_a_drafter_of_ones_own_passes_on_the_embedded_reasoner() -> None:
    class Repeat(Drafter):
        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> None:
            for request in scheduled_requests.generation_requests:
                request.py_draft_tokens = [request.tokens[-1]] * request.max_draft_len

    assert "forks agree" in check_drafter(Repeat())


def test_a_drafter_that_writes_into_the_tokens_is_found_out() -> None:
    def meddle(request: DraftRequest) -> list[int]:
        request.tokens[-1] = 7  # type: ignore[index]
        return [7]

    with pytest.raises(AssertionError, match="the drafter failed"):
        check_drafter(drafters.PerRequest(meddle), tiny("llama"), PROMPTS)


def test_a_drafter_that_keeps_pages_is_found_out() -> None:
    kept = []

    def hoard(request: DraftRequest) -> list[int]:
        assert request.table is not None
        kept.append(request.table.fork())
        return [7]

    with pytest.raises(AssertionError):
        check_drafter(drafters.PerRequest(hoard), tiny("llama"), PROMPTS)


def test_a_drafter_that_raises_is_found_out() -> None:
    failing = drafters.PerRequest(lambda request: [request.tokens[10_000]])
    with pytest.raises(AssertionError, match="the drafter failed"):
        check_drafter(failing, tiny("llama"), PROMPTS)


@functools.cache
def probs_after(tokens: tuple[int, ...]) -> torch.Tensor:
    """[V]: the target's own distribution under the params of the suite's statistical test."""
    with torch.inference_mode():
        logits = transformers_model(tiny("llama"))(torch.tensor([tokens])).logits[0, -1]
    best = logits.topk(distribution.WIDTH)
    return torch.zeros_like(logits).scatter(
        0, best.indices, (best.values / distribution.TEMPERATURE).softmax(0)
    )


def drawn(request: DraftRequest, q: torch.Tensor) -> int:
    uniform = random.Random(str((request.seed, request.index, len(request.tokens)))).random()
    return int(torch.searchsorted(q.cumsum(0), uniform).clamp(max=len(q) - 1))


def does_not_draft(request: DraftRequest) -> bool:
    """Only the first tokens of sampled requests are drafted, which is enough and quick."""
    done = len(request.tokens) - request.prompt_length
    return request.params.greedy or done > distribution.LENGTH


def correct_drafter(request: DraftRequest) -> Draft | tuple[()]:
    """A token drawn from a flatter distribution than the target's."""
    if does_not_draft(request):
        return ()
    q = (probs_after(tuple(request.tokens)) ** 0.5).clone()
    q /= q.sum()
    return Draft([drawn(request, q)], None, DraftKind.IID, q[None])


def drafter_of_undrawn_tokens(request: DraftRequest) -> Draft | tuple[()]:
    """The most probable token, declared as drawn."""
    if does_not_draft(request):
        return ()
    q = probs_after(tuple(request.tokens))
    return Draft([int(q.argmax())], None, DraftKind.IID, q[None])


def drafter_with_wrong_q(request: DraftRequest) -> Draft | tuple[()]:
    """A token drawn from a sharper distribution than the declared one."""
    if does_not_draft(request):
        return ()
    q = probs_after(tuple(request.tokens))
    sharp = (q / q.max()) ** 8
    return Draft([drawn(request, sharp / sharp.sum())], None, DraftKind.IID, q[None])


def drafter_of_undrawn_siblings(request: DraftRequest) -> Draft | tuple[()]:
    """The most probable tokens, declared as drawn one after the other."""
    if does_not_draft(request):
        return ()
    q = probs_after(tuple(request.tokens))
    tokens = q.topk(2).indices.tolist()
    return Draft(tokens, (-1, -1), DraftKind.WITHOUT_REPLACEMENT, torch.stack([q, q]))


def own(answer: Any) -> drafters.PerRequest:
    drafter = drafters.PerRequest(answer)
    drafter.nodes = lambda depth: 2 * depth  # type: ignore[method-assign]
    return drafter


def test_a_drafter_that_declares_its_q_passes() -> None:
    assert "sampled outputs have the distribution of plain decoding" in check_drafter(
        own(correct_drafter), tiny("llama"), PROMPTS
    )


@pytest.mark.parametrize(
    "drafter", [drafter_of_undrawn_tokens, drafter_with_wrong_q, drafter_of_undrawn_siblings]
)
def test_a_drafter_that_declares_another_q_than_it_drew_from_is_found_out(drafter: Any) -> None:
    """The negative control of the suite's statistical test: p is at most its threshold."""
    with pytest.raises(AssertionError, match="the distribution differs: p = "):
        check_drafter(own(drafter), tiny("llama"), PROMPTS)


def test_points_that_change_a_sampled_token_are_found_out() -> None:
    """As if plain decoding had another output."""
    suite = drafter_suite._Suite(NGramDecodingConfig(), tiny("llama"), PROMPTS)
    suite._plain[drafter_suite.SAMPLED] = [[0]] * len(PROMPTS)
    with pytest.raises(AssertionError, match="drafts that are points change no token"):
        suite.sampled_outputs_have_the_distribution_of_plain_decoding()


def test_the_statistic_is_chi_square() -> None:
    """Against scipy, on counts of a fair and of a loaded die; an impossible outcome has p = 0."""
    die = {(n,): 1 / 6 for n in range(6)}
    for counts in ([100, 110, 90, 95, 105, 100], [150, 90, 90, 90, 90, 90]):
        outputs = [(face,) for face, count in enumerate(counts) for _ in range(count)]
        expected = chisquare(counts).pvalue
        assert distribution.p_value(outputs, die) == pytest.approx(expected, rel=1e-9)
    assert distribution.p_value([(7,)] * 100, die) == 0.0


def test_the_exact_distribution_is_that_of_plain_decoding() -> None:
    """Against transformers: the product of the probabilities along each path."""
    machine = drafter_suite._Suite(NGramDecodingConfig(), tiny("llama"), PROMPTS)._engine(
        drafts=False
    )
    exact = distribution.exact_distribution(machine, PROMPTS[0])
    assert len(exact) == distribution.WIDTH**distribution.LENGTH
    assert sum(exact.values()) == pytest.approx(1.0)
    for outcome in list(exact)[::7]:
        prob = 1.0
        for index, token in enumerate(outcome):
            prob *= float(probs_after((*PROMPTS[0], *outcome[:index]))[token])
        assert exact[outcome] == pytest.approx(prob, rel=1e-3)
    assert min(exact.values()) * distribution.NUM_SAMPLES > distribution.MIN_EXPECTED, (
        "no outcome is lumped with others here"
    )
