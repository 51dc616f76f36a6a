"""EAGLE heads with random weights over the tiny models, and their drafts, computed step by step."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from forethought.speculative.heads.eagle import EagleHead
from forethought.speculative.heads.eagle3 import Eagle3Head, Eagle3Traits, Layout
from models import VOCAB, tiny, transformers_model

LAYER_IDS = (0, 2, 3)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_COUNT = itertools.count()


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="eagle-heads-")


def new_directory() -> Path:
    """A path where nothing is."""
    return Path(_directory().name) / str(next(_COUNT))


def random_eagle3(seed: int = 0, draft_vocab: int = 60, **traits: Any) -> Eagle3Head:
    """A head of EAGLE-3's whose draft vocabulary is scattered over the target's."""
    layer_ids = traits.pop("layer_ids", LAYER_IDS)
    sizes = SIZES | {name: traits.pop(name) for name in list(traits) if name in SIZES}
    sizes |= {"attention_bias": traits.pop("attention_bias", False)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = Eagle3Head(
            LlamaConfig(**sizes),
            Eagle3Traits(draft_vocab, 32, captures=len(layer_ids), layer_ids=layer_ids, **traits),
        )
        scatter(head)
        head.set_vocabulary(torch.randperm(VOCAB)[:draft_vocab].sort().values)
    return head


def random_eagle(
    seed: int = 0, bias: bool = True, own_embedding: bool = False, **sizes: Any
) -> EagleHead:
    """A head of EAGLE-1's."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = EagleHead(LlamaConfig(**SIZES | sizes), bias, own_embedding)
        scatter(head)
    return head


def scatter(head: nn.Module) -> None:
    """Norms near 1, all else wide, so that drafts vary and depend on what attention reads."""
    for name, weight in head.named_parameters():
        wide = 1.0 if "self_attn" in name else 0.3
        weight.data = wide * torch.randn_like(weight) + (weight.ndim == 1)


@functools.cache
def random_head(kind: str = "eagle3", layout: Layout = "eagle3", **sizes: Any) -> Path:
    """Directory of a random head for ``tiny("llama")``; made once per process."""
    path = new_directory()
    if kind == "eagle3":
        random_eagle3(**sizes).save(path, layout)
    else:
        random_eagle(**sizes).save(path)
    return path


class Oracle:
    """Drafts by the formulas, one position after the other, from nothing but published tensors.

    Args:
        head: whose weights are used.
        layer_ids: where states are taken.
        target: directory of the target.
        offset: of the tokens against the states: 1 in truth.
        swapped: whether state and embedding change sides: false in truth.
    """

    def __init__(
        self,
        head: Eagle3Head | EagleHead,
        layer_ids: Sequence[int] = LAYER_IDS,
        target: Path | None = None,
        offset: int = 1,
        swapped: bool = False,
    ) -> None:
        self.weights = {name: x.double() for name, x in head.state_dict().items()}
        self.config = head.config
        self.third = head.traits if isinstance(head, Eagle3Head) else None
        self.layer_ids, self.offset, self.swapped = layer_ids, offset, swapped
        self.target = transformers_model(tiny("llama") if target is None else target)
        self.layer = "midlayer." if self.third else "layers.0."
        self.memory: dict[tuple[int, ...], Tensor] = {}

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), width]: the target's states side by side."""
        found: list[Tensor] = []

        def before_norm(module: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])

        handle = self.target.model.norm.register_forward_pre_hook(before_norm)
        with torch.inference_mode():
            said = self.target(torch.tensor([list(tokens)]), output_hidden_states=True)
        handle.remove()
        inner = [*said.hidden_states[:-1], found[0]]  # the residual stream entering, leaving layers
        final = said.hidden_states[-1]
        chosen = [final if layer_id == -1 else inner[layer_id] for layer_id in self.layer_ids]
        return torch.cat([each[0] for each in chosen], -1).double()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """float64 [VOCAB]: behind the root ``tokens[-1]`` and the drafted ``path``."""
        key = tuple(tokens)
        if key not in self.memory:
            self.memory = {key: self.states(tokens[:-1]).clone()}
        states = self.memory[key]
        if self.third:
            states = self.fuse(states)
        known = list(tokens) + list(path)
        read = list(states)
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for position in range(len(tokens) - 1 + len(path)):
            state = read[position] if position < len(read) else outputs[-1]
            token = known[position + self.offset] if position + self.offset < len(known) else 0
            out, logits = self.step(self.embed(token), state, position, keys, values)
            outputs.append(out)
        return logits

    def step(
        self, embedded: Tensor, state: Tensor, position: int, keys: list[Tensor], values: Any
    ) -> tuple[Tensor, Tensor]:
        w, layer = self.weights, self.layer
        if self.third:
            normed = self.norm(state, layer + "hidden_norm")
            sides = [self.norm(embedded, layer + "input_layernorm"), normed]
            x = torch.cat(sides[::-1] if self.swapped else sides)
            residual = normed if self.third.norm_before_residual else state
        else:
            sides = [embedded, state]
            x = residual = self.linear(torch.cat(sides[::-1] if self.swapped else sides), "fc")
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        q = self.rotate(self.linear(x, layer + "self_attn.q_proj").view(heads, -1), position)
        keys.append(
            self.rotate(self.linear(x, layer + "self_attn.k_proj").view(kv_heads, -1), position)
        )
        values.append(self.linear(x, layer + "self_attn.v_proj").view(kv_heads, -1))
        mixed = []
        for head in range(heads):
            k = torch.stack([each[head * kv_heads // heads] for each in keys])
            v = torch.stack([each[head * kv_heads // heads] for each in values])
            mixed.append((k @ q[head] / math.sqrt(q.shape[1])).softmax(0) @ v)
        x = residual + self.linear(torch.cat(mixed), layer + "self_attn.o_proj")
        y = self.norm(x, layer + "post_attention_layernorm")
        gated = F.silu(self.linear(y, layer + "mlp.gate_proj"))
        x = x + self.linear(gated * self.linear(y, layer + "mlp.up_proj"), layer + "mlp.down_proj")
        if not self.third:
            return x, self.target.lm_head.weight.double() @ x
        normed = self.norm(x, "norm")
        logits = torch.full((self.config.vocab_size,), -math.inf, dtype=torch.float64)
        for row, score in enumerate(w["lm_head.weight"] @ normed):
            logits[row + int(w["d2t"][row])] = score
        return (normed if self.third.norm_output else x), logits

    def fuse(self, states: Tensor) -> Tensor:
        if self.third and self.third.norm_before_fc:
            states = self.norm(states, "input_norm")
        return states @ self.weights["fc.weight"].T

    def embed(self, token: int) -> Tensor:
        own = self.weights.get("embed_tokens.weight")
        return (self.target.model.embed_tokens.weight.double() if own is None else own)[token]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = self.weights[name + ".weight"] @ x
        return y + self.weights[name + ".bias"] if name + ".bias" in self.weights else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[name + ".weight"]

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[1] // 2
        theta = (self.config.rope_parameters or {}).get("rope_theta", 10_000.0)
        angles = position * theta ** -(torch.arange(half, dtype=torch.float64) / half)
        left, right = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], 1)


@dataclass(frozen=True)
class State:
    """A state of the target that a published head reads: of layer ``layer``."""

    layer: int
    side: Literal["input", "output"]


class Published(Oracle):
    """The same drafts from the files of a published head alone, for every author's layout.

    Args:
        directory: ``config.json`` and ``model.safetensors``.
        captured: the states that it was trained with, in the order in which ``fc`` reads them.
        target: directory of the target.
    """

    def __init__(self, directory: Path, captured: Sequence[State], target: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights = {name.replace("layers.0.", "midlayer."): x for name, x in stored.items()}
        self.weights = {name: x.double() for name, x in self.weights.items()}
        self.config = LlamaConfig(**config.get("transformer_layer_config", config))
        flags = ("norm_before_residual", "norm_before_fc", "norm_output")
        self.third = Eagle3Traits(60, 32, **{flag: config.get(flag, False) for flag in flags})
        self.captured, self.offset, self.swapped = captured, 1, False
        self.target, self.layer, self.memory = transformers_model(target), "midlayer.", {}

    def states(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), width]: what goes into and comes out of the layers themselves."""
        found: dict[State, Tensor] = {}
        hooks = []
        for index, layer in enumerate(self.target.model.layers):

            def record(module: nn.Module, args: Any, output: Tensor, index: int = index) -> None:
                found[State(index, "input")], found[State(index, "output")] = args[0], output

            hooks.append(layer.register_forward_hook(record))
        with torch.inference_mode():
            self.target(torch.tensor([list(tokens)]))
        for hook in hooks:
            hook.remove()
        return torch.cat([found[state][0] for state in self.captured], -1).double()


def ranked(logits: Tensor, count: int) -> list[int]:
    """The most probable tokens."""
    return logits.topk(count).indices.tolist()


def chain(oracle: Oracle, tokens: Sequence[int], depth: int) -> list[int]:
    path: list[int] = []
    for _ in range(depth):
        path += ranked(oracle.logits(tokens, path), 1)
    return path


def static_tree(
    oracle: Oracle, tokens: Sequence[int], paths: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], int]:
    """Path of ranks -> token, for all nodes of a tree that is given in full."""
    said: dict[tuple[int, ...], int] = {}
    for path in sorted(map(tuple, paths), key=len):
        above = [said[path[:end]] for end in range(1, len(path))]
        said[path] = ranked(oracle.logits(tokens, above), path[-1] + 1)[-1]
    return said


def dynamic_tree(
    oracle: Oracle, tokens: Sequence[int], width: int, depth: int, total: int
) -> set[tuple[int, ...]]:
    """The paths of tokens that are kept."""
    made: dict[tuple[int, ...], float] = {}
    beams: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for beam in beams:
            scores, ids = oracle.logits(tokens, beam).log_softmax(0).topk(width)
            for score, token in zip(scores.tolist(), ids.tolist(), strict=True):
                level[(*beam, token)] = made.get(beam, 0.0) + score
        made |= level
        beams = sorted(level, key=lambda path: -level[path])[:width]
    return set(sorted(made, key=lambda path: -made[path])[:total])
