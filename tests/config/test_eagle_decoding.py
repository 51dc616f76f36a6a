"""EAGLE's config: the names of TensorRT-LLM, lengths settled, contradictions refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forethought
from forethought.config.drafters import Eagle3DecodingConfig, EagleDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError

MODEL: dict[str, Any] = {"speculative_model": "d"}
DYNAMIC: dict[str, Any] = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, **MODEL}


@pytest.mark.parametrize("kind", ["Eagle", "eagle", "Eagle3", "EAGLE3"])
def test_both_types_name_the_one_class(kind: str) -> None:
    values = {"decoding_type": kind, "max_draft_len": 3, "speculative_model_dir": "d"}
    config = DecodingBaseConfig.from_dict(values)
    assert type(config) is EagleDecodingConfig is Eagle3DecodingConfig
    assert (config.name, config.max_draft_len, config.max_total_draft_tokens) == ("eagle", 3, 3)
    assert config.speculative_model == Path("d")
    assert forethought.Eagle3DecodingConfig is EagleDecodingConfig


@pytest.mark.parametrize(
    "choices",
    [
        [[0], [1], [0, 0], [1, 0], [0, 0, 0]],
        [[1, 0], [0, 0, 0]],
        "[[1, 0], [0, 0, 0]]",
    ],
)
def test_a_static_tree_settles_the_lengths_in_either_spelling(choices: Any) -> None:
    config = EagleDecodingConfig(eagle_choices=choices, **MODEL)
    assert (config.max_draft_len, config.max_total_draft_tokens) == (3, 5)
    assert EagleDecodingConfig(eagle_choices=choices, max_draft_len=3, **MODEL).max_draft_len == 3


def test_a_dynamic_tree_has_at_most_its_beams() -> None:
    assert EagleDecodingConfig(max_draft_len=5, **DYNAMIC).max_total_draft_tokens == 20
    config = EagleDecodingConfig(max_draft_len=5, max_total_draft_tokens=5, **DYNAMIC)
    assert config.max_total_draft_tokens == 5


def test_layers_to_capture_are_a_set_with_the_final_norm_last() -> None:
    for layers in ({17, 1, 28}, [28, 1, 17], (1, 17, 28)):
        config = EagleDecodingConfig(max_draft_len=1, eagle3_layers_to_capture=layers, **MODEL)
        assert config.eagle3_layers_to_capture == (1, 17, 28)
    config = EagleDecodingConfig(max_draft_len=1, eagle3_layers_to_capture={-1, 5}, **MODEL)
    assert config.eagle3_layers_to_capture == (5, -1)


def test_older_files_are_read() -> None:
    config = EagleDecodingConfig(
        num_eagle_layers=4, eagle3_one_model=False, greedy_sampling=True, **MODEL
    )
    assert config.max_draft_len == 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_draft_len": 3}, "speculative_model"),
        (MODEL, "max_draft_len"),
        ({**MODEL, "max_draft_len": 3, "max_total_draft_tokens": 4}, "max_total_draft_tokens"),
        ({**MODEL, "max_draft_len": 3, "use_dynamic_tree": True}, "dynamic_tree_max_topK"),
        ({**MODEL, "max_draft_len": 3, "dynamic_tree_max_topK": 2}, "dynamic_tree_max_topK"),
        ({**DYNAMIC, "max_draft_len": 3, "max_total_draft_tokens": 13}, "max_total_draft_tokens"),
        ({**DYNAMIC, "max_draft_len": 3, "max_total_draft_tokens": 2}, "max_total_draft_tokens"),
        ({**DYNAMIC, "eagle_choices": [[0]]}, "use_dynamic_tree"),
        ({**MODEL, "eagle_choices": [[0]], "max_draft_len": 2}, "max_draft_len"),
        ({**MODEL, "eagle_choices": [[0], [0]]}, "eagle_choices"),
        ({**MODEL, "eagle_choices": [[-1]]}, "eagle_choices"),
        ({**MODEL, "eagle_choices": []}, "eagle_choices"),
        ({**MODEL, "max_draft_len": 3, "num_eagle_layers": 2}, "num_eagle_layers"),
        ({**MODEL, "max_draft_len": 3, "greedy_sampling": False}, "greedy_sampling"),
        ({**MODEL, "max_draft_len": 3, "posterior_threshold": 0.1}, "posterior_threshold"),
        ({**MODEL, "max_draft_len": 3, "eagle3_model_arch": "mistral_large3"}, "model_arch"),
        ({**MODEL, "max_draft_len": 3, "eagle3_layers_to_capture": []}, "layers_to_capture"),
        ({**MODEL, "max_draft_len": 3, "eagle3_layers_to_capture": [-2]}, "layers_to_capture"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        EagleDecodingConfig(**fields)
