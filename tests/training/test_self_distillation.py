"""The target writes its own texts, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engines import load
from forethought.assets import problems, reasoner_dir
from forethought.errors import ParameterError
from forethought.llm.tokenizer import Tokenizer
from forethought.methods.parts.probe import ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER, PROBE_SUFFIX
from forethought.training import texts as corpus
from forethought.training.run import Source, TargetModel, TrainingRun
from forethought.training.teacher import Teacher
from forethought.training.texts import DistillationSettings, Text, probe_prompts, self_distil
from models import greedy, prompts, tiny

PROMPTS = prompts((1, 4, 9, 17, 5))
SETTINGS = DistillationSettings(max_tokens=6)


class Counting(Teacher):
    """Says how many prompts it was asked."""

    asked = 0

    def generate(self, *args, **more):
        self.asked += len(args[0])
        return super().generate(*args, **more)


@pytest.fixture
def teacher(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(corpus, "PART", 2)
    return Counting(load("llama"), Tokenizer.load(reasoner_dir()), tiny("llama"))


def test_every_prompt_is_answered_at_the_temperatures_in_turn(
    teacher: Counting, tmp_path: Path
) -> None:
    texts = self_distil(teacher, PROMPTS, tmp_path / "t.jsonl", SETTINGS)
    assert [text.prompt for text in texts] == PROMPTS
    for index in (0, 2, 4):  # greedy ones; transformers does not stop at an end of sequence
        answer = texts[index].token_ids[len(PROMPTS[index]) :]
        assert answer == greedy(tiny("llama"), [PROMPTS[index]], 6)[0][: len(answer)]


@pytest.mark.parametrize(("lines", "asked"), [(0, 5), (1, 5), (2, 3), (3, 3), (4, 1), (5, 0)])
def test_an_interrupted_run_goes_on_behind_the_last_whole_part(
    teacher: Counting, tmp_path: Path, lines: int, asked: int
) -> None:
    whole = self_distil(teacher, PROMPTS, tmp_path / "whole", SETTINGS)
    written = (tmp_path / "whole").read_text().splitlines(keepends=True)
    (tmp_path / "part").write_text("".join(written[:lines]))
    teacher.asked = 0
    assert self_distil(teacher, PROMPTS, tmp_path / "part", SETTINGS) == whole
    assert teacher.asked == asked


def test_answers_to_other_prompts_are_refused(teacher: Counting, tmp_path: Path) -> None:
    self_distil(teacher, PROMPTS[:2], tmp_path / "t", SETTINGS)
    with pytest.raises(ParameterError, match="answers to other prompts"):
        self_distil(teacher, PROMPTS[1:], tmp_path / "t", SETTINGS)


# ---- probes ------------------------------------------------------------------------------------

SUFFIXES = (PROBE_SUFFIX, ANSWER_SUFFIX, ANSWER_SUFFIX_WITH_MARKER)


@pytest.fixture(scope="module")
def reasoner() -> Teacher:
    return Teacher.load(reasoner_dir(), "float32")


@pytest.fixture(scope="module")
def solved(reasoner: Teacher) -> list[Text]:
    """Texts of a question and a trace, the last tokens of which close the thoughts."""
    encode = reasoner.tokenizer.encode_more
    trace = encode(
        "He buys 5 more: 12 + 5 = 17.\nSo it is 17.\n</think>\nThe answer is \\boxed{17}."
    )
    prompts = [encode(f"<|user|>{p['question']}<|assistant|><think>\n") for p in problems()[:40]]
    return [Text(prompt + trace, len(prompt)) for prompt in prompts]


def test_a_probe_cuts_an_answer_anywhere_and_appends_the_suffix_of_the_method(
    reasoner: Teacher, solved: list[Text]
) -> None:
    settings = DistillationSettings(probe_share=1.0)
    found = probe_prompts(solved, reasoner, settings)
    assert len(found) == len(solved)
    encoded = {suffix: reasoner.tokenizer.encode_more(suffix) for suffix in SUFFIXES}
    used, lengths = set(), set()
    for probe in found:
        suffix = next(s for s, ids in encoded.items() if probe[-len(ids) :] == ids)
        kept = probe[: -len(encoded[suffix])]
        [text] = [
            t for t in solved if t.token_ids[: len(kept)] == kept and len(kept) >= t.prompt_length
        ]
        closed = "</think>" in reasoner.tokenizer.decode(kept[text.prompt_length :])
        assert (suffix == ANSWER_SUFFIX) == closed
        used.add(suffix)
        lengths.add(len(kept) - text.prompt_length)
    assert used == set(SUFFIXES)
    assert len(lengths) > 10


def test_probes_are_a_share_of_the_texts_and_a_function_of_the_seed(
    reasoner: Teacher, solved: list[Text]
) -> None:
    def found(**fields: float) -> list[list[int]]:
        return probe_prompts(solved, reasoner, DistillationSettings(**fields))

    assert found() == []
    assert len(found(probe_share=0.25)) == 10
    before = random.getstate()
    assert found(probe_share=0.5) == found(probe_share=0.5) != found(probe_share=0.5, seed=1)
    assert random.getstate() == before


def test_a_probe_that_would_not_fit_the_context_is_left_out(
    reasoner: Teacher, solved: list[Text]
) -> None:
    full = Text(solved[0].prompt * 40, len(solved[0].prompt))
    long = Text(full.token_ids[: reasoner.lm.max_positions], reasoner.lm.max_positions - 5)
    settings = DistillationSettings(probe_share=1.0)
    assert len(probe_prompts([*solved[:3], long], reasoner, settings)) == 3


def test_a_run_learns_from_the_answers_to_probes_but_never_probes_held_out_texts(
    tmp_path: Path,
) -> None:
    out, data = tmp_path / "out", tmp_path / "prompts.txt"
    data.write_text("".join(p["question"] + "\n" for p in problems()[:10]))
    fields = {"hidden_size": 24, "intermediate_size": 32, "num_layers": 1, "steps": 1}
    more = {"batch_tokens": 10_000, "max_tokens": 24, "probe_share": 1.0}
    run = TrainingRun("draft-model", fields | more, out, TargetModel(dtype="float32"))
    run(Source(prompts=data), held_out=4)
    texts, probes = (
        [json.loads(line) for line in (out / name).read_text().splitlines()]
        for name in ("texts.jsonl", "probes.jsonl")
    )
    prompts = [text["token_ids"][: text["prompt_length"]] for text in texts]
    assert (len(texts), len(probes)) == (10, 6)
    origins = {
        number
        for probe in probes
        for number, prompt in enumerate(prompts)
        if probe["token_ids"][: len(prompt)] == prompt
    }
    assert origins == set(range(4, 10))
    answers = [p["token_ids"][p["prompt_length"] :] for p in probes]
    assert all(0 < len(answer) <= 12 for answer in answers)
    assert any("}" in run.teacher.tokenizer.decode(answer) for answer in answers)
