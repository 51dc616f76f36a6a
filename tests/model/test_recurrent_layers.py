"""Models with recurrent layers generate what transformers does, whatever becomes of their states.

Every family of ``models.RECURRENT`` decodes in mixed batches; a few of them, with the gated delta
rule, Mamba-2, Mamba-1 and short convolutions, do everything else. ``tests/engine`` has random
operations on two of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import adapters
import drafters
import mtp_modules
from eagle_heads import random_head
from engines import GREEDY, drain, engine, engine_over, expect_empty, load, outputs
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.engine import Engine
from forethought.errors import ModelError
from forethought.kv.recurrent import RecurrentStates, RecurrentStorage
from forethought.llm.snapshot import SnapshotStore
from forethought.model import loader
from forethought.model.adapter import read_adapter
from forethought.speculative.drafter import Drafter
from medusa_heads import shared_heads
from models import (
    RECURRENT,
    RECURRENT_VARIANTS,
    greedy,
    prompts,
    save_with_vision,
    tiny,
    transformers_model,
)
from redrafter_heads import random_head as redrafter_head
from turns import by_turns

PROMPTS = prompts((3, 17, 1, 30, 90))
NEW = 14
FEW = ["qwen3_5", "bamba", "jamba", "lfm2"]
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def states_of(machine: Engine) -> RecurrentStates:
    storage = machine.runner.storage
    assert isinstance(storage, RecurrentStorage)
    return storage.states


def generated(machine: Engine, **changes: object) -> list[list[int]]:
    """Requests that come one after the other, and what each has generated at the end."""
    sequences = []
    for prompt in PROMPTS:
        sequences += machine.add(prompt, GREEDY.replace(max_tokens=NEW, **changes))
        machine.step()
    drain(machine)
    expect_empty(machine)
    return outputs(sequences)


@pytest.mark.parametrize("architecture", by_turns([*RECURRENT, *RECURRENT_VARIANTS], every=2))
def test_requests_that_come_and_go_generate_what_transformers_does(architecture: str) -> None:
    """Prompts are cut into chunks that end anywhere, beside decodes."""
    machine = engine(architecture, pages=80, max_num_tokens=23)
    assert generated(machine) == greedy(tiny(architecture), PROMPTS, NEW)


@pytest.mark.parametrize("architecture", FEW)
def test_a_prompt_that_is_known_up_to_a_state_is_computed_from_there(architecture: str) -> None:
    machine = engine(architecture, pages=400, page_size=8)
    prompt = PROMPTS[4]
    for cached in (0, 64):
        [sequence] = machine.add(prompt, GREEDY.replace(max_tokens=NEW))
        drain(machine)
        assert sequence.output == greedy(tiny(architecture), [prompt], NEW)[0]
        assert sequence.usage.cached == cached
    expect_empty(machine)


def failing(monkeypatch: pytest.MonkeyPatch, machine: Engine) -> None:
    """Have the next forward of several rows fail."""
    forward, failed = machine.runner.forward, list[int]()

    def compute(rows: Sequence[Any], *arguments: Any) -> Any:
        if len(rows) > 1 and not failed:
            failed.append(len(rows))
            raise RuntimeError("this forward fails")
        return forward(rows, *arguments)

    monkeypatch.setattr(machine.runner, "forward", compute)


def answers(architecture: str) -> dict[tuple[int, ...], list[int]]:
    texts = greedy(tiny(architecture), PROMPTS, NEW)
    return {tuple(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}


def user_provided(drafter: Drafter, size: int) -> list[DecodingBaseConfig]:
    return [
        UserProvidedDecodingConfig(max_draft_len=4, max_total_draft_tokens=size, drafter=drafter)
    ]


DRAFTERS: dict[str, Callable[[str], list[DecodingBaseConfig]]] = {
    "always right": lambda name: user_provided(drafters.oracle(answers(name)), 4),
    "always wrong": lambda name: user_provided(drafters.adversary(answers(name)), 4),
    "bush": lambda name: user_provided(drafters.bush(answers(name)), 8),
    "ngram": lambda _: [NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=1)],
    "draft model": lambda _: [
        DraftTargetDecodingConfig(max_draft_len=4, speculative_model=tiny("llama"))
    ],
    "pearl": lambda _: [PearlDecodingConfig(max_draft_len=3, speculative_model=tiny("llama"))],
    "eagle3": lambda _: [
        EagleDecodingConfig(max_draft_len=4, speculative_model=random_head("eagle3"))
    ],
    "eagle3 tree": lambda _: [
        EagleDecodingConfig(eagle_choices=PATHS, speculative_model=random_head("eagle3"))
    ],
    "medusa": lambda _: [
        MedusaDecodingConfig(medusa_choices=PATHS, speculative_model=shared_heads())
    ],
    "redrafter": lambda _: [
        ReDrafterDecodingConfig(max_draft_len=3, speculative_model=redrafter_head())
    ],
    "mtp": lambda name: [
        MTPDecodingConfig(max_draft_len=3, speculative_model=mtp_modules.saved(name, 1, "qwen"))
    ],
}


WITH_DRAFTERS = [
    *("qwen3_5", "bamba"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo_hybrid", "kimi_linear")),
    pytest.param("zamba2_shared", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("architecture", WITH_DRAFTERS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_tokens_of_plain_decoding(name: str, architecture: str) -> None:
    if name == "mtp" and architecture != "qwen3_5":
        pytest.skip("modules of the layout of Qwen3.5")
    machine = engine(architecture, pages=120, speculative=DRAFTERS[name](architecture))
    assert generated(machine) == greedy(tiny(architecture), PROMPTS, NEW)
    assert machine.stats.drafted > 0 or name == "pearl"  # which waits to be right once
    assert machine.stats.accepted > 10 or name not in ("always right", "bush")
    assert machine.stats.draft_failures == machine.stats.failed_forwards == 0


@pytest.mark.parametrize("architecture", FEW)
def test_without_cpp_modules_of_transformers_compute_drafts(architecture: str) -> None:
    lm = loader.load(tiny(architecture), dtype="float32", forward="torch")
    machine = engine_over(lm, pages=120, speculative=DRAFTERS["bush"](architecture))
    assert generated(machine) == greedy(tiny(architecture), PROMPTS, NEW)
    assert machine.stats.accepted > 10
    assert machine.stats.draft_failures == machine.stats.failed_forwards == 0


@pytest.mark.parametrize("name", ["always right", "bush", "eagle3"])
def test_drafts_do_not_change_what_a_seed_draws(name: str) -> None:
    seeded = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
    plain = generated(engine("qwen3_5", pages=120), **seeded)
    machine = engine("qwen3_5", pages=120, speculative=DRAFTERS[name]("qwen3_5"))
    assert generated(machine, **seeded) == plain


@pytest.mark.parametrize("architecture", FEW)
def test_a_sequence_goes_on_from_any_length_that_it_had(architecture: str) -> None:
    """Forks and rewinds, also to where no state is kept any more."""
    machine = engine(architecture, pages=120, page_size=8)
    prompt = PROMPTS[3]
    [parent] = machine.add(prompt, GREEDY.replace(max_tokens=NEW), keep=True)
    drain(machine)
    whole = list(parent.tokens)
    for length in (len(whole) - 1, len(prompt) + 5, len(prompt), 9, 1):
        child = machine.fork(parent, length)
        machine.resume(child, GREEDY.replace(max_tokens=4))
        drain(machine)
        assert child.output == greedy(tiny(architecture), [whole[:length]], 4)[0]
        machine.close(child)
    machine.rewind(parent, len(prompt) + 3)
    machine.extend(parent, [5, 6, 7])
    known = list(parent.tokens)
    machine.resume(parent, GREEDY.replace(max_tokens=4))
    drain(machine)
    assert parent.output == greedy(tiny(architecture), [known], 4)[0]
    machine.close(parent)
    expect_empty(machine)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("parent_first", [False, True])
@pytest.mark.parametrize("architecture", FEW)
def test_sequences_that_share_pages_go_on_in_one_step_from_their_own_states(
    architecture: str, parent_first: bool, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is two tokens ahead drops no state from which another one goes on, also where they
    are computed one by one, as a forward of all of them has failed.
    """
    machine = engine(architecture, pages=120, page_size=8)
    [parent] = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=NEW), keep=True)
    drain(machine)
    whole = list(parent.tokens)
    children = [machine.fork(parent, len(whole) - count) for count in range(5)]
    for sequence in [parent, *children] if parent_first else [*children, parent]:
        machine.resume(sequence, GREEDY.replace(max_tokens=4))
    if one_by_one:
        failing(monkeypatch, machine)
    drain(machine)
    for count, child in enumerate(children):
        known = whole[: len(whole) - count]
        assert child.output == greedy(tiny(architecture), [known], 4)[0]
        assert child.usage.prefilled <= 2 or count > 2  # of which no state is kept
        machine.close(child)
    assert parent.output == greedy(tiny(architecture), [whole], 4)[0]
    assert machine.stats.failed_forwards == one_by_one
    machine.close(parent)
    expect_empty(machine)


def test_of_a_model_that_also_sees_images_the_language_part_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_vision(tmp_path / "seeing")
    machine = engine_over(loader.load(tmp_path / "seeing", dtype="float32"), pages=80)
    assert generated(machine) == greedy(tmp_path / "seeing", PROMPTS, NEW)
    assert "seeing also sees images" in caplog.text


@pytest.mark.parametrize(
    "architecture", ["qwen3_5", "bamba", "lfm2", "olmo_hybrid", "kimi_linear", "jamba", "zamba2"]
)
def test_an_adapter_adds_to_linears_of_recurrent_layers(architecture: str, tmp_path: Path) -> None:
    """Of the tokens that have it, in a batch with others, drafts among them."""
    targets = ("q_proj", "in_proj", "in_proj_qkv", "in_proj_b", "out_proj", "x_proj", "b_proj")
    targets = (*targets, "g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj", "o_proj")
    targets = (*targets, "kv_a_proj_with_mqa", "kv_b_proj", "gate_up_proj")
    matrices = adapters.random_tensors(tiny(architecture), targets)
    adapters.save(tmp_path / "one", matrices)
    adapters.merged(tiny(architecture), matrices).save_pretrained(tmp_path / "merged")
    assert any("in_proj" in name or "b_proj" in name for name in matrices)
    machine = engine(
        architecture, pages=160, speculative=[NGramDecodingConfig(max_matching_ngram_size=1)]
    )
    machine.adapters.add(machine.runner.lm.place(read_adapter("one", tmp_path / "one")))
    chosen = ["one", "", "one", "", "one"]
    sequences = []
    for prompt, name in zip(PROMPTS, chosen, strict=True):
        sequences += machine.add(prompt, GREEDY.replace(max_tokens=NEW, adapter=name))
        machine.step()
    drain(machine)
    expect_empty(machine)
    for prompt, name, sequence in zip(PROMPTS, chosen, sequences, strict=True):
        directory = tmp_path / "merged" if name else tiny(architecture)
        assert sequence.output == greedy(directory, [prompt], NEW)[0]


def test_a_fork_copies_neither_keys_nor_states() -> None:
    machine = engine("qwen3_5", pages=40)
    [parent] = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=2), keep=True)
    drain(machine)
    used, num_states = machine.pool.in_use, len(states_of(machine))
    child = machine.fork(parent)
    assert (machine.pool.in_use, len(states_of(machine))) == (used, num_states)
    machine.close(child)
    machine.close(parent)
    expect_empty(machine)


def test_a_state_that_is_dropped_costs_time_and_no_token() -> None:
    """Here all of every third step, as by many other sequences."""
    machine = engine("qwen3_5", pages=80)
    states, limit = states_of(machine), RecurrentStates.limit
    calls = iter(range(1000))

    def crowded(spared: Collection[int]) -> None:
        limit(states, spared)
        if next(calls) % 3 == 2:
            states.drop(range(machine.pool.num_pages * machine.pool.page_size))

    states.limit, states.max_states = crowded, -1  # type: ignore[method-assign]
    assert generated(machine) == greedy(tiny("qwen3_5"), PROMPTS, NEW)
    plain = engine("qwen3_5", pages=80)
    generated(plain)
    assert machine.stats.steps > plain.stats.steps
    assert machine.stats.failures == 0


@pytest.mark.parametrize("page_size", [8, 12])
def test_decoding_keeps_few_states_of_a_sequence(page_size: int) -> None:
    """Those after its last two tokens and every whole pages of 64 tokens, however long it runs."""
    machine = engine("qwen3_5", pages=40, page_size=page_size, max_length=200)
    machine.add(PROMPTS[0], GREEDY.replace(max_tokens=160, ignore_eos=True))
    drain(machine)
    assert len(states_of(machine)) <= 3 + 160 // 64


def test_states_take_no_more_than_keys_and_values_beside_those_of_running_sequences() -> None:
    machine = engine("qwen3_5", pages=120, page_size=8, max_batch_size=4)
    states, storage = states_of(machine), machine.runner.storage
    assert isinstance(storage, RecurrentStorage)
    assert states.max_states == 120 * storage.bytes_per_page // storage.state_bytes
    states.max_states = 5
    sequences = [machine.add(prompt, GREEDY)[0] for prompt in prompts((70,) * 6)]
    while machine.has_work:
        machine.step()
        assert len(states) <= 2 * 4 + 4 * 2  # those of a step come before the next one drops any
    texts = greedy(tiny("qwen3_5"), prompts((70,) * 6), len(sequences[0].output))
    assert outputs(sequences) == texts
    expect_empty(machine)


def test_states_of_a_long_prompt_do_not_push_out_those_of_the_others() -> None:
    """Nothing of a row is computed twice, though there is room for no state but theirs."""
    machine = engine("qwen3_5", pages=400, page_size=8, max_num_tokens=256, max_length=1100)
    states_of(machine).max_states = 0
    texts = prompts((900, 7, 900, 11))
    sequences = [machine.add(text, GREEDY.replace(max_tokens=8))[0] for text in texts]
    drain(machine)
    assert outputs(sequences) == _each_alone(texts, "qwen3_5")
    assert [sequence.usage.prefilled for sequence in sequences] == [len(text) for text in texts]
    expect_empty(machine)


def test_a_prompt_that_goes_token_by_token_leaves_no_more_states_than_another() -> None:
    """Modules of Mamba-1 take no run of several tokens after a state."""
    lm = loader.load(tiny("jamba"), dtype="float32", forward="torch")
    machine = engine_over(lm, pages=60, page_size=8, max_num_tokens=32)
    [sequence] = machine.add(PROMPTS[4], GREEDY.replace(max_tokens=1))
    drain(machine)
    assert sequence.output == greedy(tiny("jamba"), [PROMPTS[4]], 1)[0]
    assert len(sequence.tokens) == 91
    assert len(states_of(machine)) <= 4 + 91 // 64
    expect_empty(machine)


@functools.cache
def shared_prompts(count: int) -> list[list[int]]:
    """Of which three at a time begin alike."""
    stems = prompts((64, 40, 70))
    tails = prompts(tuple(1 + number % 9 for number in range(count)), 2)
    return [stems[number % 3] + tail for number, tail in enumerate(tails)]


def _each_alone(texts: Sequence[list[int]], architecture: str) -> list[list[int]]:
    return greedy(tiny(architecture), texts, 8)


@pytest.mark.parametrize("count", [18, pytest.param(200, marks=pytest.mark.slow)])
def test_prefixes_and_drafts_of_mtp_together_change_no_token(count: int) -> None:
    texts = shared_prompts(count)
    machine = engine(
        "qwen3_5", pages=300, page_size=8, speculative=DRAFTERS["mtp"]("qwen3_5"), max_length=200
    )
    sequences = [machine.add(text, GREEDY.replace(max_tokens=8))[0] for text in texts]
    drain(machine)
    assert outputs(sequences) == _each_alone(texts, "qwen3_5")
    assert machine.stats.cached > 0
    assert machine.stats.drafted > 0
    expect_empty(machine)


def test_a_snapshot_has_the_states_after_its_last_token(tmp_path: Path) -> None:
    machine = engine("qwen3_5", pages=40)
    [sequence] = machine.add(PROMPTS[3], GREEDY.replace(max_tokens=5), keep=True)
    drain(machine)
    store = SnapshotStore(tmp_path, tiny("qwen3_5"), machine.runner.storage)
    store.save("one", machine.capture(sequence, sequence.tokens))
    other = engine("qwen3_5", pages=40)
    restored = other.restore(store.load("one"))
    other.resume(restored, GREEDY.replace(max_tokens=6))
    drain(other)
    assert restored.output == greedy(tiny("qwen3_5"), [sequence.tokens], 6)[0]
    assert restored.usage.prefilled == 1
    other.close(restored)
    machine.close(sequence)
    expect_empty(machine)
    expect_empty(other)


@pytest.mark.parametrize(
    ("name", "target"), by_turns(["draft model", "pearl"], ["qwen3_5", "llama"])
)
def test_a_draft_model_may_have_recurrent_layers(name: str, target: str) -> None:
    """It drafts what it would generate itself: all of it is accepted where it is the target."""
    draft_model = {"max_draft_len": 3, "speculative_model": tiny("qwen3_5")}
    kind = DraftTargetDecodingConfig if name == "draft model" else PearlDecodingConfig
    for page_size in (4, 3):
        machine = engine(target, pages=120, page_size=page_size, speculative=[kind(**draft_model)])
        assert generated(machine) == greedy(tiny(target), PROMPTS, NEW)
        assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
        if target == "qwen3_5" and name == "draft model":
            assert machine.stats.accepted == machine.stats.drafted > 30


@pytest.mark.parametrize("target", ["qwen3_5", "llama"])
def test_pearl_keeps_few_states_of_its_draft_model(target: str) -> None:
    """Beside those of a block: after two tokens and every 64; of others as many as there is room
    for."""
    config = PearlDecodingConfig(max_draft_len=3, speculative_model=tiny("qwen3_5"))
    machine = engine(target, pages=40, max_length=200, speculative=[config])
    drafter: Any = machine.speculation.drafters[0].drafter
    states = drafter._storage.states
    for most in (2 + 3 + 160 // 64, 8):
        machine.add(PROMPTS[0], GREEDY.replace(max_tokens=160, ignore_eos=True))
        while machine.has_work:
            machine.step()
            drafter._join()
            assert len(states) <= most + 2 + 3
        states.max_states = 0
    assert machine.stats.draft_failures == 0
    expect_empty(machine)


BRANCHING = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]]
DRAFTED: dict[str, dict[str, Any]] = {
    "tree": {"draft_choices": BRANCHING},
    "trunk": {"draft_choices": [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1, 0]]},
    "sampled chain": {"max_draft_len": 3, "draft_sampling": "sampled"},
    "sampled tree": {"draft_choices": BRANCHING, "draft_sampling": "sampled"},
}


def drafting(target: str, name: str, draft_model: str, **limits: Any) -> Engine:
    config = DraftTargetDecodingConfig(speculative_model=tiny(draft_model), **DRAFTED[name])
    return engine(target, pages=160, speculative=[config], **limits)


@pytest.mark.parametrize(("name", "draft_model"), by_turns([*DRAFTED], ["qwen3_5", "jamba"]))
def test_a_draft_model_with_recurrent_layers_drafts_trees_and_samples(
    name: str, draft_model: str
) -> None:
    """Of a greedy request samples are greedy chains. Where it is the target, the most probable
    path is accepted.
    """
    for target in (draft_model, "llama"):
        machine = drafting(target, name, draft_model, page_size=3)
        assert generated(machine) == greedy(tiny(target), PROMPTS, NEW)
        assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
        assert machine.stats.drafted > 30
        assert machine.stats.accepted > 40 or target == "llama"


@pytest.mark.parametrize("target", ["qwen3_5", "llama"])
@pytest.mark.parametrize("name", ["tree", "trunk"])
def test_trees_of_a_draft_model_with_recurrent_layers_do_not_change_what_a_seed_draws(
    name: str, target: str
) -> None:
    seeded = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
    machine = drafting(target, name, "qwen3_5")
    assert generated(machine, **seeded) == generated(engine(target, pages=160), **seeded)
    assert machine.stats.draft_failures == machine.stats.failed_forwards == 0
    assert machine.stats.accepted > (15 if target == "qwen3_5" else 0)


def test_nodes_of_a_tree_go_on_from_the_states_of_their_parents() -> None:
    """Each is what transformers gives its rank, after all tokens of its path."""
    machine = drafting("llama", "tree", "qwen3_5")
    drafter, seen = machine.speculation.drafters[0].drafter, list[tuple[list[int], int, int]]()
    propose, module = drafter.prepare_draft_tokens, transformers_model(tiny("qwen3_5"))

    def watched(scheduled: Any, manager: Any = None) -> None:
        propose(scheduled, manager)
        for request in scheduled.generation_requests:
            paths: list[list[int]] = []
            for node, token in enumerate(request.draft.tokens):
                parent, rank = request.draft.parents[node], BRANCHING[node][-1]
                paths.append([*(paths[parent] if parent >= 0 else request.tokens), token])
                seen.append((paths[-1][:-1], rank, token))

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign]
    machine.add(PROMPTS[1], GREEDY.replace(max_tokens=NEW))
    drain(machine)
    assert len(seen) > 60
    with torch.inference_mode():
        for known, rank, token in seen:
            logits = module(torch.tensor([known])).logits[0, -1]
            assert int(logits.topk(2).indices[rank]) == token


@pytest.mark.parametrize("architecture", FEW)
def test_sequences_with_recurrent_layers_do_not_attend_to_each_other(architecture: str) -> None:
    machine = engine(architecture, pages=40)
    one, other = (machine.open([5, 6, number]) for number in (1, 2))
    with pytest.raises(ModelError, match=r"cannot attend to each other.*recurrent layers"):
        machine.attend_to(one, {other: 2})
    machine.close(one)
    machine.close(other)
    expect_empty(machine)


@pytest.mark.parametrize("architecture", FEW)
def test_quantised_weights_are_drafted_for_without_a_change(architecture: str) -> None:
    """Convolutions stay as they are, and so do the step widths of Mamba-1."""
    lm = loader.load(tiny(architecture), dtype="float32", quantization="w8a8", forward="auto")
    plain = generated(engine_over(lm, pages=120))
    answered = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)}
    drafting = user_provided(drafters.bush(answered), 8)
    machine = engine_over(lm, pages=120, speculative=drafting)
    assert generated(machine) == plain
    assert machine.stats.accepted > 10


@pytest.mark.parametrize("forward", ["torch", "auto"])
@pytest.mark.parametrize("architecture", FEW)
def test_in_bfloat16_a_token_is_the_most_probable_but_for_rounding(
    architecture: str, forward: loader.Forward
) -> None:
    lm = loader.load(tiny(architecture), dtype="bfloat16", forward=forward)
    machine = engine_over(lm, pages=80)
    same = sum(
        one == other
        for text, expected in zip(
            generated(machine), greedy(tiny(architecture), PROMPTS, NEW), strict=True
        )
        for one, other in zip(text[:3], expected[:3], strict=True)
    )
    assert same > len(PROMPTS)  # of three tokens each; random weights have near ties
    assert lm.dtype == torch.bfloat16
    assert load(architecture).state_bytes > 0
