"""``PRMController``: an answer is worth the product of its steps, each read at its separator."""

import math

import pytest
import torch
from transformers import Qwen2ForTokenClassification

from forethought.errors import ParameterError, UsageError
from forethought.methods import BestOfNController
from forethought.scaffolding import (
    Controller,
    GenerationTask,
    NativeGenerationController,
    PRMController,
    RewardTask,
    RewardWorker,
    ScaffoldingLlm,
    ScriptedWorker,
)
from reward_models import SEPARATOR, save, tokenizer

STEPS = ["first\n\nsecond\n\nthird", "only one", "a\n\nb"]
SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save(tmp_path_factory.mktemp("prm"), Qwen2ForTokenClassification)


@pytest.fixture(scope="module")
def worker(directory):
    with RewardWorker(directory, dtype="float32") as made:
        yield made


def asked(controller, tasks):
    """The reward tasks that the controller yields for ``tasks``."""
    process = controller.process(tasks)
    (work,) = next(process)
    work.result = work.function(*work.args)
    return next(process)


def read(controller, task):
    """What the model reads, and what stands at the judged places."""
    words, (reward,) = controller.tokenizer, asked(controller, [task])
    seen = words.convert_ids_to_tokens([reward.input_tokens[at] for at in reward.step_positions])
    return words.decode(reward.input_tokens), seen


def answered(text, question="q"):
    return RewardTask(input_str=question, output_str=text)


def chat(content):
    return f"<|user|>{SYSTEM}<|user|>q<|assistant|>{content}<|end|>"


def test_an_answer_that_was_dropped_is_not_judged_and_the_others_are():
    controller = PRMController(tokenizer())
    failed = GenerationTask(input_str="q", on_failure="drop")
    failed.error = OSError("gone")
    process = controller.process([answered("one"), failed, answered("two")])
    (work,) = next(process)
    work.result = work.function(*work.args)
    judged = process.send(None)
    assert [task.output_str for task in judged] == ["one", "two"]
    for task, score in zip(judged, (0.25, 0.5), strict=True):
        task.score = score
    with pytest.raises(StopIteration):
        process.send(None)
    assert controller.scores == [0.25, None, 0.5]


def test_every_step_ends_in_a_separator_and_is_judged_there():
    text, seen = read(PRMController(tokenizer()), answered("one\n\ntwo"))
    assert text == chat("one<extra_0>two<extra_0>")
    assert seen == [SEPARATOR] * 2


@pytest.mark.parametrize("answer", ["one\n\n", "\n\none\n\n\n\n"])
def test_blank_steps_are_none(answer):
    assert read(PRMController(tokenizer()), answered(answer))[0] == chat("one<extra_0>")


def test_an_empty_answer_is_one_step():
    assert read(PRMController(tokenizer()), answered("")) == (chat(SEPARATOR), [SEPARATOR])


def test_an_undivided_answer_stands_between_separators_and_is_judged_at_the_second():
    controller = PRMController(tokenizer(), split_steps=False)
    assert read(controller, answered("a\n\nb")) == (
        chat("<extra_0>a\n\nb<extra_0>"),
        [SEPARATOR],
    )
    (reward,) = asked(controller, [answered("a\n\nb")])
    assert reward.step_positions == [len(reward.input_tokens) - 2]


def test_steps_and_separator_may_be_others():
    words = tokenizer()
    words.add_tokens(["<step>"])
    controller = PRMController(words, step_token="; ", separate_token="<step>")
    assert read(controller, answered("a; b")) == (chat("a<step>b<step>"), ["<step>"] * 2)


def test_neither_question_nor_answer_can_place_a_separator():
    task = answered(f"a{SEPARATOR}b\n\nc", question=f"{SEPARATOR}?")
    (reward,) = asked(PRMController(tokenizer()), [task])
    assert len(reward.step_positions) == 2


def test_a_tokenizer_that_adds_a_token_in_front_does_not_mislead_it():
    class Eager:
        unk_token_id = None

        def __init__(self, words):
            self.words, self.chat_template = words, words.chat_template
            self.get_vocab, self.apply_chat_template = words.get_vocab, words.apply_chat_template

        def __call__(self, text, add_special_tokens=True, **options):
            ids = self.words(text, add_special_tokens=False, **options)["input_ids"]
            return {"input_ids": [5] * add_special_tokens + ids}

    eager = Eager(tokenizer())
    (reward,) = asked(PRMController(eager), [answered("a\n\nb")])
    mark = eager.words.convert_tokens_to_ids(SEPARATOR)
    assert [reward.input_tokens[place] for place in reward.step_positions] == [mark] * 2
    assert reward.input_tokens[0] != 5


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ParameterError, match="not one token"):
        PRMController(tokenizer(), separate_token="<extra_1>")
    with pytest.raises(ParameterError, match="step_token"):
        PRMController(tokenizer(), step_token="")
    silent = tokenizer()
    silent.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        PRMController(silent)
    with pytest.raises(ParameterError, match="scores text"):
        asked(PRMController(tokenizer()), [RewardTask(input_tokens=[1])])
    with pytest.raises(ParameterError, match="no argument 'top_k'"):
        next(PRMController(tokenizer()).process([], top_k=1))


def test_a_template_that_loses_the_separators_is_refused():
    words = tokenizer()
    words.chat_template = "{{ messages[1]['content'] }}"
    with pytest.raises(UsageError, match=r"of 2 separators .* 0"):
        asked(PRMController(words), [answered("a\n\nb")])


def test_clones_share_the_tokenizer_and_no_scores():
    original = PRMController(tokenizer())
    original.scores = [0.5]
    clone = original.clone()
    assert clone.tokenizer is original.tokenizer
    clone.scores.append(0.25)
    assert original.scores == [0.5]


class Scores(Controller):
    """Returns the scores of given answers."""

    def __init__(self, judge, answers):
        super().__init__()
        self.judge, self.answers = judge, answers

    def process(self, tasks, **kwargs):
        yield from self.judge.process([answered(text) for text in self.answers])
        tasks[0].output_str = ""
        tasks[0].customized_result_fields["scores"] = self.judge.scores


def scores(worker, answers, **options):
    controller = Scores(PRMController(worker.tokenizer, **options), answers)
    with ScaffoldingLlm(controller, {"reward": worker}) as llm:
        return llm.generate("q").output.meta["scores"]


def test_a_score_is_the_product_of_what_the_plain_model_says_at_the_separators(worker, directory):
    model = Qwen2ForTokenClassification.from_pretrained(directory, dtype=torch.float32).eval()
    expected = []
    for answer in STEPS:
        text = chat("".join(step + SEPARATOR for step in answer.split("\n\n")))
        ids = torch.tensor([worker.tokenizer(text, add_special_tokens=False).input_ids])
        with torch.inference_mode():
            good = model(ids).logits[0].softmax(-1)[:, 1]
        mark = worker.tokenizer.convert_tokens_to_ids(SEPARATOR)
        expected.append(math.prod(good[ids[0] == mark].tolist()))
    assert scores(worker, STEPS) == pytest.approx(expected, abs=1e-5)
    assert scores(worker, STEPS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)


def test_a_step_without_any_probability_does_not_shift_the_others(worker, monkeypatch):
    rewards = asked(PRMController(worker.tokenizer), [answered("a\n\nb\n\nc")])
    (reward,) = rewards
    prefixes = worker._model._prefixes
    score = prefixes.score

    def hopeless(rows):
        found = score(rows)
        for scores, _ in found:
            scores[reward.step_positions[0]] = 0.0  # as where a probability underflows
        return found

    monkeypatch.setattr(prefixes, "score", hopeless)
    with ScaffoldingLlm(_Yield(rewards), {"reward": worker}) as llm:
        llm.generate("q")
    assert reward.step_scores[0] == 0
    assert all(score > 0 for score in reward.step_scores[1:])
    assert len(reward.step_scores) == 3
    assert reward.score == 0


class _Yield(Controller):
    clone_shares = ("wanted",)

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted

    def process(self, tasks, **kwargs):
        yield self.wanted
        tasks[0].output_str = ""


def test_best_of_n_returns_the_answer_with_the_best_steps(worker):
    alone = [scores(worker, [answer])[0] for answer in STEPS]
    best = max(range(3), key=lambda number: alone[number])
    controller = BestOfNController(
        NativeGenerationController(), PRMController(worker.tokenizer), default_sample_num=3
    )
    workers = {"generation": ScriptedWorker(STEPS), "reward": worker}
    with ScaffoldingLlm(controller, workers) as llm:
        output = llm.generate("q").output
    assert output.text == STEPS[best]
    assert output.meta["best_of_n"]["scores"] == pytest.approx(alone, abs=1e-5)


def test_any_worker_that_scores_reward_tasks_will_do():
    scripted = ScriptedWorker(["a", "ccc", "bb"], score=lambda question, text: float(len(text)))
    controller = BestOfNController(NativeGenerationController(), PRMController(tokenizer()), 3)
    with ScaffoldingLlm(controller, dict.fromkeys(["generation", "reward"], scripted)) as llm:
        assert llm.generate("q").output.text == "ccc"


def test_a_mistake_reaches_the_caller_as_it_is(worker):
    with (
        ScaffoldingLlm(Scores(PRMController(worker.tokenizer), [None]), {"reward": worker}) as llm,
        pytest.raises(ParameterError, match="scores text"),
    ):
        llm.generate("q")
