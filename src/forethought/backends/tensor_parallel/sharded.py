"""A model that is cut over ranks, as rank 0 sees it: network, KV storage and runner.

Rank 0 is the engine's process. It plans, drafts, verifies and samples as with a whole model.
Whatever changes keys and values goes through two classes, which tell the other ranks first:

* ``ShardedNetwork``: a forward. The others get the spans of the batch as a message, and its index
  tensors, drafted tokens on the device among them, by a broadcast. They run the layers; the hidden
  states are whole on every rank, and rank 0 alone computes logits.
* ``ShardedStorage``: pages copied, slots moved, cleared, written and read.

All that can be refused is refused before the others are told, so that no rank does what another one
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from forethought.backends.tensor_parallel.collectives import Collectives, ReducedProjection, Sums
from forethought.backends.tensor_parallel.ranks import Ranks
from forethought.errors import ModelError
from forethought.kv.storage import KvStorage, LayerShape
from forethought.kv.table import PageCopy, SlotMove
from forethought.model.adapter import Adapter
from forethought.model.attention.base import ForwardPass
from forethought.model.batch import Batch, Span
from forethought.model.causal_lm import CausalLM, Network
from forethought.model.device import free_gpu_memory
from forethought.model.llama.network import FusedNetwork
from forethought.model.runner import ModelRunner
from forethought.model.token_adapters import PlacedAdapter


def connect(network: FusedNetwork, sums: Sums) -> None:
    """Let the layers of a network that was built from a shard add up what the ranks compute."""
    for _, layer in network.layers:
        layer.out = ReducedProjection(layer.out, sums)
        layer.down = ReducedProjection(layer.down, sums)


@dataclass(slots=True)
class Member:
    """What a rank other than 0 computes with."""

    lm: CausalLM
    storage: KvStorage
    collectives: Collectives


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the layers over a batch of T tokens, whose index tensors are broadcast.

    Attributes:
        spans: of the batch; trees as NumPy arrays.
        num_tokens: T.
        num_logits: tokens whose logits rank 0 computes.
        layer_ids: hidden states that rank 0 captures.
    """

    spans: list[Span]
    num_tokens: int
    num_logits: int
    layer_ids: frozenset[int]

    @classmethod
    def of(cls, forward_pass: ForwardPass) -> Forward:
        """The forward that rank 0 is about to make."""
        batch = forward_pass.batch
        spans = [_with_tree(span, Tensor.numpy) for span in batch.spans]
        sizes = len(batch.token_ids), len(batch.logit_index)
        return cls(spans, *sizes, forward_pass.layer_ids)

    def run(self, member: Member) -> None:
        """Run the layers on another rank."""
        lm, network = member.lm, member.lm.network
        assert isinstance(network, FusedNetwork)
        size = 3 * self.num_tokens + self.num_logits
        indices = torch.empty(size, dtype=torch.int64, device=lm.device)
        member.collectives.broadcast(indices)
        spans = tuple(_with_tree(span, torch.from_numpy) for span in self.spans)
        batch = Batch.of_indices(indices, spans, self.num_logits)
        network.run_layers(lm.forward_pass(batch, member.storage, self.layer_ids))


def _with_tree(span: Span, convert: Callable[[Any], Any]) -> Span:
    """The span with its tree converted, if it has one."""
    return span if span.tree is None else replace(span, tree=convert(span.tree))


class ShardedNetwork(Network):
    """The network of rank 0; see :class:`~forethought.model.causal_lm.Network`.

    Args:
        network: built from rank 0's shard, with embeddings and output projection.
        ranks: the others.
    """

    def __init__(self, network: FusedNetwork, ranks: Ranks) -> None:
        self.own, self._ranks = network, ranks
        self.rotations = network.rotations

    @torch.inference_mode()
    @override
    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Raises EngineStopped where a rank has ended."""

        def compute() -> Tensor:
            self._ranks.collectives.broadcast(indices)
            return self.own(batch, forward_pass)

        indices = batch.indices()
        return self._ranks.run(Forward.of(forward_pass), compute)

    @override
    def embed(self, token_ids: Tensor) -> Tensor:
        return self.own.embed(token_ids)

    @override
    def unembed(self, states: Tensor) -> Tensor:
        return self.own.unembed(states)

    @override
    def place(self, adapter: Adapter, linears: Mapping[str, tuple[int, int]]) -> PlacedAdapter:
        """Raises ModelError: the matrices of adapters are not cut to ranks."""
        raise adapter.unfit(
            "with tensor_parallel_size its linears are cut to ranks",
            "Leave tensor_parallel_size out",
        )


@dataclass(frozen=True, slots=True)
class StorageCall:
    """Call a method of the KV storage that changes each rank's part of some slots."""

    method: str
    argument: Sequence[Any]

    def run(self, member: Member) -> None:
        """Change another rank's part."""
        getattr(member.storage, self.method)(self.argument)


@dataclass(frozen=True, slots=True)
class Resize:
    """Allocate pages."""

    num_pages: int

    def run(self, member: Member) -> int:
        """Allocate those of another rank; how many, as a reply."""
        member.storage.resize(self.num_pages)
        return self.num_pages


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Take part in reading the keys and values of some tokens."""

    slots: list[int]

    def run(self, member: Member) -> None:
        """Give another rank's part."""
        _whole(member.storage.read_slots(self.slots), member.collectives)


@dataclass(frozen=True, slots=True)
class WriteSlots:
    """Take part in writing keys and values of some tokens, which rank 0 broadcasts."""

    slots: list[int]

    def run(self, member: Member) -> None:
        """Store another rank's part."""
        shapes = member.storage.stack_shapes(len(self.slots))
        member.storage.write_slots(self.slots, _parts(shapes, None, member))


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Tell the free memory of a GPU."""

    def run(self, member: Member) -> int:
        """That of another rank, in bytes, as a reply."""
        return free_gpu_memory(member.lm.device)


def _whole(parts: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """Stacks ``[layers, tokens, kv_heads, dim]`` with the heads of all ranks, in CPU memory.

    Args:
        parts: the same of this rank's heads.
        collectives: of this rank.
    """
    shard, gathered = collectives.shard, list[Tensor]()
    for part in parts:
        layers, tokens, heads, dim = part.shape
        size = layers, tokens, heads * shard.size, dim
        whole = torch.zeros(size, dtype=part.dtype, device=collectives.device)
        shard.part(whole, 2).copy_(part)
        gathered.append(collectives.all_reduce(whole).cpu())
    return gathered


def _parts(
    shapes: Sequence[torch.Size], stacks: Sequence[Tensor] | None, member: Member
) -> list[Tensor]:
    """This rank's heads of stacks that rank 0 broadcasts.

    Args:
        shapes: of the parts.
        stacks: with the heads of all ranks; None: on another rank.
        member: this rank.
    """
    collectives, gathered = member.collectives, list[Tensor]()
    for index, (layers, tokens, heads, dim) in enumerate(shapes):
        size = layers, tokens, heads * collectives.shard.size, dim
        whole = torch.empty(size, dtype=member.storage.dtype, device=collectives.device)
        if stacks is not None:
            whole.copy_(stacks[index])
        gathered.append(collectives.shard.part(collectives.broadcast(whole), 2))
    return gathered


class ShardedStorage(KvStorage):
    """The KV storage of rank 0: it has its KV heads, and the other ranks do what it does.

    Args:
        ranks: the others.
        lm: rank 0's model.
        page_size: tokens of a page.
    """

    def __init__(self, ranks: Ranks, lm: CausalLM, page_size: int) -> None:
        self.ranks, self._lm = ranks, lm
        super().__init__(lm.layer_shapes, 1, page_size, lm.dtype, lm.device)

    @property
    @override
    def device_bytes_per_page(self) -> int:
        on_one_device = self.device.type == "cpu"  # in the same memory
        return self.bytes_per_page * (self.ranks.size if on_one_device else 1)

    @override
    def free_memory_elsewhere(self) -> list[int]:
        return self.ranks.ask(FreeMemory()) if self.device.type == "cuda" else []

    @property
    @override
    def whole_layers(self) -> tuple[LayerShape, ...]:
        size = self.ranks.size
        return tuple(replace(layer, kv_heads=layer.kv_heads * size) for layer in self.layers)

    @override
    def resize(self, num_pages: int) -> None:
        """Raises EngineStopped where another rank has too little memory."""
        super().resize(num_pages)
        self.ranks.ask(Resize(num_pages))

    @override
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self._call("copy_pages", copies, super().copy_pages)

    @override
    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        self._call("move_slots", moves, super().move_slots)

    @override
    def clear_slots(self, slots: Sequence[int]) -> None:
        self._call("clear_slots", slots, super().clear_slots)

    def _call(self, method: str, argument: Sequence[Any], local: Callable[[Any], None]) -> None:
        if argument:
            self.ranks.run(StorageCall(method, argument), lambda: local(argument))

    @override
    def read_slots(self, slots: Sequence[int]) -> list[Tensor]:
        """Copies with the KV heads of all ranks."""
        numbers, local_values = list(slots), super().read_slots(slots)
        return self.ranks.run(
            ReadSlots(numbers), lambda: _whole(local_values, self.ranks.collectives)
        )

    @override
    def write_slots(self, slots: Sequence[int], stacks: Sequence[Tensor]) -> None:
        """Each rank stores its KV heads."""
        numbers, shapes, write = list(slots), self.stack_shapes(len(slots)), super().write_slots
        member = Member(self._lm, self, self.ranks.collectives)
        self.ranks.run(WriteSlots(numbers), lambda: write(numbers, _parts(shapes, stacks, member)))


class ShardedRunner(ModelRunner):
    """Runs rows through rank 0's model, and with it through those of the other ranks.

    Args:
        lm: rank 0's, whose network is a ``ShardedNetwork``.
        storage: rank 0's.
        ranks: the others.
    """

    def __init__(self, lm: CausalLM, storage: ShardedStorage, ranks: Ranks) -> None:
        super().__init__(lm, storage)
        self.ranks = ranks

    @override
    def check_running(self) -> None:
        self.ranks.check()

    @property
    @override
    def failure(self) -> str | None:
        return self.ranks.failure

    @override
    def scratch_storage(self, num_pages: int) -> KvStorage:
        raise ModelError(
            "a model over several ranks computes in its KV cache alone",
            "the other ranks have no second storage",
            "Serve it with tensor_parallel_size=1 for embeddings",
        )

    @override
    def shutdown(self) -> None:
        """End the processes of the other ranks."""
        self.ranks.close()
