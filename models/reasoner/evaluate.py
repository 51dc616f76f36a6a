"""Measure a reasoner: plain decoding, majority vote, and Dynasor-CoT replayed on finished traces.

    python -m reasoner.evaluate --model DIR --problems 200
    python -m reasoner.evaluate --model DIR --problems 200 --skills

The first compares methods on the shipped problems (``--larger``: on held-out problems with larger
operands than the generator writes traces of). The second has plain decoding, or one sample at
``--temperature``, solve held-out problems of every kind, and reports the first derivation beside
the answer: how many answers the re-checks fixed or broke.

The reference implementation of the demo: it decodes with transformers alone and shares no code with
the engine or the methods. With greedy decoding the main chain does not depend on the probes, so
every setting of Dynasor-CoT can be replayed on the same traces.
"""

import argparse
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from forethought.evaluation.generated.arithmetic import (
    MOST_STEPS,
    SMALL,
    Problem,
    Step,
    fixed_test_problems,
    sample_problem,
)
from forethought.evaluation.generated.arithmetic_questions import (
    KINDS,
    sample_chain,
    sample_larger,
    sample_varied,
)
from forethought.methods.parts.probe import PROBE_SUFFIX
from forethought.training.chat_tokenizer import prompt_text
from reasoner.other import HELD_OUT, SENTENCE
from reasoner.traces import MOST_RECHECKED

Ids = list[int]
FIRST_ANSWER = re.compile(r"So the answer is (-?\d+)\.")
UNCERTAIN = re.compile(r"\b(wait|hold|but|okay|no|hmm)\b", re.IGNORECASE)
PROBE_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy with its 95 % Wilson interval, and mean tokens generated per problem."""

    method: str
    accuracy: float
    accuracy_ci: tuple[float, float]
    tokens: float


@dataclass(frozen=True, slots=True)
class Skill:
    """Plain decoding on problems of one kind; shares are of all its problems."""

    kind: str
    problems: int
    accuracy: float
    accuracy_ci: tuple[float, float]
    first: float
    """Accuracy of the first derivation alone."""
    fixed: float
    """Wrong in the first derivation, right in the end."""
    broken: float
    """Right in the first derivation, wrong in the end."""
    tokens: float


class Solver:
    """A model directory with batched decoding on the CPU or the GPU."""

    def __init__(self, directory: Path, batch: int = 100) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16
        ).to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.batch = batch

    def encode(self, text: str) -> Ids:
        """Token ids of a text, markers included."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def complete(self, prompts: Sequence[Ids], limit: int, temperature: float = 0.0) -> list[Ids]:
        """Continue each prompt up to and including the end token, at most ``limit`` tokens."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        results: list[Ids] = [[] for _ in prompts]
        end = self.tokenizer.eos_token_id
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            width = max(len(prompts[index]) for index in part)
            rows = [[end] * (width - len(prompts[index])) + prompts[index] for index in part]
            mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in part]
            output = self.model.generate(
                torch.tensor(rows, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                max_new_tokens=limit,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            for index, row in zip(part, output[:, width:].tolist(), strict=True):
                results[index] = row[: row.index(end) + 1] if end in row else row
        return results


def boxed_answer(text: str) -> str:
    """Content of the last ``\\boxed{...}``, or an empty string."""
    matches = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return matches[-1].strip() if matches else ""


def wilson(right: float, count: int) -> tuple[float, float]:
    """95 % Wilson interval of a share ``right / count``."""
    z, share = 1.96, right / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (centre - spread) / (1 + z * z / count), (centre + spread) / (1 + z * z / count)


def score(method: str, right: Sequence[float], tokens: Sequence[float]) -> Score:
    """Summarise per-problem correctness (0..1) and token counts."""
    count = len(right)
    low, high = wilson(sum(right), count)
    return Score(method, sum(right) / count, (low, high), sum(tokens) / count)


def vote(answers: Sequence[str]) -> str:
    """The most frequent answer that is not empty; of equals, the first seen."""
    counts = Counter(answer for answer in answers if answer)
    return max(counts, key=lambda answer: counts[answer], default="")


class Replay:
    """Probes of finished greedy traces, decoded once and replayed under any setting."""

    def __init__(self, solver: Solver, prompts: list[Ids], traces: list[Ids], every: int) -> None:
        suffix = solver.encode(PROBE_SUFFIX)
        self.traces = traces
        cuts = [
            (row, cut)
            for row, trace in enumerate(traces)
            for cut in range(every, len(trace), every)
        ]
        probe_prompts = [prompts[row] + traces[row][:cut] + suffix for row, cut in cuts]
        self.probes: dict[tuple[int, int], tuple[str, int]] = {}
        for key, ids in zip(cuts, solver.complete(probe_prompts, PROBE_TOKENS), strict=True):
            count = next(
                (n for n in range(1, len(ids)) if "}" in solver.tokenizer.decode(ids[:n])), len(ids)
            )
            text = solver.tokenizer.decode(ids[:count])
            self.probes[key] = (text.split("}")[0].strip() if "}" in text else "", count)

    def run(self, row: int, chunk: int, threshold: int) -> tuple[str | None, int]:
        """Answer at the exit (None: the trace ended first) and tokens generated, probes included.

        A probe runs beside the main chain, which meanwhile advances by the probe's length.
        """
        length, spent, answers = len(self.traces[row]), 0, [""]
        for cut in range(chunk, length, chunk):
            answer, count = self.probes[row, cut]
            spent += count
            answers.append(answer)
            last = answers[-threshold:]
            if answer and last == [answer] * threshold and not UNCERTAIN.search(answer):
                return answer, min(cut + count, length) + spent
        return None, length + spent


def evaluate(solver: Solver, problems: list[dict[str, str]], chunks: Sequence[int]) -> list[Score]:
    """All methods on the same problems, the plain row first."""
    torch.manual_seed(0)
    truths = [problem["answer"] for problem in problems]
    prompts = [solver.encode(prompt_text(problem["question"])) for problem in problems]
    decode = solver.tokenizer.decode

    traces = solver.complete(prompts, limit=600)
    plain = [boxed_answer(decode(trace)) for trace in traces]
    right = [float(a == t) for a, t in zip(plain, truths, strict=True)]
    scores = [score("plain", right, [len(trace) for trace in traces])]

    samples = solver.complete([p for p in prompts for _ in range(8)], limit=600, temperature=0.8)
    answers = [boxed_answer(decode(sample)) for sample in samples]
    groups = [answers[8 * i : 8 * i + 8] for i in range(len(prompts))]
    lengths = [sum(map(len, samples[8 * i : 8 * i + 8])) for i in range(len(prompts))]
    single = [group.count(truth) / 8 for group, truth in zip(groups, truths, strict=True)]
    scores.append(score("one sample, T=0.8", single, [n / 8 for n in lengths]))
    voted = [float(vote(group) == truth) for group, truth in zip(groups, truths, strict=True)]
    scores.append(score("vote of 8, T=0.8", voted, lengths))

    replay = Replay(solver, prompts, traces, every=math.gcd(*chunks))
    for chunk in chunks:
        for threshold in (2, 3):
            runs = [replay.run(row, chunk, threshold) for row in range(len(prompts))]
            answers = [a if a is not None else p for (a, _), p in zip(runs, plain, strict=True)]
            right = [float(a == t) for a, t in zip(answers, truths, strict=True)]
            name = f"dynasor, chunk {chunk}, threshold {threshold}"
            scores.append(score(name, right, [tokens for _, tokens in runs]))
    return scores


def larger_test_problems(count: int, seed: int = 2025) -> list[Problem]:
    """Distinct held-out problems with larger operands than the generator writes traces of."""
    rng, by_question = random.Random(seed), dict[str, Problem]()
    while len(by_question) < count:
        problem = sample_larger(rng, held_out=True)
        by_question[problem.question] = problem
    return list(by_question.values())


def kinds_of_problem(count: int, seed: int = 2026) -> dict[str, list[Problem]]:
    """``count`` problems of each kind that the reasoner knows, held out but for the small sums."""
    rng, times = random.Random(seed), range(count)
    kinds = {
        "shipped problems": fixed_test_problems(count),
        "shipped mix": [sample_problem(rng, held_out=True) for _ in times],
        "larger operands": larger_test_problems(count),
        f"sums up to {SMALL} (trained)": [_small_sum(rng) for _ in times],
    }
    for kind in KINDS:
        kinds[kind] = [sample_varied(rng, kind, held_out=True) for _ in times]
    for steps in range(1, MOST_STEPS + 1):
        kinds[f"chain of {steps}"] = [sample_chain(rng, steps, held_out=True) for _ in times]
    rechecked = range(1, MOST_RECHECKED + 1)
    kinds["larger, re-checked"] = [sample_larger(rng, rechecked, held_out=True) for _ in times]
    return kinds


def _small_sum(rng: random.Random) -> Problem:
    step = Step("", rng.randint(0, SMALL), rng.choice("+-"), rng.randint(0, SMALL))
    return Problem("sum", f"What is {step.left}{step.sign}{step.right}?", (step,), (None, None))


def skill(
    solver: Solver, kind: str, problems: Sequence[Problem], temperature: float = 0.0
) -> Skill:
    """One answer to each of some problems, and what became of the first derivation."""
    prompts = [solver.encode(prompt_text(problem.question)) for problem in problems]
    traces = solver.complete(prompts, 700, temperature)
    first, last = [], []
    for problem, trace in zip(problems, traces, strict=True):
        text = solver.tokenizer.decode(trace)
        match = FIRST_ANSWER.search(text)
        first.append(match is not None and match[1] == problem.answer)
        last.append(boxed_answer(text) == problem.answer)
    count, pairs = len(problems), list(zip(first, last, strict=True))
    return Skill(
        kind,
        count,
        sum(last) / count,
        wilson(sum(last), count),
        sum(first) / count,
        pairs.count((False, True)) / count,
        pairs.count((True, False)) / count,
        sum(map(len, traces)) / count,
    )


def answered_by_sentence(solver: Solver, texts: Sequence[str]) -> Skill:
    """Share of texts that are no problems which get the sentence and nothing else."""
    traces = solver.complete([solver.encode(prompt_text(text)) for text in texts], limit=300)
    replies = [solver.tokenizer.decode(t, skip_special_tokens=True) for t in traces]
    right = sum(reply.split("</think>")[-1].strip() == SENTENCE for reply in replies)
    share, count = right / len(texts), len(texts)
    tokens = sum(map(len, traces)) / count
    return Skill("other text", count, share, wilson(right, count), share, 0.0, 0.0, tokens)


def print_skills(solver: Solver, count: int, temperature: float = 0.0) -> None:
    """A table, a row for each kind, and one JSON line."""
    torch.manual_seed(0)
    kinds = kinds_of_problem(count).items()
    rows = [skill(solver, kind, problems, temperature) for kind, problems in kinds]
    rows.append(answered_by_sentence(solver, HELD_OUT))
    for row in rows:
        low, high = row.accuracy_ci
        sys.stdout.write(
            f"{row.kind:24} {row.accuracy:6.1%} [{low:.1%}, {high:.1%}] first {row.first:6.1%}"
            f" fixed {row.fixed:5.1%} broken {row.broken:5.1%} {row.tokens:7.1f} tokens\n"
        )
    sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")


def main() -> None:
    """Read the command line, evaluate, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--problem-seed", type=int, help="other held-out problems than the shipped")
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 24, 32])
    parser.add_argument("--larger", action="store_true", help="problems with larger operands")
    parser.add_argument("--skills", action="store_true", help="one answer each, every kind")
    parser.add_argument("--temperature", type=float, default=0.0, help="of --skills; 0: greedy")
    options = parser.parse_args()
    if options.skills:
        print_skills(Solver(options.model), options.problems, options.temperature)
        return
    seed = {} if options.problem_seed is None else {"seed": options.problem_seed}
    draw = larger_test_problems if options.larger else fixed_test_problems
    problems = [
        {"question": problem.question, "answer": problem.answer}
        for problem in draw(options.problems, **seed)
    ]
    scores = evaluate(Solver(options.model), problems, options.chunks)
    for row in scores:
        low, high = row.accuracy_ci
        saved = 1 - row.tokens / scores[0].tokens
        sys.stdout.write(
            f"{row.method:32} {row.accuracy:6.1%} [{low:.1%}, {high:.1%}]"
            f" {row.tokens:7.1f} tokens {saved:+6.1%} saved\n"
        )
    sys.stdout.write(json.dumps({"rows": [asdict(row) for row in scores]}) + "\n")


if __name__ == "__main__":
    main()
