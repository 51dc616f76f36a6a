"""The EAGLE-3 head as shipped: small, used by default, and mostly accepted.

What it reaches over more problems says its card.
"""

from __future__ import annotations

import json

import pytest

from forethought import LLM, EagleDecodingConfig, MedusaDecodingConfig, SamplingParams
from forethought.assets import heads_dir, reasoner_dir
from forethought.config.speculation import DecodingBaseConfig
from forethought.speculative.heads.eagle3 import Eagle3Head, default_layer_ids
from shipped import QUESTIONS, shipped

EAGLE, MEDUSA = heads_dir("eagle3"), heads_dir("medusa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=150)


def decoded(config: DecodingBaseConfig, dtype: str = "float32") -> tuple[float, float]:
    """Tokens per step, and tokens drafted per step, over eight held-out problems."""
    with LLM(reasoner_dir(), dtype=dtype, speculative_config=config) as llm:
        metrics = [output.outputs[0].metrics for output in llm.generate(QUESTIONS, GREEDY)]
    steps = sum(each.steps for each in metrics)
    assert not any(each.lossy for each in metrics)
    return (
        1 + sum(each.accepted for each in metrics) / steps,
        sum(each.drafted for each in metrics) / steps,
    )


def test_the_directory_stays_under_three_megabytes() -> None:
    assert sum(path.stat().st_size for path in EAGLE.iterdir()) < 3_000_000


def test_it_is_a_head_of_the_authors_layout_for_the_reasoner() -> None:
    head = Eagle3Head.load(EAGLE)
    config = json.loads((EAGLE / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head.traits.layer_ids == default_layer_ids(5) == (2, 3, 4)
    assert head.traits.target_hidden_size == 256
    assert head.config.vocab_size == 512
    assert not head.traits.own_embedding
    assert len(head.ids.unique()) == head.traits.draft_vocab_size
    assert int(head.ids.max()) < 512
    assert all(weight.isfinite().all() for weight in head.parameters())


@pytest.mark.parametrize(
    ("name", "floor", "dtype"),
    [
        ("eagle 3", 3.5, "float32"),
        ("eagle 3, dynamic tree", 3.8, "bfloat16"),
        pytest.param("eagle 3", 3.5, "bfloat16", marks=pytest.mark.slow),
        pytest.param("eagle 3, dynamic tree", 3.8, "float32", marks=pytest.mark.slow),
    ],
)
def test_most_of_its_drafts_are_accepted(name: str, floor: float, dtype: str) -> None:
    config, _ = shipped(name)
    length, drafted = decoded(config, dtype)
    assert length > floor
    assert drafted <= config.max_total_draft_tokens


@pytest.mark.slow
def test_with_as_many_nodes_it_is_ahead_of_medusas_heads() -> None:
    """In trees of one shape, Medusa's own; and more so in the trees that grow as it likes."""
    tree = json.loads((MEDUSA / "config.json").read_text())["medusa_choices"]
    medusa, most = decoded(MedusaDecodingConfig(speculative_model=MEDUSA))
    static, _ = decoded(EagleDecodingConfig(eagle_choices=tree, speculative_model=EAGLE))
    dynamic, drafted = decoded(shipped("eagle 3, dynamic tree")[0])
    assert drafted <= most + 0.5
    assert dynamic > static > medusa + 1.0


@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 3, 4)])
def test_the_layers_beside_those_that_it_learned_to_read_are_worth_less(
    layers: tuple[int, ...],
) -> None:
    """The outputs of layers 1 to 3 enter 2 to 4; off by one, less is accepted."""
    right, _ = decoded(shipped("eagle 3")[0])
    wrong, _ = decoded(
        EagleDecodingConfig(
            max_draft_len=5, speculative_model=EAGLE, eagle3_layers_to_capture=layers
        )
    )
    assert wrong < right - 0.3
