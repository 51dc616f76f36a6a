"""A causal language model whose attention runs over pages.

``CausalLM`` holds the network (native, fused, or the transformers module) and
what the engine must know about it; batch and cache are arguments of each forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from forethought.errors import ModelError
from forethought.kv.recurrent import RecurrentStorage
from forethought.kv.storage import KvStorage, LayerShape
from forethought.model.adapter import Adapter
from forethought.model.attention.base import KEYWORD, AttentionBackend, ForwardPass, PagedPass
from forethought.model.attention.concurrent import ConcurrentPass
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.attention_layers import AttentionLayers
from forethought.model.batch import Batch
from forethought.model.cache_positions import PackedLengths, reads_cache_length
from forethought.model.decoder_layers import DecoderLayers
from forethought.model.hidden_states import capturing_hidden_states, decoder_layers, decoder_of
from forethought.model.llama.layers import projection
from forethought.model.quantization import QuantizedLinear
from forethought.model.quantized_experts import QuantizedExperts
from forethought.model.recurrent_layers import RecurrentLayers
from forethought.model.token_adapters import LowRankProduct, PlacedAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Network(Protocol):
    """Token ids to logits; attention is computed by the forward pass."""

    rotations: Tensor | None
    """Cosines and signed sines ``[positions, 2, rotary_dim]`` that rotate queries and keys of
    all layers (``llama.layers.rotary_table``); None: not known, or not the same of all."""

    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        """Logits ``[R, vocab]`` in the model's dtype, without gradients."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""
        ...

    def unembed(self, states: Tensor) -> Tensor:
        """Final-norm states ``[T, hidden]`` -> logits ``[T, vocab]``."""
        ...

    def place(self, adapter: Adapter, linears: Mapping[str, tuple[int, int]]) -> PlacedAdapter:
        """An adapter that fits the model's ``linears``, as this network multiplies by it.

        Raises ModelError if it cannot.
        """
        ...


class ExpertFile(Protocol):
    """Experts of a network that are in a file, and a part of them in memory."""

    @property
    def share_in_file(self) -> float:
        """Of the experts, that are not in memory at a time."""
        ...

    def read_speed(self) -> float:
        """Bytes per second at which experts are read."""
        ...


class LayerFile(Protocol):
    """Layers of a network that are in a file, and are read in every step."""

    @property
    def file_bytes(self) -> int:
        """Of these layers."""
        ...

    def read_speed(self) -> float:
        """Bytes per second at which layers are read."""
        ...


@dataclass(frozen=True, slots=True)
class TransformersNetwork(Network):
    """The transformers module, with attention over pages installed."""

    module: PreTrainedModel
    recurrent: RecurrentLayers | None = None
    """Its recurrent layers; None: it has none."""
    attention: AttentionLayers | None = None
    """Its attention layers in C++; None: torch computes all of them."""
    decoder: DecoderLayers | None = None
    """Its decoder layers in one call; None: their parts are called one by one."""
    whole: Any = None
    """All of it in one call (``NativeBackend.module_forward``), which gives the same bits; None:
    the module is called."""
    counts_positions: bool = field(init=False)
    """Whether its layers count positions from the length of a cache."""
    rotations: None = field(default=None, init=False)
    _layers: list[nn.Module] = field(default_factory=list, init=False, repr=False)
    """The decoder layers, found when they are first wanted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts_positions", reads_cache_length(self.module))

    @torch.inference_mode()
    @override
    def __call__(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        if self.is_one_call(batch):
            return self._in_one_call(batch, forward_pass)
        decoder = decoder_of(self.module)
        with (
            capturing_hidden_states(decoder, forward_pass, self._find_layers),
            self._adapting(batch),
            self._over_states(batch, forward_pass),
            self._attending(forward_pass) as attending,
            nullcontext() if self.decoder is None else self.decoder.over(forward_pass),
        ):
            output = self.module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_index,
                **self._cache_of(batch),
                **{KEYWORD: attending},
            )
        return output.logits[0]

    def _cache_of(self, batch: Batch) -> dict[str, Any]:
        """The argument from which layers count positions, if they do."""
        return {"past_key_values": PackedLengths(batch.positions)} if self.counts_positions else {}

    def _attending(self, forward_pass: ForwardPass) -> AbstractContextManager[ForwardPass]:
        """What layers attend by."""
        if self.attention is None:
            return nullcontext(forward_pass)
        return self.attention.over(forward_pass)

    @contextmanager
    def _adapting(self, batch: Batch) -> Iterator[None]:
        """Have the linears of the batch's adapters add what these do."""
        adapters = batch.adapters
        if adapters is None:
            yield
            return

        of_tokens = functools.cache(adapters.of_tokens)

        def add(linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x, tokens = args[0].flatten(0, -2), None
            if self.recurrent is not None:
                tokens = self.recurrent.computed_tokens
            num_tokens = len(batch.token_ids if tokens is None else tokens)
            assert len(x) == num_tokens, "a linear that sees each token once"
            present = adapters if tokens is None else of_tokens(tokens)
            present.add(linear, x, output.view(len(x), -1))

        linears = {linear for group in adapters.groups for linear in group.adapter.parts}
        hooks = [linear.register_forward_hook(add) for linear in linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @override
    def place(self, adapter: Adapter, linears: Mapping[str, tuple[int, int]]) -> PlacedAdapter:
        module = self.module
        parts = {
            module.get_submodule(name): LowRankProduct.of(
                addition.to(module.device, module.dtype), projection
            )
            for name, addition in adapter.additions.items()
        }
        return PlacedAdapter(adapter.name, adapter.digest, parts)

    def _over_states(self, batch: Batch, forward_pass: ForwardPass) -> AbstractContextManager[None]:
        if self.recurrent is None:
            return nullcontext()
        assert isinstance(forward_pass, PagedPass)
        assert isinstance(forward_pass.storage, RecurrentStorage)
        return self.recurrent.over(batch, forward_pass.storage)

    def is_one_call(self, batch: Batch) -> bool:
        """Whether ``whole`` computes a batch: nothing is added to its linears."""
        if self.whole is None or batch.adapters is not None:
            return False
        return not self.whole.are_hooked()

    def _in_one_call(self, batch: Batch, forward_pass: ForwardPass) -> Tensor:
        assert self.recurrent is not None
        with self._over_states(batch, forward_pass):
            logits: Tensor = self.whole.logits(forward_pass, self.recurrent.token_table)
        return logits

    def _find_layers(self) -> list[nn.Module]:
        if not self._layers:
            self._layers.extend(decoder_layers(decoder_of(self.module)))
        return self._layers

    @override
    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.module.get_input_embeddings()(token_ids)
        return embedded

    @override
    def unembed(self, states: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(states)
        return logits


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Of a weight that is multiplied."""

    num_elements: int
    num_bytes: int
    """As it is held: 4-bit values in half a byte, with scales and zero points."""
    is_expert: bool = False
    """Whether it holds experts, of which a token uses a share."""


def weight_sizes(module: PreTrainedModel) -> tuple[WeightSize, ...]:
    """Of all weights that are multiplied. An embedding is read one row per token, so it counts only
    where it is the output projection.
    """
    embedding = head = None
    with suppress(NotImplementedError, AttributeError):  # remote code, and layers, have neither
        embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    looked_up = getattr(embedding, "weight", None)
    experts = {
        linear
        for layer in module.modules()
        if isinstance(layer, QuantizedExperts)
        for linear in layer.linears()
    }
    quantised = [
        WeightSize(layer.weight.shape.numel(), layer.weight.num_bytes, layer in experts)
        for layer in module.modules()
        if isinstance(layer, QuantizedLinear) and layer.weight is not None
    ]
    convolutions = {part.weight for part in module.modules() if isinstance(part, nn.Conv1d)}
    plain = [
        WeightSize(
            parameter.numel(),
            parameter.nbytes,
            is_expert=parameter.dim() == 3 and parameter not in convolutions,
        )
        for parameter in module.parameters()
        if parameter is not looked_up and parameter.dim() > 1
    ]
    if getattr(head, "weight", None) is looked_up and isinstance(looked_up, Tensor):
        plain.append(WeightSize(looked_up.numel(), looked_up.nbytes))
    return (*quantised, *plain)


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Properties of a loaded model.

    Attributes:
        config: the transformers configuration.
        layers: what each attention layer needs, found by the probe.
        vocab_size: width of the logits.
        max_positions: tokens that a sequence may hold.
        eos_token_ids: ids that end a sequence.
        dtype: of weights, keys and values.
        device: of the same.
        weights: sizes of those that are multiplied.
        linears: outputs and inputs of those that an adapter may add to, by name: all that see each
            token once, but for the output projection.
    """

    config: Any
    layers: tuple[LayerProfile, ...]
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    weights: tuple[WeightSize, ...]
    linears: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    state_bytes: int = 0
    """Of the recurrent layers, after one token; 0: there are none."""


@dataclass(frozen=True, slots=True)
class ForwardPath:
    """Which implementation computes the layers of a model; it is one for all of them.

    Attributes:
        requested: by the user: ``auto``, ``native`` or ``torch``.
        kind: ``native`` (C++), ``fused`` (few torch operations) or ``transformers`` (its module).
        reason: why not ``native``; None where it is.
    """

    requested: str = "torch"
    kind: str = "transformers"
    reason: str | None = None


class CausalLM:
    """A network, its attention backend and its traits."""

    def __init__(
        self,
        network: Network,
        backend: AttentionBackend,
        traits: ModelTraits,
        path: ForwardPath | None = None,
    ) -> None:
        self.network, self.backend, self.traits = network, backend, traits
        self.path = path or ForwardPath()
        self.config = traits.config
        self.vocab_size, self.max_positions = traits.vocab_size, traits.max_positions
        self.eos_token_ids = traits.eos_token_ids
        self.dtype, self.device = traits.dtype, traits.device
        self.layer_shapes: list[LayerShape] = [layer.shape for layer in traits.layers]
        self.windows = [layer.window for layer in traits.layers]

    def forward(self, batch: Batch, storage: KvStorage) -> Tensor:
        """Run the batch, store its keys and values, return float32 logits ``[R, vocab]``."""
        return self.run(self.forward_pass(batch, storage))

    def forward_with_hidden_states(
        self, batch: Batch, storage: KvStorage, layer_ids: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, with hidden states by layer index ``[T, hidden]``."""
        forward_pass = self.forward_pass(batch, storage, layer_ids)
        return self.run(forward_pass), forward_pass.states

    def forward_pass(
        self, batch: Batch, storage: KvStorage, layer_ids: frozenset[int] = frozenset()
    ) -> PagedPass:
        """What ``run`` takes: over a batch, with the hidden states to capture."""
        if all(span.concurrent is None for span in batch.spans):
            return PagedPass(batch, storage, self.backend, self.windows, layer_ids)
        assert self.network.rotations is not None
        return ConcurrentPass(batch, storage, self.backend, self.network.rotations, layer_ids)

    def check_concurrent(self) -> None:
        """Raises ModelError unless rows may attend to other sequences
        (``model.attention.concurrent``): layers are recurrent or have sliding windows, or how they
        rotate queries is not known.
        """
        windows = any(window is not None for window in self.windows)
        if self.state_bytes or windows or self.network.rotations is None:
            why = f"how its layers rotate queries is not known ({self.path.kind} forward)"
            if self.state_bytes:
                why = "recurrent layers keep a state of one sequence"
            elif windows:
                why = "layers have sliding windows"
            raise ModelError(
                f"sequences of a {self.config.model_type} model cannot attend to each other",
                why,
                "Use a Llama-like model with rotary embeddings, or exchange text instead",
            )

    def place(self, adapter: Adapter) -> PlacedAdapter:
        """An adapter for rows of batches. Raises ModelError if it does not fit the model."""
        adapter.check_fits(self.traits.linears)
        with torch.inference_mode():
            return self.network.place(adapter, self.traits.linears)

    def run(self, forward_pass: ForwardPass) -> Tensor:
        """Float32 logits ``[R, vocab]`` of a forward pass."""
        logits = self.network(forward_pass.batch, forward_pass)
        return logits if logits.dtype == torch.float32 else logits.float()

    @property
    def expert_store(self) -> ExpertFile | None:
        """Its experts, if they are in a file."""
        store: ExpertFile | None = getattr(self.network, "experts", None)
        return store

    @property
    def layer_window(self) -> LayerFile | None:
        """Its layers that are in a file, if there are any."""
        window: LayerFile | None = getattr(self.network, "window", None)
        return window

    @property
    def state_bytes(self) -> int:
        """Of the recurrent layers' states after one token; 0: there are none."""
        return self.traits.state_bytes

    def storage(self, num_pages: int, page_size: int, **settings: Any) -> KvStorage:
        """A storage of its keys and values, and of its states; ``settings`` as of KvStorage."""
        arguments = self.layer_shapes, num_pages, page_size, self.dtype, self.device
        if not self.state_bytes:
            return KvStorage(*arguments, **settings)
        return RecurrentStorage(*arguments, state_bytes=self.state_bytes, **settings)

    @property
    def weight_bytes(self) -> int:
        """Of the weights as they are held; of torch's networks, those that are multiplied."""
        held: int | None = getattr(self.network, "num_bytes", None)
        return sum(weight.num_bytes for weight in self.traits.weights) if held is None else held

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.get_text_config(decoder=True).hidden_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 ``[...]`` -> the input embeddings ``[..., hidden]``, as drafting heads share them,
        without a scaling that the model applies outside its embedding module.
        """
        return self.network.embed(token_ids)

    def unembed(self, states: Tensor) -> Tensor:
        """Final-norm states ``[T, hidden]`` -> logits ``[T, vocab]`` in their dtype, by the output
        projection only, without the softcap that some models apply to logits.
        """
        return self.network.unembed(states)

    def output_projection(self, ids: Tensor | None = None) -> Tensor:
        """The rows of the output projection for tokens ``ids``, int64 ``[D]``, or for all: ``[D,
        hidden]`` in the model's dtype, without a bias.
        """
        unit = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
        weight = (self.unembed(unit) - self.unembed(torch.zeros_like(unit[:1]))).T
        return weight.contiguous() if ids is None else weight[ids]
