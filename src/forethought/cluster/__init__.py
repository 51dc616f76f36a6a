"""Replicas of a model on Ray, as one model that outlives each of them.

* ``worker.py`` ``open_llm``: an ``AsyncLLM`` over replicas; ``ReplicaWorker``: methods over it
* ``engine.py`` ``remote.py`` the sequences as the ingress keeps them, and how they go on elsewhere
* ``migration.py`` sequences that move while they generate, and why they do
* ``prefill.py`` which prompts are computed in a replica of their own
* ``fleet.py`` ``link.py`` ``placement.py`` replicas that are started, watched and replaced; one of
  them; which of them generates
* ``replica.py`` ``messages.py`` one engine that takes messages, and what these say
* ``connection.py`` ``entrance.py`` ``inbox.py`` how commands and tokens travel past Ray; who may
  connect; the answers of all replicas, for one thread
* ``actors.py`` ``ranks.py`` replicas as actors of Ray, which is imported in these two alone; their
  ranks
"""

from typing import TYPE_CHECKING, Any

from forethought.lazy_names import LazyNames

if TYPE_CHECKING:
    from forethought.cluster.worker import ReplicaWorker, drain, links_of, open_llm, scale

__all__ = ["ReplicaWorker", "drain", "links_of", "open_llm", "scale"]

_NAMES = LazyNames(__name__, {"cluster.worker": __all__})


def __getattr__(name: str) -> Any:
    return _NAMES.load(name)
