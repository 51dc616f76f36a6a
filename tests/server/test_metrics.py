"""What ``/metrics`` shows, read by Prometheus' own parser."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forethought.outputs import EngineStats, SpeculationMetrics, Usage
from forethought.server.metrics import ALIASES, CONTENT_TYPE, ServerMetrics


def samples(metrics):
    """(name, labels) -> value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics)[(f"forethought:{name}", *sorted(labels.items()))]


WHO = {"model_name": "m", "method": "dynasor"}


@pytest.fixture
def metrics():
    found = ServerMetrics()
    request = found.request_started("m", "dynasor")
    request.admitted(0.5)
    request.first_token(1.0)
    request.tokens(4, 2.0)
    usage = Usage(prompt_tokens=30, completion_tokens=5, cached=16, discarded=2)
    speculation = SpeculationMetrics()
    speculation.record(4, 2)
    speculation.record(4, 0)
    request.finished("stop", usage, speculation, seconds=3.0, tokens_saved=120)
    return found


def test_latencies_are_counted_under_the_names_of_the_field(metrics):
    sums = {
        "time_to_first_token_seconds": (1, 1.0),
        "inter_token_latency_seconds": (4, 2.0),
        "request_time_per_output_token_seconds": (1, 0.5),  # (3 - 1) / (5 - 1)
        "e2e_request_latency_seconds": (1, 3.0),
        "request_queue_time_seconds": (1, 0.5),
        "request_prompt_tokens": (1, 30),
        "request_generation_tokens": (1, 5),
    }
    for name, (count, total) in sums.items():
        assert value(metrics, f"{name}_count", **WHO) == count, name
        assert value(metrics, f"{name}_sum", **WHO) == pytest.approx(total), name


def test_tokens_that_came_together_share_the_time(metrics):
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5", **WHO) == 4
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.4", **WHO) == 0


def test_buckets_of_token_latencies_are_cumulative_and_of_their_labels(metrics):
    other = metrics.request_started("m", "none")
    other.tokens(3, 0.03)  # 0.01 each: a bound belongs to its bucket
    other.tokens(2, 100.0)
    labels = {"model_name": "m", "method": "none"}
    found = {
        le: value(metrics, "inter_token_latency_seconds_bucket", le=le, **labels)
        for le in ("0.005", "0.01", "10.0", "+Inf")
    }
    assert found == {"0.005": 0, "0.01": 3, "10.0": 3, "+Inf": 5}
    assert value(metrics, "inter_token_latency_seconds_count", **WHO) == 4


def test_totals_are_kept_by_model_and_method(metrics):
    totals = {"prompt_tokens": 30, "generation_tokens": 5, "prompt_tokens_cached": 16}
    totals |= {"generation_tokens_discarded": 2, "tokens_saved": 120}
    for name, total in totals.items():
        assert value(metrics, f"{name}_total", **WHO) == total, name
    assert value(metrics, "request_success_total", finished_reason="stop", **WHO) == 1


def test_acceptance_is_counted_by_position(metrics):
    assert value(metrics, "spec_decode_num_drafts_total", model_name="m") == 2
    assert value(metrics, "spec_decode_num_draft_tokens_total", model_name="m") == 8
    assert value(metrics, "spec_decode_num_accepted_tokens_total", model_name="m") == 2
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, name, model_name="m", position=str(p)) for p in (0, 1)] == [1, 1]


def test_a_request_without_drafts_leaves_the_counts_of_drafts_alone(metrics):
    plain = SpeculationMetrics(steps=9)
    metrics.request_started("m", "none").finished("stop", Usage(), plain, seconds=1.0)
    assert value(metrics, "spec_decode_num_drafts_total", model_name="m") == 2


def test_a_method_that_spent_more_saves_nothing(metrics):
    metrics.request_started("m", "dynasor").finished("stop", Usage(), seconds=1.0, tokens_saved=-7)
    assert value(metrics, "tokens_saved_total", **WHO) == 120


def test_gauges_are_read_when_asked_for_and_stand_under_the_names_that_routers_read(metrics):
    load = {"running": 3, "waiting": 2, "kv_cache_usage": 0.25}
    metrics.observe_engine(lambda: load)
    expected = {"num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25}
    assert set(expected) == set(ALIASES)
    for name, gauge in expected.items():
        assert samples(metrics)[(f"vllm:{name}",)] == value(metrics, name) == gauge
    load["running"] = 4
    assert value(metrics, "num_requests_running") == 4


def test_without_a_kv_cache_its_use_is_not_shown(metrics):
    metrics.observe_engine(lambda: {"running": 1, "waiting": 0})
    assert ("vllm:kv_cache_usage_perc",) not in samples(metrics)


def test_prefix_hits_are_counted_in_tokens_of_the_prompts_looked_up(metrics):
    stats = EngineStats(prefilled=10, cached=30, preemptions=1)
    metrics.observe_engine(dict, lambda: stats)
    assert value(metrics, "prefix_cache_queries_total") == 40
    assert value(metrics, "prefix_cache_hits_total") == 30
    assert value(metrics, "num_preemptions_total") == 1


def test_servers_behind_this_one_are_shown_by_their_addresses(metrics):
    server = SimpleNamespace(url="http://a/v1", is_healthy=False, num_in_flight=2, num_requests=9)
    metrics.observe_upstream([server])
    names = {"upstream_healthy": 0, "upstream_requests_running": 2, "upstream_requests_total": 9}
    for name, expected in names.items():
        assert value(metrics, name, server="http://a/v1") == expected


def test_refusals_are_counted_by_reason(metrics):
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    assert value(metrics, "requests_rejected_total", reason="queue_full") == 2


def test_clients_cannot_make_more_labels_than_there_is_room_for(metrics):
    for number in range(100):
        metrics.request_started("m", f"made-up-{number}").finished("stop", Usage(), seconds=1.0)
    names = {dict(labels).get("method") for _, *labels in samples(metrics)}
    assert "other" in names
    assert len(names) < 70


def test_two_servers_in_one_process_count_apart(metrics):
    assert ServerMetrics().render() != metrics.render()


def test_the_text_is_in_the_format_that_its_type_names():
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
