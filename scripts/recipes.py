"""Tables of docs/recipes.md: commands for known models, with the memory that they need.

``docs/recipes.json`` has the shapes of models, as their ``config.json`` on the Hub states them, and
the recipes of each machine. A model is made of its shapes by transformers, without memory for its
weights, and its weights are counted. A table is between ``<!-- recipes: MACHINE -->`` and ``<!--
end of recipes -->``.

    python scripts/recipes.py            write all tables anew
    python scripts/recipes.py --check    fail if one is not what would be written
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PAGE, DATA = ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes.json"
BLOCK = re.compile(r"<!-- recipes: ([\w-]+) -->\n.*?<!-- end of recipes -->", re.DOTALL)
GIB = 2**30
SHORT_BYTES = 2
"""Of a weight, a scale, a key or a value in 16 bits."""
BITS = {"Q4_K_M": 4.9, "Q4_1": 5.7}
"""Forms of GGUF files -> bits of a weight in the mean, embeddings included; layers differ."""

Recipe = dict[str, Any]


class Memory(NamedTuple):
    """Bytes that a model takes."""

    weights: int
    kv_per_token: int
    """Keys and values in 16 bits, and of models with recurrent layers the most that their states
    take beside them."""

    def needed(self, num_tokens: int) -> int:
        """With so many tokens in the cache."""
        return self.weights + num_tokens * self.kv_per_token


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = written(old)
    if new == old:
        return 0
    if not args.check:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'is stale' if args.check else 'written'}")
    return int(args.check)


@cache
def data() -> dict[str, Any]:
    """The machines, models and recipes."""
    content: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return content


def memory_of(shapes: dict[str, Any], form: str) -> Memory:
    """Of a model.

    Args:
        shapes: fields of its configuration, ``model_type`` among them.
        form: ``bfloat16``; ``int8`` or ``w8a8``, linear layers in 8 bits; a key of ``BITS``.
    """
    fields = dict(shapes)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    return Memory(weight_bytes(module, form), kv_bytes(config))


def weight_bytes(module: nn.Module, form: str) -> int:
    """Of all weights; those that two layers share are counted once where both keep them."""
    num_weights = sum(weight.numel() for weight in module.parameters())
    if form == "bfloat16":
        return SHORT_BYTES * num_weights
    if form in BITS:
        return round(num_weights * BITS[form] / 8)
    linears = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    ids = {id(weight) for weight in linears}
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    kept = {id(weight) for weight in tables}  # beside the output projection that shares it
    plain = [p for p in module.parameters() if id(p) not in ids or id(p) in kept]
    if any(weight.ndim == 3 for weight in plain):
        raise ValueError(f"{form} of a mixture of experts is not counted here")
    in_8_bits = sum(weight.numel() + SHORT_BYTES * len(weight) for weight in linears)
    return in_8_bits + SHORT_BYTES * sum(weight.numel() for weight in plain)


def kv_bytes(config: Any) -> int:
    """Of a token."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    num_attending = sum(kind.endswith("attention") and "linear" not in kind for kind in kinds)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    size: int = 2 * num_attending * config.num_key_value_heads * head_dim * SHORT_BYTES
    return size if num_attending == len(kinds) else 2 * size


# ---- the page ------------------------------------------------------------------------------------


def written(text: str) -> str:
    """The page with its tables anew."""
    return BLOCK.sub(lambda match: block(match[1]), text)


def block(machine: str) -> str:
    """The table of a machine, between its marks."""
    lines = [
        "| model | command | weights | tokens in the cache | memory |",
        "| --- | --- | ---: | ---: | ---: |",
        *(f"| {' | '.join(cells(recipe))} |" for recipe in recipes_of(machine)),
    ]
    models: dict[str, list[str]] = {}
    for recipe in recipes_of(machine):
        models.setdefault(recipe["note"], []).append(recipe["model"])
    notes = [f"* {', '.join(names)}: {note}" for note, names in models.items()]
    body = "\n".join([*lines, "", *notes])
    return f"<!-- recipes: {machine} -->\n\n{body}\n\n<!-- end of recipes -->"


def recipes_of(machine: str) -> list[Recipe]:
    """In the order of the file."""
    return [recipe for recipe in data()["recipes"] if recipe["machine"] == machine]


def cells(recipe: Recipe) -> list[str]:
    """A row."""
    memory = memory_of(data()["models"][recipe["model"]]["config"], recipe["form"])
    num_tokens = recipe["tokens"]
    return [
        f"{recipe['model']}, {recipe['form']}",
        f"`{recipe['command']}`",
        gib(memory.weights),
        f"{num_tokens:,}",
        gib(memory.needed(num_tokens)),
    ]


def gib(num_bytes: int) -> str:
    """Such as ``15.3 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"


if __name__ == "__main__":
    sys.exit(main())
