"""The process of a rank other than 0: it loads its shard, then does what rank 0 tells it.

It ends when its connection to rank 0 is closed, however that came about.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from forethought.backends.tensor_parallel.collectives import LOOPBACK, CollectiveError, Collectives
from forethought.backends.tensor_parallel.ranks import FOLLOWED, Setup
from forethought.backends.tensor_parallel.sharded import Member, connect
from forethought.kv.storage import KvStorage
from forethought.model import loader
from forethought.model.device import return_freed_memory
from forethought.model.llama.network import FusedNetwork

_PATROL_SECONDS = 5.0
"""Between looks whether rank 0's process is there: others may hold copies of its connections."""


def main() -> None:
    """Serve the connections whose file descriptors are the program's first two arguments.

    The third one is the ranks' directory, which rank 0 removes, too, but where it was killed.
    """
    commands, lifeline = (Connection(int(number)) for number in sys.argv[1:3])
    serve(commands, lifeline, LOOPBACK)
    shutil.rmtree(sys.argv[3], ignore_errors=True)
    os._exit(0)  # nothing is to be saved, and a communicator may wait for a rank


def serve(
    commands: Connection, lifeline: Connection, host: str, model_dir: Path | None = None
) -> None:
    """Load, then run commands until one fails or the connection is closed.

    Args:
        commands: of rank 0.
        lifeline: which is told why this rank ends, unless rank 0 has.
        host: the address at which the other ranks reach this one.
        model_dir: of the model on this machine, if rank 0's is another one.
    """
    try:
        _run(commands, host, model_dir)
    except (EOFError, ConnectionError):
        return  # rank 0 has ended
    except CollectiveError:
        why = FOLLOWED
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    with suppress(OSError):
        lifeline.send(why)


def _run(commands: Connection, host: str, model_dir: Path | None) -> None:
    parent = os.getppid()
    member = _member(commands, parent, host, model_dir)
    while True:
        reply = _receive(commands, parent).run(member)
        if reply is not None:
            commands.send(reply)


def _receive(commands: Connection, parent: int) -> Any:
    while not commands.poll(_PATROL_SECONDS):
        if os.getppid() != parent:
            raise EOFError
    return commands.recv()


def _member(commands: Connection, parent: int, host: str, model_dir: Path | None) -> Member:
    setup: Setup = _receive(commands, parent)
    torch.set_num_threads(setup.num_threads)
    device = setup.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    load = setup.load if model_dir is None else {**setup.load, "path": model_dir}
    lm = loader.load(device=device, shard=setup.shard, **load)
    assert isinstance(lm.network, FusedNetwork)
    return_freed_memory()
    commands.send(True)
    store = _receive(commands, parent).store(setup.shard.size)
    collectives = Collectives(store, host, setup.shard, device)
    collectives.meet()
    connect(lm.network, collectives)
    storage = KvStorage(lm.layer_shapes, 1, setup.page_size, lm.dtype, device)
    return Member(lm, storage, collectives)
