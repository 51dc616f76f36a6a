"""EAGLE-3's head: one Llama layer that reads three hidden states of the target and the next token.

Li et al., 2025 (arXiv 2503.01840). ``fc`` fuses the captured states; the layer's attention reads
the concatenation of the token's embedding and the state, each normed separately; a norm and a
projection to the draft vocabulary follow. The layer's output is fed back as the state of the next
token. Loads and saves the authors' layout (``midlayer.*``) and that of the speculators library
(``layers.0.*``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from typing_extensions import override

from forethought.kv.storage import LayerShape
from forethought.model import backends
from forethought.model.attention.base import ForwardPass
from forethought.model.causal_lm import CausalLM
from forethought.model.hidden_states import FINAL
from forethought.model.llama.layers import Norm, fused_norm, projection
from forethought.speculative.draft_module import DraftModule, ModuleOutput
from forethought.speculative.heads.checkpoint import Checkpoint, refused
from forethought.speculative.heads.layers import (
    Attend,
    DraftLayer,
    Linear,
    LlamaLayer,
    RmsNorm,
    layer_fields,
    layer_shape,
    llama_config,
    native_rotary,
)
from forethought.speculative.heads.module_parts import ModuleParts

Layout = Literal["eagle3", "speculators"]
"""The authors' checkpoints, or those of the speculators library, which vLLM loads."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_REFUSED = {"fc_norm": False, "parallel_drafting": False}
"""Config keys that change the architecture, and the only value that is computed here."""


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Layers that a new head captures: the authors', 2, L // 2 and L - 3.

    In a network of few layers these are moved apart as little as possible, within 1 to L.
    """
    first = max(1, min(2, num_layers - 2))
    middle = min(max(num_layers // 2, first + 1), max(num_layers - 1, first))
    last = min(max(num_layers - 3, middle + 1), num_layers)
    return tuple(dict.fromkeys((first, middle, last)))


def authors_layer_ids(num_layers: int) -> tuple[int, int, int] | None:
    """Layers that the authors' code captures; None where they are not three different ones."""
    first, middle, last = 2, num_layers // 2, num_layers - 3
    return (first, middle, last) if first < middle < last else None


@dataclass(frozen=True, slots=True)
class Eagle3Traits:
    """Differences between EAGLE-3 heads, beside the sizes of the layer."""

    draft_vocab_size: int
    target_hidden_size: int
    captures: int = 3
    """Number of states that ``fc`` fuses."""
    layer_ids: tuple[int, ...] | None = None
    """Layers whose input states they are, rising; None: not in the checkpoint."""
    nested_ids: tuple[int, ...] | None = field(default=None, compare=False)
    """What ``layer_ids`` were read from, if ``eagle_config`` alone has them."""
    norm_before_residual: bool = False
    """The layer's residual is the normed state, not the state."""
    norm_before_fc: bool = False
    """A norm is applied to the concatenated captured states."""
    norm_output: bool = False
    """The state that is fed back is the output of the last norm, not its input."""
    own_embedding: bool = False
    """It has an embedding of its own; otherwise it uses the target's."""

    def layer_ids_in(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers whose input states are captured, for a target with L = ``num_layers`` layers.

        The meaning of a layer id depends on where it is in the config:

        =====================================  =================================================
        ``eagle_aux_hidden_state_layer_ids``   an id v is
        =====================================  =================================================
        at the top (speculators, vLLM)         the state that enters layer v
        in ``eagle_config`` (SpecForge,        the output of layer v, which enters layer v + 1
        SGLang, ModelOpt)
        there, with v = L or as 2, L // 2,     the state that enters layer v: L is no layer, and
        L - 3                                  the others are the authors' own
        nowhere                                the authors' 2, L // 2, L - 3 as states that enter
        =====================================  =================================================

        Returns:
            Layers, or None: there are no ids, and L is below 7, where the authors' layers are not
            three.
        """
        if self.nested_ids is None:
            return self.layer_ids or authors_layer_ids(num_layers)
        if num_layers in self.nested_ids or self.nested_ids == authors_layer_ids(num_layers):
            return self.nested_ids
        return self.layer_ids


class Eagle3Layer(LlamaLayer):
    """The one layer; see the module's docstring."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """The weights, under the authors' names, and the forward that training differentiates.

    Args:
        config: of the layer; ``vocab_size`` is the target's.
        traits: its variant.
    """

    def __init__(self, config: LlamaConfig, traits: Eagle3Traits) -> None:
        super().__init__()
        self.config, self.traits = config, traits
        hidden, eps, wide = config.hidden_size, config.rms_norm_eps, traits.target_hidden_size
        wide *= traits.captures
        if traits.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if traits.norm_before_fc:
            self.input_norm = RmsNorm(wide, eps=eps)
        self.fc = Linear(wide, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RmsNorm(hidden, eps=eps)
        self.lm_head = Linear(hidden, traits.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", torch.zeros(traits.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(traits.draft_vocab_size))

    def set_vocabulary(self, ids: Tensor) -> None:
        """The target's ids of the draft vocabulary, int64 ``[draft_vocab_size]``, rising."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    @property
    def ids(self) -> Tensor:
        """int64 ``[draft_vocab_size]``: the target's id of each draft token; d2t are offsets."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, states: Tensor) -> Tensor:
        """Concatenated captured states ``[..., captures * target_hidden]`` -> ``[..., hidden]``."""
        fused: Tensor = self.fc(self.input_norm(states) if self.traits.norm_before_fc else states)
        return fused

    def forward(self, embedded: Tensor, states: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Predict the token after each token.

        Args:
            embedded: ``[..., hidden]``, the tokens.
            states: ``[..., hidden]``, fused ones of the tokens before them, or the head's own.
            attend: how the layer attends.

        Returns:
            The states for the tokens that follow ``[..., hidden]``, and logits over the draft
            vocabulary ``[..., draft_vocab_size]``.
        """
        states, exits = self.advance(embedded, states, attend)
        return states, self.lm_head(exits)

    def advance(self, embedded: Tensor, states: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, with the input of the output projection ``[..., hidden]`` in place of
        the logits.
        """
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        residual = normed if self.traits.norm_before_residual else states
        x = layer(torch.cat([layer.input_layernorm(embedded), normed], -1), residual, attend)
        exit_ = self.norm(x)
        return (exit_ if self.traits.norm_output else x), exit_

    @classmethod
    def load(cls, directory: Path) -> Eagle3Head:
        """Read a checkpoint of either layout, in float32.

        Raises:
            ModelError: it is missing, broken, or of an architecture that is not computed here.
        """
        stored = Checkpoint.read(directory)
        tensors = {
            name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): tensor
            for name, tensor in stored.tensors.items()
        }
        config = llama_config(directory, stored.config)
        traits = _traits(stored, config, tensors)
        with torch.device("meta"):
            shapes = cls(config, traits)
        _complete_vocabulary(directory, shapes, tensors)
        head = stored.build(lambda: cls(config, traits), tensors)
        if not torch.equal(head.ids[head.ids.argsort()], head.t2d.nonzero()[:, 0]):
            raise refused(directory, "d2t and t2d name different draft tokens")
        return head

    def save(
        self,
        directory: Path,
        layout: Layout = "eagle3",
        verifier: str = "",
        runs_in: torch.dtype | None = None,
    ) -> None:
        """Write it as :meth:`load` reads it, in the weights' dtype.

        Args:
            directory: created where needed.
            layout: of names and config.
            verifier: what the speculators layout calls the target.
            runs_in: the dtype that its config asks for; None: the weights' own.
        """
        tensors = dict(self.state_dict())
        config = _authors_config(self)
        if layout == "speculators":
            config = _speculators_config(self, verifier)
            tensors = {
                name.replace("midlayer.", "layers.0.", 1): tensor
                for name, tensor in tensors.items()
            }
        if runs_in is not None:
            config["torch_dtype"] = str(runs_in).removeprefix("torch.")
        Checkpoint(directory, config, tensors).write()


def eagle3_parts(head: Eagle3Head, max_positions: int) -> ModuleParts:
    """The head as a native module."""
    config, traits, layer = head.config, head.traits, head.midlayer
    return ModuleParts(
        layer,
        native_rotary(config, max_positions),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
        token_norm=layer.input_layernorm,
        state_norm=layer.hidden_norm,
        final_norm=head.norm,
        head=head.lm_head,
        embedding=head.embed_tokens if traits.own_embedding else None,
        norm_residual=traits.norm_before_residual,
        feeds_normed=traits.norm_output,
        entry=head.fc,
        entry_norm=head.input_norm if traits.norm_before_fc else None,
    )


def eagle3_network(head: Eagle3Head, lm: CausalLM) -> DraftModule:
    """The head over pages: in C++ where the target runs there, else in torch operations."""
    parts, shape = eagle3_parts(head, lm.max_positions), layer_shape(head.config)
    ids = None if head.traits.draft_vocab_size == lm.vocab_size else head.ids
    native = backends.cpu().draft_module(parts, lm, head.fc.weight.dtype, shape, ids)
    return native or Eagle3Network(head, lm)


class Eagle3Network(DraftModule):
    """An :class:`Eagle3Head` over pages, in few operations; see ``speculative.draft_module``.

    Args:
        head: in the dtype that it is to run in, on the device of the target.
        lm: the target.
    """

    forward_path = "torch"
    draft_chains = draft_trees = None

    def __init__(self, head: Eagle3Head, lm: CausalLM) -> None:
        traits, layer = head.traits, head.midlayer
        self._lm, self._own = lm, head.embed_tokens if traits.own_embedding else None
        self._layer = DraftLayer(layer, head.config, lm.max_positions)
        self._enter_norm = fused_norm(head.input_norm) if traits.norm_before_fc else None
        self._fuse = projection(head.fc.weight)
        norms = torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight])
        self._norms = Norm(norms, head.config.rms_norm_eps)
        self._norm, self._logits = fused_norm(head.norm), projection(head.lm_head.weight)
        self._norm_before_residual = traits.norm_before_residual
        self._norm_output = traits.norm_output
        self.dtype: torch.dtype = head.fc.weight.dtype
        self.shape: LayerShape = self._layer.shape
        self.windows: Sequence[int | None] = (None,)
        self.vocab_size = traits.draft_vocab_size
        self.ids = None if self.vocab_size == lm.vocab_size else head.ids

    @override
    def enter(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        return self._fuse(states if self._enter_norm is None else self._enter_norm(states))

    @override
    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        token_ids = forward_pass.batch.token_ids
        embedded = self._lm.embed(token_ids) if self._own is None else self._own(token_ids)
        normed = self._norms(torch.stack([embedded.to(self.dtype), states], 1))
        residual = normed[:, 1] if self._norm_before_residual else states
        x = self._layer(normed.flatten(1), residual, forward_pass)
        normed = self._norm(x)
        return ModuleOutput(normed if self._norm_output else x, self._logits(normed))


def _traits(stored: Checkpoint, config: LlamaConfig, tensors: Mapping[str, Tensor]) -> Eagle3Traits:
    nested = stored.config.get("eagle_config") or {}
    merged = stored.config | nested
    for name, value in _REFUSED.items():
        if merged.get(name, value) != value:
            raise refused(stored.directory, f"{name}={merged[name]!r} is not supported", "")
    missing = {"fc.weight", "lm_head.weight"} - set(tensors)
    stored.expect_none(missing, "lacks")
    layer_ids, nested_ids = _captured(stored, nested)
    wide = tensors["fc.weight"].shape[-1]
    target_hidden = merged.get("target_hidden_size") or config.hidden_size
    captures, rest = divmod(wide, target_hidden)
    if rest or not captures or (layer_ids and len(layer_ids) != captures):
        expected = f"{len(layer_ids)} states" if layer_ids else "whole states"
        raise refused(
            stored.directory, f"fc.weight reads {wide} values, not {expected} of {target_hidden}"
        )
    return Eagle3Traits(
        draft_vocab_size=merged.get("draft_vocab_size") or tensors["lm_head.weight"].shape[0],
        target_hidden_size=target_hidden,
        captures=captures,
        layer_ids=layer_ids,
        nested_ids=nested_ids,
        norm_before_residual=bool(merged.get("norm_before_residual", False)),
        norm_before_fc=bool(merged.get("norm_before_fc", False)),
        norm_output=bool(merged.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in tensors,
    )


def _captured(
    stored: Checkpoint, nested: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """``layer_ids`` and ``nested_ids`` of the traits, from the config and its ``eagle_config``."""
    entered = _layer_ids(stored, stored.config.get(_LAYER_IDS))
    inner = _layer_ids(stored, nested.get(_LAYER_IDS))
    top = None if entered is None else rising(entered)
    if inner is None:
        return top, None
    following = tuple(layer + 1 for layer in inner)
    if top is None:
        return following, inner
    if top not in (inner, following):
        raise refused(
            stored.directory,
            f"{_LAYER_IDS} are {list(top)}, and {list(inner)} in eagle_config: other layers",
            "Take the wrong ones out of its config.json",
        )
    return top, None


def _layer_ids(stored: Checkpoint, ids: Any) -> tuple[int, ...] | None:
    """In rising order, in which all engines concatenate the states."""
    if not ids:
        return None
    is_valid = isinstance(ids, list) and all(
        type(layer_id) is int and layer_id >= FINAL for layer_id in ids
    )
    if not is_valid or len(set(ids)) < len(ids):
        raise refused(stored.directory, f"{_LAYER_IDS}={ids!r} are not different layers")
    return tuple(sorted(ids))


def rising(layer_ids: Iterable[int]) -> tuple[int, ...]:
    """In the order in which the network computes them, the final norm's last."""
    return tuple(sorted(layer_ids, key=lambda layer_id: (layer_id == FINAL, layer_id)))


def _complete_vocabulary(directory: Path, head: Eagle3Head, tensors: dict[str, Tensor]) -> None:
    """Add t2d, and d2t where the draft vocabulary is the target's: checkpoints may lack them."""
    size = head.config.vocab_size
    if head.traits.draft_vocab_size == size:
        tensors.setdefault("d2t", torch.zeros(size, dtype=head.d2t.dtype))
    if "d2t" in tensors and "t2d" not in tensors:
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        if not bool(((ids >= 0) & (ids < size)).all()):
            raise refused(directory, f"its d2t names tokens that are none of the target's {size}")
        marks = torch.zeros(size, dtype=head.t2d.dtype)
        marks[ids] = True
        tensors["t2d"] = marks
    for name in ("d2t", "t2d"):
        if name in tensors:
            tensors[name] = tensors[name].to(head.get_buffer(name).dtype)


def _authors_config(head: Eagle3Head) -> dict[str, Any]:
    traits = head.traits
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_fields(head.config),
        **_flags(traits),
        "draft_vocab_size": traits.draft_vocab_size,
        "target_hidden_size": traits.target_hidden_size,
        **_entered_layer_ids(traits),
        "eagle_config": {"use_aux_hidden_state": True, **_layers_left(traits)},
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }


def _speculators_config(head: Eagle3Head, verifier: str) -> dict[str, Any]:
    traits = head.traits
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": traits.draft_vocab_size,
        "target_hidden_size": traits.target_hidden_size,
        **_entered_layer_ids(traits),
        **_flags(traits),
        "transformer_layer_config": layer_fields(head.config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }


def _entered_layer_ids(traits: Eagle3Traits) -> dict[str, Any]:
    """The key at the top of a config; see ``Eagle3Traits.layer_ids_in``."""
    assert traits.layer_ids is None or traits.layer_ids == rising(traits.layer_ids)
    return {} if traits.layer_ids is None else {_LAYER_IDS: list(traits.layer_ids)}


def _layers_left(traits: Eagle3Traits) -> dict[str, Any]:
    """The key in ``eagle_config``, which cannot express the final norm."""
    if traits.layer_ids is None or FINAL in traits.layer_ids:
        return {}
    return {_LAYER_IDS: [layer_id - 1 for layer_id in traits.layer_ids]}


def _flags(traits: Eagle3Traits) -> dict[str, bool]:
    names = ("norm_before_residual", "norm_before_fc", "norm_output")
    return {name: getattr(traits, name) for name in names}
