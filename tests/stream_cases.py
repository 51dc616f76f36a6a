"""Streams of all kinds, whose outputs are compared between an engine and replicas."""

from __future__ import annotations

from typing import Any


def stream_cases(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Params of streams of up to ``num_tokens`` tokens, by what is special about each."""
    shape = {"regex": f"[a-z ]{{{num_tokens // 2},{3 * num_tokens // 4}}}"}
    cases: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.0, "seed": 5},
        "samples": {"temperature": 1.0, "seed": 6, "n": 3},
        "penalties": {"seed": 7, "frequency_penalty": 0.4, "min_tokens": 3 * num_tokens // 4},
        "stop": {"temperature": 1.3, "seed": 11, "stop": ["zzq"]},
        "logprobs": {"temperature": 1.0, "seed": 9, "logprobs": 1},
        "grammar": {"seed": 2, "guided_decoding": shape, "ignore_eos": False},
        "thinking": {"temperature": 1.0, "seed": 4, "thinking_budget": 3 * num_tokens // 8},
    }
    common = {"temperature": 0.9, "max_tokens": num_tokens, "ignore_eos": True}
    return {name: common | fields for name, fields in cases.items()}
