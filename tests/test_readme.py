"""The Python of README and guides runs as it stands there, as far as it needs no server."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import forethought
from forethought import methods, scaffolding
from forethought.config.drafter_table import DRAFTERS
from forethought.config.speculation import DecodingBaseConfig
from forethought.scaffolding import ScaffoldingLlm, ScriptedWorker
from forethought.server.app import create_app
from forethought.server.backends.remote_backend import RemoteBackend
from forethought.workers.upstream import UpstreamWorker
from models import ARCHITECTURES

ROOT = Path(__file__).parents[1]
METHODS = ROOT / "docs" / "methods"
METHOD_PAGES = [METHODS / "index.md", *sorted(METHODS.glob("[!i]*.md"))]
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *METHOD_PAGES]
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PAGES = [*(ROOT / name for name in ROOT_PAGES), *DOCS]


def examples(page: Path) -> list[str]:
    """The Python of a page, one string per block."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCAL = [code for code in examples(PAGES[0]) if "localhost" not in code]


def test_the_clone_line_has_the_projects_own_address():
    page = PAGES[0].read_text(encoding="utf-8")
    assert f"git clone {PROJECT['urls']['Repository']} &&" in page


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_the_readme_fits_into_a_minute():
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 150


def test_every_extra_for_users_has_an_install_line():
    page = text_of("install.md")
    pattern = r"^\$ pip install (?:-c constraints\.txt )?\"\.\[([\w,-]+)\]\""
    lines = re.findall(pattern, page, re.MULTILINE)
    extras = set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
    assert {extra for line in lines for extra in line.split(",")} == extras


def test_torch_without_cuda_is_installed_first_in_the_version_of_the_tests():
    for page in (PAGES[0].read_text(encoding="utf-8"), text_of("install.md")):
        first = re.findall(r"^\$ pip install (\S+)", page, re.MULTILINE)[0]
        assert first in (ROOT / "constraints.txt").read_text().splitlines()
        assert first.startswith("torch==")


FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi": "Phi",
    "phi3": "Phi3",
    "olmo2": "OLMo2",
    "glm4": "GLM4",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "cohere2": "Cohere2",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "opt": "OPT",
    "starcoder2": "StarCoder2",
    "llama4_text": "Llama 4",
}
"""By transformers' names."""


def test_the_families_that_are_called_tested_are_those_of_the_tests():
    tested = {FAMILIES[kind] for kind, _ in ARCHITECTURES.values()}
    page = text_of("features.md")
    [(count, names)] = re.findall(r"tested are (\d+) families: ([^|]+) \|", page)
    assert set(names.split(", ")) == tested
    assert int(count) == len(tested)
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"in float32 for {names}." in guide


def test_the_counts_of_methods_and_drafters_in_the_readme_are_right():
    page = PAGES[0].read_text(encoding="utf-8")
    assert f"There are {len(methods.names())} by name" in page
    assert f"| Methods | {len(methods.names())} by name," in text_of("features.md")
    drafters = [spec for spec in DRAFTERS if spec.drafter and spec.option]
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    [(count, names)] = re.findall(r"Speculative decoding with (\w+) drafters \(([^)]+)\)", page)
    assert (count, len(names.split(", "))) == (words[len(drafters)], len(drafters))
    for spec in drafters:
        assert f"| `{spec.option}` |" in text_of("speculative-decoding.md")


def test_every_endpoint_is_in_the_guide_to_the_server_and_the_features_count_them():
    worker = UpstreamWorker(["http://127.0.0.1:9/v1"], "m")
    app = create_app(RemoteBackend(worker, "m"))
    routes = {
        (method, re.sub(r"\{model:path\}", "NAME", re.sub(r"\{response_id\}", "ID", route.path)))
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD" and not re.search(r"\.(js|css|html)$", route.path)
    }
    assert f"{len(routes)} endpoints" in text_of("features.md")
    guide = text_of("server.md")
    assert [path for _, path in sorted(routes) if f"{path}`" not in guide] == []


def test_what_is_cited_is_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == forethought.__version__
    assert cited["repository-code"] == PROJECT["urls"]["Repository"]


def test_there_are_examples_with_and_without_a_server():
    assert 0 < len(LOCAL) < len(examples(PAGES[0]))


def test_the_examples_of_the_readme_run_one_after_the_other():
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(LOCAL)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\\boxed{6}") >= len(LOCAL), "110 - 84 - 12 - 8"


def test_the_tutorial_runs_from_the_first_block_to_the_last():
    code = [code for code in examples(ROOT / "docs" / "tutorial.md") if "localhost" not in code]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    vote, *probes, agreed, drafted = done.stdout.splitlines()
    assert all("\\boxed{6}" in line for line in (vote, agreed, drafted))
    assert "'6" in probes[-1]
    assert float(drafted.split()[-1]) > 1


def test_the_tutorial_drafts_with_the_heads_where_training_writes_them():
    page = text_of("tutorial.md")
    [out] = re.findall(r"forethought train .* --out (\S+)", page)
    assert re.findall(r"--draft-model (\S+)", page) == [f"{out}/drafter"]


def test_the_names_that_other_tools_names_are_told_in_exist_here():
    page = text_of("coming-from.md")
    optillm = page.split("## optillm")[1].split("## A paper")[0]
    ours = re.findall(r"^\| .* \| (.*) \|$", optillm, re.MULTILINE)
    written = {name for cell in ours for name in re.findall(r"`([a-z_]+)`", cell)}
    assert written <= {*methods.names()} | {"here"}
    theirs = re.findall(r"`([A-Z]\w+Controller)`", page)
    assert len(theirs) > 4
    assert all(hasattr(scaffolding, name) or hasattr(methods, name) for name in theirs)


def guide_of(name: str) -> list[str]:
    """The examples of the pages about methods that contain this."""
    return [code for code in GUIDE if name in code]


GUIDE = [code for page in METHOD_PAGES for code in examples(page)]
SCRIPTED = [
    code
    for code in GUIDE
    if not re.search(r"EngineWorker|import LLM|Longest", code)  # the last is tested on its own
]


def test_the_guides_own_method_passes_the_guides_own_test():
    exec("".join(guide_of("Longest")), {"__name__": "guide"})


def test_the_guides_own_method_draws_samples_that_differ_under_a_seed():
    exec(guide_of("class Longest")[0], guide := {"__name__": "guide"})
    worker = ScriptedWorker(lambda prompt, _: prompt)
    with ScaffoldingLlm(guide["Longest"](), {"generation": worker}) as llm:
        llm.generate("p", sampling_params={"temperature": 0.8, "seed": 1})
    assert [call.task.temperature for call in worker.calls] == [0.8] * 4
    assert len({call.task.seed for call in worker.calls}) == 4


def test_the_guides_first_example_gives_the_right_answer(capsys):
    exec(GUIDE[0], {"__name__": "guide"})
    assert "\\boxed{6}" in capsys.readouterr().out


def test_the_examples_of_structured_output_run(capsys):
    for code in examples(ROOT / "docs" / "structured-output.md"):
        exec(code, {"__name__": "guide"})
    answer, record = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert re.fullmatch(r"\{'answer': -?\d+, 'unit': '(nuts|pens)'\} stop grammar", record)
    assert answer.strip() == "The answer is \\boxed{6}."


def test_the_examples_of_speculative_decoding_run(capsys):
    for code in examples(ROOT / "docs" / "speculative-decoding.md"):
        exec(code, {"__name__": "guide"})
    said, metrics = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert float(said.split()[-1]) > 1.2
    assert metrics.startswith("SpeculationMetrics(steps=")


def test_the_guide_of_speculative_decoding_names_every_setting():
    page = (ROOT / "docs" / "speculative-decoding.md").read_text(encoding="utf-8")
    for config in DecodingBaseConfig.__subclasses__():
        if not config.__module__.startswith("forethought."):  # that of another test
            continue
        assert f"| `{config.__name__}` | `{config.decoding_type}` |" in page
        for name in config.model_fields:
            assert f"`{name}" in page, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^):]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
            assert heading in slugs, target


def test_the_examples_of_thinking_budgets_run(capsys):
    for code in examples(ROOT / "docs" / "thinking-budgets.md"):
        exec(code, {"__name__": "guide"})
    thought, answer = capsys.readouterr().out.strip().split("\n", 1)
    assert thought.startswith("ThinkingOutput(num_tokens=")
    assert "</think>" in answer


def test_every_method_runs_in_an_example_of_the_guide_that_names_it(monkeypatch):
    run, shown = set(), set()

    def watched(name, method, process):
        def call(self, *args, **kwargs):
            if type(self) is method:
                run.add(name)
            return process(self, *args, **kwargs)

        return call

    found = {name: methods._REGISTRY.resolve(name) for name in methods.names()}
    processes = {name: method.process for name, method in found.items()}  # some are inherited
    for name, method in found.items():
        monkeypatch.setattr(method, "process", watched(name, method, processes[name]))
    for code in [*SCRIPTED, *guide_of('"repeated_sampling"'), *guide_of('create("hogwild"')]:
        run.clear()
        exec(code, {"__name__": "guide"})
        shown |= run.intersection(re.findall(r'["+](\w+)["+]', code))
    assert shown == {*methods.names()}


@pytest.mark.parametrize("number", range(len(SCRIPTED)))
def test_the_guides_examples_on_scripted_workers_run(number):
    exec(SCRIPTED[number], {"__name__": "guide"})


def test_the_guides_examples_run_unless_they_name_a_model_of_the_readers(capsys):
    """Those with an engine are run by tests of their own."""
    engines = [code for code in GUIDE if re.search("EngineWorker|import LLM", code)]
    assert len(SCRIPTED) > 15
    assert [code for code in engines if "path/of/model" not in code] == [
        GUIDE[0],
        *guide_of('"repeated_sampling"'),
        *guide_of("snapshot_dir="),
        *guide_of('create("hogwild"'),
        *guide_of('create("beam_search"'),
    ]
    exec(*guide_of('create("beam_search"'), {"__name__": "guide"})
    assert "\\boxed" in capsys.readouterr().out


def test_the_guides_search_for_a_pipeline_can_be_imported():
    exec(guide_of("PipelineSearch")[0], {"__name__": "guide"})


def test_the_guides_examples_of_thinking_ahead_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the snapshots
    for name in ('"sleep_time"', "snapshot_dir="):
        exec(guide_of(name)[0], {"__name__": "guide"})
    assert capsys.readouterr().out.startswith("24.0\n")
    assert [file.name for file in (tmp_path / "snapshots").iterdir()] == ["text.safetensors"]


def test_every_link_between_pages_leads_to_a_page_and_a_heading():
    pages = [*PAGES, *(ROOT / "docs").rglob("*/*.md")]
    headings = {
        page.resolve(): {anchor(title) for title in re.findall(r"(?m)^#+ (.*)$", page.read_text())}
        for page in pages
    }
    broken = []
    for page in pages:
        for target, _, heading in re.findall(r"\]\(([^)#\s]*)(#([\w-]+))?\)", page.read_text()):
            path = (page.parent / target).resolve() if target else page.resolve()
            is_known = path in headings and heading not in {"", *headings[path]}
            if not target.startswith("http") and (not path.exists() or is_known):
                broken.append((page.name, target, heading))
    assert broken == []


def anchor(title):
    """The anchor of a heading, as Git forges make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
