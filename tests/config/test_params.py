"""Sampling parameters: what is impossible is refused by name, with the value and the remedy."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from forethought.config.sampling import SamplingParams, SpeculationParams
from forethought.errors import ParameterError


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"min_tokens": 9, "max_tokens": 8},
        {"n": 0},
        {"n": 10**9},
        {"seed": -(2**63) - 1},
        {"seed": 2**64},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"top_n_sigma": -0.5},
        {"top_n_sigma": float("nan")},
        {"top_n_sigma": 1e9},
        {"top_n_sigma": True},
        {"xtc_probability": 1.01},
        {"xtc_probability": -0.1},
        {"xtc_threshold": float("nan")},
        {"xtc_threshold": "0.1"},
        {"dry_multiplier": -1.0},
        {"dry_multiplier": float("inf")},
        {"dry_base": 0.99},
        {"dry_base": 1e6},
        {"dry_allowed_length": 0},
        {"dry_allowed_length": 1.5},
        {"dry_allowed_length": 10**6},
        {"dry_penalty_last_n": -2},
        {"dry_penalty_last_n": 2**31},
        {"dry_sequence_breakers": "\n"},
        {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": [3]},
        {"dry_sequence_breakers": ["a\ud800"]},
        {"dry_sequence_breakers": ["a" * 41]},
        {"dry_sequence_breakers": ["a"] * 17},
        {"presence_penalty": float("inf")},
        {"logit_bias": {1.5: 2.0}},
        {"logit_bias": {True: 2.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: 1000.0}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: None}},
        {"logit_bias": 5},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"cache_salt": None},
        {"cache_salt": 5},
        {"cache_salt": "a\ud800"},
        {"ignore_eos": "no"},
        {"skip_special_tokens": 1},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": [-4]},
        {"stop_token_ids": ["a"]},
        {"logprobs": 1000},
        {"confidence": 0},
        {"confidence": 65},
        {"priority": 0.5},
    ],
)
def test_an_impossible_value_is_refused_by_the_name_of_its_field(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=f"invalid {next(iter(values))}: .+ Change "):
        SamplingParams(**values)


def test_what_clients_of_llama_cpp_send_to_switch_a_sampler_off_is_off() -> None:
    off = {"top_n_sigma": -1, "dry_multiplier": 0, "xtc_probability": 0}
    unused = {
        "xtc_threshold": 0.2,
        "dry_base": 2,
        "dry_sequence_breakers": [],
        "dry_penalty_last_n": 0,
    }
    params = SamplingParams(**off, **unused)
    assert not (params.keeps_within_sigma)
    assert not (params.excludes_top)
    assert not (params.penalises_repeats)
    assert params.replace(temperature=0.0).takes_argmax
    assert SamplingParams(dry_sequence_breakers=None).dry_sequence_breakers == ()


def test_an_unknown_field_is_refused_with_the_nearest_and_all_allowed_ones() -> None:
    with pytest.raises(ParameterError, match=r"'topp': did you mean 'top_p'\? Allowed: .*min_p"):
        SamplingParams.from_dict({"topp": 0.5})
    with pytest.raises(ParameterError, match="no parameter 'best_of'"):
        SamplingParams().replace(best_of=3)
    with pytest.raises(ParameterError, match="no parameter 'best_of'"):
        SamplingParams(best_of=3)


@pytest.mark.parametrize(
    ("value", "example"),
    [
        (0.7, r"SamplingParams\(temperature=0.7\)"),
        (3, r"SamplingParams\(max_tokens=3\)"),
        ("###", r"SamplingParams\(stop='###'\)"),
        (object(), r"SamplingParams\(max_tokens=<object"),
    ],
)
def test_a_value_without_a_name_is_refused_with_a_field_that_it_fits(
    value: object, example: str
) -> None:
    with pytest.raises(ParameterError, match=f"takes its fields by name.*{example}"):
        SamplingParams(value)  # type: ignore[misc]
    with pytest.raises(ParameterError, match="takes its fields by name"):
        SamplingParams(value, seed=3)  # type: ignore[misc]


def test_stop_may_be_a_string_or_several() -> None:
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()


def test_params_know_which_fields_they_were_given_and_it_shows_nowhere_else() -> None:
    params = SamplingParams(max_tokens=5, temperature=1.0)
    assert params.given == {"max_tokens", "temperature"}
    assert SamplingParams().given == frozenset()
    assert params == SamplingParams(max_tokens=5)
    assert repr(params) == repr(SamplingParams(max_tokens=5))
    assert "given" not in SamplingParams.names() | params.to_dict().keys()
    assert params.replace(top_p=1.0).given == params.given | {"top_p"}
    assert params.replace(temperature=0.5).given == params.given
    for sibling in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert (sibling, sibling.given) == (params, params.given)
    with pytest.raises((AttributeError, TypeError)):
        params.given = frozenset()
    assert next(iter(inspect.signature(SamplingParams).parameters)) == "max_tokens"


def test_replace_keeps_everything_else_and_checks_again() -> None:
    params = SamplingParams(temperature=0.0, stop=["x"], logit_bias={3: 1})
    changed = params.replace(max_tokens=7)
    assert changed.to_dict() == {**params.to_dict(), "max_tokens": 7}
    assert changed.greedy
    with pytest.raises(ParameterError):
        params.replace(top_p=2)


def test_speculation_may_be_a_dictionary_and_survives_replacement() -> None:
    params = SamplingParams(speculation={"max_draft_len": 2, "drafter": "ngram"})
    assert params.speculation == SpeculationParams(max_draft_len=2, drafter="ngram")
    assert params.replace(seed=1).speculation is params.speculation
    assert SamplingParams().speculation is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enabled": 1}, "invalid speculation.enabled"),
        ({"max_draft_len": -1}, "invalid speculation.max_draft_len"),
        ({"max_draft_len": True}, "invalid speculation.max_draft_len"),
        ({"max_draft_len": 1.5}, "invalid speculation.max_draft_len"),
        ({"drafter": ""}, "invalid speculation.drafter"),
        ({"drafter": 3}, "invalid speculation.drafter"),
        ({"max_len": 3}, r"SpeculationParams has no parameter 'max_len'"),
    ],
)
def test_an_impossible_speculation_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        SamplingParams(speculation=values)


@pytest.mark.parametrize("value", [3, "ngram", [1]])
def test_what_is_no_speculation_is_refused(value: Any) -> None:
    with pytest.raises(ParameterError, match="invalid speculation"):
        SamplingParams(speculation=value)


def test_params_have_no_fields_but_those_of_their_documentation() -> None:
    assert SpeculationParams.names() == {"enabled", "max_draft_len", "drafter", "prediction"}
    assert all(f"``{name}``" in str(SamplingParams.__doc__) for name in SamplingParams.names())
