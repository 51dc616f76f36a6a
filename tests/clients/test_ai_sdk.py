"""The Vercel AI SDK: sessions of three turns with a tool, over responses and over chats."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ai_sdk.mjs")
MODULES = Path(os.environ.get("CLIENT_NODE_MODULES", "node_modules"))


@pytest.mark.parametrize("kind", ["responses", "responses without store", "chats", "compatible"])
def test_a_session_of_three_turns_uses_the_tool(scripted: str, kind: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (MODULES / "ai").is_dir():
        pytest.skip(f"no node, or no package ai in {MODULES}: make test-clients installs it by npm")
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text())
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())
    command = [node, str(script), f"{scripted}/v1", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        turns = json.loads(line)
        assert [turn["text"] for turn in turns] == ["It is 5.", "It is 15.", "You are welcome."]
        assert [turn["outputs"] for turn in turns] == [["5"], ["15"], []]
        assert all(turn["tokens"] > 0 for turn in turns)
        if kind == "compatible":
            assert "I add them." in turns[0]["reasoning"]
    assert len(done.stdout.splitlines()) == 2
