"""A dump of any configuration loads again to one that is equal and means the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import PydanticSerializationError

from forethought.config.drafter_table import decoding_types
from forethought.config.drafters import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError

MODEL: dict[str, Any] = {"speculative_model": "somewhere/model"}


class Silent:
    """The least that looks like a drafter."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Propose nothing."""


@dataclass
class Settled(Silent):
    """A drafter that pydantic would make a dictionary of."""

    size: int = 3


CONFIGURATIONS: list[DecodingBaseConfig] = [
    NGramDecodingConfig(),
    NGramDecodingConfig(
        max_draft_len=7,
        draft_len_schedule={4: 5, 16: 2},
        draft_len_schedule_bounds="upper",
        acceptance_rate_window_size=9,
        acceptance_rate_threshold=0.25,
    ),
    NGramDecodingConfig(max_concurrency=3, length_control="goodput", synthetic_acceptance=0.5),
    NGramDecodingConfig(synthetic_acceptance_length=2.5),
    SuffixDecodingConfig(max_total_draft_tokens=40, max_spec_factor=4.0),
    DraftTargetDecodingConfig(max_draft_len=3, draft_sampling="sampled", **MODEL),
    DraftTargetDecodingConfig(draft_choices=[[0, 0], [1, 0], [2, 0]], **MODEL),
    MedusaDecodingConfig(**MODEL),
    MedusaDecodingConfig(tree="most_probable", min_draft_probability=0.05, **MODEL),
    MedusaDecodingConfig(tree="most_probable", num_medusa_heads=3, max_draft_len=2, **MODEL),
    MedusaDecodingConfig(num_medusa_heads=2, posterior_threshold=0.09, **MODEL),
    ReDrafterDecodingConfig(**MODEL),
    ReDrafterDecodingConfig(num_beams=3, max_draft_len=2, tree="beams", **MODEL),
    ReDrafterDecodingConfig(num_beams=3, min_draft_probability=0.05, **MODEL),
    EagleDecodingConfig(num_eagle_layers=4, eagle3_layers_to_capture={5, -1, 1}, **MODEL),
    EagleDecodingConfig(eagle_choices="[[0], [0, 0], [1]]", **MODEL),
    EagleDecodingConfig(max_draft_len=3, use_dynamic_tree=True, dynamic_tree_max_topK=4, **MODEL),
    MTPDecodingConfig(),
    MTPDecodingConfig(num_nextn_predict_layers=3, fed_back_state="unnormed"),
    MTPDecodingConfig(
        use_relaxed_acceptance_for_thinking=True,
        relaxed_topk=5,
        relaxed_delta=0.2,
        relaxed_rule="probability",
        BEGIN_THINKING_PHASE_TOKEN=7,
    ),
    PearlDecodingConfig(overlap=False, draft_device="cpu", **MODEL),
    UserProvidedDecodingConfig(max_draft_len=3, max_total_draft_tokens=6, drafter=Silent()),
    AutoDecodingConfig(),
    AutoDecodingConfig(max_draft_len=2, name="mine", length_control="goodput"),
]


def written(config: DecodingBaseConfig) -> bool:
    return config.decoding_type != "User_Provided"


def test_every_class_is_among_those_that_are_dumped_here() -> None:
    assert {config.decoding_type for config in CONFIGURATIONS} == set(decoding_types())


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda config: config.decoding_type)
def test_a_dump_says_what_it_is_and_loads_to_an_equal_configuration(
    config: DecodingBaseConfig,
) -> None:
    dump = config.model_dump()
    assert dump["decoding_type"] == config.decoding_type
    assert dump["max_draft_len"] == config.max_draft_len
    again = [DecodingBaseConfig.from_dict(dump), type(config)(**dump)]
    again.append(type(config).model_validate(dump))
    if written(config):
        again.append(type(config).from_dict(json.loads(config.model_dump_json())))
        text = yaml.safe_dump(config.model_dump(mode="json"))
        again.append(DecodingBaseConfig.from_dict(yaml.safe_load(text)))
        again.append(type(config).model_validate_json(config.model_dump_json()))
    for other in again:
        assert other == config
        assert other.model_dump() == dump
        if isinstance(config, AutoDecodingConfig):
            assert other.resolve(8) == config.resolve(8)


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda config: config.decoding_type)
def test_the_arguments_of_an_engine_keep_their_drafters_through_a_dump(
    config: DecodingBaseConfig,
) -> None:
    args = LlmArgs(
        model=Path("here"),
        dtype="bfloat16",
        kv_cache_config=KvCacheConfig(tokens_per_block=4),
        speculative_config=[config, NGramDecodingConfig(name="second")],
    )
    assert LlmArgs(**args.model_dump()) == args
    assert LlmArgs.from_dict(args.model_dump()) == args
    if written(config):
        assert LlmArgs.from_dict(json.loads(args.model_dump_json())) == args
        text = yaml.safe_dump(args.model_dump(mode="json"))
        assert LlmArgs.from_dict(yaml.safe_load(text)) == args


def test_a_dump_of_another_class_is_refused() -> None:
    with pytest.raises(ParameterError, match="which is SuffixDecodingConfig"):
        NGramDecodingConfig(**SuffixDecodingConfig().model_dump())


def test_a_drafter_that_was_named_is_dumped_by_its_name() -> None:
    name = f"{__name__}:Silent"
    config = UserProvidedDecodingConfig(max_draft_len=3, drafter=name)
    for dump in (config.model_dump(), json.loads(config.model_dump_json())):
        assert (dump["drafter"], dump["resource_manager"]) == (name, None)
        again = DecodingBaseConfig.from_dict(dump)
        assert type(again.drafter) is type(config.drafter)
        assert again.model_dump() == dump


def test_a_drafter_that_nothing_names_cannot_be_written_down() -> None:
    config = UserProvidedDecodingConfig(max_draft_len=3, drafter=Silent())
    assert config.model_dump()["drafter"] is config.drafter
    with pytest.raises(PydanticSerializationError, match="module:Name"):
        config.model_dump_json()
    settled = UserProvidedDecodingConfig(max_draft_len=3, drafter=Settled())
    with pytest.raises(PydanticSerializationError, match="drafter cannot be dumped"):
        settled.model_dump()


def test_older_names_are_still_read():
    assert MedusaDecodingConfig(tree="likeliest", **MODEL).tree == "most_probable"
    assert ReDrafterDecodingConfig(tree="likeliest", **MODEL).tree == "most_probable"
    older = MTPDecodingConfig(num_nextn_predict_layers=1, recycled_state="unnormed")
    assert older.fed_back_state == "unnormed"
