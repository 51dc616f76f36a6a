"""The table of methods: what there is, with which settings, and how it is created."""

import sys

import pytest

from forethought import methods
from forethought.errors import ParameterError, UnknownNameError, UsageError
from forethought.methods import DynasorGenerationController, MajorityVoteController
from forethought.methods.table import GROUPS, OTHERS
from forethought.scaffolding import NativeGenerationController


def test_every_method_describes_itself_in_one_line_and_names_its_settings():
    assert methods.names()[:3] == ["plain", "dynasor", "majority_vote"]
    for name in methods.names():
        method = methods.describe(name)
        assert method.description.endswith(".")
        assert "\n" not in method.description
    assert methods.describe("dynasor").parameters["certainty_threshold"] == 3
    assert methods.describe("majority_vote").parameters["generation_controller"] == "plain"
    required = methods.describe("best_of_n").parameters["reward_controller"]
    assert required is methods.Method.REQUIRED


def test_every_shipped_method_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(methods.shipped().names())
    assert methods.describe("dvts").to_dict()["group"] == "Search step by step"
    assert methods.describe("forethought.methods.dvts:DVTSController").group == OTHERS


def test_methods_are_created_by_name_with_settings():
    plain = methods.create("plain", sampling_params={"temperature": 0.5})
    assert plain.sampling_params == {"temperature": 0.5}
    dynasor = methods.create("dynasor", certainty_threshold=2, effort=None)
    assert dynasor.certainty_threshold == 2


def test_an_inner_method_is_a_name_settings_or_an_object():
    create = methods.create
    voted = create("majority_vote", default_sample_num=3)
    assert type(voted.generation_controller) is NativeGenerationController
    voted = create("majority_vote", generation_controller="dynasor")
    assert type(voted.generation_controller) is DynasorGenerationController
    settings = {"method": "dynasor", "chunk_size": 16}
    voted = create("majority_vote", generation_controller=settings)
    assert voted.generation_controller.chunk_size == 16
    inner = NativeGenerationController()
    assert create("majority_vote", generation_controller=inner).generation_controller is inner
    assert create(inner) is inner


def test_methods_of_ones_own_are_given_as_module_and_class():
    spec = "forethought.methods.dynasor:DynasorGenerationController"
    assert type(methods.create(spec)) is DynasorGenerationController


@pytest.mark.parametrize("name", ["os:system", "json:loads", "builtins:dict", "math:pi"])
def test_what_is_no_method_is_refused_and_never_called(name):
    with pytest.raises(UsageError, match=f"'{name}' is no method: it is .*derives from"):
        methods.create(name, command="exit 1")
    with pytest.raises(UsageError, match="is no method"):
        methods.describe(name)


@pytest.mark.parametrize("name", [":Thing", "..nowhere:Thing", "broken_module:Thing"])
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(name, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=f"cannot load method '{name}': .*Error: "):
        methods.create(name)


def test_mistakes_name_what_is_allowed():
    with pytest.raises(UnknownNameError, match="did you mean 'dynasor'"):
        methods.create("dynasour")
    with pytest.raises(ParameterError, match=r"'chunksize'.*did you mean 'chunk_size'"):
        methods.create("dynasor", chunksize=3)
    with pytest.raises(ParameterError, match="needs 'reward_controller'"):
        methods.create("best_of_n")
    with pytest.raises(ParameterError, match="finished controller"):
        methods.create(NativeGenerationController(), streaming=True)
    with pytest.raises(UnknownNameError, match="no method"):
        methods.describe("zzz")
    with pytest.raises(ParameterError, match="method judge answers nothing by itself"):
        methods.create("tree_of_thoughts", generation_controller="judge")


def test_the_worker_tags_are_those_of_all_controllers_inside():
    voted = MajorityVoteController(DynasorGenerationController(), 2)
    assert methods.worker_tags(voted) == [DynasorGenerationController.WorkerTag.GENERATION]
    assert methods.worker_tags(NativeGenerationController()) == [
        NativeGenerationController.WorkerTag.GENERATION
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dynasor", {"chunk_size": "abc"}),
        ("dynasor", {"chunk_size": 2.5}),
        ("dynasor", {"max_tokens": 0}),
        ("dynasor", {"uncertain_words": "wait"}),
        ("dynasor", {"equivalence": 1}),
        ("dynasor", {"effort": 9}),
        ("dynasor", {"streaming": "banana"}),
        ("dynasor", {"generation_dir": "/nope"}),
        ("dynasor", {"generation_dir": 7}),
        ("plain", {"streaming": "banana"}),
        ("majority_vote", {"default_sample_num": "x"}),
        ("majority_vote", {"extract_answer": "foo"}),
        ("majority_vote", {"early_stop": 7}),
        ("majority_vote", {"equivalence": "abc"}),
        ("majority_vote", {"equivalence": ""}),
        ("majority_vote", {"on_failure": "zz"}),
        ("best_of_n", {"reward_controller": "plain", "default_sample_num": "x"}),
        ("repeated_sampling", {"verifier": 7}),
        ("repeated_sampling", {"verifier": "countdown", "default_sample_num": 0}),
        ("repeated_sampling", {"verifier": "countdown", "concurrency": 0}),
        ("repeated_sampling", {"verifier": "countdown", "concurrency": "tripling"}),
        ("repeated_sampling", {"verifier": "countdown", "early_stop": 7}),
        ("repeated_sampling", {"verifier": "countdown", "fallback": "last"}),
        ("repeated_sampling", {"verifier": "countdown", "on_failure": "zz"}),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(name, settings):
    with pytest.raises(UsageError, match=r"invalid \w+|unknown effort"):
        methods.create(name, **settings)


def test_a_constructor_of_ones_own_that_raises_is_named_with_what_it_raised(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "raising_method.py").write_text(
        "from forethought.errors import ParameterError\n"
        "from forethought.scaffolding import NativeGenerationController\n\n\n"
        "class Mine(NativeGenerationController):\n"
        "    def __init__(self, depth: int = 0, name: str = None, level: int = 0.5):\n"
        "        super().__init__()\n"
        "        if depth > 9:\n"
        "            raise ParameterError('depth is too large')\n"
        "        self.share = 1 / depth\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "raising_method", raising=False)
    what = r"cannot make the method 'raising_method:Mine': raising_method\.Mine\(\.\.\.\) raised "
    error = r"ZeroDivisionError: division by zero \(.*raising_method\.py:10\)"
    with (
        caplog.at_level("DEBUG", "forethought.methods.table"),
        pytest.raises(UsageError, match=what + error) as caught,
    ):
        methods.create("raising_method:Mine")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "self.share = 1 / depth" in caplog.text
    with pytest.raises(ParameterError, match="depth is too large"):
        methods.create("raising_method:Mine", depth=10)
    assert (
        methods.create("raising_method:Mine", depth=2, name=None, level=float("0.5")).share == 0.5
    )
    with pytest.raises(ParameterError, match="invalid depth: got 'x'"):
        methods.create("raising_method:Mine", depth="x")
