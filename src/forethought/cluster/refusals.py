"""``ReplicaRefusals``: what an engine over replicas refuses, and why."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ids
from typing import Never

from typing_extensions import override

from forethought.engine.base import BaseEngine
from forethought.engine.embedding import EmbeddingPass, Pooling
from forethought.engine.sequence import Sequence
from forethought.engine.snapshot import SequenceSnapshot
from forethought.errors import ModelError, UsageError
from forethought.model.adapter import Adapter
from forethought.model.token_adapters import PlacedAdapter


class ReplicaRefusals(BaseEngine):
    """The part of an engine that needs all sequences and adapters in its own process."""

    @override
    def check_concurrent(self) -> None:
        raise ModelError(
            "sequences cannot attend to each other",
            "replicas compute them, and what they read could not be computed again elsewhere",
            "Serve the model without replicas",
        )

    @override
    def attend_to(self, sequence: Sequence, others: Mapping[Sequence, int]) -> None:
        self.check_concurrent()

    @override
    def capture(self, sequence: Sequence, token_ids: Ids[int], start: int = 0) -> SequenceSnapshot:
        _refuse_snapshots()

    @override
    def restore(self, saved: SequenceSnapshot) -> Sequence:
        _refuse_snapshots()

    @override
    def append_snapshot(self, sequence: Sequence, saved: SequenceSnapshot) -> None:
        _refuse_snapshots()

    @override
    def place_adapter(self, adapter: Adapter) -> PlacedAdapter:
        _refuse_adapters()

    @override
    def add_adapter(self, adapter: PlacedAdapter) -> None:
        _refuse_adapters()

    @override
    def remove_adapter(self, name: str) -> None:
        _refuse_adapters()

    @override
    def embedding_pass(
        self,
        rows: Ids[Ids[int]],
        pooling: Pooling,
        adapter: str | None = None,
        dimensions: int | None = None,
    ) -> EmbeddingPass:
        raise ModelError(
            "replicas compute no embeddings",
            "only generations are sent to them",
            "Serve the model for embeddings without --replicas",
        )

    @override
    def advance(self, embedding_pass: EmbeddingPass) -> None:
        raise AssertionError("there is no pass of this engine")


def _refuse_snapshots() -> Never:
    raise UsageError(
        "replicas save and restore no snapshots",
        "sequences are not on this machine",
        "Serve the model without replicas, or leave snapshot_dir out",
    )


def _refuse_adapters() -> Never:
    raise UsageError(
        "the adapters of replicas do not change",
        "a replica that starts later would not have the same ones",
        "Give all of them at the start",
    )
