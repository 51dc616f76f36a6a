"""What the instruct model is trained on is what the methods ask of a model.

Each method is run on a script that answers with the trained replies of a dialogue; its prompts are
the dialogue's up to each reply.
"""

import random
import re
from itertools import accumulate

import pytest

from countdown.traces import branches, write_bounded
from forethought import methods
from forethought.evaluation.generated.countdown import Problem, is_held_out, sample_problem
from forethought.methods.sleep_time import SleepTimeController
from forethought.methods.spct import SPCTRewardController
from forethought.outputs import Logprob
from forethought.rewards.verifier import verifier
from forethought.scaffolding import (
    CompareRewardController,
    GenRMController,
    JudgeRewardController,
    NativeGenerationController,
    Reply,
    ScaffoldingLlm,
    ScriptedWorker,
)
from forethought.training.chat_tokenizer import END, prompt_text
from instruct import facts, judging, teams
from instruct.attempts import check, sample_attempt, spoil
from instruct.corpus import KINDS, SHARES, encoded, train_tokenizer

SEEDS = range(6)


def parts(dialogue):
    """The first prompt, and for each reply the whole text before it and the reply."""
    texts = [turn.text.replace(END, "") for turn in dialogue]
    before = ["", *accumulate(texts)]
    replies = [(before[n], texts[n]) for n, turn in enumerate(dialogue) if turn.trained]
    return texts[0], replies


def run(controller, dialogue, prompt=None, question=None, extra=None):
    """The prompts of a method whose every call is answered as in the dialogue."""
    first, replies = parts(dialogue)
    known = {**dict(replies), **(extra or {})}
    worker = ScriptedWorker(lambda asked, index: known.get(asked, "unknown"))
    with ScaffoldingLlm(controller, dict.fromkeys(methods.worker_tags(controller), worker)) as llm:
        result = llm.generate(first if prompt is None else prompt, question=question)
    assert "unknown" not in {call.task.output_str for call in worker.calls}
    return worker.prompts, replies, result


@pytest.mark.parametrize("seed", SEEDS)
def test_feedback_and_better_answers_are_asked_for_as_self_refine_does(seed):
    dialogue = judging.refined(random.Random(seed))
    rounds = sum(turn.trained for turn in dialogue) // 2
    controller = methods.create("self_refine", num_refinements=rounds - 1)
    prompts, replies, _ = run(controller, dialogue)
    assert prompts == [before for before, _ in replies][: len(prompts)]
    assert len(prompts) >= len(replies) - 1


@pytest.mark.parametrize("seed", [0, 1])
def test_revisions_are_asked_for_as_sequential_revision_does(seed):
    dialogue = judging.revised(random.Random(seed))
    count = sum(turn.trained for turn in dialogue) - 1
    controller = methods.create("sequential_revision", num_revisions=count)
    prompts, replies, _ = run(controller, dialogue)
    assert prompts == [before for before, _ in replies]


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_read_each_other_as_in_hogwild_turns(seed):
    """The other worker's texts are those that stand in the sequence of the first."""
    rng = random.Random(seed)
    while True:
        state = rng.getstate()
        dialogue = teams.turns(rng)
        if "\nAlice: " in dialogue[0].text:
            break
    rng.setstate(state)
    texts = [turn.text.replace(END, "") for turn in dialogue]
    said = [text for turn, text in zip(dialogue[:-1], texts, strict=False) if turn.trained]
    others = [text.split("\nBob: ")[1].split("\nAlice: ")[0] for text in texts[2:-1:2]]
    others[-1] = others[-1].removesuffix(texts[-2][texts[-2].rindex("\n\nTogether") :])
    written = {"Alice": iter(said), "Bob": iter(others)}

    def says(prompt, index):
        if prompt.endswith("answer:"):
            return texts[-1]
        name = prompt.removesuffix(teams.CHECK).rpartition("\n")[2].partition(":")[0]
        text = next(written[name])
        return text if "boxed" in text or "left." in text else text.strip() + "\n\n"

    worker = ScriptedWorker(says)
    controller = methods.create("hogwild_turns", turn_tokens=5000, max_turns=teams.MAX_TURNS)
    question = texts[0].partition(teams.OPENING)[0]
    with ScaffoldingLlm(controller, dict.fromkeys(methods.worker_tags(controller), worker)) as llm:
        output = llm.generate(question, sampling_params={"max_tokens": 5000}).output
    assert output.text == texts[-1]
    mine = [prompt for prompt in worker.prompts if "\nAlice: " in prompt.split("\nBob: ")[0]]
    before = [*accumulate(texts)]
    assert mine == [before[n - 1] for n, turn in enumerate(dialogue) if turn.trained]


def test_threads_are_spawned_and_joined_as_in_parallel_thinking():
    rng = random.Random(1)
    while True:
        dialogue = teams.threads(rng)
        if len(dialogue) >= 9 and dialogue[-1].text.endswith(END):
            break
    texts = [turn.text.replace(END, "") for turn in dialogue]
    written = [text for turn, text in zip(dialogue, texts, strict=True) if turn.trained]
    known = {}
    for place in range(1, len(texts) - 1, 4):  # outlines, the first thread, what is joined
        before = "".join(texts[: place + 1])
        joined = f"<Thread>1:{texts[place + 2]}{texts[place + 3]}"
        for number, part in enumerate(joined.split("<Thread>")[1:], start=1):
            begun = f"{before}</Outlines>\n<Thread>{number}:"
            known[begun] = part.partition(":")[2].partition("</Thread>")[0] + "</Thread>"
    outlines = {before: text + "</Outlines>" for before, text in parts(dialogue)[1][:-1:2]}
    controller = methods.create("parallel_thinking")
    prompts, replies, result = run(controller, dialogue, extra={**outlines, **known})
    assert result.output.text == "".join(texts[1:])
    assert {before for before, _ in replies} <= set(prompts)
    assert len(written) == len(replies)


def judged(controller, dialogue, answers, question):
    """The one chat of a reward controller for answers."""
    [(_, reply)] = parts(dialogue)[1]
    worker = ScriptedWorker(
        lambda asked, index: reply if "answer" in asked[:60] else answers[index]
    )
    method = methods.create(
        "best_of_n", default_sample_num=len(answers), reward_controller=controller
    )
    with ScaffoldingLlm(method, dict.fromkeys(methods.worker_tags(method), worker)) as llm:
        result = llm.generate("Q", question=question)
    chats = [call for call in worker.calls if call.prompt != "Q"]
    return chats, result


def question_and_answers(dialogue):
    """Read in the prompt of a dialogue about a group."""
    prompt = dialogue[0].text.removeprefix("<|user|>")
    question = prompt.split("Question:\n")[1].split("\n\n")[0]
    listed = prompt.split("\n\n")
    return question, [each.split("\n")[1] for each in listed if each.startswith("Answer ")]


@pytest.mark.parametrize(
    ("kind", "controller"),
    [
        ("compared", CompareRewardController(5)),
        ("criticised", SPCTRewardController(1, shuffled=False)),
    ],
)
def test_groups_of_answers_are_asked_about_as_their_rewards_do(kind, controller):
    rng = random.Random(3)
    while True:
        dialogue = KINDS[kind](rng)
        question, answers = question_and_answers(dialogue)
        if len(set(answers)) == len(answers):
            break
    thought = [f"a search\n</think>\n{answer}" for answer in answers]
    chats, result = judged(controller, dialogue, thought, question)
    assert [prompt_text(chat.prompt) for chat in chats] == [dialogue[0].text]
    assert result.output.text in thought


def test_a_judge_and_a_verifier_are_asked_as_their_rewards_do():
    rng = random.Random(2)
    dialogue = judging.scored(rng)
    question, [answer] = (
        question_and_answers(dialogue)[0],
        [dialogue[0].text.split("Answer:\n")[1].split("\n\n")[0]],
    )
    chats, _ = judged(JudgeRewardController(), dialogue, [answer], question)
    assert [prompt_text(chat.prompt) for chat in chats] == [dialogue[0].text]
    dialogue = judging.verified(rng)
    question, _, answer = dialogue[0].text.partition("<think>\n")
    known = {question + "<think>\n": answer, **dict(parts(dialogue)[1])}
    words = {" Yes": "Yes", " No": "No"}

    def says(prompt, index):
        text = known[prompt]
        if text not in words:
            return text
        return Reply(text, logprobs=[{1: Logprob(-0.1, 1, text)}] * len(text))

    worker = ScriptedWorker(says)
    reward = GenRMController(1)
    method = methods.create("best_of_n", default_sample_num=1, reward_controller=reward)
    with ScaffoldingLlm(method, dict.fromkeys(methods.worker_tags(method), worker)) as llm:
        llm.generate(question + "<think>\n")
    assert worker.prompts == [question + "<think>\n", *(b for b, _ in parts(dialogue)[1])]


@pytest.mark.parametrize("seed", SEEDS)
def test_documents_and_follow_up_questions_are_asked_about_as_in_drag_and_iterdrag(seed):
    rng = random.Random(seed)
    world, retrieved = facts.sample_world(rng)
    examples, last = [world.question(rng) for _ in range(2)], world.question(rng)
    for kind, write in (("drag", facts.document_dialogue), ("iterdrag", facts.follow_up_dialogue)):
        dialogue = write(retrieved, examples, last)
        given = [
            {"question": each.text, "answer": each.working}
            | ({"steps": each.steps} if kind == "iterdrag" else {})
            for each in examples
        ]
        controller = methods.create(
            kind,
            documents=world.documents,
            num_documents=retrieved.num_documents,
            examples=given,
        )
        prompts, replies, result = run(controller, dialogue, prompt=last.text)
        assert prompts == [before for before, _ in replies]
        assert f"\\boxed{{{last.answer}}}" in result.output.text


@pytest.mark.parametrize("seed", SEEDS)
def test_thoughts_about_a_context_are_asked_for_as_in_sleep_time(seed):
    rng = random.Random(seed)
    while True:
        dialogue = facts.slept(rng)
        if "Inferences: " in dialogue[0].text and "\\boxed" in dialogue[1].text:
            break
    context, _, behind = dialogue[0].text.partition("\n\nQuestions about")
    inferences = behind.partition("Inferences: ")[2].partition("\n\nQuestion: ")[0]
    question = behind.partition("\n\nQuestion: ")[2].removesuffix("\n\nAnswer: ")
    controller = SleepTimeController(NativeGenerationController(), context)
    asked = context + "\n\nQuestions about" + behind.partition(inferences)[0]
    prompts, replies, _ = run(controller, dialogue, prompt=question, extra={asked: inferences})
    assert prompts == [asked, replies[0][0]]


def test_a_check_tells_right_answers_from_wrong_ones_as_the_exact_checker_does():
    rng, accepts = random.Random(5), verifier("countdown")
    found = {True: 0, False: 0}
    for _ in range(300):
        attempt = sample_attempt(rng)
        assert not is_held_out(attempt.problem)
        for expression in (attempt.trace.answer, spoil(attempt.trace.answer, rng)):
            result = check(attempt.problem, expression)
            told = accepts(attempt.question, f"\\boxed{{{expression}}}")
            whole = result.value is not None or not result.has_numbers
            if whole and "missing" not in result.text:  # the checker takes parts of the numbers
                assert result.is_right == told
            found[result.is_right] += 1
        assert check(attempt.problem, attempt.trace.answer).is_right == attempt.is_right
    assert min(found.values()) > 60


def test_a_bounded_search_ends_early_with_what_came_nearest():
    rng = random.Random(4)
    hits = 0
    for _ in range(60):
        problem = sample_problem(rng, 4)
        trace, is_hit = write_bounded(problem, rng, 4)
        result = check(problem, trace.answer)
        assert result.is_right == is_hit
        assert len(trace.search.splitlines()) <= 12
        found = [int(value) for value in re.findall(r"= (\d+), (?:back|yes)", trace.search)]
        nearest = min(abs(value - problem.target) for value in found)
        assert abs(result.value - problem.target) == nearest
        hits += is_hit
    assert 5 < hits < 40


def test_branches_of_a_search_begin_with_different_steps_and_tell_what_they_came_to():
    rng = random.Random(6)
    problem = sample_problem(rng, 4)
    found = list(branches(problem, rng))
    assert len({each.first for each in found}) == len(found) > 3
    for each in found:
        assert each.text.startswith(f"{each.first}, left ")
        assert each.hits == (each.steps[-1].value == problem.target)
        assert each.hits == each.text.endswith("yes\n")


def test_a_check_writes_each_calculation_and_stops_at_what_is_not_whole():
    problem = Problem((20, 9, 12, 17), 13)
    result = check(problem, "(20+17)/(12-9)")
    assert result.text == ("numbers 20 17 12 9, all\n20 + 17 = 37, 12 - 9 = 3, 37 / 3 = ?, wrong\n")
    assert (result.finding, result.score) == ("It makes nothing whole.", 1)
    assert check(problem, "9-20").text == "numbers 9 20, 12 is missing\n"
    assert check(problem, "((20+17)-12)-9").score == 4
    assert check(problem, "((20+17)-12)-9").finding == "It makes 16, not 13."


def test_a_revision_replaces_wrong_answers_and_keeps_right_ones():
    rng = random.Random(8)
    for _ in range(40):
        attempt = sample_attempt(rng, 4)
        again = attempt.again(rng)
        if attempt.is_right:
            assert again.trace.answer == attempt.trace.answer
        else:
            begun = [line.partition(", left ") for line in again.trace.search.splitlines()]
            tried = {first for first, mark, _ in begun if mark}
            assert tried
            assert not {*map(str, attempt.first_steps)} & tried


def test_every_kind_of_dialogue_has_a_share_and_something_to_learn():
    tokenizer = train_tokenizer(samples=4)
    assert set(SHARES) == {*KINDS, "drill"}
    assert min(SHARES.values()) > 0
    for kind, make in KINDS.items():
        example = encoded(tokenizer, make(random.Random(kind)))
        assert any(example.trained), kind
        assert len(example.ids) == len(example.trained) < 2048
