"""Train a draft model for the embedded reasoner, on what the reasoner writes.

    python -m forethought.training.drafter.train --seed 0 --out runs/drafter

The target first writes a corpus into ``OUT/corpus``, then a small Llama of the same vocabulary
learns its laws. Interrupt it at any time; the same command resumes. On one machine, weights are a
function of the seed. It logs loss and acceptance on held-out problems, and ends with a model
directory in ``OUT/model``.
"""

import argparse
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from forethought import LLM, SamplingParams
from forethought.assets import reasoner_dir
from forethought.training.drafter.acceptance import replay
from forethought.training.drafter.corpus import (
    LONGEST_OUTPUT,
    Batches,
    Sample,
    answers,
    encode,
    pad,
    write_corpus,
)
from forethought.training.drafter.prompts import problem_prompts
from forethought.training.reasoner.checkpoint import Checkpoint
from forethought.training.reasoner.network import Network, NetworkShape
from forethought.training.reasoner.train import make_optimizers, rate_at
from forethought.training.recipes.draft_model import distillation_loss

logger = logging.getLogger(__name__)

CHECKED_PROBLEMS = 64
CHECKED_DRAFT_LENS = (3, 5, 8)


def train(options: argparse.Namespace) -> None:
    """Write the corpus and run the schedule, from wherever ``options.out`` has got to."""
    samples = write_corpus(
        options.target,
        options.out / "corpus",
        seed=options.seed,
        shards=options.shards,
        problems=options.problems,
    )
    checked = held_out_samples(options.target)
    torch.manual_seed(options.seed)
    network = Network(shape_of(options))
    optimizers = make_optimizers(network, options.rate)
    checkpoint = Checkpoint(options.out / "checkpoint.pt", network, optimizers)
    step, seconds = checkpoint.load()
    batches = Batches(samples, options.batch, options.seed)
    loss_function = compiled_loss(network)
    _log(samples=len(samples), tokens=sum(map(len, samples)), epoch=batches.per_epoch)
    while step < options.steps:
        began = time.perf_counter()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * rate_at(step / options.steps, step)
        batch = batches(step)
        loss = loss_function(batch.tokens, batch.choices, batch.probs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, seconds = step + 1, seconds + time.perf_counter() - began
        if step % 50 == 0:
            _log(step=step, seconds=seconds, loss=loss.item())
        if step % options.check_every == 0 or step == options.steps:
            checkpoint.save(step, seconds)
            _log(step=step, **check(network, checked))
    export_draft_model(network, options.target, options.out / "model")


def shape_of(options: argparse.Namespace) -> NetworkShape:
    """The network's sizes: vocabulary and context are the target's."""
    config = AutoConfig.from_pretrained(options.target, local_files_only=True)
    return NetworkShape(
        vocab_size=config.vocab_size,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        max_positions=config.max_position_embeddings,
    )


def held_out_samples(target: Path) -> list[Sample]:
    """Greedy answers to problems from the other side of the wall."""
    with LLM(target) as llm:
        texts = problem_prompts(random.Random(1), CHECKED_PROBLEMS, held_out=True)
        prompts = [encode(llm, text) for text in texts]
        params = SamplingParams(max_tokens=LONGEST_OUTPUT, temperature=0.0)
        return answers(llm, prompts, [params] * len(prompts))


def compiled_loss(network: Network) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss under bf16 autocast, compiled where a compiler is at hand."""

    def loss(tokens: Tensor, choices: Tensor, probs: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            return distillation_loss(network, tokens, choices, probs)

    compiled = torch.compile(loss, dynamic=False)
    try:
        tokens = torch.zeros(1, 8, dtype=torch.long)
        compiled(tokens, tokens[..., None], torch.ones(1, 8, 1))
    except Exception as error:  # any back-end failure means the same here: train uncompiled
        logger.warning("torch.compile is not available (%s): training uncompiled", error)
        return loss
    return compiled


@torch.no_grad()
def check(network: Network, samples: Sequence[Sample]) -> dict[str, float]:
    """Loss, share of first choices that are the target's, and acceptance lengths."""
    batch = pad(samples, max(map(len, samples)))
    loss = distillation_loss(network, batch.tokens, batch.choices, batch.probs)
    choices = network(batch.tokens).argmax(-1)
    agreements: list[list[bool]] = []
    for row, sample in enumerate(samples):
        taught = sample.probs[:-1, 0] > 0
        same = choices[row, : len(sample) - 1] == sample.tokens[1:]
        agreements.append(same[taught].tolist())
    count = sum(map(len, agreements))
    found = {"held_out_loss": loss.item(), "agreement": sum(map(sum, agreements)) / count}
    for draft_len in CHECKED_DRAFT_LENS:
        found[f"length_at_{draft_len}"] = replay(agreements, draft_len).mean_length
    return found


def export_draft_model(network: Network, target: Path, directory: Path) -> None:
    """Write a model directory: config, bf16 weights, and the tokenizer of the target.

    The config asks for float32: in so small a network the conversions around bf16 products take
    longer than the products.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generation = json.loads((target / "generation_config.json").read_text())
    config = network.llama_config(generation["eos_token_id"]) | {"dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = directory / "model.safetensors"
    save_file(network.llama_state(), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (target / name).exists():
            shutil.copyfile(target / name, directory / name)


def _log(**fields: float) -> None:
    logger.info("%s", json.dumps({k: round(v, 4) for k, v in fields.items()}))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="corpus, checkpoints and the model")
    parser.add_argument("--target", type=Path, default=reasoner_dir(), help="model directory")
    parser.add_argument("--shards", type=int, default=20, help="parts of the corpus")
    parser.add_argument("--problems", type=int, default=500, help="problems of a shard")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--intermediate", type=int, default=192)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--batch", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--check-every", type=int, default=500, help="steps between checks")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
