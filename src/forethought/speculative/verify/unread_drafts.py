"""Drafts whose tokens are on a GPU: they come to the host with what verification reads there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forethought.kv.staging import Download
from forethought.speculative.drafter import DeviceTokens, Draft


class UnreadDrafts:
    """The tokens of drafts that are on a GPU, each once.

    Args:
        drafts: that are there or not.
        download: brings them to the host, with the rest.
    """

    def __init__(self, drafts: Iterable[Draft], download: Download) -> None:
        unread = {
            id(tokens): tokens
            for draft in drafts
            if isinstance(tokens := draft.tokens, DeviceTokens) and not tokens.is_read
        }
        self._parts = [(tokens, download.add(tokens.on_device)) for tokens in unread.values()]

    def set(self, parts: Sequence[list[int]]) -> None:
        """Set the tokens, which are on the host, in ``parts``."""
        for tokens, at in self._parts:
            tokens.set(parts[at])


def read_drafts(drafts: Iterable[Draft]) -> None:
    """Bring the tokens of drafts that are on a GPU to the host, all in one transfer."""
    download = Download()
    unread = UnreadDrafts(drafts, download)
    unread.set(download.read())
