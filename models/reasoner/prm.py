"""The process reward model of the embedded reasoner: a copy of it, fine-tuned to judge its steps.

::

    problems -> reasoner, temperatures 0.8 to 1.2 -> samples.jsonl -> each line labelled (labels.py)
             -> cross entropy of good and bad where a line ends    -> OUT/model, a token classifier

    python -m reasoner.prm --out runs/prm

draws samples of the reasoner, trains on them, and writes a directory that transformers loads as
``LlamaForTokenClassification`` and that ``RewardWorker`` serves. The samples, the batches and the
initial head are functions of the seed. For the figures of a trained model see ``prm_figures``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, AutoTokenizer

from forethought.assets import reasoner_dir
from forethought.evaluation.generated.arithmetic_questions import sample_mixed
from forethought.llm.llm import LLM
from forethought.rewards.step_format import ContinuedSteps
from forethought.training.batches import Batches
from forethought.training.chat_tokenizer import prompt_text
from forethought.training.trainer import (
    MODEL,
    ParameterGroup,
    Trainer,
    TrainingSettings,
    log_fields,
    seeded,
)
from reasoner.labels import label_lines
from reasoner.samples import Sample, load_samples, make_samples, write_samples

logger = logging.getLogger(__name__)

HEAD_RATE = 3.0
"""Factor on the learning rate of the head."""
_PART = 64
"""Examples that go through the network together where nothing is trained."""
_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


# ---- examples ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of prompt and sample, and the labels of its lines where these end."""

    token_ids: list[int]
    positions: list[int]
    labels: list[int]
    """1: a good step."""

    def __len__(self) -> int:
        return len(self.token_ids)


def make_example(tokenizer: Any, sample: Sample) -> Example:
    """The sample as the model reads it: after its prompt, scored where a line ends."""
    prompt = prompt_text(sample.problem.question)
    token_ids, positions = ContinuedSteps(tokenizer).encode(prompt, sample.text)
    labels = label_lines(sample.problem, sample.text) or [False]  # nothing is no good step
    assert len(labels) == len(positions), "no token of the reasoner ends two lines"
    return Example(token_ids, positions, list(map(int, labels)))


@dataclass(frozen=True, slots=True)
class Batch:
    """R examples of at most W tokens, padded at the end with token 0, which no step attends to."""

    tokens: Tensor
    """int64 [R, W]."""
    rows: Tensor
    """int64 [S]: the row of each step."""
    places: Tensor
    """int64 [S]: where in its row it is scored."""
    labels: Tensor
    """int64 [S]."""
    num_tokens: int

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Batch:
        """The examples as tensors."""
        rows = [torch.tensor(example.token_ids) for example in examples]
        steps = [
            (row, place, label)
            for row, example in enumerate(examples)
            for place, label in zip(example.positions, example.labels, strict=True)
        ]
        row_of, places, labels = torch.tensor(steps).unbind(dim=1)
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return cls(tokens, row_of, places, labels, sum(map(len, examples)))


# ---- training ----------------------------------------------------------------------------------


class PrmSettings(TrainingSettings):
    """The loop's settings, and the balance of the labels."""

    steps: int = Field(default=1000, ge=1)
    rate: float = Field(default=5e-5, gt=0.0)
    warm_up: float = Field(default=0.05, ge=0.0, le=1.0)
    batch_tokens: int = Field(default=4096, ge=1)
    balance: float = Field(default=0.0, ge=0.0, le=1.0)
    """0: each step counts once, which keeps the probabilities true; 1: good and bad steps count the
    same together."""
    num_probed: int = Field(default=1500, ge=1)
    """Examples on which the head is fitted before the rest is trained."""


class PrmRecipe:
    """A token classifier with two labels, initialised with a causal model's weights.

    The head is fitted first, to the target's own hidden states, and then everything is trained
    (Kumar et al. 2022, "Fine-Tuning can Distort Pretrained Features", arXiv 2202.10054): with a
    random head the first steps spoil what the target knows of its mistakes.

    Args:
        settings: of the run.
        examples: at least one.
        target: directory of the model that is copied.
    """

    def __init__(self, settings: PrmSettings, examples: Sequence[Example], target: Path) -> None:
        self._settings, self._target = settings, target
        self.module = load_classifier(target)
        self._batches = Batches(examples, settings.batch_tokens, settings.seed)
        labels = [label for example in examples for label in example.labels]
        shares = [max(1, labels.count(label)) / len(labels) for label in (0, 1)]
        self._weights = torch.tensor([(0.5 / share) ** settings.balance for share in shares])
        fit_head(self.module, examples[: settings.num_probed])

    def groups(self) -> list[ParameterGroup]:
        """The new head, and with a lower learning rate what the target has learned already."""
        head = list(self.module.score.parameters())
        head_ids = {id(weight) for weight in head}
        rest = [weight for weight in self.module.parameters() if id(weight) not in head_ids]
        return [ParameterGroup(head, scale=lambda progress: HEAD_RATE), ParameterGroup(rest)]

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        return Batch.of(self._batches(step))

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean cross entropy of the labels, in nats."""
        logits = step_logits(self.module, batch)
        return F.cross_entropy(logits, batch.labels, weight=self._weights)

    def save(self, directory: Path) -> None:
        """Write the classifier in bf16, with the target's tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        config = self.module.config.to_dict() | {
            "architectures": ["LlamaForTokenClassification"],
            "dtype": "bfloat16",
            "step_format": "continuation",
            "id2label": {"0": "bad", "1": "good"},
            "label2id": {"bad": 0, "good": 1},
        }
        config.pop("_name_or_path", None)
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        state = {name: w.to(torch.bfloat16) for name, w in self.module.state_dict().items()}
        weights = directory / "model.safetensors"
        save_file(state, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors makes files that only their owner can read
        for name in _COPIED:
            shutil.copyfile(self._target / name, directory / name)


def load_classifier(directory: Path) -> Any:
    """The model of ``directory`` as a token classifier of two labels, in float32."""
    return AutoModelForTokenClassification.from_pretrained(
        directory, num_labels=2, dtype=torch.float32, local_files_only=True
    )


def step_logits(module: nn.Module, batch: Batch) -> Tensor:
    """float32 [S, 2]: the logits of bad and good at each step.

    Attention is causal and the padding is at the end, so no mask is needed.
    """
    hidden = module.model(batch.tokens, use_cache=False).last_hidden_state
    return module.score(hidden[batch.rows, batch.places]).float()


def fit_head(module: Any, examples: Sequence[Example]) -> None:
    """Logistic regression of the labels on the hidden states, as the weights of the head."""
    parts, labels = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for begin in range(0, len(examples), _PART):
            batch = Batch.of(examples[begin : begin + _PART])
            hidden = module.model(batch.tokens, use_cache=False).last_hidden_state
            parts.append(hidden[batch.rows, batch.places].float())
            labels.append(batch.labels.float())
    states, targets = torch.cat(parts), torch.cat(labels)  # [S, hidden], [S]
    mean, spread = states.mean(dim=0), states.std(dim=0, correction=0) + 1e-6
    states = (states - mean) / spread
    weight = torch.zeros(states.shape[1] + 1, requires_grad=True)  # the last one is the bias
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = states @ weight[:-1] + weight[-1]
        loss = F.binary_cross_entropy_with_logits(logits, targets) + 1e-4 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        slope = weight[:-1] / spread
        bias = weight[-1] - mean @ slope
        module.score.weight.copy_(torch.stack([-slope, slope]) / 2)  # logits of bad and good
        module.score.bias.copy_(torch.stack([-bias, bias]) / 2)


@torch.no_grad()
def step_probabilities(module: nn.Module, examples: Sequence[Example]) -> list[list[float]]:
    """The probability that each step of each example is good."""
    probabilities: list[list[float]] = []
    for begin in range(0, len(examples), _PART):
        batch = Batch.of(examples[begin : begin + _PART])
        good = iter(step_logits(module, batch).softmax(dim=-1)[:, 1].tolist())
        probabilities += [
            [next(good) for _ in example.labels] for example in examples[begin : begin + _PART]
        ]
    return probabilities


def auc(scores: Sequence[float], labels: Sequence[int]) -> float:
    """Probability that a good one scores above a bad one; half of it for equals."""
    ranked, below, wins, good = sorted(zip(scores, labels, strict=True)), 0, 0.0, sum(labels)
    for _, equals in groupby(ranked, key=lambda pair: pair[0]):
        marks = [label for _, label in equals]
        wins += sum(marks) * (below + (len(marks) - sum(marks)) / 2)
        below += len(marks) - sum(marks)
    return wins / (good * (len(labels) - good)) if 0 < good < len(labels) else math.nan


def check(directory: Path, examples: Sequence[Example]) -> dict[str, float]:
    """How well a trained model tells good steps from bad ones."""
    module = load_classifier(directory).eval()
    scores = [score for row in step_probabilities(module, examples) for score in row]
    labels = [label for example in examples for label in example.labels]
    right = sum((score > 0.5) == label for score, label in zip(scores, labels, strict=True))
    return {"step_auc": auc(scores, labels), "step_accuracy": right / len(labels)}


def main() -> None:
    """Read the command line, draw samples, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="samples, checkpoint and model")
    parser.add_argument("--target", type=Path, default=reasoner_dir(), help="model to judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=2500, help="to draw 8 samples of, each")
    parser.add_argument("--samples", type=Path, nargs="*", default=[], help="files of others")
    parser.add_argument("--written", type=int, default=0, help="written by the generator")
    parser.add_argument("--held-out", type=int, default=50, help="problems to check with")
    parser.add_argument("--steps", type=int, default=PrmSettings().steps)
    parser.add_argument("--rate", type=float, default=PrmSettings().rate)
    parser.add_argument("--batch", type=int, default=PrmSettings().batch_tokens, help="tokens")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{options.seed}:prm")
    learned = [sample_mixed(rng) for _ in range(options.problems)]
    checked = [sample_mixed(rng, held_out=True) for _ in range(options.held_out)]
    with LLM(options.target, dtype="float32", max_batch_size=64) as llm:
        samples = make_samples(options.out / "samples.jsonl", llm, learned, options.seed)
        others = make_samples(options.out / "held-out.jsonl", llm, checked, options.seed + 1)
    samples += [sample for file in options.samples for sample in load_samples(file)]
    samples += write_samples(options.written, options.seed)
    random.Random(options.seed).shuffle(samples)
    train(samples, others, options)


def train(samples: Sequence[Sample], held_out: Sequence[Sample], options: Any) -> dict[str, float]:
    """Train on some samples, and check with others; see the options of the command."""
    settings = PrmSettings(
        seed=options.seed,
        steps=options.steps,
        rate=options.rate,
        batch_tokens=options.batch,
        dtype="bfloat16",
        check_every=max(1, options.steps // 8),
    )
    tokenizer = AutoTokenizer.from_pretrained(options.target, local_files_only=True)
    examples, others = (
        [make_example(tokenizer, s) for s in group] for group in (samples, held_out)
    )
    labels = [label for example in examples for label in example.labels]
    right = sum(sample.is_right for sample in samples) / len(samples)
    log_fields(
        logger,
        samples=len(samples),
        right=right,
        steps=len(labels),
        good=sum(labels) / len(labels),
        tokens=sum(map(len, examples)),
    )
    with seeded(settings.seed):
        recipe = PrmRecipe(settings, examples, options.target)
    trainer = Trainer(recipe, settings, options.out, lambda path: check(path, others), output=MODEL)
    return trainer.run()


if __name__ == "__main__":
    main()
