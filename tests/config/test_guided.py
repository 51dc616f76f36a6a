"""Invariants of ``GuidedDecodingParams``: one shape, well-formed, kept as it was meant."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from forethought.config.guided import GuidedDecodingParams
from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}


class Person(BaseModel):
    name: str


def test_a_schema_is_the_same_as_a_mapping_and_as_text():
    assert GuidedDecodingParams(json=SCHEMA) == GuidedDecodingParams(json=json.dumps(SCHEMA))
    assert hash(GuidedDecodingParams(json=SCHEMA)) == hash(GuidedDecodingParams(json=dict(SCHEMA)))


def test_properties_keep_their_order_which_is_that_of_the_output():
    assert list(json.loads(GuidedDecodingParams(json=SCHEMA).json)["properties"]) == ["b", "a"]


def test_a_pydantic_model_stands_for_its_schema():
    shape = GuidedDecodingParams(json=Person)
    assert json.loads(shape.json) == Person.model_json_schema()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": {}}, "json"),
        ({"json_object": True}, "json_object"),
        ({"regex": "a"}, "regex"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"choice": ["yes", "no"]}, "choice"),
    ],
)
def test_the_shape_knows_its_kind(fields, kind):
    assert GuidedDecodingParams(**fields).kind == kind


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "none is given"),
        ({"regex": "a", "json_object": True}, "regex and json_object is given"),
        ({"json": "{"}, "no JSON"),
        ({"json": "[1]"}, "a schema is a JSON object"),
        ({"json": 3}, "a schema is a JSON object"),
        ({"json": {"type": {1, 2}}}, "no JSON"),
        ({"regex": ""}, "non-empty string"),
        ({"grammar": 5}, "must be a string"),
        ({"json_object": "yes"}, "True or False"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["yes", ""]}, "got '', but it must be a non-empty string"),
        ({"choice": [1]}, "got 1, but it must be a string"),
        ({"choice": []}, "at least 1 item, not 0"),
        ({"choice": 7}, "must be a list"),
    ],
)
def test_what_is_no_shape_is_refused_with_its_reason(fields, reason):
    with pytest.raises(ParameterError, match=reason):
        GuidedDecodingParams(**fields)


def test_sampling_params_take_a_shape_or_a_dictionary():
    shape = GuidedDecodingParams(regex="a+")
    params = SamplingParams(guided_decoding={"regex": "a+"})
    assert params == SamplingParams(guided_decoding=shape)
    assert params.replace(max_tokens=3).guided_decoding == shape


def test_an_unknown_kind_of_shape_is_refused_with_those_that_there_are():
    with pytest.raises(ParameterError, match=r"structural_tag.*Allowed: choice, grammar"):
        SamplingParams(guided_decoding={"structural_tag": "x"})
    with pytest.raises(ParameterError, match="it must be GuidedDecodingParams"):
        SamplingParams(guided_decoding="a+")
