"""Token counts of a request, as OpenAI's APIs write them."""

from __future__ import annotations

from typing import Any

from forethought.outputs import SpeculationMetrics, Usage


def cached_prompt_tokens(usage: Usage) -> int:
    """Prompt tokens found in a prefix cache. ``usage`` counts them again where a sequence was
    preempted, and goes on.
    """
    return min(usage.cached, usage.prompt_tokens)


def chat_usage(
    usage: Usage,
    metrics: SpeculationMetrics,
    reasoning_tokens: int | None,
    spent_budget: str | None = None,
) -> dict[str, Any]:
    """``usage`` of chats and completions, which adds up all that was run inside.

    Args:
        reasoning_tokens: of the thoughts in all that was run inside; None: there is no such part.
        spent_budget: the limit of the budget that ended it; None: none.
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
        "prompt_tokens_details": {"cached_tokens": cached_prompt_tokens(usage)},
        "completion_tokens_details": completion,
        **_spent(spent_budget),
    }


def response_usage(
    usage: Usage,
    metrics: SpeculationMetrics,
    reasoning_tokens: int,
    spent_budget: str | None = None,
) -> dict[str, Any]:
    """``usage`` of a response. Args: as ``chat_usage``."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": cached_prompt_tokens(usage),
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "drafted_tokens": metrics.drafted,
            "accepted_tokens": metrics.accepted,
            "discarded_tokens": usage.discarded,
        },
        "total_tokens": usage.total_tokens,
        **_spent(spent_budget),
    }


def _spent(budget: str | None) -> dict[str, Any]:
    """That the budget has ended the request, and which of its limits."""
    return {} if budget is None else {"spent_budget": budget}


def speculation(metrics: SpeculationMetrics) -> dict[str, Any]:
    """The acceptance of a request's drafts, as events write it."""
    return {
        "steps": metrics.steps,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_by_position": metrics.accepted_by_position,
    }
