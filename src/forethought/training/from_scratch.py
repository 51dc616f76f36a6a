"""Training a small Llama from scratch on generated examples: the loop of the embedded models.

A :class:`Curriculum` says what is learned: the tokenizer, the mix of kinds of example at each point
of the run, an example of a kind, and the checks. The loop has the rest: packed batches, workers,
the learning rate's schedule, checkpoints, the exported model. The batch of a step is a function of
seed, step and worker alone, so a resumed run has the batches of an uninterrupted one.
"""

import argparse
import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor

from forethought.errors import ParameterError
from forethought.model.device import has_fast_matmul
from forethought.saved_file import replace_file
from forethought.training.chat_tokenizer import END, save_tokenizer
from forethought.training.llama import Llama, LlamaShape, muon_groups
from forethought.training.trainer import build_optimizers, log_fields

logger = logging.getLogger(__name__)

IGNORED = -100
WARM_UP_STEPS, DECAY_FROM = 50, 0.5
SAVE_SECONDS = 120.0
"""Between checkpoints, at most."""

Mix = Mapping[str, float]
"""Shares of the kinds of example."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each whether it counts in the loss."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text that is trained on, or not."""

    text: str
    trained: bool


MakeExample = Callable[[Tokenizer, random.Random, str], Example]
"""A new example of a kind; a function of the state of the generator alone."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """What a model is trained on. Its functions must be importable: workers are processes."""

    train_tokenizer: Callable[[int], Tokenizer]
    """The tokenizer of a seed."""
    mix_at: Callable[[float], tuple[Mix, int]]
    """Mix and tokens of a row at a point 0..1 of the run."""
    make_example: MakeExample
    tuning: tuple[Mix, int]
    """Mix and tokens of a row of a run that begins with a trained model."""
    check: Callable[[Llama, Tokenizer], dict[str, float]]
    """Evaluates the network on what it is not trained on: name -> value."""
    on_samples: Callable[[Sequence[Path]], tuple[MakeExample, Mix]] | None = None
    """Examples and mix of a tuning on files of the model's own samples; None: it takes none."""
    shape: LlamaShape = field(default_factory=LlamaShape)
    """Sizes of the network; that of the vocabulary is the tokenizer's."""


def encode(tokenizer: Tokenizer, spans: list[Span]) -> Example:
    """Tokenise spans as one text; a token belongs to the span in which it begins."""
    encoding = tokenizer.encode("".join(span.text for span in spans))
    ends, position = [], 0
    for span in spans:
        position += len(span.text)
        ends.append(position)
    trained, index = [], 0
    for start, _ in encoding.offsets:
        while start >= ends[index]:
            index += 1
        trained.append(spans[index].trained)
    return Example(encoding.ids, trained)


def pack(
    make_example: MakeExample,
    tokenizer: Tokenizer,
    rng: random.Random,
    mix: Mix,
    shape: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Rows packed with examples; each row begins with a new one, and its last one is cut.

    Returns tokens and targets, both int64 of ``shape`` (rows, tokens); a target is the next token
    or ``IGNORED``.
    """
    kinds, weights = list(mix), list(mix.values())
    tokens, targets = [], []
    rows, length = shape
    for _ in range(rows):
        ids: list[int] = []
        marks: list[bool] = []
        while len(ids) <= length:
            example = make_example(tokenizer, rng, rng.choices(kinds, weights)[0])
            ids += example.ids
            marks += example.trained
        tokens.append(ids[:length])
        shifted = zip(ids[1 : length + 1], marks[1 : length + 1], strict=True)
        targets.append([token if mark else IGNORED for token, mark in shifted])
    return torch.tensor(tokens), torch.tensor(targets)


def rate_at(progress: float, step: int) -> float:
    """Learning rate as a fraction of its peak: a short warm-up, flat, then linear to 0."""
    falling = (1.0 - progress) / (1.0 - DECAY_FROM)
    return max(0.0, min(1.0, (step + 1) / WARM_UP_STEPS, falling))


def make_optimizers(
    network: Llama, rate: float, *, tunes: bool = False
) -> list[torch.optim.Optimizer]:
    """Muon and AdamW, see :func:`~forethought.training.llama.muon_groups`.

    A run that tunes a trained network has AdamW alone: torch's Muon orthogonalises in bf16, which
    takes longer than the rest of a step on a CPU that emulates it, and a short run gains little.
    """
    groups = muon_groups(network, weight_decay=0.05)
    if tunes:
        groups = [replace(group, muon=False) for group in groups]
    built = build_optimizers(groups, rate, 0.0)
    return [optimizer for optimizer, _ in built]


class Checkpoint:
    """One file that holds network, optimizers, step and seconds of training so far."""

    def __init__(self, path: Path, network: Llama, optimizers: list[torch.optim.Optimizer]) -> None:
        self.path, self.network, self.optimizers = path, network, optimizers

    def save(self, step: int, seconds: float) -> None:
        """Replace the file atomically: an interrupted save leaves the older one."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": step,
            "seconds": seconds,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        replace_file(draft, self.path)

    def load(self) -> tuple[int, float]:
        """Restore everything and return (step, seconds); (0, 0.0) where there is no file."""
        if not self.path.exists():
            return 0, 0.0
        state = torch.load(self.path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"], state["seconds"]


def export_model(network: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a directory that transformers loads: config, bf16 weights, tokenizer, template."""
    end = tokenizer.token_to_id(END)
    assert end is not None, "the tokenizer was trained with an end token"
    network.save(directory, end)
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, directory, network.shape.max_positions)


def compiled_loss(network: Llama) -> Callable[[Tensor, Tensor], Tensor]:
    """``network.loss``, under bf16 autocast where that is fast, compiled where a compiler is."""
    device = network.cos.device
    mixed = has_fast_matmul(torch.bfloat16, device)  # a compiled function would break there

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            return network.loss(tokens, targets)

    compiled = torch.compile(loss)
    try:
        sample = torch.zeros(1, 8, dtype=torch.long, device=network.cos.device)
        compiled(sample, sample)
    except Exception as error:  # whatever fails in a back end: train uncompiled
        logger.warning("torch.compile is not available (%s): training uncompiled", error)
        return loss
    torch.compiler.reset()
    return torch.compile(loss, dynamic=False)


@torch.no_grad()
def share_predicted(network: Llama, examples: list[Example]) -> float:
    """Share of examples in which every marked token is the network's first choice."""
    right, device = 0, network.cos.device
    for start in range(0, len(examples), 50):
        part = examples[start : start + 50]
        width = max(len(example.ids) for example in part)
        tokens = torch.zeros(len(part), width, dtype=torch.long)
        marks = torch.zeros(len(part), width, dtype=torch.bool)
        for row, example in enumerate(part):
            tokens[row, : len(example.ids)] = torch.tensor(example.ids)
            marks[row, : len(example.ids)] = torch.tensor(example.trained)
        tokens, marks = tokens.to(device), marks.to(device)
        mixed = has_fast_matmul(torch.bfloat16, device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            choices = network(tokens)[:, :-1].argmax(-1)
        right += int(((choices == tokens[:, 1:]) | ~marks[:, 1:]).all(1).sum())
    return right / len(examples)


@torch.no_grad()
def loss_of(network: Llama, tokenizer: Tokenizer, make_example: MakeExample, kind: str) -> float:
    """Mean loss in nats per trained token on one packed batch of a single kind."""
    tokens, targets = pack(make_example, tokenizer, random.Random(11), {kind: 1.0}, (4, 512))
    device = network.cos.device
    return float(network.loss(tokens.to(device), targets.to(device)))


def average_gradients(network: Llama) -> None:
    """Replace the gradients of every worker by their mean, in one message."""
    gradients = [w.grad for w in network.parameters() if w.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.div_(dist.get_world_size()).split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def broadcast_seconds(seconds: float) -> float:
    """The seconds of the first worker, so that all follow one schedule."""
    clock = torch.tensor(seconds, dtype=torch.float64)
    dist.broadcast(clock, src=0)
    return clock.item()


def train(curriculum: Curriculum, options: argparse.Namespace, worker: int = 0) -> None:
    """Run the whole schedule, resuming from the checkpoint in ``options.out`` if there is one.

    Workers see different examples and average their gradients: on a CPU, two processes of one
    thread each lose far less to a busy machine than one process of two threads.

    Raises:
        ParameterError: a batch that does not hold a row for every worker, or an option that the
            run has no use for.
    """
    _check_batch(curriculum, options)
    _check_share(options)
    _check_samples(curriculum, options)
    if options.samples and curriculum.on_samples:
        make_example, mix = curriculum.on_samples(options.samples)
        tuning = mix, curriculum.tuning[1]
        curriculum = replace(curriculum, make_example=make_example, tuning=tuning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    tokenizer, network = _begin(curriculum, options)
    network.to(device)
    optimizers = make_optimizers(network, options.rate, tunes=options.start is not None)
    checkpoint = Checkpoint(options.out / "checkpoint.pt", network, optimizers)
    step, seconds = checkpoint.load()
    saved_at = time.monotonic()
    loss_function = compiled_loss(network)
    while (progress := _progress(step, seconds, options)) < 1.0:
        began = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * rate_at(progress, step)
        rng = random.Random(f"{options.seed}:{step}:{worker}")
        mix, length = curriculum.tuning if options.start else curriculum.mix_at(progress)
        rows = options.batch // length // options.workers
        tokens, targets = pack(curriculum.make_example, tokenizer, rng, mix, (rows, length))
        loss = loss_function(tokens.to(device), targets.to(device))
        loss.backward()
        if options.workers > 1:
            average_gradients(network)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, seconds = step + 1, seconds + time.perf_counter() - began
        if options.workers > 1:
            seconds = broadcast_seconds(seconds)
        if worker == 0 and step % 20 == 0:
            log_fields(logger, step=step, progress=progress, seconds=seconds, loss=loss.item())
        is_checked = step % options.check_every == 0
        if worker == 0 and (is_checked or time.monotonic() - saved_at > SAVE_SECONDS):
            checkpoint.save(step, seconds)
            saved_at = time.monotonic()
        if worker == 0 and is_checked:
            log_fields(logger, step=step, **curriculum.check(network, tokenizer))
    if worker == 0:
        checkpoint.save(step, seconds)
        if options.share < 1.0:
            average_with(network, options.start, options.share)
        export_model(network, tokenizer, options.out / "model")
        log_fields(logger, step=step, **curriculum.check(network, tokenizer))


def run_worker(worker: int, curriculum: Curriculum, options: argparse.Namespace) -> None:
    """One process of several, with a thread of its own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    meeting = f"file://{options.out.resolve()}/workers-{os.getppid()}"
    dist.init_process_group("gloo", init_method=meeting, rank=worker, world_size=options.workers)
    train(curriculum, options, worker)
    dist.destroy_process_group()


@torch.no_grad()
def average_with(network: Llama, directory: Path, share: float) -> None:
    """Average the weights with those in ``directory``, ``share`` being that of their own.

    Between a model and what it was tuned to, the mean keeps most of both (Wortsman et al. 2022,
    "Robust fine-tuning of zero-shot models", arXiv 2109.01903).
    """
    other = Llama(network.shape)
    other.load(directory)
    others = other.to(network.cos.device).parameters()
    for weight, before in zip(network.parameters(), others, strict=True):
        weight.lerp_(before, 1.0 - share)


def _begin(curriculum: Curriculum, options: argparse.Namespace) -> tuple[Tokenizer, Llama]:
    if options.start is not None:
        return Tokenizer.from_file(str(options.start / "tokenizer.json")), Llama.of(options.start)
    tokenizer = curriculum.train_tokenizer(options.seed)
    return tokenizer, Llama(replace(curriculum.shape, vocab_size=tokenizer.get_vocab_size()))


def _check_batch(curriculum: Curriculum, options: argparse.Namespace) -> None:
    longest = max(length for _, length in map(curriculum.mix_at, (0.0, 1.0)))
    if options.batch < longest * options.workers:
        raise ParameterError(
            "invalid batch",
            f"{options.batch} tokens are no row of {longest} for each of {options.workers} workers",
            f"Give at least {longest * options.workers}",
        )


def _check_share(options: argparse.Namespace) -> None:
    if not 0.0 < options.share <= 1.0 or (options.share < 1.0 and options.start is None):
        raise ParameterError(
            "invalid share",
            f"{options.share} of the weights, beginning with {options.start}",
            "Give --share above 0 and at most 1, below 1 with --start only",
        )


def _check_samples(curriculum: Curriculum, options: argparse.Namespace) -> None:
    if options.samples and (curriculum.on_samples is None or options.start is None):
        raise ParameterError(
            "invalid samples",
            "samples of a model are gone on from where the reasoner is tuned, with --start",
            "Leave --samples out, or give the model that wrote them as --start",
        )


def _progress(step: int, seconds: float, options: argparse.Namespace) -> float:
    by_step = step / options.steps
    return max(by_step, seconds / 60 / options.minutes) if options.minutes else by_step


def main(curriculum: Curriculum, description: str, steps: int = 2500, batch: int = 12_288) -> None:
    """Read the command line and train; ``steps`` and ``batch`` are defaults of its options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and the model")
    parser.add_argument("--start", type=Path, help="model directory to begin with, to fine-tune it")
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="of the tuned weights in the exported model; the rest is that of --start",
    )
    parser.add_argument(
        "--samples", type=Path, nargs="+", default=[], help="files of samples that it wrote itself"
    )
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--minutes", type=float, help="end by the clock if that comes first")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=batch, help="tokens of a step")
    parser.add_argument("--workers", type=int, default=1, help="processes that share a batch")
    parser.add_argument("--check-every", type=int, default=250, help="steps between checks")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.workers == 1:
        train(curriculum, options)
    else:
        mp.spawn(run_worker, args=(curriculum, options), nprocs=options.workers)
