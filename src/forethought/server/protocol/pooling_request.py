"""The bodies of ``POST /v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from forethought.server.protocol.body import Body, Ids, Interruptible, Positive, Text
from forethought.server.protocol.completion_request import IdLists, Texts

MAX_INPUTS = 2048
"""Texts that one request has embedded, as OpenAI has it."""
MAX_PAIRS = 1024
"""Pairs of texts that one request has scored."""


class EmbeddingRequest(Body):
    """``POST /v1/embeddings``."""

    model: Text | None = None
    input: Text | Ids | Texts | IdLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    # accepted without effect
    user: Text | None = None


class TextField(Body):
    """A text in a field of its own, as Cohere and Jina take documents."""

    text: Text


Document = Text | TextField
_Some = Field(fail_fast=True, min_length=1, max_length=MAX_PAIRS)
ScoredTexts = Annotated[list[Text], _Some]


class ScoreRequest(Body):
    """``POST /v1/score``, as vLLM has it: pairs of texts, or one text with many."""

    model: Text | None = None
    text_1: Text | ScoredTexts
    text_2: Text | ScoredTexts
    use_activation: bool | None = None
    # accepted without effect
    user: Text | None = None


class RerankRequest(Body):
    """``POST /v1/rerank``, as Cohere, Jina and vLLM have it."""

    model: Text | None = None
    query: Text
    documents: Annotated[list[Annotated[Document, Interruptible]], _Some]
    top_n: Positive | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None
    # accepted without effect
    user: Text | None = None

    @property
    def texts(self) -> Sequence[str]:
        """Of the documents."""
        return [d if isinstance(d, str) else d.text for d in self.documents]
