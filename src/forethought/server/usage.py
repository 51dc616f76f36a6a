"""Token counts of a request, as OpenAI's APIs write them."""

from __future__ import annotations

from typing import Any

from forethought.outputs import SpeculationMetrics, Usage


def chat_usage(
    usage: Usage, metrics: SpeculationMetrics, reasoning_tokens: int | None
) -> dict[str, Any]:
    """``usage`` of chats and completions, which adds up all that was run inside.

    Args:
        usage: of the whole request.
        metrics: of its drafts.
        reasoning_tokens: of the thoughts in the answers; None: there is no such part.
    """
    completion: dict[str, Any] = {
        "accepted_prediction_tokens": metrics.accepted,
        "rejected_prediction_tokens": metrics.drafted - metrics.accepted,
        "drafted_tokens": metrics.drafted,
        "discarded_tokens": usage.discarded,
    }
    if reasoning_tokens is not None:
        completion["reasoning_tokens"] = reasoning_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": completion,
    }


def response_usage(
    usage: Usage, metrics: SpeculationMetrics, reasoning_tokens: int
) -> dict[str, Any]:
    """``usage`` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "drafted_tokens": metrics.drafted,
            "accepted_tokens": metrics.accepted,
        },
        "total_tokens": usage.total_tokens,
    }


def speculation(metrics: SpeculationMetrics) -> dict[str, Any]:
    """The acceptance of a request's drafts, as events write it."""
    return {
        "steps": metrics.steps,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_by_position": metrics.accepted_by_position,
    }
