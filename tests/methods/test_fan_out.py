"""How many generations a method may begin: the product of its samples, branches and steps."""

import pytest

from forethought import methods
from forethought.errors import ParameterError
from forethought.methods.stack import stack
from forethought.server.composition import Choices, check_generations


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("plain", {}, 1),
        ("majority_vote@7", {}, 7),
        ("majority_vote@4+majority_vote@8", {}, 32),
        ("self_refine+majority_vote@3", {"num_refinements": 2}, 3 * 3 * 2),
        ("beam_search", {"default_sample_num": 8, "max_steps": 10, "lookahead": 1}, 160),
        ("mcts", {"default_sample_num": 8, "width": 3, "rollouts": 1}, 48),
        ("tree_of_thoughts+majority_vote@2", {"num_thoughts": 2, "num_evaluations": 1}, 1600),
        ("particle_gibbs", {"num_iterations": 3, "max_steps": 5, "default_sample_num": 2}, 30),
        ("hogwild", {"max_turns": 4}, 9),
        ("dynasor+majority_vote@2", {"max_tokens": 640, "chunk_size": 64}, 22),
        ("parallel_thinking", {"max_spawns": 2, "max_threads": 3, "max_depth": 2}, 45),
        ("spct", {"num_critiques": 5}, 5),
        ("genrm", {"num_verifications": 3}, 6),
        ("confidence", {}, 0),
    ],
)
def test_a_method_counts_the_generations_that_it_may_begin(spec, settings, expected):
    made = methods.create(spec, **settings) if spec in methods.REWARDS else stack(spec, **settings)
    assert made.num_generations() == expected


def test_a_pipeline_counts_each_candidate_that_a_component_reads():
    layers = [[{"type": "generator", "samples": 6}], [{"type": "critic"}], [{"type": "fuser"}]]
    assert methods.create("archon", pipeline={"layers": layers}).num_generations() == 6 + 6 + 6


def test_an_endless_tree_of_threads_is_not_counted_to_its_end():
    deep = methods.create("parallel_thinking", max_depth=131072, max_spawns=131072)
    assert deep.num_generations() > 1 << 32


def test_a_reward_counts_once_for_each_answer():
    best = stack("best_of_n@5", reward_controller=methods.create("genrm", num_verifications=2))
    assert best.num_generations() == 5 * (1 + 4)


def test_the_refusal_names_the_numbers():
    nested = stack("majority_vote@32+majority_vote@64")
    check_generations(nested, 2048)
    with pytest.raises(ParameterError, match=r"64 x 32 make up to 2,048, .* allows 2,047 "):
        check_generations(nested, 2047)


def test_choices_and_stages_add_up():
    with pytest.raises(ParameterError, match=r"2 x 8 make up to 16"):
        check_generations(Choices([stack("majority_vote@8") for _ in range(2)]), 15)
