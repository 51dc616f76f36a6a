"""Measure a draft model against its target, on problems that neither was trained on.

    python -m forethought.training.drafter.evaluate --draft DIR --target DIR --problems 200

The target writes its answers through the engine, and the draft model reads them there; what
speculation would have accepted is then replayed. No speculation runs, so this is also what the
engine's own acceptance can be checked against. Prints a table and, last, one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from forethought import LLM, SamplingParams
from forethought.assets import drafter_dir, reasoner_dir
from forethought.training.drafter.acceptance import Acceptance, replay
from forethought.training.reasoner.problems import fixed_test_problems
from forethought.training.reasoner.vocabulary import prompt_text

DRAFT_LENS = (3, 5, 8)
LONGEST_OUTPUT = 600


def write_texts(
    target: LLM, prompts: Sequence[str], temperature: float
) -> list[tuple[list[int], list[int]]]:
    """For each prompt its token ids, and those of the target's answer."""
    params = SamplingParams(max_tokens=LONGEST_OUTPUT, temperature=temperature, seed=0)
    outputs = target.generate(list(prompts), params)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def first_choices(draft: LLM, texts: Sequence[tuple[list[int], list[int]]]) -> list[list[bool]]:
    """For each token of each answer, whether it is the draft model's first choice there."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    read = draft.generate([prompt + answer for prompt, answer in texts], params)
    agreements: list[list[bool]] = []
    for (prompt, answer), output in zip(texts, read, strict=True):
        assert output.prompt_logprobs is not None
        distributions = output.prompt_logprobs[len(prompt) :]
        agreements.append(
            [
                distribution is not None and distribution[token].rank == 1
                for token, distribution in zip(answer, distributions, strict=True)
            ]
        )
    return agreements


def evaluate(
    draft: LLM, target: LLM, prompts: Sequence[str], temperature: float
) -> list[Acceptance]:
    """Acceptance at each of DRAFT_LENS."""
    agreements = first_choices(draft, write_texts(target, prompts, temperature))
    return [replay(agreements, draft_len) for draft_len in DRAFT_LENS]


def main() -> None:
    """Read the command line, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, default=drafter_dir())
    parser.add_argument("--target", type=Path, default=reasoner_dir())
    parser.add_argument("--problems", type=int, default=200)
    options = parser.parse_args()
    prompts = [prompt_text(problem.question) for problem in fixed_test_problems(options.problems)]
    rows = []
    with LLM(options.draft) as draft, LLM(options.target) as target:
        for temperature in (0.0, 0.8):
            for row in evaluate(draft, target, prompts, temperature):
                shares = " ".join(f"{share:.2f}" for share in row.by_position)
                sys.stdout.write(
                    f"T={temperature}  K={row.draft_len}  {row.mean_length:.2f} tokens per step"
                    f"  accepted by position {shares}\n"
                )
                rows.append(
                    {"temperature": temperature, "mean_length": row.mean_length, **asdict(row)}
                )
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")


if __name__ == "__main__":
    main()
