"""``RewardWorker``: scores are the model's own, whatever is scored at the same time."""

import asyncio
import json
import math
import subprocess
import sys
import threading

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from forethought.errors import (
    ContextLengthError,
    EngineStopped,
    ModelError,
    ParameterError,
    TaskError,
)
from forethought.scaffolding import (
    Controller,
    NativeRewardController,
    RewardTask,
    RewardWorker,
    ScaffoldingLlm,
)
from reward_models import save, tokenizer

KINDS = {
    "token": (Qwen2ForTokenClassification, {}),
    "one": (Qwen2ForSequenceClassification, {"num_labels": 1}),
    "two": (Qwen2ForSequenceClassification, {"num_labels": 2}),
    "pair": (BertForSequenceClassification, {"num_labels": 1}),
}
LENGTHS = (3, 40, 7, 18, 1, 23)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, (kind, fields) in KINDS.items():
        words = tokenizer()
        if name in ("two", "pair"):
            words.pad_token = words.eos_token = words.chat_template = None
        made[name] = save(root / name, kind, words, **fields)
    return made


@pytest.fixture(scope="module")
def workers(directories):
    made = {name: RewardWorker(path, dtype="float32") for name, path in directories.items()}
    yield made
    for worker in made.values():
        worker.shutdown()


def tasks_for(name, lengths=LENGTHS):
    made = []
    for number, length in enumerate(lengths):
        ids = [(5 + 7 * number + 3 * place) % 500 for place in range(length)]
        steps = [length // 2, length - 1] if name == "token" else None
        made.append(RewardTask(input_tokens=ids, step_positions=steps))
    return made


def judge(worker, tasks):
    async def together():
        await asyncio.gather(*(worker.run_task(task) for task in tasks))

    asyncio.run(together())
    return [task.score for task in tasks]


class Held:
    """Holds a worker's thread, so that what is asked meanwhile is judged together.

    From here on: what was asked before may have left the thread calls that score the queue.
    """

    def __init__(self, worker):
        self._worker, self._held, self._free = worker, threading.Event(), threading.Event()

    def __enter__(self):
        self._worker._thread.submit(self._hold)
        self._held.wait()
        return self._free

    def _hold(self):
        self._held.set()
        self._free.wait()

    def __exit__(self, *_):
        self._free.set()


def judge_together(worker, tasks):
    async def together():
        with Held(worker):
            jobs = [asyncio.ensure_future(worker.run_task(task)) for task in tasks]
            await asyncio.sleep(0)
        await asyncio.gather(*jobs)

    asyncio.run(together())
    return [task.score for task in tasks]


@pytest.fixture
def passes(monkeypatch):
    """How many rows each pass over the model had."""
    counts = []

    def spy(worker):
        judged = worker._model.score
        monkeypatch.setattr(
            worker._model, "score", lambda rows, q: counts.append(len(rows)) or judged(rows, q)
        )
        return counts

    return spy


def logits(directory, kind, ids):
    """The reference implementation: one text through the plain model."""
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", ["one", "two", "token", "pair"])
def test_a_score_is_what_the_plain_model_says(name, workers, directories):
    task = tasks_for(name, [11])[0]
    judge(workers[name], [task])
    said = logits(directories[name], KINDS[name][0], task.input_tokens)
    if name == "token":
        expected = said.softmax(-1)[task.step_positions, 1].tolist()
        assert task.step_scores == pytest.approx(expected, abs=1e-6)
        assert task.score == pytest.approx(math.prod(expected), abs=1e-6)
    else:
        expected = said.softmax(-1)[1] if name == "two" else said[0]
        assert task.score == pytest.approx(float(expected), abs=1e-5)
        assert task.step_scores == []


@pytest.mark.parametrize("name", list(KINDS))
def test_company_changes_no_score(name, workers, passes):
    alone = [judge(workers[name], [task])[0] for task in tasks_for(name)]
    assert len({round(score, 4) for score in alone}) == len(alone), "scores tell inputs apart"
    counts = passes(workers[name])
    assert judge_together(workers[name], tasks_for(name)) == pytest.approx(alone, abs=1e-5)
    assert counts == [len(LENGTHS)]


def test_a_text_that_ends_in_the_padding_token_is_read_at_its_end(workers, directories):
    worker = workers["one"]
    assert worker.tokenizer.pad_token_id == 0
    ended, longer = RewardTask(input_tokens=[9, 8, 0]), RewardTask(input_tokens=[7] * 9)
    judge_together(worker, [ended, longer])
    said = logits(directories["one"], KINDS["one"][0], [9, 8, 0])  # no pad token in its config
    assert ended.score == pytest.approx(float(said[0]), abs=1e-5)


def test_equal_inputs_under_way_are_judged_once(workers, passes):
    counts = passes(workers["one"])
    first, second, other = (RewardTask(input_tokens=[n, 2, 3]) for n in (1, 1, 4))
    judge_together(workers["one"], [first, second, other])
    assert counts == [2]
    assert first.score == second.score != other.score
    usages = [(task.usage.prefilled, task.usage.cached) for task in (first, second, other)]
    assert usages == [(3, 0), (0, 3), (3, 0)]


def test_batches_hold_no_more_tokens_than_allowed(directories, passes):
    worker = RewardWorker(directories["one"], dtype="float32", max_batch_tokens=20)
    counts = passes(worker)
    judge_together(worker, tasks_for("one", [5, 30, 6, 5, 6]))
    assert counts == [3, 1, 1]  # 5+5+6 padded to 6: 18 tokens; then 6; then one above the limit
    worker.shutdown()


def test_a_bad_task_fails_alone(workers):
    worker = workers["one"]
    good, unknown, long = (
        RewardTask(input_tokens=ids) for ids in ([1, 2], [1, 100_000], [1] * 600)
    )

    async def together():
        jobs = [worker.run_task(task) for task in (good, unknown, long)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    _, first, second = asyncio.run(together())
    assert good.score is not None
    assert isinstance(first, ParameterError)
    assert isinstance(second, ContextLengthError)


def test_a_pass_that_fails_is_repeated_one_by_one(workers, monkeypatch):
    model = workers["one"]._model
    judged = model.score

    def fragile(rows, inquiries):
        if any(row.ids == [6, 6, 6] for row in rows):
            raise RuntimeError("out of memory")
        return judged(rows, inquiries)

    monkeypatch.setattr(model, "score", fragile)

    class Both(Controller):
        def process(self, tasks, **kwargs):
            rewards = [
                RewardTask(worker_tag="reward", input_tokens=ids, on_failure="drop")
                for ids in ([1, 2], [6, 6, 6])
            ]
            yield rewards
            self.rewards = rewards
            good, bad = rewards
            tasks[0].output_str = "done"
            assert good.score is not None
            assert isinstance(bad.error, TaskError)
            assert "out of memory" in str(bad.error)

    with ScaffoldingLlm(Both(), {"reward": workers["one"]}) as llm:
        assert llm.generate("q").output.text == "done"


def test_what_nobody_waits_for_any_more_is_not_judged(workers, passes):
    worker = workers["one"]
    counts = passes(worker)
    tasks = [RewardTask(input_tokens=ids) for ids in ([1, 2], [1, 2], [3, 4])]

    async def leave():
        with Held(worker):
            jobs = [asyncio.ensure_future(worker.run_task(task)) for task in tasks]
            await asyncio.sleep(0)
            jobs[0].cancel()
            jobs[2].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(leave())
    assert [task.score is not None for task in tasks] == [False, True, False]
    assert counts == [1]
    assert not worker._under_way
    assert judge(worker, [RewardTask(input_tokens=[3, 4])])[0] is not None, "it can be asked again"


def test_the_event_loop_goes_on_while_the_model_is_busy(workers):
    async def both():
        with Held(workers["one"]) as free:
            job = asyncio.ensure_future(workers["one"].run_task(RewardTask(input_tokens=[1])))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not job.done()
            free.set()
            await job

    asyncio.run(both())


def test_text_is_judged_in_the_chat_template(workers):
    worker = workers["one"]
    spoken = RewardTask(input_str="1+1?", output_str="2")
    text = "<|user|>1+1?<|assistant|>2<|end|>"
    ids = worker.tokenizer(text, add_special_tokens=False).input_ids
    assert judge(worker, [spoken]) == judge(worker, [RewardTask(input_tokens=ids)])


def test_without_a_chat_template_text_is_scored_as_a_pair(workers, directories, monkeypatch):
    ids, types = [5, 6, 7], [0, 0, 1]
    model = workers["pair"]._model
    monkeypatch.setattr(
        model, "tokenizer", lambda q, a, verbose: {"input_ids": ids, "token_type_ids": types}
    )
    model.tokenizer.chat_template, model.tokenizer.pad_token_id = None, None
    (score,) = judge(workers["pair"], [RewardTask(input_str="a", output_str="b")])
    plain = KINDS["pair"][0].from_pretrained(directories["pair"]).eval()
    with torch.inference_mode():
        said = plain(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
    assert score == pytest.approx(float(said), abs=1e-5)


def test_a_task_that_asks_what_the_model_cannot_say_is_refused(workers):
    for name, task, reason in (
        ("token", RewardTask(input_tokens=[1, 2]), "scores steps"),
        ("one", RewardTask(input_tokens=[1, 2], step_positions=[1]), "scores whole answers"),
        ("token", RewardTask(input_tokens=[1, 2], step_positions=[2]), "step_positions"),
        ("one", RewardTask(output_str="2"), "nothing to score"),
        ("one", RewardTask(input_tokens=[]), "input_tokens"),
    ):
        with pytest.raises(ParameterError, match=reason):
            judge(workers[name], [task])


def test_after_shutdown_nothing_is_judged_and_nobody_waits(directories):
    worker = RewardWorker(directories["one"])

    async def stop():
        with Held(worker) as free:
            job = asyncio.ensure_future(worker.run_task(RewardTask(input_tokens=[1])))
            await asyncio.sleep(0)
            closing = threading.Thread(target=worker.shutdown)
            closing.start()
            while not worker._stopped:
                await asyncio.sleep(0.001)
            free.set()
        with pytest.raises(EngineStopped):
            await job
        closing.join()
        with pytest.raises(EngineStopped):
            await worker.run_task(RewardTask(input_tokens=[1]))

    asyncio.run(stop())
    worker.shutdown()


def test_a_copied_task_has_not_been_judged(workers):
    task = RewardTask(input_tokens=[1, 2])
    judge(workers["one"], [task])
    assert (task.copy().score, task.copy().input_tokens) == (None, [1, 2])


def test_it_serves_the_native_reward_controller(workers):
    class Judge(Controller):
        def process(self, tasks, **kwargs):
            judge = NativeRewardController()
            yield from judge.process([RewardTask(input_str="q", output_str=x) for x in "ab"])
            tasks[0].output_str = json.dumps(judge.scores)

    with ScaffoldingLlm(Judge(), {"reward": workers["two"]}) as llm:
        scores = json.loads(llm.generate("q").output.text)
    assert len(set(scores)) == 2
    assert all(0 < score < 1 for score in scores)


# ---- loading ----------------------------------------------------------------------------------


def test_what_is_no_reward_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no such directory"):
        RewardWorker(tmp_path / "nowhere")
    save(tmp_path / "causal", Qwen2ForCausalLM)
    with pytest.raises(ModelError, match=r"names Qwen2ForCausalLM.*ForTokenClassification"):
        RewardWorker(tmp_path / "causal")
    save(tmp_path / "three", Qwen2ForTokenClassification, num_labels=3)
    with pytest.raises(ModelError, match="3 labels"):
        RewardWorker(tmp_path / "three")


def test_a_head_that_would_be_random_is_refused(tmp_path):
    directory = save(tmp_path, Qwen2ForCausalLM)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["Qwen2ForTokenClassification"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks score\.bias, score\.weight"):
        RewardWorker(directory)


@pytest.mark.parametrize(
    "field", [{"dtype": "int8"}, {"device": "nonsense"}, {"max_batch_tokens": 0}]
)
def test_values_out_of_range_are_refused(field, directories):
    with pytest.raises(ParameterError, match=next(iter(field))):
        RewardWorker(directories["one"], **field)


def test_without_torch_it_says_how_to_install_it():
    line = "from forethought.workers.reward import RewardWorker"
    code = f"import sys; sys.modules['torch'] = None\n{line}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert "DependencyError: torch is not installed" in done.stderr
