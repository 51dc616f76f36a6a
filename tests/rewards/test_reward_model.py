"""``RewardModel``: the formats of process reward models against plain transformers, each token of a
prefix computed once."""

import asyncio
import json
import math
import random
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
    XLMRobertaForSequenceClassification,
)

from forethought.errors import ContextLengthError, ModelError, ParameterError
from forethought.rewards.reward_cache import RewardPrefixCache
from forethought.rewards.reward_model import RewardModel, RewardQuery, is_reward_model
from forethought.scaffolding import PRMController, RewardTask, RewardWorker
from reward_models import save, tokenizer

QUESTION, ANSWER = "What is 2 + 3 x 4?", "3 x 4 = 12.\n2 + 12 = 14.\nSo it is 14."


def with_head(directory, architecture, head):
    """A causal model of the directory made a checkpoint with a head of its own."""
    save(directory, Qwen2ForCausalLM, tie_word_embeddings=False)
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | head, weights, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [architecture]
    config["auto_map"] = {"AutoModel": f"modeling_of_its_own.{architecture}"}  # never looked at
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def process_head():
    torch.manual_seed(1)
    return {
        "score.0.weight": torch.randn(32, 32) / 6,
        "score.0.bias": torch.randn(32),
        "score.2.weight": torch.randn(2, 32) / 6,
        "score.2.bias": torch.randn(2),
    }


def value_head():
    torch.manual_seed(2)
    return {
        "v_head.summary.weight": torch.randn(1, 32),
        "v_head.summary.bias": torch.randn(1),
    }


def score(directory, answer=ANSWER, **options):
    """Scores of the steps, and the task, as a search asks for them."""
    options.setdefault("dtype", "float32")
    with RewardWorker(directory, **options) as worker:
        task = RewardTask(input_str=QUESTION, output_str=answer)
        encoded = PRMController.of(worker)._encoded(task)
        asyncio.run(worker.run_task(encoded))
        return encoded


def hidden_states(directory, ids):
    """The reference implementation: the plain backbone over the whole row."""
    model = Qwen2Model.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def test_a_process_head_of_two_layers_is_read_at_the_separators(tmp_path, caplog):
    head = process_head()
    directory = with_head(tmp_path, "Qwen2ForProcessRewardModel", head)
    caplog.clear()
    task = score(directory, "one\n\ntwo\n\nthree")
    words = AutoTokenizer.from_pretrained(directory)
    separator = words.convert_tokens_to_ids("<extra_0>")
    assert [task.input_tokens[place] for place in task.step_positions] == [separator] * 3
    assert not caplog.records, "the head is nothing to warn of"
    hidden = hidden_states(directory, task.input_tokens)[task.step_positions]
    inner = (hidden @ head["score.0.weight"].T + head["score.0.bias"]).relu()
    logits = inner @ head["score.2.weight"].T + head["score.2.bias"]
    assert task.step_scores == pytest.approx(logits.softmax(-1)[:, 1].tolist(), abs=1e-5)
    assert len({round(value, 4) for value in task.step_scores}) == 3


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_value_head_is_read_at_the_line_end_behind_each_step(tmp_path, file):
    head = value_head()
    directory = with_head(tmp_path, "Qwen2ForPrmModel", head)
    if file.endswith(".bin"):
        torch.save(load_file(directory / "model.safetensors"), directory / file)
        (directory / "model.safetensors").unlink()
    task = score(directory)
    words = AutoTokenizer.from_pretrained(directory)
    ids = words("\n".join([QUESTION, ""])).input_ids  # no token stands for the beginning
    expected_places = []
    for step in ANSWER.split("\n"):
        ids += [*words(step).input_ids, words("\n").input_ids[-1]]
        expected_places.append(len(ids) - 1)
    assert (task.input_tokens, task.step_positions) == (ids, expected_places)
    hidden = hidden_states(directory, ids)[expected_places]
    value = hidden @ head["v_head.summary.weight"].T + head["v_head.summary.bias"]
    assert task.step_scores == pytest.approx(value[:, 0].sigmoid().tolist(), abs=1e-5)


def test_plus_against_minus_of_a_causal_model_is_read_at_the_tags(tmp_path):
    words = tokenizer()
    words.add_tokens(["ки", "+", " -"])
    directory = save(tmp_path, Qwen2ForCausalLM, words)
    words = AutoTokenizer.from_pretrained(directory)
    with pytest.raises(ModelError, match="step_format='math_shepherd'"):
        RewardWorker(directory)
    task = score(directory, step_format="math_shepherd")
    text = f"{QUESTION} 3 x 4 = 12. ки\n2 + 12 = 14. ки\nSo it is 14. ки"
    assert task.input_tokens == words(text).input_ids
    tag = words.convert_tokens_to_ids("ки")
    assert [task.input_tokens[place] for place in task.step_positions] == [tag] * 3
    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([task.input_tokens])).logits[0, task.step_positions]
    pair = logits[:, words("+ -").input_ids].softmax(-1)
    assert task.step_scores == pytest.approx(pair[:, 0].tolist(), abs=1e-5)


def test_a_classifier_of_continuations_is_read_where_lines_end(tmp_path):
    directory = save(tmp_path, Qwen2ForTokenClassification, step_format="continuation")
    task = score(directory)
    words = AutoTokenizer.from_pretrained(directory)
    text = f"<|user|>{QUESTION}<|assistant|><think>\n{ANSWER}"
    assert task.input_tokens == words(text, add_special_tokens=False).input_ids
    ends = [words.decode(task.input_tokens[: place + 1]) for place in task.step_positions]
    assert [end.removeprefix(text[: -len(ANSWER)]) for end in ends] == [
        "3 x 4 = 12.\n",
        "3 x 4 = 12.\n2 + 12 = 14.\n",
        ANSWER,
    ]
    model = Qwen2ForTokenClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        good = model(torch.tensor([task.input_tokens])).logits[0].softmax(-1)[:, 1]
    assert task.step_scores == pytest.approx(good[task.step_positions].tolist(), abs=1e-5)


def test_what_cannot_be_read_is_refused_by_name(tmp_path):
    head = process_head()
    del head["score.2.bias"]
    directory = with_head(tmp_path / "partly", "Qwen2ForProcessRewardModel", head)
    with pytest.raises(ModelError, match=r"its checkpoint lacks score\.2\.bias"):
        RewardWorker(directory)
    with pytest.raises(ModelError, match="Qwen2ForRewardModel"):
        RewardWorker(with_head(tmp_path / "other", "Qwen2ForRewardModel", head))
    causal = save(tmp_path / "causal", Qwen2ForCausalLM)
    with pytest.raises(ParameterError, match="'chat'"):
        RewardWorker(causal, step_format="chat")
    with pytest.raises(ParameterError, match="step_format"):
        RewardWorker(causal, step_format="unheard of")
    assert not is_reward_model(causal)
    assert is_reward_model(directory)


def rewrite(change):
    def damage(directory):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / "config.json").write_text("{"), "config.json "),
        (lambda path: edit_config(path, hidden_size="big"), "hidden_size"),
        (lambda path: edit_config(path, architectures="one"), "architectures"),
        (lambda path: edit_config(path, **layers(1)), "layers.1."),
        (lambda path: edit_config(path, **layers(3)), "lacks model.layers.2."),
        (lambda path: edit_config(path, intermediate_size=52), "[32, 48], not [32, 52]"),
        (lambda path: cut(path / "model.safetensors"), "model.safetensors"),
        (rewrite(lambda x: x["score.weight"].fill_(torch.nan)), "NaN or infinite in score.weight"),
        (rewrite(lambda x: x.update({"model.extra": torch.zeros(1)})), "model.extra"),
        (lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer.json"),
    ],
)
def test_what_is_damaged_in_a_reward_model_is_named(damage, named, tmp_path):
    path = save(tmp_path, Qwen2ForTokenClassification)
    damage(path)
    with pytest.raises(ModelError, match=re.escape(named)) as refused:
        RewardWorker(path)
    assert str(path) in refused.value.what


def layers(count):
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


def edit_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


# ---- prefixes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("tree"), Qwen2ForTokenClassification)


def query(ids):
    return RewardQuery(tuple(ids), None, None, tuple(range(len(ids))))


def scored(model, rows):
    queries = [query(ids) for ids in rows]
    return model.score([model.encode(each) for each in queries], queries)


def searched(seed=3, levels=4):
    """What a beam search asks for: a question, and branches of branches of steps."""
    rng = random.Random(seed)

    def some(count):
        return [rng.randrange(5, 400) for _ in range(count)]

    beams, asked = [some(30)], []
    for _ in range(levels):
        beams = [beam + some(rng.randrange(9, 20)) for beam in beams for _ in range(2)]
        asked.append(beams)
        beams = rng.sample(beams, min(3, len(beams)))
    return asked


def num_distinct(asked):
    """Prefixes of all rows: what has to be computed."""
    return len(
        {tuple(row[:end]) for level in asked for row in level for end in range(1, len(row) + 1)}
    )


def test_a_search_scores_each_token_once_and_as_full_passes_do(directory):
    whole, kept = (
        RewardModel(directory, "float32"),
        RewardModel(directory, "float32", max_cached_tokens=10_000),
    )
    asked, prefilled = searched(), 0
    for level in asked:
        found = scored(kept, level)
        prefilled += sum(score.prefilled for score in found)
        for row, score in zip(level, found, strict=True):
            (alone,) = scored(whole, [row])
            assert alone.prefilled == score.length == len(row)
            assert score.step_scores == pytest.approx(alone.step_scores, abs=1e-5)
    assert prefilled == num_distinct(asked) < sum(len(row) for level in asked for row in level) / 2
    assert kept._prefixes.num_tokens == prefilled


def test_what_is_asked_again_or_is_a_beginning_of_it_is_not_computed(directory):
    model = RewardModel(directory, "float32", max_cached_tokens=1000)
    row = [*range(10, 60)]
    (first,) = scored(model, [row])
    (again,) = scored(model, [row])
    (half,) = scored(model, [row[:25]])
    assert (first.prefilled, again.prefilled, half.prefilled) == (50, 0, 0)
    assert again.step_scores == first.step_scores
    assert half.step_scores == first.step_scores[:25]


def test_the_cache_is_bounded_and_keeps_what_was_used_last(directory):
    model = RewardModel(directory, "float32", max_cached_tokens=120)
    rows = [[start] * 50 for start in range(10, 14)]
    for row in rows:
        scored(model, [row])
        assert model._prefixes.num_tokens <= 120
    assert [scored(model, [row])[0].prefilled for row in (rows[3], rows[2], rows[0])] == [0, 0, 50]
    assert scored(model, [rows[1]])[0].prefilled == 50, "it was used longest ago"


def test_without_a_cache_rows_of_one_pass_still_share_their_question(directory):
    model = RewardModel(directory, "float32")
    question = [*range(10, 50)]
    rows = [question + [token] * 10 for token in (60, 70, 80)]
    assert [score.prefilled for score in scored(model, rows)] == [50, 10, 10]
    assert model._prefixes.num_tokens == 0
    assert not model._prefixes._root.children


def test_a_pass_that_fails_leaves_nothing_half_computed(directory, monkeypatch):
    model = RewardModel(directory, "float32", max_cached_tokens=1000)
    row = [*range(10, 60)]
    scored(model, [row])
    with monkeypatch.context() as broken:
        broken.setattr(model._prefixes._forward, "compute", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scored(model, [row + [7] * 20])
    (after,) = scored(model, [row + [7] * 20])
    assert after.prefilled == 20
    assert model._prefixes.num_tokens == 70


def test_answers_are_scored_at_their_last_token_from_the_cache_too(tmp_path):
    directory = save(tmp_path, Qwen2ForSequenceClassification, num_labels=1)
    with RewardWorker(directory, dtype="float32") as worker:
        tasks = [RewardTask(input_tokens=[*range(10, end)]) for end in (30, 50, 40)]
        for task in tasks:
            asyncio.run(worker.run_task(task))
    assert [task.usage.prefilled for task in tasks] == [20, 20, 0]
    assert [task.usage.cached for task in tasks] == [0, 20, 30]
    model = Qwen2ForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    for task in tasks:
        with torch.inference_mode():
            expected = model(torch.tensor([task.input_tokens])).logits
        assert task.score == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_of_random_rows_holds_each_of_them_once(seed):
    """With a stand-in for the model whose score of a token is that of its whole prefix."""
    rng, computed = random.Random(seed), []

    class Stand:
        freed = 0

        def compute(self, rows, pasts):
            results = []
            for ids, past in zip(rows, pasts, strict=True):
                before = [token for part in past for token in part]
                computed.append((len(before), tuple(ids)))
                scores = [float(hash((*before, *ids[: end + 1]))) for end in range(len(ids))]
                results.append((ids, scores))
            return results

        def split(self, states, count):
            return states[:count], states[count:]

        def free(self, states):
            self.freed += len(states)

    stand = Stand()
    tree = RewardPrefixCache(stand, max_tokens=rng.choice((0, 40, 10_000)))
    for _ in range(30):
        rows = [[rng.randrange(2) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        before = sum(len(ids) for _, ids in computed)
        found = tree.score(rows)
        for ids, (scores, _) in zip(rows, found, strict=True):
            assert scores == [float(hash(tuple(ids[: end + 1]))) for end in range(len(ids))]
        now = sum(len(ids) for _, ids in computed)
        assert sum(count for _, count in found) == now - before
        segments = [tree._root]
        for segment in segments:
            segments += segment.children
        assert tree.num_tokens == sum(len(segment.tokens) for segment in segments)
        assert tree.num_tokens <= tree._max_tokens
        assert stand.freed + tree.num_tokens == sum(len(ids) for _, ids in computed)


# ---- the layers in C++ ---------------------------------------------------------------------------

DECODERS = {
    "Qwen2": (Qwen2ForTokenClassification, {}),
    "answers": (Qwen2ForSequenceClassification, {"num_labels": 1}),
    "heads of one key": (Qwen2ForTokenClassification, {"num_key_value_heads": 2}),
}


def expect_all_slots(model):
    """Each slot is free, or holds one token of the cache."""
    forward, segments = model._prefixes._forward, [model._prefixes._root]
    held = []
    for segment in segments:
        segments += segment.children
        held += segment.states or ()
    assert len(held) == model._prefixes.num_tokens
    assert sorted([*held, *forward._free]) == [*range(forward._storage.num_pages)]


@pytest.mark.parametrize("name", DECODERS)
def test_the_layers_in_cpp_score_as_those_of_transformers(tmp_path, name):
    kind, fields = DECODERS[name]
    save(tmp_path, kind, **fields)
    made = {
        forward: RewardModel(tmp_path, "float32", max_cached_tokens=10_000, forward=forward)
        for forward in ("auto", "torch")
    }
    kinds = {type(model._prefixes._forward).__name__ for model in made.values()}
    assert kinds == {"NativeRewardForward", "TorchRewardForward"}
    for level in searched():
        queries = [
            RewardQuery(tuple(row), None, None, None if name == "answers" else (3, len(row) - 1))
            for row in level
        ]
        native, plain = (
            model.score([model.encode(each) for each in queries], queries)
            for model in made.values()
        )
        for one, other in zip(native, plain, strict=True):
            assert [one.score, *one.step_scores] == pytest.approx(
                [other.score, *other.step_scores], abs=1e-5
            )
            assert (one.length, one.prefilled) == (other.length, other.prefilled)
    expect_all_slots(made["auto"])


def test_in_cpp_rows_scored_together_have_the_scores_of_rows_scored_one_by_one(directory):
    """In every company, whatever stood in the cache, and however a row was cut by it."""
    together = RewardModel(directory, "float32", max_cached_tokens=300)
    for level in searched():
        found = scored(together, level)
        expect_all_slots(together)
        for row, score in zip(level, found, strict=True):
            (alone,) = scored(RewardModel(directory, "float32"), [row])
            assert alone.step_scores == pytest.approx(score.step_scores, abs=1e-5)


def test_more_tokens_than_there_are_slots_are_kept_with_what_was_there(directory):
    model = RewardModel(directory, "float32", max_cached_tokens=10_000)
    rows = [[start, *range(5, 405)] for start in range(500, 504)]
    first = [scored(model, [row])[0] for row in rows]
    assert model._prefixes._forward._storage.num_pages == 2048
    expect_all_slots(model)
    again = scored(model, rows)
    assert [score.prefilled for score in again] == [0] * 4
    longer = scored(model, [[*rows[0], 7, 8]])[0]
    assert longer.prefilled == 2
    assert longer.step_scores[:-2] == first[0].step_scores
    (alone,) = scored(RewardModel(directory, "float32"), [[*rows[0], 7, 8]])
    assert longer.step_scores == pytest.approx(alone.step_scores, abs=1e-5)


def test_a_pass_in_cpp_that_fails_leaves_its_slots(directory, monkeypatch):
    model = RewardModel(directory, "float32", max_cached_tokens=1000)
    scored(model, [[*range(10, 60)]])
    with monkeypatch.context() as broken:
        broken.setattr(model._prefixes._forward, "_head", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scored(model, [[*range(10, 60), 7, 8]])
    expect_all_slots(model)


def test_without_a_compiler_the_layers_are_those_of_transformers(directory, monkeypatch):
    monkeypatch.setattr("forethought.backends.cpu.library.is_available", lambda: False)
    model = RewardModel(directory, "float32")
    assert type(model._prefixes._forward).__name__ == "TorchRewardForward"
    assert len(scored(model, [[*range(10, 60)]])[0].step_scores) == 50


def test_aggregations_of_steps():
    worker = type("Worker", (), {"tokenizer": tokenizer(), "step_format": "continuation"})
    steps, found = [0.5, 0.9, 0.8], {}
    for name in ("product", "min", "mean", "last"):
        controller = PRMController.of(worker, aggregation=name)
        process = controller.process([RewardTask(input_str="q", output_str="a\nb\nc")])
        (work,) = next(process)
        work.result = work.function(*work.args)
        (task,) = process.send(None)
        task.score, task.step_scores = math.prod(steps), steps
        with pytest.raises(StopIteration):
            process.send(None)
        (found[name],) = controller.scores
        assert controller.step_scores == [steps]
    expected = {"product": 0.36, "min": 0.5, "mean": 2.2 / 3, "last": 0.8}
    assert found == pytest.approx(expected)
    with pytest.raises(ParameterError, match="aggregation"):
        PRMController.of(worker, aggregation="sum")


def test_a_rendered_prompt_is_not_rendered_again():
    worker = type("Worker", (), {"tokenizer": tokenizer(), "step_format": "continuation"})
    encode = PRMController.of(worker).step_format.encode
    plain = encode("1+1?", "2.\n")
    assert encode("<|user|>1+1?<|assistant|><think>\n", "2.\n") == plain
    blank = encode("1+1?", "")
    assert blank.positions == [len(blank.token_ids) - 1]
    lines = encode("1+1?", "a.\n\n\nb")
    assert len(lines.positions) == 2, "blank lines are no steps"
    assert lines.positions[0] < lines.positions[1]


def test_the_positions_that_stand_for_padding_are_no_context(tmp_path):
    directory = save(
        tmp_path / "model",
        XLMRobertaForSequenceClassification,
        num_labels=1,
        pad_token_id=1,
        max_position_embeddings=34,
    )
    model = RewardModel(directory, "float32")
    assert model.max_length == 32
    query = RewardQuery((5,) * 32, None, None, None)
    (score,) = model.score([model.encode(query)], [query])
    assert score.length == 32
    with pytest.raises(ContextLengthError, match="holds 32"):
        model.encode(query._replace(tokens=(5,) * 33))
