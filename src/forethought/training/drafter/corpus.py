"""The corpus of a draft model: what its target wrote, and what else it would have written.

A sample is a token sequence and, for each place, the *law* of the next token: the target's TOP
likeliest tokens with their probabilities, at temperature 1, whatever temperature the sample was
drawn at. Places whose next token the target did not choose (prompts, probe suffixes) have no law.
Shards are functions of seed and number, so a run that was interrupted goes on where it stopped.
Knows nothing about networks, and of the target no more than ``LLM`` shows.
"""

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forethought import LLM, SamplingParams
from forethought.model_dir import replace_file
from forethought.outputs import CompletionOutput
from forethought.training.drafter.prompts import probe_suffix, problem_prompts

logger = logging.getLogger(__name__)

TOP = 8
TEMPERATURES = (0.0, 0.8)
PROBES_PER_PROBLEM = 0.25
LONGEST_OUTPUT, LONGEST_PROBE = 600, 12


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of n tokens.

    Attributes:
        tokens: int32 ``[n]``.
        choices: int32 ``[n, TOP]``: the target's likeliest tokens behind each place.
        probs: float16 ``[n, TOP]``: their probabilities; all 0 where there is no law.
    """

    tokens: Tensor
    choices: Tensor
    probs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """R samples of at most W tokens, filled up with token 0, which has no law.

    Attributes:
        tokens: int64 ``[R, W]``.
        choices: int64 ``[R, W, TOP]``.
        probs: float32 ``[R, W, TOP]``.
    """

    tokens: Tensor
    choices: Tensor
    probs: Tensor


def encode(llm: LLM, text: str) -> list[int]:
    """Token ids of a text, markers included."""
    ids: list[int] = llm.tokenizer.encode(text, add_special_tokens=False)
    return ids


def answers(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[Sample]:
    """What the target answers to each prompt (token ids), with its laws."""
    asked = [each.replace(logprobs=TOP) for each in params]
    outputs = llm.generate([list(prompt) for prompt in prompts], asked)
    return [
        _sample(prompt, output.outputs[0]) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _sample(prompt: list[int], output: CompletionOutput) -> Sample:
    assert output.logprobs is not None
    length = len(prompt) + len(output.token_ids)
    choices = torch.zeros(length, TOP, dtype=torch.int32)
    probs = torch.zeros(length, TOP, dtype=torch.float16)
    for place, distribution in enumerate(output.logprobs, start=len(prompt) - 1):
        # A token drawn from outside the TOP comes on top of them: the least likely has to go.
        likeliest = sorted(distribution.items(), key=lambda item: -item[1].logprob)[:TOP]
        choices[place] = torch.tensor([token for token, _ in likeliest])
        probs[place] = torch.tensor([math.exp(entry.logprob) for _, entry in likeliest])
    tokens = torch.tensor(prompt + output.token_ids, dtype=torch.int32)
    return Sample(tokens, choices, probs)


def probes(llm: LLM, samples: Sequence[Sample], rng: random.Random) -> list[Sample]:
    """Samples cut at a random place of the target's own text, and the answer elicited there.

    The text before the cut keeps its laws.
    """
    kept: list[Sample] = []
    prompts: list[list[int]] = []
    for sample in samples:
        first = int(sample.probs[:, 0].gt(0).nonzero()[0]) + 1
        cut = rng.randint(first, len(sample))
        kept.append(Sample(sample.tokens[:cut], sample.choices[:cut], sample.probs[:cut]))
        text = llm.tokenizer.decode(kept[-1].tokens.tolist())
        prompts.append(kept[-1].tokens.tolist() + encode(llm, probe_suffix(text, rng)))
    params = SamplingParams(max_tokens=LONGEST_PROBE, temperature=0.0)
    elicited = answers(llm, prompts, [params] * len(prompts))
    for before, sample in zip(kept, elicited, strict=True):
        sample.choices[: len(before)] = before.choices
        sample.probs[: len(before)] = before.probs
    return elicited


def write_shard(llm: LLM, rng: random.Random, problems: int) -> list[Sample]:
    """Answers to so many fresh problems, at each temperature in turn, then probes of some."""
    prompts = [encode(llm, text) for text in problem_prompts(rng, problems)]
    params = [
        SamplingParams(
            max_tokens=LONGEST_OUTPUT,
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=rng.getrandbits(32),
        )
        for index in range(problems)
    ]
    samples = answers(llm, prompts, params)
    return samples + probes(llm, rng.sample(samples, int(problems * PROBES_PER_PROBLEM)), rng)


def write_corpus(
    target: Path, directory: Path, *, seed: int, shards: int, problems: int
) -> list[Sample]:
    """All shards of ``problems`` problems each, read from ``directory`` where they lie there."""
    directory.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    llm: LLM | None = None
    for number in range(shards):
        path = directory / f"shard-{number:03}.safetensors"
        if not path.exists():
            llm = llm or LLM(target)
            rng = random.Random(f"{seed}:{number}:{problems}")
            save_samples(write_shard(llm, rng, problems), path)
            logger.info("wrote %s", path)
        samples += load_samples(path)
    if llm is not None:
        llm.shutdown()
    return samples


def save_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write samples into one file, at once: an interrupted save leaves none."""
    tensors = {
        "tokens": torch.cat([sample.tokens for sample in samples]),
        "choices": torch.cat([sample.choices for sample in samples]),
        "probs": torch.cat([sample.probs for sample in samples]),
        "lengths": torch.tensor([len(sample) for sample in samples]),
    }
    draft = path.with_suffix(".tmp")
    save_file(tensors, draft)
    replace_file(draft, path)


def load_samples(path: Path) -> list[Sample]:
    """The samples of one file."""
    stored = load_file(path)
    lengths = stored["lengths"].tolist()
    parts = (stored[name].split(lengths) for name in ("tokens", "choices", "probs"))
    return [Sample(*fields) for fields in zip(*parts, strict=True)]


class Batches:
    """The order in which samples are learned from: shuffled in each epoch, little padding.

    Samples of similar length share a batch of ``tokens`` tokens. What does not fill a batch of its
    width sits out the epoch. Batch ``step`` is a function of seed and step alone.

    Args:
        samples: at least one batch of them.
        tokens: of a batch, filling included.
        seed: of the shuffling.
    """

    WIDTHS = 128  # a batch is a multiple of this wide: few shapes, each of which is compiled once

    def __init__(self, samples: Sequence[Sample], tokens: int, seed: int) -> None:
        self.samples, self.tokens, self.seed = samples, tokens, seed
        self._by_width: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            width = -(-len(sample) // self.WIDTHS) * self.WIDTHS
            self._by_width.setdefault(width, []).append(index)
        self.per_epoch = sum(
            len(members) // self._rows(width) for width, members in self._by_width.items()
        )
        assert self.per_epoch, "too few samples for a single batch"
        self._epoch = -1
        self._order: list[tuple[int, list[int]]] = []

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        width, members = self._order[place]
        return pad([self.samples[index] for index in members], width)

    def _shuffled(self, epoch: int) -> list[tuple[int, list[int]]]:
        rng = random.Random(f"{self.seed}:{epoch}")
        order: list[tuple[int, list[int]]] = []
        for width, members in sorted(self._by_width.items()):
            rows = self._rows(width)
            mixed = rng.sample(members, len(members))
            starts = range(0, len(mixed) - rows + 1, rows)
            order += [(width, mixed[start : start + rows]) for start in starts]
        rng.shuffle(order)
        return order

    def _rows(self, width: int) -> int:
        return max(1, self.tokens // width)


def pad(samples: Sequence[Sample], width: int) -> Batch:
    """Samples of at most ``width`` tokens as one batch."""
    tokens = torch.zeros(len(samples), width, dtype=torch.int64)
    choices = torch.zeros(len(samples), width, TOP, dtype=torch.int64)
    probs = torch.zeros(len(samples), width, TOP)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample)] = sample.tokens
        choices[row, : len(sample)] = sample.choices
        probs[row, : len(sample)] = sample.probs
    return Batch(tokens, choices, probs)
