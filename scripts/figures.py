"""Tables of figures: written into the documentation from the JSON lines of benchmarks.

``docs/results/figures.jsonl`` holds one line per benchmark and processor, as the benchmark printed
it last. A table is the text between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``, on
one page, README.md or one of docs: a column per processor and, below it, date, dtype and command of
each run.

    python scripts/figures.py                      write all tables anew
    python scripts/figures.py --check              fail if one is not what would be written
    python -m benchmarks.drafters --threads 1 --rounds 3 | python scripts/figures.py --add -
    forethought demo | python scripts/figures.py --add -
    python scripts/figures.py --add gpu.log        the last line of a file

``--add`` replaces the line of the same benchmark on the same processor, and of ``benchmarks.gpu``
with the same command; the old line goes to ``history.jsonl`` beside the store, for
``scripts/trends.py``. A line that is ``transcribed`` was written by hand from the results of its
day, before lines were stored; so were whole tables (``"benchmark": "table"``, named by ``table``,
with their ``cells``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "docs" / "results" / "figures.jsonl"
HISTORY = "history.jsonl"
"""Beside the store."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- end of figures -->", re.DOTALL)

Run = dict[str, Any]
Cells = list[list[str]]

DRAFTERS = {
    "ngram": ("N-gram (prompt lookup)", "`ngram`", "up to 8 tokens, after a match of 3"),
    "suffix": ("Suffix decoding", "`suffix`", "up to 8 tokens"),
    "draft_target": (
        "Draft model (speculative sampling)",
        "`draft_target`",
        "16 tokens by a model of 0.2 M parameters",
    ),
    "pearl": ("PEARL", "`pearl`", "the same model, a block of 8 ahead"),
    "eagle3": ("EAGLE-3", "`eagle3`", "a chain of 8"),
    "eagle3, tree": (
        "EAGLE-3 with EAGLE-2's dynamic tree",
        "`eagle3`, with [`use_dynamic_tree`](learned-drafters.md#eagle)",
        "15 nodes",
    ),
    "mtp": ("MTP", "`mtp`", "a chain of 10, one module replayed"),
    "medusa": ("Medusa", "`medusa`", "the 10 most probable nodes of five heads"),
    "medusa, static": (
        "Medusa with its static tree",
        '`medusa`, with `tree: "choices"`',
        "15 nodes",
    ),
    "redrafter": ("ReDrafter", "`redrafter`", "12 nodes, five beams"),
}
"""Row of ``benchmarks.drafters`` -> algorithm, its name for ``--speculative``, what it drafts."""
BY_NAME = "by its name alone: what goodput control chooses"
"""What rows ``NAME, default`` draft."""
MODELS = {
    "batch1": ("random, Qwen3-shaped, 150 M", "1"),
    "batch16": ("random, Qwen3-shaped, 150 M", "16"),
    "reasoner": ("embedded reasoner, 3.6 M", "1"),
}
"""Case of ``benchmarks.generate_vs_transformers`` -> model, batch."""
WAYS = {
    "plain": "none",
    "lookup": "n-grams, prompt lookup there",
    "draft model": "draft model, assisted generation there",
}

TASKS = {
    "repeat": "repeat a passage",
    "rename": "rename a variable in code",
    "summarise": "summarise a passage",
    "prose": "write a story",
    "chat": "answer a chat",
}
"""Of ``benchmarks.real_text``."""


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--add", metavar="FILE", help="output of a benchmark; -: standard input")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    runs = read()
    if args.add is not None:
        text = sys.stdin.read() if args.add == "-" else Path(args.add).read_text(encoding="utf-8")
        older, runs = runs, added(runs, run_of(text))
        if old := [run for run in older if run not in runs]:
            keep(old)
        STORE.write_text("".join(json.dumps(run) + "\n" for run in runs), encoding="utf-8")
    stale = [page for page in PAGES if written(page, runs) != page.read_text(encoding="utf-8")]
    if not args.check:
        for page in stale:
            page.write_text(written(page, runs), encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'is stale' if args.check else 'written'}")
    return int(args.check and bool(stale))


# ---- runs ----------------------------------------------------------------------------------------


def read() -> list[Run]:
    """The lines of ``STORE``."""
    return _lines(STORE)


def replaced() -> list[Run]:
    """The runs that newer ones have replaced, the oldest first."""
    path = STORE.with_name(HISTORY)
    return _lines(path) if path.exists() else []


def keep(runs: Iterable[Run]) -> None:
    """Add runs to those that newer ones have replaced."""
    with STORE.with_name(HISTORY).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(run) + "\n" for run in runs)


def _lines(path: Path) -> list[Run]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def run_of(output: str) -> Run:
    """The JSON line that ends the output of a benchmark, or of ``forethought demo``."""
    run: Run = json.loads(output.strip().splitlines()[-1])
    if "one_at_a_time" in run:
        from forethought.cli.machine import instruction_sets, processor_name

        machine = {"machine": processor_name(), "instruction_sets": instruction_sets()}
        here = {"benchmark": "demo", "command": "forethought demo", "dtype": "auto", **machine}
        run = {**here, "date": date.today().isoformat(), **run}
    if "benchmark" not in run or "rows" not in run:
        raise SystemExit("the last line is not that of a benchmark")
    return run


def added(runs: Iterable[Run], run: Run) -> list[Run]:
    """The runs with ``run`` in the place of the one that it is a newer run of."""
    return sorted([*(old for old in runs if key_of(old) != key_of(run)), run], key=key_of)


def key_of(run: Run) -> tuple[str, str, str]:
    """What a newer run has in common with the one that it replaces: benchmark and processor, and of
    the GPU benchmark, whose parts are run apart, the command."""
    if run["benchmark"] == "table":
        return "table", run["table"], ""
    return run["benchmark"], processor(run), run["command"] if run["benchmark"] == "gpu" else ""


def processor(run: Run) -> str:
    """The head of its column, such as ``AMD EPYC, AVX-512``."""
    name = re.sub(r"\s+", " ", re.sub(r"\((R|TM)\)|CPU|Processor", "", run["machine"])).strip()
    if run.get("device", "cpu") != "cpu":
        return name
    sets = run.get("instruction_sets", ())
    labels = {
        "amx_bf16": "AMX",
        "avx512f": "AVX-512",
        "avx2": "AVX2",
        "sve": "SVE",
        "asimd": "NEON",
    }
    best = next((label for flag, label in labels.items() if flag in sets), "")
    short = " ".join(name.split()[:2])
    return f"{short}, {best}" if best else short


def day(run: Run) -> str:
    """Such as ``24 November 2026``."""
    when = date.fromisoformat(run["date"])
    return f"{when.day} {when:%B %Y}"


# ---- tables --------------------------------------------------------------------------------------


def written(page: Path, runs: Sequence[Run]) -> str:
    """The text of a page with its tables as the runs make them."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        kind = "table" if name.startswith("table-") else name
        if kind not in TABLES:
            raise SystemExit(f"{page.name}: there is no table {name!r}")
        benchmarks = SOURCES.get(kind, (kind.replace("-", "_"),))
        table_runs = [run for run in runs if run["benchmark"] in benchmarks]
        if kind == "table":
            table_runs = [run for run in table_runs if f"table-{run['table']}" == name]
        body = TABLES[kind](table_runs) if table_runs else "No run has been added yet."
        return f"<!-- figures: {name} -->\n\n{body}\n\n<!-- end of figures -->"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def table(cells: Cells, num_left: int = 1) -> str:
    """A table in Markdown; its first columns are aligned to the left."""
    rule = ["---"] * num_left + ["---:"] * (len(cells[0]) - num_left)
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def sources(runs: Iterable[Run]) -> str:
    """Where and when each run was made, as a list."""
    return "\n".join(
        f"* {processor(run)}: {day(run)}, {run['dtype']}, `{run['command']}`{_note(run)}"
        for run in runs
    )


def _note(run: Run) -> str:
    return f"; {run['note']}" if run.get("note") else ""


def by_processor(
    runs: Sequence[Run],
    heads: Sequence[str],
    labels: Mapping[Any, Sequence[str]],
    key: Callable[[Run], Any],
    cell: Callable[[Run], str],
) -> str:
    """A table with a column per run, and its sources.

    Args:
        runs: of one benchmark.
        heads: of the columns before those of the runs.
        labels: key of a row -> its first cells; every row of every run has one.
        key: of a row of a run.
        cell: what a run's column shows of a row.
    """
    columns = [{key(row): cell(row) for row in run["rows"]} for run in runs]
    for column in columns:
        if unknown := column.keys() - labels.keys():
            raise SystemExit(f"no label for the row {sorted(map(str, unknown))[0]!r}")
    rows = [
        [*label, *(column.get(name, "") for column in columns)]
        for name, label in labels.items()
        if any(name in column for column in columns)
    ]
    return f"{table([[*heads, *map(processor, runs)], *rows], len(heads))}\n\n{sources(runs)}"


def drafters(runs: Sequence[Run]) -> str:
    """Speed of each drafter to plain decoding, and its tokens per step, which are no matter of the
    processor: those of the newest run that counted them."""
    counted = [run for run in runs if all("tokens_per_step" in row for row in run["rows"])]
    newest = max(counted, key=lambda run: str(run["date"]))
    timed = [run for run in runs if all("ratio" in row for row in run["rows"])]
    steps = {row["drafter"]: f"{row['tokens_per_step']:.1f}" for row in newest["rows"]}
    labels = {"plain": ["none: tokens/s", "", "", "1.0"]}
    for name, cells in DRAFTERS.items():
        labels[name] = [*cells, steps.get(name, "")]
        labels[f"{name}, default"] = [*cells[:2], BY_NAME, steps.get(f"{name}, default", "")]
    counts = "" if newest in timed else f"\n* tokens per step: {sources([newest])[2:]}"

    def speed(row: Run) -> str:
        if row["drafter"] == "plain":
            return f"{row['tokens_per_second']:,.0f}"
        return f"{row['ratio']:.2f}"

    heads = ["algorithm", "`--speculative`", "drafts", "tokens per step"]
    return by_processor(timed, heads, labels, lambda row: row["drafter"], speed) + counts


def generate_vs_transformers(runs: Sequence[Run]) -> str:
    """Tokens per second, and the ratio to what they are compared with."""
    labels = {
        (case, against): [*cells, f"`{against}`"]
        for case, cells in MODELS.items()
        for against in ("generate", "generate_batch")
    }
    heads = ["model", "batch", "transformers"]
    return by_processor(
        runs, heads, labels, lambda row: (row["case"], row["against"]), _speed_and_ratio
    )


def speculation_vs_transformers(runs: Sequence[Run]) -> str:
    """The same with drafts on both sides."""
    models = {"reasoner": "embedded reasoner", "random": "random, 150 M"}
    labels = {(case, way): [models[case], text] for case in models for way, text in WAYS.items()}
    heads = ["model", "drafts"]
    return by_processor(
        runs, heads, labels, lambda row: (row["case"], row["way"]), _speed_and_ratio
    )


def _speed_and_ratio(row: Run) -> str:
    speed, ratio = row.get("tokens_per_second"), f"{row['ratio']:.2f}"
    return ratio if speed is None else f"{speed:,.0f} ({ratio})"


def real_text(runs: Sequence[Run]) -> str:
    """Of each run, a row per task and a column per drafter."""
    stated = [{**run, "dtype": run["weights"]} for run in runs]
    return "\n\n".join(f"{_by_task(run['rows'])}\n\n{sources([run])}" for run in stated)


def _by_task(rows: Sequence[Run]) -> str:
    """Ratio to plain decoding in the same round and, in brackets, tokens per step."""
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    cells: dict[str, list[str]] = {}
    for row in rows:
        plain = f"{row['tokens_per_second']:,.0f}"
        drafts = f"{row['ratio']:.2f} ({row['tokens_per_step']:.1f})"
        cells.setdefault(row["task"], []).append(plain if row["drafter"] == "plain" else drafts)
    heads = ["none: tokens/s" if name == "plain" else f"`{name}`" for name in names]
    return table([["task", *heads], *([TASKS[task], *line] for task, line in cells.items())], 1)


def goodput(runs: Sequence[Run]) -> str:
    """Ratio to plain decoding with this many sequences at once."""
    labels = {batch: [str(batch)] for batch in (1, 4, 16, 64)}
    return by_processor(
        runs, ["sequences"], labels, lambda row: row["batch"], lambda row: f"{row['ratio']:.2f}"
    )


def step_overhead(runs: Sequence[Run]) -> str:
    """Milliseconds outside the network, of steps without drafts."""
    plain = [{**run, "rows": [row for row in run["rows"] if not row["drafted"]]} for run in runs]
    labels = {name: [name] for name in ("greedy", "sampled", "top-p")}
    return by_processor(
        plain,
        ["16 sequences"],
        labels,
        lambda row: row["sampling"],
        lambda row: f"{row['outside_ms']:.2f} ms",
    )


def demo(runs: Sequence[Run]) -> str:
    """Accuracy and tokens of the newest run; it is the same on every processor but for rounding."""
    run = max(runs, key=lambda one: str(one["date"]))
    cells = [["problems", "method", "accuracy", "95 % interval", "tokens per problem"]]
    for row in run["rows"]:
        low, high = (f"{100 * bound:.1f}" for bound in row["accuracy_ci"])
        tokens = row.get("tokens_generated")
        cells.append(
            [
                f"{row['problems']} of {row['task']}",
                f"`{row['method']}`",
                f"{100 * row['accuracy']:.1f} %",
                f"{low} to {high}",
                "" if tokens is None else f"{tokens / row['problems']:,.0f}",
            ]
        )
    first, *others = run["one_at_a_time"]
    speeds = [
        f"`{heat['method']}`{' with drafts' if heat['drafts'] else ''} "
        f"{heat.get('ratio') or first['seconds_per_problem'] / heat['seconds_per_problem']:.1f}"
        for heat in others
    ]
    race = f"One problem at a time, in times of plain decoding's speed: {', '.join(speeds)}."
    return f"{table(cells, 2)}\n\n{race}\n\n{sources([run])}"


def coverage(runs: Sequence[Run]) -> str:
    """The share of problems that one of k samples solves, beside a vote of all, and greedy."""
    (run,) = runs
    by_method = {row["method"]: row for row in run["rows"]}
    vote, greedy = by_method["majority_vote"], by_method["plain"]
    sizes = list(vote["pass_at_k"])
    cells = [[f"pass@{size}" for size in sizes], []]
    cells[1] = [f"{100 * vote['pass_at_k'][size]:.1f} %" for size in sizes]
    fit = vote["coverage_fit"]
    beside = (
        f"A vote of the {sizes[-1]} samples is right in {_percent(vote)}, greedy decoding in "
        f"{_percent(greedy)}; pass@k is fitted by exp({fit['a']:.2f} k^{fit['b']:.2f})."
    )
    where = f"{run['model']}, {run['problems']} problems"
    return f"{table(cells, 0)}\n\n{beside}\n\n{where}:\n\n{sources([run])}"


def _percent(row: Run) -> str:
    low, high = (100 * bound for bound in row["accuracy_ci"])
    return f"{100 * row['accuracy']:.1f} % ({low:.1f} to {high:.1f})"


def why(runs: Sequence[Run]) -> str:
    """What sets the project apart, a figure each, of the newest run."""
    newest = {run["benchmark"]: run for run in sorted(runs, key=lambda one: str(one["date"]))}
    by_method = {(row["task"], row["method"]): row for row in newest["demo"]["rows"]}
    solved = {
        name: f"{100 * row['accuracy']:.1f} % solved with "
        f"{row['tokens_generated'] / row['problems']:,.0f} tokens each"
        for name, row in by_method.items()
    }
    drafted = {row["drafter"]: row for row in newest["drafters"]["rows"]}
    points = [
        "**Live handles.** Dynasor-CoT forks the chain of thought, asks the fork for the answer, "
        f"and ends the chain when the answers agree: {solved['arithmetic', 'dynasor']}; plain "
        f"decoding: {solved['arithmetic', 'plain']}.",
        "**Exact drafts everywhere.** Eight drafters, greedy and sampled, chains and trees, under "
        "every method; a small draft model makes decoding "
        f"{drafted['draft_target, default']['ratio']:.2f} times as fast, and every token is that "
        "of plain decoding.",
        "**Tokens where they count.** Budgets of tokens, calls, seconds and thought are exact, and "
        f"sampling ends when a checker accepts: {solved['countdown', 'repeated_sampling@16']}; a "
        f"vote of eight: {solved['countdown', 'majority_vote@8']}.",
    ]
    if "recurrent" in newest:
        fork = next(row for row in newest["recurrent"]["rows"] if "fork of" in row)
        points.append(
            "**Hybrids, exactly.** Models with recurrent layers (Qwen3.5, Nemotron-H, LFM2) fork, "
            "rewind, verify draft trees and share prefixes as others do; a fork takes "
            f"{fork['us']:.0f} microseconds."
        )
    points.append(
        "**Replicas that may die.** On Ray a request goes on elsewhere, to the same text: with "
        "`kill -9` under a hundred streams none is lost or changed, nor is a vote or a probe."
    )
    used = [newest[name] for name in SOURCES["why"] if name in newest]
    return "\n".join(f"* {point}" for point in points) + f"\n\n<sub>{_where(used)}</sub>"


def _where(runs: Iterable[Run]) -> str:
    return "; ".join(f"`{run['command']}`, {processor(run)}, {day(run)}" for run in runs)


def gpu(runs: Sequence[Run]) -> str:
    """The parts of the GPU benchmark, a table each."""
    texts = []
    for run in runs:
        parts = dict.fromkeys(row["part"] for row in run["rows"])
        texts.append(f"### {processor(run)}\n\n{sources([run])}")
        for part in parts:
            rows = [row for row in run["rows"] if row["part"] == part]
            heads = list(dict.fromkeys(key for row in rows for key in row))
            heads.remove("part")
            lines = [[_shown(row.get(head, "")) for head in heads] for row in rows]
            texts.append(f"**{part}**\n\n{table([heads, *lines], 0)}")
    return "\n\n".join(texts)


def _shown(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int | float) and value >= 1000 else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def transcribed_table(runs: Sequence[Run]) -> str:
    """A table as it was measured; its page says of what."""
    (run,) = runs
    return f"{table(run['cells'], run['num_left'])}\n\n{sources(runs)}"


SOURCES = {"why": ("demo", "drafters", "recurrent")}
"""Benchmarks of a table that is not of the one of its name."""
TABLES: dict[str, Callable[[Sequence[Run]], str]] = {
    "drafters": drafters,
    "generate-vs-transformers": generate_vs_transformers,
    "speculation-vs-transformers": speculation_vs_transformers,
    "goodput": goodput,
    "step-overhead": step_overhead,
    "demo": demo,
    "why": why,
    "coverage": coverage,
    "real-text": real_text,
    "gpu": gpu,
    "table": transcribed_table,
}


if __name__ == "__main__":
    sys.exit(main())
