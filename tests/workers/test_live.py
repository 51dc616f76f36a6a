"""Where a live sequence can be continued, and which of several; without an engine."""

import asyncio

import pytest

from forethought.config.sampling import SamplingParams
from forethought.outputs import CompletionOutput, FinishReason, Logprob, Usage
from forethought.scaffolding.budget import Budget, BudgetAccount
from forethought.scaffolding.execution_scope import ExecutionScope
from forethought.workers.live import LiveSession, SessionCache

ROOT = ExecutionScope("r", "", BudgetAccount(Budget()))
PIECES = {1: "ab", 2: "c}", 3: "{d", 9: ""}  # by token


class Stream:
    def __init__(self, output):
        self.output = output

    async def finish(self):
        return self.output


class Session:
    """Stands in for ``AsyncSession``: a prompt of five tokens, and an output that is there."""

    reads, sequence_id = frozenset(), None

    def __init__(self, output=None):
        self.tokens, self.usage, self.output = [0] * 5, Usage(), output

    def stream(self, params):
        return Stream(self.output)

    async def close(self):
        pass


class Words:
    """Stands in for ``Tokenizer``: every token is a piece of text; 0 is in prompts only."""

    special_ids, byte_values = frozenset({0}), {}

    def piece(self, token):
        return PIECES[token]

    def spelling(self, token):
        return PIECES[token], None

    def decode(self, tokens, skip_special_tokens):
        return "".join(PIECES[token] for token in tokens)


def live(prompt="P", tokens=(), text="", reason=FinishReason.LENGTH, stop=None, **params):
    output = CompletionOutput(0, text, list(tokens), finish_reason=reason, stop_reason=stop)
    made = LiveSession(Session(output), prompt, Words(), Usage(), None)
    made.begin(SamplingParams(**params))
    asyncio.run(made.reach(None))
    made.show(None)
    return made


@pytest.mark.parametrize(
    ("made", "spelled", "cut"),
    [
        # ended by length: all tokens, even if the last one shows no text yet
        (live(tokens=[1, 9], text="ab"), ("Pab", 7), (7, "")),
        # ended by a token: without it
        (live(tokens=[1, 9], text="ab", reason=FinishReason.STOP), ("Pab", 6), (6, "")),
        # or with it, where it is part of the text
        (
            live(
                tokens=[1, 2],
                text="abc}",
                reason=FinishReason.STOP,
                include_stop_str_in_output=True,
            ),
            ("Pabc}", 7),
            (7, ""),
        ),
        # cut by a stop string at a token's end, and inside of one
        (live(tokens=[1, 2], text="ab", reason=FinishReason.STOP, stop="c"), ("Pab", 6), (6, "")),
        (live(tokens=[1, 2], text="abc", reason=FinishReason.STOP, stop="}"), ("Pab", 6), (6, "c")),
        # nothing was said
        (live(tokens=[9], text="", reason=FinishReason.STOP), None, (5, "")),
        (live(("ids",), tokens=[1], text="ab"), None, (6, "")),
    ],
)
def test_what_is_kept_is_what_makes_the_text(made, spelled, cut):
    assert made.spelled == spelled
    assert made.cut(None) == cut


def test_a_fork_at_fewer_tokens_keeps_exactly_those():
    assert live(tokens=[1, 2], text="ab", reason=FinishReason.STOP, stop="c").cut(1) == (6, "")
    assert live(tokens=[1, 2, 3], text="abc}{d").cut(2) == (7, "")


def under_way(tokens, **params):
    """A sequence of which the engine knows so many tokens, and goes on."""

    class Going(Stream):
        async def reach(self, count, hold=None):
            return self.output

    scores = [{token: Logprob(-float(token), 1)} for token in tokens]
    output = CompletionOutput(0, "all of it", list(tokens), logprobs=scores)
    made = LiveSession(Session(output), "P", Words(), Usage(), None)
    made.session.stream = lambda given: Going(output)
    made.begin(SamplingParams(**params))
    asyncio.run(made.reach(1))
    return made


def test_a_task_sees_what_there_was_when_there_were_so_many_tokens():
    made = under_way([1, 2, 3, 9], logprobs=0, stop="}{x")
    seen = [made.show(count) for count in range(5)]
    assert [one.text for one in seen] == ["", "ab", "abc", "abc}{d", "abc}{d"]  # "}" may be a stop
    assert [one.token_ids for one in seen] == [[1, 2, 3, 9][:count] for count in range(5)]
    assert [one.cumulative_logprob for one in seen[1:]] == [-1, -3, -6, -15]
    assert [len(one.logprobs) for one in seen[1:]] == [1, 2, 3, 4]
    assert made.show(2).token_ids == [1, 2, 3, 9], "what was seen is not taken back"


def test_a_task_sees_the_end_once_it_has_seen_everything_before():
    made = live(tokens=[1, 2, 3], text="abc}{d")
    made.shown = CompletionOutput(0)
    for count in (1, 2):
        assert made.show(count).finish_reason is None
        assert (made.ended, made.over, made.spelled) == (True, False, None)
        assert made.cut(count) == made.cut(None) == (5 + count, "")
    assert made.show(3) is made.output
    assert made.over


def test_a_sequence_is_not_put_away_before_its_end_was_seen():
    parking, unseen = SessionCache(1), live(tokens=[1, 2], text="abc}")
    unseen.shown = CompletionOutput(0)
    others = [live(p, tokens=[1], text="ab") for p in "QRS"]
    assert parking.add(ROOT, unseen) == parking.add(ROOT, others[0]) == []
    assert parking.add(ROOT, others[1]) == [others[0]]
    unseen.show(2)
    assert parking.add(ROOT, others[2]) == [unseen, others[1]]


def found(parking, prompt, scope=ROOT):
    source = parking.find(scope, prompt)
    return source and (source.length, source.rest)


def test_the_longest_text_wins_and_the_rest_is_put_behind_it():
    parking = SessionCache(8)
    parking.add(ROOT, live(tokens=[1], text="ab"))
    parking.add(ROOT, live(tokens=[1, 2], text="abc}"))
    assert found(parking, "Pabc}!") == (7, "!")
    assert found(parking, "Pabc") == (6, "c")
    assert found(parking, "Pab") == (6, "")


def test_a_prompt_is_shared_only_word_for_word():
    parking = SessionCache(8)
    parking.add(ROOT, live("P1", tokens=[9]))
    parking.add(ROOT, live((4, 5), tokens=[1], text="ab"))
    assert found(parking, "P1") == (5, "")
    assert found(parking, "P12") is None
    assert found(parking, (4, 5)) == (5, "")
    assert found(parking, (4, 5, 6)) is None


def test_branches_see_what_is_around_them_and_share_prompts_with_those_beside():
    parking, first, second = SessionCache(8), ROOT.child(0), ROOT.child(1)
    parking.add(first, live("P", tokens=[1], text="ab"))
    assert found(parking, "Pab!", first) == (6, "!")
    assert found(parking, "Pab!", first.child(3)) == (6, "!")
    assert found(parking, "Pab!", second) is None
    assert found(parking, "Pab!", ROOT) is None
    assert found(parking, "P", second) == (5, "")
    assert parking.end_scope(second.scope_id) == []
    assert len(parking.end_scope(first.scope_id)) == 1
    assert found(parking, "P", second) is None


def test_a_branch_does_not_see_one_beside_it_whose_number_begins_alike():
    parking = SessionCache(8)
    parking.add(ROOT.child(1), live("P", tokens=[1], text="ab"))
    assert found(parking, "Pab!", ROOT.child(12)) is None
    assert found(parking, "Pab!", ROOT.child(1).child(2)) == (6, "!")


def test_what_was_not_used_for_longest_leaves_first():
    parking, lives = SessionCache(2), [live(p, tokens=[1], text="ab") for p in "PQRS"]
    assert parking.add(ROOT, lives[0]) == []
    assert parking.add(ROOT, lives[1]) == []
    assert found(parking, "Pab") == (6, "")  # P is used
    assert parking.add(ROOT, lives[2]) == [lives[1]]
    assert found(parking, "Qab") is None
    assert parking.add(ROOT, lives[3]) == [lives[0]]


def test_what_another_one_reads_stays():
    parking, lives = SessionCache(1), [live(p, tokens=[1], text="ab") for p in "PQRS"]
    for number, each in enumerate(lives):
        each.session.sequence_id = number
    lives[1].session.reads = frozenset({0})
    assert parking.add(ROOT, lives[0]) == []
    assert parking.add(ROOT, lives[1]) == []  # it reads the first one
    assert parking.add(ROOT, lives[2]) == [lives[1]]
    assert parking.add(ROOT, lives[3]) == [lives[0], lives[2]]


def test_sequences_of_other_requests_are_never_found():
    parking = SessionCache(2)
    parking.add(ROOT, live(tokens=[1], text="ab"))
    other = ExecutionScope("s", "", BudgetAccount(Budget()))
    assert found(parking, "Pab", other) is None
    assert len(parking.clear()) == 1
    assert found(parking, "Pab") is None
