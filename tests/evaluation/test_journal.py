"""The journal: what a killed run keeps, and when it is refused."""

import json
import re
from pathlib import Path

import pytest

from forethought.errors import FileError, ParameterError, UsageError
from forethought.evaluation.journal import (
    Attempt,
    Journal,
    differences,
    fingerprint,
    folder_name,
    problems_hash,
)
from forethought.evaluation.problems import Problem
from forethought.outputs import Usage

PROBLEMS = [Problem(str(i), f"{i}?", str(i)) for i in range(3)]
PLAIN = {"name": "plain", "settings": {}, "sampling_params": {"max_tokens": 9}}
SETTINGS = {"seed": 0, "methods": [PLAIN], "model": {"path": "m", "dtype": "float32"}}


def attempt(number, **changes):
    usage = Usage(prefilled=7, decoded=30 + number, discarded=2, cached=1)
    fields = {"usage": usage, "num_answer_tokens": 11, "elapsed": 0.5 * number, **changes}
    return Attempt("plain", PROBLEMS[number], f"text {number}\n", number == 1, number, **fields)


def test_what_was_written_is_read_again(tmp_path):
    path = tmp_path / "journal.jsonl"
    written = [attempt(2), attempt(0, candidates=(True, None), error="spent"), attempt(1, sample=3)]
    with Journal(path, SETTINGS) as journal:
        for one in written:
            journal.append("attempt", one.to_dict())
        assert journal.attempts("plain", PROBLEMS) == written
    with Journal(path, dict(reversed(SETTINGS.items()))) as journal:
        assert journal.attempts("plain", PROBLEMS) == written
        assert journal.attempts("dynasor", PROBLEMS) == []


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_before_the_next_record(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.append("attempt", attempt(0).to_dict())
        journal.append("attempt", attempt(1).to_dict())
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, SETTINGS) as journal:
        assert journal.attempts("plain", PROBLEMS) == [attempt(0)]
        journal.append("attempt", attempt(2).to_dict())
    with Journal(path, SETTINGS) as journal:
        assert journal.attempts("plain", PROBLEMS) == [attempt(0), attempt(2)]


def test_a_torn_header_is_no_journal_yet(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"journal": 1, "ha')
    with Journal(path, SETTINGS) as journal:
        assert journal.records("attempt") == []
    assert json.loads(path.read_text())["settings"] == SETTINGS


def test_an_attempt_that_was_made_twice_counts_once(tmp_path):
    with Journal(tmp_path / "journal.jsonl", SETTINGS) as journal:
        journal.append("attempt", attempt(0).to_dict())
        journal.append("attempt", attempt(0, elapsed=9.0).to_dict())
        assert journal.attempts("plain", PROBLEMS) == [attempt(0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "not finished: seed: 0 -> 1. Begin anew"),
        ({"model": {"path": "m", "dtype": "bfloat16"}}, "model.dtype: float32 -> bfloat16"),
        ({"task": "countdown"}, "task: none -> countdown"),
    ],
)
def test_other_settings_are_refused_by_name_unless_one_begins_anew(tmp_path, change, said):
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.append("attempt", attempt(0).to_dict())
    with pytest.raises(ParameterError, match="--fresh") as refused:
        Journal(path, SETTINGS | change)
    assert said in str(refused.value)
    with Journal(path, SETTINGS | change, is_fresh=True) as journal:
        assert journal.records("attempt") == []
    with pytest.raises(ParameterError):
        Journal(path, SETTINGS)


@pytest.mark.parametrize(
    "text", ["no JSON\n", "[1]\n", '{"rows": []}\n', '{"journal": 99, "settings": {}}\n']
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="cannot read the journal"):
        Journal(path, SETTINGS)


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.append("attempt", {"method": "plain", "number": 77})
        with pytest.raises(UsageError, match="incomplete"):
            journal.attempts("plain", PROBLEMS)
    path.write_bytes(path.read_bytes() + b"{ torn }\n{}\n")
    with pytest.raises(UsageError, match="line 3"):
        Journal(path, SETTINGS)


def test_two_evaluations_do_not_write_to_one_journal(tmp_path):
    pytest.importorskip("fcntl")
    path = tmp_path / "journal.jsonl"
    with Journal(path, SETTINGS), pytest.raises(UsageError, match="another evaluation writes"):
        Journal(path, SETTINGS)
    Journal(path, SETTINGS).close()


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 3}}, ["a: 1 -> none", "b.c: 2 -> 3"]),
        ({}, {"d": [0] * 99}, ["d: none -> [" + "0, " * 19 + "0,..."]),
        (
            {"methods": [PLAIN]},
            {"methods": [PLAIN, {"name": "dynasor"}]},
            ["methods: plain -> plain, dynasor"],
        ),
        (
            {"methods": [PLAIN]},
            {"methods": [{**PLAIN, "sampling_params": {"max_tokens": 20}}]},
            ["plain sampling_params.max_tokens: 9 -> 20"],
        ),
        (
            {"problems": "a" * 64, "num_problems": 40},
            {"problems": "b" * 64, "num_problems": 64},
            ["num_problems: 40 -> 64"],
        ),
        (
            {"problems": "a" * 64, "num_problems": 40},
            {"problems": "b" * 64, "num_problems": 40},
            ["problems: others, or in another order"],
        ),
        (
            {"model": {"files": {"config.json": "c" * 16, "a": [1, 2], "b": [3, 4]}}},
            {"model": {"files": {"config.json": "d" * 16, "a": [1, 5], "b": [3, 4]}}},
            ["model.files that have changed: a, config.json"],
        ),
        ({"instruction": ""}, {"instruction": "Box it."}, ["instruction: none -> Box it."]),
    ],
)
def test_what_differs_is_said_in_words_and_without_hashes(old, new, changes):
    assert differences(old, new) == changes


def test_a_finished_evaluation_makes_way_for_another_one_and_is_read_again(tmp_path):
    path, other = tmp_path / "journal.jsonl", SETTINGS | {"seed": 1}
    with Journal(path, SETTINGS) as journal:
        journal.append("attempt", attempt(0).to_dict())
        journal.finish()
    with Journal(path, other) as journal:
        assert (journal.attempts("plain", PROBLEMS), journal.is_finished) == ([], False)
        assert journal.path.parent == tmp_path
        journal.append("attempt", attempt(1).to_dict())
    with Journal(path, SETTINGS) as journal:
        assert (journal.path, journal.is_finished, journal.num_appended) == (path, True, 0)
        assert journal.attempts("plain", PROBLEMS) == [attempt(0)]
    with Journal(path, other) as journal:
        assert journal.attempts("plain", PROBLEMS) == [attempt(1)]
    with Journal(path, other, is_fresh=True) as journal:
        assert journal.attempts("plain", PROBLEMS) == []
    with Journal(path, SETTINGS) as journal:
        assert journal.attempts("plain", PROBLEMS) == [attempt(0)]


def test_a_folder_is_named_for_readers_and_by_all_settings():
    name = folder_name("count down-plain,majority_vote@8", SETTINGS)
    assert re.fullmatch(r"count-down-plain-majority_vote@8-[0-9a-f]{8}", name)
    assert folder_name("a", SETTINGS) != folder_name("a", SETTINGS | {"seed": 1})
    assert len(folder_name("x" * 999, SETTINGS)) < 80
    assert "/" not in folder_name("../../etc", SETTINGS)


def test_a_changed_model_has_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert [name for name in before if fingerprint(tmp_path)[name] != before[name]] == [
        "config.json"
    ]


def test_the_hash_of_problems_is_of_what_is_asked_and_in_which_order():
    renamed = [Problem("x", problem.question, problem.answer) for problem in PROBLEMS]
    assert problems_hash(renamed) == problems_hash(PROBLEMS)
    assert problems_hash(PROBLEMS[::-1]) != problems_hash(PROBLEMS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    with Journal(path, {"seed": 1}) as journal:
        journal.append("note", {"text": "a"})
        before = path.read_bytes()
        with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patched:
            patched.setattr(journal, "_file", HalfFull(journal._file, full))
            with pytest.raises(FileError, match="No space left"):
                journal.append("note", {"text": "b"})
    assert path.read_bytes() == before


class HalfFull:
    """Writes half of what it is given, as a disk that is full then."""

    def __init__(self, file, full):
        self.seek, self.truncate, self._file, self._full = file.seek, file.truncate, file, full

    def write(self, data):
        self._file.write(data[: len(data) // 2])
        return self._full.write(data)
