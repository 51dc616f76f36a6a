"""Files that are whole whenever they are read."""

import os

import pytest

from forethought.errors import FileError, UsageError
from forethought.saved_file import check_file, check_folder, save_text, saving


def test_a_file_takes_the_place_of_the_older_one_and_has_its_mode(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o640)
    save_text(path, "new", "text")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert os.listdir(tmp_path) == ["a.txt"]


def write_half(path, error):
    with saving(path, "text") as file:
        file.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_where_writing_fails_the_older_file_is_as_it_was(error, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(FileError if error is OSError else error):
        write_half(path, error)
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["a.txt"])


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "a.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    save_text(link, "new", "text")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_device_is_written_directly():
    save_text(os.devnull, "text", "text")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("name", ["none/a.txt", "", "x" * 300])
def test_a_file_that_cannot_be_is_refused_by_its_path(name, tmp_path):
    with pytest.raises(FileError, match="cannot write the report"):
        save_text(tmp_path / name, "text", "report")


def test_a_folder_that_could_not_be_made_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UsageError, match=r"cannot write to .*file.*: Not a directory"):
            check_folder(folder)
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        check_folder(tmp_path / "a")
    tmp_path.chmod(0o700)


def test_the_name_of_a_file_is_that_of_no_folder_and_is_in_one(tmp_path):
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "a" / "b", "no such folder")):
        with pytest.raises(UsageError, match=f"cannot write the trace {path}: .*{why}"):
            check_file(path, "trace")
    check_file(tmp_path / "a", "trace")
    assert os.listdir(tmp_path) == []
