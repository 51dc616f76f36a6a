"""The engine in one file of plain torch: read this first.

A paged KV cache with fork and rewind, tree attention, exact sampling and verification. Most names
are those of the real engine, in the packages named here; the tests compare it with this one.

    pages          PagePool, PageTable, KvStorage                       kv/
    attention      Row, Span, ReferenceAttention                        model/batch, model/attention
    the model      CausalLM, a Llama from its checkpoint                model/
    sampling       uniform_at, logits_to_probs                          model/sampling/
    verification   RandomSource, verify_node, verify                    speculative/verify/
    the engine     Sequence, Draft, Engine                              engine/
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from forethought.config.sampling import SamplingParams
from forethought.model.attention.base import Capability, Scoring
from forethought.model.sampling.distribution import TokenContext
from forethought.outputs import FinishReason
from forethought.speculative.drafter import DraftKind

Copy = tuple[int, int]  # from a page or a slot, to another


class PagePool:
    """Page ids and their reference counts."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.refs, self.page_size = [0] * num_pages, page_size

    def take(self) -> int:
        """A free page, with one reference."""
        page = self.refs.index(0)
        self.refs[page] = 1
        return page


class PageTable:
    """The pages of one row; one that is shared is copied before it is written."""

    def __init__(self, pool: PagePool) -> None:
        self._pool, self.pages, self.length = pool, list[int](), 0

    def append(self, count: int) -> list[Copy]:
        """Slots for ``count`` further tokens; the page copies to make first."""
        copies, size = list[Copy](), self._pool.page_size
        if self.length % size and self._pool.refs[self.pages[-1]] > 1:
            copies = [(self.pages[-1], self._pool.take())]
            self._pool.refs[self.pages[-1]] -= 1
            self.pages[-1] = copies[0][1]
        self.length += count
        self.pages += [self._pool.take() for _ in range(len(self.pages), -(-self.length // size))]
        return copies

    def fork(self, length: int) -> PageTable:
        """A table with the first ``length`` tokens, sharing every page."""
        child = PageTable(self._pool)
        child.length, child.pages = length, self.pages[: -(-length // self._pool.page_size)]
        for page in child.pages:
            self._pool.refs[page] += 1
        return child

    def rewind(self, length: int) -> None:
        """Forget the tokens from ``length`` on; their pages go back."""
        self.length, count = length, -(-length // self._pool.page_size)
        for page in self.pages[count:]:
            self._pool.refs[page] -= 1
        del self.pages[count:]

    def keep_path(self, base: int, path: List[int]) -> list[Copy]:
        """Keep of the nodes stored from ``base`` on those of ``path``; the slot copies to make."""
        nodes = self.slots(base, self.length)
        moves = [(nodes[node], nodes[at]) for at, node in enumerate(path) if node != at]
        self.rewind(base + len(path))
        return moves

    def slots(self, start: int, stop: int) -> list[int]:
        """The slots of positions ``[start, stop)``."""
        size = self._pool.page_size
        return [self.pages[t // size] * size + t % size for t in range(start, stop)]


class KvStorage:
    """Keys and values of each layer: ``[slots, kv_heads, dim]``."""

    def __init__(self, num_layers: int, num_slots: int, kv_heads: int, dim: int) -> None:
        self.keys = list(torch.zeros(num_layers, num_slots, kv_heads, dim))
        self.values = list(torch.zeros(num_layers, num_slots, kv_heads, dim))

    def copy(self, copies: List[Copy], size: int = 1) -> None:
        """Copy runs of ``size`` slots; every source is read before anything is written."""
        for stored in (*self.keys, *self.values):
            runs = stored.view(-1, size, *stored.shape[1:])
            runs[[dst for _, dst in copies]] = runs[[src for src, _ in copies]].clone()


@dataclass
class Row:
    """Tokens that are computed after ``start`` stored ones: each follows its parent, or -1."""

    tokens: list[int]
    start: int
    table: PageTable
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        """The node's ancestors in the row and itself, in order."""
        return [*self.path(self.parents[node]), node] if node >= 0 else []


def visible_indices(span: Any, query: int, window: int | None) -> list[int]:
    """Indices into the stored tokens of a ``Span`` that its token ``query`` attends to.

    window: how many of the last positions; below 0, of how many positions a chunk is.
    """
    prefix = span.kv_length - span.length
    tree = torch.ones(query + 1, query + 1) if span.tree is None else span.tree
    path = tree[query].nonzero()[:, 0].tolist()
    # Ancestors are in order of depth, so an ancestor's index in the path is its depth.
    positions = [(index, index) for index in range(span.seen_from, prefix)]
    positions += [(prefix + index, prefix + depth) for depth, index in enumerate(path)]
    last = prefix + len(path) - 1
    if window is None:
        return [index for index, _ in positions]
    if window > 0:
        return [index for index, at in positions if last - at < window]
    return [index for index, at in positions if at // -window == last // -window]


class ReferenceAttention:
    """Attention one token and one head at a time, in float32: an attention backend."""

    name, capabilities = "reference", frozenset(Capability)

    def plan(self, batch: Any, storage: Any, window: int | None) -> list[list[int]]:
        """The slots that each token of the batch attends to."""
        size = storage.page_size
        return [
            [span.pages[t // size] * size + t % size for t in visible_indices(span, query, window)]
            for span in batch.spans
            for query in range(span.length)
        ]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: list[list[int]], scoring: Scoring
    ) -> Tensor:
        """q ``[T, heads, key_dim]`` over slots of keys and values: ``[T, heads, value_dim]``."""
        out = q.new_empty(*q.shape[:2], values.shape[-1])
        for token, slots in enumerate(plan):
            for head in range(q.shape[1]):
                kv_head = head * keys.shape[1] // q.shape[1]
                scores = keys[slots, kv_head].float() @ q[token, head].float() * scoring.scale
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks[head : head + 1].float()])
                weights = torch.softmax(scores, 0)[: len(slots)]
                out[token, head] = (weights @ values[slots, kv_head].float()).to(q.dtype)
        return out


class Batch(NamedTuple):
    """Of the tokens of some rows: where each is stored, what it attends to, its position."""

    slots: list[int]
    visible: list[list[int]]
    positions: list[int]

    @classmethod
    def build(cls, rows: List[Row]) -> Batch:
        """A node of a tree attends to the stored prefix, its ancestors and itself."""
        batch = cls([], [], [])
        for row in rows:
            slots = row.table.slots(0, row.start + len(row.tokens))
            prefix, nodes = slots[: row.start], slots[row.start :]
            paths = [row.path(node) for node in range(len(nodes))]
            batch.slots.extend(nodes)
            batch.visible.extend(prefix + [nodes[node] for node in path] for path in paths)
            batch.positions.extend(row.start + len(path) - 1 for path in paths)
        return batch


class CausalLM:
    """A Llama in float32, from a checkpoint's directory."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        weights = load_file(directory / "model.safetensors")
        self._weights = {name: weight.float() for name, weight in weights.items()}
        self.num_layers, self.kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
        heads, self._eps = config["num_attention_heads"], config["rms_norm_eps"]
        self.dim = config.get("head_dim") or config["hidden_size"] // heads
        self._theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        eos = config.get("eos_token_id")
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def forward(self, rows: List[Row], storage: KvStorage) -> list[Tensor]:
        """Store keys and values of the rows' tokens; the logits ``[tokens, vocab]`` of each row."""
        batch = Batch.build(rows)
        x = self._weights["model.embed_tokens.weight"][[t for row in rows for t in row.tokens]]
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", x)
            x = x + self._attention(layer, normed, batch, storage)
            normed = self._norm(f"{name}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}.mlp.{n}", normed) for n in ("gate", "up"))
            x = x + self._linear(f"{name}.mlp.down", F.silu(gate) * up)
        head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return list((self._norm("norm", x) @ head.T).split([len(row.tokens) for row in rows]))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"model.{name}.weight"], self._eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"model.{name}_proj.weight"].T

    def _attention(self, layer: int, x: Tensor, batch: Batch, storage: KvStorage) -> Tensor:
        name, keys, values = f"layers.{layer}.self_attn", storage.keys[layer], storage.values[layer]
        q, k, v = (self._linear(f"{name}.{n}", x).view(len(x), -1, self.dim) for n in "qkv")
        keys[batch.slots], values[batch.slots] = self._rotate(k, batch.positions), v
        q, scoring = self._rotate(q, batch.positions), Scoring(self.dim**-0.5)
        mixed = ReferenceAttention().attend(q, keys, values, batch.visible, scoring)
        return self._linear(f"{name}.o", mixed.flatten(1))

    def _rotate(self, x: Tensor, positions: list[int]) -> Tensor:
        """The rotary embedding of x ``[T, heads, dim]``: halves are the two coordinates."""
        frequencies = self._theta ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.tensor(positions)[:, None, None] * frequencies
        (first, second), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def uniform_at(seed: int, sample: int, position: int, use: int = 0) -> float:
    """A uniform number in [0, 1) with 53 random bits, a pure function of the four integers."""
    words = [seed, sample, position, *([use] if use else [])]
    counter = b"".join((word % 2**64).to_bytes(8, "little") for word in words)
    return (int.from_bytes(blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def logits_to_probs(logits: List[float], context: TokenContext) -> list[float]:
    """Probabilities of the next token: bias, penalties, mask, temperature, top-k, top-p, min-p."""
    params, constraint = context.params, context.constraint
    if params.penalises_repeats or params.keeps_within_sigma or params.excludes_top:
        raise NotImplementedError("DRY, top-n-sigma and XTC are in model/sampling alone")
    mask = None if constraint is None else constraint.mask(context.output)
    allowed = [mask is None or bool(mask[t // 8] >> (t % 8) & 1) for t in range(len(logits))]
    allowed = allowed if any(allowed) else [True] * len(logits)
    edited = [_edited(t, x, context) for t, x in enumerate(logits)]
    edited = [x if allowed[t] else -math.inf for t, x in enumerate(edited)]
    if any(map(math.isnan, edited)) or not math.isfinite(max(edited)):
        readable = torch.tensor(logits).nan_to_num(torch.finfo().min).tolist()  # infinities too
        edited = [x if allowed[t] else -math.inf for t, x in enumerate(readable)]
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.greedy:
        return [float(token == order[0]) for token in range(len(edited))]
    weights = [math.exp((x - edited[order[0]]) / params.temperature) for x in edited]
    total, support, mass = math.fsum(weights), set[int](), 0.0
    probs = [weight / total for weight in weights]
    for rank, token in enumerate(order):
        in_top_k = params.top_k == 0 or rank < params.top_k
        in_top_p = params.top_p == 1.0 or mass < params.top_p
        in_min_p = probs[token] >= params.min_p * probs[order[0]]
        if rank == 0 or (in_top_k and in_top_p and in_min_p):
            support.add(token)
        mass += probs[token]
    remaining = math.fsum(probs[token] for token in support)
    return [probs[t] / remaining if t in support else 0.0 for t in range(len(probs))]


def _edited(token: int, logit: float, context: TokenContext) -> float:
    params, output = context.params, list(context.output)
    logit += (params.logit_bias or {}).get(token, 0.0)
    if token in context.prompt or token in output:
        penalty = params.repetition_penalty
        logit = logit / penalty if logit > 0 else logit * penalty
    if token in output:
        logit -= params.presence_penalty
        logit -= params.frequency_penalty * output.count(token)
    ends = params.end_ids(context.eos_ids)
    return -math.inf if token in ends and len(output) < params.min_tokens else logit


Number = float | Fraction
Probs = list[Number]


@dataclass
class RandomSource:
    """Makes the random decisions after ``depth`` accepted tokens, by ``uniform_at``."""

    seed: int
    index: int
    position: int

    def accepts(self, probability: Number, depth: int, sibling: int) -> bool:
        """True with this probability, for child number ``sibling`` of the node."""
        use = 2 + (sibling << 8)
        return uniform_at(self.seed, self.index, self.position + depth, use) < probability

    def draws(self, probs: Probs, depth: int) -> int:
        """A token drawn from ``probs``: the inverse of the cumulative distribution."""
        mass = torch.tensor(probs, dtype=torch.float64).cumsum(0)
        uniform = uniform_at(self.seed, self.index, self.position + depth)
        return int(torch.searchsorted(mass, uniform * mass[-1], right=True))


@dataclass(frozen=True)
class Draft:
    """N proposed tokens, a tree by its parents (-1: the root), and what each was drawn from."""

    tokens: List[int] = ()
    parents: List[int] = ()
    kind: DraftKind = DraftKind.POINT
    q: List[Probs] = ()

    def children(self, node: int) -> list[int]:
        """The nodes that follow ``node``."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


Children = list[tuple[int, Probs]]
"""Of a node: each child's token and the q that it was drawn from, empty for points."""
Decision = tuple[int | None, int]
"""The index of the accepted child of a node or None, and the token that follows."""
NodeRule = Callable[[Probs, Children, DraftKind, RandomSource, int], Decision]


def verify_node(
    probs: Probs, children: Children, kind: DraftKind, source: RandomSource, depth: int
) -> Decision:
    """Points by the target's own sample; others by rejection sampling (Leviathan et al., 2023)."""
    if kind is DraftKind.POINT:
        token = source.draws(probs, depth)
        matching = [number for number, (drafted, _) in enumerate(children) if drafted == token]
        return (matching[0] if matching else None), token
    removed: list[int] = []
    for number, (token, q) in enumerate(children):
        if kind is DraftKind.WITHOUT_REPLACEMENT:
            q = [0 if other in removed else weight for other, weight in enumerate(q)]
            removed.append(token)
        q = normalised([weight if weight > 0 else 0 for weight in q])
        if not q[token] > 0:  # it cannot have been drawn from q: a point mass
            q = [int(other == token) for other in range(len(probs))]
        if source.accepts(min(1, probs[token] / q[token]), depth, number):
            return number, token
        residual = [max(p - weight, 0) for p, weight in zip(probs, q, strict=True)]
        probs = normalised(residual) if sum(residual) > 0 else probs
    return None, source.draws(probs, depth)


def verify(
    probs: Callable[[int], Probs], draft: Draft, source: RandomSource, rule: NodeRule = verify_node
) -> tuple[list[int], list[int]]:
    """The accepted path, and its tokens and one more; ``probs`` are of what follows a node."""
    path, tokens, node = list[int](), list[int](), -1
    while True:
        children = draft.children(node)
        drawn = [(draft.tokens[child], draft.q[child] if draft.q else []) for child in children]
        accepted, token = rule(probs(node), drawn, draft.kind, source, len(path))
        tokens.append(token)
        if accepted is None:
            return path, tokens
        path.append(node := children[accepted])


def normalised(weights: List[Number]) -> Probs:
    """The weights divided by their sum; unchanged if the sum is 0."""
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else list(weights)


@dataclass(eq=False)
class Sequence:
    """Token ids and their pages: tokens from ``table.length`` on are still to be computed."""

    tokens: list[int]
    table: PageTable
    index: int
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_length: int = 0
    seed: int = 0
    active: bool = False
    finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        """The tokens of the current generation."""
        return self.tokens[self.prompt_length :]


Drafter = Callable[[Sequence], Draft]


class Engine:
    """Sequences that generate, fork and rewind over one paged cache."""

    def __init__(
        self, lm: CausalLM, num_pages: int, page_size: int, drafter: Drafter | None = None
    ) -> None:
        self.lm, self.pool = lm, PagePool(num_pages, page_size)
        self.storage = KvStorage(lm.num_layers, num_pages * page_size, lm.kv_heads, lm.dim)
        self.drafter: Drafter = drafter or (lambda sequence: Draft())
        self.sequences: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return any(sequence.active for sequence in self.sequences)

    def add(self, prompt_ids: List[int], params: SamplingParams) -> list[Sequence]:
        """Start ``params.n`` generations from one prompt."""
        samples = [self.open(prompt_ids, index) for index in range(params.n)]
        for sample in samples:
            self.resume(sample, params)
        return samples

    def open(self, prompt_ids: List[int], index: int = 0) -> Sequence:
        """A parked sequence with a prompt."""
        self.sequences.append(Sequence(list(prompt_ids), PageTable(self.pool), index))
        return self.sequences[-1]

    def resume(self, sequence: Sequence, params: SamplingParams) -> None:
        """Generate from a parked sequence; the logits of its last token are needed once more."""
        sequence.prompt_length, sequence.params = len(sequence.tokens), params
        sequence.seed, sequence.active = params.seed or 0, params.max_tokens != 0
        sequence.table.rewind(min(sequence.table.length, len(sequence.tokens) - 1))

    def extend(self, sequence: Sequence, token_ids: List[int]) -> None:
        """Put tokens at the end of a parked sequence."""
        sequence.tokens += token_ids

    def fork(self, sequence: Sequence, length: int | None = None) -> Sequence:
        """A parked copy of the first ``length`` tokens, sharing the pages that are computed."""
        child = self.open(sequence.tokens[:length])
        child.table = sequence.table.fork(min(sequence.table.length, len(child.tokens)))
        return child

    def rewind(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of a parked sequence from ``length`` on."""
        del sequence.tokens[length:]
        sequence.table.rewind(min(sequence.table.length, length))

    def close(self, sequence: Sequence) -> None:
        """Give back its pages."""
        sequence.active = False
        sequence.table.rewind(0)
        self.sequences.remove(sequence)

    def step(self) -> None:
        """Schedule all that generate, draft, one forward, verify, commit."""
        running = [sequence for sequence in self.sequences if sequence.active]
        drafts = [self.drafter(sequence) for sequence in running]
        rows = list(map(self._row, running, drafts))
        logits = self.lm.forward(rows, self.storage)
        for sequence, draft, row, scores in zip(running, drafts, rows, logits, strict=True):
            self._commit(sequence, draft, row, scores)

    def _row(self, sequence: Sequence, draft: Draft) -> Row:
        """Its tokens that are not computed, a chain, and after the last one the draft's nodes."""
        start = sequence.table.length
        new_tokens = sequence.tokens[start:]
        copies = sequence.table.append(len(new_tokens) + len(draft.tokens))
        self.storage.copy(copies, self.pool.page_size)
        nodes = (
            len(new_tokens) + parent for parent in draft.parents
        )  # the root is the last known one
        parents = (*range(-1, len(new_tokens) - 1), *nodes)
        return Row([*new_tokens, *draft.tokens], start, sequence.table, parents)

    def _commit(self, sequence: Sequence, draft: Draft, row: Row, logits: Tensor) -> None:
        """Verify, keep the accepted path, append its tokens and one more."""
        root = len(row.tokens) - len(draft.tokens) - 1

        def probs(node: int) -> Probs:
            drafted = [row.tokens[at] for at in row.path(root + 1 + node) if at > root]
            prompt, output = sequence.tokens[: sequence.prompt_length], sequence.output + drafted
            context = TokenContext(sequence.params, prompt, output, self.lm.eos_token_ids)
            return [*logits_to_probs(logits[root + 1 + node].tolist(), context)]

        source = RandomSource(sequence.seed, sequence.index, len(sequence.tokens))
        path, tokens = verify(probs, draft, source)
        self.storage.copy(sequence.table.keep_path(len(sequence.tokens), path))
        params = sequence.params
        ends = params.end_ids(self.lm.eos_token_ids)
        for token in tokens:
            sequence.tokens.append(token)
            if token in ends or len(sequence.output) == params.max_tokens:
                sequence.active = False
                sequence.finish_reason = FinishReason.STOP if token in ends else FinishReason.LENGTH
                break
        sequence.table.rewind(min(sequence.table.length, len(sequence.tokens) - 1))
