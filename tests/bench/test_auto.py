"""The choice of threads, weights and drafter by measurement."""

import json

import pytest
import torch
import yaml

from forethought import LLM
from forethought.bench.auto import (
    AutoBench,
    FormRow,
    fastest_batch,
    form_table,
    thread_counts,
)
from forethought.bench.report import BenchRow, recommend
from forethought.bench.variant import PLAIN, Variant
from forethought.cli.main import main
from forethought.config.drafters import NGramDecodingConfig
from forethought.config.engine import LlmArgs
from forethought.errors import ParameterError
from forethought.evaluation.problems import shipped, user_prompt
from forethought.model import device
from forethought.outputs import SpeculationMetrics

NGRAM = NGramDecodingConfig(max_draft_len=2, max_matching_ngram_size=2)


@pytest.fixture(autouse=True)
def threads_of_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def read_prompts(llm):
    return [user_prompt(llm, problem.question) for problem in shipped()[:8]]


def test_each_form_is_measured_and_the_fastest_becomes_the_configuration():
    bench = AutoBench(
        {"dtype": "bfloat16"},
        [NGRAM],
        quantizations=["int8"],
        threads=[1],
        batches=[2],
        max_tokens=4,
        rounds=1,
    )
    done = []
    choice = bench.run(read_prompts, done.append)
    assert [(row.quantization, row.num_threads) for row in choice.forms] == [(None, 1), ("int8", 1)]
    assert choice.best == max(choice.forms, key=lambda row: row.score)
    assert choice.forms[0].identical_share == 1.0
    assert len(done) == bench.num_runs
    assert choice.config["num_threads"] == 1
    assert choice.config.get("quantization") == choice.best.quantization
    LlmArgs.from_dict(choice.config)  # every field is one of the engine's


def test_a_form_that_is_not_allowed_is_not_tried():
    assert AutoBench({}, [NGRAM], threads=[1]).forms == [None]


def test_the_score_is_the_geometric_mean_over_the_batch_sizes():
    row = FormRow("int8", 2, (100.0, 400.0), 0.75)
    assert row.score == pytest.approx(200.0)
    assert form_table([row], [1, 4]).splitlines()[2].split() == ["int8", "2", "100", "400", "75%"]


@pytest.mark.parametrize(
    ("drafted", "plain", "batch"),
    [
        ([150, 390], [100, 400], 4),  # plain decoding above max_concurrency 1
        ([150, 90], [100, 120], 1),
        ([150, 500], [100, 400], 4),
    ],
)
def test_the_batch_is_the_one_with_the_most_tokens_per_second(drafted, plain, batch):
    def row(variant, size, speed, beside):
        metrics, ratio = SpeculationMetrics(1), speed / beside
        return BenchRow(variant, size, speed, ratio, (ratio, ratio), metrics, 0, 0, 1.0, 1)

    rows = [
        row(variant, size, speed, beside)
        for variant, speeds in ((PLAIN, plain), (Variant("ngram", 2), drafted))
        for size, speed, beside in zip((1, 4), speeds, plain, strict=True)
    ]
    assert fastest_batch(rows, recommend(rows)) == batch


@pytest.mark.parametrize(("processors", "counts"), [(1.0, [1]), (2.5, [1, 2]), (6.0, [1, 2, 4, 6])])
def test_threads_are_tried_up_to_the_processors(monkeypatch, processors, counts):
    monkeypatch.setattr("forethought.bench.auto.usable_processors", lambda: processors)
    assert thread_counts() == counts


def test_the_engine_sets_the_threads_that_it_is_given():
    with LLM(num_threads=1):
        assert torch.get_num_threads() == 1


def test_more_threads_than_processors_are_refused(monkeypatch):
    monkeypatch.setattr(device, "usable_processors", lambda: 2.0)
    with pytest.raises(ParameterError, match="Use 1 to 2"):
        device.set_threads(3, torch.device("cpu"))
    with pytest.raises(ParameterError, match="no meaning"):
        device.set_threads(1, torch.device("cuda"))


def test_the_command_writes_a_file_that_the_other_commands_read(capsys, tmp_path):
    options = ["--threads", "1", "--batch", "1", "--rounds", "1", "--max-tokens", "2"]
    drafter = ["--speculative", "ngram", "--max-draft-len", "2"]
    assert main(["bench", "auto", "--json", *options, *drafter, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert written == report["config"]
    assert (tmp_path / "auto.png").read_bytes().startswith(b"\x89PNG")
    question = ["What is 2 + 2?", "--config", str(tmp_path / "config.yaml"), "--max-tokens", "2"]
    assert main(["generate", *question]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "0"], "invalid --batch"),
        (["--threads", "0"], "invalid --threads"),
        (["--max-tokens", "0"], "invalid --max-tokens"),
        (["--quantization", "int8", "--allow", "int4"], "--allow and --quantization"),
        (["--batch", "100000"], "invalid batch size"),
    ],
)
def test_what_cannot_be_tried_is_refused_by_name(capsys, tmp_path, options, said):
    assert main(["bench", "auto", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
