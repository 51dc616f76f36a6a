"""The Grafana dashboard asks for metrics that the server has."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forethought.outputs import EngineStats, SpeculationMetrics, Usage
from forethought.server.metrics import ServerMetrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
_NAME = re.compile(r"(?:forethought|vllm):\w+")


@pytest.fixture
def names():
    """Of all series that a server has once everything has happened."""
    metrics = ServerMetrics()
    metrics.observe_engine(lambda: {"running": 1, "waiting": 0, "kv_cache_usage": 0.5}, EngineStats)
    server = SimpleNamespace(url="http://a/v1", is_healthy=True, num_in_flight=0, num_requests=0)
    metrics.observe_upstream([server])
    metrics.rejected("queue_full")
    request = metrics.request_started("m", "dynasor")
    request.admitted(0.1)
    request.first_token(0.1)
    request.tokens(2, 0.1)
    speculation = SpeculationMetrics(1, 4, 2, [1, 1])
    request.finished("stop", Usage(completion_tokens=3), speculation, seconds=1.0)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name for family in families for sample in family.samples}


def test_every_series_of_the_dashboard_exists(names):
    asked = set(_NAME.findall(DASHBOARD.read_text()))
    assert len(asked) > 15
    assert asked <= names, asked - names


def test_panels_have_titles_descriptions_and_places_of_their_own():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
