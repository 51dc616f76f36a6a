"""What requests may set of methods: no code, no file, nothing beyond its bound."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.scaffolding.controller import NativeGenerationController
from forethought.server.composition import compose
from forethought.server.method_settings import schema_of
from forethought.server.names import read_method
from forethought.server.settings import Settings
from http_servers import scripted

POLICY = {"num_probes": 1, "edges": [], "methods": ["plain"]}


def build(method: str, settings: dict[str, Any], table: methods.MethodTable | None = None) -> Any:
    """As a request makes its controller."""
    return compose(
        read_method(method, table),
        settings,
        innermost=NativeGenerationController,
        reward=None,
        streaming=False,
        num_choices=1,
        pipeline=(lambda text: text, lambda text: text),
    )


@pytest.mark.parametrize(
    ("method", "settings", "where"),
    [
        ("compute_optimal", {"policy": {**POLICY, "methods": ["os:system"]}}, "policy.methods.0"),
        (
            "compute_optimal",
            {"policy": {**POLICY, "methods": ["dynasor+os:system"]}},
            "policy.methods.0",
        ),
        (
            "compute_optimal",
            {"policy": POLICY, "settings": {"os:system": {"command": "id"}}},
            "settings.os:system",
        ),
        (
            "compute_optimal",
            {"policy": POLICY, "settings": {"dynasor": {"generation_dir": "/etc"}}},
            "settings.dynasor.generation_dir",
        ),
        ("compute_optimal", {"policy": "/etc/passwd"}, "policy"),
        ("compute_optimal", {"policy": {**POLICY, "num_probes": "1"}}, "policy.num_probes"),
        ("compute_optimal", {"policy": {**POLICY, "path": "/etc/passwd"}}, "policy.path"),
        ("compute_optimal", {"policy": POLICY, "method_table": "os:system"}, "method_table"),
        ("archon", {"pipeline": "/etc/passwd"}, "pipeline"),
        ("majority_vote", {"answer": "os:system"}, "answer"),
        ("archon", {"pipeline": {"layers": [[{"samples": 10**9}]]}}, "pipeline.layers"),
        ("best_of_n", {"reward_controller": "os:system"}, "reward_controller"),
        ("best_of_n", {"reward_controller": {"method": "os:system"}}, "reward_controller.method"),
        ("best_of_n", {"reward_controller": {"method": ["judge"]}}, "reward_controller.method"),
        (
            "best_of_n",
            {"reward_controller": {"method": "judge", "prompt": 7}},
            "reward_controller.prompt",
        ),
        (
            "best_of_n",
            {"reward_controller": {"method": "judge", "sampling_params": {"n": 1000}}},
            "reward_controller.sampling_params.n",
        ),
        (
            "best_of_n",
            {
                "reward_controller": {
                    "method": "judge",
                    "sampling_params": {"guided_decoding": {"path": "/etc/passwd"}},
                }
            },
            "reward_controller.sampling_params.guided_decoding.path",
        ),
        ("majority_vote", {"extract_answer": "os:system"}, "extract_answer"),
        ("majority_vote", {"equivalence": {"a": 1}}, "equivalence"),
        ("majority_vote", {"default_sample_num": 1025}, "default_sample_num"),
        ("majority_vote", {"default_sample_num": True}, "default_sample_num"),
        ("dynasor", {"effort": []}, "effort"),
        ("dynasor", {"uncertain_words": ["wait", 7]}, "uncertain_words.1"),
        ("dynasor", {"uncertain_words": ["\ud800"]}, "uncertain_words.0"),
        ("sleep_time", {"context": "x", "snapshot": "../../x"}, "snapshot"),
        ("sleep_time", {"context": "x", "memory": {}}, "memory"),
        ("drag", {"documents": "/etc/passwd"}, "documents"),
    ],
)
def test_a_setting_that_clients_may_not_set_is_refused_with_its_path(
    method: str, settings: dict[str, Any], where: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        build(method, settings)
    assert refused.value.param is not None
    assert refused.value.param.startswith(f"method_params.{where}")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("majority_vote", {"generation_controller": {"method": "dynasor", "chunk_size": 16}}),
        ("majority_vote", {"equivalence": None, "concurrency": None, "on_failure": "drop"}),
        ("best_of_n", {"reward_controller": {"method": "judge", "highest": 5}}),
        ("best_of_n", {"reward_controller": {"method": "spct", "meta_reward_controller": "judge"}}),
        (
            "best_of_n",
            {
                "reward_controller": {
                    "method": "compare",
                    "sampling_params": {"stop": ["x"], "guided_decoding": {"regex": "Best: 1"}},
                }
            },
        ),
        ("repeated_sampling", {"verifier": "countdown", "concurrency": "doubling"}),
        ("compute_optimal", {"policy": {**POLICY, "edges": [0.5], "methods": ["probes", "mcts"]}}),
        (
            "compute_optimal",
            {
                "policy": {**POLICY, "methods": ["dynasor+majority_vote@4"]},
                "settings": {"dynasor+majority_vote@4": {"chunk_size": 8}},
            },
        ),
        ("archon", {"pipeline": {"layers": [[{"type": "generator", "samples": 2}]]}}),
        ("drag", {"documents": ["a"], "examples": [["q", "a"], {"question": "q", "answer": "a"}]}),
        ("tree_of_thoughts", {"prompts": {"value": "How good?"}, "threshold": 1}),
    ],
)
def test_settings_of_every_kind_reach_their_method(method: str, settings: dict[str, Any]) -> None:
    assert build(method, settings) is not None


def test_methods_are_inside_of_each_other_to_a_bounded_depth() -> None:
    nested: Any = "plain"
    for _ in range(20):
        nested = {"method": "majority_vote", "generation_controller": nested}
    with pytest.raises(ParameterError, match="at most 8 methods"):
        build("majority_vote", {"generation_controller": nested})


OWN = f"{__name__}:Allowed"


class Allowed(NativeGenerationController):
    """A method of the server's owner."""

    def __init__(self, path: Path | None = None, text: str = "") -> None:
        super().__init__()


def test_a_method_of_the_owners_is_named_only_where_the_owner_has_allowed_it() -> None:
    table = methods.closed([OWN])
    assert isinstance(build(OWN, {"text": "x"}, table), Allowed)
    policy = {**POLICY, "methods": [OWN]}
    made = build("compute_optimal", {"policy": policy}, table)
    assert isinstance(made.controllers[OWN], Allowed)
    with pytest.raises(ParameterError, match=r"method_params\.path is not allowed"):
        build(OWN, {"path": "/etc/passwd"}, table)
    with pytest.raises(UnknownNameError):
        build(OWN, {})
    with pytest.raises(ParameterError, match=r"policy\.methods\.0"):
        build("compute_optimal", {"policy": policy})


class Undeclared(NativeGenerationController):
    """A method of the server's owner, a parameter of which has no type."""

    def __init__(self, samples=4) -> None:  # type: ignore[no-untyped-def]
        super().__init__()


def test_a_parameter_without_a_type_is_refused_with_how_to_declare_it() -> None:
    name = f"{__name__}:Undeclared"
    with pytest.raises(ParameterError, match=r"its type is not declared\. Annotate the parameter"):
        build(name, {"samples": 6}, methods.closed([name]))


def test_an_allowed_method_that_there_is_not_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="cannot load method 'nowhere:Thing'"):
        Settings(allowed_methods=["nowhere:Thing"])
    with pytest.raises(UnknownNameError, match="unknown method 'dynasour'"):
        Settings(allowed_methods=["dynasour"])


def test_a_policy_file_names_no_code(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"num_probes": 1, "edges": [], "methods": ["os:system"]}')
    settings = {"os:system": {"command": f"touch {tmp_path}/ran"}}
    with pytest.raises(UnknownNameError, match="os:system"):
        methods.create("compute_optimal", policy=str(file), settings=settings)
    assert not (tmp_path / "ran").exists()


def test_only_what_a_request_may_give_is_listed_as_a_setting() -> None:
    schema = schema_of(methods.shipped())
    assert "generation_dir" not in schema.settable("dynasor")
    assert "chunk_size" in schema.settable("dynasor")
    assert "snapshot" not in schema.settable("sleep_time")
    assert {"policy", "settings"} <= {*schema.settable("compute_optimal")}


def test_a_request_may_choose_the_rule_that_finds_answers():
    for name in ("majority_vote", "budget_vote", "deepconf", "fork_think", "sequential_revision"):
        schema_of(methods.shipped()).check(name, {"answer": "number"})
    vote = build("majority_vote", {"answer": "boxed"})
    assert vote.answer_space.answer == "boxed"


class Tagged(NativeGenerationController):
    """A method of the server's owner, whose tasks have a tag of their own."""

    class WorkerTag(Enum):
        """The worker that generates."""

        GENERATION = "generation_of_the_owner"


def test_an_allowed_method_is_listed_and_its_tasks_go_to_the_model() -> None:
    name = f"{__name__}:Tagged"
    body = {"messages": [{"role": "user", "content": "?"}], "method": f"{name}+majority_vote@2"}
    with scripted(lambda prompt, index: "one", Settings(allowed_methods=[name])) as server:
        answer = server.send("/v1/chat/completions", body)
        listed = {each["name"] for each in server.send("/v1/methods").json["data"]}
    assert answer.status == 200, answer.text
    assert name in listed
