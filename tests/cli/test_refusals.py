"""Wrong names and paths are refused before torch, which takes seconds, is imported."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from forethought import assets

WRONG = """
generate hi --model /no/such
generate hi --model runs/no-such
generate hi --model forethought/nope
generate hi --model EMPTY
generate hi --model NO_WEIGHTS
generate hi --model CUT_WEIGHTS
generate hi --model CUT_CONFIG
generate hi --model CUT_TOKENIZER
chat NO_WEIGHTS
eval --model CUT_CONFIG
bench speculation --model CUT_WEIGHTS
train medusa --out OUT --data TEXTS --target CUT_WEIGHTS
generate hi --model forethought/reasoner --revision x
generate hi --method nope
generate hi --method plain+nope
generate hi --method nope:Thing
generate hi --method majority_vote --set nope=1
generate hi --speculative nope
generate hi --speculative draft_target --draft-model /no/such
generate hi --speculative eagle3 --draft-model EMPTY
generate hi --method best_of_n --reward-model /no/such
generate hi --method best_of_n --reward-model EMPTY
generate hi --method best_of_n --reward-url URL --reward-tokenizer /no/such
generate hi --trace /no/such/trace.json
generate hi --config /no/such.yaml
generate hi --json-schema /no/such.json
chat --model /no/such
chat forethought/nope
chat --speculative pearl --draft-model /no/such
serve --port 0 /no/such
serve --port 0 --reward-model /no/such
serve --port 0 --speculative eagle3 --draft-model /no/such
serve --port 0 --upstream URL --api-model m --tokenizer /no/such
serve --port 0 --worker scripted /no/such
serve --port 0 --config /no/such
serve --port TAKEN
serve --port 0 CUT_WEIGHTS
eval --model /no/such
eval --methods nope
eval --task nope
eval --data /no/such
eval --task gsm8k --data /no/such
eval --methods plain,best_of_n --reward-model /no/such
eval --speculative pearl --draft-model /no/such
bench nope
cluster nope
bench speculation --model /no/such
bench speculation --prompts /no/such
bench speculation --speculative pearl --draft-model /no/such
bench roofline --model /no/such
bench auto --model /no/such
bench auto --prompts /no/such
bench auto --speculative pearl --draft-model /no/such
bench methods --task nope
bench methods --only nope
bench methods --policy /no/such
bench methods --reward-model /no/such
bench specreason --base /no/such --small forethought/countdown
bench specreason --base forethought/countdown --small /no/such
bench specreason --base forethought/countdown --small forethought/countdown --task nope
bench serving --url URL --prompts /no/such
bench serving --url URL --trace /no/such
train nope --out OUT --data TEXTS
train medusa --out OUT --data /no/such
train medusa --out OUT --self-distill /no/such
train medusa --out OUT --data TEXTS --target /no/such
train medusa --out OUT --data TEXTS --target forethought/nope
train medusa --out OUT --data TEXTS --start /no/such
train medusa --out OUT --data TEXTS --config /no/such
eval --out TEXTS/no-such
eval --trace TEXTS/no-such
generate hi --trace TEXTS/no-such
generate hi --trace EMPTY
train medusa --data TEXTS --out TEXTS/no-such
bench roofline --out TEXTS/no-such
bench methods --out TEXTS/no-such
bench methods --calibrate TEXTS/no-such
demo --out TEXTS/no-such
demo --speculative nope
demo --speculative pearl --draft-model /no/such
trace show /no/such
trace export /no/such --otel OUT
methods nope
nope
"""
CODE = """
import contextlib, io, json, sys
from forethought.cli.main import main
found = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(line.split())
    found.append([line, status, said.getvalue(), "torch" in sys.modules])
    if found[-1][3]:
        break
json.dump(found, sys.stdout)
"""


def damaged(folder: Path) -> dict[str, object]:
    """Copies of the reasoner, with a file missing or cut short each, by their names here."""
    places: dict[str, object] = {}
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        name = f"CUT_{file.removeprefix('model.').partition('.')[0].upper()}"
        place = folder / f"nope-{file}"
        shutil.copytree(assets.embedded_dir("forethought/reasoner"), place)
        (place / file).write_bytes((place / file).read_bytes()[:-100])
        places[name.replace("SAFETENSORS", "WEIGHTS")] = place
    shutil.copytree(place, folder / "nope-weights")
    (folder / "nope-weights" / "model.safetensors").unlink()
    return places | {"NO_WEIGHTS": folder / "nope-weights"}


def test_wrong_names_and_paths_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "1 + 1 =", "response": "2"}\n')
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    places: dict[str, object] = {"TAKEN": port, "TEXTS": texts}
    places |= {"EMPTY": tmp_path / "empty", "OUT": tmp_path / "out", **damaged(tmp_path)}
    lines = WRONG.replace("URL", "http://127.0.0.1:9/v1")
    for name, place in places.items():
        lines = lines.replace(name, str(place))
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(lines.split("\n")[1:-1]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    taken.close()
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for line, status, said, is_torch_imported in found:
        assert not is_torch_imported, (line, said)
        assert status == 2, (line, said)
        wrong = ("/no/such", "nope", "no-such", "revision", f"{tmp_path}/empty", port)
        assert any(word in said for word in wrong if word in line), (line, said)
    assert len(found) == len(lines.split("\n")) - 2
