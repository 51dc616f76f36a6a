"""OpenAI's ``prediction`` of a chat is the first draft of its answer."""

import pytest
from pydantic import ValidationError

from forethought.config.sampling import SpeculationParams
from forethought.errors import ParameterError
from forethought.server.protocol.chat_request import ChatRequest
from forethought.server.protocol.sampling import sampling_of

ASK = {"messages": [{"role": "user", "content": "Write it again."}]}


def speculation(**fields):
    return sampling_of(ChatRequest(**ASK, **fields)).params.get("speculation")


def test_the_predicted_text_goes_to_the_drafter_in_one_piece():
    parts = [{"type": "text", "text": "as it "}, {"type": "text", "text": "was"}]
    for content in ("as it was", parts):
        found = speculation(prediction={"type": "content", "content": content})
        assert found == SpeculationParams(prediction="as it was")
    assert speculation() is None


def test_it_goes_with_a_length_and_not_with_drafts_that_are_switched_off():
    prediction = {"type": "content", "content": "x"}
    found = speculation(prediction=prediction, speculation={"max_draft_len": 4})
    assert (found.max_draft_len, found.prediction) == (4, "x")
    with pytest.raises(ParameterError, match="prediction"):
        speculation(prediction=prediction, speculation="none")


def test_another_kind_of_prediction_is_refused():
    for given in ({"type": "image", "content": "x"}, {"type": "content", "content": ""}):
        with pytest.raises(ValidationError):
            ChatRequest(**ASK, prediction=given)
