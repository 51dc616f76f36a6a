"""Compute-optimal sampling: the method is chosen by predicted difficulty, by a fitted policy."""

import json

import pytest

from forethought import methods
from forethought.errors import BudgetExceeded, ParameterError, UnknownNameError
from forethought.methods.compute_optimal import PROBES, Policy, fit
from forethought.scaffolding import Budget, Reply, ScriptedWorker
from scripted import TimeEnds, answer

POLICY = Policy(4, (0.25, 0.5), (PROBES, "majority_vote@3", "best_of_n@2"))
REWARD = {"method": "forethought.rewards.confidence:ConfidenceRewardController"}


def boxed(text):
    return rf"\boxed{{{text}}}"


def ask(answers, policy=POLICY, budget=None, **settings):
    kind = TimeEnds if budget is not None and budget.seconds else ScriptedWorker
    worker = kind([each if isinstance(each, Reply) else boxed(each) for each in answers])
    controller = methods.create("compute_optimal", policy=policy, **settings)
    result = answer(controller, worker, budget=budget)
    return result.output, worker


SIMPLE = Policy(4, (0.25, 0.5), (PROBES, "majority_vote@3", "majority_vote@5"))


@pytest.mark.parametrize(
    ("probes", "difficulty", "method", "more"),
    [
        ("7777", 0.0, PROBES, ""),
        ("5777", 0.25, PROBES, ""),
        ("5576", 0.5, "majority_vote@3", "888"),
        ("1234", 0.75, "majority_vote@5", "99999"),
    ],
)
def test_the_less_the_probes_agree_the_more_is_spent(probes, difficulty, method, more):
    output, worker = ask(probes + more, SIMPLE)
    told = output.meta["compute_optimal"]
    assert (told["difficulty"], told["method"]) == (difficulty, method)
    assert output.text == boxed(more[0] if more else "7")
    assert len(worker.calls) == 4 + len(more)


def test_probes_without_an_answer_make_a_question_difficult():
    output, _ = ask([Reply("none")] * 3 + ["1", *"22222"], SIMPLE)
    assert output.meta["compute_optimal"] == {
        "difficulty": 0.75,
        "method": "majority_vote@5",
        "answer": "2",
        "answer_rule": "boxed",
    }


def test_the_seeds_of_probes_and_of_the_methods_samples_are_all_different():
    worker = ScriptedWorker([boxed(each) for each in "123455555"])
    controller = methods.create("compute_optimal", policy=SIMPLE)
    answer(controller, worker, sampling_params={"seed": 1})
    assert len({call.task.seed for call in worker.calls}) == 9


def test_the_answer_that_is_told_is_that_of_the_text_that_is_returned():
    """Of the method that the policy chose, though the probes say something else."""
    policy = Policy(2, (0.0,), (PROBES, "majority_vote@3"))
    output, _ = ask("57888", policy)
    assert output.text == boxed("8")
    assert output.meta["compute_optimal"]["answer"] == "8"


def test_when_the_budget_ends_the_probes_answer_is_returned():
    slow = Reply("slow", delay=60)
    output, _ = ask([*"5567", slow, slow, slow], SIMPLE, Budget(seconds=600))
    assert (output.text, output.meta["compute_optimal"]["method"]) == (boxed("5"), PROBES)
    with pytest.raises(BudgetExceeded):
        ask([slow] * 4, SIMPLE, Budget(seconds=600))


def test_methods_of_a_policy_get_their_settings_and_mistakes_are_refused():
    controller = methods.create(
        "compute_optimal", policy=POLICY, settings={"best_of_n@2": {"reward_controller": REWARD}}
    )
    tags = {tag.value for tag in methods.worker_tags(controller)}
    assert tags == {"generation"}
    assert controller.clone().controllers["majority_vote@3"] is not controller.controllers
    with pytest.raises(ParameterError, match="reward_controller"):
        methods.create("compute_optimal", policy=POLICY)
    with pytest.raises(UnknownNameError, match="majority_vote"):
        methods.create("compute_optimal", policy=Policy(2, (), ("majority_veto",)))
    with pytest.raises(ParameterError, match="majority_vote@9"):
        methods.create("compute_optimal", policy=SIMPLE, settings={"majority_vote@9": {}})
    with pytest.raises(ParameterError, match="rising"):
        Policy(4, (0.5, 0.25), (PROBES,) * 3)


BY_SCORE = Policy(
    2, (0.0, 0.5), (PROBES, "majority_vote@3", "majority_vote@5"), None, None, "score"
)


@pytest.mark.parametrize(
    ("probes", "difficulty", "method", "more"),
    [
        ("77", 0.0, PROBES, ""),
        ("57", 0.5, "majority_vote@3", "888"),
        ("55", 1.0, "majority_vote@5", "99999"),
    ],
)
def test_difficulty_is_predicted_by_the_mean_score_of_the_probes(probes, difficulty, method, more):
    reward = {"method": "checker", "checker": lambda question, text: "7" in text}
    output, worker = ask(probes + more, BY_SCORE, reward_controller=reward)
    told = output.meta["compute_optimal"]
    assert (told["difficulty"], told["method"]) == (difficulty, method)
    assert output.text == boxed(more[0] if more else "7")
    assert len(worker.calls) == 2 + len(more)


def test_the_probe_with_the_highest_score_is_the_output_and_its_answer_is_told():
    """Of two answers of one vote each; the vote alone would tell the first one."""
    policy = Policy(2, (0.5,), (PROBES, "majority_vote@3"), None, None, "score")
    reward = {"method": "checker", "checker": lambda question, text: "7" in text}
    output, _ = ask("57", policy, reward_controller=reward)
    assert output.text == boxed("7")
    told = output.meta["compute_optimal"]
    assert told.items() >= {"difficulty": 0.5, "method": PROBES, "answer": "7"}.items()


def test_a_policy_of_one_predictor_is_not_used_with_another():
    with pytest.raises(ParameterError, match="do not belong together"):
        ask("77", BY_SCORE)
    with pytest.raises(ParameterError, match="do not belong together"):
        ask("7777", SIMPLE, reward_controller=REWARD)


# ---- fitting -------------------------------------------------------------------------------------

QUESTIONS = [  # probes' answers; right are 7 and the methods' attempts: 3 samples, 9 samples
    ("7777", True, True),
    ("7777", True, True),
    ("7722", True, True),
    ("5572", False, True),
    ("1234", False, True),
    ("1235", False, False),
]


def journal(tmp_path, questions=QUESTIONS):
    lines = [{"journal": 1, "hash": "x", "settings": {}}]

    def add(method, number, sample, text, correct, decoded):
        tokens = {"decoded": decoded, "prefilled": 9, "discarded": 0, "cached": 0}
        values = {"method": method, "number": number, "sample": sample, "text": text}
        lines.append({"attempt": {**values, "correct": correct, "tokens": tokens}})

    for number, (probes, small, large) in enumerate(questions):
        for sample, said in reversed([*enumerate(probes)]):
            add("plain", number, sample, boxed(said), said == "7", 10)
        add("majority_vote@3", number, 0, "", small, 30)
        add("majority_vote@9", number, 0, "", large, 90)
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_most_accurate_policy_within_the_tokens_is_found(tmp_path):
    """Difficulties 0 0 .5 .5 .75 .75 make three bins of two. The probes are right in the first
    bin and on the first question of the second; 9 samples gain one question in each of the
    others, for 90 tokens more on two questions: 30 per question and bin."""
    path = journal(tmp_path)
    policy = fit(path, 100, num_bins=3)
    assert policy == Policy(
        4, (0.0, 0.5), (PROBES, "majority_vote@9", "majority_vote@9"), 5 / 6, 100.0
    )
    policy = fit(path, 99, num_bins=3)
    assert (policy.methods.count(PROBES), policy.accuracy, policy.tokens) == (2, 4 / 6, 70.0)
    assert fit(path, 69, num_bins=3).methods == (PROBES,) * 3
    assert fit(path, 40, num_bins=3).accuracy == 0.5
    with pytest.raises(ParameterError, match="max_tokens"):
        fit(path, 39)


def test_a_policy_is_fitted_on_scores_and_on_several_journals(tmp_path):
    """Of the first of two probes right: difficulties 0 0 0 1 1 1; the probes solve three questions
    for 20 tokens, and 9 samples two more for 90 on three."""
    path = journal(tmp_path)
    head, *lines = path.read_text().splitlines()
    parts = [tmp_path / "one", tmp_path / "two"]
    parts[0].write_text("\n".join([head, *(line for line in lines if "plain" in line)]))
    parts[1].write_text("\n".join([head, *(line for line in lines if "plain" not in line)]))
    options = {"num_probes": 1, "score": lambda attempt: float(attempt["correct"])}
    policy = fit(parts, 55, **options)
    assert policy == Policy(1, (0.0,), (PROBES, "majority_vote@9"), 5 / 6, 10 + 45.0, "score")
    assert fit(parts, 54, **options).methods == (PROBES, PROBES)


def test_probes_that_two_journals_have_are_counted_once(tmp_path):
    path = journal(tmp_path)
    assert fit([path, path], 100, num_bins=3) == fit(path, 100, num_bins=3)


def test_one_bin_has_one_method_and_equal_difficulties_stay_in_one_bin(tmp_path):
    assert fit(journal(tmp_path), 130, num_bins=1).methods == ("majority_vote@9",)
    same = journal(tmp_path, [("7777", True, True)] * 7)
    assert fit(same, 1000).edges == ()


def test_a_policy_is_saved_as_json_and_read_again(tmp_path):
    policy, path = fit(journal(tmp_path), 100, num_bins=3), tmp_path / "policy.json"
    policy.save(path)
    assert Policy.load(path) == Policy.load(str(path)) == policy
    assert json.loads(path.read_text())["methods"][0] == PROBES
    controller = methods.create("compute_optimal", policy=str(path))
    assert controller.policy == policy
    for bad in ("{", '{"edges": []}', "[]"):
        path.write_text(bad)
        with pytest.raises(ParameterError, match="invalid policy"):
            Policy.load(path)
    with pytest.raises(ParameterError, match="invalid policy"):
        Policy.load(tmp_path / "none.json")


def test_a_calibration_file_with_gaps_is_refused(tmp_path):
    path = journal(tmp_path)
    with pytest.raises(ParameterError, match="5 samples"):
        fit(path, 100, num_probes=5)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(ParameterError, match=r"majority_vote@9"):
        fit(path, 100)
    path.write_text(lines[0])
    with pytest.raises(ParameterError, match="empty"):
        fit(path, 100)
