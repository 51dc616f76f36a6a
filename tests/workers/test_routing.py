"""Golden tests of the router's decisions, computed by hand. A block is 16 characters."""

from base64 import b64encode

import pytest

from forethought.errors import ParameterError
from forethought.workers.routing import (
    BLOCK,
    MAX_FAILURES,
    PrefixTree,
    Router,
    Routing,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def blocks(*letters):
    """A text of one block per letter."""
    return "".join(letter * BLOCK for letter in letters)


def router(count=2, **thresholds):
    urls = [f"http://server-{number}:1/v1" for number in range(count)]
    clock = Clock()
    made = Router(urls, Routing(**thresholds), clock)
    made.clock = clock
    return made, made.servers


def load(router, server, count):
    """Let ``server`` have so many requests in flight."""
    server.num_in_flight = count


# ---- the prefix tree --------------------------------------------------------------------------


def test_a_prefix_is_matched_in_whole_blocks():
    tree = PrefixTree(100)
    tree.insert(blocks("a", "b", "c"))
    assert tree.match(blocks("a", "b", "x")) == 2 * BLOCK
    assert tree.match(blocks("a", "b") + "c" * (BLOCK - 1)) == 2 * BLOCK
    assert tree.match(blocks("b", "c")) == 0  # the same blocks behind another prefix
    assert tree.match("") == 0


def test_a_branch_shares_the_blocks_of_its_prefix():
    tree = PrefixTree(100)
    tree.insert(blocks("a", "b", "c"))
    tree.insert(blocks("a", "b", "d"))
    assert len(tree) == 4
    assert tree.match(blocks("a", "b", "c")) == tree.match(blocks("a", "b", "d")) == 3 * BLOCK


def test_the_least_recently_used_leaves_are_forgotten_first():
    tree = PrefixTree(4)
    tree.insert(blocks("a", "b", "c"))
    tree.insert(blocks("a", "d"))  # a b c d: full
    tree.insert(blocks("a", "e"))  # c is the oldest leaf
    assert len(tree) == 4
    assert tree.match(blocks("a", "b", "c")) == 2 * BLOCK
    assert tree.match(blocks("a", "d")) == tree.match(blocks("a", "e")) == 2 * BLOCK


def test_a_prompt_longer_than_the_bound_keeps_its_beginning():
    tree = PrefixTree(2)
    tree.insert(blocks("a", "b", "c", "d"))
    assert len(tree) == 2
    assert tree.match(blocks("a", "b", "c", "d")) == 2 * BLOCK


# ---- choices ----------------------------------------------------------------------------------


def test_new_prompts_go_to_the_least_loaded_server():
    made, (first, second) = router()
    assert made.choose(blocks("a", "b")) is first  # all equal: the order decides
    assert made.choose(blocks("c")) is second  # 1 in flight against 0
    made.release(first)
    made.release(second)
    assert made.choose(blocks("d")) is second  # 0 against 0, 2 blocks against 1


def test_more_than_three_tenths_of_a_prompt_make_it_go_where_its_prefix_is():
    made, (first, second) = router()
    made.choose(blocks("a", "b", "c", "d"))
    load(made, first, 5)
    # 3 of 10 blocks are exactly 0.3, and that is not more
    assert made.choose(blocks("a", "b", "c", *"0123456")) is second
    second.prefixes.clear()
    assert made.choose(blocks("a", "b", "c", "d", *"012345")) is first  # 0.4


def test_the_longest_prefix_wins_and_among_equals_the_least_loaded_server():
    made, (first, second, third) = router(3)
    first.prefixes.insert(blocks("a", "b"))
    second.prefixes.insert(blocks("a", "b", "c"))
    third.prefixes.insert(blocks("a", "b", "c"))
    load(made, second, 2)
    load(made, third, 1)
    assert made.choose(blocks("a", "b", "c", "d")) is third


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((64, 0), 0),  # 64 apart is not more than 64
        ((65, 0), 1),  # both limits are exceeded
        ((195, 130), 0),  # 65 apart, but 195 = 1.5 * 130
        ((196, 130), 1),  # 66 apart, and 196 > 195
    ],
)
def test_a_prefix_counts_only_while_the_loads_are_in_balance(loads, chosen):
    made, servers = router()
    servers[0].prefixes.insert(blocks("a", "b"))
    for server, count in zip(servers, loads, strict=True):
        load(made, server, count)
    assert made.choose(blocks("a", "b")) is servers[chosen]


def test_requests_of_one_key_stay_on_one_server_whatever_their_prompts_and_loads():
    made, (first, second) = router()
    assert made.choose(blocks("a"), "request") is first
    load(made, first, 500)
    second.prefixes.insert(blocks("b"))
    assert made.choose(blocks("b"), "request") is first
    assert made.choose(blocks("b"), "another") is second
    made.forget("request")
    assert made.choose(blocks("b"), "request") is second


def test_a_session_stays_on_its_server_while_the_loads_are_in_balance():
    made, (first, second) = router()
    assert made.choose(blocks("a"), "request", session="agent") is first
    made.forget("request")
    load(made, first, 60)
    assert made.choose(blocks("b"), "later", session="agent") is first
    assert made.choose(blocks("d"), "other", session="another") is second
    load(made, first, 500)
    assert made.choose(blocks("c"), "later", session="agent") is first  # its branches
    assert made.choose(blocks("c"), "last", session="agent") is second


def test_a_key_moves_for_good_when_its_server_goes_down():
    made, (first, second) = router()
    made.choose(blocks("a"), "request")
    made.lost(first)
    assert made.choose(blocks("a"), "request") is second
    made.answered(first)
    assert made.choose(blocks("a"), "request") is second


# ---- failures ---------------------------------------------------------------------------------


def test_a_lost_server_gets_no_requests_until_it_answers():
    made, (first, second) = router()
    made.choose(blocks("a", "b"))
    made.lost(first)
    load(made, second, 50)
    assert made.choose(blocks("a", "b")) is second
    made.answered(first)
    assert len(first.prefixes) == 0
    load(made, first, 0)
    assert made.choose(blocks("c")) is first


def test_single_server_errors_take_nothing_down_and_several_in_a_row_do():
    made, (first, _) = router()
    for _ in range(MAX_FAILURES - 1):
        made.failed(first)
    made.answered(first)
    made.failed(first)
    assert first.is_healthy
    for _ in range(MAX_FAILURES - 1):
        made.failed(first)
    assert not first.is_healthy


def test_a_busy_server_is_left_alone_for_as_long_as_it_asked():
    made, (first, second) = router()
    made.busy(first, 10.0)
    load(made, second, 30)
    assert made.choose(blocks("a")) is second
    made.clock.now += 10.0
    assert made.choose(blocks("b")) is first


def test_a_request_prefers_servers_that_have_not_failed_it():
    made, (first, second) = router()
    assert made.choose(blocks("a"), tried=[first]) is second
    load(made, second, 9)
    assert made.choose(blocks("b"), tried=[first, second]) is first


def test_the_only_working_server_is_retried_after_a_failure():
    made, (first, second) = router()
    made.lost(second)
    assert made.choose(blocks("a"), tried=[first]) is first


def test_if_all_are_down_they_are_tried_one_after_the_other():
    made, (first, second) = router()
    made.lost(first)
    made.lost(second)
    assert {made.choose("p", tried=[]), made.choose("p", tried=[first])} == {first, second}


def test_the_pause_before_a_repetition_is_that_of_the_server_it_will_go_to():
    made, (first, second) = router()
    made.busy(first, 10.0)
    assert made.seconds_until_ready([first]) == 0.0
    made.busy(second, 4.0)
    assert made.seconds_until_ready([first]) == 4.0
    assert made.seconds_until_ready([first, second]) == 4.0


# ---- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "urls",
    [[], "http://one:1", ["ftp://a"], ["http://a:99999"], ["http://a/v1", "http://a/v1/"]],
)
def test_urls_that_are_no_servers_are_refused(urls):
    with pytest.raises(ParameterError):
        Router(urls)


SECRET = "s3cr@t"


@pytest.mark.parametrize(
    "url", [f"ftp://me:{SECRET}@a", "http://me:s3cr/t@a", f"http://me:{SECRET}@[a"]
)
def test_a_password_is_in_no_refusal(url):
    with pytest.raises(ParameterError) as caught:
        Router([url])
    assert "s3cr" not in str(caught.value)
    with pytest.raises(ParameterError) as caught:
        Router(["http://a:1", f"http://me:{SECRET}@a:1/v1"])
    assert "s3cr" not in str(caught.value)
    with pytest.raises(ParameterError) as caught:
        Router(f"http://me:{SECRET}@a:1")
    assert "s3cr" not in str(caught.value)


def test_the_user_of_a_url_becomes_a_header_and_is_not_shown():
    [server] = Router(["http://me:p%40ss@a:1/@b"]).servers
    assert server.url == "http://a:1/@b"
    assert server.authorization == "Basic " + b64encode(b"me:p@ss").decode()
    assert "p%40ss" not in repr(server)


def test_a_url_without_a_path_is_the_usual_one():
    servers = Router(["http://a:1", "https://b/api/"]).servers
    assert [server.url for server in servers] == ["http://a:1/v1", "https://b/api"]


@pytest.mark.parametrize(
    "thresholds",
    [{"prefix_match": 1.1}, {"imbalance_abs": -1}, {"imbalance_rel": 0.9}, {"max_blocks": 0}],
)
def test_thresholds_outside_their_range_are_refused_by_name(thresholds):
    with pytest.raises(ParameterError, match=next(iter(thresholds))):
        Routing(**thresholds)
