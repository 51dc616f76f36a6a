"""How the configuration of an architecture is made, and what several of them have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forethought.gguf.metadata import Metadata
from forethought.gguf.rope import Rotation


@dataclass(frozen=True)
class Architecture:
    """How the configuration of an architecture is made.

    Attributes:
        model_type: of transformers.
        module: transformers' class of the causal language model.
        settings: makes what the model has beside the common sizes.
        honoured: settings that change what is computed and that it makes something of.
        rotation: of positions; None: ``settings`` says it, or there is none.
    """

    model_type: str
    module: str
    settings: Callable[[Metadata], dict[str, Any]]
    honoured: frozenset[str] = frozenset()
    rotation: Rotation | None = "whole"


def expert_sizes(metadata: Metadata) -> dict[str, Any]:
    """Of the routed experts in mixtures of Qwen."""
    down = metadata.file.tensors.get("blk.0.ffn_down_exps.weight")
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size(
            "expert_feed_forward_length", down.shape[-1] if down else None
        ),
    }


def shared_expert_size(metadata: Metadata) -> dict[str, Any]:
    """Of the expert of all tokens in mixtures of Qwen."""
    down = metadata.file.tensors.get("blk.0.ffn_down_shexp.weight")
    default = down.shape[-1] if down else None
    size = metadata.size("expert_shared_feed_forward_length", default)
    return {"shared_expert_intermediate_size": size}
