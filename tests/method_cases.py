"""Every method with settings and samples under which it does what distinguishes it."""

from forethought import methods
from forethought.methods.compute_optimal import Policy
from forethought.methods.iterdrag import FINAL, FOLLOW_UP, INTERMEDIATE
from forethought.scaffolding import NativeRewardController
from forethought.testing.method import PROMPT
from forethought.testing.samples import sample_answer

REWARD = NativeRewardController
LENGTHS = {"default_sample_num": 4, "width": 2}
TEXTS = ["The mayor of Rome is Ann.", "Ann was born in Bari.", "Paris is in France."]
RETRIEVAL = {"documents": TEXTS, "num_documents": 1}
ALL = {
    "plain": {},
    "dynasor": {"chunk_size": 16, "certainty_threshold": 2},
    "majority_vote": {"default_sample_num": 5},
    "best_of_n": {"default_sample_num": 3, "reward_controller": REWARD()},
    "repeated_sampling": {"default_sample_num": 4, "verifier": "math", "concurrency": 2},
    "budget_forcing": {},
    "first_answer": {},
    "beam_search": {**LENGTHS, "reward_controller": REWARD()},
    "dvts": {**LENGTHS, "reward_controller": REWARD()},
    "particle_filtering": {"default_sample_num": 3, "reward_controller": REWARD()},
    "particle_gibbs": {"default_sample_num": 2, "reward_controller": REWARD()},
    "mcts": {"default_sample_num": 3, "width": 2, "reward_controller": REWARD()},
    "tree_of_thoughts": {"default_sample_num": 2, "num_thoughts": 2},
    "self_refine": {"num_refinements": 2},
    "sequential_revision": {"num_revisions": 2},
    "specreason": {},
    "compute_optimal": {"policy": Policy(2, (0.0,), ("probes", "majority_vote@3"))},
    "archon": {
        "pipeline": {"layers": [[{"type": "generator", "samples": 2}], [{"type": "ranker"}]]}
    },
    "drag": RETRIEVAL,
    "iterdrag": {**RETRIEVAL, "max_iterations": 2},
    "sleep_time": {"context": "Ann has 3 bags of 4 nuts."},
    "deepconf": {"default_sample_num": 4},
    "deepconf_online": {"default_sample_num": 4, "num_warmup": 2, "window": 8},
    "adaptive_compute": {"default_sample_num": 3, "round_size": 2, "prune_after": 16},
    "fork_think": {"default_sample_num": 3, "num_points": 1, "window": 8},
    "genrm": {"reward_controller": "genrm", "default_sample_num": 2},
    "spct": {"reward_controller": "spct", "default_sample_num": 2},
    "judge": {"reward_controller": "judge", "default_sample_num": 2},
    "compare": {"reward_controller": "compare", "default_sample_num": 2},
    "confidence": {"reward_controller": "confidence", "default_sample_num": 2},
    "checker": {
        "reward_controller": {"method": "checker", "checker": lambda question, text: len(text)}
    },
    "hogwild": {"workers": ["Alice", "Bob"], "turn_tokens": 40, "max_turns": 2},
    "hogwild_turns": {"workers": ["Alice", "Bob"], "turn_tokens": 40, "max_turns": 2},
    "parallel_thinking": {},
    "budget_vote": {"total_tokens": 240, "default_sample_num": 3, "max_sample_num": 5},
    "no_thinking": {},
}
"""Settings of each."""
OPTIONS = {
    "deepconf": {"params": {"seed": 7, "max_tokens": 400, "confidence": 2}},
    "deepconf_online": {"params": {"seed": 7, "max_tokens": 400, "confidence": 2}},
    # Workers differ in whether the marker that ends a thought counts.
    "budget_vote": {"params": {"seed": 7}, "counts": ("tokens",)},
    "budget_forcing": {"counts": ("thinking_tokens",)},
    "majority_vote": {"counts": ("finished", "num_voters", "num_uncompared")},
    "compute_optimal": {"counts": ("finished", "num_voters", "num_uncompared")},
    "repeated_sampling": {"counts": ("verified",)},
    "drag": {"min_calls": 1},
    "no_thinking": {"min_calls": 1},
    "hogwild_turns": {"counts": ("exchanged_tokens",)},  # servers do not tell what is prefilled
    "parallel_thinking": {"counts": ("join_tokens", "longest_path", "thread_tokens")},
}
"""Arguments of ``check_method`` beside the settings."""
WITHOUT_ENGINE = {
    "budget_vote": "the model on which samples are forced has no thoughts to limit",
    "no_thinking": "the same",
}
WITHOUT_SERVER = {"hogwild": "its workers share pages"}


def criticise(prompt, seed):
    """Critiques of two answers."""
    return "Scores: [6, 4]" if "Scores" in prompt else sample_answer(prompt, seed)


def grade(prompt, seed):
    """A judge's score of an answer."""
    return f"Score: {len(prompt) % 11}" if "Score: N" in prompt else sample_answer(prompt, seed)


def spawn(prompt, seed):
    """A model that spawns two threads."""
    if prompt.endswith("</Parallel>"):
        return " The sum is 117."
    if "<Thread>" in prompt:
        return " 36.</Thread>"
    return "<Parallel><Outlines><Outline>1: a</Outline><Outline>2: b</Outline></Outlines>"


def think(prompt, seed):
    """A thought and an answer, which seeds draw; behind a thought, the answer of that one."""
    doubt = ", or is it?"
    said = prompt.partition(doubt)[0][-1] if doubt in prompt else sample_answer("", seed)[-3]
    answer = f"It is \\boxed{{{said}}}."
    return answer if "</think>" in prompt else f"{said}{doubt}</think>{answer}"


def follow_up(prompt, seed):
    """Two questions, their answers, and the final one."""
    if prompt.endswith(INTERMEDIATE):
        return " Ann." if "Bari" not in prompt else " In Bari."
    if prompt.endswith(FINAL):
        return " Bari."
    asked = "Who is the mayor of Rome?" if FOLLOW_UP not in prompt else "Where was Ann born?"
    return f"{FOLLOW_UP} {asked}"


RESPOND = {
    "spct": criticise,
    "judge": grade,
    "parallel_thinking": spawn,
    "no_thinking": think,
    "budget_forcing": think,
    "budget_vote": think,
    "iterdrag": follow_up,
}
"""What is generated in place of the samples."""


def accepted(question, text):
    """The verifier: samples 1, 2 and 3 pass it, and 0 does not."""
    return "boxed{2}" in text


def settings_of(name):
    """The settings of a method; the engine of a reward is that of best_of_n."""
    return {**ALL[name], "verifier": accepted} if name == "repeated_sampling" else ALL[name]


def create(name):
    """The method, or best_of_n with the reward."""
    return methods.create("best_of_n" if name in methods.REWARDS else name, **settings_of(name))


def prompt_of(name):
    """What a method is asked; one that closes thoughts, behind the beginning of one."""
    return f"{PROMPT}<think>" if name in WITHOUT_ENGINE else PROMPT


def respond_of(name):
    """The samples of a method."""
    return RESPOND.get(name, sample_answer)
