"""Which families of the installed transformers run, found by trying each: a table for the docs.

Every causal language model of transformers is made with random weights and sizes of a test, loaded,
and compared with ``model.generate`` in float32. Families that tests have sizes for are made with
those; others with ``SIZES``, as far as their configuration has these fields. What cannot be made so
is in no table: a model that also sees or hears is tried as its language part.

    OMP_NUM_THREADS=1 python scripts/families.py      writes docs/families.md; some five minutes
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from engines import GREEDY, drain, engine_over  # noqa: E402
from forethought.errors import ModelError  # noqa: E402
from forethought.model import loader  # noqa: E402
from models import ARCHITECTURES, RECURRENT, greedy, prompts, save_random, tiny  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs" / "families.md"
MAX_SECONDS, MAX_BYTES = 25, 200_000_000
"""Of one family; larger ones do not become small by ``SIZES``."""
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "d_model": 32,
    "n_embd": 32,
    "d_ff": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "n_layer": 4,
    "num_layers": 4,
    "n_head": 4,
    "num_heads": 4,
    "d_kv": 8,
    "rotary_dim": 4,
    "n_positions": 256,
    "word_embed_proj_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
}
FORWARDS = {
    "native": "natively, in C++",
    "fused": "through torch, fused",
    "transformers": "through the modules of transformers",
}


class Outcome(NamedTuple):
    """Of one family: how it runs, or why it is refused."""

    runs: bool
    text: str


def main() -> int:
    """The exit status."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    outcomes: dict[str, Outcome] = {}
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder, tried_for(MAX_SECONDS):
            directory = made(name, Path(folder) / "model")
            if directory is not None:
                outcomes[name] = outcome_of(directory)
                print(name, outcomes[name].text, flush=True)
    PAGE.write_text(page(outcomes), encoding="utf-8")
    return 0


def made(name: str, directory: Path) -> Path | None:
    """A tiny model of a family; None: these sizes do not make one."""
    for architecture, (model_type, _) in {**ARCHITECTURES, **RECURRENT}.items():
        if model_type == name:
            return tiny(architecture)
    kind = CONFIG_MAPPING[name]
    fields = {*kind.__dataclass_fields__, *kind.attribute_map}
    try:
        save_random(kind(**{key: SIZES[key] for key in SIZES if key in fields}), directory, 1)
    except Exception:  # of any configuration and class
        return None
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return directory if size < MAX_BYTES else None


def outcome_of(directory: Path) -> Outcome:
    """Load a model and compare ten tokens."""
    try:
        lm = loader.load(directory, dtype="float32", forward="auto")
    except ModelError as error:
        why = re.sub(r"^\w*(For|LMHead)\w+", "it", error.why)
        return Outcome(False, re.sub(r"of its \d+ layers \d+ call", "too few layers call", why))
    [prompt] = prompts((9,))
    machine = engine_over(lm, pages=60)
    [sequence] = machine.add(prompt, GREEDY.replace(max_tokens=10))
    drain(machine)
    if sequence.output != greedy(directory, [prompt], 10)[0]:
        return Outcome(False, "not refused, but it generates other tokens than `generate`")
    return Outcome(True, FORWARDS[lm.path.kind])


def page(outcomes: dict[str, Outcome]) -> str:
    """The page: the families by how they run, and the reasons of refusals."""
    running, refused = defaultdict(list), defaultdict(list)
    for name, outcome in outcomes.items():
        (running if outcome.runs else refused)[outcome.text.replace("|", "")].append(f"`{name}`")
    version, made_on = transformers.__version__, f"{date.today():%d %B %Y}".lstrip("0")
    lines = [
        "# Families of transformers",
        "",
        f"Of transformers {version}, as `python scripts/families.py` found them on {made_on}: each "
        "was made with random weights and generated ten tokens, greedily in float32, and all that "
        "run gave those of `model.generate`. Names are those of `model_type` in a `config.json`. "
        "Families that the script has no sizes for are not here.",
        "",
        "| runs | families |",
        "| --- | --- |",
        *(f"| {how} | {', '.join(running[how])} |" for how in FORWARDS.values() if running[how]),
        "",
        "| refused, because | families |",
        "| --- | --- |",
        *(f"| {why} | {', '.join(names)} |" for why, names in sorted(refused.items())),
        "",
    ]
    return "\n".join(lines)


@contextmanager
def tried_for(seconds: int) -> Iterator[None]:
    """Give up after so long, and on any exception that is no refusal."""
    signal.alarm(seconds)
    try:
        yield
    except Exception as error:
        print(f"not tried to the end: {error!r}"[:200], flush=True)
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    raise SystemExit(main())
