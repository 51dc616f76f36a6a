"""What a user does on the page, for its tests."""

from __future__ import annotations

from page.browser import Browser

READY = "document.documentElement.dataset.ready"


def open_page(browser: Browser, address: str) -> None:
    """Open the page, and wait until it has asked the server for its choices."""
    browser.open(address)
    browser.wait(READY)


def ask(browser: Browser, question: str, method: str = "plain") -> None:
    """Choose a method, and ask."""
    browser.set("#method", method)
    browser.set("#question", question)
    browser.click("#ask")


def status(browser: Browser, begins: str) -> str:
    """Wait until the status begins with this."""
    browser.wait("document.querySelector('#status').textContent.startsWith(args[0])", begins)
    return browser.text("#status")


def shows(browser: Browser, selector: str, text: str) -> None:
    """Wait until some element holds this text."""
    condition = (
        "[...document.querySelectorAll(args[0])].some((e) => e.textContent.includes(args[1]))"
    )
    browser.wait(condition, selector, text)


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    found: list[str] = browser.run(script, selector)
    return found


def figure(browser: Browser, name: str, run: int = 0) -> str:
    """A figure of a run that is shown."""
    script = """
        const run = document.querySelectorAll(".run")[arguments[1]];
        const terms = [...run.querySelectorAll(".figures dt")];
        return terms.find((term) => term.textContent === arguments[0])?.nextSibling.textContent;
    """
    found: str = browser.run(script, name, run)
    return found


def saved(browser: Browser, label: str) -> str:
    """The text of the file that a button offers."""
    return str(
        browser.run_async(
            """
            const [make, click] = [URL.createObjectURL, HTMLAnchorElement.prototype.click];
            let file = null;
            URL.createObjectURL = (blob) => ((file = blob), make.call(URL, blob));
            HTMLAnchorElement.prototype.click = () => {};
            const all = [...document.querySelectorAll("button")];
            all.find((button) => button.textContent === args[0]).click();
            while (!file) await new Promise((resolve) => setTimeout(resolve, 10));
            [URL.createObjectURL, HTMLAnchorElement.prototype.click] = [make, click];
            return file.text();
            """,
            label,
        )
    )
