"""How many drafted tokens a target accepts, replayed on text that it has written already.

A greedy draft follows the target's text as long as its first choice at each place is the token that
stands there; the target accepts exactly that far, adds a token of its own, and the next draft
begins behind it. So one pass over finished text tells what speculation with any draft length would
have accepted: at temperature 0, and for texts drawn at any other temperature, where a greedy draft
is tested as a point mass. Knows nothing about models.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of at most ``draft_len`` tokens over a set of texts.

    Attributes:
        draft_len: most tokens of a draft (K).
        steps: steps that verified a draft; the first token of a text comes from its prefill.
        accepted: drafted tokens that the target agreed with.
        by_position: of the steps, the share that accepted the first, second, ... drafted token.
    """

    draft_len: int
    steps: int
    accepted: int
    by_position: tuple[float, ...]

    @property
    def mean_length(self) -> float:
        """Tokens per step: those accepted, and the one that the target adds."""
        return 1 + self.accepted / self.steps


def replay(agreements: Sequence[Sequence[bool]], draft_len: int) -> Acceptance:
    """Speculate through texts.

    Args:
        agreements: for each text, and each of its tokens, whether it is the draft model's first
            choice behind those before it.
        draft_len: most tokens of a draft.
    """
    steps, reached = 0, [0] * draft_len
    for agreed in agreements:
        place = 1
        while place < len(agreed):
            length = 0
            while length < draft_len and place + length < len(agreed) and agreed[place + length]:
                reached[length] += 1
                length += 1
            steps += 1
            place += length + 1
    assert steps, "no text has a second token"
    shares = tuple(count / steps for count in reached)
    return Acceptance(draft_len, steps, sum(reached), shares)
