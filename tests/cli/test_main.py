"""The command's frame: help, exit statuses, one line per error."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from forethought import __version__, methods
from forethought.cli import main as cli
from forethought.config import registry
from forethought.errors import EngineStopped, ParameterError


@pytest.fixture
def command(monkeypatch):
    """Put a command of the test's own into the table."""

    def install(run):
        module = types.ModuleType("forethought.cli.probe", "A command of the test's own.")
        module.configure = lambda parser: parser.add_argument("--number", type=int)
        module.run = run
        monkeypatch.setitem(cli.COMMANDS, "probe", "for this test")
        monkeypatch.setitem(sys.modules, "forethought.cli.probe", module)

    return install


def one_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("forethought: ")
    assert err.count("\n") == 1
    return err


def test_help_lists_every_command_and_so_does_no_argument_at_all(capsys):
    for argv in (["--help"], ["-h"], []):
        assert cli.main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_a_help_of_its_own_that_needs_no_model(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert f"forethought {name}" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"forethought {__version__}\n"


def test_a_misspelt_command_is_one_line_with_the_likely_one(capsys):
    assert cli.main(["generat"]) == 2
    assert "did you mean 'generate'?" in one_line(capsys)


@pytest.mark.parametrize("argv", [["--wrong"], ["probe", "--number", "x"], ["probe", "--no-such"]])
def test_wrong_arguments_are_one_line_and_status_2(argv, command, capsys):
    command(lambda args: 0)
    assert cli.main(argv) == 2
    assert "--help" in one_line(capsys)


def test_a_usage_error_of_several_lines_is_printed_as_one(command, capsys):
    def run(args):
        raise ParameterError("bad\nvalue", "because\n  of this", "Change it")

    command(run)
    assert cli.main(["probe"]) == 2
    assert one_line(capsys) == "forethought: bad value: because of this. Change it\n"


def test_a_failure_while_running_is_one_line_and_status_1(command, capsys):
    def run(args):
        raise EngineStopped("the engine has stopped")

    command(run)
    assert cli.main(["probe"]) == 1
    assert "has stopped" in one_line(capsys)


def test_ctrl_c_is_one_line_and_status_130(command, capsys):
    def run(args):
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["probe"]) == 130
    assert "interrupted" in one_line(capsys)


def test_the_commands_status_is_the_programs(command):
    command(lambda args: args.number)
    assert cli.main(["probe", "--number", "5"]) == 5


def test_a_reader_that_goes_away_ends_the_program_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "forethought", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        timeout=280,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_status_1():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "forethought", "methods"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("methods >&-", "standard output is closed"),
        ("--help >&-", "standard output is closed"),
        ("generate - <&-", "standard input is closed"),
        pytest.param("chat <&-", "standard input is closed", marks=pytest.mark.slow),
        ("generate \"$(printf 'a\\377')\"", "character 1 is not valid UTF-8"),
        ("generate - < bytes", "not valid UTF-8"),
    ],
)
def test_streams_that_are_closed_or_no_text_are_one_line_and_status_2(command, says, tmp_path):
    (tmp_path / "bytes").write_bytes(b"a\xff")
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m forethought {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_closed_standard_error_leaves_standard_output_alone():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m forethought nonsense 2>&-"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "forethought", "--version"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout == f"forethought {__version__}\n"


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--max-num-seqs=4", "Write 'max_batch_size: VALUE' into the YAML file of --config"),
        ("--max-seq-len=4", "Write 'max_seq_len: VALUE' into the YAML file of --config"),
        ("--enable-prefix-caching", "Write 'kv_cache_config: {enable_block_reuse: VALUE}'"),
        ("--gpu-memory-utilization=0.9", "free_gpu_memory_fraction"),
        ("--telepathy", "See forethought chat --help"),
    ],
)
def test_an_unknown_engine_argument_is_refused_with_its_equivalent(capsys, option, fix):
    assert cli.main(["chat", option]) == 2
    assert fix in capsys.readouterr().err


def test_a_method_of_ones_own_may_be_in_the_current_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_method.py").write_text(
        "from forethought.scaffolding import NativeGenerationController\n\n\n"
        "class Mine(NativeGenerationController):\n"
        '    """A method in a file beside me."""\n'
    )
    monkeypatch.chdir(tmp_path)
    path = [entry for entry in sys.path if entry]  # the program has no current directory there
    monkeypatch.setattr(sys, "path", path.copy())
    monkeypatch.delitem(sys.modules, "own_method", raising=False)
    assert cli.main(["methods", "own_method:Mine"]) == 0
    assert "A method in a file beside me." in capsys.readouterr().out
    assert sys.path == path, "another command may run elsewhere"
    assert cli.main(["methods", "own_methods:Mine"]) == 2
    assert "in the current directory" in one_line(capsys)


def test_what_a_method_of_ones_own_raises_is_one_line_with_its_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_method", raising=False)
    (tmp_path / "failing_method.py").write_text(
        "from forethought.scaffolding import NativeGenerationController\n\n\n"
        "class Mine(NativeGenerationController):\n"
        "    def process(self, tasks, **kwargs):\n"
        "        yield from super().process(tasks)\n"
        "        tasks[0].output_str + 1\n"
    )
    command = ["generate", "2 + 2", "--method", "failing_method:Mine", "--max-tokens", "2"]
    assert cli.main(command) == 1
    err = capsys.readouterr().err
    assert re.search(r"forethought: TypeError: .*failing_method\.py:7\)\n\Z", err)


def test_a_package_of_ones_own_imports_its_other_files_at_any_time(tmp_path, monkeypatch, capsys):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "beside.py").write_text("WORDS = 'read while it runs'\n")
    (package / "__init__.py").write_text(
        "from forethought.scaffolding import NativeGenerationController\n\n\n"
        "class Mine(NativeGenerationController):\n"
        '    """A method in a package."""\n\n'
        "    def words(self):\n"
        "        from .beside import WORDS\n\n"
        "        return WORDS\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert cli.main(["methods", "own_package:Mine"]) == 0
    assert "A method in a package." in capsys.readouterr().out
    assert methods.create("own_package:Mine").words() == "read while it runs"


def test_only_what_is_named_is_imported_from_the_current_directory(tmp_path, monkeypatch, capsys):
    """A folder with a model in it is no place for packages."""
    (tmp_path / "optional_package.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "other_method.py").write_text(
        "import sys\n\n"
        "from forethought.scaffolding import NativeGenerationController as Mine  # noqa: F401\n"
        f"assert {str(tmp_path)!r} in sys.path\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "other_method", raising=False)
    seen, make = [], registry.Registry.resolve

    def resolve(self, spec):
        seen.append(importlib.util.find_spec("optional_package"))
        return make(self, spec)

    monkeypatch.setattr(registry.Registry, "resolve", resolve)
    assert cli.main(["methods", "other_method:Mine"]) == 0
    assert seen
    assert not any(seen)


def test_a_current_directory_that_was_removed_is_no_matter(monkeypatch, tmp_path):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    removed.rmdir()
    assert cli.main(["--version"]) == 0
