"""``forethought doctor``: what this machine has, also where there is hardly anything."""

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from forethought import __version__, assets
from forethought.cli import doctor, machine
from forethought.cli.main import main

EPYC = """processor\t: 0
model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu avx2 avx512f amx_tile unheard_of

processor\t: 1
model name\t: another
"""


def test_the_doctor_names_versions_processor_extras_and_paths(capsys):
    import torch

    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert f"forethought {__version__}" in shown
    assert f"torch {torch.__version__}" in shown
    assert machine.processor_name() in shown
    for extra in ("local", "openai", "guided", "eval"):
        assert f"\n  {extra:<8}" in shown
    assert "\n  dev" not in shown
    assert "linear layers, bfloat16" in shown
    for name in assets.names():
        assert f"\n  {name:<22}ready" in shown
    assert "\nsandbox " in shown


def test_programs_are_told_the_same_in_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {"versions", "processor", "extras", "torch", "fast_paths", "sandbox"}
    assert found["processor"]["cores"] == machine.num_cores()


def without(package: str, *options: str) -> str:
    """What the doctor says where a package cannot be imported."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; from forethought.cli.main import main;"
        f"sys.exit(main({['doctor', *options]!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_doctor_works_without_torch(options):
    assert "torch cannot be imported" in without("torch", *options)


def test_the_doctor_works_with_torch_alone():
    shown = without("transformers")
    assert "torch cannot be imported" not in shown
    assert "kernels for" in shown


def test_what_is_missing_comes_with_what_to_type(monkeypatch):
    required = [
        "pydantic>=2.7",
        "pytest; extra == 'local'",
        'nowhere-to-be-found>=1; extra == "openai"',
        "pydantic>=2; extra == 'kv-events'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    found = doctor.examine()
    assert found["extras"] == {"local": [], "openai": ["nowhere-to-be-found"], "kv-events": []}
    shown = "\n".join(doctor.lines(found))
    assert 'missing nowhere-to-be-found: pip install "forethought[openai]"' in shown
    assert "\n  local      installed" in shown
    assert "\n  kv-events  installed" in shown


def test_a_source_tree_that_is_not_installed_is_said_to_be_one(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert "is not installed" in "\n".join(doctor.lines(doctor.examine()))


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ({"namespaces": None, "landlock": None}, "namespaces"),
        ({"namespaces": "not allowed", "landlock": None}, "landlock; no namespaces: not allowed"),
        (
            {"namespaces": "not allowed", "landlock": "old kernel"},
            "none: programs run only with --unsafe-code; no namespaces: not allowed; "
            "no landlock: old kernel",
        ),
    ],
)
def test_the_isolation_of_programs_comes_with_what_a_better_one_lacks(kinds, said):
    assert doctor._sandbox_line(kinds) == said


def test_every_extra_for_users_is_looked_for():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - set(doctor._NOT_FOR_USERS)
    assert set(doctor.missing_by_extra() or ()) == extras


def test_the_processor_is_called_by_its_name_and_not_by_its_architecture(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(EPYC)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine.processor_name() == "AMD EPYC 7763 64-Core Processor"
    assert machine.instruction_sets() == ["avx2", "avx512f", "amx_tile"]


def test_a_machine_that_tells_nothing_has_the_name_of_its_architecture(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "nowhere")
    monkeypatch.setattr(machine, "_macos_name", lambda: "")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    assert machine.processor_name() == machine.platform.machine()
    assert machine.instruction_sets() == []


def test_the_memory_is_unknown_where_the_system_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_STATM", tmp_path / "nowhere")
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "nowhere")
    monkeypatch.setattr(machine.sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "resource", None)
    assert machine.resident_bytes() is None
    assert machine.peak_bytes() is None


@pytest.mark.parametrize(
    "option",
    [
        *(("--dtype", "float32"), ("--quantization", "int8"), ("--device", "cpu")),
        ("--layer-window", "2"),
    ],
)
def test_an_option_of_a_model_needs_one(option, capsys):
    assert main(["doctor", *option]) == 2
    assert f"{option[0]} is of a model: there is no --model" in capsys.readouterr().err


def test_the_memory_of_a_model_is_shown_part_by_part(capsys):
    assert main(["doctor", "--model", "forethought/reasoner", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["memory"]
    names = {"libraries", "weights", "in_file", "kv_cache", "states", "loaded", "peak"}
    assert set(parts) == names
    assert parts["states"] == parts["in_file"] == 0
    assert 2_000_000 < parts["weights"] < 40_000_000
    assert 0 < parts["loaded"] <= parts["peak"]
    assert main(["doctor", "--model", "forethought/reasoner", "--quantization", "int8"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in parts)


def test_layers_in_a_file_take_none_of_the_memory(capsys):
    command = ["doctor", "--model", "forethought/reasoner", "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)["memory"]
    assert main([*command, "--layer-window", "1"]) == 0
    parts = json.loads(capsys.readouterr().out)["memory"]
    assert parts["in_file"] > 0
    assert parts["weights"] < whole["weights"] < parts["weights"] + parts["in_file"]


def test_the_profile_of_a_model_is_shown_with_the_forward_that_runs(capsys):
    assert main(["doctor", "--model", "forethought/reasoner", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    profile = facts["profile"]
    assert (profile["thinking_markers"], profile["opens_thought"]) == (
        ["<think>", "</think>"],
        True,
    )
    assert profile["sampling"] == {"temperature": 0.0}
    assert (profile["tool_format"], profile["drafters"]) == ("hermes", {})
    assert facts["forward"]["path"] in ("native", "fused", "transformers")
    lines = "\n".join(doctor.model_lines(facts))
    for words in ("after </think>", "temperature 0", "system message", facts["forward"]["path"]):
        assert words in lines
