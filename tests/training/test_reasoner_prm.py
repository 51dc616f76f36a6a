"""The process reward model of the reasoner: exact labels of steps, and a short run of training."""

import argparse
import asyncio
import math
import random

import pytest
from transformers import AutoTokenizer, LlamaForTokenClassification

from forethought.assets import reasoner_dir
from forethought.evaluation.generated.arithmetic import Problem, Step, sample_problem
from forethought.scaffolding import PRMController, RewardTask, RewardWorker
from reasoner import prm, prm_figures
from reasoner.labels import is_right, label_lines
from reasoner.samples import SAMPLES, Sample, make_samples, write_samples
from reasoner.traces import write_trace

PROBLEM = Problem(
    "collection",
    "Tom has 10 nuts. He buys 5 more. He now has 3 times as many. How many nuts does Tom have now?",
    (Step("He buys 5 more", 10, "+", 5), Step("He now has 3 times as many", 15, "x", 3)),
    (None, None, 0, None),
)
DERIVATION = "He buys 5 more: 10 + 5 = 15.\nHe now has 3 times as many: 15 x 3 = 45.\n"
END = "</think>\nThe answer is \\boxed{45}."
WRONG = "He buys 5 more: 10 + 5 = 16.\nHe now has 3 times as many: 16 x 3 = 48.\n"


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        (f"Okay, let me see.\n{DERIVATION}So the answer is 45.\n{END}", "111111"),
        (f"{WRONG}So the answer is 48.\n</think>\nThe answer is \\boxed{{48}}.", "00000"),
        ("He buys 5 more: 10 + 5 = 15.\nHe now has 3 times as many: 15 x 3 = 46.\n", "10"),
        (
            "He now has 3 times as many: 10 x 3 = 30.\nSo the answer is 30.\n",
            "00",
        ),  # one is missing
        (f"{DERIVATION}So the answer is yes.\n", "110"),
        ("He buys 7 more: 10 + 7 = 17.\n", "0"),
        ("He bbuys 5 moore: 10 + 5 = 15.\n", "1"),  # misspelt
        ("He loses 5: 10 + 5 = 15.\nHe loses 5: 10 - 5 = 5.\n", "10"),
        (  # it quotes the value that should have stood there
            f"{WRONG}So the answer is 48.\n10 + 5 = 15, I had 15, yes.\n"
            "15 x 3 = 45, I had 45, yes.\n",
            "00000",
        ),
        (  # two values that differ are no confirmation
            f"{WRONG}So the answer is 48.\n10 + 5 = 15, I had 16, yes.\n"
            "15 x 3 = 45, I had 48, yes.\n",
            "00000",
        ),
        ("He buys 5 more: 11 + 4 = 15.\n", "0"),  # other operands
        (
            "He buys 5 more: 10 + 5 = 15.\nHe now has 3 times as many: 10 x 3 = 30, 5 x 3 = 15, "
            "30 + 15 = 45.\n",
            "11",
        ),
        (
            "He buys 5 more: 10 + 5 = 15.\nHe now has 3 times as many: 10 x 3 = 40, 5 x 3 = 15, "
            "40 + 15 = 45.\n",
            "10",
        ),
        (
            f"{DERIVATION}So the answer is 45.\n10 + 5 = 15, I had 15, yes.\n"
            "15 x 3 = 40, I had 45, yes.\n",
            "11110",
        ),
        (
            f"{WRONG}So the answer is 48.\n10 + 5 = 15, I had 16. Again: 10 + 5 = 15, "
            f"I had 16. That was a slip.\n15 x 3 = 45.\nSo the answer is 45.\n{END}",
            "00011111",
        ),
        (
            f"{WRONG}So the answer is 48.\n10 + 5 = 16, I had 16, yes.\n"
            f"So the answer is 45.\n{END}",
            "0000000",
        ),
        (
            f"{DERIVATION}So the answer is 45.\n10 + 5 = 16, I had 15. Again: 10 + 5 = 16, "
            "I had 15. That was a slip.\n16 x 3 = 48.\nSo the answer is 48.\n",
            "111000",
        ),
        (  # the slip is the re-check's own
            f"{DERIVATION}So the answer is 45.\n10 + 5 = 16, I had 15. Again: 10 + 5 = 15, "
            "I had 15, yes.\n15 x 3 = 45, I had 45, yes.\nSo the answer is 45.\n",
            "111111",
        ),
        (  # the third value is that of the derivation, which is kept, and wrong
            f"{WRONG}So the answer is 48.\n10 + 5 = 15, I had 16. Again: 10 + 5 = 16, "
            "I had 16, yes.\n"
            "So the answer is 48.\n",
            "00000",
        ),
        (  # it ends before it says which value stands
            f"{DERIVATION}So the answer is 45.\n10 + 5 = 16, I had 15. Again: 10 + 5 = 15",
            "1111",
        ),
        (  # it quotes another value than the derivation's
            f"{DERIVATION}So the answer is 45.\n10 + 5 = 16, I had 14. Again: 10 + 5 = 15, "
            "I had 15, yes.\n15 x 3 = 45, I had 45, yes.\n",
            "11101",
        ),
        (
            f"{DERIVATION}So the answer is 45.\nHmm, did I read the question right?\n"
            "He buys 5 more.\nHe buys 6 more.\nRight, that is 45.\nRight, that is 44.\n",
            "11111010",
        ),
        ("\n\nOkay.\n\n7 7 7\n", "10"),
        ("", ""),
        ("10 / 0 = 3.\n", "0"),
        ("He buys 5 more: 10 + 5 = .\nHe buys 5 more: 10 + 5 = 15.\n", "01"),
    ],
)
def test_a_line_is_good_if_it_is_right_and_nothing_uncorrected_stands_before_it(text, labels):
    assert "".join(str(int(label)) for label in label_lines(PROBLEM, text)) == labels


@pytest.mark.parametrize("seed", range(3))
def test_what_the_generator_writes_is_labelled_as_it_was_written(seed):
    rng = random.Random(seed)
    for _ in range(200):
        problem = sample_problem(rng)
        assert all(label_lines(problem, write_trace(problem, rng).text))
        trace = write_trace(problem, rng, slip_rate=1.0)
        if not all(piece.trained for piece in trace.pieces):
            lines = trace.text.splitlines(keepends=True)
            corrected = next(n for n, line in enumerate(lines) if "slip" in line)
            labels = label_lines(problem, trace.text)
            assert all(labels[corrected:])
            assert not all(labels[:corrected])
            assert labels[:corrected] == sorted(labels[:corrected], reverse=True)


def test_a_sample_is_right_by_its_last_box():
    assert is_right(PROBLEM, "\\boxed{44} \\boxed{45}.")
    assert not is_right(PROBLEM, "\\boxed{45} \\boxed{44}.")
    assert not is_right(PROBLEM, "45")


def test_a_sample_comes_back_from_its_line():
    sample = Sample(PROBLEM, "two\nlines \N{SNOWMAN}")
    line = sample.to_line()
    assert "\n" not in line
    assert Sample.from_line(line) == sample


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(reasoner_dir())


def test_an_example_is_read_where_its_lines_end(tokenizer):
    text = f"{WRONG}So the answer is 48.\n{END}"
    example = prm.make_example(tokenizer, Sample(PROBLEM, text))
    ends = [tokenizer.decode(example.token_ids[: place + 1]) for place in example.positions]
    lines = text.splitlines(keepends=True)
    assert [end.endswith(line) for end, line in zip(ends, lines, strict=True)] == [True] * 5
    assert example.labels == [0] * 5
    empty = prm.make_example(tokenizer, Sample(PROBLEM, ""))
    assert (empty.positions, empty.labels) == ([len(empty.token_ids) - 1], [0])


def test_padding_changes_no_probability(tokenizer):
    module = prm.load_classifier(reasoner_dir()).eval()
    texts = [DERIVATION, f"{WRONG}So the answer is 48.\n{END}", "He"]
    examples = [prm.make_example(tokenizer, Sample(PROBLEM, text)) for text in texts]
    together = prm.step_probabilities(module, examples)
    alone = [prm.step_probabilities(module, [example])[0] for example in examples]
    assert [len(row) for row in together] == [2, 5, 1]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def some_samples(count, slips, seed=0):
    rng = random.Random(seed)
    problems = [sample_problem(rng) for _ in range(count)]
    return [Sample(each, write_trace(each, rng, slips).text) for each in problems]


def options(out, **fields):
    given = {
        "seed": 0,
        "steps": 1,
        "rate": 1e-3,
        "batch": 300,
        "target": reasoner_dir(),
        "out": out,
    }
    return argparse.Namespace(**given | fields)


def test_a_run_of_training_is_a_function_of_its_seed_and_is_served(tmp_path):
    samples, others = some_samples(6, 0.5), some_samples(2, 1.0, seed=1)
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for seed, out in zip((0, 0, 1), runs, strict=True):
        found = prm.train(samples, others, options(out, seed=seed))
        assert 0.0 <= found["step_auc"] <= 1.0
    written = [(out / "model" / "model.safetensors").read_bytes() for out in runs]
    assert written[0] == written[1] != written[2]
    assert sum(file.stat().st_size for file in (runs[0] / "model").iterdir()) < 8 * 10**6
    model = LlamaForTokenClassification.from_pretrained(runs[0] / "model")
    assert model.config.id2label == {0: "bad", 1: "good"}
    with RewardWorker(runs[0] / "model", dtype="float32") as worker:
        task = PRMController.of(worker)._encoded(
            RewardTask(input_str=others[0].problem.question, output_str=others[0].text)
        )
        asyncio.run(worker.run_task(task))
    example = prm.make_example(worker.tokenizer, others[0])
    expected = prm.step_probabilities(prm.load_classifier(runs[0] / "model").eval(), [example])[0]
    assert (task.input_tokens, task.step_positions) == (example.token_ids, example.positions)
    assert task.step_scores == pytest.approx(expected, abs=1e-4)


def test_samples_are_drawn_once_and_go_on_where_they_stopped(tmp_path):
    class Llm:
        calls = 0

        def generate(self, prompts, params):
            Llm.calls += len(prompts)
            assert [each.temperature for each in params] == [0.8, 1.0]
            texts = [
                [f"{prompt}{each.seed}/{n}" for n in range(each.n)]
                for prompt, each in zip(prompts, params, strict=True)
            ]
            return [
                argparse.Namespace(outputs=[argparse.Namespace(text=text) for text in row])
                for row in texts
            ]

    path, rng = tmp_path / "samples.jsonl", random.Random(0)
    problems = [sample_problem(rng) for _ in range(2)]
    first = make_samples(path, Llm(), problems, seed=1)
    assert len({sample.text for sample in first}) == 2 * SAMPLES
    assert make_samples(path, Llm(), problems, seed=1) == first
    assert Llm.calls == 2


def test_written_samples_have_slips_that_are_corrected_later_if_at_all():
    samples = write_samples(60, seed=0)
    assert samples == write_samples(60, seed=0)
    labels = [label_lines(sample.problem, sample.text) for sample in samples]
    assert all(labels)
    assert sum(not all(each) for each in labels) > 30, "others are cut before their slip"
    assert any(not all(each) and each[-1] for each in labels)
    assert any(not each[-1] for each in labels)


def test_the_head_begins_as_the_best_linear_one(tokenizer):
    module = prm.load_classifier(reasoner_dir()).eval()
    examples = [prm.make_example(tokenizer, each) for each in some_samples(40, 1.0)]
    prm.fit_head(module, examples)
    scores = [p for row in prm.step_probabilities(module, examples) for p in row]
    labels = [label for example in examples for label in example.labels]
    assert prm.auc(scores, labels) > 0.9, "it is fitted to these"
    assert sum(scores) / len(scores) == pytest.approx(sum(labels) / len(labels), abs=0.02)


def test_measures_of_a_hand_computed_case():
    assert prm.auc([0.9, 0.8, 0.8, 0.1], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    assert math.isnan(prm.auc([0.5], [1]))
    assert prm_figures.calibration_error([0.95, 0.95, 0.15], [1, 0, 0]) == pytest.approx(
        (0.9 + 0.15) / 3
    )


def candidate(answer, labels, steps, value=1.0):
    text = f"\\boxed{{{answer}}}"
    confidence = prm_figures.TokenConfidence(value, -value)
    return prm_figures.Candidate(Sample(PROBLEM, text), [confidence], labels, steps)


def test_each_reward_selects_the_sample_that_it_ranks_first():
    wrong = candidate("44", [True, False], [0.9, 0.2], value=3.0)
    same = candidate("44", [False, False], [0.1, 0.1], value=1.0)
    right = candidate("45", [True, True], [0.7, 0.8], value=2.0)
    found = prm_figures.selection_figures([[wrong, same, right], [right, wrong, wrong]])
    assert found["random sample"] == pytest.approx(1 / 3)
    assert found["vote"] == 0.0
    assert found["any of them"] == found["oracle (exact recomputation)"] == 1.0
    assert found["reward model, last"] == found["reward model, product"] == 1.0
    assert found["confidence, mean"] == 0.0
    assert found["vote weighted by reward model, last"] == 1.0
    steps = prm_figures.step_figures([[wrong, right]])
    assert (steps["steps"], steps["good"], steps["auc"]) == (4, 0.75, 1.0)
