"""What a model's ``generation_config.json`` says of sampling."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from forethought.config.generation_config import described, not_honoured, sampling_defaults


@pytest.mark.parametrize(
    ("written", "fields"),
    [
        ({}, {}),
        ({"eos_token_id": 1, "max_length": 20}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
        ),
        ({"temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0}, {}),
        ({"temperature": None, "top_k": -1}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0}),
        (
            {"do_sample": False, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.1}, {"xtc_probability": 0.5}),
    ],
)
def test_the_fields_of_a_file_are_sampling_fields(
    written: dict[str, Any], fields: dict[str, float]
) -> None:
    assert sampling_defaults(written) == fields


@pytest.mark.parametrize("value", [-1, "warm", [0.5], 1e9, True])
def test_a_value_outside_its_range_is_left_out_with_a_warning(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults({"temperature": value, "top_p": 0.5}) == {"top_p": 0.5}
    assert "temperature" in caplog.text


def test_fields_without_effect_are_named_where_they_would_have_one() -> None:
    assert not_honoured({"typical_p": 0.9, "num_beams": 1, "no_repeat_ngram_size": 3}) == (
        "typical_p",
        "no_repeat_ngram_size",
    )
    assert described({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"
    assert described({}) == "none"
