"""What requests hold of a user's resource manager, and in which order it is told of them.

For each request it is asked once how much it may need, as soon as there is room for it, and told
once that the request is over. What the manager raises is raised here. Knows nothing about drafts.
"""

from __future__ import annotations

from operator import index

from forethought.speculative.drafter import DraftRequest, ResourceManager, ScheduledRequests


class Resources:
    """The units of one manager.

    Args:
        manager: the user's; None: there is nothing to hold, and everybody holds it.
    """

    def __init__(self, manager: ResourceManager | None) -> None:
        self.manager = manager
        self._held: dict[int, int] = {}

    def take(self, request: DraftRequest) -> bool:
        """Whether the request has what it may come to need; if not, it may ask again later."""
        if self.manager is None or request.request_id in self._held:
            return True
        needed = index(self.manager.get_needed_resource_to_completion(request))
        if needed < 0:
            raise ValueError(f"a request cannot need {needed} units")
        if sum(self._held.values()) + needed > self.manager.get_max_resource_count():
            return False
        self._held[request.request_id] = needed
        return True

    def prepare(self, batch: ScheduledRequests) -> None:
        """The drafter is about to be asked."""
        if self.manager is not None:
            self.manager.prepare_resources(batch)

    def update(self, batch: ScheduledRequests) -> None:
        """The step is over."""
        if self.manager is not None:
            self.manager.update_resources(batch)

    def free(self, request: DraftRequest) -> None:
        """The request has no more to do with the manager, which is told so if it held anything."""
        if self._held.pop(request.request_id, None) is not None:
            assert self.manager is not None
            self.manager.free_resources(request)

    def shutdown(self) -> None:
        """The engine is going away."""
        if self.manager is not None:
            self.manager.shutdown()
