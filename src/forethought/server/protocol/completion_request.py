"""The bodies of ``POST /v1/completions``, ``/tokenize`` and the like."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forethought.server.markdown import MAX_CHARACTERS
from forethought.server.protocol.body import Body, Completing, Count, Ids, Text
from forethought.server.protocol.chat_request import Messages, Prompting

Texts = Annotated[list[Text], Field(fail_fast=True)]
IdLists = Annotated[list[Ids], Field(fail_fast=True)]


class CompletionRequest(Completing):
    """``POST /v1/completions``."""

    prompt: Text | Ids | Texts | IdLists
    echo: bool | None = None
    logprobs: Count | None = None


MAX_TOKENIZED = 1 << 19
"""Characters of a text that is tokenised for its tokens alone."""


class TemplateRequest(Prompting):
    """``POST /apply-template``: a conversation through the chat template."""

    model: Text | None = None
    messages: Messages


class TokenizeRequest(Prompting):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: Text | None = None
    prompt: Annotated[str, Field(max_length=MAX_TOKENIZED)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class RenderRequest(Body):
    """``POST /page/render``: a text in Markdown, for the page."""

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Ids
