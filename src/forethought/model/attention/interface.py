"""The link between transformers' attention layers and our backends.

Two functions are registered with transformers' attention interface. ``forethought`` serves every
forward: the layer's q, k, v go to the :class:`ForwardPass` that was passed with the call.
``forethought_probe`` serves one small forward at load, the capability probe, which finds out what
the model needs of attention: shapes, windows, softcap, sinks; there is no table of models. What no
backend supports (a mask that is neither causal nor of windows or chunks, an unknown argument, a
layer that does not call the interface) is refused there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from forethought.errors import ModelError
from forethought.kv.storage import LayerShape
from forethought.model.attention.base import KEYWORD, ForwardPass, Scoring
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.attention.window import first_seen

ATTENTION = "forethought"
PROBE = "forethought_probe"

# Arguments of attention layers that need nothing further of a backend: those we use, those that
# only training uses, and those that describe the batch, which the forward pass already does.
_UNDERSTOOD = frozenset(
    {"scaling", "softcap", "s_aux", "sliding_window", "is_causal", KEYWORD}
    | {"dropout", "training", "num_items_in_batch", "output_router_logits"}
    | {"position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values"}
    | {"output_attentions", "output_hidden_states", "return_dict"}
)

# Fill values of the probe's mask where it is no window.
_CAUSAL, _UNSUPPORTED = 0, torch.iinfo(torch.int64).min


@dataclass(slots=True)
class CapabilityProbe:
    """The profiles of the layers that called attention in the probe, by module, in order."""

    layers: dict[nn.Module, LayerProfile] = field(default_factory=dict)

    def profile(self, num_layers: int, num_recurrent: int) -> tuple[LayerProfile, ...]:
        """The layers with attention, in order, whose modules are numbered so (``kv_index``).

        Raises ModelError unless each of ``num_layers`` called attention, or, of a model with
        recurrent layers, one of them did.
        """
        if not self.layers or (len(self.layers) != num_layers and not num_recurrent):
            raise _refusal(
                f"of its {num_layers} layers {len(self.layers)} call attention through "
                f"transformers' attention interface, and {'one' if num_recurrent else 'all'} must"
            )
        for kv_index, module in enumerate(self.layers):
            module.kv_index = kv_index  # type: ignore[assignment]
        return tuple(self.layers.values())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve one attention layer, ``module``, in a forward.

    ``query``, ``key`` and ``value`` are ``[1, heads or kv_heads, T, dim]``; ``kwargs`` have
    scaling, softcap, s_aux and the forward pass, which has the masks. Returns
    ``[1, T, heads, value_dim]``, and None in place of weights.
    """
    forward_pass: ForwardPass = kwargs[KEYWORD]
    scoring = Scoring(
        _scale(query, kwargs.get("scaling")), kwargs.get("softcap"), kwargs.get("s_aux")
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.kv_index  # numbered by the probe
    return forward_pass.attend(layer, q, k, v, scoring).unsqueeze(0), None


def probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Record what one attention layer needs; the result is zeros of the right shape."""
    capability_probe: CapabilityProbe = kwargs[KEYWORD]
    unknown = sorted(
        name
        for name, argument in kwargs.items()
        if argument is not None and name not in _UNDERSTOOD
    )
    if unknown:
        raise _refusal(f"its attention takes {', '.join(unknown)}, which no backend supports")
    has_index = getattr(module, "layer_idx", None) is not None
    if not has_index or module in capability_probe.layers or attention_mask is None:
        raise _refusal(
            "its attention layers do not each call attention once, with their index and mask"
        )
    window = int(attention_mask.flatten()[0])
    if window == _UNSUPPORTED or attention_mask.dtype != torch.int64:
        raise _refusal("its attention mask is neither causal nor of windows or chunks")
    capability_probe.layers[module] = LayerProfile(
        shape=LayerShape(key.shape[1], key.shape[3], value.shape[3]),
        heads=query.shape[1],
        window=None if window == _CAUSAL else window,
        softcap=kwargs.get("softcap") is not None,
        sinks=kwargs.get("s_aux") is not None,
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def probe_mask(
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    config: Any,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Find the window of a model's mask function, on positions far beyond the probe.

    Returns int64 ``[1, 1, q_length, kv_length]`` filled with the window, 0 for a causal mask,
    ``_UNSUPPORTED`` for anything else: the layer's mask is the only way to identify the layer.
    """
    last = int(getattr(config, "max_position_embeddings", None) or 4096) + 1

    def visible(position: int, keys: Tensor) -> Tensor:
        query, zero = torch.tensor(position), torch.tensor(0)
        return torch.as_tensor(mask_function(zero, zero, query, keys)).expand(len(keys))

    try:
        code = _window_of(visible, last)
    except (IndexError, RuntimeError):  # it depends on the batch: not a window
        code = _UNSUPPORTED
    return torch.full((1, 1, q_length, kv_length), code, device=device)


def _window_of(visible: Callable[[int, Tensor], Tensor], last: int) -> int:
    """The window of a mask, of positions up to ``last``, as ``probe_mask`` returns it.

    Args:
        visible: position of a token, positions -> bool, which of them it attends to.
    """
    beginning = torch.tensor([0])
    whole = bisect_left(range(last + 1), True, key=lambda at: not bool(visible(at, beginning)))
    window = _CAUSAL  # ``whole`` is the first position that does not see the beginning
    if 0 < whole <= last:
        window = whole if bool(visible(whole, torch.tensor([1]))) else -whole
    keys = torch.arange(last + 2)
    for position in (last, last - 1, last // 2, last // 3, whole - 1, whole):
        first = max(0, first_seen(position, window or None))
        expected = (keys >= first) & (keys <= position)
        if 0 <= position <= last and not torch.equal(visible(position, keys), expected):
            return _UNSUPPORTED
    return window


def _scale(query: Tensor, scaling: float | None) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _refusal(why: str) -> ModelError:
    return ModelError(
        "this model is not supported", why, "Choose a causal language model with plain attention"
    )


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PROBE, probe)
AttentionMaskInterface.register(PROBE, probe_mask)
