"""A recording of the server's page for the README: ``docs/page/run.webp``.

    make recording

One run of the embedded reasoner, a vote of eight chains of Dynasor-CoT, is taken from ``forethought
serve`` with the times at which its events came, and replayed to the page ``SLOWER`` times slower,
with the page's clock as slow: a small model is done before a reader has found the lanes. Of several
seeds it is the first whose samples answer several numbers. Needs Chromium with its driver, as the
page's tests do, and Pillow.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from PIL import Image  # noqa: E402

from page.browser import Browser  # noqa: E402
from page.serving import serving  # noqa: E402
from page.stand_in import Item, StandIn  # noqa: E402
from page.steps import open_page, shows  # noqa: E402

QUESTION = (
    "Ann buys 44 boxes with 30 stamps each. She sells 77. She loses 318. She gets 256 more. "
    "How many stamps does Ann have now?"
)
ANSWER = "1181"
TEMPERATURE, NUM_SEEDS = 1.7, 200
INNER = {
    "method": "dynasor",
    "chunk_size": 24,
    "certainty_threshold": 2,
    "streaming": True,
}
SETTINGS = {"default_sample_num": 8, "generation_controller": INNER}
SECONDS, MAX_SECONDS = 11.0, 20.0
"""That the run takes in the recording, and at most the recording."""
SIZE, SHOWN = (1120, 740), (960, 634)
"""Of the window, in CSS pixels, and of the pictures."""
TYPED = 12
"""Characters of the question between two pictures."""
HOLD, KEYS, END = 800, 150, 3500
"""Milliseconds of the first picture, of those while the question is typed, and of the last one."""
SERVER = ("--speculative", "draft_target", "--stream-interval", "0")
CATALOG = ("models", "methods", "drafters", "sampling", "tools", "examples", "load")
CLOCK = "const now = performance.now.bind(performance); performance.now = () => now() / {slower};"


def main() -> None:
    """Take a run, and record it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page" / "run.webp")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "log", *SERVER) as address,
    ):
        seed, stream = divided(address)
        paths = [f"/v1/{name}" for name in CATALOG]
        catalog = {path: json.load(urllib.request.urlopen(address + path[1:])) for path in paths}
    slower = SECONDS / stream[-1][0]
    with StandIn(lambda _: slowed(stream, slower), catalog) as server, Browser(*SIZE) as browser:
        typed = [*written(browser, server.address, slower, seed)]
        shown = [*recorded(browser)]
    seconds = save(typed, shown, args.out)
    size = args.out.stat().st_size
    print(f"{args.out}: {size:,} bytes, {seconds:.1f} s, {slower:.1f} times slower")


def divided(address: str) -> tuple[int, list[tuple[float, dict[str, Any]]]]:
    """The first seed whose samples vote for several numbers, the right one most, and its stream."""
    for seed in range(NUM_SEEDS):
        stream = [*taken(address, seed)]
        events = [event for _, event in stream]
        votes = [event["fields"] for event in events if event.get("name") == "voted"]
        answers = [*votes[-1]["tally"]] if votes and votes[-1]["answer"] == ANSWER else []
        if len(answers) > 1 and all(answer.isdecimal() for answer in answers):
            return seed, stream
    raise SystemExit(f"the samples of {NUM_SEEDS} seeds agree")


def taken(address: str, seed: int) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a run, with the seconds after which they came."""
    body = {
        "model": "reasoner",
        "input": QUESTION,
        "method": "majority_vote",
        "method_params": SETTINGS,
        "temperature": TEMPERATURE,
        "seed": seed,
        "stream": True,
        "events": True,
    }
    headers = {"Content-Type": "application/json"}
    url = f"{address}v1/responses"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began = time.monotonic()
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["type"] != "response.created":  # the stand-in has its own
                    yield time.monotonic() - began, event.get("event", event)


def slowed(stream: list[tuple[float, dict[str, Any]]], slower: float) -> Iterator[Item]:
    """The stream, with the seconds between its events."""
    before = 0.0
    for at, event in stream:
        yield slower * (at - before)
        yield event
        before = at


def written(browser: Browser, address: str, slower: float, seed: int) -> Iterator[Image.Image]:
    """Pictures of the page while the question is typed."""
    clock = CLOCK.format(slower=slower)
    browser.resize(*SIZE)
    browser.devtools("Page.addScriptToEvaluateOnNewDocument", source=clock)
    open_page(browser, address)
    browser.set("#method", "majority_vote")
    for name, value in SETTINGS.items():
        browser.set(f"#parameters [name={name}]", json.dumps(value))
    browser.set("#sampling [name=temperature]", str(TEMPERATURE))
    browser.set("#sampling [name=seed]", str(seed))
    yield shot(browser)
    browser.run("document.querySelector('#question').focus()")
    for start in range(0, len(QUESTION), TYPED):
        browser.write(QUESTION[start : start + TYPED])
        yield shot(browser)


def recorded(browser: Browser) -> Iterator[tuple[float, Image.Image]]:
    """Pictures of the run with the seconds at which they were taken."""
    browser.click("#ask")
    while not browser.text("#status").startswith("Answered"):
        yield time.monotonic(), shot(browser)
    shows(browser, ".votes p", "The answer is")
    yield time.monotonic(), shot(browser)


def shot(browser: Browser) -> Image.Image:
    """The window."""
    picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
    return picture.resize(SHOWN, Image.Resampling.LANCZOS)


def save(typed: list[Any], shown: list[tuple[float, Any]], path: Path) -> float:
    """One moving picture; returns its seconds, or ends the program where it is too long."""
    lengths = [HOLD, *([KEYS] * (len(typed) - 1))]
    lengths += [int(1000 * (b[0] - a[0])) for a, b in itertools.pairwise(shown)]
    seconds = (sum(lengths) + END) / 1000
    if seconds > MAX_SECONDS:
        raise SystemExit(f"{seconds:.1f} s are too long: the machine has other work")
    first, *others = (*typed, *(picture for _, picture in shown))
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=[*lengths, END],
        loop=0,
        quality=70,
        method=4,
    )
    return seconds


if __name__ == "__main__":
    main()
