"""Stages: what methods tell of their decisions while they run."""

from __future__ import annotations

import json

import pytest

from forethought import methods
from forethought.answers.answers import TextEquivalence
from forethought.methods.compute_optimal import Policy
from forethought.outputs import Logprob
from forethought.scaffolding import (
    NativeGenerationController,
    NativeRewardController,
    Reply,
    ScriptedWorker,
    Stage,
)
from forethought.testing.samples import sample_answer, sample_logprobs, sample_score
from scripted import answer, chain

SCORES = {"a;": 0.6, "b;": 0.5, "a;c.": 0.4, "a;d.": 0.9, "b;e.": 0.8}


class Tree(ScriptedWorker):
    """Two first steps, a and b; behind a stand c and d, behind b stands e."""

    def __init__(self):
        branches = {"p": ["a;", "b;"], "pa;": ["c.", "d."], "pb;": ["e.", "e."]}
        super().__init__(
            lambda prompt, index: branches[prompt][index % 2],
            score=lambda question, text: SCORES[text],
        )


def told(result, name):
    """The stages of this name, with the branch of each."""
    events = [event for event in result.events(stages=True) if isinstance(event.output, Stage)]
    json.dumps([dict(event.output.fields) for event in events], allow_nan=False)
    return [(event.branch, event.output) for event in events if event.output.name == name]


def beams(result, name):
    """Number and step of the beams that these stages of a search are about."""
    found = [stage.fields for _, stage in told(result, name) if "beam" in stage.fields]
    return [(fields["beam"], fields["text"]) for fields in found]


def search(name, **settings):
    reward = NativeRewardController()
    controller = methods.create(name, reward_controller=reward, step_token=";", **settings)
    return answer(controller, Tree(), sampling_params={"seed": 1})


def test_beam_search_tells_scores_what_it_prunes_and_what_it_selects():
    result = search("beam_search", default_sample_num=2, width=2)
    assert beams(result, "scored") == [([0], "a;"), ([1], "b;"), ([0, 0], "c."), ([0, 1], "d.")]
    scores = [
        stage.fields["score"] for _, stage in told(result, "scored") if "beam" in stage.fields
    ]
    assert scores == [0.6, 0.5, 0.4, 0.9]
    assert beams(result, "pruned") == [([1], "b;"), ([0, 0], "c.")]
    assert told(result, "pruned")[0][1].why == "it is not among the best 1"
    ((_, selected),) = told(result, "selected")
    assert selected.fields == {"beam": [0, 1], "score": 0.9, "text": "d.", "finished": True}


def streams(result):
    """The texts that a search streams, by branch and stream fields."""
    texts = {}
    for event in result.events():
        key = event.branch, json.dumps(event.fields)
        texts[key] = texts.get(key, "") + event.output.text
    return texts


@pytest.mark.parametrize("name", ["beam_search", "dvts", "mcts", "particle_filtering"])
def test_a_search_tells_which_beam_each_streamed_text_belongs_to(name):
    generation = NativeGenerationController(streaming=True)
    settings = {} if name == "particle_filtering" else {"width": 2}
    result = search(name, generation_controller=generation, default_sample_num=2, **settings)
    branch = "0" if name == "dvts" else ""
    texts = streams(result)
    assert texts[branch, '{"beam": [0]}'] == "a"
    assert texts[branch, '{"beam": [1]}'] == "b"
    steps = [text for (_, fields), text in texts.items() if '"beam": [0, ' in fields]
    assert {"c."} <= {*steps} <= {"c.", "d."}


def test_a_look_ahead_streams_beside_the_beam_that_it_is_about():
    generation = NativeGenerationController(streaming=True)
    result = search(
        "beam_search",
        generation_controller=generation,
        default_sample_num=2,
        width=2,
        lookahead=1,
    )
    assert streams(result)["", '{"beam": [0], "aside": "look-ahead"}'] == "c."


def test_dvts_tells_what_each_subtree_prunes_in_its_own_branch():
    result = search("dvts", default_sample_num=2, width=2)
    assert beams(result, "pruned") == [([1], "b;"), ([0, 0], "c.")]
    assert [branch for branch, _ in told(result, "pruned")] == ["0", "0"]


def test_mcts_tells_what_it_never_continued():
    result = search("mcts", default_sample_num=2, width=2, exploration=0.0)
    assert beams(result, "pruned") == [([1], "b;")]
    assert beams(result, "selected") == [([0, 1], "d.")]


@pytest.mark.parametrize("name", ["particle_filtering", "particle_gibbs"])
def test_particle_methods_tell_which_particles_were_not_drawn(name):
    sure = SCORES | {"a;": 1.0, "b;": 0.0}
    worker = Tree()
    worker._score = lambda question, text: sure[text]
    settings = {"num_iterations": 1} if name == "particle_gibbs" else {}
    controller = methods.create(
        name,
        reward_controller=NativeRewardController(),
        step_token=";",
        default_sample_num=2,
        **settings,
    )
    result = answer(controller, worker, sampling_params={"seed": 1})
    assert beams(result, "pruned") == [([1], "b;")]
    assert told(result, "pruned")[0][1].why == "it was not drawn"


@pytest.mark.parametrize("strategy", ["bfs", "dfs"])
def test_tree_of_thoughts_tells_judgements_and_what_it_leaves_out(strategy):
    says = {"p": ["a;", "b;"], "p?v": "sure", "pa;": ["c.", "c."], "pa;?v": "sure"}
    says |= {"pb;?v": "impossible", "pa;c.?v": "likely"}
    controller = methods.create(
        "tree_of_thoughts",
        default_sample_num=1,
        num_thoughts=2,
        num_evaluations=1,
        strategy=strategy,
        threshold=0.5,
        prompts={"value": "?v"},
        step_token=";",
        generation_controller=NativeGenerationController(streaming=True),
    )
    result = answer(controller, ScriptedWorker(says))
    assert beams(result, "pruned") == [([1], "b;"), ([0, 1], "c.")]
    assert told(result, "pruned")[1][1].why == "another beam has the same text"
    assert beams(result, "scored") == [([0], "a;"), ([1], "b;"), ([0, 0], "c.")]
    about = '{"beam": [1], "aside": "judgement 0"}'
    assert streams(result)["", about] == "impossible"


def test_a_vote_tells_each_answer_with_its_branch_and_the_tally_with_the_winner():
    worker = ScriptedWorker([r"\boxed{1}", "none", r"\boxed{2}", r"\boxed{2}"])
    controller = methods.create("majority_vote", default_sample_num=4, early_stop=False)
    *votes, (branch, final) = told(answer(controller, worker), "voted")
    assert sorted((path, stage.fields["answer"]) for path, stage in votes) == [
        ("0", "1"),
        ("2", "2"),
        ("3", "2"),
    ]
    assert votes[-1][1].fields["tally"] == {"2": 2, "1": 1}
    assert (branch, final.fields) == ("", {"answer": "2", "tally": {"2": 2, "1": 1}})


def test_a_vote_with_a_token_budget_tells_the_tally():
    worker = ScriptedWorker([r"\boxed{1}"] * 2)
    controller = methods.create(
        "budget_vote", total_tokens=200, default_sample_num=2, max_sample_num=2
    )
    ((_, stage),) = told(answer(controller, worker), "voted")
    assert stage.fields == {"answer": "1", "tally": {"1": 2}}


def test_dynasor_reports_each_probe_s_answer_position_and_agreement():
    answers = {10: "1}", 20: "7}", 30: "7}"}
    script = chain("p", "x" * 60, lambda known: answers[known])
    controller = methods.create("dynasor", chunk_size=10, certainty_threshold=2)
    stages = [
        stage.fields for _, stage in told(answer(controller, ScriptedWorker(script)), "probed")
    ]
    assert stages == [
        {"answer": "1", "at": 10, "agreeing": 1},
        {"answer": "7", "at": 20, "agreeing": 1},
        {"answer": "7", "at": 30, "agreeing": 2},
    ]


def sure(text, confidence):
    return Reply(text, logprobs=[{ord(each): Logprob(-confidence, 1)} for each in text])


def deepconf(name, replies, **settings):
    controller = methods.create(
        name,
        default_sample_num=len(replies),
        extract_answer=lambda text: text[-1],
        equivalence=TextEquivalence(),
        window=2,
        **settings,
    )
    return answer(controller, ScriptedWorker(replies))


def test_deepconf_tells_the_weight_of_each_vote_and_who_does_not_vote():
    result = deepconf("deepconf", [sure("a7", 1.0), sure("b5", 4.0), sure("c5", 3.0)], kept=0.5)
    *votes, (_, final) = told(result, "voted")
    assert [(path, stage.fields) for path, stage in votes] == [
        ("1", {"answer": "5", "weight": 4.0}),
        ("2", {"answer": "5", "weight": 3.0}),
    ]
    assert final.fields == {"answer": "5", "tally": {"5": 7.0}}
    assert [path for path, _ in told(result, "pruned")] == ["0"]


def test_deepconf_online_tells_which_sample_it_stopped_and_why():
    replies = [sure("a7", 3.0), sure("bbbbbbbb5", 1.0)]
    settings = {"num_warmup": 1, "chunk_size": 4, "consensus": None}
    ((path, stage),) = told(deepconf("deepconf_online", replies, **settings), "pruned")
    assert (path, stage.fields) == ("1", {"score": 1.0, "threshold": 3.0})


def test_best_of_n_tells_the_score_of_each_branch_and_the_chosen_one():
    worker = ScriptedWorker(["bad", "good"], score=lambda _, text: float(text == "good"))
    controller = methods.create(
        "best_of_n", reward_controller=NativeRewardController(), default_sample_num=2
    )
    result = answer(controller, worker)
    scores = {path: stage.fields["score"] for path, stage in told(result, "scored") if path}
    assert scores == {"0": 0.0, "1": 1.0}
    assert [path for path, _ in told(result, "selected")] == ["1"]


def test_repeated_sampling_tells_what_the_verifier_says_of_each_sample():
    controller = methods.create(
        "repeated_sampling", verifier=lambda _, text: text == "b", default_sample_num=3
    )
    result = answer(controller, ScriptedWorker(["a", "b", "c"]))
    verified = [(path, stage.fields) for path, stage in told(result, "scored")]
    assert verified == [("0", {"accepted": False}), ("1", {"accepted": True})]


# ---- all methods -------------------------------------------------------------------------------

REWARD = {"reward_controller": NativeRewardController()}
SMALL = {"default_sample_num": 4, "width": 2, **REWARD}
RETRIEVAL = {"documents": ["The mayor of Rome is Ann.", "Ann was born in Bari."]}
POLICY = {"policy": Policy(2, (0.0,), ("probes", "majority_vote@2"))}
PIPELINE = {"pipeline": {"layers": [[{"type": "generator", "samples": 2}]]}}
CHECKED = {"default_sample_num": 2, "verifier": lambda question, text: True}
TURNS = {"turn_tokens": 40, "max_turns": 2}
DECISIONS = {
    "dynasor": ({"chunk_size": 16, "certainty_threshold": 2}, "probed", "answer"),
    "majority_vote": ({"default_sample_num": 3}, "voted", "answer"),
    "best_of_n": ({"default_sample_num": 3, **REWARD}, "selected", "index"),
    "repeated_sampling": (CHECKED, "scored", "accepted"),
    "budget_forcing": ({"think_end": "Half"}, "prolonged", "at"),
    "first_answer": ({"markers": ["First"]}, "early_exit", "at"),
    "budget_vote": ({"total_tokens": 2000, "default_sample_num": 3}, "voted", "answer"),
    "beam_search": (SMALL, "pruned", "beam"),
    "dvts": (SMALL, "pruned", "beam"),
    "particle_filtering": ({"default_sample_num": 3, **REWARD}, "selected", "beam"),
    "particle_gibbs": ({"default_sample_num": 2, **REWARD}, "selected", "beam"),
    "mcts": (SMALL, "selected", "beam"),
    "tree_of_thoughts": ({"default_sample_num": 2, "num_thoughts": 2}, "selected", "beam"),
    "compute_optimal": (
        {"policy": Policy(2, (0.0,), ("probes", "majority_vote@2"))},
        "probed",
        "answer",
    ),
    "deepconf": ({"default_sample_num": 4}, "voted", "answer"),
    "deepconf_online": ({"default_sample_num": 4, "num_warmup": 2, "window": 8}, "voted", "answer"),
    "self_refine": ({"num_refinements": 1}, "scored", "accepted"),
    "sequential_revision": ({"num_revisions": 1}, "voted", "answer"),
    "genrm": ({"num_verifications": 1}, "scored", "answer"),
    "specreason": ({}, "scored", "accepted"),
    "adaptive_compute": ({"default_sample_num": 2, "prune_after": None}, "selected", "sample"),
    "fork_think": ({"default_sample_num": 3, "num_points": 1, "window": 8}, "forked", "at"),
    "spct": ({"num_critiques": 2}, "pruned", "critique"),
    "compare": ({}, "pruned", "winner"),
    "archon": (
        {"pipeline": {"layers": [[{"type": "generator", "samples": 2}]]}},
        "layer",
        "number",
    ),
    "drag": (RETRIEVAL, "retrieved", "query"),
    "iterdrag": (RETRIEVAL, "forced", "queries"),
    "hogwild": (
        {"workers": ["A", "B"], "turn_tokens": 40, "max_turns": 2},
        "exchanged",
        "turn",
    ),
    "hogwild_turns": (
        {"workers": ["A", "B"], "turn_tokens": 40, "max_turns": 2},
        "exchanged",
        "turn",
    ),
    "parallel_thinking": ({}, "spawned", "threads"),
    "sleep_time": ({"context": "Ann has 3 bags of 4 nuts."}, "thought", "origin"),
}
"""Settings of each method, and a stage of a decision of its own with one of its fields."""
DECIDE_NOTHING = {"plain", "no_thinking", "checker", "judge", "confidence"}


def samples(prompt, index):
    """A model that spawns two threads, gives critiques, or answers with one of the samples."""
    text = sample_answer(prompt, index)
    if prompt == "spawn":
        text = "<Parallel><Outlines><Outline>1: a</Outline><Outline>2: b</Outline></Outlines>"
    elif "Scores" in prompt:
        text = ["Scores: [6, 4]", "none"][index % 2]
    return Reply(text, logprobs=sample_logprobs(text))


@pytest.mark.parametrize("name", DECISIONS)
def test_every_method_that_decides_tells_it(name):
    settings, stage, field = DECISIONS[name]
    controller = methods.create(name, **settings)
    if name in methods.REWARDS:
        best = {"reward_controller": controller, "default_sample_num": 2}
        controller = methods.create("best_of_n", **best)
    prompt = "spawn" if name == "parallel_thinking" else "p"
    params = {"seed": 11} | ({} if name == "budget_vote" else {"max_tokens": 400})
    if name.startswith("deepconf"):
        params["confidence"] = 2
    worker = ScriptedWorker(samples, score=sample_score)
    result = answer(controller, worker, prompt, sampling_params=params)
    assert [each for _, each in told(result, stage) if field in each.fields]


def test_the_table_of_decisions_holds_every_method():
    assert set(DECISIONS) | DECIDE_NOTHING == set(methods.names())
