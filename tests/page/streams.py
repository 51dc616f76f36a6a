"""Runs as the server streams them, for the page's tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from page.stand_in import PAUSE, Item, finished, started


def stage(at: float, branch: str, name: str, why: str = "", /, **fields: Any) -> dict[str, Any]:
    return {
        "type": "stage",
        "at": at,
        "branch": branch,
        "name": name,
        "why": why,
        "fields": fields,
    }


def delta(at: float, branch: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "delta", "at": at, "branch": branch, "text": text, "num_tokens": 1, **more}


def answer(text: str) -> dict[str, Any]:
    return {"type": "answer", "text": text}


def votes(body: dict[str, Any]) -> Iterable[Item]:
    """Two samples that vote, with a pause in the middle; plainly: one text."""
    if body["method"] == "plain":
        return [started(), answer("six"), finished("six", at=2.0, tokens=40)]
    return [
        started("majority_vote", "ngram"),
        stage(0.0, "0", "spawned", "Plain"),
        stage(0.0, "1", "spawned", "Plain"),
        delta(0.1, "0", "the first"),
        delta(0.2, "1", "the second"),
        stage(0.2, "1", "probed", answer="6"),
        PAUSE,
        stage(0.4, "0", "voted", answer="6"),
        stage(0.4, "0", "ended", "done"),
        stage(0.5, "1", "pruned", "it cannot change the vote"),
        stage(0.5, "1", "ended", "cancelled"),
        answer("It is \\boxed{6}."),
        finished("It is \\boxed{6}.", at=1.0, tokens=30),
    ]


def echo(body: dict[str, Any]) -> Iterable[Item]:
    text = f"answer to {body['input'][-1]['content']}"
    return [started(body["method"]), answer(text), finished(text)]
