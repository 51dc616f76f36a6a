"""What a decode step costs at least, and what the engine takes: the roofline of a model.

A step of B sequences with a context of C tokens reads every weight that it uses and the keys and
values of B * C tokens, and makes two operations per weight and token, and per element of keys,
queries and values in attention. The *floor* is the longest of these times at the bandwidth and the
peak that this machine reaches in a simple read and a large product (the roofline model of Williams,
Waterman and Patterson, 2009). Where experts are left in a file, the reading of those that are not
in memory is a third one, as all of it can overlap (MoE-Lens, 2025). What the engine takes beyond
the floor is split into time inside the network and outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from forethought.config.sampling import SamplingParams
from forethought.errors import ParameterError
from forethought.evaluation.report import aligned, new_figure
from forethought.kv.storage import KvStorage
from forethought.model.attention.window import Window, first_seen
from forethought.saved_file import saving

if TYPE_CHECKING:
    from forethought.llm.llm import LLM
    from forethought.model.causal_lm import CausalLM

READ_BYTES = 2**28
"""Bytes of the buffer that is read to measure bandwidth: more than any cache holds."""
PRODUCT_SIZE = 1024
"""Rows and columns of the matrices that are multiplied to measure the peak."""
NUM_DECODED = 17
"""Tokens of a timed generation: the first comes from the prefill."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Of one layer, per token of context."""

    window: Window
    kv_bytes: int
    operations: int

    def beyond(self, context: int) -> int:
        """Tokens of the context that are not read."""
        return max(0, first_seen(context - 1, self.window))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes and operations of one model.

    Attributes:
        dense_bytes: of the weights that every step reads.
        expert_bytes: of the weights of all experts.
        active_experts: share of the experts that one token uses; 1 without experts.
        dense_weights: number of weights among ``dense_bytes`` that are multiplied.
        expert_weights: the same of all experts.
        kv_bytes: of the keys and values of one token in all layers.
        attention_operations: per token and token of context, in all layers.
        activation_bytes: read and written per token, between the products of all layers.
        windowed: the layers whose attention reads a window of the context.
        state_bytes: of the states of recurrent layers, which a token reads and writes.
        experts_in_file: share of the experts that are not in memory at a time.
        layer_file_bytes: of the layers that are in a file, which every step reads.
    """

    dense_bytes: int
    expert_bytes: int
    active_experts: float
    dense_weights: int
    expert_weights: int
    kv_bytes: int
    attention_operations: int
    activation_bytes: int
    windowed: tuple[AttentionCost, ...] = ()
    state_bytes: int = 0
    experts_in_file: float = 0.0
    layer_file_bytes: int = 0

    @classmethod
    def of(cls, lm: CausalLM, kv_dtype: torch.dtype | None = None) -> ModelCost:
        """Of a loaded model, with its weights as they are held; ``kv_dtype``: in which keys and
        values are, None: in the model's.
        """
        size = lm.dtype.itemsize
        dense = [weight for weight in lm.traits.weights if not weight.is_expert]
        experts = [weight for weight in lm.traits.weights if weight.is_expert]
        text = lm.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        widths = [shape.key_dim + shape.value_dim for shape in lm.layer_shapes]
        layers = [
            AttentionCost(
                window, KvStorage.page_bytes([shape], 1, kv_dtype or lm.dtype), 2 * heads * width
            )
            for window, shape, width in zip(lm.windows, lm.layer_shapes, widths, strict=True)
        ]
        return cls(
            dense_bytes=sum(weight.num_bytes for weight in dense),
            expert_bytes=sum(weight.num_bytes for weight in experts),
            active_experts=_active_experts(text),
            dense_weights=sum(weight.num_elements for weight in dense),
            expert_weights=sum(weight.num_elements for weight in experts),
            kv_bytes=sum(layer.kv_bytes for layer in layers),
            attention_operations=sum(layer.operations for layer in layers),
            activation_bytes=_activations(text, heads, widths) * size,
            windowed=tuple(layer for layer in layers if layer.window is not None),
            state_bytes=lm.state_bytes,
            experts_in_file=0.0 if lm.expert_store is None else lm.expert_store.share_in_file,
            layer_file_bytes=0 if lm.layer_window is None else lm.layer_window.file_bytes,
        )

    def step_bytes(self, batch: int, context: int) -> float:
        """Bytes that one decode step of ``batch`` sequences moves at least."""
        weights = self.dense_bytes + self._step_expert_bytes(batch)
        beyond = sum(layer.beyond(context) * layer.kv_bytes for layer in self.windowed)
        per_token = self.activation_bytes + 2 * self.state_bytes
        return weights + batch * (context * self.kv_bytes - beyond + per_token)

    def step_file_bytes(self, batch: int) -> float:
        """Bytes of them that are read from a file, where all experts are as likely."""
        return self.layer_file_bytes + self.experts_in_file * self._step_expert_bytes(batch)

    def _step_expert_bytes(self, batch: int) -> float:
        touched = 1.0 - (1.0 - self.active_experts) ** batch if self.expert_bytes else 0.0
        return touched * self.expert_bytes

    def step_operations(self, batch: int, context: int) -> float:
        """Multiplications and additions of the step."""
        weights = self.dense_weights + self.active_experts * self.expert_weights
        beyond = sum(layer.beyond(context) * layer.operations for layer in self.windowed)
        return batch * (2.0 * weights + context * self.attention_operations - beyond)


@dataclass(frozen=True, slots=True)
class Machine:
    """What simple code reaches on the device."""

    bytes_per_second: float
    """Of a sum over a buffer that no cache holds."""
    operations_per_second: float
    """Of a product of two square matrices in the model's dtype."""
    file_bytes_per_second: float | None = None
    """Of reading the file that a model's experts or layers are in; None: there is none."""

    @classmethod
    def measure(cls, lm: CausalLM) -> Machine:
        """Measure them for a model, with as many threads as torch has."""
        device, dtype, file = lm.device, lm.dtype, lm.expert_store or lm.layer_window
        buffer = torch.ones(READ_BYTES // 4, device=device)
        matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device).to(dtype)
        read = _seconds(buffer.sum, device)
        product = _seconds(lambda: matrix @ matrix, device)
        file_speed = None if file is None else file.read_speed()
        return cls(READ_BYTES / read, 2 * PRODUCT_SIZE**3 / product, file_speed)


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """One decode step; seconds are medians over the rounds."""

    batch: int
    context: int
    """Tokens in the cache of each sequence when decoding began."""
    memory_floor: float
    """Seconds to read what the step reads."""
    compute_floor: float
    """Seconds to compute what the step computes."""
    step: float
    """Seconds that the engine takes."""
    network: float
    """Of these, inside the network."""
    file_floor: float = 0.0
    """Seconds to read experts or layers from a file."""

    @property
    def floor(self) -> float:
        """Seconds of an ideal step."""
        return max(self.memory_floor, self.compute_floor, self.file_floor)

    @property
    def bound(self) -> str:
        """What the floor is of."""
        floors = {"memory": self.memory_floor, "compute": self.compute_floor}
        floors["file"] = self.file_floor
        return max(floors, key=lambda name: floors[name])

    @property
    def outside(self) -> float:
        """Seconds outside the network: planning, sampling, verification, delivery."""
        return max(0.0, self.step - self.network)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; times in milliseconds."""
        times = {
            name: round(seconds * 1e3, 4)
            for name, seconds in asdict(self).items()
            if name not in ("batch", "context")
        }
        return {
            "batch": self.batch,
            "context": self.context,
            **{f"{name}_ms": value for name, value in times.items()},
            "bound": self.bound,
            "share_of_floor": round(self.floor / self.step, 4),
        }


def measure_steps(
    llm: LLM, batches: Sequence[int], contexts: Sequence[int], rounds: int
) -> Iterator[tuple[int, int, float, float]]:
    """Time decode steps: yields (batch, context, seconds of a step, of them in the network).

    Prompts of ``context`` ids are prefilled once; each round then decodes after them, once one
    token and once several, and takes the difference.

    Raises ParameterError if a context and the decoded tokens do not fit into the model.
    """
    limit = llm.max_length
    for context in contexts:
        if context + NUM_DECODED > limit:
            raise ParameterError(
                f"invalid context {context}",
                f"with {NUM_DECODED} tokens after it, it is longer than {limit}",
                "Choose a shorter one",
            )
    for context in contexts:
        for batch in batches:
            prompts = _prompts(llm, batch, context)
            _decode(llm, prompts, 1)
            differences = [_difference(llm, prompts) for _ in range(rounds)]
            steps, networks = zip(*differences, strict=True)
            yield batch, context, median(steps), median(networks)


def roofline_row(
    cost: ModelCost, machine: Machine, timed: tuple[int, int, float, float]
) -> RooflineRow:
    """The floor beside a time of ``measure_steps``."""
    batch, context, step, network = timed
    return RooflineRow(
        batch,
        context,
        cost.step_bytes(batch, context) / machine.bytes_per_second,
        cost.step_operations(batch, context) / machine.operations_per_second,
        step,
        network,
        cost.step_file_bytes(batch) / (machine.file_bytes_per_second or 1.0),
    )


def roofline_table(rows: Sequence[RooflineRow]) -> str:
    """Times in milliseconds."""
    head = ("batch", "context", "floor", "bound", "step", "network", "outside", "of floor")
    cells: list[tuple[str, ...]] = [head]
    for row in rows:
        times = (row.step, row.network, row.outside)
        cells.append(
            (
                str(row.batch),
                str(row.context),
                f"{row.floor * 1e3:.3f}",
                row.bound,
                *(f"{seconds * 1e3:.3f}" for seconds in times),
                f"{row.floor / row.step:.0%}",
            )
        )
    return aligned(cells, left_columns=(3,))


def save_roofline(rows: Sequence[RooflineRow], path: Path, title: str) -> Path:
    """Plot steps and floors over the batch size, one pair of lines per context, as a PNG."""
    figure = new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    for index, context in enumerate(sorted({row.context for row in rows})):
        points = sorted((row for row in rows if row.context == context), key=lambda row: row.batch)
        batches, colour = [row.batch for row in points], f"C{index}"
        axes.plot(batches, [row.step * 1e3 for row in points], "o-", color=colour)
        axes.plot(batches, [row.floor * 1e3 for row in points], "--", color=colour)
        axes.annotate(f"context {context}", (batches[-1], points[-1].step * 1e3), color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences in a step")
    axes.set_ylabel("milliseconds (dashed: the floor)")
    axes.set_title(title)
    with saving(path, "plot") as file:
        figure.savefig(file, dpi=150)
    return path


def _active_experts(text: Any) -> float:
    used = getattr(text, "num_experts_per_tok", None)
    total = next(
        (
            count
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (count := getattr(text, name, None))
        ),
        None,
    )
    return min(1.0, used / total) if used and total else 1.0


def _activations(text: Any, heads: int, widths: Sequence[int]) -> int:
    """Elements written and read between the products of a token: residual, heads, gate and up."""
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    per_layer: list[int] = [4 * text.hidden_size + heads * width + 3 * inner for width in widths]
    return 2 * sum(per_layer)


def _prompts(llm: LLM, batch: int, context: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(context)
    vocab = len(llm.tokenizer)
    prompts: list[list[int]] = torch.randint(0, vocab, (batch, context), generator=source).tolist()
    return prompts


def _decode(llm: LLM, prompts: list[list[int]], count: int) -> tuple[float, float]:
    """Seconds of all steps, and of them in the network, for ``count`` tokens of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    before = llm.stats
    llm.generate(prompts, params)
    after = llm.stats
    return (
        after.step_seconds - before.step_seconds,
        after.forward_seconds - before.forward_seconds,
    )


def _difference(llm: LLM, prompts: list[list[int]]) -> tuple[float, float]:
    one, several = _decode(llm, prompts, 1), _decode(llm, prompts, NUM_DECODED)
    step, network = (
        max(1e-9, longer - shorter) / (NUM_DECODED - 1)
        for longer, shorter in zip(several, one, strict=True)
    )
    return step, network


def _seconds(run: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """The shortest of several runs."""
    durations = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - began)
    return min(durations)
