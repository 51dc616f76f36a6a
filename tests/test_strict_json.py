"""Files and options of users: JSON, and none of the numbers that Python reads beyond it."""

import argparse
import json
from pathlib import Path

import pytest

from forethought.bench.arrivals import load_mooncake
from forethought.bench.step_times import MeasuredEngine
from forethought.cli.bench.serving import _extra_body
from forethought.cli.options import parse_settings
from forethought.cli.serve_options import _json_object
from forethought.config.guided import GuidedDecodingParams
from forethought.errors import ParameterError, TraceError, UsageError
from forethought.methods.parts import archon_config
from forethought.methods.parts.difficulty import Policy
from forethought.scaffolding.trace import Trace
from forethought.server.backends.scripted_backend import read_script
from forethought.strict_json import read_json
from forethought.training.texts import read_records

READERS = {
    "texts": lambda path: read_records(path, "texts"),
    "a policy": Policy.load,
    "a pipeline": archon_config.load,
    "a trace": Trace.load,
    "a script": read_script,
    "step times": MeasuredEngine.load,
    "arrivals": load_mooncake,
}


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": Infinity}', "1e999", "[-1e400]"])
def test_a_number_that_is_not_finite_is_refused(text):
    with pytest.raises(ValueError, match=r"is no number of JSON|is beyond the largest float"):
        read_json(text)


@pytest.mark.parametrize("value", [[1, -2.5, 1e308, 5e-324, None, "NaN", True], {"a": {}}])
def test_what_json_has_is_read_as_it_is(value):
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_says_which_number_of_a_file_is_none(kind, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "a", "answers": [NaN]}')
    with pytest.raises((UsageError, TraceError), match="NaN is no number of JSON"):
        READERS[kind](path)


def test_options_and_schemas_are_json_too():
    with pytest.raises(ParameterError, match="NaN is no number of JSON"):
        _extra_body('{"temperature": NaN}')
    with pytest.raises(argparse.ArgumentTypeError, match="Infinity is no number of JSON"):
        _json_object('{"top_p": Infinity}')
    for schema in ('{"minimum": NaN}', {"minimum": float("nan")}):
        with pytest.raises(ParameterError, match="invalid json in guided_decoding"):
            GuidedDecodingParams(json=schema)
    assert parse_settings(["threshold=NaN", "depth=2"]) == {"threshold": "NaN", "depth": 2}
