"""Recurrent layers of transformers' modules over the rows of a batch.

A module of transformers computes a run of tokens of each of B equally long sequences, from the
states before it (``Cache.get_conv_state``, ``get_recurrent_state``), and leaves the states after
it. The rows of a batch are cut into such runs:

* a node of a draft, and a decode, is a run of one token from the state after its parent. Those of
  one depth are computed together, so a draft is computed as plain decoding would, and the state
  after every node is there when some of them are accepted: nothing has to be undone;
* a prefill is a run up to the next multiple of ``checkpoint_tokens`` positions, wherever the prompt
  was cut. Modules of Mamba-1 begin every run of several tokens with no state: their prompts are one
  run, and what is added to a sequence goes token by token.

States are found in, and kept by, the storage (``kv.recurrent``).

On a CPU the layers are computed in C++ (``NativeBackend.recurrence``), on CUDA those of the gated
delta rule and Mamba-2 by kernels (``GraphBackend.recurrence``): all tokens of a batch in one call,
one run after the other. They are tried beside their modules first.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.kv.recurrent import LayerState, RecurrentStorage, State
from forethought.model import backends
from forethought.model.batch import Batch, Span
from forethought.model.device import torch_alone
from forethought.model.quantization import QuantizedLinear
from forethought.model.recurrence import Recurrence, TokenTable
from forethought.transformers_loading import without_kernel_advice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHE_NAMES = ("cache_params", "past_key_values")
"""Names of the argument that brings the states to a module."""


class _Origin(NamedTuple):
    """Where the state before a run is: stored, or after another token of the batch."""

    stored: State | None
    token: int = -1


_NOTHING = _Origin(None)
"""The beginning of a sequence."""


@dataclass(slots=True)
class _Run:
    """Equally long runs of B rows that are computed together.

    Attributes:
        tokens: packed indices of each row, in order.
        origins: of each row; either all or none are ``_NOTHING``.
    """

    tokens: list[list[int]]
    origins: list[_Origin]


class _ModuleCache:
    """The states of one layer for the rows of a run, as its module asks for them."""

    def __init__(self, states: Sequence[LayerState] | None) -> None:
        # Modules write over the states that they get: these are copies, also of a single row's.
        self._now: LayerState = {}
        for key in states[0] if states else ():
            self._now[key] = torch.cat([state[key] for state in states or ()])

    def rows(self) -> list[LayerState]:
        """The states of each row."""
        size = len(next(iter(self._now.values())))
        if size == 1:
            return [self._now]
        return [{k: v[row : row + 1].clone() for k, v in self._now.items()} for row in range(size)]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._now.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Inputs ``[B, channels, n]`` of a convolution -> with those before them, of which the last
        ``conv_kernel_size`` are kept.
        """
        before = self._now.get(("conv", state_idx))
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is not None:
            inputs = torch.cat([before, conv_states], -1)
        else:
            inputs = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._now["conv", state_idx] = inputs[..., -width:].contiguous()
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self._now["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int, state_idx: int = 0) -> bool:
        return False


_Forward = Callable[[Tensor, _ModuleCache], Tensor]
"""Inputs ``[B, n, hidden]`` and the states before them, which it updates -> the same shape."""


class _RecurrentPass:
    """The runs of a batch, and the states after them; ``continues`` says whether runs of several
    tokens go on from a state.
    """

    def __init__(
        self, batch: Batch, storage: RecurrentStorage, num_layers: int, continues: bool
    ) -> None:
        self._storage, self._num_layers, self._continues = storage, num_layers, continues
        self._slots: list[int] = batch.slot_numbers.tolist()
        self._after: dict[int, Any] = {}
        """By packed index, the states of the layers after a token."""
        self._passing = set[int]()
        """The tokens whose states are needed by the next one of a layer, and not kept."""
        stages: list[list[tuple[list[int], _Origin]]] = []
        for span in batch.spans:
            for stage, run in self._runs_of(span):
                stages += [[] for _ in range(len(stages), stage + 1)]
                stages[stage].append(run)
        self.runs = [run for stage in stages for run in _grouped(stage)]
        self.computed_tokens: tuple[int, ...] | None = None
        """Packed indices of the run that is computed, row by row; None: none is."""

    def compute(self, layer: int, forward: _Forward, x: Tensor) -> Tensor:
        """x ``[1, T, hidden]`` -> the same, through a layer, run by run."""
        output = torch.empty_like(x)
        for run in self.runs:
            states = None if run.origins[0] is _NOTHING else self._before(run, layer)
            index = torch.tensor(run.tokens, device=x.device)
            cache = _ModuleCache(states)
            self.computed_tokens = tuple(itertools.chain.from_iterable(run.tokens))
            output[0, index] = forward(x[0, index], cache)
            for tokens, state in zip(run.tokens, cache.rows(), strict=True):
                self._after[tokens[-1]][layer] = state
        for token in self._passing:
            self._after[token][layer] = {}
        self.computed_tokens = None
        return output

    def keep(self) -> None:
        """The forward is complete: store its states."""
        states = self._storage.states
        states.drop(self._slots)
        for token, state in self._after.items():
            if token not in self._passing:
                states.put(self._slots[token], state)
        self._storage.forget()

    def _before(self, run: _Run, layer: int) -> list[LayerState]:
        return [
            self._after[origin.token][layer] if origin.stored is None else origin.stored[layer]
            for origin in run.origins
        ]

    def _runs_of(self, span: Span) -> Iterator[tuple[int, tuple[list[int], _Origin]]]:
        """The runs of a row, each with its stage: all it depends on are in earlier ones."""
        begin, prefix = span.start, span.kv_length - span.length
        origin = _NOTHING if prefix == 0 else _Origin(self._stored(span, prefix - 1))
        if span.num_nodes:
            for node, (depth, parent) in enumerate(_parents(span)):
                before = origin if parent < 0 else _Origin(None, begin + parent)
                yield depth, self._run([begin + node], before)
            return
        step, first, stage = self._storage.checkpoint_tokens, 0, 0
        if not self._continues:
            step = 1 if prefix else span.length
        while first < span.length:
            last = min(span.length, first + step - (prefix + first) % step)
            yield stage, self._run([*range(begin + first, begin + last)], origin)
            if last < span.length and (prefix + last) % self._storage.checkpoint_tokens:
                self._passing.add(begin + last - 1)
            origin, first, stage = _Origin(None, begin + last - 1), last, stage + 1

    def _run(self, tokens: list[int], origin: _Origin) -> tuple[list[int], _Origin]:
        self._after[tokens[-1]] = self._new_state()
        return tokens, origin

    def _new_state(self) -> State:
        return [{} for _ in range(self._num_layers)]

    def _stored(self, span: Span, position: int) -> State:
        page, offset = divmod(position, self._storage.page_size)
        slot = span.pages[page] * self._storage.page_size + offset
        assert slot in self._storage.states, "the scheduler has rewound the row to a stored state"
        return self._storage.states.get(slot)


class _BackendPass(_RecurrentPass):
    """The runs of a batch by a backend, where a layer computes all of them at once."""

    def __init__(self, batch: Batch, storage: RecurrentStorage, recurrence: Recurrence) -> None:
        self._recurrence = recurrence
        super().__init__(batch, storage, len(recurrence), continues=True)
        rows = [span.start for span in batch.spans]
        self.table: TokenTable = recurrence.table(len(self._slots), [*rows, len(self._slots)])
        for run in self.runs:
            for tokens, origin in zip(run.tokens, run.origins, strict=True):
                before = origin.stored
                if origin.token >= 0:
                    before = self._after[origin.token]
                self.table.add(tokens, before, self._after[tokens[-1]])

    @override
    def compute(self, layer: int, forward: _Forward, x: Tensor) -> Tensor:
        return self._recurrence.compute(layer, x, self.table)

    @override
    def _new_state(self) -> State:
        return self._recurrence.new_state()


def _grouped(stage: Sequence[tuple[list[int], _Origin]]) -> Iterator[_Run]:
    """Single tokens together, longer runs and first tokens of sequences one by one."""
    single = [run for run in stage if len(run[0]) == 1 and run[1] is not _NOTHING]
    if single:
        yield _Run([tokens for tokens, _ in single], [origin for _, origin in single])
    for tokens, origin in stage:
        if len(tokens) > 1 or origin is _NOTHING:
            yield _Run([tokens], [origin])


def _parents(span: Span) -> Iterator[tuple[int, int]]:
    """The depth of each new token of a row, from 0, and the token before it, -1 for none."""
    if span.tree is None:
        yield from ((node, node - 1) for node in range(span.length))
        return
    for node, ancestors in enumerate(span.tree.tolist()):
        path = [other for other in range(node) if ancestors[other]]
        yield len(path), path[-1] if path else -1


class RecurrentLayers:
    """The recurrent layers of a module, computed row by row from stored states.

    Args:
        modules: the layers, in order, whose ``forward`` is replaced by one that does so.
        x: ``[1, 3, hidden]``, any input of them.
        is_native: compute them in C++, if that can be done.
        has_kernels: compute them by kernels of a GPU, if that can be done.

    Attributes:
        state_bytes: of their states after one token.
        native: the layers in C++; None: kernels or their modules compute them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        x: Tensor,
        is_native: bool = False,
        has_kernels: bool = False,
    ) -> None:
        self._num_layers, self.state_bytes = len(modules), 0
        self._now: _RecurrentPass | None = None
        self._continues = True
        self.native: Recurrence | None = None
        self._kernels: Recurrence | None = None
        if is_native:
            self.native = _tried(backends.cpu().recurrence(modules), modules, x)
        if has_kernels:
            self._kernels = _tried(backends.cuda().recurrence(modules), modules, x)
        for layer, part in enumerate(modules):
            forward = _with_cache(part)
            states = _states_after(forward, x[:, :1], None)
            _states_after(forward, x[:, 1:2], states)
            self.state_bytes += sum(state.nbytes for state in states.values())
            self._continues &= _continues(forward, x[:, 1:], states)
            part.forward = self._forward_of(layer, forward)  # type: ignore[method-assign]
        for recurrence in (self.native, self._kernels):
            if recurrence is not None:
                self.state_bytes = recurrence.state_bytes

    @classmethod
    def of(
        cls, module: PreTrainedModel, is_native: bool = False, has_kernels: bool = False
    ) -> RecurrentLayers | None:
        """Those of a module of transformers; None: it has none. Other arguments are as above."""
        modules = find_recurrent_layers(module)
        if not modules:
            return None
        hidden_size = module.config.get_text_config(decoder=True).hidden_size
        x = torch.linspace(-1, 1, 3 * hidden_size, device=module.device, dtype=module.dtype)
        with without_kernel_advice():
            return cls(modules, x.view(1, 3, hidden_size), is_native, has_kernels)

    @property
    def is_native(self) -> bool:
        """Whether they are computed in C++."""
        return self.native is not None

    @property
    def token_table(self) -> Any:
        """The ``TokenTable`` of the batch, where a backend computes the layers."""
        assert isinstance(self._now, _BackendPass)
        return self._now.table

    @property
    def computed_tokens(self) -> tuple[int, ...] | None:
        """Packed indices of the tokens that a layer computes together, in order; None outside of
        the layers.
        """
        return None if self._now is None else self._now.computed_tokens

    @contextmanager
    def over(self, batch: Batch, storage: RecurrentStorage) -> Iterator[None]:
        """While a batch is computed: states come from the storage, and are kept there at the
        end.
        """
        recurrence = self.native or self._kernels
        if recurrence is not None:
            self._now = _BackendPass(batch, storage, recurrence)
        else:
            self._now = _RecurrentPass(batch, storage, self._num_layers, self._continues)
        try:
            with torch_alone() if self.native is not None else nullcontext():
                yield
            self._now.keep()
        finally:
            self._now = None

    def _forward_of(self, layer: int, forward: _Forward) -> Callable[..., Tensor]:
        def compute(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            assert self._now is not None, "the layer is computed within ``over``"
            return self._now.compute(layer, forward, hidden_states)

        return compute


def _with_cache(part: nn.Module) -> _Forward:
    """The module as a function of inputs and states."""
    forward, name = part.forward, _cache_name(part)
    limit = _step_limit(part)
    if limit is None:
        return lambda x, cache: forward(x, **{name: cache})
    entering: nn.Module = part.get_submodule("in_proj")

    def limited(x: Tensor, cache: _ModuleCache) -> Tensor:
        if x.shape[1] > 1:  # the module limits them
            y: Tensor = forward(x, **{name: cache})
            return y
        hook = entering.register_forward_hook(limit)  # after those of adapters
        try:
            return forward(x, **{name: cache})
        finally:
            hook.remove()

    return limited


def _step_limit(part: Any) -> Callable[..., None] | None:
    """A forward hook of the ``in_proj`` of Mamba-2 that limits the widths of steps, the last
    outputs; None: they have no limit.

    Modules limit the steps of a run of several tokens, and not the one of a token that follows a
    state: without this a token would depend on the tokens that are computed with it.
    """
    low, high = getattr(part, "time_step_limit", None) or (0.0, math.inf)
    if (low, high) == (0.0, math.inf):
        return None
    bias: Tensor = part.dt_bias.detach()
    limits = torch.tensor([low, high], dtype=torch.float64, device=bias.device)
    inverse = limits + (-torch.expm1(-limits)).log()  # of softplus
    scale = getattr(part, "mup_vector", torch.ones_like(bias)).flatten()[-len(bias) :]
    lowest, highest = ((inverse[:, None] - bias) / scale).unbind()

    def limit(linear: nn.Module, args: Any, output: Tensor) -> None:
        steps = output[..., -len(bias) :]
        steps.copy_(steps.clamp(lowest.to(steps.dtype), highest.to(steps.dtype)))

    return limit


def _states_after(forward: _Forward, x: Tensor, before: LayerState | None) -> LayerState:
    """The states after a run x ``[1, n, hidden]`` that follows the states before it."""
    cache = _ModuleCache([before] if before else None)
    forward(x, cache)
    [states] = cache.rows()
    return states


def _tried(
    recurrence: Recurrence | None, modules: Sequence[nn.Module], x: Tensor
) -> Recurrence | None:
    """The layers of a backend, if they compute what their modules do, of a run and a token after
    it.
    """
    if recurrence is None:
        return None
    for layer, part in enumerate(modules):
        if not (_agrees(recurrence, layer, part, x) or _agrees_unrounded(recurrence, part, x)):
            return None
    return recurrence


def _agrees(recurrence: Recurrence, layer: int, part: nn.Module, x: Tensor) -> bool:
    following = x[:, :1]
    forward, cache = _with_cache(part), _ModuleCache(None)
    expected = torch.cat([forward(x, cache), forward(following, cache)], 1)
    [state] = cache.rows()
    return recurrence.agrees(layer, torch.cat([x, following], 1), expected, state)


def _agrees_unrounded(recurrence: Recurrence, part: nn.Module, x: Tensor) -> bool:
    """The same in float32 with dequantised weights. Where products round their inputs to 8 bits, an
    input that differs in its last bit may be rounded to the next integer.
    """
    names = [n for n, child in part.named_modules() if isinstance(child, QuantizedLinear)]
    if x.dtype == torch.float32 and not names:
        return False
    exact = copy.deepcopy(part).float()
    for name in names:
        exact.set_submodule(name, _dequantized(exact.get_submodule(name)))
    described = type(recurrence).of([exact])
    return described is not None and _agrees(described, 0, exact, x.float())


def _dequantized(linear: Any) -> nn.Linear:
    """A quantised linear in float32."""
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    plain.weight = nn.Parameter(linear.weight.dequantize().float(), requires_grad=False)
    if linear.bias is not None:
        plain.bias = nn.Parameter(linear.bias.float(), requires_grad=False)
    return plain


def _continues(forward: _Forward, x: Tensor, before: LayerState) -> bool:
    """Whether a run of several tokens goes on from the recurrent state before it: another one makes
    a difference.
    """
    other = {key: state * 1e4 if key[0] == "recurrent" else state for key, state in before.items()}
    after, changed = _states_after(forward, x, before), _states_after(forward, x, other)
    recurrent = [key for key in before if key[0] == "recurrent"]
    return all(not torch.equal(after[key], changed[key]) for key in recurrent)


def find_recurrent_layers(module: nn.Module) -> list[nn.Module]:
    """Its modules with a convolution over the tokens that take their states from a cache."""
    return [part for part in module.modules() if _is_recurrent(part)]


def step_widths(module: nn.Module) -> set[nn.Module]:
    """The linears of Mamba-1 that give the width of a step: they are small, and layers multiply by
    their weights themselves.
    """
    layers = find_recurrent_layers(module)
    return {child for part in layers for name, child in part.named_children() if name == "dt_proj"}


def _is_recurrent(part: nn.Module) -> bool:
    if not hasattr(part, "layer_idx"):
        return False
    has_convolution = any(isinstance(child, nn.Conv1d) for child in part.children())
    return has_convolution and _cache_name(part) in inspect.signature(part.forward).parameters


def _cache_name(part: nn.Module) -> str:
    parameters = inspect.signature(type(part).forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), "")
