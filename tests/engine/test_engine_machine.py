"""The engine under arbitrary sequences of calls: every token is the one of plain decoding.

Forks of running, waiting and parked sequences, rewinds, extensions, aborts, snapshots, samples,
priorities, salts and a cache that is too small for all of it, in any order, in single or continuous
decode steps, with drafters that are right now and then, forwards that have no memory for several
rows, and one whose logits are NaN.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drafters import PerRequest
from engines import GREEDY, engine_over, expect_empty
from forethought.config.drafters import (
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine.sequence import Sequence, Status
from forethought.errors import CapacityError
from forethought.model import loader
from forethought.model.causal_lm import CausalLM
from forethought.speculative.drafter import Draft, DraftRequest
from models import bigram, prompts, tiny, transformers_model

TOKEN = st.integers(3, 20)
FEW = st.lists(TOKEN, min_size=1, max_size=5)


@functools.cache
def loaded(path: Path) -> CausalLM:
    return loader.load(path, dtype="float32", device="cpu", forward="auto")


@functools.cache
def successors(tokens: tuple[int, ...], path: Path) -> list[int]:
    """The greedy next token after each prefix, according to transformers, without any cache."""
    with torch.inference_mode():
        logits = transformers_model(path)(torch.tensor([tokens])).logits
    best: list[int] = logits[0].argmax(-1).tolist()
    return best


def sometimes_right(path: Path, request: DraftRequest) -> Draft:
    """A tree of two branches, one of which follows the truth for a while."""
    tokens, parents, known = list[int](), list[int](), list(request.tokens)
    truthful = -1
    for depth in range(request.max_draft_len):
        if len(tokens) + 2 > request.max_nodes:
            break
        right = successors(tuple(known), path)[-1]
        chance = (7 * len(known) + depth) % 4
        begin = len(tokens)
        tokens += [right if chance else 3, 4]
        parents += [truthful, begin - 1 if depth and chance == 3 else truthful]
        truthful = begin
        known.append(tokens[begin])
    return Draft(tokens, tuple(parents))


def drafting(name: str, path: Path, draft_path: Path) -> list[DecodingBaseConfig]:
    bush = PerRequest(functools.partial(sometimes_right, path))
    bush.nodes = lambda depth: 2 * depth  # type: ignore[method-assign]
    model = {"speculative_model": draft_path, "max_draft_len": 3}
    trees = {"speculative_model": draft_path, "draft_choices": [[0], [1], [0, 0], [1, 0]]}
    configs: dict[str, list[DecodingBaseConfig]] = {
        "none": [],
        "bush": [
            UserProvidedDecodingConfig(max_draft_len=3, max_total_draft_tokens=6, drafter=bush)
        ],
        "ngram": [NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=1)],
        "draft model": [DraftTargetDecodingConfig(**model)],
        "draft model, tree": [DraftTargetDecodingConfig(**trees)],
    }
    return configs[name]


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine; remembers what each sequence was given, and checks what it drew."""

    architecture = "llama"
    model = staticmethod(tiny)
    """Gives the directories of the target and the draft model."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        tokens=st.integers(48, 120),
        budget=st.integers(6, 30),
        batch=st.integers(2, 6),
        reuse=st.booleans(),
        num_decode_steps=st.sampled_from([1, 8]),
        drafter=st.sampled_from(["none", "bush", "ngram", "draft model", "draft model, tree"]),
    )
    def start(
        self,
        page_size: int,
        tokens: int,
        budget: int,
        batch: int,
        reuse: bool,
        num_decode_steps: int,
        drafter: str,
    ) -> None:
        self.path = self.model(self.architecture)
        self.engine = engine_over(
            loaded(self.path),
            page_size=page_size,
            pages=tokens // page_size,
            max_num_tokens=budget,
            max_batch_size=batch,
            max_length=40,
            reuse=reuse,
            speculative=drafting(drafter, self.path, self.model("llama")),
        )
        self.engine.num_decode_steps = num_decode_steps
        self.most_rows, self.stumbles, self.has_stumbled = 99, False, False
        forward = self.engine.runner.forward

        def unreliable(rows: Any, *readers: Any) -> torch.Tensor:
            if len(rows) > self.most_rows:
                raise RuntimeError("out of memory")
            logits = forward(rows, *readers)
            if self.stumbles and len(logits):
                self.stumbles = False
                return logits * torch.nan
            return logits

        self.engine.runner.forward = unreliable  # type: ignore[method-assign]
        self.sequences: list[Sequence] = []
        self.checked: dict[int, int] = {}

    def pick(self, data: Any, *statuses: Status) -> Sequence | None:
        fitting = [one for one in self.sequences if one.status in statuses]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    @rule(
        length=st.integers(1, 20),
        new=st.integers(1, 12),
        n=st.integers(1, 3),
        keep=st.booleans(),
        salt=st.sampled_from(["", "a"]),
    )
    def add(self, length: int, new: int, n: int, keep: bool, salt: str) -> None:
        params = GREEDY.replace(max_tokens=new, n=n, priority=length % 3, cache_salt=salt)
        added = self.engine.add(prompts((length,), length % 4)[0], params, keep=keep)
        self.sequences += added

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.step():
                assert event.error is None
        self.check()

    @rule(most=st.sampled_from([1, 2, 99]))
    def have_memory_for(self, most: int) -> None:
        self.most_rows = most

    @precondition(lambda self: not self.has_stumbled)
    @rule()
    def stumble(self) -> None:
        self.stumbles = self.has_stumbled = True

    @rule(data=st.data(), generate=st.booleans(), suffix=FEW, new=st.integers(1, 8))
    def fork(self, data: Any, generate: bool, suffix: list[int], new: int) -> None:
        parent = self.pick(data, Status.RUNNING, Status.WAITING, Status.PARKED)
        if parent is None:
            return
        length = data.draw(st.integers(1, len(parent.tokens)))
        child = self.engine.fork(parent, length)
        assert child.tokens == parent.tokens[:length]
        self.sequences.append(child)
        if data.draw(st.booleans()) and length + len(suffix) < 39:
            self.engine.extend(child, suffix)
        self.checked[child.id] = len(child.tokens)  # given, not drawn
        if generate and len(child.tokens) < 40:
            self.engine.resume(child, GREEDY.replace(max_tokens=new))

    @rule(data=st.data())
    def save_and_restore(self, data: Any) -> None:
        source = self.pick(data, Status.RUNNING, Status.WAITING, Status.PARKED)
        if source is None:
            return
        length = data.draw(st.integers(1, len(source.tokens)))
        fork = self.engine.fork(source, length)
        saved = self.engine.capture(fork, fork.tokens)
        self.engine.close(fork)
        with suppress(CapacityError):
            restored = self.engine.restore(saved)
            self.checked[restored.id] = length  # given, not drawn
            self.sequences.append(restored)

    @rule(data=st.data(), new=st.integers(1, 8))
    def resume(self, data: Any, new: int) -> None:
        parked = self.pick(data, Status.PARKED)
        if parked is not None and len(parked.tokens) < 40:
            self.checked[parked.id] = len(parked.tokens)
            self.engine.resume(parked, GREEDY.replace(max_tokens=new))

    @rule(data=st.data())
    def rewind(self, data: Any) -> None:
        parked = self.pick(data, Status.PARKED)
        if parked is not None:
            self.engine.rewind(parked, data.draw(st.integers(1, len(parked.tokens))))

    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        active = self.pick(data, Status.RUNNING, Status.WAITING)
        if active is not None:
            self.engine.abort(active)

    @precondition(lambda self: len(self.sequences) > 6)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        live = self.pick(data, Status.RUNNING, Status.WAITING, Status.PARKED)
        if live is not None:
            self.engine.close(live)

    def check(self) -> None:
        for sequence in self.sequences:
            known = max(self.checked.get(sequence.id, 0), sequence.prompt_length)
            if known < len(sequence.tokens):
                best = successors(tuple(sequence.tokens[:-1]), self.path)
                assert sequence.tokens[known:] == best[known - 1 :]
            self.checked[sequence.id] = len(sequence.tokens)
        self.sequences = [one for one in self.sequences if one.status is not Status.CLOSED]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(500):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work, "the engine did not come to an end"
        self.check()
        for sequence in self.sequences:
            self.engine.close(sequence)
        expect_empty(self.engine)


class GatedDeltaMachine(EngineMachine):
    """The same with recurrent layers, whose states are found by slot."""

    architecture = "qwen3_5"


class Mamba2Machine(EngineMachine):
    architecture = "bamba"


class OutputNormMachine(EngineMachine):
    """Layers that norm what attention gives; two thousand calls, as those of the next two."""

    architecture = "olmo_hybrid"


class LatentKeysMachine(EngineMachine):
    architecture = "kimi_linear"


class SharedBlocksMachine(EngineMachine):
    architecture = "zamba2_shared"


class AcceptedDraftsMachine(SharedBlocksMachine):
    """With a draft model that is often right."""

    architecture = "zamba2"
    model = staticmethod(bigram)


class LongGatedDeltaMachine(GatedDeltaMachine):
    """Ten thousand calls, as those of the next class."""


class LongMamba2Machine(Mamba2Machine):
    pass


SETTINGS = settings(max_examples=25, stateful_step_count=25, deadline=None, print_blob=True)
LONG = settings(SETTINGS, max_examples=400)
EngineMachine.TestCase.settings = SETTINGS
GatedDeltaMachine.TestCase.settings = Mamba2Machine.TestCase.settings = SETTINGS
LongGatedDeltaMachine.TestCase.settings = LongMamba2Machine.TestCase.settings = LONG
for machine in (
    OutputNormMachine,
    LatentKeysMachine,
    SharedBlocksMachine,
    AcceptedDraftsMachine,
):
    machine.TestCase.settings = settings(SETTINGS, max_examples=80)
TestEngineMachine = EngineMachine.TestCase
TestGatedDeltaMachine = GatedDeltaMachine.TestCase
TestMamba2Machine = Mamba2Machine.TestCase
TestLongGatedDeltaMachine = pytest.mark.slow(LongGatedDeltaMachine.TestCase)
TestLongMamba2Machine = pytest.mark.slow(LongMamba2Machine.TestCase)
TestOutputNormMachine = pytest.mark.slow(OutputNormMachine.TestCase)
TestLatentKeysMachine = pytest.mark.slow(LatentKeysMachine.TestCase)
TestAcceptedDraftsMachine = AcceptedDraftsMachine.TestCase
TestSharedBlocksMachine = pytest.mark.slow(SharedBlocksMachine.TestCase)
