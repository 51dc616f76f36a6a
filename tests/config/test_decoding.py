"""Speculative configs: TensorRT-LLM's names work; what is unknown or impossible is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forethought.config.drafters import (
    AutoDecodingConfig,
    DraftTargetDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    PearlDecodingConfig,
    SuffixDecodingConfig,
    UserProvidedDecodingConfig,
)
from forethought.config.engine import LlmArgs
from forethought.config.speculation import DecodingBaseConfig
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.speculative.length.policy import schedule


class Silent:
    """The least that looks like a drafter."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Propose nothing."""


class Broken(Silent):
    """Cannot be made without an argument."""

    def __init__(self, argument: int) -> None: ...


@pytest.mark.parametrize(
    ("kind", "expected", "more"),
    [
        ("NGram", NGramDecodingConfig, {}),
        ("ngram", NGramDecodingConfig, {}),
        ("Suffix", SuffixDecodingConfig, {}),
        ("Draft_Target", DraftTargetDecodingConfig, {"speculative_model": "d"}),
        ("DraftTarget", DraftTargetDecodingConfig, {"speculative_model_dir": "d"}),
        ("PEARL", PearlDecodingConfig, {"speculative_model": "d"}),
        ("User_Provided", UserProvidedDecodingConfig, {"drafter": Silent()}),
        ("UserProvided", UserProvidedDecodingConfig, {"drafter": Silent()}),
        ("AUTO", AutoDecodingConfig, {}),
        ("mtp", MTPDecodingConfig, {}),
        ("MTP", MTPDecodingConfig, {"speculative_model": "d"}),
    ],
)
def test_decoding_type_chooses_the_class(kind, expected, more):
    values = {"decoding_type": kind, "max_draft_len": 3, **more}
    config = DecodingBaseConfig.from_dict(values)
    assert type(config) is expected
    assert config.max_draft_len == 3
    assert values["decoding_type"] == kind, "the caller's dictionary is not changed"


def test_defaults_are_settled():
    ngram = NGramDecodingConfig()
    assert (ngram.name, ngram.max_draft_len, ngram.max_total_draft_tokens) == ("ngram", 5, 5)
    assert ngram.max_matching_ngram_size == 2
    assert ngram.is_keep_all
    assert ngram.is_use_oldest
    assert ngram.is_public_pool
    assert (ngram.length_control, ngram.synthetic_acceptance) == ("fixed", None)
    suffix = SuffixDecodingConfig(max_draft_len=8)
    assert (suffix.name, suffix.max_total_draft_tokens) == ("suffix", 8)
    assert SuffixDecodingConfig(max_total_draft_tokens=40).max_draft_len == 16


def test_a_block_about_mtp_means_what_it_means_elsewhere():
    """``num_nextn_predict_layers`` is the length where nothing else says it."""
    block = {"decoding_type": "MTP", "num_nextn_predict_layers": 3}
    assert DecodingBaseConfig.from_dict(block).max_draft_len == 3
    assert DecodingBaseConfig.from_dict({**block, "max_draft_len": 5}).max_draft_len == 5
    assert MTPDecodingConfig().max_draft_len == 1
    thinking = DecodingBaseConfig.from_dict(
        {
            "decoding_type": "MTP",
            "use_relaxed_acceptance_for_thinking": True,
            "relaxed_topk": 10,
            "relaxed_delta": 0.6,
            "relaxed_rule": "probability",
            "BEGIN_THINKING_PHASE_TOKEN": 7,
        }
    )
    tokens = (thinking.begin_thinking_phase_token, thinking.end_thinking_phase_token)
    assert tokens == (7, 128799)


def test_null_in_yaml_is_the_default():
    config = NGramDecodingConfig.from_dict({"max_draft_len": None, "max_concurrency": None})
    assert config == NGramDecodingConfig()


def test_a_class_reads_dictionaries_with_and_without_its_own_type():
    plain = NGramDecodingConfig.from_dict({"max_draft_len": 2})
    assert plain == NGramDecodingConfig.from_dict({"max_draft_len": 2, "decoding_type": "ngram"})
    with pytest.raises(ParameterError, match="which is SuffixDecodingConfig"):
        NGramDecodingConfig.from_dict({"decoding_type": "Suffix"})


def test_an_unknown_type_is_refused_with_those_that_there_are():
    kinds = "AUTO, Draft_Target, Eagle, MTP, Medusa, NGram, Pearl, ReDrafter, Suffix, User_Provided"
    with pytest.raises(UnknownNameError, match=f"Allowed: {kinds}"):
        DecodingBaseConfig.from_dict({"decoding_type": "Telepathy"})
    with pytest.raises(ParameterError, match=f"Use one of {kinds}"):
        DecodingBaseConfig.from_dict({"max_draft_len": 3})
    with pytest.raises(ParameterError, match="needs decoding_type"):
        DecodingBaseConfig(max_draft_len=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_drft_len": 3}, r"no parameter 'max_drft_len': did you mean 'max_draft_len'\?"),
        ({"eagle_choices": [[0]]}, "Allowed: acceptance_rate_threshold, .*max_draft_len"),
        ({"max_draft_len": 0}, "invalid max_draft_len .* at least 1 level"),
        ({"max_draft_len": -1}, "invalid max_draft_len"),
        ({"max_draft_len": "many"}, "invalid max_draft_len"),
        ({"max_draft_len": 257}, "invalid max_draft_len .* at most 256"),
        ({"max_total_draft_tokens": 1025}, "invalid max_total_draft_tokens .* at most 1024"),
        ({"max_matching_ngram_size": 65}, "invalid max_matching_ngram_size .* at most 64"),
        ({"max_pool_size": 2**24 + 1}, "invalid max_pool_size"),
        ({"acceptance_rate_window_size": 2**16 + 1}, "invalid acceptance_rate_window_size"),
        ({"max_total_draft_tokens": 4}, "max_draft_len is 5"),
        ({"max_total_draft_tokens": 9}, "do not branch"),
        ({"max_matching_ngram_size": 0}, "invalid max_matching_ngram_size"),
        ({"speculative_model": "d"}, "the drafter has no model"),
        ({"max_concurrency": 0}, "invalid max_concurrency"),
        ({"length_control": "psychic"}, "invalid length_control"),
        ({"synthetic_acceptance": 1.5}, "invalid synthetic_acceptance"),
        ({"acceptance_rate_window_size": 3}, "a gate needs both"),
        ({"acceptance_rate_threshold": 0.5}, "a gate needs both"),
        ({"name": ""}, "invalid name"),
    ],
)
def test_what_cannot_be_is_refused_by_name_however_it_is_written(values, message):
    for build in (NGramDecodingConfig.from_dict, lambda v: NGramDecodingConfig(**v)):
        with pytest.raises(ParameterError, match=message):
            build(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_len_schedule_bounds": "upper"}, "there is no draft_len_schedule"),
        ({"draft_len_schedule": {0: 3}}, "from 1 as keys"),
        ({"draft_len_schedule": {}}, "from 1 as keys"),
        ({"draft_len_schedule": {1: 6}}, "between 0 and max_draft_len, 5"),
        ({"draft_len_schedule": {1: -1}}, "between 0 and max_draft_len, 5"),
        ({"draft_len_schedule": {1: 3}, "max_concurrency": 4}, "invalid max_concurrency"),
        ({"draft_len_schedule": {1: 3}, "length_control": "goodput"}, "invalid length_control"),
        (
            {"draft_len_schedule": {2: 3}, "draft_len_schedule_bounds": "lower"},
            "these lower bounds must be 1",
        ),
        ({"draft_len_schedule": {1: 3}, "draft_len_schedule_bounds": "both"}, "'upper' or 'lower'"),
    ],
)
def test_an_ambiguous_or_impossible_schedule_is_refused(values, message):
    if "draft_len_schedule" in values:
        values = {"draft_len_schedule_bounds": "upper", **values}
    with pytest.raises(ParameterError, match=message):
        NGramDecodingConfig(**values)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Suffix", {"max_tree_depth": 1025}, "invalid max_tree_depth"),
        ("Suffix", {"max_spec_factor": float("inf")}, "invalid max_spec_factor"),
        ("Suffix", {"max_cached_requests": 10**9}, "invalid max_cached_requests"),
        ("Suffix", {"max_cached_tokens": 10**9}, "invalid max_cached_tokens"),
        ("Pearl", {"max_draft_len": 257}, "invalid max_draft_len"),
        ("MTP", {"num_nextn_predict_layers": 257}, "invalid num_nextn_predict_layers"),
        ("Medusa", {"num_medusa_heads": 257}, "invalid num_medusa_heads"),
        ("Medusa", {"medusa_choices": [[0] * 257]}, "invalid max_draft_len .* 256 levels"),
        ("Eagle", {"num_eagle_layers": 257}, "invalid num_eagle_layers"),
        ("Eagle", {"dynamic_tree_max_topK": 1025}, "invalid dynamic_tree_max_topK .* at most 1024"),
        (
            "Eagle",
            {"use_dynamic_tree": True, "dynamic_tree_max_topK": 100, "max_draft_len": 11},
            "invalid max_total_draft_tokens .*got 1100, .* 1024 tokens",
        ),
        ("Eagle", {"eagle_choices": [[n] for n in range(1025)]}, "invalid max_total_draft_tokens"),
        ("ReDrafter", {"num_beams": 1025}, "invalid num_beams"),
        ("ReDrafter", {"draft_len_per_beam": 257}, "invalid draft_len_per_beam"),
        ("ReDrafter", {"tree": "beams", "num_beams": 300}, "invalid max_total_draft_tokens"),
    ],
)
def test_no_length_is_without_bound(kind, values, message):
    model = {} if kind in ("Suffix", "MTP") else {"speculative_model": "d"}
    with pytest.raises(ParameterError, match=message):
        DecodingBaseConfig.from_dict({"decoding_type": kind, **model, **values})


def test_a_custom_drafter_s_tree_size_is_its_own_unless_configured():
    class Bush(Silent):
        def nodes(self, depth: int) -> int:
            return 3 * depth

    class Vast(Silent):
        def nodes(self, depth: int) -> int:
            return 10**9

    def size(drafter: Any, **more: int) -> int:
        config = UserProvidedDecodingConfig(max_draft_len=4, drafter=drafter, **more)
        return config.max_total_draft_tokens

    assert size(Bush()) == 12
    assert size(Bush(), max_total_draft_tokens=6) == 6
    assert size(Vast()) == 1024
    assert size(Silent()) == 4
    with pytest.raises(ParameterError, match="max_draft_len is 4"):
        size(Bush(), max_total_draft_tokens=3)


def test_a_schedule_without_bounds_has_upper_ones():
    config = NGramDecodingConfig.from_dict({"draft_len_schedule": {4: 5, 8: 2, 32: 1}})
    assert config.draft_len_schedule_bounds == "upper"
    found = [schedule(config).length(running) for running in (1, 4, 5, 8, 9, 32, 33)]
    assert found == [5, 5, 2, 2, 1, 1, 0]
    assert DecodingBaseConfig.from_dict(config.model_dump()) == config


def test_relaxed_acceptance_as_tensorrt_llm_writes_it_follows_its_documentation():
    config = DecodingBaseConfig.from_dict(
        {
            "decoding_type": "MTP",
            "max_draft_len": 3,
            "num_nextn_predict_layers": 3,
            "use_relaxed_acceptance_for_thinking": True,
            "relaxed_topk": 10,
            "relaxed_delta": 0.6,
        }
    )
    assert config.relaxed_rule == "log_probability"
    assert (config.relaxed_topk, config.relaxed_delta, config.max_draft_len) == (10, 0.6, 3)
    assert DecodingBaseConfig.from_dict(config.model_dump()) == config
    assert MTPDecodingConfig().relaxed_rule is None


def test_null_is_not_given_whatever_its_name():
    given = {"max_draft_len": 4, "name": None, "moe_backend": None, "draft_len_schedule": None}
    config = DecodingBaseConfig.from_dict({"decoding_type": "NGram", **given})
    assert config == NGramDecodingConfig(max_draft_len=4)
    with pytest.raises(ParameterError, match="no parameter 'moe_backend'"):
        NGramDecodingConfig(moe_backend="auto")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"synthetic_acceptance_length": 0.9}, "invalid synthetic_acceptance_length"),
        ({"synthetic_acceptance_length": 6.1}, r"at most max_draft_len \+ 1 tokens, 6"),
        (
            {"synthetic_acceptance_length": 2, "synthetic_acceptance": 0.5},
            "synthetic_acceptance is given",
        ),
    ],
)
def test_a_forced_acceptance_length_that_cannot_be_is_refused(values, message):
    with pytest.raises(ParameterError, match=message):
        NGramDecodingConfig(**values)


def test_a_schedule_is_kept_sorted():
    config = NGramDecodingConfig(
        draft_len_schedule={"32": 0, 8: 3, 4: 5}, draft_len_schedule_bounds="upper"
    )
    assert list(config.draft_len_schedule.items()) == [(4, 5), (8, 3), (32, 0)]


ALL_NODES = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
LEAVES = [[1, 0], [0, 0, 0]]


@pytest.mark.parametrize("choices", [ALL_NODES, LEAVES, str(LEAVES)])
def test_a_tree_settles_depth_and_size_in_either_spelling(choices):
    config = DraftTargetDecodingConfig(speculative_model="d", draft_choices=choices)
    assert (config.max_draft_len, config.max_total_draft_tokens) == (3, 5)
    again = DraftTargetDecodingConfig(
        speculative_model="d", draft_choices=choices, max_draft_len=3, max_total_draft_tokens=5
    )
    assert again == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_draft_len": 3}, "the drafter needs a model"),
        ({"speculative_model": "d"}, "invalid max_draft_len"),
        ({"speculative_model": "d", "draft_sampling": "hot"}, "invalid draft_sampling"),
        ({"speculative_model": "d", "draft_choices": []}, "lists of ranks"),
        ({"speculative_model": "d", "draft_choices": [[]]}, "lists of ranks"),
        ({"speculative_model": "d", "draft_choices": [[-1]]}, "lists of ranks"),
        ({"speculative_model": "d", "draft_choices": [[0], [0]]}, "is listed twice"),
        ({"speculative_model": "d", "draft_choices": [[0], [1, 0]]}, r"\[1\] is missing"),
        ({"speculative_model": "d", "draft_choices": [[0, 0], [1]]}, r"\[0\] is missing"),
        ({"speculative_model": "d", "draft_choices": [[0, 0], [0, 0, 1]]}, r"\[0\] is missing"),
        ({"speculative_model": "d", "draft_choices": "[[0"}, "not the text of a list"),
        ({"speculative_model": "d", "draft_choices": [[0, 0]], "max_draft_len": 3}, "make it 2"),
    ],
)
def test_a_draft_model_needs_a_directory_a_length_and_a_sound_tree(values, message):
    with pytest.raises(ParameterError, match=message):
        DraftTargetDecodingConfig(**values)


def test_a_drafter_may_be_an_object_a_class_or_the_name_of_one():
    given = Silent()
    assert UserProvidedDecodingConfig(max_draft_len=2, drafter=given).drafter is given
    for named in (Silent, f"{__name__}:Silent"):
        config = UserProvidedDecodingConfig(max_draft_len=2, drafter=named)
        assert type(config.drafter).__name__ == "Silent"


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (3, "no method prepare_draft_tokens"),
        ("no_such_module:Drafter", "cannot load drafter"),
        (Broken, "cannot be created: TypeError"),
        (None, "needs drafter"),
    ],
)
def test_what_is_no_drafter_is_refused(drafter, message):
    with pytest.raises(UsageError, match=message):
        UserProvidedDecodingConfig(max_draft_len=2, drafter=drafter)


def test_a_chain_has_no_more_tokens_than_levels():
    with pytest.raises(ParameterError, match="without draft_choices a draft is a chain"):
        DraftTargetDecodingConfig(speculative_model="d", max_draft_len=3, max_total_draft_tokens=9)


def test_a_resource_manager_must_look_like_one():
    with pytest.raises(ParameterError, match="no method get_max_resource_count"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter=Silent(), resource_manager=Silent())


@pytest.mark.parametrize(("batch", "ngram", "draft"), [(1, 3, 5), (4, 3, 5), (5, 5, 3), (64, 5, 3)])
def test_auto_follows_the_batch_size(batch, ngram, draft):
    expected = NGramDecodingConfig(
        max_draft_len=draft, max_matching_ngram_size=ngram, max_concurrency=32
    )
    assert AutoDecodingConfig().resolve(batch) == expected


def test_auto_hands_on_what_it_is_given():
    config = AutoDecodingConfig(length_control="goodput", max_draft_len=2, name="mine").resolve(8)
    assert (config.length_control, config.max_draft_len, config.name) == ("goodput", 2, "mine")
    assert config.max_concurrency is None
    schedule = {"draft_len_schedule": {4: 3}, "draft_len_schedule_bounds": "upper"}
    assert AutoDecodingConfig(**schedule).resolve(8).draft_len_schedule == {4: 3}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, []),
        ([], []),
        (NGramDecodingConfig(), ["ngram"]),
        ({"decoding_type": "NGram"}, ["ngram"]),
        ([{"decoding_type": "Suffix"}, NGramDecodingConfig()], ["suffix", "ngram"]),
        ([NGramDecodingConfig(), NGramDecodingConfig(name="short")], ["ngram", "short"]),
        ("ngram", ["ngram"]),
        (
            ["Suffix", "draft_target", {"decoding_type": "Ngram"}],
            ["suffix", "draft_target", "ngram"],
        ),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, ["ngram"]),
    ],
)
def test_an_engine_takes_one_config_or_several_in_order(given, names):
    args = LlmArgs.from_dict({"speculative_config": given})
    assert [config.name for config in args.speculative_config] == names


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speculative_config": 3}, "invalid speculative_config: got 3"),
        ({"speculative_config": {"decoding_type": "Seer"}}, "^unknown decoding_type 'Seer'"),
        ({"speculative_config": {"decoding_type": "NGram", "k": 1}}, "^NGramDecodingConfig has no"),
        ({"speculative_config": [NGramDecodingConfig()] * 2}, "have one name"),
        ({"speculative_config": "telepathy"}, "^unknown decoding_type 'telepathy'"),
        ({"speculative_config": ["user_provided"]}, "UserProvidedDecodingConfig needs drafter"),
        ({"speculative_config": "eagle3", "model": "other"}, "the drafter needs a model"),
    ],
)
def test_an_engine_refuses_what_is_no_config(values, message):
    with pytest.raises(UsageError, match=message):
        LlmArgs.from_dict(values)


def test_the_yaml_of_the_guides_is_understood():
    args = LlmArgs.from_dict(
        {
            "disable_overlap_scheduler": True,
            "speculative_config": {
                "decoding_type": "DraftTarget",
                "max_draft_len": 4,
                "speculative_model": "/path/to/draft/model",
            },
        }
    )
    (config,) = args.speculative_config
    assert config.speculative_model == Path("/path/to/draft/model")
