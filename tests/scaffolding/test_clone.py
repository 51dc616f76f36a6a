"""Clones and copies: of the same class, with nothing shared that is written to."""

import copy
import pickle
from collections import defaultdict, deque
from functools import partial

import pytest

from forethought import methods
from forethought.methods import BestOfNController, MajorityVoteController
from forethought.methods.compute_optimal import Policy
from forethought.outputs import Logprob
from forethought.scaffolding import (
    Controller,
    GenerationTask,
    GenerationTokenCounter,
    NativeChatController,
    NativeGenerationController,
    NativeRewardController,
    PRMController,
    Reply,
    RewardTask,
    ScaffoldingLlm,
    ScriptedWorker,
    with_task_collection,
)
from tokens import byte_level


class Tokenizer:
    def __deepcopy__(self, memo):
        raise AssertionError("tokenizers are never copied")


def test_containers_are_copied_and_other_things_are_shared():
    class Keeper(Controller):
        def __init__(self):
            super().__init__()
            self.tokenizer = Tokenizer()
            self.notes = [{"a": [1]}, self.tokenizer]
            self.queue, self.counts = deque([[1]], maxlen=5), defaultdict(list, x=[1])
            self.pair, self.seen = ([1], self.tokenizer), {1}

    original = Keeper()
    clone = original.clone()
    assert type(clone) is Keeper
    assert clone.tokenizer is original.tokenizer is clone.notes[1] is clone.pair[1]
    clone.notes[0]["a"].append(2)
    clone.queue[0].append(2)
    clone.counts["y"].append(1)
    clone.pair[0].append(2)
    clone.seen.add(2)
    assert original.notes[0] == {"a": [1]}
    assert (list(original.queue), dict(original.counts)) == ([[1]], {"x": [1]})
    assert (original.pair[0], original.seen, clone.queue.maxlen) == ([1], {1}, 5)


def test_a_class_may_say_what_is_shared_and_what_is_copied_in_depth():
    class State:
        def __init__(self):
            self.values = [1]

    class Keeper(Controller):
        clone_shares = ("table",)
        clone_copies = ("state",)

        def __init__(self):
            self.table, self.state = {"big": 1}, State()

    original = Keeper()
    clone = original.clone()
    assert clone.table is original.table
    assert clone.state.values is not original.state.values


def test_controllers_inside_are_cloned_and_stay_the_same_where_they_were_the_same():
    class Pair(Controller):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.all, self.me = inner, [inner, inner], self

    original = Pair(NativeGenerationController())
    clone = original.clone()
    assert clone.inner is not original.inner
    assert clone.all == [clone.inner, clone.inner]
    assert clone.me is clone


def test_a_clone_method_of_ones_own_is_called_for_controllers_inside():
    class Special(NativeGenerationController):
        def clone(self):
            copy = super().clone()
            copy.marked = True
            return copy

    clone = MajorityVoteController(Special()).clone()
    assert clone.generation_controller.marked


def test_subclasses_and_their_hooks_survive_cloning():
    class MyVote(MajorityVoteController):
        def majority_vote(self, candidates_tasks, **kwargs):
            return 0, "mine"

    class MyBest(BestOfNController):
        def select_best(self, tasks, reward_values, **kwargs):
            return tasks[0], 0

    vote = MyVote(NativeGenerationController(), 3).clone()
    assert vote.majority_vote([]) == (0, "mine")
    best = MyBest(NativeGenerationController(), NativeRewardController(), 2).clone()
    assert type(best) is MyBest
    assert best.default_sample_num == 2


def test_task_collections_survive_cloning_and_are_not_shared():
    watched = with_task_collection("counter", GenerationTokenCounter)(NativeGenerationController)
    original = watched(sampling_params={"temperature": 0.5})
    clone = original.clone()
    assert clone.sampling_params == {"temperature": 0.5}
    first, second = original.task_collections["counter"], clone.task_collections["counter"]
    assert type(second) is GenerationTokenCounter
    assert first is not second


def test_a_controller_without_init_of_its_base_can_be_cloned():
    class Bare(Controller):
        def __init__(self):
            self.x = 1

    assert Bare().clone().x == 1
    assert not Bare().clone().task_collections


# ---- deep copies and pickles ---------------------------------------------------------------------


class Words:
    """A tokenizer as far as a process reward model needs one."""

    chat_template, unk_token_id = "words", 0

    def __call__(self, text, **options):
        return {"input_ids": [1 if word == "<extra_0>" else 2 for word in text.split()]}

    def get_vocab(self):
        return {"<extra_0>": 1}

    def apply_chat_template(self, messages, tokenize):
        return messages[-1]["content"].replace("<extra_0>", " <extra_0> ")


def dynasor(**settings):
    return methods.create("dynasor", chunk_size=4, certainty_threshold=2, **settings)


def has_four(question, answer):
    return "4" in answer


MADE = {name: partial(methods.create, name) for name in methods.names()} | {
    "plain": lambda: methods.create("plain", sampling_params={"temperature": 0.5}),
    "dynasor": dynasor,
    "majority_vote": lambda: methods.create("majority_vote", default_sample_num=3),
    "best_of_n": lambda: methods.create("best_of_n", reward_controller=NativeRewardController()),
    "genrm": lambda: methods.create("best_of_n", reward_controller="genrm"),
    "confidence": lambda: methods.create("best_of_n", reward_controller="confidence"),
    "compute_optimal": partial(
        methods.create, "compute_optimal", policy=Policy(2, (), ("majority_vote@3",))
    ),
    "dynasor+majority_vote": lambda: MajorityVoteController(dynasor(), 3),
    "repeated_sampling": partial(methods.create, "repeated_sampling", verifier=has_four),
    "checker": partial(methods.create, "checker", checker=has_four),
    "drag": partial(methods.create, "drag", documents=["Four is even."]),
    "iterdrag": partial(methods.create, "iterdrag", documents=["Four is even."]),
    "sleep_time": partial(methods.create, "sleep_time", context="Two and two."),
    "chat": lambda: NativeChatController(system="Be brief."),
    "reward": NativeRewardController,
    "prm": lambda: PRMController(Words()),
}


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda thing: pickle.loads(pickle.dumps(thing))}
copied = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


def run(controller):
    """Have this very controller, not a clone of it, work on a task; what comes of it."""

    class Holder(Controller):
        def clone(self):
            return self

        def process(self, tasks, **kwargs):
            yield from controller.process(given)
            return None

    judges = isinstance(controller, NativeRewardController)
    given = [GenerationTask(input_str="p")]
    if judges:
        given = [RewardTask(input_str="p", output_str="a\n\nb")]
    reply = Reply(r"so \boxed{4}", logprobs=[{1: Logprob(-0.5, 1), 2: Logprob(-1.5, 2)}] * 11)
    worker = ScriptedWorker(lambda prompt, index: reply, score=lambda question, answer: 0.5)
    tags = methods.worker_tags(controller)
    with ScaffoldingLlm(Holder(), dict.fromkeys(tags, worker)) as llm:
        llm.generate("q")
    return controller.scores if judges else given[0].output_str


@copied
@pytest.mark.parametrize("name", MADE)
def test_every_controller_can_be_copied_in_depth_and_pickled_before_and_after_a_run(name, copied):
    original = MADE[name]()
    before = copied(original)
    result = run(original)
    after = copied(original)
    assert result
    assert type(before) is type(after) is type(original)
    assert run(before) == run(after) == result


@copied
def test_a_copy_shares_nothing_that_is_written_to(copied):
    original = MajorityVoteController(NativeGenerationController({"temperature": 0.5}))
    sibling = copied(original)
    sibling.generation_controller.sampling_params["temperature"] = 1.0
    assert original.generation_controller.sampling_params == {"temperature": 0.5}


def test_a_copy_of_dynasor_finds_its_tokenizer(tmp_path):
    byte_level().save_pretrained(tmp_path)
    original = dynasor(generation_dir=tmp_path)
    for copied in COPIES.values():
        assert copied(original)._tokenizer.encode("ab") == original._tokenizer.encode("ab")
