"""The MTP module as shipped: small, used by default, and mostly accepted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines import drain
from forethought import LLM, MTPDecodingConfig, SamplingParams
from forethought.assets import heads_dir, problems, reasoner_dir
from forethought.engine.engine import Engine
from forethought.engine.resolve import build_drafter_entry
from forethought.engine.scheduler import Limits
from forethought.kv.storage import KvStorage
from forethought.llm.tokenizer import Tokenizer
from forethought.model import loader
from forethought.model.runner import ModelRunner
from forethought.speculative.drafter import Target
from forethought.speculative.heads.mtp import load_modules
from forethought.training.chat_tokenizer import prompt_text
from mtp_reference import Watch, replayed, vanilla

PROMPTS = [prompt_text(problem["question"]) for problem in problems()[:3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = MTPDecodingConfig(max_draft_len=5, speculative_model=heads_dir("mtp"))
    with LLM(reasoner_dir(), dtype="float32", speculative_config=config) as llm:
        yield llm


def test_the_directory_stays_under_three_megabytes() -> None:
    assert sum(path.stat().st_size for path in heads_dir("mtp").iterdir()) < 3_000_000


def test_two_of_five_drafted_tokens_are_accepted_losslessly(
    llm: LLM,
) -> None:
    """On 3 of the 200 problems; over all of them see the module's card."""
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    with LLM(reasoner_dir(), dtype="float32") as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]
    assert [output.token_ids for output in outputs] == expected
    steps = sum(output.metrics.steps for output in outputs)
    assert 1 + sum(output.metrics.accepted for output in outputs) / steps > 3.0


@pytest.mark.parametrize("one_per_place", [False, True])
def test_cached_inputs_whose_drafted_tokens_were_accepted_stay_right(one_per_place: bool) -> None:
    """Deep in a text, drafts are those of the reference implementation, which has no cache."""
    config = MTPDecodingConfig(
        max_draft_len=4, speculative_model=heads_dir("mtp"), use_mtp_vanilla=one_per_place
    )
    lm = loader.load(reasoner_dir(), dtype="float32")
    runner = ModelRunner(lm, KvStorage(lm.layer_shapes, 64, 16, lm.dtype))
    drafters = [build_drafter_entry(config, Target(runner, 512), 4)]
    machine = Engine(runner, Limits(4, 512, 512), drafters=drafters)
    watch = Watch(machine)
    tokens = Tokenizer.load(reasoner_dir()).encode_more(PROMPTS[0])
    [sequence] = machine.add(tokens, GREEDY.replace(max_tokens=60))
    drain(machine)
    assert sequence.metrics.accepted > 10
    [module] = load_modules(heads_dir("mtp"), lm)
    module.model.set_attn_implementation("eager")
    for text, draft, depth in watch.seen[::4]:
        if one_per_place:
            assert draft == vanilla(reasoner_dir(), [module], text, depth)
        else:
            assert draft == replayed(reasoner_dir(), module, text, depth)


def test_it_has_the_names_of_a_layer_behind_the_targets_last() -> None:
    lm = loader.load(reasoner_dir())
    [module] = load_modules(heads_dir("mtp"), lm)
    assert module.eh_proj.weight.dtype == lm.dtype
    assert module.eh_proj.weight.shape == (256, 512)
