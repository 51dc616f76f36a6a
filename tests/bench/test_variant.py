"""Which ways of decoding a benchmark tries."""

import json
from pathlib import Path

import pytest

from forethought.bench.variant import PLAIN, Variant, settled, variants_of, written
from forethought.config.drafters import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    ReDrafterDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.medusa import MedusaDecodingConfig
from forethought.config.speculation import DecodingBaseConfig, named_config
from forethought.errors import ParameterError


def test_each_drafter_is_tried_at_its_longest_its_half_and_its_quarter():
    configs = [NGramDecodingConfig(max_draft_len=8), SuffixDecodingConfig(max_draft_len=2)]
    found = [(variant.drafter, variant.max_draft_len) for variant in variants_of(configs)]
    assert found == [("ngram", 2), ("ngram", 4), ("ngram", 8), ("suffix", 1), ("suffix", 2)]


def test_lengths_may_be_given_and_each_drafter_takes_those_that_it_can():
    configs = [NGramDecodingConfig(), SuffixDecodingConfig(max_draft_len=2)]
    found = variants_of(configs, [2, 3])
    assert found == [Variant("ngram", 2), Variant("ngram", 3), Variant("suffix", 2)]


@pytest.mark.parametrize("length", [0, 6])
def test_a_length_that_no_drafter_can_make_is_refused(length):
    with pytest.raises(ParameterError, match=rf"{length}: the longest drafts have 5 levels"):
        variants_of([NGramDecodingConfig()], [3, length])


def test_who_chooses_its_length_or_drafts_trees_is_tried_as_it_is():
    configs = [
        NGramDecodingConfig(length_control="goodput"),
        DraftTargetDecodingConfig(speculative_model="d", draft_choices=[[0], [0, 0], [1]]),
    ]
    for lengths in (None, [1]):
        assert variants_of(configs, lengths) == [Variant("ngram", 5), Variant("draft_target", 2)]


def test_a_request_is_told_the_drafter_and_the_length():
    assert not PLAIN.speculation.enabled
    told = Variant("ngram", 3).speculation
    assert (told.enabled, told.drafter, told.max_draft_len) == (True, "ngram", 3)
    assert (PLAIN.label, Variant("ngram", 3).label) == ("plain", "ngram 3")


def test_auto_is_settled_and_nothing_given_means_the_drafters_without_a_model():
    (config,) = settled([AutoDecodingConfig()], 4)
    assert config == AutoDecodingConfig().resolve(4)
    assert {"ngram", "suffix"} <= {config.name for config in settled([], 4)}
    assert all(config.speculative_model is None for config in settled([], 4))
    assert settled([], 4, "d")[-1].speculative_model == Path("d")


@pytest.mark.parametrize("name", ["ngram", "medusa", "eagle3", "auto"])
def test_beside_a_drafter_under_goodput_control_the_same_at_fixed_lengths_is_measured(name):
    config = named_config(name)
    controlled, fixed = settled([config], 4)
    assert (controlled.length_control, fixed.length_control) == ("goodput", "fixed")
    assert (controlled.name, fixed.name) == (config.name, f"{config.name}_fixed")
    assert controlled.max_draft_len == fixed.max_draft_len
    variants = variants_of([controlled, fixed])
    assert variants[0] == Variant(config.name, controlled.max_draft_len)
    assert {variant.drafter for variant in variants[1:]} == {fixed.name}
    block = json.loads(json.dumps(written(variants[-1], [controlled, fixed])))
    assert DecodingBaseConfig.from_dict(block) == fixed


def test_a_variant_is_written_as_the_block_that_makes_it():
    tree = DraftTargetDecodingConfig(speculative_model="d", draft_choices=[[0], [0, 0], [1]])
    configs = [NGramDecodingConfig(max_draft_len=8, is_use_oldest=False), tree]
    block = written(Variant("ngram", 4), configs, max_concurrency=16)
    expected = NGramDecodingConfig(max_draft_len=4, is_use_oldest=False, max_concurrency=16)
    assert DecodingBaseConfig.from_dict(json.loads(json.dumps(block))) == expected
    block = json.loads(json.dumps(written(Variant("draft_target", 2), configs)))
    assert DecodingBaseConfig.from_dict(block) == tree
    assert written(PLAIN, configs) is None


@pytest.mark.parametrize(
    "config",
    [
        MedusaDecodingConfig(
            speculative_model="d", tree="most_probable", max_draft_len=4, max_total_draft_tokens=4
        ),
        ReDrafterDecodingConfig(
            speculative_model="d", draft_len_per_beam=4, max_total_draft_tokens=4
        ),
        ReDrafterDecodingConfig(speculative_model="d", num_beams=1),
        ReDrafterDecodingConfig(speculative_model="d", num_beams=1, draft_len_per_beam=8),
        EagleDecodingConfig(
            speculative_model="d",
            max_draft_len=4,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=2,
            max_total_draft_tokens=4,
        ),
        EagleDecodingConfig(speculative_model="d", num_eagle_layers=4),
    ],
    ids=["medusa", "redrafter", "one beam", "one long beam", "dynamic tree", "chain"],
)
def test_what_is_written_is_as_large_as_what_was_measured(config: DecodingBaseConfig):
    for variant in variants_of([config]):
        read = DecodingBaseConfig.from_dict(json.loads(json.dumps(written(variant, [config]))))
        assert read.max_draft_len == variant.max_draft_len
        chain = config.drafts_chains
        size = variant.max_draft_len if chain else config.max_total_draft_tokens
        assert read.max_total_draft_tokens == size


def test_a_schedule_is_written_as_far_as_the_length_allows():
    config = SuffixDecodingConfig(
        max_draft_len=8,
        max_total_draft_tokens=8,
        draft_len_schedule={4: 8, 16: 2},
        draft_len_schedule_bounds="upper",
    )
    read = DecodingBaseConfig.from_dict(written(Variant("suffix", 4), [config], 4))
    assert (read.max_draft_len, read.max_total_draft_tokens) == (4, 4)
    assert read.draft_len_schedule == {4: 4, 16: 2}


def test_a_users_own_drafter_is_written_by_where_its_class_stands():
    class Own:
        def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
            """Propose nothing."""

    config = UserProvidedDecodingConfig(max_draft_len=2, drafter=Own())
    block = written(Variant("user_provided", 1), [config])
    assert block["drafter"] == f"{__name__}:{Own.__qualname__}"
