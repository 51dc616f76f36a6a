"""How much a configuration may ask for at most, whatever engine it comes to.

Far beyond what pays, and small enough that no table or search of a drafter grows without bound.
The engine's own limits come on top: a draft is never longer than the context, which is refused when
the engine is built, nor than the room that a step has left. Knows nothing about drafters.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_LEVELS = 256
"""Levels of a draft."""
MOST_NODES = 1024
"""Tokens of a draft, all branches together; also children of a node, and beams of a search."""
MOST_NGRAM = 64
"""Tokens of an n-gram that is looked up; an n-gram pool learns as many patterns per token."""
MOST_SUFFIX = 1024
"""Tokens that a suffix is compared over."""
MOST_FACTOR = 256.0
"""Drafted tokens per token of a suffix that matched."""
MOST_ENTRIES = 1 << 24
"""Continuations, outputs or tokens that are remembered: about 10 GB of them."""
MOST_WINDOW = 1 << 16
"""Drafts over which a gate averages."""

Levels = Annotated[int, Field(ge=0, le=MOST_LEVELS)]
Nodes = Annotated[int, Field(ge=0, le=MOST_NODES)]
