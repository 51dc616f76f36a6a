"""List the replicas on Ray, or drain one: its sequences move to the others, and it ends.

    forethought cluster list
    forethought cluster drain replica-1a2b3c4d-0
    forethought cluster list --ray-address 10.0.0.1:6379

Of each replica it prints what it runs, and how many sequences and pages have moved away and in.
Those of forethought serve --prefill-replicas are named prefill and decode.

Names are also those of the server's metric upstream_healthy. A drain returns at once; the replica
is no longer listed when it has ended.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forethought.errors import UsageError

if TYPE_CHECKING:
    from forethought.cluster.replica import Traffic


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: what to do, with which replica."""
    parser.add_argument("action", choices=["list", "drain"], help="what to do")
    parser.add_argument("replica", nargs="?", help="name of the replica to drain")
    parser.add_argument(
        "--ray-address",
        default="auto",
        metavar="ADDRESS",
        help="of the cluster's head, as in 10.0.0.1:6379 (default: the Ray that runs on this "
        "machine, that of forethought serve --replicas too; its log has the address, for a "
        "machine with several)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the replicas, or drain one."""
    if (args.action == "drain") != (args.replica is not None):
        why = "drain takes the name of one replica, list takes none"
        raise UsageError("contradictory arguments", why, "See: forethought cluster list")
    from forethought.cluster.actors import drain_replica, start_ray, statuses
    from forethought.cluster.link import Role

    start_ray(args.ray_address, 0)
    if args.action == "drain":
        drain_replica(args.replica)
        print(f"{args.replica} is drained")
        return 0
    for name, status in statuses().items():
        if status is None:
            print(f"{name}  does not answer")
            continue
        load, state = status.load, "draining" if status.is_draining else "up"
        if (role := Role.of(name)) is not Role.BOTH:
            state = f"{state} ({role})"
        usage = f"{load.kv_cache_usage:.0%} of its KV cache"
        line = f"{name}  {state}  {load.running} running, {load.waiting} waiting, {usage}"
        print(f"{line}; {_moved(status.traffic)}")
    return 0


def _moved(traffic: Traffic) -> str:
    """The sequences that have moved away, and in, with their pages."""
    return (
        f"sent {traffic.num_sent} sequences, {traffic.pages_sent} pages; "
        f"received {traffic.num_received}, {traffic.pages_received}"
    )
