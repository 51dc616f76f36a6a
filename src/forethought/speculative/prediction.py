"""Predicted outputs: a request predicts its output, and the prediction is its draft.

As OpenAI's ``prediction``: where a text is edited, or a rejected attempt is written again, most of
the output is known beforehand. The drafter follows the prediction token by token. Where the output
differs, it looks up the last tokens of the output in the prediction and goes on after the longest
match (as prompt lookup does), preferably the nearest one after the present place. Wrong predictions
cost the drafted tokens and change nothing: the target verifies them as any draft.

Every engine has this drafter, in front of those that are configured, and it drafts only for
requests with a prediction (``SpeculationParams.prediction``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forethought.speculative.drafter import (
    Drafter,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)

NAME = "prediction"
MAX_DRAFT_LEN = 16
"""Tokens of a draft at most."""
_PATTERN = 2
"""Tokens that have to match before a draft goes on elsewhere in the prediction."""
_MAX_MATCH = 16
"""Tokens over which matches are compared."""


@dataclass(eq=False, slots=True)
class _Cursor:
    """The place of the output of one request in its prediction."""

    prediction: Sequence[int]
    place: int | None = 0
    """Index of the token that comes next; None: the output has left the prediction."""
    reached: int = 0
    """The place before it was left."""
    num_read: int = 0
    """Tokens of the output that were compared."""
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Pattern -> the indices after its occurrences; empty until it is needed."""

    def read(self, output: Sequence[int]) -> None:
        """Advance by the new tokens of the output."""
        for token in output[self.num_read :]:
            if self.place is not None:
                is_next = self.prediction[self.place : self.place + 1] == (token,)
                self.reached = self.place
                self.place = self.place + 1 if is_next else None
        self.num_read = len(output)
        if self.place is None:
            self.place = self._found(output)

    def _found(self, output: Sequence[int]) -> int | None:
        """The place in the prediction where the output goes on, by its last tokens."""
        if not self.places:
            self._fill()
        candidates = self.places.get(tuple(output[-_PATTERN:]), ())
        if len(output) < _PATTERN or not candidates:
            return None
        return max(candidates, key=lambda at: (self._match(output, at), *self._nearness(at)))

    def _fill(self) -> None:
        places = defaultdict[tuple[int, ...], list[int]](list)
        for end in range(_PATTERN, len(self.prediction) + 1):
            places[tuple(self.prediction[end - _PATTERN : end])].append(end)
        self.places = dict(places)

    def _match(self, output: Sequence[int], end: int) -> int:
        """Tokens that end both output and ``prediction[:end]``, at most ``_MAX_MATCH``."""
        size = 0
        while (
            size < min(end, len(output), _MAX_MATCH)
            and self.prediction[end - 1 - size] == output[-1 - size]
        ):
            size += 1
        return size

    def _nearness(self, end: int) -> tuple[bool, int]:
        """A sort key: places after the present one first, the nearest of them before others."""
        return end > self.reached, -abs(end - self.reached)


class PredictionDrafter(Drafter):
    """Drafts what the requests predict."""

    def __init__(self) -> None:
        self._cursors: dict[int, _Cursor] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return not self._cursors

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Draft what follows in each prediction, if the output is found in it."""
        for request in scheduled_requests.generation_requests:
            cursor = self._cursor(request)
            cursor.read(request.tokens[request.prompt_length :])
            limit = min(request.max_draft_len, request.max_nodes, MAX_DRAFT_LEN)
            if cursor.place is not None:
                request.py_draft_tokens = cursor.prediction[cursor.place : cursor.place + limit]

    def release(self, request: DraftRequest) -> None:
        """Drop the request's place."""
        self._cursors.pop(request.request_id, None)

    def _cursor(self, request: DraftRequest) -> _Cursor:
        if request.request_id not in self._cursors:
            speculation = request.params.speculation
            prediction = None if speculation is None else speculation.prediction
            assert isinstance(prediction, tuple), "only such requests are drafted for"
            self._cursors[request.request_id] = _Cursor(prediction)
        return self._cursors[request.request_id]
