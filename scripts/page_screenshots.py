"""Pictures of the server's page for the documentation, and a short recording of one run.

    forethought serve --speculative ngram --port 8000
    python scripts/page_screenshots.py http://127.0.0.1:8000/

Needs Chromium with its driver, as the page's tests do, and Pillow. Writes ``docs/page/*``. With
``--frames`` it draws 64 branches of 2,000 tokens as they come and prints the frames a second.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from PIL import Image  # noqa: E402

from page.browser import Browser  # noqa: E402
from page.steps import open_page, status  # noqa: E402

QUESTION = "Max has 283 stamps. He uses 103. He loses 91. He gets 217 more. How many stamps?"
FRAMES = """
    const { Run } = await import(args[0] + "run.js");
    const { RunView } = await import(args[0] + "inspector.js");
    const request = { model: "m", messages: [{ role: "user", content: "q" }] };
    const run = new Run({ id: "a", created: 0, request });
    run.apply({ type: "started", at: 0 });
    for (let b = 0; b < 64; b++) {
      run.apply({ type: "delta", at: 0, branch: String(b), text: "first ", num_tokens: 1 });
    }
    const view = new RunView(run, []);
    document.querySelector("#views").replaceChildren(view.element);
    const work = [];
    const began = performance.now();
    const numFrames = 600;
    for (let frame = 0; frame < numFrames; frame++) {
      const now = await new Promise(requestAnimationFrame);
      const from = performance.now();
      const at = frame / 60;
      const [first, last] = [frame, frame + 1].map((f) => Math.floor((f * 2000) / numFrames));
      for (let i = first; i < last; i++) {
        for (let b = 0; b < 64; b++) {
          const drafts = i % 3 ? [] : [[0, 4, true, "ngram"]];
          run.apply({ type: "delta", at, branch: String(b), text: "word ", num_tokens: 1, drafts });
        }
      }
      view.update();
      work.push(performance.now() - from);
    }
    const seconds = (performance.now() - began) / 1000;
    work.sort((a, b) => a - b);
    const most = work[Math.floor(numFrames * 0.99)];
    return [numFrames / seconds, work[numFrames / 2], most, work.at(-1)];
"""


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of a server that runs")
    parser.add_argument("--frames", action="store_true", help="measure instead")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    args = parser.parse_args()
    with Browser(1280, 900) as browser:
        browser.resize(1280, 860)
        open_page(browser, args.address)
        if args.frames:
            rate, median, most, worst = browser.run_async(FRAMES, args.address)
            print(
                f"{rate:.1f} frames a second; work a frame: median {median:.2f} ms, "
                f"99th percentile {most:.2f} ms, longest {worst:.2f} ms"
            )
            return
        args.out.mkdir(parents=True, exist_ok=True)
        pictures(browser, args.out)


def pictures(browser: Browser, out: Path) -> None:
    """A vote as it comes, a chain beside plain decoding, and the same on a phone in the dark."""
    browser.set("#temperature", "0.8")
    browser.set("#seed", "5")
    browser.set("#method", "majority_vote")
    browser.set("#question", QUESTION)
    browser.click("#ask")
    record(browser, out / "run.webp")
    status(browser, "Answered")
    settle(browser)
    save(browser, out / "vote.png")
    browser.click("#new")
    browser.set("#temperature", "0")
    browser.set("#method", "dynasor")
    browser.set("#parameters [name=chunk_size]", "16")
    browser.run("document.querySelector('#plain-too').checked = true")
    browser.set("#question", QUESTION)
    browser.click("#ask")
    status(browser, "Answered: plain")
    settle(browser)
    save(browser, out / "compared.png")
    browser.click_button("Close the comparison")
    browser.media(prefers_color_scheme="dark")
    browser.resize(390, 844, 2)
    browser.run("document.querySelector('#composer').style.position = 'static'")
    browser.run("document.querySelector('#inspector').scrollIntoView()")
    settle(browser)
    save(browser, out / "phone.png")


def settle(browser: Browser) -> None:
    """Wait for two frames."""
    browser.run_async(
        "for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame); return true;"
    )


def record(browser: Browser, path: Path) -> None:
    """Screenshots until the run is over, as one moving picture."""
    frames: list[Image.Image] = []
    times: list[float] = []
    while len(frames) < 80:
        frames.append(shot(browser).resize((960, 645), Image.Resampling.LANCZOS))
        times.append(time.monotonic())
        if browser.text("#status").startswith("Answered"):
            break
    lengths = [int(1000 * (b - a)) for a, b in itertools.pairwise(times)]
    frames[0].save(
        path,
        save_all=True,
        append_images=frames[1:],
        duration=[*lengths, 3000][: len(frames)],
        loop=0,
        quality=60,
        method=4,
    )


def shot(browser: Browser) -> Image.Image:
    """The window."""
    return Image.open(io.BytesIO(browser.screenshot())).convert("RGB")


def save(browser: Browser, path: Path) -> None:
    """The window in a palette of 128 colours, which text and lines do not exceed."""
    shot(browser).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
