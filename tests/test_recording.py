"""The moving picture of the page that the README begins with, and the script that makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "docs" / "page" / "run.webp"
MAX_BYTES = 1_500_000


def test_the_readme_begins_with_a_recording_that_loads_quickly() -> None:
    opening = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:8]
    assert any("(docs/page/run.webp)" in line for line in opening)
    assert RECORDING.stat().st_size < MAX_BYTES


def test_the_recording_shows_a_run_for_at_most_twenty_seconds() -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(RECORDING) as recording:
        durations = []
        for number in range(recording.n_frames):
            recording.seek(number)
            recording.load()
            durations.append(recording.info["duration"])
    assert 12_000 < sum(durations) <= 20_000
    assert len(durations) > 30


def test_make_recording_runs_the_script_of_the_repository() -> None:
    assert "scripts/page_recording.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (ROOT / "scripts" / "page_recording.py").is_file()
