"""What a decode step costs at least, by hand, and the command that measures it."""

import copy
import json

import pytest
import torch

from forethought.bench.roofline import (
    Machine,
    ModelCost,
    RooflineRow,
    roofline_row,
    roofline_table,
)
from forethought.cli.main import main
from forethought.model import loader
from models import VOCAB, save_random, tiny, transformers_model

LINEARS = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
"""Of the tiny Llama: query and output, key and value, gate, up and down, in three layers."""


def cost(**fields):
    plain = {
        "dense_bytes": 1000,
        "expert_bytes": 0,
        "active_experts": 1.0,
        "dense_weights": 500,
        "expert_weights": 0,
        "kv_bytes": 10,
        "attention_operations": 8,
        "activation_bytes": 3,
    }
    return ModelCost(**{**plain, **fields})


def test_weights_and_keys_and_values_are_counted_from_the_model():
    path = tiny("llama")
    found = ModelCost.of(loader.load(path, dtype="float32"))
    assert found.dense_weights == LINEARS + VOCAB * 32  # the head is read, the embedding is not
    assert found.dense_bytes == 4 * found.dense_weights
    assert found.kv_bytes == 3 * 2 * (8 + 8) * 4
    assert found.attention_operations == 3 * 2 * 4 * (8 + 8)
    assert (found.expert_bytes, found.active_experts) == (0, 1.0)


def test_a_tied_embedding_is_read_as_the_output_projection():
    path = tiny("llama_tied_biased")
    assert ModelCost.of(loader.load(path, dtype="float32")).dense_weights >= VOCAB * 32


def test_quantised_weights_count_as_they_are_held():
    path = tiny("llama")
    eight = ModelCost.of(loader.load(path, dtype="float32", quantization="int8"))
    outputs = 3 * (2 * 32 + 2 * 16 + 2 * 48 + 32) + VOCAB
    assert eight.dense_weights == LINEARS + VOCAB * 32
    assert eight.dense_bytes == eight.dense_weights + 4 * outputs  # and a scale per output


def test_with_int4_the_output_projection_counts_in_8_bits(tmp_path):
    config = copy.deepcopy(transformers_model(tiny("llama")).config)
    config.intermediate_size = 64
    save_random(config, tmp_path, dtype=torch.float32)
    four = ModelCost.of(loader.load(tmp_path, dtype="float32", quantization="int4"))
    blocks = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32)
    # Per 32 inputs a scale and a zero point; the down projection has groups of 64.
    groups = 3 * (2 * 32 + 2 * 16 + 2 * 64 + 32)
    assert four.dense_bytes == blocks // 2 + 8 * groups + VOCAB * 32 + 4 * VOCAB


def test_attention_over_a_window_reads_no_more_than_it():
    full = ModelCost.of(loader.load(tiny("llama"), dtype="float32"))
    windowed = ModelCost.of(loader.load(tiny("mistral"), dtype="float32"))
    for count in (ModelCost.step_bytes, ModelCost.step_operations):
        assert count(windowed, 2, 6) == count(full, 2, 6)
        assert count(windowed, 2, 50) == count(full, 2, 6)
    gemma = ModelCost.of(loader.load(tiny("gemma2"), dtype="float32"))
    assert [layer.window for layer in gemma.windowed] == [6, 6]
    assert gemma.step_bytes(1, 16) - gemma.step_bytes(1, 6) == 10 * gemma.kv_bytes // 3


def test_a_token_uses_its_share_of_the_experts():
    path = tiny("qwen3_moe")
    found = ModelCost.of(loader.load(path, dtype="float32"))
    assert found.active_experts == 0.5
    assert found.expert_bytes > 0


def test_a_step_reads_weights_once_and_keys_and_values_per_sequence():
    assert cost().step_bytes(2, 7) == 1000 + 2 * (7 * 10 + 3)
    assert cost().step_operations(2, 7) == 2 * (2 * 500 + 7 * 8)


def test_experts_are_read_by_the_chance_that_one_of_the_sequences_uses_them():
    some = cost(expert_bytes=400, expert_weights=100, active_experts=0.5)
    assert some.step_bytes(1, 0) == 1000 + 0.5 * 400 + 3
    assert some.step_bytes(2, 0) == 1000 + 0.75 * 400 + 6
    assert some.step_operations(1, 0) == 2 * (500 + 50)


def test_the_floor_is_the_longer_of_reading_and_computing():
    row = roofline_row(cost(), Machine(1000.0, 1e9), (1, 0, 4.0, 3.0))
    assert row.memory_floor == pytest.approx(1.003)
    assert row.floor == row.memory_floor
    assert row.to_dict()["bound"] == "memory"
    assert row.to_dict()["share_of_floor"] == pytest.approx(0.2508, abs=2e-4)
    slow = roofline_row(cost(), Machine(1e9, 100.0), (1, 0, 40.0, 30.0))
    assert slow.floor == slow.compute_floor == pytest.approx(10.0)
    assert slow.to_dict()["bound"] == "compute"


def test_a_step_reads_the_layers_that_are_in_a_file():
    lm = loader.load(tiny("llama"), dtype="float32", forward="native", layer_window=1)
    some = ModelCost.of(lm)
    assert some.step_file_bytes(1) == some.step_file_bytes(9) >= 4 * (LINEARS - VOCAB * 32)
    row = roofline_row(cost(layer_file_bytes=300), Machine(1000.0, 1e9, 50.0), (1, 0, 9.0, 8.0))
    assert row.floor == row.file_floor == pytest.approx(6.0)
    assert Machine.measure(lm).file_bytes_per_second > 0


def test_time_outside_the_network_is_the_rest_of_the_step():
    row = RooflineRow(1, 128, 0.001, 0.0005, 0.004, 0.003)
    assert row.outside == pytest.approx(0.001)
    assert roofline_table([row]).splitlines()[2].split() == [
        *("1", "128", "1.000", "memory", "4.000", "3.000", "1.000", "25%"),
    ]


def test_the_command_writes_a_table_a_plot_and_one_json_line(capsys, tmp_path):
    options = ["--batch", "1", "2", "--context", "32", "--rounds", "1", "--out", str(tmp_path)]
    assert main(["bench", "roofline", "--quantization", "int8", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    report = json.loads(out[-1])
    assert [(row["batch"], row["context"]) for row in report["rows"]] == [(1, 32), (2, 32)]
    cost = report["cost"]
    assert cost["dense_weights"] < cost["dense_bytes"] < 1.1 * cost["dense_weights"]
    assert report["machine"]["dtype"] in ("bfloat16", "float32")  # as the processor is
    assert json.loads((tmp_path / "roofline.json").read_text()) == report
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "0"], "invalid --batch"),
        (["--context", "-3"], "invalid --context"),
        (["--rounds", "0"], "invalid --rounds"),
        (["--context", "100000"], "invalid context 100000"),
        (["--speculative", "ngram"], "a drafter has no meaning here"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(capsys, tmp_path, options, said):
    assert main(["bench", "roofline", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


def test_experts_in_a_file_are_a_floor_of_their_own():
    some = cost(expert_bytes=400, expert_weights=100, active_experts=0.5, experts_in_file=0.25)
    assert some.step_file_bytes(1) == 50
    assert some.step_file_bytes(2) == 75
    row = roofline_row(some, Machine(1e9, 1e9, 10.0), (1, 0, 6.0, 5.0))
    assert row.floor == row.file_floor == pytest.approx(5.0)
    assert row.to_dict()["bound"] == "file"


def test_the_file_that_experts_are_in_is_measured():
    lm = loader.load(tiny("qwen3_moe"), "float32", forward="native", expert_bytes=8 * 2**13)
    assert ModelCost.of(lm).experts_in_file == pytest.approx(1 - 8 / 12)
    assert Machine.measure(lm).file_bytes_per_second > 0
    assert Machine.measure(loader.load(tiny("llama"))).file_bytes_per_second is None
