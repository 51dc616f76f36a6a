"""Train a drafter for your own model: texts in, a drafter out that generate and bench load.

forethought train medusa --target DIR --self-distill prompts.txt --out runs/medusa: the model
answers the prompts itself, and the drafter learns from the answers. With --self-prompts it writes
the prompts as well; with --data the texts are given. Some of the prompts are held out, and the
drafter is evaluated on them at intervals: acceptance_length is the number of tokens per decode
step. Interrupt it at any time; the same command resumes from the checkpoint, which is written every
minute and when it is interrupted.
medusa-2 trains the model, too: OUT/model is another model, and the drafter is for that one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forethought import assets
from forethought.cli.options import load_config_file, model_path
from forethought.config import drafter_table
from forethought.errors import DependencyError, ParameterError, UsageError
from forethought.model_dir import checked_model_dir
from forethought.saved_file import check_folder

if TYPE_CHECKING:
    from forethought.training.run import Source, TrainingRun
    from forethought.training.trainer import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("kind", choices=list(drafter_table.recipes()), help="what to train")
    parser.add_argument(
        "--target",
        "--model",
        type=model_path,
        metavar="DIR|ID|FILE",
        help="local Hugging Face directory, Hub id or GGUF file of the model to draft for, or "
        "smollm2 (default: the embedded reasoner)",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.jsonl",
        help="texts to learn from, one object per line: prompt and response, messages, or "
        "token_ids and prompt_length",
    )
    parser.add_argument(
        "--self-distill",
        type=Path,
        metavar="PROMPTS",
        help="prompts that the model answers itself, one per line: text, or objects as for --data",
    )
    parser.add_argument(
        "--self-prompts",
        type=int,
        metavar="N",
        help="number of prompts that a chat model writes itself, and answers; they are in "
        "OUT/prompts.jsonl",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="for texts, checkpoint, drafter and adapted model",
    )
    _add_training(parser)
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML with any settings of the recipe"
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="DIR|ID",
        help="a drafter of this kind to begin with, in place of new weights: a directory, Hub id "
        "or embedded heads such as forethought/medusa",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of training")
    parser.add_argument("--seed", type=int, metavar="S", help="of weights and order (default: 0)")
    parser.add_argument(
        "--held-out", type=int, default=32, metavar="N", help="prompts to evaluate on"
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the target's weights (default: as its config says)",
    )


def run(args: argparse.Namespace) -> int:
    """Train."""
    if [args.data, args.self_distill, args.self_prompts].count(None) != 2:
        raise ParameterError(
            "forethought train needs texts",
            "give either --data or --self-distill, or --self-prompts",
            "With --self-distill the model answers your prompts, with --self-prompts its own",
        )
    if args.self_prompts is not None and args.target is None:
        raise ParameterError(
            "the embedded reasoner writes no prompts",
            "it was trained on answers alone",
            "Give prompts with --self-distill, or another model with --model",
        )
    fields = load_config_file(args.config) if args.config is not None else {}
    fields |= {
        name: value
        for name in ("start", "steps", "seed")
        if (value := getattr(args, name)) is not None
    }
    _check_paths(args, fields)
    try:
        from forethought.training.run import TargetModel, TrainingRun
    except ModuleNotFoundError as error:
        raise DependencyError.missing(error.name or "torch", "training", "local") from error
    target = TargetModel(args.target, args.revision, args.dtype, args.device)
    training, source = TrainingRun(args.kind, fields, args.out, target), _source(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with _ProgressBar() as bar:
        metrics = training(source, args.held_out, bar, bar.on_texts)
    _report(args, training, metrics)
    return 0


def _check_paths(args: argparse.Namespace, fields: Mapping[str, Any]) -> None:
    """Raises UsageError, before torch is imported, for what cannot be read or written."""
    for path, kind in ((args.data, "texts"), (args.self_distill, "prompts")):
        try:
            if path is not None:
                path.open().close()
        except OSError as error:
            raise UsageError(
                f"cannot read the {kind} in {path}", str(error), "Give a file"
            ) from error
    checked_model_dir(args.target or assets.REASONER, args.revision)
    if fields.get("start") is not None:
        checked_model_dir(fields["start"], kind="drafter")
    check_folder(args.out)


def _source(args: argparse.Namespace) -> Source:
    from forethought.training.run import Source

    return Source(args.data, args.self_distill, args.self_prompts)


class _ProgressBar:
    """Texts that are written; then steps, loss, tokens per second, time left and acceptance, if
    standard error is a terminal; the log has the same.
    """

    def __init__(self) -> None:
        self._open = ExitStack()
        self._bar: Any = None
        self._unit = ""

    def on_texts(self, kind: str, count: int, total: int) -> None:
        """Show how many texts are written, after a part of them."""
        bar = self._bar_of(kind, 0, total)
        bar.update(count - bar.n)

    def __call__(self, progress: Progress) -> None:
        bar = self._bar_of("step", progress.step - 1, progress.num_steps)
        shown = [f"loss {progress.loss:.3f}"]
        if progress.tokens_per_second:
            shown.append(f"{progress.tokens_per_second:,.0f} tokens/s")
        if "acceptance_length" in progress.results:
            shown.append(f"acceptance length {progress.results['acceptance_length']:.2f}")
        bar.set_postfix_str(", ".join(shown), refresh=False)
        bar.update()

    def _bar_of(self, unit: str, initial: int, total: int) -> Any:
        """The bar of a stage; that of the one before is closed."""
        if self._unit == unit:
            return self._bar
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._open.close()
        bar = tqdm(
            total=total,
            initial=initial,
            unit=unit,
            dynamic_ncols=True,
            disable=None,  # where standard error is no terminal
        )
        if not bar.disable:
            self._open.enter_context(logging_redirect_tqdm())
        self._bar, self._unit = self._open.enter_context(bar), unit
        return bar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def _report(args: argparse.Namespace, training: TrainingRun, metrics: dict[str, float]) -> None:
    drafter, cost = training.drafter, training.cost
    assert cost is not None
    if args.json:
        report: dict[str, Any] = {"kind": args.kind, "drafter": str(drafter)}
        if training.model is not None:
            report["model"] = str(training.model)
        fields = report | metrics | dataclasses.asdict(cost)
        print(json.dumps({name: _round(value) for name, value in fields.items()}))
        return
    print(f"{drafter}: {metrics['acceptance_length']:.2f} tokens per step on held-out prompts")
    if training.model is not None:
        print(
            f"{training.model}: the model that it drafts for, which is not the original: it is "
            f"{metrics['kl']:.4f} nats (mean KL) away from it on held-out answers and has another "
            f"most probable token at {1 - metrics['same_choice']:.1%} of the positions"
        )
    print(
        f"cost: {cost.num_steps:,} steps in {cost.training_seconds:,.0f} s, texts in "
        f"{cost.text_seconds:,.0f} s; {cost.processor_seconds:,.0f} s of processor time in this run"
    )
    [name] = [name for name, spec in drafter_table.options().items() if args.kind in spec.recipes]
    target = training.model or args.target
    model = f" --model {target}" if target is not None else ""
    print(f'forethought generate "..."{model} --speculative {name} --draft-model {drafter}')


def _round(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
