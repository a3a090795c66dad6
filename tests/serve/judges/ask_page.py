"""Run in playwright's environment: the server's page in chromium, as somebody with a keyboard and a phone uses it.

Arguments: the server's address, chromium's path, a folder for pictures.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, Request, expect, sync_playwright

URL, CHROMIUM, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
PROMPT = "the sea the sea the sea"


def fill(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.fill(f"#{name}", value)


def wait(page: Page) -> None:
    expect(page.locator("#send")).to_be_enabled(timeout=60_000)


def check_fits(page: Page) -> None:
    over = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    assert over <= 0, f"the page is {over} pixels wider than the screen"


def completion_with_plain_beside_it(page: Page) -> None:
    page.select_option("#mode", "completion")
    fill(page, temperature="0", max_tokens="60", prompt=PROMPT)
    page.check("#compare")
    page.focus("#prompt")
    with posts(page) as seen:
        page.keyboard.press("Control+Enter")
        fill(page, max_tokens="5")  # for the next question
        wait(page)
    assert seen == ["drafts begin", "drafts end", "plain begins", "plain ends"], "each has the server to itself"
    assert page.locator(".pane h2").all_inner_texts() == ["with drafts", "plain"]
    drafted, plain = page.locator(".pane .said").all()
    assert drafted.inner_text() == plain.inner_text() != "", "the same text, with drafts and without"
    assert drafted.locator(".accepted").count() > 0 and plain.locator(".accepted").count() == 0
    colours = {
        name: page.locator(f".key .{name}").evaluate("(one) => getComputedStyle(one).backgroundColor")
        for name in ("accepted", "correction", "bonus")
    }
    assert len(set(colours.values())) == 3
    shown = drafted.locator(".accepted").first.evaluate("(one) => getComputedStyle(one).backgroundColor")
    assert shown == colours["accepted"]
    facts = page.locator(".pane dl").first.inner_text()
    assert "tokens a round" in facts and "by position" in facts
    assert all(0 <= int(share) <= 100 for share in page.locator(".pane .bars span").all_inner_texts())


@contextmanager
def posts(page: Page) -> Iterator[list[str]]:
    """What was asked for and answered, in order."""
    seen: list[str] = []

    def note(drafts: str, plain: str) -> Callable[[Request], None]:
        def heard(request: Request) -> None:
            if request.post_data:
                is_plain = json.loads(request.post_data)["speculation"].get("enabled") is False
                seen.append(plain if is_plain else drafts)

        return heard

    listeners = {"request": note("drafts begin", "plain begins"), "requestfinished": note("drafts end", "plain ends")}
    for name, heard in listeners.items():
        page.on(name, heard)
    yield seen
    for name, heard in listeners.items():
        page.remove_listener(name, heard)


def one_stop_ends_both(page: Page) -> None:
    """The titles say whose turn it is."""
    page.select_option("#mode", "completion")
    page.check("#compare")
    fill(page, max_tokens="1900", prompt="go on")
    with posts(page) as seen:
        page.keyboard.press("Control+Enter")
        expect(page.locator(".pane .said span").first).to_be_attached(timeout=60_000)
        assert page.locator(".pane h2").all_inner_texts() == ["with drafts: under way", "plain: next"]
        page.click("#stop")
        wait(page)
    assert seen == ["drafts begin"] and page.locator(".pane h2").all_inner_texts() == ["with drafts", "plain"]
    page.uncheck("#compare")


def chat_by_keyboard(page: Page) -> None:
    """From the prompt to the button by Tab alone; the second turn shows the first."""
    page.select_option("#mode", "chat")
    page.uncheck("#compare")
    for number in range(2):
        fill(page, max_tokens="8", prompt=f"turn {number}")
        page.focus("#prompt")
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.id") == "send"
        page.keyboard.press("Enter")
        wait(page)
    assert "turn 0" in page.inner_text("#turns") and "turn 1" in page.inner_text("#turns")
    assert page.input_value("#prompt") == ""


def escape_stops(page: Page) -> None:
    fill(page, max_tokens="1500", prompt="go on")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".pane .said span").first).to_be_attached(timeout=60_000)
    page.keyboard.press("Escape")
    wait(page)
    page.click("#reset")
    assert page.locator(".pane").count() == 0 and page.inner_text("#turns") == ""


def bars_grow_while_tokens_come(page: Page) -> None:
    """Acceptance by position and tokens a round are there before the usage is."""
    page.select_option("#mode", "completion")
    fill(page, max_tokens="1900", prompt=PROMPT)
    page.keyboard.press("Control+Enter")
    expect(page.locator(".pane .bars i").first).to_be_attached(timeout=60_000)
    facts = page.locator(".pane dl").first.inner_text()
    assert "drafted" not in facts and "tokens a round" in facts, "nobody has told the usage yet"
    page.keyboard.press("Escape")
    wait(page)


def a_new_conversation_forgets_the_answer_under_way(page: Page) -> None:
    page.select_option("#mode", "chat")
    fill(page, max_tokens="1900", prompt="go on")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".pane .said span").first).to_be_attached(timeout=60_000)
    page.click("#reset")
    wait(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    fill(page, max_tokens="4", prompt="hello")
    page.keyboard.press("Control+Enter")
    wait(page)
    assert [len(json.loads(body)["messages"]) for body in asked if body] == [1]


def errors_are_shown(page: Page) -> None:
    fill(page, max_tokens="999999", prompt="too much")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("tokens", timeout=60_000)


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    backgrounds = set()
    for name, size, scheme in (
        ("light", (1200, 900), "light"),
        ("dark", (1200, 900), "dark"),
        ("phone", (390, 844), "light"),
    ):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        complaints: list[str] = []
        page.on("pageerror", lambda error, heard=complaints: heard.append(str(error)))
        page.goto(URL)
        expect(page.locator("#model")).to_contain_text("tiny")
        assert not page.is_visible("#key"), "nobody asks for a key here"
        assert page.is_visible("#temperature") == (name != "phone"), "on a phone the prompt comes first"
        if name == "phone":
            page.click("#settings summary")
        completion_with_plain_beside_it(page)
        page.screenshot(path=FOLDER / f"{name}.png", full_page=True)
        check_fits(page)
        backgrounds.add(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
        if name == "light":
            chat_by_keyboard(page)
            escape_stops(page)
            one_stop_ends_both(page)
            bars_grow_while_tokens_come(page)
            a_new_conversation_forgets_the_answer_under_way(page)
            errors_are_shown(page)
        assert not complaints, complaints
        page.close()
    assert len(backgrounds) == 2, "dark and light differ"
    browser.close()
sys.stdout.write("the page is content\n")
