"""Forks that wait for KV which their parent is still computing.

A fork shares the first ``shared`` tokens of its parent. If the parent has computed them, their
pages are shared at once; else the fork becomes a dependent, and shares them as soon as they are
there. Nothing is computed twice, and the parent never notices. Knows nothing about queues.
"""

from __future__ import annotations

from forethought.engine.sequence import Sequence, Status


def depend(child: Sequence, parent: Sequence, shared: int) -> None:
    """``child`` begins with the first ``shared`` tokens of ``parent``."""
    child.parent, child.shared = parent, shared
    parent.dependents.append(child)
    attach_ready(parent)


def attach_ready(parent: Sequence, all_of_them: bool = False) -> None:
    """Give dependents the KV they wait for, if it is there or will not come any more.

    Args:
        parent: whose dependents.
        all_of_them: give every dependent what there is now; the parent is about to change.
    """
    for child in list(parent.dependents):
        if all_of_them or not parent.active or parent.num_computed >= child.shared:
            attach(child)


def attach(child: Sequence, has_logits: bool = False) -> None:
    """Share what the parent has computed of the common prefix, and forget the parent.

    Args:
        child: a dependent.
        has_logits: its next token is drawn from the parent's logits; else one that is about to
            generate has to compute its last token itself.
    """
    parent = child.parent
    assert parent is not None, "only a dependent can be attached"
    parent.dependents.remove(child)
    child.parent = None
    if child.wants_prompt_logprobs:
        if len(parent.prompt_logprobs) < child.prompt_length:
            return  # it has to compute its own, from the first token on
        child.prompt_logprobs = list(parent.prompt_logprobs)
    ready = min(child.shared, parent.num_computed)
    if child.active and not has_logits:
        ready = min(ready, len(child.tokens) - 1)
    child.table = parent.table.fork(ready)


def detach(child: Sequence) -> None:
    """Forget the parent without taking anything from it."""
    if child.parent is not None:
        child.parent.dependents.remove(child)
        child.parent = None


def drawers(sequence: Sequence) -> list[Sequence]:
    """The sequence and those forks of it that want their next token after the very same tokens."""
    length = len(sequence.tokens)
    twins = [
        other
        for other in sequence.dependents
        if other.status is Status.WAITING and other.shared == len(other.tokens) == length
    ]
    return [sequence, *twins]
