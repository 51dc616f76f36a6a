"""What runs with what, found by trying: the tables of docs/support.md.

A tiny model of each family that the tests compare with transformers is loaded, as it is and with
weights in 8 bits, and decodes twelve tokens with every drafter, in float32: a mark stands where the
tokens are those of ``model.generate``. What CUDA and tensor parallelism take, and which names GGUF
files have, is read from the tables of the code.

    OMP_NUM_THREADS=1 python scripts/support.py      writes docs/support.md; some minutes
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from eagle_heads import random_head as random_eagle  # noqa: E402
from engines import GREEDY, drain, engine_over  # noqa: E402
from forethought.config import drafters  # noqa: E402
from forethought.config.drafter_table import DRAFTERS  # noqa: E402
from forethought.config.medusa import MedusaDecodingConfig  # noqa: E402
from forethought.config.quantization import QUANTIZATIONS  # noqa: E402
from forethought.errors import ForethoughtError  # noqa: E402
from forethought.gguf.model_config import ARCHITECTURES as GGUF  # noqa: E402
from forethought.model import loader  # noqa: E402
from forethought.model.llama.network import FAMILIES as FUSED  # noqa: E402
from forethought.model.quantization import BITS, has_rounded_input  # noqa: E402
from medusa_heads import shared_heads  # noqa: E402
from models import ARCHITECTURES, RECURRENT, greedy, prompts, tiny  # noqa: E402
from mtp_modules import saved  # noqa: E402
from redrafter_heads import random_head  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from forethought.config.speculation import DecodingBaseConfig
    from forethought.model.causal_lm import CausalLM

PAGE = ROOT / "docs" / "support.md"
FILES_AS = {"mistral": ["llama"], "bamba": ["granitehybrid"]}
"""Architectures that llama.cpp's converter writes for a family without one of its own."""
NUM_TOKENS = 12
YES = "✓"
NOT_TRIED = "not tried, as no module for it could be made of a block of the model"


class Mismatch(Exception):
    """A drafter that does not do what it should."""


class Row(NamedTuple):
    """Of a family: how it runs, and what runs with it."""

    family: str
    cpu: str
    gpu: str
    in_8_bits: str
    gguf: str
    drafters: dict[str, str]


def main() -> int:
    """The exit status."""
    logging.disable(logging.CRITICAL)
    rows = [row(name) for name in families()]
    PAGE.write_text(page(rows), encoding="utf-8")
    return 0


def families() -> list[str]:
    """The names in the tests' tables of tiny models, one of each ``model_type``."""
    names: dict[str, str] = {}
    for name, (model_type, _) in {**ARCHITECTURES, **RECURRENT}.items():
        names.setdefault(model_type, name)
    return [*names.values()]


def row(name: str) -> Row:
    """Try a family."""
    model_type = {**ARCHITECTURES, **RECURRENT}[name][0]
    lm = load(name)
    files = [key for key, architecture in GGUF.items() if architecture.model_type == model_type]
    files = files or FILES_AS.get(model_type, [])
    is_fused = module_class(model_type) in FUSED
    result = Row(
        family=model_type,
        cpu=forward_of(lm),
        gpu="fused; several GPUs" if is_fused else "modules of transformers",
        in_8_bits=tried(partial(load, name, quantization="w8a8")),
        gguf=", ".join(f"`{key}`" for key in files),
        drafters={drafter: tried(partial(decode, name, drafter)) for drafter in options()},
    )
    print(result, flush=True)
    return result


def load(name: str, **settings: Any) -> CausalLM:
    """A tiny model, as ``LLM`` loads it on a processor."""
    return loader.load(tiny(name), dtype="float32", forward="auto", **settings)


def module_class(model_type: str) -> type | None:
    """Transformers' class of the causal language model."""
    name = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return getattr(transformers, str(name), None)


def forward_of(lm: CausalLM) -> str:
    """What computes the layers on a processor."""
    if lm.path.kind == "native":
        return "C++"
    has_native_parts = "recurrent layers run in C++" in (lm.path.reason or "")
    return "torch, recurrent layers in C++" if has_native_parts else "torch"


def options() -> list[str]:
    """The drafters that ``--speculative`` names and that draft themselves."""
    return [spec.option for spec in DRAFTERS if spec.drafter and spec.option]


def config_of(name: str, drafter: str) -> DecodingBaseConfig:
    """A drafter with random weights for a tiny model; its draft model is the target itself."""
    model = {"max_draft_len": 4, "speculative_model": tiny(name)}
    sizes = {"num_key_value_heads": 4}
    configs: dict[str, Callable[[], DecodingBaseConfig]] = {
        "ngram": lambda: drafters.NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=3),
        "suffix": lambda: drafters.SuffixDecodingConfig(max_draft_len=8),
        "draft_target": lambda: drafters.DraftTargetDecodingConfig(**model),
        "pearl": lambda: drafters.PearlDecodingConfig(**model),
        "eagle3": lambda: drafters.EagleDecodingConfig(
            max_draft_len=4, speculative_model=random_eagle(**sizes)
        ),
        "medusa": lambda: MedusaDecodingConfig(speculative_model=shared_heads()),
        "mtp": lambda: drafters.MTPDecodingConfig(max_draft_len=4, speculative_model=saved(name)),
        "redrafter": lambda: drafters.ReDrafterDecodingConfig(speculative_model=random_head()),
    }
    return configs[drafter]()


def decode(name: str, drafter: str) -> None:
    """Raises Mismatch if the tokens are not those of plain decoding."""
    (prompt,) = prompts((9,))
    machine = engine_over(load(name), speculative=[config_of(name, drafter)])
    [sequence] = machine.add(prompt, GREEDY.replace(max_tokens=NUM_TOKENS))
    drain(machine)
    if sequence.output != greedy(tiny(name), [prompt], NUM_TOKENS)[0]:
        raise Mismatch("other tokens")
    if machine.stats.draft_failures:
        raise Mismatch("it failed while it drafted")
    if not machine.stats.drafted and drafter not in ("ngram", "suffix"):
        raise Mismatch("it drafted nothing")


def tried(run: Callable[[], object]) -> str:
    """A mark, or why not."""
    try:
        run()
    except (ForethoughtError, Mismatch) as error:
        return str(getattr(error, "why", error))
    except Exception:  # of transformers' classes, of which a module is made
        return NOT_TRIED
    return YES


# ---- the page ------------------------------------------------------------------------------------


def page(rows: list[Row]) -> str:
    """The whole text."""
    made_on = f"{date.today():%d %B %Y}".lstrip("0")
    return "\n".join(
        [
            "# What runs with what",
            "",
            "Forwards, quantisation, drafters and GGUF files by family, as they were found to run. "
            f"Written by `python scripts/support.py` on {made_on}, with transformers "
            f"{transformers.__version__}. A tiny model of each family was loaded, as it is and "
            "with weights in 8 bits, and decoded with every drafter in float32: ✓ stands where the "
            "tokens are those of `model.generate`. GPUs and names in GGUF files are read from the "
            "code. More families run: [families](families.md).",
            "",
            "## Families",
            "",
            *family_table(rows),
            "",
            "* **On a GPU**: `fused` runs layers of fused operations and, over several GPUs, "
            "tensor parallelism. CUDA graphs are captured for them by default, and for others with "
            "`cuda_graphs=True`.",
            '* **In 8 bits**: `quantization="w8a8"`. `int8`, `int4` and `w4a8` take the same '
            "layers; 4 bits need widths that 32 divides.",
            *(f"* {', '.join(names)}: {why}." for why, names in reasons(rows).items()),
            "",
            "## Drafters",
            "",
            *drafter_table(rows),
            "",
            "## Quantisation",
            "",
            *quantization_table(),
            "",
            "Checkpoints in AWQ, GPTQ, compressed-tensors and fp8, and GGUF files, are read as "
            "they are: [quantised weights](models.md#quantised-weights).",
            "",
        ]
    )


def family_table(rows: list[Row]) -> list[str]:
    """A row for each family."""
    return [
        "| `model_type` | on a processor | on a GPU | in 8 bits | drafters | in GGUF files |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| `{row.family}` | {row.cpu} | {row.gpu} | {mark(row.in_8_bits)} | {drafts(row)} "
            f"| {row.gguf} |"
            for row in rows
        ),
    ]


def mark(text: str) -> str:
    """As a cell."""
    return YES if text == YES else "no"


def drafts(row: Row) -> str:
    """How many drafters run, or which do not."""
    missing = [f"`{name}`" for name, text in row.drafters.items() if text != YES]
    return f"all but {', '.join(missing)}" if missing else "all"


def reasons(rows: list[Row]) -> dict[str, list[str]]:
    """Why something does not run -> what."""
    refused = defaultdict(list)
    for row in rows:
        for name, text in {"8 bits": row.in_8_bits, **row.drafters}.items():
            if text != YES:
                refused[text].append(f"`{name}` of `{row.family}`")
    return dict(refused)


def drafter_table(rows: list[Row]) -> list[str]:
    """A row for each drafter of ``--speculative``."""
    lines = [
        "| `--speculative` | families above | `forethought train` | in a model's checkpoint |",
        "| --- | --- | --- | --- |",
    ]
    for spec in DRAFTERS:
        if spec.option in options():
            count = sum(row.drafters[spec.option] == YES for row in rows)
            recipes = ", ".join(f"`{name}`" for name in spec.recipes)
            inside = YES if spec.inside else ""
            lines.append(f"| `{spec.option}` | {count} of {len(rows)} | {recipes} | {inside} |")
    return lines


def quantization_table() -> list[str]:
    """A row for each value of ``quantization``."""
    return [
        "| `quantization` | bits of weights | of activations | devices |",
        "| --- | --- | --- | --- |",
        *(
            f"| `{name}` | {BITS[name]} | {8 if has_rounded_input(name) else '16 or 32'} | "
            f"{'processors' if has_rounded_input(name) else 'processors, GPUs'} |"
            for name in QUANTIZATIONS
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
