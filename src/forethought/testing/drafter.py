"""``check_drafter``: a test suite for drafters.

::

    from forethought.testing import check_drafter

    check_drafter(MyDrafter())                                    # on the embedded reasoner
    check_drafter(NGramDecodingConfig(max_draft_len=4), "/path/to/model")

Runs in float32, where equality is exact. A drafter with low acceptance passes; one that changes the
output, leaks a page or raises does not. Where drafts are drawn at random, outputs are compared in
distribution (``distribution.py``). A configuration with a lossy acceptance rule does not pass. A
drafter object is shut down with each engine that it has drafted for, and used again with the next
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forethought.assets import reasoner_dir
from forethought.config.drafters import UserProvidedDecodingConfig
from forethought.config.engine import KvCacheConfig, LlmArgs
from forethought.config.sampling import SamplingParams
from forethought.config.speculation import DecodingBaseConfig
from forethought.engine import resolve
from forethought.engine.engine import Engine
from forethought.engine.sequence import Sequence as Live
from forethought.speculative.drafter import (
    Drafter,
    DraftKind,
    DraftRequest,
    ResourceManager,
    ScheduledRequests,
)
from forethought.testing import distribution

NUM_TOKENS = 32
"""Tokens generated per request."""
SAMPLING_BATCH_SIZE = 256
"""Batch size where many samples are drawn."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
PENALISED = SamplingParams(
    temperature=0.0,
    max_tokens=NUM_TOKENS,
    min_tokens=8,
    repetition_penalty=1.2,
    frequency_penalty=0.2,
)


def check_drafter(
    drafter: Drafter | DecodingBaseConfig,
    model: str | Path | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    max_draft_len: int = 4,
) -> list[str]:
    """Run the suite; returns the sentences that hold, one per check.

    Args:
        drafter: an object, or a configuration.
        model: local Hugging Face directory of the target; None: the embedded reasoner.
        prompts: token ids, at least three prompts; None: some with repetitions.
        max_draft_len: for a drafter object, the greatest depth of its drafts.

    Raises:
        AssertionError: with the sentence that does not hold.
        UsageError: the model or the drafter cannot be loaded.
    """
    config = drafter
    if isinstance(drafter, Drafter):
        config = UserProvidedDecodingConfig(
            drafter=drafter,
            max_draft_len=max_draft_len,
            max_total_draft_tokens=max(max_draft_len, drafter.nodes(max_draft_len)),
        )
    suite = _Suite(config, Path(model or reasoner_dir()), prompts or _prompts())
    return suite.run()


def _prompts() -> list[list[int]]:
    """Ids that every vocabulary has; the longest prompt exceeds a page."""
    verse = [40, 51, 62, 73, 84]
    return [verse * 2, [45], [90, 91] * 12 + verse, [*verse, 99]]


class _Suite:
    """The checks, each a method named by what it expects."""

    def __init__(self, config: Any, model: Path, prompts: Sequence[Sequence[int]]) -> None:
        self._config, self._model = config, model
        self._prompts = [list(prompt) for prompt in prompts]
        self._plain = {
            params: self._outputs(self._engine(drafts=False), params)
            for params in (GREEDY, PENALISED, SAMPLED)
        }

    def run(self) -> list[str]:
        checks: list[Callable[[], None]] = [
            self.greedy_tokens_are_those_of_plain_decoding,
            self.penalties_see_the_path_of_each_node,
            self.sampled_tokens_do_not_depend_on_the_batch,
            self.sampled_outputs_have_the_distribution_of_plain_decoding,
            self.rewinds_forget,
            self.forks_agree,
            self.limits_and_stop_tokens_hold,
            self.aborts_free_all_pages,
            self.a_small_cache_changes_nothing,
        ]
        held = []
        for check in checks:
            sentence = check.__name__.replace("_", " ")
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"it does not hold that {sentence}: {error}") from error
            held.append(sentence)
        return held

    # ---- what must hold ---------------------------------------------------------------------

    def greedy_tokens_are_those_of_plain_decoding(self) -> None:
        """For several page sizes, with and without a prefix cache."""
        for page_size in (1, 3, 16):
            for reuse in (True, False):
                machine = self._engine(page_size=page_size, reuse=reuse)
                assert self._outputs(machine, GREEDY) == self._plain[GREEDY]
                assert self._outputs(machine, GREEDY) == self._plain[GREEDY], "a second time"
                self._expect_empty(machine)

    def penalties_see_the_path_of_each_node(self) -> None:
        """The distribution of a token depends on all tokens before it, drafted ones too."""
        machine = self._engine()
        assert self._outputs(machine, PENALISED) == self._plain[PENALISED]
        self._expect_empty(machine)

    def sampled_tokens_do_not_depend_on_the_batch(self) -> None:
        """A seeded request has the same output alone and in a batch."""
        machine = self._engine()
        together = self._outputs(machine, SAMPLED)
        self._expect_empty(machine)
        for prompt, output in zip(self._prompts, together, strict=True):
            machine = self._engine()
            sequence = machine.add(prompt, SAMPLED)[0]
            self._drain(machine)
            assert sequence.output == output
            self._expect_empty(machine)

    def sampled_outputs_have_the_distribution_of_plain_decoding(self) -> None:
        """Token for token where all drafts are points; in distribution where one was drawn."""
        machine = self._engine()
        kinds = _record_kinds(machine)
        outputs = self._outputs(machine, SAMPLED)
        self._expect_empty(machine)
        if kinds <= {DraftKind.POINT}:
            assert outputs == self._plain[SAMPLED], "drafts that are points change no token"
            return
        prompt, tokens = (
            self._prompts[0],
            SAMPLING_BATCH_SIZE * (len(self._prompts[0]) + distribution.LENGTH + 32),
        )
        expected = distribution.exact_distribution(self._engine(drafts=False), prompt)
        machine = self._engine(tokens=tokens, batch_size=SAMPLING_BATCH_SIZE)
        p_value = distribution.p_value(distribution.sample(machine, prompt), expected)
        assert p_value > distribution.P_VALUE, f"the distribution differs: p = {p_value:.1e}"
        self._expect_empty(machine)

    def rewinds_forget(self) -> None:
        """After a rewind the same tokens are generated again."""
        machine = self._engine()
        for prompt, output in zip(self._prompts, self._plain[GREEDY], strict=True):
            live = machine.open(prompt)
            for length in (NUM_TOKENS, NUM_TOKENS // 2, 3):
                machine.resume(live, GREEDY.replace(max_tokens=length))
                self._drain(machine)
                assert live.tokens == prompt + output[:length]
                machine.rewind(live, len(prompt))
            machine.close(live)
        self._expect_empty(machine)

    def forks_agree(self) -> None:
        """A fork of a running sequence, at any of its lengths, continues as its parent does."""
        machine = self._engine()
        prompt, output = self._prompts[0], self._plain[GREEDY][0]
        parent = machine.add(prompt, GREEDY, keep=True)[0]
        forks: list[Live] = []
        while machine.has_work and len(forks) < 6:
            self._step(machine)
            fork = machine.fork(parent, len(parent.tokens) - len(forks) % 2)
            if len(fork.tokens) < len(prompt) + NUM_TOKENS:
                num_remaining = len(prompt) + NUM_TOKENS - len(fork.tokens)
                machine.resume(fork, GREEDY.replace(max_tokens=num_remaining))
            forks.append(fork)
        self._drain(machine)
        for live in (parent, *forks):
            assert live.tokens == prompt + output
            machine.close(live)
        self._expect_empty(machine)

    def limits_and_stop_tokens_hold(self) -> None:
        """No token comes after ``max_tokens`` or a stop token, wherever a draft would end."""
        output = self._plain[GREEDY][0]
        for limit in range(1, 8):
            assert self._one(GREEDY.replace(max_tokens=limit)) == output[:limit]
        for stop in set(output[:8]):
            params = GREEDY.replace(stop_token_ids=(stop,))
            assert self._one(params) == output[: output.index(stop) + 1]

    def aborts_free_all_pages(self) -> None:
        for steps in range(1, 8):
            machine = self._engine()
            samples = [machine.add(prompt, GREEDY)[0] for prompt in self._prompts]
            for _ in range(steps):
                self._step(machine)
            for sample in samples[::2]:
                machine.abort(sample)
            self._drain(machine)
            self._expect_empty(machine)

    def a_small_cache_changes_nothing(self) -> None:
        """Requests that preempt each other have the same output."""
        longest = max(map(len, self._prompts)) + NUM_TOKENS
        machine = self._engine(page_size=4, tokens=longest + 12)
        assert self._outputs(machine, GREEDY) == self._plain[GREEDY]
        self._expect_empty(machine)

    # ---- helpers -----------------------------------------------------------------------------

    def _engine(
        self,
        *,
        page_size: int = 16,
        tokens: int = 2048,
        reuse: bool = True,
        drafts: bool = True,
        batch_size: int = 64,
    ) -> Engine:
        args = LlmArgs(
            dtype="float32",
            max_batch_size=batch_size,
            kv_cache_config=KvCacheConfig(
                tokens_per_block=page_size, max_tokens=tokens, enable_block_reuse=reuse
            ),
            speculative_config=(self._config,) if drafts else (),
        )
        return resolve.build(args, self._model)

    def _outputs(self, machine: Engine, params: SamplingParams) -> list[list[int]]:
        sequences = [machine.add(prompt, params)[0] for prompt in self._prompts]
        self._drain(machine)
        return [sequence.output for sequence in sequences]

    def _one(self, params: SamplingParams) -> list[int]:
        machine = self._engine()
        sequence = machine.add(self._prompts[0], params)[0]
        self._drain(machine)
        self._expect_empty(machine)
        return sequence.output

    def _drain(self, machine: Engine) -> None:
        steps = 0
        while machine.has_work:
            self._step(machine)
            steps += 1
            assert steps < 10_000, "the engine does not finish"

    @staticmethod
    def _step(machine: Engine) -> None:
        for event in machine.step():
            assert event.error is None, event.error
        machine.check_integrity()

    @staticmethod
    def _expect_empty(machine: Engine) -> None:
        machine.check_integrity()
        assert machine.pool.in_use == 0, f"{machine.pool.in_use} pages are still held"
        failures = machine.stats.draft_failures
        assert failures == 0, f"the drafter failed {failures} times; what it raised was logged"
        machine.shutdown()


def _record_kinds(machine: Engine) -> set[DraftKind]:
    """The kinds of an engine's drafts, filled while it runs."""
    kinds: set[DraftKind] = set()
    for entry in machine.speculation.drafters:
        entry.drafter = _KindRecorder(entry.drafter, kinds)
    return kinds


class _KindRecorder(Drafter):
    """Records the kinds of another drafter's drafts."""

    def __init__(self, inner: Drafter, kinds: set[DraftKind]) -> None:
        self._inner, self._kinds = inner, kinds

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        requests = list(scheduled_requests.generation_requests)
        self._inner.prepare_draft_tokens(scheduled_requests, resource_manager)
        self._kinds |= {request.draft.kind for request in requests if len(request.draft)}

    def nodes(self, depth: int) -> int:
        return self._inner.nodes(depth)

    def update(self, scheduled_requests: ScheduledRequests) -> None:
        self._inner.update(scheduled_requests)

    def release(self, request: DraftRequest) -> None:
        self._inner.release(request)

    def shutdown(self) -> None:
        self._inner.shutdown()
