"""What is read off a module that has been loaded: sizes, positions, linears, ids of tokens."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from forethought.errors import ModelError
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.causal_lm import ModelTraits, WeightSize, weight_sizes
from forethought.model.checkpoint_module import CheckpointModule
from forethought.model.quantization import QuantizedLinear
from forethought.model.recurrent_layers import step_widths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def traits_of(
    module: PreTrainedModel | CheckpointModule,
    layers: tuple[LayerProfile, ...],
    vocab_size: int,
    state_bytes: int = 0,
) -> ModelTraits:
    """The traits of a module whose layers need ``layers`` of attention."""
    return ModelTraits(
        config=module.config,
        layers=layers,
        vocab_size=vocab_size,
        max_positions=_max_positions(module.config),
        eos_token_ids=_eos_token_ids(module),
        dtype=module.dtype,
        device=module.device,
        weights=_weight_sizes(module),
        linears=_linears(module),
        state_bytes=state_bytes,
    )


def _linears(module: PreTrainedModel | CheckpointModule) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears that an adapter may add to, by name."""
    if isinstance(module, CheckpointModule):
        return module.linears
    head = None
    with suppress(NotImplementedError, AttributeError):  # remote code has none
        head = module.get_output_embeddings()
    unseen = step_widths(module)  # multiplied by their weights, without a call
    return {
        name: (part.out_features, part.in_features)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | QuantizedLinear)
        and part is not head
        and part not in unseen
        and ".experts." not in name
    }


def _weight_sizes(module: PreTrainedModel | CheckpointModule) -> tuple[WeightSize, ...]:
    sizes = weight_sizes(module)
    if isinstance(module, CheckpointModule):  # its layers are read one by one, and alike
        sizes += weight_sizes(module.layer(0)) * module.config.num_hidden_layers
    return sizes


def _max_positions(config: Any) -> int:
    """Positions that a sequence may use without its rotary frequencies depending on the batch.

    Rotary scaling of types longrope and dynamic switches frequencies for the *whole batch* once any
    of its tokens is beyond the original context: a row's result would depend on the others. Up to
    the original context they are fixed, so such models are limited to it.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not limit:
        raise ModelError(
            "this model is not supported",
            "its config does not say how many positions it has (max_position_embeddings)",
            "Add max_position_embeddings to its config.json",
        )
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope] if "rope_type" in rope else [part for part in rope.values() if part]
    for part in parts:
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings") or limit
            if original < limit:
                logger.warning(
                    "context limited to %d of %d tokens: beyond, longrope makes the frequencies "
                    "of one sequence depend on the others in its batch",
                    original,
                    limit,
                )
            limit = min(limit, original)
    return int(limit)


def _eos_token_ids(module: PreTrainedModel | CheckpointModule) -> frozenset[int]:
    for source in (module.generation_config, module.config.get_text_config(decoder=True)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
