"""The engine with drafters: the same tokens as without, in fewer steps, and no page left behind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import drafters
from eagle_heads import random_head as random_eagle
from engines import drain, engine, expect_empty, outputs
from exact_confidence import exact_confidence
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.engine import LlmArgs
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.errors import RequestError
from forethought.llm.thinking import ThinkingRule
from forethought.model.attention import sdpa
from forethought.outputs import TokenConfidence
from forethought.speculative.drafter import Draft, Drafter, DraftKind, DraftRequest, ResourceManager
from medusa_heads import shared_heads
from models import VOCAB, greedy, logits_lost, prompts, tiny
from mtp_modules import saved
from redrafter_heads import random_head
from turns import by_turns

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPTS = prompts((1, 4, 9, 17, 30, 5, 12))
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def plain(count: int = 7, tokens: int = 64) -> dict[tuple[int, ...], list[int]]:
    """What transformers says, greedily."""
    return {
        tuple(prompt): answer
        for prompt, answer in zip(
            PROMPTS[:count], greedy(tiny("llama"), PROMPTS[:count], tokens), strict=True
        )
    }


def provided(drafter: Drafter, length: int = 4, nodes: int | None = None) -> DecodingBaseConfig:
    return UserProvidedDecodingConfig(
        max_draft_len=length, max_total_draft_tokens=nodes or length, drafter=drafter
    )


def drafting(name: str, architecture: str = "llama") -> list[DecodingBaseConfig]:
    model = {"max_draft_len": 4, "speculative_model": tiny(architecture, seed=7)}
    same = {"max_draft_len": 4, "speculative_model": tiny(architecture)}
    tree = {"draft_choices": PATHS, "speculative_model": tiny(architecture)}
    modules = functools.partial(saved, architecture)
    sizes = {} if architecture == "llama" else {"num_key_value_heads": 4}
    eagle = functools.partial(random_eagle, **sizes)
    return {
        "none": list,
        "ngram": lambda: [NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3)],
        "suffix": lambda: [SuffixDecodingConfig(max_draft_len=8)],
        "draft model, random": lambda: [DraftTargetDecodingConfig(**model)],
        "draft model = target": lambda: [DraftTargetDecodingConfig(**same)],
        "draft model, tree": lambda: [DraftTargetDecodingConfig(**tree)],
        "pearl": lambda: [PearlDecodingConfig(**same)],
        "medusa": lambda: [MedusaDecodingConfig(speculative_model=shared_heads())],
        "medusa, most probable": lambda: [
            MedusaDecodingConfig(
                speculative_model=shared_heads(), tree="most_probable", min_draft_probability=0.001
            )
        ],
        "mtp, replayed": lambda: [MTPDecodingConfig(max_draft_len=4, speculative_model=modules())],
        "mtp, one per place": lambda: [
            MTPDecodingConfig(max_draft_len=4, speculative_model=modules(count=2))
        ],
        "redrafter": lambda: [ReDrafterDecodingConfig(speculative_model=random_head())],
        "eagle 1": lambda: [EagleDecodingConfig(max_draft_len=4, speculative_model=eagle("eagle"))],
        "eagle 3": lambda: [EagleDecodingConfig(max_draft_len=4, speculative_model=eagle())],
        "eagle 3, static tree": lambda: [
            EagleDecodingConfig(eagle_choices=PATHS, speculative_model=eagle())
        ],
        "eagle 3, dynamic tree": lambda: [
            EagleDecodingConfig(
                max_draft_len=4,
                use_dynamic_tree=True,
                dynamic_tree_max_topK=3,
                speculative_model=eagle(),
            )
        ],
        "oracle": lambda: [provided(drafters.oracle(plain()))],
        "adversary": lambda: [provided(drafters.adversary(plain()))],
        "static tree": lambda: [provided(drafters.bush(plain(), 3), 4, 12)],
    }[name]()


NAMES = [
    "none",
    "ngram",
    "suffix",
    "draft model, random",
    "draft model = target",
    "draft model, tree",
    "pearl",
    "medusa",
    "medusa, most probable",
    "mtp, replayed",
    "mtp, one per place",
    "redrafter",
    "eagle 1",
    "eagle 3",
    "eagle 3, static tree",
    "eagle 3, dynamic tree",
    "oracle",
    "adversary",
    "static tree",
]


def run(machine: Engine, count: int, params: SamplingParams = GREEDY) -> list[list[int]]:
    sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS[:count]]
    drain(machine)
    return outputs(sequences)


def settings_of_drafters() -> list[Any]:
    """Page size, chunked prefill and prefix cache, with batches of 1 and 7 by turns, so that every
    three of the four occur together. Of the four settings with each batch, a drafter has one among
    the quick tests, the next drafter the next one."""
    cases = []
    for number, name in enumerate(NAMES):
        counts = {1: 0, 7: 0}
        for page_size, chunked, reuse in itertools.product((1, 16), (True, False), (True, False)):
            batch = 7 if chunked ^ reuse ^ (page_size == 16) else 1
            is_slow = counts[batch] != number % 4
            counts[batch] += 1
            words = (name, page_size, "chunked" if chunked else "whole prompts")
            cases.append(
                pytest.param(
                    *(name, page_size, chunked, reuse, batch),
                    id="-".join(map(str, (*words, "prefix cache" if reuse else "no prefix cache"))),
                    marks=[pytest.mark.slow] if is_slow else [],
                )
            )
    return cases


@pytest.mark.parametrize(("name", "page_size", "chunked", "reuse", "batch"), settings_of_drafters())
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    name: str, page_size: int, chunked: bool, reuse: bool, batch: int
) -> None:
    machine = engine(
        pages=1024 // page_size,
        page_size=page_size,
        reuse=reuse,
        speculative=drafting(name),
        chunked_prefill=chunked,
        max_num_tokens=24 if chunked else 96,
    )
    expected = list(plain().values())[:batch]
    assert run(machine, batch) == expected
    assert run(machine, batch) == expected  # with whatever the first round has left behind
    expect_empty(machine)


@pytest.mark.parametrize(
    ("name", "dtype"), by_turns(NAMES[: NAMES.index("oracle")], ["bfloat16", "float16"])
)
def test_every_drafter_drafts_in_half_precision_where_each_head_has_its_own_keys(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At batch 1 and 2, on the code path of CPUs with AMX and on that of CPUs without it."""
    params = GREEDY.replace(max_tokens=28)
    for fewest in (sdpa.MIN_QUERIES_WITH_AMX, sdpa.MIN_QUERIES_WITHOUT_AMX):
        monkeypatch.setattr(sdpa, "MIN_QUERIES", fewest)
        machine = engine(
            "llama_mha", page_size=16, dtype=dtype, speculative=drafting(name, "llama_mha")
        )
        for batch in (1, 2):
            sequences = [machine.add(prompt, params)[0] for prompt in PROMPTS[2 : 2 + batch]]
            assert [event.error for event in drain(machine) if event.error] == []
            for sequence in sequences:
                lost = logits_lost(
                    tiny("llama_mha"),
                    machine.runner.lm.dtype,
                    sequence.tokens[: sequence.prompt_length],
                    sequence.output,
                )
                assert float(lost.max()) < 0.2
        assert machine.stats.draft_failures == 0
        assert name == "none" or machine.stats.drafted > 0
        expect_empty(machine)


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
CHANGED = SamplingParams(
    temperature=0.8,
    seed=11,
    max_tokens=40,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 2.0, 9: -3.0},
    min_tokens=20,
)


REPEATING = SAMPLED.replace(
    temperature=0.5,
    top_n_sigma=4.0,
    xtc_probability=0.3,
    xtc_threshold=0.02,
    dry_multiplier=1.5,
    dry_allowed_length=1,
    dry_sequence_breakers=(),
)
"""With the samplers of llama.cpp, of which DRY reads the drafted tokens."""


@pytest.mark.parametrize(
    "params",
    [
        SAMPLED,
        CHANGED,
        CHANGED.replace(temperature=0.0),
        REPEATING,
        REPEATING.replace(temperature=0.0),
    ],
)
@pytest.mark.parametrize("kind", ["oracle", "adversary", "tree"])
def test_sampled_tokens_are_those_of_plain_decoding_token_for_token(
    kind: str, params: SamplingParams
) -> None:
    expected = run(engine(pages=128), 5, params)
    answers = {tuple(PROMPTS[i]): [*said, *[4] * 50] for i, said in enumerate(expected)}
    make = {"oracle": drafters.oracle, "adversary": drafters.adversary, "tree": drafters.bush}
    machine = engine(pages=128, speculative=[provided(make[kind](answers), 4, 8)])
    assert run(machine, 5, params) == expected
    if kind == "oracle":
        assert machine.stats.accepted > 60
    expect_empty(machine)


def test_a_seeded_request_samples_the_same_tokens_in_any_batch_with_drafts() -> None:
    config = NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1)
    alone = run(engine(pages=128, speculative=[config]), 1, SAMPLED)
    assert run(engine(pages=128, speculative=[config]), 6, SAMPLED)[:1] == alone


OPEN, CLOSE = 5, 6
CLOSING = (CLOSE, 7, 8)
THINKING = ThinkingRule(
    "<think>",
    "</think>",
    CLOSING,
    budget=13,
    soft=None,
    piece=lambda token: {OPEN: "<think>", CLOSE: "</think>"}.get(token, "a"),
    opening=None,
    eos_ids=frozenset({2}),
    vocab_size=VOCAB,
)


def think(machine: Engine, params: SamplingParams) -> list[list[int]]:
    """Outputs of prompts that open a thought, three samples of each, with budgets of their own."""
    samples = []
    for number, prompt in enumerate(PROMPTS[:4]):
        rule = replace(THINKING, budget=[0, 3, 13, 27][number])
        samples += machine.add(
            [*prompt, OPEN],
            params.replace(n=3, thinking_budget=rule.budget),
            constraints=rule.constraints(None),
        )
    drain(machine)
    return outputs(samples)


def thoughtful(temperature: float) -> SamplingParams:
    return GREEDY.replace(temperature=temperature, seed=3, max_tokens=40, logit_bias={CLOSE: -9})


@functools.cache
def thought(temperature: float) -> list[list[int]]:
    """What is said without a drafter."""
    return think(engine(pages=256), thoughtful(temperature))


@pytest.mark.parametrize(
    ("name", "temperature"),
    by_turns([*NAMES[: NAMES.index("oracle")], "oracle", "adversary", "tree"], [0.0, 1.0]),
)
def test_a_thought_is_closed_at_its_cap_under_every_drafter(name: str, temperature: float) -> None:
    expected = thought(temperature)
    prompts = [(*prompt, OPEN) for prompt in PROMPTS[:4] for _ in range(3)]
    answers = dict(zip(prompts, expected, strict=True))
    known = {"oracle": drafters.oracle, "adversary": drafters.adversary, "tree": drafters.bush}
    configs = [provided(known[name](answers), 4, 8)] if name in known else drafting(name)
    machine = engine(pages=256, speculative=configs)
    found = think(machine, thoughtful(temperature))
    assert found == expected
    for number, output in enumerate(found):
        budget = [0, 3, 13, 27][number // 3]
        assert CLOSE not in output[:budget]
        assert tuple(output[budget : budget + 3]) == CLOSING
    assert name == "none" or machine.stats.drafted > 0
    expect_empty(machine)


@pytest.mark.parametrize("tree", [None, PATHS], ids=["chain", "tree"])
def test_drafts_drawn_from_a_distribution_leave_the_cap_of_a_thought_as_it_is(tree: Any) -> None:
    config = DraftTargetDecodingConfig(
        max_draft_len=None if tree else 3,
        draft_choices=tree,
        speculative_model=tiny("llama"),
        draft_sampling="sampled",
    )
    machine = engine(pages=256, speculative=[config])
    for number, output in enumerate(think(machine, thoughtful(1.0))):
        budget = [0, 3, 13, 27][number // 3]
        assert CLOSE not in output[:budget]
        assert tuple(output[budget : budget + 3]) == CLOSING
    assert machine.stats.accepted > 0
    expect_empty(machine)


def test_an_oracle_needs_ten_decode_steps_for_fifty_tokens_and_an_adversary_forty_nine() -> None:
    prompt, fifty = PROMPTS[2], GREEDY.replace(max_tokens=50)
    for drafter, steps in ((drafters.oracle(plain()), 10), (drafters.adversary(plain()), 49)):
        machine = engine(speculative=[provided(drafter)])
        [sequence] = machine.add(prompt, fifty, keep=True)
        machine.step()  # the prompt
        assert (machine.stats.steps, len(sequence.output)) == (1, 1)
        drain(machine)
        assert machine.stats.steps - 1 == sequence.metrics.steps == steps
        assert sequence.output == plain()[tuple(prompt)][:50]
        assert sequence.metrics.mean_acceptance_length == pytest.approx(49 / steps)
        machine.close(sequence)
        expect_empty(machine)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", ["oracle", "adversary", "static tree", "draft model, tree"])
def test_keys_and_values_after_acceptance_are_those_of_a_fresh_prefill(
    name: str, page_size: int
) -> None:
    sizes: dict[str, Any] = {"pages": 240 // page_size, "page_size": page_size}
    machine = engine(**sizes, speculative=drafting(name))
    added = [machine.add(prompt, GREEDY, keep=True)[0] for prompt in PROMPTS[:2]]
    for _ in range(9):
        machine.step()
    for sequence in added:
        fresh = engine(**sizes, reuse=False, max_num_tokens=128)
        copy = fresh.open(sequence.tokens)
        fresh.resume(copy, GREEDY.replace(max_tokens=1))
        fresh.step()
        for layer in range(len(machine.runner.storage.keys)):
            for mine, other in zip(
                (machine.runner.storage.keys, machine.runner.storage.values),
                (fresh.runner.storage.keys, fresh.runner.storage.values),
                strict=True,
            ):
                here = mine[layer][sequence.table.slots(0, sequence.num_computed)]
                there = other[layer][copy.table.slots(0, sequence.num_computed)]
                assert (here - there).abs().max() < 1e-4
        machine.close(sequence)
    expect_empty(machine)


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_token_beyond_max_tokens_or_the_context_is_given(limit: int) -> None:
    machine = engine(speculative=drafting("oracle"))
    [sequence] = machine.add(PROMPTS[1], GREEDY.replace(max_tokens=limit), keep=True)
    drain(machine)
    assert sequence.output == plain()[tuple(PROMPTS[1])][:limit]
    assert machine.stats.drafted == machine.stats.accepted  # none that could not be taken
    full = engine(speculative=drafting("oracle"), max_length=4 + limit)
    [sequence] = full.add(PROMPTS[1], GREEDY, keep=True)
    drain(full)
    assert sequence.output == plain()[tuple(PROMPTS[1])][:limit]


def test_no_draft_follows_a_prompt_token_be_it_the_only_one_that_is_computed() -> None:
    machine = engine(speculative=drafting("oracle"))
    [sequence] = machine.add(PROMPTS[0], GREEDY)
    assert sequence.num_uncomputed == 1
    machine.step()
    assert (machine.stats.drafted, sequence.metrics.steps) == (0, 0)
    drain(machine)
    assert machine.stats.drafted > 0


def test_a_drafter_is_released_at_the_end_of_a_generation_whose_sequence_is_kept() -> None:
    drafter = drafters.oracle(plain())
    machine = engine(speculative=[provided(drafter)])
    [sequence] = machine.add(PROMPTS[1], GREEDY.replace(max_tokens=12), keep=True)
    drain(machine)
    assert drafter.released == [sequence.id]  # type: ignore[attr-defined]
    machine.close(sequence)
    assert drafter.released == [sequence.id]  # type: ignore[attr-defined]


def test_a_stop_token_in_the_middle_of_an_accepted_draft_ends_the_generation_there() -> None:
    answer = plain()[tuple(PROMPTS[1])]
    for stop in set(answer[:12]):
        params = GREEDY.replace(stop_token_ids=(stop,))
        machine = engine(speculative=drafting("oracle"))
        [sequence] = machine.add(PROMPTS[1], params, keep=True)
        drain(machine)
        assert sequence.output == answer[: answer.index(stop) + 1]
        assert sequence.stop_reason == stop
        assert sequence.num_uncomputed == 1  # as after plain decoding
        machine.close(sequence)
        expect_empty(machine)


def test_log_probabilities_of_accepted_tokens_are_the_targets() -> None:
    params = GREEDY.replace(max_tokens=20, logprobs=3)

    def scores(speculative: Sequence[DecodingBaseConfig]) -> list[dict[int, Any]]:
        machine = engine(speculative=speculative)
        machine.add(PROMPTS[2], params)
        return [each for event in drain(machine) for each in event.logprobs or ()]

    expected, found = scores([]), scores(drafting("static tree"))
    assert len(found) == 20
    for here, there in zip(found, expected, strict=True):
        assert list(here) == list(there)
        assert [x.logprob for x in here.values()] == pytest.approx(
            [x.logprob for x in there.values()], abs=1e-4
        )


def reference_confidences(sequence: Any, k: int) -> list[TokenConfidence]:
    """Those of a finished sequence, from transformers' logits of all its tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([sequence.tokens])).logits[0]
    begin = sequence.prompt_length
    return [
        exact_confidence(logits[begin + at - 1].tolist(), token, k)
        for at, token in enumerate(sequence.output)
    ]


@pytest.mark.parametrize(("name", "temperature"), by_turns(NAMES, [0.0, 0.9]))
def test_confidences_are_those_of_the_targets_logits_under_every_drafter(
    name: str, temperature: float
) -> None:
    plain_params = SamplingParams(max_tokens=20, seed=3, n=2, ignore_eos=True).replace(
        temperature=temperature
    )
    machine = engine(speculative=drafting(name))
    asked = machine.add(PROMPTS[2], plain_params.replace(confidence=5), keep=True)
    silent = machine.add(PROMPTS[3], plain_params, keep=True)
    found: dict[int, list[TokenConfidence]] = {sequence.id: [] for sequence in (*asked, *silent)}
    for event in drain(machine):
        assert len(event.confidences or ()) in (0, len(event.tokens))
        found[event.sequence.id] += event.confidences or ()
    assert not any(found[sequence.id] for sequence in silent), "nobody asked"
    for sequence in asked:
        expected = reference_confidences(sequence, 5)
        assert len(found[sequence.id]) == len(expected) == 20
        for here, there in zip(found[sequence.id], expected, strict=True):
            assert here == pytest.approx(there, abs=2e-4)
    for sequence in (*asked, *silent):
        machine.close(sequence)
    expect_empty(machine)


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: [3] * 50,
        lambda request: [3, 10**9, 4],
        lambda request: [3, -1],
        lambda request: None,
        lambda request: "abc",
        lambda request: [3.5],
        lambda request: Draft([3, 4], (1, 0)),
        lambda request: Draft([3, 4], (-1,)),
        lambda request: Draft([3] * 9, (-1,) * 9),
        lambda request: Draft([3] * 9, tuple(range(-1, 8))),
        lambda request: Draft([3], None, DraftKind.IID, torch.ones(1, 7)),
        lambda request: Draft([3], None, DraftKind.IID, None),
        lambda request: 1 / 0,
    ],
)
def test_what_a_drafter_does_wrong_costs_its_request_the_speculation_alone(answer: Any) -> None:
    def wild(request: DraftRequest) -> Any:
        mine = request.tokens[0] == PROMPTS[1][0]
        return answer(request) if mine else drafters.truth(plain(), request)

    machine = engine(speculative=[provided(drafters.PerRequest(wild))])
    sequences = [machine.add(prompt, GREEDY, keep=True)[0] for prompt in PROMPTS[:3]]
    drain(machine)
    assert outputs(sequences) == list(plain().values())[:3]
    assert sequences[2].metrics.steps == 13  # ceil(63 / 5)
    for sequence in sequences:
        machine.close(sequence)
    expect_empty(machine)


def test_a_request_turns_speculation_off_shortens_it_or_picks_a_drafter() -> None:
    right, wrong = drafters.oracle(plain()), drafters.adversary(plain())
    configs = [
        provided(wrong).model_copy(update={"name": "wrong"}),
        provided(right).model_copy(update={"name": "right"}),
    ]
    machine = engine(speculative=configs, pages=128)

    def steps(**speculation: Any) -> int:
        params = GREEDY.replace(max_tokens=41, speculation=SpeculationParams(**speculation))
        [sequence] = machine.add(PROMPTS[2], params)
        drain(machine)
        assert sequence.output == plain()[tuple(PROMPTS[2])][:41]
        return sequence.metrics.steps

    assert steps() == 40  # the first one has something to say, however wrong
    assert steps(drafter="right") == 8
    assert steps(drafter="right", max_draft_len=1) == 20
    assert steps(enabled=False) == 40
    with pytest.raises(Exception, match=r"unknown drafter 'best'.*right, wrong"):
        steps(drafter="best")


def test_the_second_drafter_is_asked_where_the_first_has_nothing() -> None:
    silent = drafters.PerRequest(lambda request: ())
    configs = [
        provided(silent).model_copy(update={"name": "silent"}),
        provided(drafters.oracle(plain())).model_copy(update={"name": "right"}),
    ]
    machine = engine(speculative=configs)
    [sequence] = machine.add(PROMPTS[2], GREEDY.replace(max_tokens=41))
    drain(machine)
    assert sequence.metrics.steps == 8
    assert sequence.metrics.accepted_by_position == [8, 8, 8, 8]


class Diary(ResourceManager):
    """Records its calls."""

    def __init__(self, most: int = 100) -> None:
        self.most, self.entries = most, list[str]()

    def get_max_resource_count(self) -> int:
        return self.most

    def get_needed_resource_to_completion(self, request: DraftRequest) -> int:
        return 1

    def prepare_resources(self, scheduled_batch: Any) -> None:
        self.entries.append("prepare")

    def update_resources(self, scheduled_batch: Any) -> None:
        self.entries.append("update")

    def free_resources(self, request: DraftRequest) -> None:
        self.entries.append(f"free {request.request_id}")

    def shutdown(self) -> None:
        self.entries.append("shutdown")


def test_a_resource_manager_is_called_in_the_order_of_a_requests_life() -> None:
    diary = Diary()

    def answer(request: DraftRequest) -> list[int]:
        diary.entries.append("draft")
        return drafters.truth(plain(), request)

    drafter = drafters.PerRequest(answer)
    config = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter, resource_manager=diary)
    machine = engine(speculative=[config])
    [sequence] = machine.add(PROMPTS[1], GREEDY.replace(max_tokens=11))
    drain(machine)
    machine.shutdown()
    steps = ["prepare", "draft", "update"]
    assert diary.entries == [*steps, "prepare", "draft", f"free {sequence.id}", "shutdown"]
    assert drafter.released == [sequence.id]
    assert drafter.closed


def test_requests_beyond_the_resources_go_on_without_drafts() -> None:
    config = UserProvidedDecodingConfig(
        max_draft_len=4, drafter=drafters.oracle(plain()), resource_manager=Diary(1)
    )
    machine = engine(speculative=[config])
    params = GREEDY.replace(max_tokens=21)
    first, second = (machine.add(prompt, params)[0] for prompt in PROMPTS[:2])
    drain(machine)
    assert first.metrics.drafted > 0
    assert second.metrics.drafted < first.metrics.drafted
    assert second.output == plain()[tuple(PROMPTS[1])][:21]


def test_draft_slots_are_never_taken_from_another_sequence() -> None:
    machine = engine(pages=17, page_size=4, speculative=drafting("oracle"), reuse=False)
    sequences = [machine.add(prompt, GREEDY.replace(max_tokens=20))[0] for prompt in PROMPTS[:3]]
    plainly = engine(pages=17, page_size=4, reuse=False)
    for prompt in PROMPTS[:3]:
        plainly.add(prompt, GREEDY.replace(max_tokens=20))
    drain(plainly)
    drain(machine)
    assert machine.stats.preemptions <= plainly.stats.preemptions
    assert outputs(sequences) == [answer[:20] for answer in list(plain().values())[:3]]
    expect_empty(machine)


@pytest.mark.parametrize("params", [GREEDY, GREEDY.replace(temperature=1.0, seed=1)])
def test_a_draft_model_ignores_entries_of_tokens_that_were_written_anew(
    params: SamplingParams,
) -> None:
    """Its own model being the target's, every token that it drafts is accepted."""
    config = DraftTargetDecodingConfig(
        max_draft_len=4, speculative_model=tiny("llama"), draft_sampling="sampled"
    )
    machine = engine(page_size=16, speculative=[config])
    [sequence] = machine.add(PROMPTS[2], params.replace(max_tokens=24), keep=True)
    drain(machine)
    machine.rewind(sequence, 12)
    machine.extend(sequence, [(token + 1) % 101 for token in PROMPTS[3][:10]])
    machine.resume(sequence, params.replace(max_tokens=24))
    drain(machine)
    assert machine.stats.accepted == machine.stats.drafted > 30
    machine.close(sequence)
    expect_empty(machine)


@pytest.mark.parametrize(
    "name", ["draft model = target", "mtp, replayed", "mtp, one per place", "eagle 1", "eagle 3"]
)
def test_what_drafters_have_stored_of_a_prompt_is_not_computed_again(name: str) -> None:
    machine = engine(page_size=16, speculative=drafting(name))
    [sequence] = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=20), keep=True)
    for _ in range(8):
        machine.step()
    known = len(PROMPTS[3])
    for draft_cache in machine.speculation.draft_caches:
        assert draft_cache.ready_length(sequence.table, known) == known
    machine.close(sequence)
    expect_empty(machine)


def test_a_fork_of_a_sequence_that_speculates_says_what_its_parent_says() -> None:
    machine = engine(speculative=drafting("static tree"), pages=128)
    [parent] = machine.add(PROMPTS[2], GREEDY, keep=True)
    children = []
    for _ in range(8):
        machine.step()
        child = machine.fork(parent)
        machine.resume(child, GREEDY.replace(max_tokens=9))
        children.append((child, len(parent.output)))
    drain(machine)
    answer = plain()[tuple(PROMPTS[2])]
    assert parent.output == answer
    for child, begin in children:
        assert child.output == answer[begin : begin + 9]
        machine.close(child)
    machine.close(parent)
    expect_empty(machine)


def test_samples_of_one_prompt_draw_the_same_tokens_with_drafts_as_without() -> None:
    params = SAMPLED.replace(n=5)
    machine = engine(pages=128)
    sequences = machine.add(PROMPTS[3], params)
    drain(machine)
    plainly = outputs(sequences)
    config = SuffixDecodingConfig(max_draft_len=4)
    for speculative in ([config], [NGramDecodingConfig(max_draft_len=4)]):
        other = engine(pages=128, speculative=speculative)
        sequences = other.add(PROMPTS[3], params)
        drain(other)
        assert outputs(sequences) == plainly
        expect_empty(other)


def out_of_memory(*args: Any) -> Any:
    raise MemoryError("no plan")


def test_a_step_whose_draft_slots_cannot_be_reserved_goes_on_without_drafts(
    monkeypatch: Any,
) -> None:
    machine = engine(speculative=drafting("oracle"))
    monkeypatch.setattr(machine.scheduler, "reserve_draft_slots", out_of_memory)
    assert run(machine, 2) == list(plain().values())[:2]
    assert machine.stats.drafted == 0


def test_when_planning_itself_fails_the_engine_outlives_it(monkeypatch: Any) -> None:
    machine = engine(speculative=drafting("oracle"), max_batch_size=1)
    machine.add(PROMPTS[1], GREEDY)
    machine.add(PROMPTS[2], GREEDY)  # waits
    machine.step()
    with monkeypatch.context() as patch:
        patch.setattr(machine.scheduler, "plan_decodes", out_of_memory)
        events = machine.step()
    assert len(events) == 2
    for event in events:
        assert isinstance(event.error, RequestError)
        assert isinstance(event.error.__cause__, MemoryError)
        assert "All requests of that moment" in str(event.error)
    expect_empty(machine)
    assert run(machine, 2) == list(plain().values())[:2]


def test_an_interrupt_while_drafting_leaves_every_sequence_as_it_was() -> None:
    calls = itertools.count()

    def answer(request: DraftRequest) -> list[int]:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return drafters.truth(plain(), request)

    machine = engine(speculative=[provided(drafters.PerRequest(answer))])
    [sequence] = machine.add(PROMPTS[1], GREEDY, keep=True)
    with pytest.raises(KeyboardInterrupt):
        drain(machine)
    machine.check_integrity()
    assert sequence.num_uncomputed == 1
    drain(machine)
    assert sequence.output == plain()[tuple(PROMPTS[1])]


@pytest.mark.parametrize("kind", [DraftTargetDecodingConfig, PearlDecodingConfig])
def test_what_drafters_store_is_part_of_the_memory_of_the_cache(kind: Any) -> None:
    config = kind(max_draft_len=2, speculative_model=tiny("llama", seed=7))
    memory = {"kv_cache_config": {"host_cache_size": 200_000}, "dtype": "float32"}
    alone = resolve.build(LlmArgs.from_dict(memory), tiny("llama"))
    both = resolve.build(LlmArgs.from_dict({**memory, "speculative_config": config}), tiny("llama"))
    assert both.pool.num_pages == alone.pool.num_pages // 2
    assert run(both, 2) == list(plain().values())[:2]


@pytest.mark.parametrize(
    "architecture",
    [
        "mistral",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3",
        "phi3",
        "olmo2",
        "glm4",
        "gpt_oss",
        "deepseek_v3",
        "granite",
        "cohere2",
        "gpt2",
        "llama4",
    ],
)
def test_trees_are_exact_for_every_kind_of_attention(architecture: str) -> None:
    texts = PROMPTS[:4]
    answers = greedy(tiny(architecture), texts, 24)
    known = {tuple(text): answer for text, answer in zip(texts, answers, strict=True)}
    bush = drafters.bush(known, 3)
    machine = engine(
        architecture, pages=128, page_size=3, speculative=[provided(bush, 4, 12)], max_num_tokens=40
    )
    sequences = [machine.add(text, GREEDY.replace(max_tokens=24))[0] for text in texts]
    drain(machine)
    assert outputs(sequences) == answers
    assert machine.stats.accepted > 40
    expect_empty(machine)
