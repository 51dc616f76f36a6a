"""Records of data sets: formats, directories, and data sets on a Hub."""

import gzip
import json
import subprocess
import sys

import pytest

import hub_server
from forethought.errors import DependencyError, UsageError
from forethought.evaluation import problems
from forethought.evaluation.data_files import read_records

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "Größe?", "answer": "3"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def questions(data, **more) -> list[str]:
    return [record.text("question") for record in read_records(data, **more)]


def files(directory, **contents):
    """Write files; ``__`` in a name stands for a slash, the last ``_`` for the dot."""
    for name, text in contents.items():
        stem, _, ending = name.replace("__", "/").rpartition("_")
        path = directory / f"{stem}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def one(question: str) -> str:
    return json.dumps({"question": question, "answer": "0"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", "\ufeff" + LINES.replace("\n", "\n\n")),
        ("a.jsonl", LINES.replace("\n", "\r\n")),
        ("a.JSON", json.dumps(ROWS, indent=1)),
        ("a.csv", 'question,answer\n1+1?,2\nGröße?,"3"\n'),
        ("a.csv", "\ufeffQuestion, Answer\r\n1+1?,2\r\nGröße?,3\r\n"),
        ("a.txt", LINES),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_each_format_gives_the_same_records_compressed_or_not(tmp_path, name, text, compressed):
    path = tmp_path / (f"{name}.gz" if compressed else name)
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    records = read_records(path)
    assert [(one.text("question"), one.get("answer")) for one in records] == [
        ("1+1?", "2"),
        ("Größe?", "3"),
    ]


def test_a_line_break_within_a_string_of_csv_or_json_is_kept(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"Two\nlines?\u2028",2\n', encoding="utf-8")
    assert questions(tmp_path / "a.csv") == ["Two\nlines?\u2028"]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"question": "Two\nlines?\u2028"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert questions(tmp_path / "a.jsonl") == ["Two\nlines?\u2028"]


def test_parquet_is_read_by_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert questions(tmp_path / "a.parquet") == ["1+1?", "Größe?"]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"cannot read the problems in .*broken\.parquet"):
        read_records(tmp_path / "broken.parquet")


def test_without_pyarrow_parquet_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DependencyError, match=r"pyarrow is not installed.*a\.parquet.*pip install"):
        read_records(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', r"a\.jsonl:2: it is no object"),
        ("a.jsonl", b'{"question": "a", " Question": "b"}\n', r"a\.jsonl:1: .*question twice"),
        ("a.jsonl", b"\n\n", r"no problems in .*a\.jsonl"),
        ("a.jsonl", b"\xff\xfe", r"cannot read the problems in .*a\.jsonl"),
        ("a.json", b"[{}, 7]", r"a\.json:item 2: it is no object"),
        ("a.json", b"{", r"a\.json: not JSON"),
        ("a.json", b"[" * 100_000, r"a\.json: not JSON"),
        ("a.csv", b"q,a\n1,2,3\n", r"a\.csv:2: it has more fields"),
        ("a.csv", b"q,a\n", r"no problems in .*a\.csv"),
        ("a.jsonl.gz", b"{}", r"cannot read the problems in .*a\.jsonl\.gz: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-20], r"cannot read the problems"),
    ],
)
def test_a_file_that_is_broken_is_named_with_the_place(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_records(tmp_path / name)


def test_a_field_is_found_in_any_case_or_refused_with_the_fields_there_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"Problem": "x", "Answer": "", "n": 3}\n')
    (record,) = read_records(tmp_path / "a.jsonl")
    assert record.text("question", "problem") == "x"
    assert record.get("answer") is None
    with pytest.raises(UsageError, match=r"a\.jsonl:1: 'answer' is empty"):
        record.text("answer")
    with pytest.raises(UsageError, match=r"a\.jsonl:1: it has no 'x'.*'problem', 'answer'"):
        record.text("x")
    with pytest.raises(UsageError, match="'n' is 3"):
        record.text("n")


def test_half_of_a_surrogate_pair_is_refused_with_its_place(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1"}\n{"question": "1+\\ud800"}\n')
    record = read_records(tmp_path / "a.jsonl")[1]
    with pytest.raises(UsageError, match=r"a\.jsonl:2: 'question' has half of a surrogate pair"):
        record.text("question")


def test_of_a_directory_the_test_split_is_read_in_the_order_of_numbers(tmp_path):
    files(
        tmp_path,
        test__algebra__10_json=one("ten"),
        test__algebra__2_json=one("two"),
        test__geometry__1_json=one("one"),
        train__algebra__1_json=one("train"),
        dataset_infos_json="{}",
        README_md="# hello",
    )
    assert questions(tmp_path) == ["two", "ten", "one"]
    assert questions(tmp_path / "train") == ["train"]


def test_of_several_formats_and_configurations_one_is_read(tmp_path):
    files(
        tmp_path,
        main__test_jsonl=one("main"),
        main__test_csv="question,answer\nmain,0\n",
        main__train_jsonl=one("train"),
        socratic__test_jsonl=one("socratic"),
    )
    assert questions(tmp_path, folder="main") == ["main"]
    assert questions(tmp_path) == ["main", "socratic"]


def test_a_directory_without_data_is_refused(tmp_path):
    files(tmp_path, README_md="# hello")
    with pytest.raises(UsageError, match="it holds no data file"):
        read_records(tmp_path)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "runs/nowhere.csv", "/nowhere/at/all"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name):
    with pytest.raises(UsageError, match="there is no such file or directory"):
        read_records(name)


# ---- the Hub -------------------------------------------------------------------------------------

STORED = {
    "main/test.jsonl": LINES.encode(),
    "main/train.jsonl": one("train").encode(),
    "socratic/test.jsonl": one("socratic").encode(),
    "README.md": b"# data",
    "dataset_infos.json": b"{}",
}


@pytest.fixture
def hub():
    with hub_server.serving() as server:
        server.repositories["datasets/org/data"] = {
            "main": STORED,
            "v1": {"all.csv": b"question\nold\n"},
        }
        yield server


def asked(environment, *data, folder=None) -> list[str]:
    """The questions of each data set that a process of its own finds, or the error."""
    code = (
        "from forethought.errors import UsageError\n"
        "from forethought.evaluation.data_files import read_records\n"
        f"for data in {data!r}:\n"
        f"    try: print([one.text('question') for one in read_records(data, {folder!r})])\n"
        "    except UsageError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_only_the_requested_files_of_a_hub_data_set_are_fetched(hub, tmp_path):
    found = ["['1+1?', 'Größe?']"]
    assert asked(hub.environment(tmp_path), "org/data", folder="main") == found
    assert hub.fetched == ["main/test.jsonl"]
    unreachable = hub.environment(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert asked(unreachable, "org/data", folder="main") == found
    offline = hub.environment(tmp_path, HF_HUB_OFFLINE="1")
    again, other = asked(offline, "org/data:main/test*", "org/data:socratic/*")
    assert [again] == found
    assert "the Hub's cache does not hold all of it, and HF_HUB_OFFLINE forbids" in other
    assert hub.fetched == ["main/test.jsonl"]


def test_revision_and_files_of_a_data_set_can_be_chosen(hub, tmp_path):
    chosen = ("org/data@v1", "org/data:*/train.jsonl", "org/data@v1:all.csv", "org/data:nothing*")
    *found, wrong = asked(hub.environment(tmp_path), *chosen)
    assert found == ["['old']", "['train']", "['old']"]
    assert "no data file matches 'nothing*'" in wrong
    assert "main/train.jsonl" in wrong


def test_why_the_hub_gives_no_data_set_is_told(hub, tmp_path):
    missing, revision = asked(hub.environment(tmp_path), "org/nothing", "org/data@v9")
    assert "no such data set on the Hugging Face Hub" in missing
    assert "it has no revision 'v9'" in revision
    (unreachable,) = asked(hub.environment(tmp_path, HF_ENDPOINT="http://127.0.0.1:9"), "org/data")
    assert "cannot be reached" in unreachable
    hub.failing = 503
    assert "HTTP 503" in asked(hub.environment(tmp_path), "org/data")[0]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_does_not_have_are_refused_with_file_and_line(tmp_path, number):
    (tmp_path / "a.jsonl").write_text(LINES + f'{{"question": "1?", "answer": {number}}}\n')
    with pytest.raises(UsageError, match=r"bad problem at .*a\.jsonl:3: not JSON: "):
        read_records(tmp_path / "a.jsonl")


def test_an_answer_of_parquet_that_is_no_number_is_refused_with_its_row(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"question": "1?", "answer": 1.5}, {"question": "2?", "answer": float("nan")}]
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"bad problem at .*a\.parquet:row 2: .*is nan"):
        problems.load(tmp_path / "a.parquet")


@pytest.mark.parametrize("answer", [["a", "b"], {"a": 1}, True])
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(tmp_path, answer):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": answer}) + "\n")
    with pytest.raises(UsageError, match=r"a\.jsonl:1: its 'answer' is .* text or a number"):
        problems.load(path)


def test_an_empty_question_is_called_empty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "", "answer": "1"}\n')
    with pytest.raises(UsageError, match="'question' or 'problem' is empty"):
        problems.load(path)
