"""Pictures of the server's page for the documentation.

    forethought serve --speculative ngram --port 8000
    python scripts/page_screenshots.py http://127.0.0.1:8000/

Needs Chromium with its driver, as the page's tests do, and Pillow. Writes ``docs/page/*``. With
``--frames`` it draws 64 branches of 2,000 tokens as they come, and prints the time that the page's
own code takes for a frame, and its thread in all: processor time, so that other load of the machine
does not count.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from PIL import Image  # noqa: E402

from page.browser import Browser  # noqa: E402
from page.steps import open_page, status  # noqa: E402

QUESTION = "Max has 283 stamps. He uses 103. He loses 91. He gets 217 more. How many stamps?"
PREPARE = """
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
    const take = (frame) => {
      const [first, last] = [frame, frame + 1].map((f) => Math.floor((f * 2000) / args[2]));
      for (let i = first; i < last; i++) {
        for (let b = 0; b < 64; b++) {
          const drafts = i % 3 ? [] : [[0, 4, true, "ngram"]];
          const at = frame / 60;
          run.apply({ type: "delta", at, branch: String(b), text: "word ", num_tokens: 1, drafts });
        }
      }
    };
    for (let frame = 0; frame < args[2] - args[1]; frame++) take(frame);
    view.update();
    const text = document.querySelector(".branch-text");
    text.scrollTop = text.scrollHeight;
    window.measured = { view, take };
    for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
    return true;
"""
FRAMES = """
    const { view, take } = window.measured;
    const [work, times] = [[], []];
    for (let frame = args[2] - args[1]; frame < args[2]; frame++) {
      times.push(await new Promise(requestAnimationFrame));
      const from = performance.now();
      take(frame);
      view.update();
      work.push(performance.now() - from);
    }
    work.sort((a, b) => a - b);
    const gaps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
    const at = (values, share) =>
      values[Math.min(values.length - 1, Math.floor(values.length * share))];
    const rate = (1000 * gaps.length) / (times.at(-1) - times[0]);
    return [at(work, 0.5), at(work, 0.95), at(work, 1), rate, at(gaps, 0.5), at(gaps, 0.95)];
"""
NUM_FRAMES, OF_FRAMES = 120, 600
"""The last frames, in which the texts are longest, of ten seconds."""
TIMES = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration", "TaskDuration")


def frames(browser: Browser, address: str) -> str:
    """What frames cost, in processor time of the page's thread and by the wall clock."""
    browser.devtools("Performance.enable", timeDomain="threadTicks")
    browser.run_async(PREPARE, address, NUM_FRAMES, OF_FRAMES)
    before = metrics(browser)
    measured = browser.run_async(FRAMES, address, NUM_FRAMES, OF_FRAMES)
    median, most, worst, rate, gap, long_gap = measured
    after = metrics(browser)
    spent = {name: 1000 * (after[name] - before[name]) / NUM_FRAMES for name in TIMES}
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in spent.items())
    times += f", {(after['LayoutCount'] - before['LayoutCount']) / NUM_FRAMES:.1f} layouts"
    return (
        f"processor time a frame: {times}\n"
        f"the page's code a frame, by the wall clock: median {median:.2f} ms, "
        f"95th percentile {most:.2f} ms, longest {worst:.2f} ms\n"
        f"frames a second: {rate:.1f}; between two of them: median {gap:.1f} ms, "
        f"95th percentile {long_gap:.1f} ms"
    )


def metrics(browser: Browser) -> dict[str, float]:
    """Chromium's counters of the page, in seconds."""
    counters = browser.devtools("Performance.getMetrics")["metrics"]
    return {counter["name"]: counter["value"] for counter in counters}


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of a server that runs")
    parser.add_argument("--frames", action="store_true", help="measure instead")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    args = parser.parse_args()
    with Browser(1280, 900) as browser:
        browser.resize(1280, 1600 if args.frames else 860)  # lanes and text are both in sight
        open_page(browser, args.address)
        if args.frames:
            print(frames(browser, args.address))
            return
        args.out.mkdir(parents=True, exist_ok=True)
        pictures(browser, args.out)


def pictures(browser: Browser, out: Path) -> None:
    """A vote as it comes, a search, the first paint, a chain beside plain decoding, a phone."""
    browser.set("#sampling [name=temperature]", "0.8")
    browser.set("#sampling [name=seed]", "5")
    browser.set("#method", "majority_vote")
    browser.set("#question", QUESTION)
    browser.click("#ask")
    status(browser, "Answered")
    settle(browser)
    save(browser, out / "vote.png")
    browser.click("#new")
    browser.set("#method", "beam_search")
    browser.set("#parameters [name=default_sample_num]", "8")
    browser.set("#parameters [name=step_token]", json.dumps("\n"))
    browser.set("#question", QUESTION)
    browser.click("#ask")
    status(browser, "Answered")
    settle(browser)
    save(browser, out / "search.png")
    browser.click("#new")
    settle(browser)
    save(browser, out / "first.png")
    browser.set("#sampling [name=temperature]", "0")
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


def shot(browser: Browser) -> Image.Image:
    """The window."""
    return Image.open(io.BytesIO(browser.screenshot())).convert("RGB")


def save(browser: Browser, path: Path) -> None:
    """The window in a palette of 128 colours, which text and lines do not exceed."""
    shot(browser).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
