"""Log-probabilities as OpenAI's chats and completions write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forethought.outputs import Logprob, TokenLogprobs

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(
    entries: Sequence[TokenLogprobs], ids: Sequence[int], top: int
) -> list[dict[str, Any]]:
    """One item per token.

    Args:
        entries: by position.
        ids: the tokens chosen; empty where they are not known: the first of an entry is it.
        top: alternatives per token.
    """
    return [
        {
            **_named(_chosen(entry, ids, number)),
            "top_logprobs": [_named(each) for each in _ranked(entry)[:top]],
        }
        for number, entry in enumerate(entries)
        if entry
    ]


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None], ids: Sequence[int], top: int, offset: int
) -> dict[str, Any]:
    """Four lists with one item per token; those of a prompt's first token are None.

    Args:
        entries: by position; None: unknown.
        ids: the tokens.
        top: alternatives per token.
        offset: characters in front of the first token.
    """
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for number, entry in enumerate(entries):
        chosen = _chosen(entry, ids, number) if entry else None
        text = "" if chosen is None else chosen.token or ""
        found["tokens"].append(text)
        found["token_logprobs"].append(None if chosen is None else _finite(chosen.logprob))
        ranked = {each.token or "": _finite(each.logprob) for each in _ranked(entry or {})[:top]}
        if chosen is not None and top:  # OpenAI lists the token itself too
            ranked.setdefault(text, _finite(chosen.logprob))
        found["top_logprobs"].append(ranked or None)
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def _chosen(entry: TokenLogprobs, ids: Sequence[int], number: int) -> Logprob:
    known = entry.get(ids[number]) if number < len(ids) else None
    return known or next(iter(entry.values()))


def _ranked(entry: TokenLogprobs) -> list[Logprob]:
    return sorted(entry.values(), key=lambda each: -each.logprob)


def _named(entry: Logprob) -> dict[str, Any]:
    text = entry.token or ""
    return {
        "token": text,
        "logprob": _finite(entry.logprob),
        "bytes": list(text.encode(errors="replace")),
    }


def _finite(value: float) -> float:
    return max(value, _LOWEST)
