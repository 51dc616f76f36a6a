"""Searches over steps: decisions worked out by hand, on scripted workers, servers and the engine.

Text is scripted as a tree. A step ends with ``;``, an answer with ``.``, and a beam's score is that
of its text in ``SCORES``.
"""

from __future__ import annotations

import random

import pytest
from openai import AsyncOpenAI
from transformers import Qwen2ForTokenClassification

from engines import expect_empty
from forethought import LLM, methods
from forethought.errors import BudgetExceeded, ParameterError, TaskError
from forethought.methods.parts import particles
from forethought.rewards.step_format import ContinuedSteps
from forethought.scaffolding import (
    Budget,
    ConfidenceRewardController,
    EngineWorker,
    NativeGenerationController,
    NativeRewardController,
    OpenaiWorker,
    PRMController,
    Reply,
    RewardWorker,
    ScaffoldingLlm,
    ScriptedWorker,
)
from openai_server import EngineServer, serving
from reward_models import save, tokenizer
from scripted import answer
from tokens import byte_level, speaking

SEARCHES = ("beam_search", "dvts", "particle_filtering", "particle_gibbs", "mcts")
BAD = Reply("", error=OSError("gone"))

TREE = {
    "": ["a;", "b;", "c;", "a;"],
    "a;": ["d;", "e."],
    "b;": ["f.", "g;"],
    "c;": ["h."],
    "a;d;": ["i.", "j."],
    "b;g;": ["k."],
}
SCORES = {
    "a;": 0.6,
    "b;": 0.5,
    "c;": 0.9,
    "a;d;": 0.8,
    "a;e.": 0.3,
    "b;f.": 0.7,
    "b;g;": 0.2,
    "c;h.": 0.1,
    "a;d;i.": 0.4,
    "a;d;j.": 0.75,
    "b;g;k.": 0.99,
}


class Scripted(ScriptedWorker):
    """Continues along the tree, and scores by the table; whole answers go on with first branches.

    Attributes:
        scored: texts, in the order in which they were scored.
    """

    def __init__(self, tree=None, scores=None):
        self.tree, self.scores, self.scored = tree or TREE, scores or SCORES, []
        super().__init__(self._go_on, score=self._table)

    def _go_on(self, prompt, index):
        known = prompt.removeprefix("p")
        choices = self.tree[known]
        said = choices[index % len(choices)]
        if isinstance(said, Reply):
            return said
        while said.endswith(";") and isinstance(self.tree[known + said][0], str):
            said += self.tree[known + said][0]
        return said

    def _table(self, question, text):
        self.scored.append(text)
        assert question == "p"
        return self.scores.get(text, 0.05)


def search(name, worker=None, params=None, budget=None, **settings):
    """The result of a method on the scripted tree, and the worker."""
    worker = worker or Scripted()
    settings = {"reward_controller": NativeRewardController(), "step_token": ";"} | settings
    controller = methods.create(name, **settings)
    return answer(controller, worker, sampling_params=params, budget=budget), worker


def told(result):
    (meta,) = result.output.meta.values()
    return meta


# ---- beam search ---------------------------------------------------------------------------------


def test_beam_search_continues_the_best_beams_so_many_times_each():
    result, worker = search("beam_search", default_sample_num=4, width=2)
    # a .6, b .5, c .9 -> c and a; c;h. .1, a;d; .8, a;e. .3 -> a;d; and a;e.; i .4, j .75 -> j, i
    assert worker.prompts == ["p"] * 4 + ["pc;"] * 2 + ["pa;"] * 2 + ["pa;d;"] * 2
    assert result.output.text == "a;d;j."
    assert result.output.token_ids == [*map(ord, "a;d;j.")]
    assert result.output.finish_reason == "stop"
    assert told(result) == {
        "score": 0.75,
        "step_scores": [0.6, 0.8, 0.75],
        "scores": [0.4, 0.75, 0.3, 0.1],
        "index": 1,
        "budget": False,
    }
    assert result.output.candidates == ["a;d;i.", "a;d;j.", "a;e.", "c;h."]


def test_beams_of_the_same_text_are_scored_once_and_take_one_place():
    _, worker = search("beam_search", default_sample_num=4, width=2)
    assert len(worker.scored) == len(set(worker.scored))
    assert worker.scored[:3] == ["a;", "b;", "c;"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("particle_gibbs", {"num_iterations": 3}), ("mcts", {"width": 3, "rollouts": 2})],
)
def test_a_text_that_is_found_again_is_not_scored_again(name, settings):
    _, worker = search(name, params={"seed": 5}, default_sample_num=2, **settings)
    assert len(worker.scored) == len(set(worker.scored))
    assert worker.prompts.count("p") > 2, "a; is found twice"


def test_a_finished_beam_takes_the_place_of_one_that_would_go_on():
    tree = {"": ["a;", "b;"], "a;": ["e.", "d;"], "b;": ["f;", "g;"]}
    tree |= {"a;d;": ["k;", "l;"], "a;d;k;": ["m."], "a;d;l;": ["n."]}
    tree |= {text: ["o."] for text in ("b;f;", "b;g;")}
    scores = {"a;": 0.6, "b;": 0.5, "a;e.": 0.95, "a;d;": 0.8, "a;d;k;": 0.5, "a;d;l;": 0.6}
    result, worker = search("beam_search", Scripted(tree, scores), default_sample_num=4, width=2)
    # e .95 and d .8 -> of e .95, k .5 and l .6 only e and l are kept, so k is not continued
    assert (
        worker.prompts == ["p"] * 4 + ["pa;", "pa;", "pb;", "pb;"] + ["pa;d;"] * 2 + ["pa;d;l;"] * 2
    )
    assert result.output.text == "a;e."


def test_a_complete_answer_wins_over_a_better_truncated_one():
    tree, scores = {"": ["a;", "e."], "a;": ["bcdef."]}, {"a;": 0.9, "a;bc": 0.95, "e.": 0.2}
    result, worker = search(
        "beam_search", Scripted(tree, scores), {"max_tokens": 3}, default_sample_num=4, width=2
    )
    assert "a;bc" in worker.scored
    assert (result.output.text, result.output.finish_reason) == ("e.", "stop")


@pytest.mark.parametrize(
    ("aggregation", "text"),
    # of the two finished at the end: a;d;j. has .6, .8, .75 and a;e. has .6, .3
    [("last", "a;d;j."), ("min", "a;d;j."), ("mean", "a;d;j."), ("product", "a;d;j.")],
)
def test_scores_of_steps_are_aggregated(aggregation, text):
    result, _ = search("beam_search", default_sample_num=4, width=2, aggregation=aggregation)
    assert result.output.text == text
    by_hand = {"last": 0.75, "min": 0.6, "mean": (0.6 + 0.8 + 0.75) / 3, "product": 0.36}
    assert told(result)["score"] == pytest.approx(by_hand[aggregation])


def test_aggregation_decides_which_beam_goes_on():
    tree = {"": ["a;", "b;"], "a;": ["c;", "d;"], "b;": ["e;", "f;"]}
    tree |= {text: ["z."] for text in ("a;c;", "a;d;", "b;e;", "b;f;")}
    scores = {"a;": 0.1, "b;": 0.5, "a;c;": 0.9, "a;d;": 0.2, "b;e;": 0.6, "b;f;": 0.3}
    scores |= {f"{text}z.": 0.5 for text in ("a;c;", "a;d;", "b;e;", "b;f;")}
    options = {"default_sample_num": 4, "width": 2}
    last, _ = search("beam_search", Scripted(tree, scores), aggregation="last", **options)
    least, _ = search("beam_search", Scripted(tree, scores), aggregation="min", **options)
    assert last.output.text == "a;c;z."  # the one place after two levels: .9 before .6
    assert least.output.text == "b;e;z."  # min(.5, .6) before min(.1, .9)


def test_lookahead_ranks_a_beam_by_greedy_steps_which_it_discards():
    options = {"default_sample_num": 2, "width": 2, "reward_controller": NativeRewardController()}
    tree = {"": ["c;", "a;"], "c;": ["h."], "a;": ["d;", "e."], "a;d;": ["i.", "j."]}
    plain, _ = search("beam_search", Scripted(tree), **options)
    assert plain.output.text == "c;h."  # .9 before .6
    ahead, worker = search("beam_search", Scripted(tree), lookahead=1, **options)
    assert ahead.output.text.startswith("a;")  # .8 of a;d; before .1 of c;h.
    greedy = [call for call in worker.calls if call.task.temperature == 0.0]
    assert [call.prompt for call in greedy][:2] == ["pc;", "pa;"]
    assert told(ahead)["step_scores"][0] == 0.8
    assert "c;h." not in ahead.output.candidates


# ---- DVTS ----------------------------------------------------------------------------------------


def test_dvts_searches_greedily_in_every_subtree():
    result, worker = search("dvts", default_sample_num=4, width=2)
    # subtree 1: a .6, b .5 -> a; d .8, e .3 -> d; i .4, j .75 -> j. subtree 2: c .9, a .6 -> c; h.
    assert sorted(worker.prompts) == sorted(["p"] * 4 + ["pa;", "pc;", "pa;d;"] * 2)
    assert result.output.text == "a;d;j."
    assert result.output.candidates == ["a;d;i.", "a;d;j.", "a;e.", "c;h."]


def test_dvts_continues_the_best_step_of_a_subtree_wherever_it_stands():
    worker = Scripted(scores=SCORES | {"a;": 0.4})
    result, _ = search("dvts", worker, default_sample_num=2, width=2)
    assert worker.prompts == ["p", "p", "pb;", "pb;"], "b .5 is better than a .4"
    assert result.output.text == "b;f."


def test_a_subtree_does_not_wait_for_another():
    tree = {"": ["a;", "b;"], "a;": ["d;"], "a;d;": ["i."], "b;": [Reply("f.", delay=0.3)]}
    _, worker = search("dvts", Scripted(tree), default_sample_num=2, width=1)
    ended = [call.prompt for call in worker.calls]
    assert ended[-1] == "pa;d;", "the first subtree went on while the second one generated"
    assert "pb;" in ended


# ---- particles -----------------------------------------------------------------------------------


def test_a_particle_weighs_the_odds_of_its_score():
    shares = particles.probabilities(particles.log_weights([0.9, 0.8, 0.5], "odds"))
    assert shares == pytest.approx([9 / 14, 4 / 14, 1 / 14])
    assert [round(share, 3) for share in shares] == [0.643, 0.286, 0.071]
    flat = particles.probabilities(particles.log_weights([0.9, 0.8, 0.5], "odds"), 2.0)
    assert flat == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    certain = particles.log_weights([1.0, 0.0], "odds")
    assert particles.probabilities(certain) == pytest.approx([1.0, 0.0], abs=1e-6)
    with pytest.raises(ParameterError, match="softmax"):
        particles.log_weights([-0.5], "odds")
    assert particles.probabilities([float("-inf")] * 2) == [0.5, 0.5]


def test_annealing_flattens_the_weights_early_where_few_particles_have_them():
    shares = [0.97, 0.01, 0.01, 0.01]
    size = 1 / (0.97**2 + 3 * 0.01**2)
    assert particles.effective_size(shares) == pytest.approx(size)
    assert particles.annealing_temperature(shares, 0.1) == pytest.approx(0.9 / (size / 4))
    assert particles.annealing_temperature(shares, 0.5) == 1.0
    assert particles.annealing_temperature([0.25] * 4, 0.1) == 1.0
    assert particles.annealing_temperature([0.5, 0.5, 0.0, 0.0], 0.1) == 1.0


def test_particles_are_drawn_in_proportion_to_their_weights():
    """Statistic: counts of 7000 draws, chi-square with 2 degrees of freedom; p = 0.001 is 13.8."""
    shares, source = [9 / 14, 4 / 14, 1 / 14], random.Random(1)
    drawn = particles.draw(shares, 7000, "multinomial", source)
    expected = [7000 * share for share in shares]
    chi = lambda wanted: sum(  # noqa: E731
        (drawn.count(n) - wanted[n]) ** 2 / wanted[n] for n in range(3)
    )
    assert chi(expected) < 13.8
    assert chi([7000 * score / 2.2 for score in (0.9, 0.8, 0.5)]) > 13.8, "scores are no weights"
    even = particles.draw(shares, 14, "systematic", source)
    assert [even.count(n) for n in range(3)] == [9, 4, 1]
    assert 1 not in particles.draw([0.5, 0.0, 0.5], 100, "multinomial", source)


def test_particle_filtering_continues_what_is_drawn():
    sure = {"a;": 1.0, "b;": 0.0, "c;": 0.0, "a;d;": 1.0, "a;e.": 0.0}
    sure |= {"a;d;i.": 0.3, "a;d;j.": 0.4}
    result, worker = search(
        "particle_filtering",
        Scripted(scores=SCORES | sure),
        {"seed": 1},
        default_sample_num=3,
    )
    # weights of 1e7 and 1e-7: all particles come from a, then from a;d
    assert worker.prompts == ["p"] * 3 + ["pa;"] * 3 + ["pa;d;"] * 3
    assert result.output.text == "a;d;j."
    assert result.output.candidates == ["a;d;i.", "a;d;j.", "a;e."]


def test_particles_of_equal_weight_go_on_alike_whatever_beam_search_would_keep():
    level = dict.fromkeys(SCORES, 0.5)
    worker = Scripted(scores=level)
    search("particle_filtering", worker, {"seed": 3}, default_sample_num=30)
    assert {"pa;", "pb;", "pc;"} <= set(worker.prompts)


def test_a_finished_particle_is_drawn_against_those_that_go_on():
    tree = {"": ["a.", "b;"], "b;": ["c;"], "b;c;": ["d."]}
    scores = {"a.": 0.5, "b;": 0.5, "b;c;": 0.0}
    _, worker = search(
        "particle_filtering",
        Scripted(tree, scores),
        {"seed": 1},
        default_sample_num=2,
        resampling="systematic",
    )
    # a and b weigh the same, and each is drawn once; c weighs nothing against a, which has ended
    assert worker.prompts == ["p", "p", "pb;"]


def test_a_sampled_selection_returns_answers_by_their_weights():
    tree, scores = {"": ["a.", "b."]}, {"a.": 0.9, "b.": 0.5}
    found = [
        search(
            "particle_filtering",
            Scripted(tree, scores),
            {"seed": seed},
            default_sample_num=2,
            selection="sample",
        )[0].output.text
        for seed in range(40)
    ]
    # P(b) = 1 / 10: of 40 the count is 1 to 12 but with a probability below 0.02
    assert 1 <= found.count("b.") <= 12


def test_annealing_and_systematic_draws_are_used():
    tree = {"": ["a;", "b;", "b;", "b;"], "a;": ["x."], "b;": ["y."]}
    scores = {"a;": 0.97, "b;": 0.1, "a;x.": 0.5, "b;y.": 0.5}

    def from_b(**settings):
        worker = Scripted(tree, scores)
        options = {"default_sample_num": 4, "resampling": "systematic", "max_steps": 20}
        search("particle_filtering", worker, {"seed": 2}, **options, **settings)
        return worker.prompts.count("pb;")

    # odds 32.3 and 1/9: b's three share 1.0 % at temperature 1, and none of four draws falls there
    assert from_b() == 0
    # ESS is 1.02, the temperature .95 / .255 = 3.7, and b's three share 39 %
    assert from_b(annealing=True) in (1, 2)


def test_particle_gibbs_keeps_the_reference_and_generates_only_the_others():
    result, worker = search(
        "particle_gibbs", params={"seed": 5}, default_sample_num=2, num_iterations=3
    )
    # first steps: two, then one per further sweep, as the other particle is the reference
    assert worker.prompts.count("p") == 2 + 1 + 1
    single, worker = search(
        "particle_gibbs", params={"seed": 5}, default_sample_num=2, num_iterations=1
    )
    assert worker.prompts.count("p") == 2
    assert set(single.output.candidates) <= set(result.output.candidates)
    with pytest.raises(ParameterError, match="references"):
        search("particle_gibbs", default_sample_num=2, num_references=2)


def test_the_reference_is_drawn_by_weight_and_competes_as_it_was_at_each_step():
    tree = {"": ["a;", "b;", "c;"], "a;": ["x."], "b;": ["y."], "c;": ["z."]}
    scores = {"a;": 0.5, "b;": 0.5, "a;x.": 0.0, "b;y.": 1.0, "c;": 0.0}
    _, worker = search(
        "particle_gibbs",
        Scripted(tree, scores),
        {"seed": 1},
        default_sample_num=2,
        num_iterations=2,
        resampling="systematic",
    )
    # first sweep: x weighs nothing against y, so b;y. is the reference. second one: at the first
    # step the reference is b;, of which the other particle is drawn, as c weighs nothing against it
    assert worker.prompts == ["p", "p", "pa;", "pb;", "p", "pb;"]


def test_every_sweep_of_particle_gibbs_draws_other_samples():
    _, worker = search("particle_gibbs", params={"seed": 5}, default_sample_num=2, num_iterations=3)
    first_steps = [call.task.seed for call in worker.calls if call.prompt == "p"]
    assert len(first_steps) == len(set(first_steps)) == 4


# ---- MCTS ----------------------------------------------------------------------------------------


def test_mcts_goes_where_the_upper_confidence_bound_is_highest():
    options = {"default_sample_num": 4, "width": 3, "exploration": 0.0}
    _, worker = search("mcts", **options)
    # Means alone. a .6, b .5, c .9 -> c, whose h. is .1 and ends it -> a (.6): d .8, e .3 ->
    # a = (.6 + .8 + .3) / 3 = .567 before b .5 -> d: i, j -> all below a is known; four iterations
    assert worker.prompts == ["p"] * 3 + ["pc;"] * 3 + ["pa;"] * 3 + ["pa;d;"] * 3
    _, worker = search("mcts", **options | {"exploration": 2.0})
    # After c and h. the root has 4 visits and a, b one each: both have + 2 sqrt(ln 4), so a.
    # Then it has 6; a has 3: .567 + 2 sqrt(ln 6 / 3) = 2.112; b: .5 + 2 sqrt(ln 6) = 3.177, so b.
    assert worker.prompts == ["p"] * 3 + ["pc;"] * 3 + ["pa;"] * 3 + ["pb;"] * 3


def test_the_spread_of_a_bound_grows_with_the_visits_of_the_beam_above():
    _, worker = search("mcts", default_sample_num=4, width=3, exploration=0.14)
    # p, c, a as above; then a: .567 + .14 sqrt(ln 6 / 3) = .675 and b: .5 + .14 sqrt(ln 6) = .687.
    # Without ln 6 they would be .567 + .14 / sqrt(3) = .647 and .5 + .14 = .640.
    assert worker.prompts == ["p"] * 3 + ["pc;"] * 3 + ["pa;"] * 3 + ["pb;"] * 3


def test_mcts_does_not_go_down_where_all_is_known_however_good():
    tree = {"": ["a;", "c;"], "a;": ["e."], "c;": ["h."]}
    scores = {"a;": 0.6, "c;": 0.9, "c;h.": 1.0, "a;e.": 0.2}
    options = {"default_sample_num": 9, "width": 2, "exploration": 0.0}
    result, worker = search("mcts", Scripted(tree, scores), **options)
    assert worker.prompts == ["p"] * 2 + ["pc;"] * 2 + ["pa;"] * 2
    assert result.output.text == "c;h."


def test_the_value_of_several_rollouts_is_their_mean():
    tree = {"": ["a;", "b;"], "a;": ["x.", "y."], "b;": ["z."]}
    scores = {"a;": 0.5, "b;": 0.5, "a;x.": 0.9, "a;y.": 0.1, "b;z.": 0.6}
    options = {"default_sample_num": 2, "width": 2, "exploration": 0.0, "rollouts": 2}
    result, worker = search("mcts", Scripted(tree, scores), {"seed": 1}, **options)
    # a: (.9 + .1) / 2 = .5 although the best of its answers has .9; b: .6
    assert worker.prompts == ["p"] * 2 + ["pa;"] * 2 + ["pb;"] * 2 + ["pb;"] * 2
    assert result.output.text == "a;x.", "rollouts are answers, too"
    assert len({call.task.seed for call in worker.calls if call.prompt == "pb;"}) == 4


def test_rollouts_of_mcts_draw_other_texts_than_the_steps_of_the_same_beam():
    _, worker = search(
        "mcts", params={"seed": 1}, default_sample_num=2, width=2, rollouts=2, exploration=0.0
    )
    seeds = [call.task.seed for call in worker.calls]
    assert len(seeds) > 6, "the beams with rollouts are continued, too"
    assert len(seeds) == len(set(seeds))


def test_mcts_with_rollouts_values_a_beam_by_complete_answers():
    options = {"default_sample_num": 2, "width": 3, "exploration": 0.0, "rollouts": 1}
    result, worker = search("mcts", **options)
    # rollouts: a;d;i. .4, b;f. .7, c;h. .1 -> b before c, whose own score is .9
    assert worker.prompts[:6] == ["p"] * 3 + ["pa;", "pb;", "pc;"]
    assert worker.prompts[6:9] == ["pb;"] * 3
    assert result.output.text in ("b;f.", "b;g;k.")


def test_mcts_completes_the_best_beam_if_no_answer_is_finished():
    result, worker = search("mcts", default_sample_num=1, width=3)
    assert worker.prompts == ["p"] * 3 + ["pc;"]
    assert result.output.text == "c;h."


# ---- tree of thoughts ----------------------------------------------------------------------------

VALUE, VOTE, PROPOSE = "?v", "?w{choices}:", "?n\n"
PROMPTS = {"value": VALUE, "vote": VOTE, "propose": PROPOSE}


def think(says, **settings):
    worker = ScriptedWorker(says)
    settings = {"step_token": ";", "prompts": PROMPTS, "num_thoughts": 2} | settings
    controller = methods.create("tree_of_thoughts", **settings)
    return answer(controller, worker), worker


def of_game(judgements):
    """A script for two first steps and two answers of each, with judgements by text."""
    steps = {"p": ["a;", "b;"], "pa;": ["c.", "d."], "pb;": ["e.", "f."]}

    def says(prompt, index):
        if prompt.endswith(VALUE):
            said = judgements[prompt.removeprefix("p").removesuffix(VALUE)]
            return said if isinstance(said, str) else said[index]
        return steps[prompt][index]

    return says


def test_breadth_first_thoughts_are_kept_by_the_values_that_the_model_gives_them():
    words = {"a;": ["likely", "sure", "impossible"], "b;": ["likely"] * 3}
    words |= {"a;c.": ["likely"] * 3, "a;d.": ["maybe, no: sure"] * 3}
    result, worker = think(of_game(words), default_sample_num=1)
    assert result.output.text == "a;d."
    assert told(result)["score"] == 60.0
    assert told(result)["scores"] == [3.0, 60.0]
    assert worker.prompts.count("pa;" + VALUE) == 3
    assert "pb;" not in worker.prompts
    assert worker.prompts[-6:] == ["pa;c." + VALUE] * 3 + ["pa;d." + VALUE] * 3


def test_a_value_is_the_sum_of_what_all_judgements_come_to_in_the_end():
    words = {"a;": ["likely", "sure", "sure"], "b;": ["sure", "likely", "impossible"]}
    words |= {"a;c.": ["sure, impossible"] * 3, "a;d.": ["likely, no: sure"] * 3}
    result, worker = think(of_game(words), default_sample_num=1)
    assert "pb;" not in worker.prompts, "41 before 21.001, although b was judged better at first"
    assert result.output.text == "a;d."
    assert told(result)["scores"] == pytest.approx([0.003, 60.0])


def test_votes_compare_the_beams_of_a_level():
    def says(prompt, index):
        if prompt.startswith("p?w1.\na;\n2.\nb;:"):
            return [" 2", "2", " 1"][index]
        if prompt.startswith("p?w"):
            assert prompt == "p?w1.\nb;e.\n2.\nb;f.:"
            return "1"
        return {"p": ["a;", "b;"], "pb;": ["e.", "f."]}[prompt][index]

    result, _ = think(says, default_sample_num=1, evaluation="vote")
    assert result.output.text == "b;e."
    assert told(result)["score"] == 3.0


def test_proposed_thoughts_are_put_behind_the_beam_and_the_last_step_is_the_answer():
    says = {
        "p?n\n": "a\n\na\nb\nc",
        "pa;?n\n": "d\ne",
        "pa;d;": "x.",
        "pa;e;": "y.",
    }
    judge = {"a;": 2.0, "b;": 1.0, "a;d;": 1.0, "a;e;": 2.0, "a;e;y.": 1.0}
    controller = methods.create(
        "tree_of_thoughts",
        reward_controller=NativeRewardController(),
        default_sample_num=1,
        num_thoughts=2,
        thoughts="propose",
        prompts=PROMPTS,
        step_token=";",
        max_steps=3,
    )
    judged = []

    def score(question, text):
        judged.append(text)
        return judge[text]

    worker = ScriptedWorker(lambda p, _: says[p], score=score)
    result = answer(controller, worker)
    assert result.output.text == "a;e;y."
    assert worker.prompts == ["p?n\n", "pa;?n\n", "pa;e;", "pa;e;"]
    assert judged[:2] == ["a;", "b;"], "a proposal that is repeated is one step"


@pytest.mark.parametrize("evaluation", ["value", "vote"])
def test_the_judgements_of_a_step_have_seeds_of_their_own(evaluation):
    """With equal ones a model would say the same each time."""

    def says(prompt, index):
        if prompt.endswith((VALUE, ":")):
            return "sure" if evaluation == "value" else "1"
        return of_game({})(prompt, index)

    worker = ScriptedWorker(says)
    settings = {"step_token": ";", "prompts": PROMPTS, "num_thoughts": 2, "num_evaluations": 3}
    controller = methods.create(
        "tree_of_thoughts", evaluation=evaluation, default_sample_num=1, **settings
    )
    answer(controller, worker, sampling_params={"seed": 3})
    judged = [call for call in worker.calls if call.prompt.endswith((VALUE, ":"))]
    by_prompt = {}
    for call in judged:
        by_prompt.setdefault(call.prompt, []).append(call.task.seed)
    assert by_prompt
    assert all(len(seeds) == len(set(seeds)) == 3 for seeds in by_prompt.values())


def test_proposals_and_judgements_are_no_part_of_an_answer():
    says = {"p?n\n": "a\nb", "pa;?v": "sure", "pb;?v": "likely", "pa;": "x."}
    settings = {"thoughts": "propose", "max_steps": 2, "default_sample_num": 1}
    _, worker = think(lambda prompt, _: says.get(prompt, "sure"), **settings)
    asked = {call.prompt: call.task.is_aside for call in worker.calls}
    assert {prompt: asked[prompt] for prompt in says} == dict.fromkeys(says, True) | {"pa;": False}


def test_depth_first_search_backtracks_and_prunes_low_values():
    words = dict.fromkeys(["a;", "b;"], "likely") | {"a;": "sure"}
    words |= {"a;c.": "impossible", "a;d.": "impossible", "b;e.": "likely", "b;f.": "sure"}
    options = {"strategy": "dfs", "num_evaluations": 1}
    result, worker = think(of_game(words), threshold=0.01, **options)
    steps = [prompt for prompt in worker.prompts if not prompt.endswith(VALUE)]
    assert steps == ["p"] * 2 + ["pa;"] * 2 + ["pb;"] * 2
    assert result.output.text == "b;f."
    _, worker = think(of_game(words), threshold=0.0, **options)
    steps = [prompt for prompt in worker.prompts if not prompt.endswith(VALUE)]
    assert steps == ["p"] * 2 + ["pa;"] * 2, "without the threshold the first answer is the end"


def test_depth_first_thoughts_enter_the_best_step_first():
    words = {"a;": "likely", "b;": "sure", "b;e.": "likely", "b;f.": "sure"}
    result, worker = think(of_game(words), strategy="dfs", num_evaluations=1)
    steps = [prompt for prompt in worker.prompts if not prompt.endswith(VALUE)]
    assert steps == ["p"] * 2 + ["pb;"] * 2
    assert result.output.text == "b;f."


def test_depth_first_thoughts_continue_so_many_beams_and_then_complete_the_best():
    words = {"a;": "likely", "b;": "sure"}
    says = of_game(words | {"b;e.": "likely", "b;f.": "sure"})
    result, worker = think(says, strategy="dfs", num_evaluations=1, max_expansions=1)
    steps = [prompt for prompt in worker.prompts if not prompt.endswith(VALUE)]
    assert steps == ["p"] * 2 + ["pb;"]
    assert result.output.text == "b;e."


def test_thoughts_that_the_budget_leaves_unjudged_may_be_the_answer():
    controller = methods.create("tree_of_thoughts", step_token=";", prompts=PROMPTS, num_thoughts=2)
    worker = ScriptedWorker(of_game({}))
    result = answer(controller, worker, budget=Budget(calls=2))
    assert (result.output.text, result.output.finish_reason) == ("a;", "length")
    assert told(result)["budget"]


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_the_best_answer_so_far_is_returned_at_the_end_of_the_budget(name):
    options = {"default_sample_num": 4, "aggregation": "last"}
    whole = search(name, params={"seed": 1}, **options)[0].usage.completion_tokens
    for tokens in range(1, whole):
        result, worker = search(name, params={"seed": 1}, budget=Budget(tokens=tokens), **options)
        assert told(result)["budget"] or result.usage.completion_tokens <= tokens
        assert result.output.text
        assert all(call.ended in ("done", "cancelled") for call in worker.calls)
    slow = Scripted({"": [Reply("a;", delay=60)]})
    with pytest.raises(BudgetExceeded):
        search(name, slow, budget=Budget(seconds=0.1), **options)


def test_a_finished_answer_is_returned_before_a_better_one_that_is_not():
    result, _ = search(
        "beam_search", default_sample_num=4, width=2, budget=Budget(calls=4 + 3 + 4 + 3)
    )
    assert told(result)["budget"]
    assert result.output.text == "a;e.", "the best of those that ended, although a;d; has .8"


def test_max_tokens_counts_all_steps_of_an_answer():
    result, worker = search("beam_search", params={"max_tokens": 5}, default_sample_num=2, width=2)
    assert {call.task.max_tokens for call in worker.calls} == {5, 4, 3}
    assert result.output.text == "a;d;j."
    cut, _ = search("beam_search", params={"max_tokens": 2}, default_sample_num=2, width=2)
    assert (cut.output.text, cut.output.finish_reason) == ("a;d;", "length")


def test_the_last_step_goes_on_to_the_end():
    result, _ = search("beam_search", default_sample_num=4, width=4, max_steps=1)
    assert result.output.candidates == ["a;d;i.", "b;f.", "c;h."]


def test_stop_strings_of_the_request_end_an_answer_and_are_left_out():
    tree = {"": ["a;"], "a;": ["b!c."]}
    worker = Scripted(tree, {"a;": 0.5, "a;b": 0.5})
    result, _ = search("beam_search", worker, {"stop": ["!"]}, default_sample_num=1, width=1)
    assert (result.output.text, result.output.stop_reason) == ("a;b", "!")


@pytest.mark.parametrize("name", SEARCHES)
def test_failed_steps_are_raised_or_dropped(name):
    tree = TREE | {"": ["a;", BAD, "c;", "a;"], "a;": ["d;", BAD]}
    with pytest.raises(TaskError, match="gone"):
        search(name, Scripted(tree), {"seed": 1}, default_sample_num=4)
    result, _ = search(name, Scripted(tree), {"seed": 1}, default_sample_num=4, on_failure="drop")
    assert result.output.text.endswith(".")
    for worker in (Scripted({"": [BAD]}),):
        with pytest.raises(TaskError, match="gone"):
            search(name, worker, default_sample_num=4, on_failure="drop")


@pytest.mark.parametrize("name", [*SEARCHES, "tree_of_thoughts"])
def test_mistakes_are_refused_before_anything_runs(name):
    worker = ScriptedWorker(["a"])
    for settings in (
        {"default_sample_num": 0},
        {"step_token": ""},
        {"max_steps": 0},
        {"on_failure": "z"},
        {"reward_controller": 7},
    ):
        with pytest.raises(ParameterError):
            methods.create(name, **settings)
    controller = methods.create(name)
    for options in ({"sampling_params": {"n": 2}}, {"sample_num": 0}, {"zzz": 1}):
        with pytest.raises(ParameterError):
            answer(controller, worker, **options)
    assert worker.calls == []
    description = methods.describe(name)
    assert description.paper
    assert description.parameters.keys() == description.explanations.keys()


def test_samples_that_are_no_multiple_of_the_width_are_refused():
    for name in ("beam_search", "dvts"):
        with pytest.raises(ParameterError, match="multiple of width=4"):
            search(name, default_sample_num=6)


def test_a_controller_that_leaves_no_scores_is_no_reward_controller():
    with pytest.raises(ParameterError, match="no reward controller"):
        search("beam_search", reward_controller=NativeGenerationController())


# ---- on the engine and on servers ----------------------------------------------------------------

LETTERS = byte_level().convert_tokens_to_ids([*"qxz;", "</s>"])
"""Tokens that no merge joins, so that a text has one tokenisation."""
PARAMS = {
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 24,
    "logit_bias": dict.fromkeys(LETTERS, 100.0),
}
ENDLESS = PARAMS | {"max_tokens": 60, "logit_bias": dict.fromkeys(LETTERS[:-1], 100.0)}
ON_MODEL = {"step_token": ";", "max_steps": 6, "default_sample_num": 4}


FIELDS = {"dtype": "float32", "kv_cache_config": {"max_tokens": 8192, "page_size": 4}}


class Lengths(NativeRewardController):
    """Scores texts by a function of them, without a worker."""

    def process(self, tasks, **kwargs):
        texts = [task.output_str for task in tasks]
        self.scores = [random.Random(text).random() for text in texts]
        yield from ()


def on_model(name, worker, prompt="Hello world", reward=None, params=PARAMS, **settings):
    controller = methods.create(name, reward_controller=reward or Lengths(), **ON_MODEL | settings)
    return answer(controller, worker, prompt, sampling_params=params)


@pytest.mark.parametrize("name", SEARCHES)
def test_engine_server_and_script_decide_the_same_and_many_prompts_as_one(name):
    llm, prompts = LLM(speaking(), **FIELDS), ["Hello world", "how are you", "I am fine"]
    with EngineWorker(llm) as worker:
        alone = [on_model(name, worker, prompt) for prompt in prompts]
        together = on_model(name, worker, prompts)
        with serving(EngineServer(worker.llm)) as server:
            client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60)
            there = on_model(name, OpenaiWorker(client, "m"))
    expect_empty(llm._frontend.engine)
    for one, other in zip(alone, together, strict=True):
        assert one.output.token_ids == other.output.token_ids
        assert one.output.candidates == other.output.candidates
        assert told(one) == told(other)
    assert len({result.output.text for result in together}) == 3
    assert any(len(told(result)["step_scores"]) > 2 for result in together)
    assert there.output.candidates == alone[0].output.candidates
    assert told(there) == told(alone[0])


@pytest.mark.parametrize("name", SEARCHES)
def test_the_engine_prefills_a_prompt_once_and_no_step_again(name):
    llm, prompt = LLM(speaking(), **FIELDS), "Hello world, how are you today? " * 4
    with EngineWorker(llm, max_parked=64) as worker:
        num_prompt = len(worker.tokenizer(prompt).input_ids)
        before, steps = worker.llm.stats, Counting()
        on_model(name, worker, prompt, params=ENDLESS, generation_controller=steps)
        prefilled = worker.llm.stats.prefilled - before.prefilled
    # A fork runs the separator behind its step, and the token before it, which has not been run.
    assert num_prompt <= prefilled <= num_prompt + 2 * len(steps.tasks)
    assert len(steps.tasks) > 4
    expect_empty(llm._frontend.engine)


class Counting(NativeGenerationController):
    """Keeps its tasks."""

    clone_shares = ("tasks",)

    def __init__(self):
        super().__init__()
        self.tasks = []

    def process(self, tasks, **kwargs):
        self.tasks += tasks
        yield from super().process(tasks, **kwargs)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prm") / "model"
    save(directory, Qwen2ForTokenClassification, tokenizer())
    with RewardWorker(directory, dtype="float32") as worker:
        yield worker


@pytest.mark.parametrize("name", SEARCHES)
def test_a_process_reward_model_runs_each_token_once(name, judge):
    seen, run, naive = set(), [], []

    class Watched(PRMController):
        def _score(self, rewards):
            yield from super()._score(rewards)
            for task in rewards:
                seen.update(
                    tuple(task.input_tokens[:end]) for end in range(1, 1 + len(task.input_tokens))
                )
                run.append(task.usage.prefilled)
                naive.append(len(task.input_tokens))

    steps = ContinuedSteps(judge.tokenizer, ";")
    reward = Watched(judge.tokenizer, step_format=steps)
    llm = LLM(speaking(), **FIELDS)
    with EngineWorker(llm) as worker:
        controller = methods.create(name, reward_controller=reward, **ON_MODEL)
        workers = dict.fromkeys(methods.worker_tags(controller), worker)
        workers[NativeRewardController.WorkerTag.REWARD] = judge
        with ScaffoldingLlm(controller, workers) as llm_with_method:
            prompt = f"Hello {name}, " * 6
            result = llm_with_method.generate(prompt, sampling_params=ENDLESS)
    assert all(0.0 <= score <= 1.0 for score in told(result)["scores"])
    # Siblings begin alike; beginnings of less than 8 tokens are run with each of them.
    assert len(seen) / 2 < sum(run) < 1.25 * len(seen)
    assert sum(naive) > 3 * len(seen), "without cached prefixes it would be much more"


def test_confidence_is_the_reward_where_no_model_is_given():
    llm = LLM(speaking(), **FIELDS)
    with EngineWorker(llm) as worker:
        for name in SEARCHES:
            reward = ConfidenceRewardController("mean", "logprob")
            settings = {"weighting": "softmax"} if name.startswith("particle") else {}
            result = on_model(name, worker, reward=reward, **settings)
            given = methods.create(name, **ON_MODEL)
            default = answer(given, worker, "Hello world", sampling_params=PARAMS)
            assert told(default)["scores"] == pytest.approx(told(result)["scores"], abs=1e-4)
            assert max(told(default)["scores"]) == told(default)["score"] < 0.0
    expect_empty(llm._frontend.engine)
