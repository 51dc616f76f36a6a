"""How known models write thoughts: what opens and closes one, and what follows it in a text."""

from __future__ import annotations

MARKERS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
"""What opens and closes a thought in the formats of known models, those of most models first."""


def markers_in(text: str) -> tuple[str, str] | None:
    """The markers of the last thought that a text opens or closes; None: there is none.

    A closing marker without the opening one, which was in the prompt, counts only if it is that of
    most models: the others may be in a text for other reasons.
    """
    matches = [
        (max(text.rfind(start), text.rfind(end)), (start, end))
        for number, (start, end) in enumerate(MARKERS)
        if start in text or (number == 0 and end in text)
    ]
    return max(matches)[1] if matches else None


def after_thought(text: str) -> str:
    """What follows the last thought in a text that is closed; all of it where none is."""
    markers = markers_in(text)
    return text if markers is None else text.rpartition(markers[1])[2]
