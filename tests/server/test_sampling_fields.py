"""``GET /v1/sampling``: the fields of the form are fields that requests take."""

from __future__ import annotations

from forethought.config.sampling import LLAMA_SAMPLERS
from forethought.server.endpoints.sampling_fields import FURTHER, USUAL
from forethought.server.protocol.chat_request import ChatRequest


def test_every_field_of_the_form_is_one_of_a_request() -> None:
    names = {*USUAL, *FURTHER}
    assert names <= set(ChatRequest.model_fields)
    assert not USUAL.keys() & FURTHER.keys()
    assert names >= set(LLAMA_SAMPLERS)
