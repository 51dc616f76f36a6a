"""Engines and traces for simulated replicas."""

import random

from forethought.bench.arrivals import TraceRequest
from forethought.bench.step_times import MeasuredEngine, MeasuredStep

BLOCK = 16


def engine(base=1000.0, per_token=0.0, per_context=0.0, **limits):
    """Milliseconds of a step, and what each prefilled token and token of context adds."""
    counts = [(n, n * context) for n in (1, 2) for context in (1, 9)]
    steps = [MeasuredStep(n, stored, 0, 0, 1, base + stored * per_context) for n, stored in counts]
    steps += [MeasuredStep(0, 0, p, 0, 1, base + p * per_token) for p in (1, 100)]
    sizes = {"max_batch_size": 8, "max_num_tokens": 64, "kv_tokens": 4096, "kv_bytes": 1000}
    return MeasuredEngine(**sizes | limits, steps=tuple(steps))


def request(number, at, length=8, limit=4, ids=(), **fields):
    return TraceRequest(f"trace:{number}", at, length, limit, tuple(ids), number, **fields)


def times(result):
    return [(round(s.first_token, 6), round(s.ended, 6)) for s in result.sequences]


def random_trace(seed, count=120, rate=2.0, session=lambda number: None):
    source, at, requests = random.Random(seed), 0.0, []
    for number in range(count):
        at += source.expovariate(rate)
        shared = source.randrange(6)
        ids = [100 * shared + block for block in range(source.randrange(1, 9))]
        length, limit = len(ids) * BLOCK + source.randrange(1, BLOCK), source.randrange(0, 30)
        requests.append(request(number, at, length, limit, ids, session=session(number)))
        if number % 3 == 0:
            fork = {"fork_of": number, "fork_at": source.randrange(0, limit + 1)}
            longer = [*ids, 1000 + number]
            requests.append(request(count + number, at, length + 20, 5, longer, **fork))
    return requests
