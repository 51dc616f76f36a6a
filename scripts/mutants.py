"""Mutation tests: break one line of the package at a time and see whether its tests notice.

Each mutant replaces a short text that is exactly once in its file, in a temporary copy of the
tracked files; the tests named with it run there, up to the first failure. A mutant that no test
notices is *alive*: either a test is missing, or the line has no effect and can go. Where a text is
not in its file any more, or its replacement does not compile there, nothing runs: the mutant has to
be written anew here. tests/test_mutants.py looks for the texts of all of them.

    python scripts/mutants.py                      all of them, one after the other
    python scripts/mutants.py kv/ scheduler        those with one of these in path or broken line
    python scripts/mutants.py --jobs 2             two at a time
    python scripts/mutants.py --list               what there is

Prints one line per mutant and one JSON line last. Leaves 1 if one is alive, is not applicable, or
its tests do not pass without it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/forethought")
TIMEOUT_SECONDS = 600
"""Of one run of tests; a mutant that takes longer counts as killed."""
_NO_TESTS_FAILED, _SOME_TESTS_FAILED, _INTERRUPTED = 0, 1, 2  # exit codes of pytest


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: below the package.
        original: a text that is there exactly once.
        replacement: what is written in its place.
        tests: arguments of pytest that select the tests expected to fail.
    """

    file: str
    original: str
    replacement: str
    tests: str


@dataclass(frozen=True)
class Finding:
    """What became of a mutant: ``outcome`` is killed, alive, not applicable or broken tests."""

    mutant: Mutant
    outcome: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        mutant = self.mutant
        change = f"{_line(mutant.original)} -> {_line(mutant.replacement)}"
        return f"{self.outcome:14} {self.seconds:5.1f} s  {mutant.file}: {change}  {self.detail}"


KV = "tests/kv"
SHARD = "tests/backends/test_shard.py"
RANKS = "tests/engine/test_tensor_parallel.py -m 'not slow'"
SCHEDULER = "tests/engine/test_scheduler.py"
ENGINE = "tests/engine/test_engine.py"
LAYER_WINDOW = "tests/backends/test_layer_window.py"
DRAFT_MODULES = "tests/speculative/test_native_modules.py"
NATIVE_EXPERTS = "tests/backends/test_native_experts.py"
ADAPTERS = "tests/engine/test_adapters.py"
ADAPTER = "tests/model/test_adapter.py"
HOOKS = "tests/engine/test_speculation_hooks.py"
BLOCKS = "tests/backends/test_block_products.py -m 'not slow'"
RULES = "tests/speculative/test_typical.py tests/speculative/test_relaxed.py"
VERIFY = "tests/speculative/test_verify.py tests/speculative/test_emitted_distribution.py"
LENGTH = "tests/speculative/test_length.py tests/speculative/test_gate.py"
NGRAM = "tests/speculative/test_ngram.py"
SUFFIX = "tests/speculative/test_suffix.py"
PAIRS = "tests/speculative/test_eagle.py tests/speculative/test_mtp.py"
NATIVE_SAMPLING = "tests/backends/test_native_sampling.py"
LLAMA_SAMPLERS = "tests/model/test_llama_samplers.py tests/model/test_dry.py"
SAMPLING = "tests/model/test_sampling.py tests/model/test_constraint.py"
DRIVER = (
    "tests/scaffolding/test_driver.py tests/scaffolding/test_budget.py "
    "tests/compat/test_collections.py"
)
VOTES = "tests/answers/test_answers.py tests/methods/test_majority_vote.py"
LIVE = "tests/workers/test_live.py"
TASKS = "tests/scaffolding/test_clone.py tests/scaffolding/test_tasks.py"
PRM = "tests/rewards/test_prm_controller.py"
DYNASOR = "tests/methods/test_dynasor.py"
BEST_OF_N = "tests/methods/test_best_of_n.py"
THINKING = "tests/llm/test_thinking.py"
FORMATS = "tests/llm/test_tool_formats.py"
PROFILE = "tests/llm/test_profile.py"
DEFAULTS = "tests/server/test_sampling_defaults.py"
SEARCH = "tests/methods/test_search.py"
DEEPCONF = "tests/methods/test_deepconf.py"
REVISION = "tests/methods/test_revision_methods.py"
RETRIEVAL = "tests/methods/test_retrieval_methods.py"
THINKING_METHODS = "tests/methods/test_thinking_methods.py"

SANDBOX = "tests/sandbox/test_sandbox.py -m 'not slow'"
DATA_FILES = "tests/evaluation/test_data_files.py"
GRADERS = "tests/evaluation/test_graders.py"

PARTIAL = "tests/workers/test_partial_answer.py"
EVENTS = "tests/kv/test_events.py"
GGUF = "tests/gguf"
MUTANTS = [
    # ---- kv --------------------------------------------------------------------------------------
    Mutant(
        "llm/thinking.py",
        "progress.num_tokens >= self.budget:",
        "progress.num_tokens > self.budget:",
        THINKING,
    ),
    Mutant("llm/thinking.py", "and self.piece(token).isspace()", "and False", THINKING),
    Mutant(
        "llm/thinking.py",
        "return Progress(True, progress.num_tokens)",
        "return Progress(True)",
        THINKING,
    ),
    Mutant("llm/thinking.py", "return ~self._only(rule.never)", "return None", THINKING),
    Mutant("llm/thinking.py", "if self.end in written:", "if False:", THINKING),
    Mutant("llm/thinking.py", "if shared < self._first:", "if False:", THINKING),
    # How calls of tools are read from a growing text, and forced.
    Mutant("llm/growing_text.py", "if len(closers) == _MAX_DEPTH:", "if False:", FORMATS),
    Mutant("llm/growing_text.py", "if not _ESCAPE.match(escape):", "if False:", FORMATS),
    Mutant(
        "llm/call_formats.py",
        "if rest.startswith(_AFTER_VALUE) or not (rest or waits):",
        "if True:",
        FORMATS,
    ),
    Mutant("llm/call_reader.py", 'self._lead.strip() not in ("", "{"):', "self._lead:", FORMATS),
    Mutant("llm/call_reader.py", "if not is_opening and", "if", FORMATS),
    Mutant("llm/call_reader.py", "num_held > 1):", "num_held > 99):", FORMATS),
    Mutant("llm/call_reader.py", "len(self.calls) >= MAX_CALLS:", "False:", FORMATS),
    Mutant("llm/tool_format.py", "if part in self.added_tokens:", "if False:", FORMATS),
    Mutant("llm/tool_format.py", "if form.written.takes_text:", "if False:", FORMATS),
    Mutant("llm/typed_argument.py", "parse_constant=_refuse", "parse_constant=float", FORMATS),
    Mutant("llm/call_grammar.py", "if value is None or", "if", FORMATS),
    # Sampling defaults, and the drafter in a checkpoint.
    Mutant(
        "server/service.py",
        "drawing(defaults) if num_choices > 1 else defaults",
        "defaults",
        DEFAULTS,
    ),
    Mutant("server/service.py", "if composition.is_plain:  # workers", "if False:  #", DEFAULTS),
    Mutant(
        "server/backends/engine_backend.py",
        "sampling_defaults=drawing(self.sampling_defaults)",
        "sampling_defaults=self.sampling_defaults",
        DEFAULTS,
    ),
    Mutant("workers/local.py", "if getattr(task, name) is None}", "}", PROFILE),
    Mutant(
        "engine/resolve.py",
        'if "speculative_config" in args.model_fields_set:',
        "if False:",
        PROFILE,
    ),
    Mutant(
        "methods/budget_vote.py",
        "left += share - _num_tokens",
        "left += 0 * _num_tokens",
        THINKING_METHODS,
    ),
    Mutant(
        "methods/budget_forcing.py",
        "thought.num_waits < self.num_waits or is_short",
        "is_short",
        THINKING_METHODS,
    ),
    Mutant("methods/no_thinking.py", '{"thinking_budget": 0,', "{", THINKING_METHODS),
    Mutant(
        "kv/table.py",
        "self._pool.refs[self.pages[-1]] > 1",
        "self._pool.refs[self.pages[-1]] > 2",
        KV,
    ),
    Mutant("kv/table.py", "del self.digests[length // self._pool.page_size :]", "pass", KV),
    Mutant("kv/table.py", " and not self._pool.is_kept(tail)", "", KV),
    Mutant(
        "kv/table.py", "self.digests[: length // self._pool.page_size]", "list(self.digests)", KV
    ),
    Mutant("kv/table.py", "self._pool.drop(tail)", "pass", KV),
    Mutant(
        "kv/table.py",
        "for page in reversed(self.pages[keep:])",
        "for page in self.pages[keep:]",
        KV,
    ),
    Mutant("kv/table.py", "self._gaps += near is not None and page != near", "self._gaps += 0", KV),
    Mutant("kv/pool.py", "min(middle, stop - num_pages)", "middle", KV),
    Mutant("kv/pool.py", "max(1, len(self._evictable) // 4)", "len(self._evictable)", KV),
    Mutant(
        "kv/pool.py", "del self._evictable[page]\n        self.refs", "pass\n        self.refs", KV
    ),
    Mutant("kv/pool.py", "self.on_evict(page)\n        if", "if", KV),
    Mutant("kv/pool.py", "len(tokens) - size + 1, size", "len(tokens) - size, size", KV),
    Mutant("kv/pool.py", ", key=adapter)", ")", f"{ADAPTERS} -k prefixes"),
    Mutant("engine/scheduler.py", "sequence.adapter_digest", 'b""', f"{ADAPTERS} -k 'prefix'"),
    Mutant(
        "engine/engine.py",
        "other.sequence.active and other.sequence.adapter is reader.adapter",
        "other.sequence.active",
        f"{ADAPTERS} -k read_each_other",
    ),
    Mutant(
        "engine/engine.py",
        "_read_before(sequence, length), sequence.adapter",
        "_read_before(sequence, length), None",
        f"{ADAPTERS} -k fork",
    ),
    Mutant(
        "engine/engine.py",
        "detach_from_parent(sequence)\n        sequence.table.rewind(0)",
        "sequence.table.rewind(0)",
        f"{ADAPTERS} -k waits_for_its_parent",
    ),
    Mutant("engine/engine.py", "table.rewind(0)", "table.rewind(4)", f"{ADAPTERS} -k again"),
    Mutant(
        "engine/drafting.py",
        'f"{sequence.adapter_digest.hex()}/{params.cache_salt}"',
        "params.cache_salt",
        f"{ADAPTERS} -k texts",
    ),
    Mutant("engine/continuous.py", "adapter=sequence.adapter,", "", f"{ADAPTERS} -k mixed"),
    Mutant(
        "speculative/step_runner.py",
        "drafted=token, adapter=row.adapter",
        "drafted=token",
        "tests/speculative/test_step_runner.py -k adapters",
    ),
    Mutant(
        "speculative/step_runner.py",
        "logits_from=first, adapter=adapter",
        "logits_from=first",
        f"{ADAPTERS} -k mixed",
    ),
    Mutant(
        "backends/cuda/graph_runner.py",
        " or row.adapter for row",
        " for row",
        "tests/backends/test_graphs.py -k adapters",
    ),
    Mutant(
        "backends/cuda/chain_rounds.py",
        " or row.adapter is not None",
        "",
        "tests/backends/test_graphs.py -k adapters",
    ),
    Mutant(
        "model/llama/layers.py",
        "adapt = batch.adapt(index, are_outputs=True)",
        "pass",
        f"{ADAPTERS} -k mixed",
    ),
    Mutant("model/adapter.py", "column += part.rank", "pass", f"{ADAPTER} -k logits"),
    Mutant("model/adapter.py", "math.sqrt(rank) if", "rank if", f"{ADAPTER} -k scale"),
    Mutant(
        "model/adapter.py", "if name not in linears:", "if False:", f"{ADAPTER} -k another_model"
    ),
    Mutant(
        "backends/cpu/cpp/kernels/low_rank.h",
        "picks ? call.logit_index[t] : t",
        "t",
        f"{ADAPTERS} -k mixed",
    ),
    Mutant(
        "backends/cpu/cpp/kernels/low_rank.h",
        "if (of(t + rows) != by) break;",
        "",
        f"{ADAPTER} -k last_bit",
    ),
    Mutant(
        "backends/cpu/cpp/forward.cpp",
        "const bool keeps = !tiles || call.adapters;",
        "const bool keeps = !tiles;",
        f"{ADAPTER} -k last_bit",
    ),
    Mutant(
        "backends/cpu/cpp/chain_steps.h",
        "if (call.adapters) adapters.insert(adapters.end(), count, row.adapter);",
        "if (call.adapters) adapters.insert(adapters.end(), count, nullptr);",
        f"{ADAPTERS} -k mixed",
    ),
    Mutant(
        "kv/pool.py",
        " and page not in self._digest_of",
        "",
        "tests/engine/test_engine.py -k 'salt'",
    ),
    Mutant(
        "kv/storage.py",
        "self._ready[dst] = self._ready[src]",
        "pass",
        "tests/kv/test_storage.py",
    ),
    Mutant(
        "kv/storage.py",
        "flat[dst] = flat[src]",
        "pass",
        "tests/kv/test_storage.py",
    ),
    # ---- tensor parallelism ----------------------------------------------------------------------
    Mutant(
        "backends/tensor_parallel/shard.py",
        "linear.bias if self.rank == 0 else None",
        "linear.bias",
        SHARD,
    ),
    Mutant(
        "backends/tensor_parallel/shard.py",
        "self.rank * width, width",
        "0, width",
        SHARD,
    ),
    Mutant(
        "backends/tensor_parallel/sharded.py",
        'self._call("copy_pages", copies, super().copy_pages)',
        "super().copy_pages(copies)",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/sharded.py",
        'self._call("move_slots", moves, super().move_slots)',
        "super().move_slots(moves)",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/sharded.py",
        'self._call("clear_slots", slots, super().clear_slots)',
        "super().clear_slots(slots)",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/sharded.py",
        "*sizes, forward_pass.layer_ids",
        "*sizes, frozenset()",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/ranks.py",
        "key=lambda cause: cause[1] == FOLLOWED",
        "key=lambda cause: cause[1] != FOLLOWED",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/ranks.py",
        "if os.getpid() != state.pid:",
        "if False:",
        RANKS,
    ),
    Mutant(
        "engine/engine.py",
        "self.runner.check_running()  # else",
        "pass  # else",
        RANKS,
    ),
    Mutant(
        "engine/step.py",
        "except EngineStopped:  # no half",
        "except SystemExit:  # no half",
        RANKS,
    ),
    Mutant(
        "backends/tensor_parallel/sharded.py",
        "self.ranks.size if on_one_device else 1",
        "1",
        RANKS,
    ),
    Mutant(
        "engine/resolve.py",
        "return min(num_pages)",
        "return num_pages[0] + pages",
        RANKS,
    ),
    Mutant(
        "cluster/entrance.py",
        "if len(answer) != self.num_expected or not hmac.compare_digest(proof, expected):",
        "if False:",
        "tests/cluster/test_ranks.py -k secret",
    ),
    Mutant(
        "cluster/entrance.py",
        'if not hmac.compare_digest(proof, self.proof(b"admit", nonce, challenge)):',
        "if False:",
        "tests/cluster/test_connection.py -k another_process",
    ),
    Mutant(
        "cluster/connection.py",
        "if size > MAX_MESSAGE_BYTES:",
        "if False:",
        "tests/cluster/test_connection.py -k waited_for",
    ),
    Mutant(
        "cluster/connection.py",
        "oldest.transport.abort()",
        "pass",
        "tests/cluster/test_connection.py -k make_room",
    ),
    Mutant(
        "cluster/fleet.py",
        "if link.channel is not None and not link.has_forgotten:",
        "if link.channel is not None:",
        "tests/cluster/test_cluster_engine.py -k forgotten",
    ),
    Mutant(
        "cluster/engine.py",
        "remote.num_deaths = 0\n",
        "pass\n",
        "tests/cluster/test_cluster_engine.py -k any_number",
    ),
    Mutant(
        "cluster/actors.py",
        "if capacity < self.num_ranks:",
        "if False:",
        "tests/cluster/test_ranks.py -k machine_by_machine",
    ),
    # ---- responses that outlive their server -----------------------------------------------------
    Mutant(
        "server/response_journal.py",
        "scores[num_passed:]",
        "scores[0:]",
        "tests/server/test_response_journal.py -k replay",
    ),
    Mutant(
        "server/response_journal.py",
        "os.ftruncate(descriptor, num_bytes)",
        "pass",
        "tests/server/test_response_journal.py -k whatever",
    ),
    Mutant(
        "server/response_store.py",
        "self.events[first : min(self._num_shown, first + _MAX_BATCH)]",
        "self.events[first : first + _MAX_BATCH]",
        "tests/server/test_response_journal.py -k written",
    ),
    # ---- engine ----------------------------------------------------------------------------------
    Mutant(
        "engine/base.py",
        "self._check_length(len(sequence.tokens) + (params.max_tokens != 0))",
        "self._check_length(len(sequence.tokens))",
        "tests/engine/test_engine.py -k 'refused'",
    ),
    Mutant(
        "engine/base.py",
        "self._check_length(len(prompt_ids) + (params.max_tokens != 0))",
        "self._check_length(len(prompt_ids))",
        "tests/engine/test_engine.py -k 'refused'",
    ),
    Mutant(
        "engine/scheduler.py",
        "urgent.params.priority >= last.params.priority",
        "urgent.params.priority > last.params.priority",
        SCHEDULER,
    ),
    Mutant("engine/scheduler.py", "num_remaining //= 2", "pass", SCHEDULER),
    Mutant(
        "engine/scheduler.py",
        "self.stop > self.sequence.prompt_length",
        "self.stop >= self.sequence.prompt_length",
        "tests/engine/test_speculation.py -k 'prompt_token'",
    ),
    Mutant(
        "engine/scheduler.py",
        "self.on_end(sequence)\n        if sequence.keep",
        "if sequence.keep",
        "tests/engine/test_speculation.py -k 'released_at_the_end'",
    ),
    Mutant(
        "engine/scheduler.py",
        "detach_from_parent(sequence)",
        "pass",
        "tests/engine/test_engine.py -k 'fork or sample or abort'",
    ),
    Mutant(
        "engine/scheduler.py",
        "other.rank >= needy.rank",
        "other.rank > needy.rank",
        "tests/engine/test_engine.py -k 'preempted or short'",
    ),
    Mutant(
        "engine/scheduler.py",
        "num_tokens = min(num_tokens, PROMPT_LOGPROB_ROWS)",
        "pass",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py",
        "limit = len(sequence.tokens) - 1",
        "limit = len(sequence.tokens)",
        "tests/engine/test_engine.py -k 'tenant or found or prefix'",
    ),
    Mutant(
        "engine/scheduler.py",
        "if needed > self._pool.available and self.running:",
        "if needed > self._pool.available:",
        SCHEDULER,
    ),
    Mutant(
        "engine/scheduler.py",
        "if s.parent is None and not plan.has_failed(s)",
        "if not plan.has_failed(s)",
        "tests/engine/test_engine.py -k 'fork or sample'",
    ),
    Mutant(
        "engine/scheduler.py", "free = -table.length % self._pool.page_size", "free = 0", SCHEDULER
    ),
    Mutant(
        "engine/sequence.py",
        "ready = min(ready, len(child.tokens) - 1)",
        "pass",
        "tests/engine/test_engine.py -k 'fork'",
    ),
    Mutant(
        "engine/sequence.py",
        "other.num_shared == len(other.tokens) == length",
        "len(other.tokens) == length",
        "tests/engine/test_engine.py -k 'fork'",
    ),
    Mutant(
        "engine/packing.py",
        "row.is_last and is_apart and not is_read",
        "row.is_last and is_apart",
        "tests/engine/test_continuous_decode.py -k 'token_by_token'",
    ),
    Mutant(
        "engine/step.py",
        "metrics.steps += is_decode or number > 1",
        "metrics.steps += 1",
        "tests/engine/test_continuous_decode.py tests/engine/test_speculation.py",
    ),
    Mutant(
        "engine/step.py",
        "metrics.steps += is_decode or number > 1",
        "metrics.steps += is_decode",
        "tests/engine/test_continuous_decode.py -k beside",
    ),
    Mutant(
        "backends/cpu/cpp/chain_steps.h",
        "sequence.position + 1 - num_known, tokens.data()",
        "sequence.position, tokens.data()",
        "tests/speculative/test_step_runner.py -k known",
    ),
    Mutant(
        "engine/scheduler.py",
        "free = min(num_steps, max(num_remaining, default=1)), self._pool.num_free",
        "free = min(num_steps, max(num_remaining, default=1)), self._pool.available",
        "tests/engine/test_continuous_decode.py -k 'evicted'",
    ),
    Mutant(
        "speculative/step_runner.py",
        "self.has_ended = size is not None or not result.tokens",
        "self.has_ended = not result.tokens",
        "tests/speculative/test_step_runner.py -k 'end'",
    ),
    Mutant(
        "engine/packing.py",
        "return is_plain and row.num_logits == 1 and row.is_last",
        "return is_plain and row.num_logits == 1",
        "tests/engine/test_engine.py -k 'scored_token_by_token'",
    ),
    Mutant(
        "engine/packing.py",
        "sequence.takes_argmax and row.rule is None and not sequence.dependents",
        "sequence.takes_argmax and row.rule is None",
        "tests/engine/test_engine.py -k 'argmax'",
    ),
    Mutant(
        "speculative/verify/accept.py",
        "self.path[max(num_tokens - 1, 0) :]",
        "self.path[num_tokens:]",
        "tests/engine/test_speculation.py -k 'stop_token or beyond'",
    ),
    Mutant(
        "engine/step.py",
        "max(sequence.prompt_length, sequence.num_ever_computed)",
        "sequence.prompt_length",
        "tests/engine/test_engine.py -k 'preempt'",
    ),
    Mutant(
        "engine/step.py",
        "max(sequence.prompt_length, sequence.num_ever_computed)",
        "sequence.num_ever_computed",
        "tests/engine/test_engine.py -k 'preempt'",
    ),
    Mutant(
        "engine/packing.py",
        "sequence.prompt_length - 1)",
        "sequence.prompt_length)",
        "tests/engine/test_engine.py -k 'prompt_logprobs'",
    ),
    Mutant(
        "engine/scheduler.py",
        "// size * size if copying else self.start",
        "if copying else self.start",
        "tests/engine/test_engine.py -k 'interrupted'",
    ),
    Mutant(
        "engine/step.py",
        "draft_cache.invalidate(table, row.start, row.num_stored)",
        "pass",
        "tests/engine/test_speculation.py -k 'written_anew'",
    ),
    Mutant(
        "engine/drafting.py",
        "min(sequence.num_wanted - 1, max_draft_len)",
        "min(sequence.num_wanted, max_draft_len)",
        "tests/engine/test_speculation.py -k 'stop_token or beyond'",
    ),
    Mutant("engine/guarded_drafter.py", "self.disabled.discard(request.request_id)", "pass", HOOKS),
    Mutant(
        "engine/engine.py",
        "sequence.table.rewind(len(sequence.tokens) - 1)",
        "pass",
        "tests/engine/test_engine.py -k 'resumed'",
    ),
    Mutant(
        "engine/engine.py",
        "sequence.num_ever_computed = min(sequence.num_ever_computed, length)",
        "pass",
        "tests/engine/test_engine.py -k 'rewound'",
    ),
    Mutant(
        "engine/engine.py",
        "sequence.num_shared = min(sequence.num_shared, length)",
        "pass",
        "tests/engine/test_engine.py -k 'fork'",
    ),
    Mutant(
        "engine/engine.py",
        "self._count_discarded(sequence, len(sequence.sampled_positions) - num_sampled)",
        "pass",
        "tests/engine/test_engine.py -k 'rewound'",
    ),
    # ---- speculative: verification and acceptance ------------------------------------------------
    Mutant(
        "speculative/verify/verify.py",
        "use = _USE_ACCEPTANCE + (num_siblings[parent] << 8)",
        "use = _USE_ACCEPTANCE",
        VERIFY,
    ),
    Mutant(
        "speculative/verify/verify.py",
        "(self.position + depth for depth",
        "(self.position + depth - 1 for depth",
        VERIFY,
    ),
    Mutant(
        "speculative/verify/verify.py",
        "request.rule is not None or _root_accepts",
        "_root_accepts",
        "tests/speculative/test_typical.py tests/speculative/test_relaxed.py",
    ),
    Mutant(
        "speculative/verify/rejection.py",
        "accepted = uniforms.unsqueeze(1) * q_token < p",
        "accepted = uniforms.unsqueeze(1) * q_token <= p",
        VERIFY,
    ),
    Mutant("speculative/verify/rejection.py", "q_j[numbers, tokens[nodes]] = 0.0", "pass", VERIFY),
    Mutant(
        "speculative/verify/rejection.py",
        "torch.where(mass > 0, residual / mass, p)",
        "residual / mass",
        VERIFY,
    ),
    Mutant("speculative/verify/rules.py", "margin > 0 and", "margin >= 0 and", RULES),
    Mutant(
        "speculative/verify/rules.py",
        "scores[node] > best:",
        "scores[node][0] > best[0]:",
        RULES,
    ),
    Mutant(
        "speculative/verify/rules.py",
        "(rank < self.topk)",
        "(rank <= self.topk)",
        RULES,
    ),
    Mutant(
        "speculative/verify/rules.py",
        "near = token_probs >= top - self.delta",
        "near = token_probs > top - self.delta",
        RULES,
    ),
    Mutant(
        "speculative/drafter.py",
        "full = len(nodes) > request.max_nodes",
        "full = len(nodes) >= request.max_nodes",
        "tests/speculative/test_tree.py",
    ),
    Mutant(
        "speculative/drafter.py",
        "repeats = distinct and (parent, token) in siblings",
        "repeats = (parent, token) in siblings",
        "tests/speculative/test_tree.py",
    ),
    Mutant(
        "speculative/length/acceptance.py",
        "tested = np.minimum(accepted + 1, depths)",
        "tested = depths",
        LENGTH,
    ),
    Mutant(
        "speculative/length/acceptance.py",
        "len(self._slots) + len(new) > capacity",
        "False",
        LENGTH,
    ),
    Mutant(
        "speculative/length/acceptance.py",
        "self._shown[:, [self._slots[number] for number in admitted]]",
        "self._shown[:, : len(admitted)]",
        LENGTH,
    ),
    Mutant(
        "speculative/length/goodput.py",
        "return max(most, self._num_to_recover)",
        "return most",
        LENGTH,
    ),
    Mutant(
        "speculative/length/goodput.py",
        "num_tokens > record.batch_size + 0.5",
        "num_tokens > record.batch_size",
        LENGTH,
    ),
    Mutant(
        "speculative/length/goodput.py",
        "max(record.batch_size, 1.0)",
        "record.batch_size",
        LENGTH,
    ),
    Mutant(
        "speculative/length/goodput.py",
        "self._checks.left, self.account.balance, self._enough_steps",
        "self._checks.left, self._enough_steps",
        LENGTH,
    ),
    Mutant(
        "speculative/length/latency.py",
        "self.factor = min(max(self.factor, low), high)",
        "self.factor = ratio",
        "tests/speculative/test_latency.py",
    ),
    Mutant(
        "speculative/length/latency.py",
        "self._drafted.scale(before / self.factor)",
        "pass",
        "tests/speculative/test_latency.py",
    ),
    Mutant(
        "speculative/length/acceptance.py",
        "self._tested *= PROFILE_STEP_KEEPS**self._steps",
        "pass",
        LENGTH,
    ),
    Mutant(
        "speculative/length/by_batch_size.py",
        "policy.age(num_steps)\n            self.policy",
        "pass\n            self.policy",
        LENGTH,
    ),
    Mutant(
        "speculative/length/gate.py", "rate >= self._threshold", "rate > self._threshold", LENGTH
    ),
    Mutant(
        "speculative/length/gate.py", "sum(min(accepted + 1, depth) for", "sum(depth for", LENGTH
    ),
    Mutant(
        "speculative/length/policy.py",
        "bisect_right(self._bounds, running) - 1",
        "bisect_left(self._bounds, running) - 1",
        LENGTH,
    ),
    Mutant(
        "speculative/length/gate.py",
        "min(2 * self.interval, self._last)",
        "2 * self.interval",
        LENGTH,
    ),
    # ---- speculative: drafters -------------------------------------------------------------------
    Mutant(
        "speculative/drafters/ngram.py",
        "max(0, request.prompt_length - self.max_draft_len)",
        "request.prompt_length",
        NGRAM,
    ),
    Mutant(
        "speculative/drafters/ngram.py",
        "self._learn(request, len(request.tokens) - 1)",
        "pass",
        NGRAM,
    ),
    Mutant(
        "speculative/drafters/ngram.py",
        "range(max(0, end - self.max_match), end - 1)",
        "range(max(0, end - self.max_match) + 1, end - 1)",
        NGRAM,
    ),
    Mutant(
        "speculative/drafters/ngram.py",
        "patterns.move_to_end(pattern)\n                if match",
        "if match",
        NGRAM,
    ),
    Mutant("speculative/drafters/suffix.py", "positions[-MAX_POSITIONS:]", "positions", SUFFIX),
    Mutant(
        "speculative/drafters/suffix.py",
        "if at >= back and text[at - back] == token",
        "if text[at - back] == token",
        SUFFIX,
    ),
    Mutant(
        "speculative/drafters/suffix.py",
        "candidate.score > best.score",
        "candidate.score >= best.score",
        SUFFIX,
    ),
    Mutant("speculative/drafters/suffix.py", "if prob < min_prob", "if prob <= min_prob", SUFFIX),
    Mutant(
        "speculative/drafters/suffix.py",
        "prob * share >= min_prob",
        "prob * share > min_prob",
        SUFFIX,
    ),
    Mutant(
        "speculative/drafters/suffix.py",
        "1 < len(output) <= self._max_tokens",
        "1 < len(output) < self._max_tokens",
        SUFFIX,
    ),
    Mutant(
        "speculative/drafters/draft_target.py",
        "request.max_draft_len <= longest",
        "request.max_draft_len < longest",
        "tests/speculative/test_draft_model.py -k context",
    ),
    Mutant(
        "speculative/tree.py",
        "[size - 1 for size in sizes]",
        "sizes",
        "tests/engine/test_speculation.py -k 'written_anew'",
    ),
    Mutant(
        "speculative/sampled_draft.py",
        "residual[parent][token] = 0.0",
        "pass",
        "tests/speculative/test_draft_model.py -k siblings",
    ),
    Mutant(
        "speculative/sampled_draft.py",
        "tokens.view(len(probs), len(nodes))",
        "tokens.view(len(nodes), len(probs)).T",
        "tests/speculative/test_sampled_draft.py",
    ),
    Mutant(
        "kv/recurrent.py",
        "last = next(self._stored(table, length), 0)",
        "last = next(self._stored(table, length), length)",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "kv/recurrent.py",
        "states = {dst: self._by_slot.get(src) for src, dst in pairs}",
        "states = {dst: self._by_slot.get(dst) for src, dst in pairs}",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "kv/recurrent.py",
        "self._pass_by(table, last - 2)",
        "self._pass_by(table, last)",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "kv/recurrent.py",
        "if slot not in spared)",
        "if True)",
        "tests/model/test_recurrent_layers.py -k push_out",
    ),
    Mutant(
        "kv/recurrent.py",
        "NUM_DECODED + 1 + 2 * draft_len",
        "NUM_DECODED + 2 * draft_len",
        "tests/engine/test_continuous_recurrent.py -k share_no_memory",
    ),
    Mutant(
        "kv/recurrent.py",
        "NUM_DECODED + 1 + 2 * draft_len",
        "NUM_DECODED + 1 + draft_len",
        "tests/engine/test_recurrent_drafts.py -k share_no_memory",
    ),
    # MTP modules whose block is no layer of a Llama-like model.
    Mutant(
        "backends/cpu/cpp/module_forward.h",
        "hand_out(batch, call.x, share, batch.last_normed);",
        "hand_out(batch, call.x, share, batch.last);",
        f"{DRAFT_MODULES} -k gated",
    ),
    Mutant(
        "backends/cpu/cpp/join.h",
        "if (join.zero_first && call.positions[t] == 0)",
        "if (false)",
        f"{DRAFT_MODULES} -k 'gated and other'",
    ),
    Mutant(
        "backends/cpu/cpp/drafts.h",
        "(model.join->feeds_normed ? call.last_normed : call.last) = outputs.data();",
        "(model.join->feeds_normed ? call.last : call.last_normed) = outputs.data();",
        f"{DRAFT_MODULES} -k gated",
    ),
    Mutant(
        "backends/cpu/mtp_block.py",
        "return block if trial.agrees(native, attention) else None",
        "return block",
        f"{DRAFT_MODULES} -k more_than_its_parts",
    ),
    Mutant(
        "backends/cpu/module_forward.py",
        "last = int(forward_pass.batch.positions.max()) + further",
        "last = int(forward_pass.batch.positions.max())",
        f"{DRAFT_MODULES} -k rotation",
    ),
    Mutant(
        "backends/cpu/cpp/chain_steps.h",
        "if (steps.states) store_states(call);",
        "if (steps.states && !step) store_states(call);",
        "tests/engine/test_recurrent_drafts.py -k 'hidden_states and mtp'",
    ),
    Mutant(
        "backends/cpu/cpp/chain_steps.h",
        "states.push_back({after[i - 1], after[i], 0});",
        "states.push_back({after[0], after[i], 0});",
        "tests/engine/test_recurrent_drafts.py -k single_steps",
    ),
    Mutant(
        "kv/recurrent.py",
        "self.resume(table, table.length)",
        "pass",
        "tests/engine/test_continuous_recurrent.py -k 'order or single_steps'",
    ),
    Mutant(
        "kv/recurrent.py",
        "self.states.get(table.slot(table.length - 1))",
        "pass",
        "tests/engine/test_continuous_recurrent.py -k order",
    ),
    Mutant(
        "backends/cpu/module_steps.py",
        "len(result.tokens) - (not step)",
        "len(result.tokens) - 1",
        "tests/engine/test_continuous_recurrent.py -k 'order or single_steps'",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "if token not in self._passing:",
        "if True:",
        "tests/model/test_recurrent_layers.py -k token_by_token",
    ),
    Mutant(
        "kv/recurrent.py",
        "if number % self.checkpoint_tokens == 0:",
        "if True:",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "kv/recurrent.py",
        "if slot not in self._resumed and",
        "if",
        "tests/model/test_recurrent_layers.py -k share_pages",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "if x.shape[1] > 1:  # the module limits them",
        "if True:",
        "tests/model/test_batch_invariance.py -k limited_alike",
    ),
    Mutant(
        "backends/cpu/cpp/recurrent.h",
        "step = step < w.min_step ? w.min_step :",
        "step =",
        "tests/model/test_batch_invariance.py -k limited_alike",
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "better >= from.top_groups",
        "false",
        "tests/model/test_batch_invariance.py -k best_groups",
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "+ (from.bias ? from.bias[e] : 0)",
        "",
        "tests/model/test_batch_invariance.py -k best_groups",
    ),
    Mutant(
        "backends/cpu/backend.py",
        "use_native_routers(module)",
        "pass",
        "tests/model/test_batch_invariance.py -k every_batch",
    ),
    Mutant(
        "backends/cpu/module_parts.py",
        "if are_hooked(self.linears()) or",
        "if",
        "tests/backends/test_native_recurrent.py",
    ),
    Mutant(
        "backends/cpu/cpp/attention_layer.h",
        "if (w.gates) gate();",
        "if (false) gate();",
        "tests/backends/test_native_attention.py -k runs_in_cpp",
    ),
    Mutant(
        "backends/cpu/cpp/attention_layer.h",
        "head >= num_queries && !is_value ? w.key_scale : 1",
        "1",
        "tests/backends/test_native_attention.py -k multipliers",
    ),
    Mutant(
        "backends/cpu/cpp/mixture.h",
        "w.shared_gate ? 1 / (1 + expf(-gates[t])) : 1",
        "1",
        "tests/backends/test_native_attention.py -k routers",
    ),
    Mutant(
        "backends/cpu/cpp/sublayers.h",
        "if (w.scale != 1) scale(share, w.scale, y);",
        "",
        "tests/backends/test_native_attention.py -k multipliers",
    ),
    Mutant(
        "backends/cpu/sublayers.py",
        "rows.clone() if rows.data_ptr() == x.data_ptr() else rows",
        "rows",
        "tests/backends/test_native_attention.py -k captured",
    ),
    Mutant(
        "backends/cpu/attention.py",
        "window=profile.window or 0",
        "window=0",
        "tests/backends/test_native_attention.py -k windows",
    ),
    Mutant(
        "model/decoder_layers.py",
        "*forward_pass.layer_ids & set(range(size))",
        "",
        "tests/backends/test_native_attention.py -k captured",
    ),
    Mutant(
        "model/decoder_layers.py",
        "if not self.native.are_hooked():",
        "if True:",
        "tests/backends/test_native_attention.py -k change_no_other_bit",
    ),
    Mutant(
        "model/decoder_layers.py",
        "rotation is self.rotation or (",
        "True or (",
        "tests/backends/test_native_attention.py -k rotations_of_their",
    ),
    Mutant(
        "model/decoder_layers.py",
        "rotation is None and not self.native.has_attention(index)",
        "rotation is None",
        "tests/backends/test_native_attention.py -k without_a_rotation",
    ),
    Mutant(
        "model/loader.py",
        "module_forward(CausalLM(network, backend, profiled))",
        "module_forward(CausalLM(network, backend, traits))",
        "tests/backends/test_native_attention.py -k as_wide",
    ),
    Mutant(
        "backends/cpu/module_parts.py",
        "shared.made_of(linear, PackedLinear.of)",
        "PackedLinear.of(linear)",
        "tests/backends/test_native_attention.py -k packed_once",
    ),
    Mutant(
        "backends/cpu/cpp/projections.h",
        "width, part.adds, thread",
        "width, false, thread",
        "tests/backends/test_native_attention.py -k a_layer_gives",
    ),
    Mutant(
        "backends/cpu/cpp/sublayers.h",
        "y[i] += call.side[t * hidden + i];",
        ";",
        "tests/backends/test_native_attention.py -k a_decoder_is_one_call",
    ),
    Mutant(
        "backends/cpu/cpp/sublayers.h",
        "if (call.states && w.begins >= 0) keep_state(call, w.begins, share);",
        "",
        "tests/backends/test_native_attention.py -k captured",
    ),
    Mutant(
        "backends/cpu/mixture.py",
        "if self._shared is not None and are_hooked(self.linears()):",
        "if False:",
        "tests/backends/test_native_attention.py -k shared_experts",
    ),
    Mutant(
        "backends/cpu/recurrent.py",
        "if are_hooked(self.linears()) or",
        "if",
        "tests/model/test_recurrent_layers.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "before = self._after[origin.token]",
        "before = None",
        "tests/backends/test_native_recurrent.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "torch.cat([state[key] for state in states or ()])",
        "(states or ())[0][key] if len(states or ()) == 1 else torch.cat([s[key] for s in states])",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "states.drop(self._slots)",
        "pass",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "yield depth, self._run([begin + node], before)",
        "yield node, self._run([begin + node], origin)",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "path[-1] if path else -1",
        "path[0] if path else -1",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "model/recurrent_layers.py",
        "step = 1 if prefix else span.length",
        "step = span.length",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "backends/cpu/recurrent.py",
        "self._call(tokens, projected, mixed, stage=BEFORE_LATE)",
        "pass",
        "tests/backends/test_native_recurrent.py -k all_families",
    ),
    Mutant(
        "backends/cpu/cpp/kernels/recurrences.h",
        "softplus(row[step_at + p] + w.biases[first + p])",
        "softplus(row[step_at + p] + w.biases[p])",
        "tests/backends/test_native_recurrent.py -k any_size",
    ),
    Mutant(
        "speculative/paged_draft.py",
        "first = read if bool(self._visible.tril().equal(self._all())) else 0",
        "first = read",
        "tests/model/test_recurrent_layers.py -k nodes_of_a_tree",
    ),
    Mutant(
        "speculative/tree.py",
        "if root.workspace.is_stored or not self.stores_drafted:",
        "if not self.stores_drafted:",
        "tests/model/test_recurrent_layers.py -k draft_model",
    ),
    Mutant(
        "speculative/drafters/pearl.py",
        "self._storage.resume(table, min(table.length, length - 1))",
        "min(table.length, length - 1)",
        "tests/model/test_recurrent_layers.py -k pearl",
    ),
    Mutant(
        "speculative/step_runner.py",
        "self.num_known - 1, self.row.adapter, len(draft)",
        "self.num_known - 1, self.row.adapter, 0",
        "tests/model/test_recurrent_layers.py tests/engine/test_engine_machine.py",
    ),
    Mutant(
        "backends/cuda/draft_graph.py",
        "torch.cat(nodes, 1).flatten()",
        "torch.cat(nodes[:1] * len(nodes), 1).flatten()",
        "tests/backends/test_graphs.py -k drafts_by_graphs",
    ),
    Mutant(
        "engine/packing.py",
        "output = sequence.output if params.min_tokens else []",
        "output = []",
        "tests/engine/test_engine.py -k once_min_tokens",
    ),
    Mutant(
        "speculative/draft_module.py",
        "start if start > self.offset else 0, stop",
        "start, stop",
        "tests/engine/test_speculation.py -k 'not_computed_again'",
    ),
    Mutant(
        "speculative/drafters/mtp.py",
        "runner.missing_from(request) - level",
        "runner.missing_from(request)",
        "tests/speculative/test_mtp.py",
    ),
    # ---- training --------------------------------------------------------------------------------
    Mutant(
        "training/cross_entropy.py",
        "exps.mul_(probs[part].sum(-1, keepdim=True) / sums)",
        "exps.mul_(1.0 / sums)",
        "tests/training/test_cross_entropy.py",
    ),
    Mutant(
        "training/draft_vocabulary.py",
        "probs * (rows >= 0)",
        "probs",
        "tests/training/test_draft_vocabulary.py -k no_probability",
    ),
    Mutant(
        "training/batches.py",
        "self._kept |= self._read(self._groups[number])",
        "self._kept |= self._read([number])",
        "tests/training/test_batches.py -k same_groups",
    ),
    Mutant(
        "speculative/drafters/redrafter.py",
        "tokens = self._head.token_map[tokens]",
        "tokens = tokens + 0",
        "tests/speculative/test_redrafter.py -k found_in_one_call",
    ),
    Mutant(
        "training/prompts.py",
        "if text and text not in prompts and",
        "if text and",
        "tests/training/test_prompts.py -k different_turns",
    ),
    # ---- model/sampling --------------------------------------------------------------------------
    Mutant(
        "model/sampling/distribution.py",
        "torch.searchsorted(rising, min_p * rising[:, -1:])",
        "torch.searchsorted(rising, min_p * rising[:, -1:], right=True)",
        SAMPLING,
    ),
    Mutant(
        "model/sampling/distribution.py",
        "torch.searchsorted(mass, top_p) + 1",
        "torch.searchsorted(mass, top_p, right=True) + 1",
        SAMPLING,
    ),
    Mutant(
        "model/sampling/distribution.py",
        "if context.num_output < params.min_tokens:",
        "if context.num_output <= params.min_tokens:",
        SAMPLING,
    ),
    Mutant(
        "model/sampling/distribution.py",
        "equal.cumsum(dim=-1) <= num_equal",
        "equal.cumsum(dim=-1) < num_equal",
        SAMPLING,
    ),
    Mutant(
        "model/sampling/distribution.py", "packed[~packed.any(axis=-1)] = 0xFF", "pass", SAMPLING
    ),
    Mutant(
        "model/sampling/sampler.py",
        "rank = (logprobs > chosen)",
        "rank = (logprobs >= chosen)",
        NATIVE_SAMPLING,
    ),
    Mutant(
        "backends/cpu/cpp/sampling.h",
        "++num_equal > kept.num_equal",
        "++num_equal >= kept.num_equal",
        NATIVE_SAMPLING,
    ),
    Mutant(
        "backends/cpu/cpp/sampling.h",
        "for_distinct(by, by.num_prompt,",
        "for_distinct(by, 0,",
        NATIVE_SAMPLING,
    ),
    Mutant(
        "backends/cpu/cpp/sampling.h",
        "weights[i] <= weights[last]",
        "weights[i] < weights[last]",
        NATIVE_SAMPLING,
    ),
    Mutant(
        "model/sampling/distribution.py",
        "chosen >= _column([p.xtc_threshold",
        "chosen > _column([p.xtc_threshold",
        LLAMA_SAMPLERS,
    ),
    Mutant(
        "model/sampling/dry.py",
        "limit = min(longest, len(newest_first) - at)",
        "limit = min(longest, at)",
        LLAMA_SAMPLERS,
    ),
    Mutant(
        "model/sampling/dry.py",
        "if token in node.heads:\n                length = at + 1 - index",
        "if token in node.heads:\n                length = at - index",
        LLAMA_SAMPLERS,
    ),
    Mutant(
        "engine/packing.py",
        "return not _reads_tokens(sequence) and",
        "return sequence.constraint is None and",
        "tests/engine/test_continuous_decode.py -k dry",
    ),
    Mutant(
        "engine/packing.py",
        "row.num_nodes and _reads_tokens(row.sequence)",
        "row.num_nodes and row.sequence.constraint",
        "tests/speculative/test_verify_on_gpu.py -k dry",
    ),
    Mutant(
        "backends/cpu/cpp/chain_steps.h",
        "row.position + 1 + count",
        "row.position + count",
        "tests/engine/test_continuous_decode.py -k sampled_tokens",
    ),
    # ---- native products -------------------------------------------------------------------------
    Mutant(
        "backends/cpu/cpp/kernels/byte_sums.h", "return in_order(a * b);", "return a * b;", BLOCKS
    ),
    Mutant(
        "backends/cpu/cpp/kernels/rounded_row.h",
        "scale = finite ? exact : NAN;",
        "scale = exact;",
        BLOCKS,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/products.h",
        "y += part->num_outputs, part = part->next",
        "part = part->next",
        BLOCKS,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/blocks.h",
        "while (GROUP << shift < w.group_size) shift++;",
        "while (GROUP << shift <= w.group_size) shift++;",
        "tests/backends/test_integer_products.py -m 'not slow' -k last_bit",
    ),
    Mutant(
        "backends/cpu/cpp/layer_window.h",
        "if (is_read && checksum == uint64_t(from.checksum)) return true;",
        "if (is_read) return true;",
        LAYER_WINDOW,
    ),
    Mutant(
        "backends/cpu/cpp/layer_window.h",
        "num_read - num_left < num_slots",
        "num_read - num_left <= num_slots",
        LAYER_WINDOW,
    ),
    Mutant("backends/cpu/layer_window.py", "linear_tensors.clear()", "pass", LAYER_WINDOW),
    Mutant(
        "backends/cpu/layer_window.py",
        "max(0, size - _NUM_SLOTS)",
        "size",
        LAYER_WINDOW,
    ),
    Mutant(
        "backends/cpu/weight_file.py",
        '("weight", "scale", "zero", "bias")',
        '("weight", "scale", "zero")',
        LAYER_WINDOW,
    ),
    Mutant("backends/cpu/layer_window.py", "if layer >= 0:", "if layer > 99:", LAYER_WINDOW),
    Mutant(
        "model/layer_window.py",
        "if size >= num_layers:",
        "if size > num_layers:",
        LAYER_WINDOW,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "groups.places[choice] * b.outputs_width",
        "choice * b.outputs_width",
        NATIVE_EXPERTS,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "y.pad(0, part.num_rows);",
        ";",
        "tests/backends/test_native.py -k scratch",
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "activated += num_rows * width",
        "activated += width",
        NATIVE_EXPERTS,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "x + begin * hidden, thread)",
        "x, thread)",
        NATIVE_EXPERTS,
    ),
    Mutant(
        "backends/cpu/cpp/kernels/experts.h",
        "1 / (1 + expf(-logits[from.num_experts + s]))",
        "1",
        "tests/backends/test_native.py -k transformers[qwen2_moe]",
    ),
    Mutant(
        "model/quantized_experts.py",
        "linear.out_features in (1, len(experts))",
        "linear.out_features == len(experts)",
        "tests/model/test_quantized_experts.py -k stay",
    ),
    # ---- scaffolding -----------------------------------------------------------------------------
    Mutant(
        "scaffolding/driver.py",
        'branch.on_failure == "drop" and self.run.account.exhausted is None',
        'branch.on_failure == "drop"',
        DRIVER,
    ),
    Mutant("scaffolding/driver.py", "item.cancel_flag = True\n", "pass\n", DRIVER),
    Mutant(
        "scaffolding/parallel.py",
        "self._cancelled = [other for other in self._cancelled if other is not item]",
        "pass",
        DRIVER,
    ),
    Mutant(
        "scaffolding/budget.py",
        "self._num_beyond = max(0, drawn - limit)",
        "self._num_beyond = max(0, drawn - limit - 1)",
        DRIVER,
    ),
    Mutant(
        "scaffolding/budget.py",
        "self.calls >= self.budget.calls",
        "self.calls > self.budget.calls",
        DRIVER,
    ),
    Mutant(
        "compat/tensorrt_llm/task_collection.py",
        "_watch_branches(request.branches, collection)",
        "pass",
        DRIVER,
    ),
    Mutant("answers/answers.py", "for members in [*rivals, []]", "for members in rivals", VOTES),
    Mutant(
        "answers/answers.py",
        "min([*members, *outstanding]) < winner.first",
        "min(outstanding) < winner.first",
        VOTES,
    ),
    Mutant(
        "llm/engine_thread.py",
        "self._interrupt.clear()  # of this one, and of those that are queued by now",
        "pass",
        "tests/llm/test_async_llm.py -k 'commands_that'",
    ),
    Mutant(
        "workers/live.py",
        "len(ended) - self._capacity + 1",
        "len(ended) - self._capacity",
        LIVE,
    ),
    Mutant(
        "workers/live.py",
        "for scope in _enclosing(path):",
        "for scope in paths:",
        LIVE,
    ),
    Mutant(
        "scaffolding/sampling.py",
        "name not in task.chosen and ",
        "",
        f"{TASKS} tests/compat/test_compatibility.py",
    ),
    Mutant("scaffolding/controller.py", "if id(value) not in memo:", "if True:", TASKS),
    Mutant(
        "rewards/step_format.py",
        "self._plain(step) + self._separator for",
        "step + self._separator for",
        PRM,
    ),
    Mutant(
        "sandbox/sandbox_process.py",
        "[(1, _ALL, (*range(8), 36, 37, 38, 1030, 1032))]",
        "[]",
        SANDBOX,
    ),
    Mutant(
        "sandbox/sandbox_process.py",
        "_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]",
        "_JUMP_IF_EQUAL, 1, 1, _AUDIT_ARCH[machine]",
        SANDBOX,
    ),
    Mutant("sandbox/sandbox_process.py", ", (1, _ALL ^ 0o2004000, (1,))", "", SANDBOX),
    Mutant(
        "sandbox/sandbox_process.py",
        "_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0",
        "2, 0",
        SANDBOX,
    ),
    Mutant(
        "sandbox/sandbox_process.py",
        "    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "    pass",
        SANDBOX,
    ),
    # ---- evaluation ------------------------------------------------------------------------------
    Mutant("evaluation/data_files.py", "(text, int(digits or 0))", "(text, digits)", DATA_FILES),
    Mutant("evaluation/data_files.py", "if _rank(name) == first", "if True", DATA_FILES),
    Mutant(
        "evaluation/graders.py",
        'result.status == "ok" and result.stdout.endswith(f"\\n{passed}\\n")',
        'result.status == "ok"',
        GRADERS,
    ),
    Mutant("answers/code_blocks.py", "(whole or fenced)[-1]", "fenced[-1]", GRADERS),
    # ---- methods ---------------------------------------------------------------------------------
    Mutant(
        "methods/dynasor.py", "earliest = probes[missing - 1]", "earliest = probes[-1]", DYNASOR
    ),
    Mutant(
        "methods/dynasor.py",
        "main.num_generated - forked_at >= self.chunk_size",
        "main.num_generated - forked_at > self.chunk_size",
        DYNASOR,
    ),
    Mutant("methods/parts/probe.py", "_priority(main) - 1", "_priority(main)", DYNASOR),
    Mutant("methods/parts/probe.py", "self._tokens_left < 1", "self._tokens_left <= 1", DYNASOR),
    Mutant("answers/answers.py", "answer_class == self._class", "True", DYNASOR),
    Mutant(
        "methods/majority_vote.py", "in (*running.pending, *waiting)]", "in running.pending]", VOTES
    ),
    Mutant("methods/majority_vote.py", "numbers[b] > winner.first", "True", VOTES),
    Mutant("methods/best_of_n.py", "[*scored][index]", "index", BEST_OF_N),
    # What distinguishes each method from those beside it.
    Mutant("methods/beam_search.py", "best_of(beams, count // self.width)", "beams[:1]", SEARCH),
    Mutant("methods/dvts.py", "best_of(beams, 1)", "beams[:1]", SEARCH),
    Mutant(
        "methods/parts/particles.py",
        "*(particles[index] for index in drawn)]",
        "*particles[: len(drawn)]]",
        SEARCH,
    ),
    Mutant(
        "methods/particle_gibbs.py",
        "references = [particles[index] for index in drawn]",
        "references = []",
        SEARCH,
    ),
    Mutant("methods/mcts.py", "child.bound(self.exploration)", "child.bound(0.0)", SEARCH),
    Mutant("methods/tree_of_thoughts.py", "float(votes.count(number))", "0.0", SEARCH),
    Mutant(
        "methods/repeated_sampling.py",
        "index = accepted[0] if accepted",
        "index = 0 if accepted",
        "tests/methods/test_repeated_sampling.py",
    ),
    Mutant(
        "methods/adaptive_compute.py",
        "for sample in worst[:num_pruned]:",
        "for sample in worst[:0]:",
        "tests/methods/test_adaptive_compute.py",
    ),
    Mutant(
        "methods/fork_think.py",
        "key=lambda point: point.confidence",
        "key=lambda point: -point.confidence",
        "tests/methods/test_fork_think.py",
    ),
    Mutant(
        "methods/deepconf.py",
        "for n, value in confidences.items() if value >= lowest}",
        "for n, value in confidences.items()}",
        DEEPCONF,
    ),
    Mutant(
        "rewards/confidence.py",
        "(lowest := lowest_group(new, window)) >= threshold",
        "(lowest := lowest_group(new, window)) >= -math.inf",
        DEEPCONF,
    ),
    Mutant("methods/self_refine.py", "in text.lower()", "in ''", REVISION),
    Mutant(
        "methods/sequential_revision.py",
        "latest if pool.winner is None else latest - pool.winner.first",
        "latest",
        REVISION,
    ),
    Mutant(
        "methods/spct.py",
        "sorted(ranked[:num_voters])",
        "sorted(ranked)",
        "tests/methods/test_spct.py",
    ),
    Mutant(
        "rewards/genrm_controller.py",
        "math.fsum(probabilities) / len(probabilities) if probabilities",
        "probabilities[0] if probabilities",
        "tests/methods/test_genrm.py",
    ),
    Mutant(
        "methods/compute_optimal.py",
        "self._policy.method(difficulty)",
        "self._policy.method(0.0)",
        "tests/methods/test_compute_optimal.py",
    ),
    Mutant(
        "methods/archon.py",
        'ranking_in(chat.output_str or "", len(candidates))',
        "list(range(len(candidates)))",
        "tests/methods/test_archon.py",
    ),
    Mutant(
        "methods/sleep_time.py",
        'question.input_str = f"{self._memory.text}{suffix}"',
        'question.input_str = f"{self.context}{suffix}"',
        "tests/methods/test_sleep_time.py",
    ),
    Mutant(
        "methods/specreason.py",
        "is_kept = score >= self.threshold",
        "is_kept = True",
        "tests/methods/test_specreason.py",
    ),
    Mutant(
        "methods/hogwild.py",
        "if other is not worker:",
        "if False:",
        "tests/methods/test_hogwild.py",
    ),
    Mutant(
        "methods/hogwild.py",
        '        AttentionGroup(parts, f"{task.input_str}{self.opening}")',
        "        pass",
        "tests/methods/test_hogwild.py",
    ),
    Mutant(
        "model/attention/concurrent.py",
        "turned = rotated(q, self._rotations, turn)",
        "turned = rotated(q, self._rotations, 0)",
        "tests/engine/test_concurrent_attention.py",
    ),
    Mutant(
        "engine/scheduler.py",
        "limit = min(limit, sequence.others[0].num_common)",
        "limit = min(limit, len(sequence.tokens))",
        "tests/engine/test_concurrent_attention.py",
    ),
    Mutant(
        "workers/live.py",
        "if other.over and not other.is_pinned",
        "if other.over",
        "tests/methods/test_parallel_thinking.py -k 'are_read'",
    ),
    Mutant(
        "methods/parallel_thinking.py",
        "self._go_on(main, threads[0].part, joined, joined.removeprefix(first))",
        "self._go_on(main, part, joined, joined)",
        "tests/methods/test_parallel_thinking.py",
    ),
    Mutant(
        "methods/parts/steps.py",
        "self._base = _without_output(judged)",
        "self._base = None",
        "tests/methods/test_specreason.py",
    ),
    Mutant(
        "methods/parts/steps.py",
        'min(logprobs) if self._aggregation == "min" else',
        'min(logprobs) if self._aggregation != "min" else',
        "tests/methods/test_specreason.py",
    ),
    Mutant(
        "methods/first_answer.py",
        "if marker is not None and not chain.end_flag:",
        "if False:",
        "tests/methods/test_first_answer.py",
    ),
    Mutant(
        "methods/compute_optimal.py",
        "chosen, difficulty = yield from self._scored(self.reward_controller, probes)",
        "chosen, _ = yield from self._scored(self.reward_controller, probes)",
        "tests/methods/test_compute_optimal.py",
    ),
    Mutant(
        "engine/engine.py",
        "sequence.table.rewind(min(sequence.table.length, first - 1))",
        "pass",
        ENGINE,
    ),
    Mutant("methods/drag.py", "{self._block(self._retrieve(question))}", "", RETRIEVAL),
    Mutant(
        "methods/mcts.py",
        "going = [child for child in node.children if not child.exhausted]",
        "going = node.children",
        SEARCH,
    ),
    Mutant(
        "methods/mcts.py",
        "math.sqrt(math.log(self.parent.visits) / self.visits)",
        "math.sqrt(1.0 / self.visits)",
        SEARCH,
    ),
    Mutant(
        "methods/mcts.py",
        "math.fsum(map(_score, below)) / len(below)",
        "max(map(_score, below))",
        SEARCH,
    ),
    Mutant(
        "methods/tree_of_thoughts.py",
        "for task in replies[id(beam)])",
        "for task in replies[id(beam)][:1])",
        SEARCH,
    ),
    Mutant(
        "methods/tree_of_thoughts.py",
        "reversed(best_of(entered, len(entered)))",
        "reversed(entered)",
        SEARCH,
    ),
    Mutant(
        "methods/tree_of_thoughts.py",
        "self._judge(search, (yield from search.complete_best()))",
        "search.score((yield from search.complete_best()))",
        SEARCH,
    ),
    Mutant(
        "methods/beam_search.py",
        "search.merge([*ended, *grown])",
        "search.merge(grown)",
        SEARCH,
    ),
    Mutant(
        "methods/parts/search.py",
        "next((beam for beam in ranked if beam.has_ended), ranked[0])",
        "ranked[0]",
        SEARCH,
    ),
    Mutant(
        "methods/parts/particles.py",
        "path[min(step, len(path) - 1)]",
        "path[-1]",
        SEARCH,
    ),
    Mutant(
        "methods/parts/particles.py",
        "first, step = number * count, 0",
        "first, step = 0, 0",
        SEARCH,
    ),
    Mutant(
        "methods/adaptive_compute.py",
        "keep / (keep + restart) if",
        "keep if",
        "tests/methods/test_adaptive_compute.py",
    ),
    Mutant(
        "methods/budget_vote.py",
        "samples[first if winner is None else winner.first]",
        "samples[0]",
        THINKING_METHODS,
    ),
    Mutant(
        "methods/iterdrag.py",
        "self._retrieve(query, progress.shown)",
        'self._retrieve(task.question_text or "", progress.shown)',
        RETRIEVAL,
    ),
    Mutant(
        "methods/dynasor.py",
        "task.result = task.result and task.result.cut(text + written, count)",
        'task.result = task.result and task.result.cut((task.output_str or "") + written, count)',
        DYNASOR,
    ),
    Mutant(
        "methods/best_of_n.py",
        "winner, _ = pool.heaviest(scored)",
        "winner = pool.winner",
        BEST_OF_N,
    ),
    Mutant(
        "methods/iterdrag.py",
        "self._retrieve(query, progress.shown)",
        "self._retrieve(query)",
        RETRIEVAL,
    ),
    # ---- gguf ------------------------------------------------------------------------------------
    Mutant("gguf/file.py", "if end > size:", "if False:", GGUF),
    Mutant("gguf/file.py", "if info.offset < end:", "if False:", GGUF),
    Mutant("gguf/file.py", "if info.offset % alignment:", "if False:", GGUF),
    Mutant("gguf/file.py", "if count > most or", "if", GGUF),
    Mutant("gguf/file.py", "or own_number != number:", "or False:", GGUF),
    Mutant("gguf/rope.py", "factors.append(1 / (", "factors.append((", GGUF),
    Mutant(
        "gguf/model_config.py", "if num_layers > len(metadata.file.tensors):", "if False:", GGUF
    ),
    Mutant(
        "gguf/model_config.py",
        '    if metadata.size("block_count") == num_layers_27b:',
        "    if False:",
        GGUF,
    ),
    Mutant(
        "gguf/tensor_names.py",
        "shape = (1, shape[-1])",
        "pass",
        GGUF,
    ),
    Mutant("gguf/tensor_names.py", "if strays:", "if False:", GGUF),
    Mutant(
        "gguf/tensor_names.py",
        '_PERMUTED = ("llama", "mistral", "smollm3", "bamba"',
        '_PERMUTED = ("llama", "mistral", "smollm3"',
        GGUF,
    ),
    Mutant("gguf/tensor_names.py", "shape=shape, head_groups=groups, is_decay=True", "", GGUF),
    Mutant(
        "gguf/recurrent_config.py",
        'feed_forward if width else "attention" if kv_heads else "mamba"',
        'feed_forward if width else "mamba"',
        GGUF,
    ),
    Mutant("gguf/recurrent_config.py", "if _multipliers(metadata):", "if False:", GGUF),
    Mutant(
        "gguf/tokenizer.py",
        "is_special = vocabulary.types[token_id] in special",
        "is_special = True",
        GGUF,
    ),
    Mutant("gguf/tokenizer.py", "-scores[token_id], -length,", "-scores[token_id], length,", GGUF),
    Mutant("gguf/generation_config.py", "if _HARMONY_RETURN in ids:", "if False:", GGUF),
    Mutant("gguf/view.py", "if view.exists() and not _is_whole(view):", "if False:", GGUF),
    Mutant("gguf/view.py", '[state["size"], state["mtime_ns"]] != expected', "False", GGUF),
    # ---- upstream servers, KV events -------------------------------------------------------------
    Mutant("workers/partial_answer.py", "fields[name] -= num_tokens", "pass", PARTIAL),
    Mutant("workers/partial_answer.py", "if text and self._overlap:", "if False:", PARTIAL),
    Mutant("workers/partial_answer.py", "shorter + self.chat", "shorter", PARTIAL),
    Mutant("workers/partial_answer.py", "if not text.strip():", "if False:", PARTIAL),
    Mutant("workers/partial_answer.py", "usage.completion_tokens += self._num_tokens", "", PARTIAL),
    Mutant("workers/upstream.py", "if self._partial.is_complete:", "if False:", PARTIAL),
    Mutant("workers/upstream.py", "if status in _ENDING:", "if False:", PARTIAL),
    Mutant("kv/events.py", "self._events.append(_CLEARED)", "pass", EVENTS),
    Mutant("kv/events.py", "== (events[-1][1][-1],", "!= (events[-1][1][-1],", EVENTS),
    Mutant("kv/pool.py", "self.recorder.removed(digest)", "pass", EVENTS),
]


def main() -> int:
    """Run the mutants that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", nargs="*", help="only those with it in their path or their line")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not run the tests without mutants first"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.texts
        or any(text in f"{mutant.file}: {mutant.original}" for text in arguments.texts)
    ]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.file}: {_line(mutant.original)} -> {_line(mutant.replacement)}")
        return 0
    findings = not_applicable(chosen) or run(chosen, max(1, arguments.jobs), arguments.unchecked)
    counts = Counter(finding.outcome for finding in findings)
    for finding in findings:
        if finding.outcome != "killed":
            print(finding)
    print(json.dumps({"script": "mutants", "mutants": len(chosen), **counts}))
    return int(counts["killed"] < len(findings))


def not_applicable(mutants: Sequence[Mutant]) -> list[Finding]:
    """The mutants whose line is not in the working tree any more, with the reason."""
    reasons = [(mutant, _mutated(ROOT, mutant)[1]) for mutant in mutants]
    return [Finding(mutant, "not applicable", 0.0, reason) for mutant, reason in reasons if reason]


def _mutated(tree: Path, mutant: Mutant) -> tuple[str, str]:
    """The text of the file with the mutant; or no text, and why there is none."""
    path = tree / PACKAGE / mutant.file
    if not path.is_file():
        return "", "there is no such file"
    text = path.read_text(encoding="utf-8")
    if (count := text.count(mutant.original)) != 1:
        return "", f"its text is there {count} times, not once"
    mutated = text.replace(mutant.original, mutant.replacement)
    if path.suffix != ".py":
        return mutated, ""
    try:
        compile(mutated, str(path), "exec")  # what does not would count as killed
    except SyntaxError as error:
        return "", f"it does not compile: {error}"
    return mutated, ""


def run(mutants: Sequence[Mutant], jobs: int, unchecked: bool) -> list[Finding]:
    """Try each mutant in one of ``jobs`` copies of the tracked files.

    Args:
        mutants: what to try.
        jobs: how many at a time.
        unchecked: take it that the tests pass where nothing is broken.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(_copy(Path(directory) / str(number)))

        def passes(tests: str) -> bool:
            if unchecked:
                return True
            copy = copies.get()
            try:
                return _pytest(copy, tests)[0] == _NO_TESTS_FAILED
            finally:
                copies.put(copy)

        def attempt(mutant: Mutant) -> Finding:
            copy = copies.get()
            try:
                finding = _try(copy, mutant, passing[mutant.tests])
            finally:
                copies.put(copy)
            print(finding, flush=True)
            return finding

        with ThreadPoolExecutor(jobs) as pool:
            selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
            passing = dict(zip(selections, pool.map(passes, selections), strict=True))
            return list(pool.map(attempt, mutants))


def _try(copy: Path, mutant: Mutant, passes: bool) -> Finding:
    """Apply one mutant, run its tests, put the file back."""
    path = copy / PACKAGE / mutant.file
    text, (mutated, reason) = path.read_text(encoding="utf-8"), _mutated(copy, mutant)
    if reason:  # the file was changed since the script began
        return Finding(mutant, "not applicable", 0.0, reason)
    if not passes:
        return Finding(mutant, "broken tests", 0.0, f"without the mutant: {mutant.tests}")
    began = time.perf_counter()
    try:
        path.write_text(mutated, encoding="utf-8")
        code, detail = _pytest(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == _NO_TESTS_FAILED:
        outcome = "alive"
    else:
        outcome = "killed" if code in (_SOME_TESTS_FAILED, _INTERRUPTED) else "broken tests"
    return Finding(mutant, outcome, time.perf_counter() - began, detail)


def _pytest(copy: Path, tests: str) -> tuple[int, str]:
    """Run tests up to the first failure: pytest's exit code, and which test failed."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a stale one would hide a mutant of the same size
        "OMP_NUM_THREADS": "1",
    }
    command = f"{sys.executable} -m pytest {' '.join(options)} {tests}"
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            shell=True,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _SOME_TESTS_FAILED, "timed out"
    failed = [line.split()[1] for line in done.stdout.split("\n") if line.startswith("FAILED ")]
    return done.returncode, failed[0].partition("::")[2] if failed else ""


def _copy(target: Path) -> Path:
    """The tracked files as they are in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _line(text: str) -> str:
    """A text on one line, shortened."""
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")


if __name__ == "__main__":
    sys.exit(main())
