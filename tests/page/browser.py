"""A browser for tests: Chromium through chromedriver's WebDriver protocol, with nothing to install.

``python tests/page/browser.py`` says whether there is one, and how to install it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

INSTALL = "install Debian's packages: apt-get install -y chromium chromium-driver"

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
]

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which WebDriver names an element."""

KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Shift": "\ue008",
    "Escape": "\ue00c",
    "Space": " ",
    "End": "\ue010",
    "Home": "\ue011",
    "Up": "\ue013",
    "Down": "\ue015",
}

PATIENCE = 100.0
"""Seconds until a condition counts as never met: a loaded machine is slow."""


class BrowserError(RuntimeError):
    """There is no browser, it cannot be started, or it refused a command."""


def programs() -> tuple[str, str]:
    """Paths of Chromium and of its driver.

    Raises:
        BrowserError: one is missing; the message says how to install it.
    """
    browsers = ("chromium", "chromium-browser", "google-chrome")
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, browsers)), None)
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "Chromium" if browser is None else "chromedriver"
        raise BrowserError(f"{missing} was not found: {INSTALL}")
    return browser, driver


class Browser:
    """One window of a Chromium with a fresh profile.

    Args:
        width: of the window, in CSS pixels.
        height: of the window.
        flags: more of Chromium's.

    Raises:
        BrowserError: there is none, or it does not start.
    """

    def __init__(self, width: int = 1280, height: int = 900, flags: tuple[str, ...] = ()) -> None:
        browser, driver = programs()
        self._profile = tempfile.TemporaryDirectory(
            prefix="forethought-page-", ignore_cleanup_errors=True
        )
        self.downloads = Path(self._profile.name) / "downloads"
        self.downloads.mkdir()
        self._driver = subprocess.Popen(
            [driver, "--port=0", "--allowed-ips="],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "HOME": self._profile.name},
        )
        self._session = ""
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            arguments = [*FLAGS, *flags, f"--window-size={width},{height}"]
            arguments.append(f"--user-data-dir={self._profile.name}/profile")
            options = {
                "binary": browser,
                "args": arguments,
                "prefs": {"download.default_directory": str(self.downloads)},
            }
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            asked = {"capabilities": {"alwaysMatch": capabilities}}
            self._session = self._send("POST", "/session", asked)["sessionId"]
            self._call("POST", "/timeouts", {"script": 120_000, "pageLoad": 120_000})
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        """The port that the driver has chosen, which it prints."""
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if "started successfully on port" in line:
                threading.Thread(target=self._driver.stdout.read, daemon=True).start()
                return int(line.rpartition("port ")[2].strip(" .\n"))
        raise BrowserError("chromedriver did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End browser and driver."""
        if self._session:
            with contextlib.suppress(BrowserError, OSError):
                self._call("DELETE", "")
            self._session = ""
        self._driver.terminate()
        try:
            self._driver.wait(20)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()
        self._profile.cleanup()

    # ---- the protocol -------------------------------------------------------------------------

    def _send(self, method: str, path: str, values: Any = None) -> Any:
        data = None if values is None else json.dumps(values).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=180) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise BrowserError(json.load(error)["value"]["message"]) from None
        except urllib.error.URLError as error:
            raise BrowserError(f"chromedriver does not answer: {error.reason}") from error

    def _call(self, method: str, path: str, values: Any = None) -> Any:
        return self._send(method, f"/session/{self._session}{path}", values)

    def _element(self, selector: str) -> str:
        asked = {"using": "css selector", "value": selector}
        found: str = self._call("POST", "/element", asked)[ELEMENT]
        return found

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        asked = {"cmd": command, "params": parameters}
        return self._call("POST", "/goog/cdp/execute", asked)

    # ---- what tests do ------------------------------------------------------------------------

    def open(self, address: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": address})

    def reload(self) -> None:
        """Load the page again."""
        self._call("POST", "/refresh", {})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function's body returns in the page, where it gets ``arguments``."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """The same for a body that awaits."""
        body = (
            "const given = [...arguments], done = given.pop();"
            f"(async (...args) => {{ {script} }})(...given).then(done, (e) => done(String(e)));"
        )
        return self._call("POST", "/execute/async", {"script": body, "args": list(arguments)})

    def wait(self, condition: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """The value of an expression in the page, once it is true.

        Raises:
            BrowserError: it never was; the message shows the page's text.
        """
        script = """
            const met = () => (%s);
            const end = performance.now() + args.pop();
            for (;;) {
              const value = await met();
              if (value) return value;
              if (performance.now() > end) return null;
              await new Promise((resolve) => setTimeout(resolve, 15));
            }
        """
        value = self.run_async(script % condition, *arguments, 1000 * patience)
        if not value or (isinstance(value, str) and value.startswith("TypeError")):
            shown = str(self.run("return document.body.innerText"))[:1500]
            raise BrowserError(f"never true: {condition} ({value})\n{shown}")
        return value

    def text(self, selector: str) -> str:
        """The text of an element, as it is in the document."""
        script = "return document.querySelector(arguments[0])?.textContent ?? null"
        found: str = self.run(script, selector)
        return found

    def click(self, selector: str) -> None:
        """Click an element."""
        self._call("POST", f"/element/{self._element(selector)}/click", {})

    def click_button(self, text: str, within: str = "body") -> None:
        """Click the first visible button with this text."""
        script = """
            const all = [...document.querySelector(arguments[1]).querySelectorAll("button")];
            const found = all.find((b) => b.textContent === arguments[0] && b.offsetParent);
            found?.click();
            return Boolean(found);
        """
        if not self.run(script, text, within):
            raise BrowserError(f"there is no button {text!r} in {within}")

    def type(self, selector: str, text: str) -> None:
        """Type into an element; a file input takes the path of a file."""
        self._call("POST", f"/element/{self._element(selector)}/value", {"text": text})

    def set(self, selector: str, value: str) -> None:
        """Choose an option, or replace the value of a field."""
        script = """
            const element = document.querySelector(arguments[0]);
            element.value = arguments[1];
            element.dispatchEvent(new Event("input", {bubbles: true}));
            element.dispatchEvent(new Event("change", {bubbles: true}));
        """
        self.run(script, selector, value)

    def press(self, *keys: str) -> None:
        """Press keys one after the other: names of ``KEYS``, or characters."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self._call("POST", "/actions", {"actions": [keyboard]})

    def write(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.press(*text)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Show the page at a size in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, **features: str) -> None:
        """Media features, such as ``prefers_color_scheme="dark"``."""
        named = [{"name": n.replace("_", "-"), "value": value} for n, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=named)

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def problems(self) -> list[str]:
        """What has gone wrong in the page since the last call: scripts and violated policies.

        A request that a server refused, or that found it gone, is logged by Chromium too, and none.
        """
        entries = self._call("POST", "/se/log", {"type": "browser"})
        told = [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]
        return [message for message in told if "Failed to load resource" not in message]


def main() -> int:
    """Whether a browser starts here; 0 or 1."""
    try:
        with Browser() as browser:
            browser.open("about:blank")
    except (BrowserError, OSError) as error:
        sys.stderr.write(f"no browser for the page's tests: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
