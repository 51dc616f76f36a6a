"""Searches that are divided: among workers who read each other, and among threads.

The prompts are those of ``hogwild_turns`` and ``parallel_thinking`` (the format of ThreadWeaver).
One worker tries sums and differences first, the other one products and quotients; a turn is the
search below one first step::

    Alice: 20 + 17 = 37, left 9 12 37          Bob: 20 * 9 = 180, left 12 17 180
           37 - 12 = 25, 25 - 9 = 16, back          180 / 12 = 15, 17 - 15 = 2, back
           back                                     back
           nearest 16                               nearest 2

Threads are given first steps by the outlines, four at a time.
"""

import random
from collections.abc import Sequence

from countdown.traces import SearchBranch, branches
from forethought.evaluation.generated.countdown import (
    QUESTIONS,
    Problem,
    expression,
    question_text,
    sample_problem,
)
from forethought.methods.hogwild import CHECK, FINAL, OPENING
from forethought.methods.parts.threads import FORMATS
from forethought.training.chat_tokenizer import END, THINK_END, prompt_text
from instruct.judging import Dialogue, asked, said

WORKERS = ("Alice", "Bob")
MAX_TURNS = 4
"""Turns of a worker, and rounds of threads."""
NUM_THREADS = 4
CHECK_EVERY = 4
_FORMAT = FORMATS["threadweaver"]


def _sampled(rng: random.Random) -> tuple[Problem, str]:
    problem = sample_problem(rng, 3 if rng.random() < 0.15 else 4)
    return problem, question_text(problem, rng.choice(QUESTIONS))


def _block(branch: SearchBranch) -> str:
    """What is written of a branch: its search, and what came nearest or the answer."""
    if branch.hits:
        return branch.text
    return f"{branch.text}nearest {branch.steps[-1].value}"


def _boxed(branch: SearchBranch) -> str:
    return f"\\boxed{{{expression(branch.steps)}}}"


def _best(problem: Problem, tried: Sequence[SearchBranch]) -> SearchBranch:
    return min(tried, key=lambda branch: abs(branch.steps[-1].value - problem.target))


def turns(rng: random.Random) -> Dialogue:
    """The sequence of one of two workers, up to the final answer in that of the first."""
    problem, question = _sampled(rng)
    all_branches = list(branches(problem, rng))
    by_worker = [
        [branch for branch in all_branches if branch.first.sign in signs] for signs in ("+-", "*/")
    ]
    me = rng.randrange(2)
    name, other = WORKERS[me], WORKERS[1 - me]
    dialogue = [asked(f"{prompt_text(question)}{OPENING}\n{name}: ")]
    tried: list[SearchBranch] = []
    for turn in range(MAX_TURNS):
        written = [branch[turn] if turn < len(branch) else None for branch in by_worker]
        tried += [branch for branch in written if branch is not None]
        mine, theirs = written[me], written[1 - me]
        texts = [_turn_text(branch) for branch in (mine, theirs)]
        is_over = turn + 1 == MAX_TURNS or any(branch is None or branch.hits for branch in written)
        dialogue.append(said(texts[0] + (END if mine is None or mine.hits else "\n\n")))
        if is_over:
            break
        asks = CHECK if (turn + 2) % CHECK_EVERY == 0 else ""
        dialogue.append(asked(f"\n{other}: {texts[1]}\n{name}: {asks}"))
    if me == 0:
        dialogue[-1] = said(texts[0])
        closing = "" if mine is None or mine.hits else "\n\n"
        answer = _boxed(_best(problem, tried))
        dialogue.append(asked(f"{closing}\n{other}: {texts[1]}{FINAL}"))
        dialogue.append(said(f" {answer}{END}"))
    return dialogue


def _turn_text(branch: SearchBranch | None) -> str:
    if branch is None:
        return "nothing is left."
    return f"{_block(branch)}The answer is {_boxed(branch)}." if branch.hits else _block(branch)


def threads(rng: random.Random) -> Dialogue:
    """One thread, or the main thread with rounds of threads until one hits."""
    problem, question = _sampled(rng)
    all_branches = list(branches(problem, rng))
    starts = range(0, len(all_branches), NUM_THREADS)[:MAX_TURNS]
    rounds = [all_branches[n : n + NUM_THREADS] for n in starts]
    number = next((n for n, group in enumerate(rounds) if any(b.hits for b in group)), None)
    last = len(rounds) - 1 if number is None else number
    chosen = rng.randint(0, last) if rng.random() < 0.6 else None
    dialogue = [asked(prompt_text(question))]
    for n, group in enumerate(rounds[: last + 1]):
        if n == chosen:
            return [*dialogue, *_thread(rng, group, first=n == 0)]
        dialogue += [said(_outlines(group, first=n == 0)), *_joined(group)]
    tried = [branch for group in rounds[: last + 1] for branch in group]
    answer = f"\n{THINK_END}\nThe answer is {_boxed(_best(problem, tried))}."
    return [*dialogue, said(answer + END)]


def _outlines(group: Sequence[SearchBranch], *, first: bool) -> str:
    listed = "".join(
        f"<Outline>{n}: {branch.first}</Outline>\n" for n, branch in enumerate(group, start=1)
    )
    return f"{'' if first else chr(10)}<Parallel>\n{_FORMAT.spawn_begin}\n{listed}"


def _begin(number: int) -> str:
    return _FORMAT.thread_begin.format(number=number, text="")


def _thread(rng: random.Random, group: Sequence[SearchBranch], *, first: bool) -> Dialogue:
    """The block that spawns, up to its end, or one of its threads."""
    outlines = _outlines(group, first=first)
    index = rng.randint(0, len(group))
    if not index:
        return [said(outlines + _FORMAT.spawn_end)]
    text = _thread_text(group[index - 1])
    return [
        asked(outlines),
        asked(_FORMAT.spawn_end + _begin(index)),
        said(text + _FORMAT.thread_end),
    ]


def _thread_text(branch: SearchBranch) -> str:
    return f"\n{_block(branch)}" + ("" if branch.hits else "\n")


def _joined(group: Sequence[SearchBranch]) -> Dialogue:
    """The first thread, and the others after it."""
    first, *others = (_thread_text(branch) for branch in group)
    joined = "".join(
        _FORMAT.joined.format(number=n, text=text) for n, text in enumerate(others, start=2)
    )
    closing = f"{_FORMAT.thread_end}{joined}{_FORMAT.join_end}"
    return [asked(_FORMAT.spawn_end + _begin(1)), said(first), asked(closing)]
