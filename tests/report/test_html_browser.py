"""The HTML report in headless Chromium: it opens without a word on the console, is legible, and
answers to pointer and keyboard.

Needs `pip install "meshwright[report-test]"` and the programs chromium and chromedriver.
Screenshots are kept in build/shots (or the folder named by MESHWRIGHT_SHOTS); those of GPT-3 175B,
Llama-3 405B, ResNet-50 and two plans side by side are made by `pytest -m slow
tests/report/test_html_browser.py`.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.report.html.page import page
from planner.report.html.view import View
from tests.report.html_plans import hostile_view, view

pytest.importorskip(
    "selenium",
    reason="the browser tests of the report need selenium: pip install 'meshwright[report-test]'",
)

BROWSER = next(
    (
        p
        for n in ("chromium", "chromium-browser", "google-chrome", "chrome")
        if (p := shutil.which(n))
    ),
    None,
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not BROWSER or not DRIVER,
    reason="the browser tests of the report need the programs chromium and chromedriver",
)
SHOTS = Path(__file__).parents[2] / "build" / "shots"
DESKTOP, PHONE = 1280, 390
STAGED, DEEP = "pp=4,dp=2,micro=8,schedule=1f1b", "zoo:gpt-tiny,hidden=256,layers=8"

# Text that is drawn, its size, its contrast against the nearest painted background, and whether it
# sticks out of the window.
LEGIBLE = """
const lum = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = css => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
const behind = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] > 200) return c.slice(0, 3); } return [255, 255, 255]; };
const bad = []; let seen = 0;
for (const e of document.querySelectorAll("body *")) {
  if (["SCRIPT", "STYLE", "CAPTION"].includes(e.tagName) || !e.checkVisibility()) continue;
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
  const s = getComputedStyle(e), [a, b] = [lum(rgba(s.color).slice(0, 3)), lum(behind(e))], ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  seen += 1;
  if (ratio < 4.5 || parseFloat(s.fontSize) < 11) bad.push([e.className || e.tagName, e.textContent.slice(0, 30), ratio.toFixed(2), s.fontSize]);
}
return [seen, bad];
"""
OVERFLOW = """
const clips = p => /auto|scroll|hidden/.test(getComputedStyle(p).overflowX);
const inside = e => { for (let p = e.parentElement; p; p = p.parentElement) if (clips(p)) return true; return false; };
const wide = [];
for (const e of document.querySelectorAll("main *")) {
  const r = e.getBoundingClientRect();
  if (r.width && r.right > innerWidth + 1 && !inside(e)) wide.push([e.tagName, e.className.toString(), r.right]);
}
return [document.documentElement.scrollWidth, wide];
"""


class Browser:
    """A driver with the few things the tests do."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(self, source: str, name: str, width: int = DESKTOP, scheme: str = "light") -> None:
        """Load a page at a width under a colour scheme, with nothing remembered from before."""
        path = self.folder / f"{name}.html"
        path.write_text(source, "utf-8")
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        self.scheme(scheme)
        self.driver.get(path.as_uri())
        self.js("localStorage.clear()")
        self.driver.get(path.as_uri())

    def scheme(self, scheme: str) -> None:
        """What the system prefers."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def js(self, code: str, *args: Any) -> Any:
        """Run a script on the page."""
        return self.driver.execute_script(code, *args)

    def console(self) -> list[str]:
        """What the console has said since it was last asked."""
        return [e["message"] for e in self.driver.get_log("browser")]

    def keys(self, *keys: str) -> None:
        """Press keys."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def shot(self, name: str) -> Path:
        """The whole page as a picture."""
        width, height = self.js("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )["data"]
        folder = Path(os.environ.get("MESHWRIGHT_SHOTS") or SHOTS)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(base64.b64decode(data))
        return folder / f"{name}.png"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    except WebDriverException as e:
        pytest.skip(f"the browser does not start here: {e.msg}")
    try:
        yield Browser(driver, tmp_path_factory.mktemp("pages"))
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    a, b = view("tp=2,micro=2", "A"), view("dp=8,zero=3,recompute=block", "B")
    return {
        "one": page([view("tp=2,micro=2")]),
        "two": page([a, b]),
        "bare": page([View("", "s.json", a.strategy, None, "no model")]),
        "hostile": page([hostile_view()]),
        "hostile-two": page([hostile_view("A"), hostile_view("B")]),
        "staged": page([view(STAGED, "", DEEP)]),
        "staged-two": page([view(STAGED, "A", DEEP), view("tp=2,micro=2", "B", DEEP)]),
    }


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(
            (n, w, s)
            for n in ("one", "two", "staged")
            for w in (DESKTOP, PHONE)
            for s in ("light", "dark")
        ),
        *(
            (n, w, s)
            for n in ("bare", "hostile", "hostile-two", "staged-two")
            for w, s in ((PHONE, "light"), (DESKTOP, "dark"))
        ),
    ],
)
def test_opens_in_silence_and_is_legible(
    name: str, width: int, scheme: str, browser: Browser, pages: dict[str, str]
) -> None:
    browser.console()
    browser.open(pages[name], name, width, scheme)
    assert browser.console() == []
    assert browser.js("return performance.getEntriesByType('navigation')[0].domComplete") < 2000
    seen, bad = browser.js(LEGIBLE)
    assert seen > 100 and bad == []
    overflow, wide = browser.js(OVERFLOW)
    assert overflow <= width and wide == []
    assert browser.js("return window.pwned") is None
    assert browser.shot(f"{name}-{width}-{scheme}").stat().st_size > 20_000


def test_colours_follow_the_system_and_the_button(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], "one")
    paper = lambda: browser.js("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = paper()
    browser.scheme("dark")
    dark = paper()
    assert light != dark
    seen = []
    for _ in range(3):
        browser.js("document.getElementById('theme').click()")
        seen.append((browser.js("return document.getElementById('theme').textContent"), paper()))
    assert seen == [("Light", light), ("Dark", dark), ("Auto", dark)]
    browser.js("document.getElementById('theme').click()")
    browser.driver.refresh()
    assert paper() == light  # remembered


def test_bars_answer_to_arrows_and_pointer(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["one"], "one")
    say = "return document.querySelector('#timeline .readout').textContent"
    hint = browser.js(say)
    browser.js("document.querySelectorAll('#timeline .bar')[1].querySelector('.part').focus()")
    first = browser.js(say)
    browser.keys(Keys.ARROW_RIGHT)
    second = browser.js(say)
    assert (
        len({hint, first, second}) == 3
        and browser.js("return document.activeElement.dataset.tip") == second
    )
    browser.keys(Keys.END)
    assert browser.js(
        "return document.activeElement === [...document.querySelectorAll('#timeline"
        " .bar')[1].children].at(-1)"
    )
    assert browser.js(
        "return [...document.querySelectorAll('#timeline .bar')].every(b =>"
        " [...b.children].filter(p => p.tabIndex === 0).length === 1)"
    )
    browser.js("document.activeElement.blur()")
    assert browser.js(say) == hint
    ActionChains(browser.driver).move_to_element(
        browser.driver.find_element(By.CSS_SELECTOR, "#timeline .bar .part")
    ).perform()
    assert "microbatches" in browser.js(say)


def test_bars_of_stages_say_which_microbatch(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["staged"], "staged")
    assert browser.js("return document.querySelectorAll('.stagerow .bar').length") == 4
    widths = browser.js(
        "return [...document.querySelectorAll('.stagerow .bar')].map(b =>"
        " b.getBoundingClientRect().width)"
    )
    assert max(widths) - min(widths) < 0.5
    browser.js("document.querySelectorAll('.stagerow .bar')[1].querySelector('.part').focus()")
    say = "return document.querySelector('#timeline .readout').textContent"
    assert browser.js(say).startswith("bubble")
    browser.keys(Keys.ARROW_RIGHT)
    assert browser.js(say).startswith("forward (forward of microbatches 0 to 1)")
    browser.js("document.querySelector('.slider input').focus()")
    browser.keys(Keys.ARROW_RIGHT)  # another stage holds other blocks
    assert browser.js("return document.querySelector('.slider output').textContent") == "1"


def test_a_block_opens_its_own_bar(browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(page([view("", "", "zoo:resnet50")]), "resnet50")
    shown = (
        "return [...document.querySelectorAll('[data-block]')].filter(b => !b.hidden).map(b =>"
        " b.dataset.block)"
    )
    assert len(browser.js(shown)) == 1
    find = (
        "const p = [...document.querySelectorAll('.part[data-run]')].find(p => p.dataset.run !=="
        " arguments[0]); p.focus(); return p.dataset.run"
    )
    other = browser.js(find, browser.js(shown)[0])
    browser.keys(Keys.ENTER)
    assert browser.js(shown) == [other]


def test_the_memory_curve_answers_to_arrows(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["one"], "one")
    say = "return document.querySelector('.curve .readout').textContent"
    browser.js("document.querySelector('.plot').focus()")
    start = browser.js(say)
    browser.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert start != browser.js(say) and "holds" in browser.js(say)
    browser.keys(Keys.END)
    assert browser.js("return document.querySelector('.cursor').style.left") == "100%"


def test_lines_of_the_graph_open(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["one"], "one")
    browser.js("document.querySelector('.line > summary').focus()")
    assert not browser.js("return document.querySelector('.line').open")
    browser.keys(Keys.ENTER)
    assert browser.js(
        "return document.querySelector('.line').open && document.querySelector('.line"
        " .inside').checkVisibility()"
    )
    heights = (
        "return ['.line > summary', '.line > summary > .slice'].map(q =>"
        " document.querySelector(q).getBoundingClientRect().height)"
    )
    head, rails = browser.js(heights)
    assert rails == pytest.approx(head, abs=1)  # rails reach from line to line


def test_choosing_a_device_moves_its_pieces(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(page([view("dp=8,zero=3,recompute=block")]), "cut")
    where = (
        "return [...document.querySelectorAll('.mine')].map(r => [+r.getAttribute('x'),"
        " +r.getAttribute('y')])"
    )
    start = browser.js(where)
    browser.js("document.querySelector('.slider input').focus()")
    browser.keys(Keys.END)
    moved = browser.js(where)
    assert start != moved and all(x >= 0 and y >= 0 for x, y in moved)
    assert browser.js("return document.querySelector('.device').textContent") == browser.js(
        "return document.querySelector('.devices .on').dataset.device"
    )
    inside = """return [...document.querySelectorAll('.mine')].every(r => { const w = r.parentElement.querySelector('.whole');
      const end = (e, k, n) => +e.getAttribute(k) + +e.getAttribute(n);
      return [['x', 'width'], ['y', 'height']].every(([k, n]) => end(r, k, n) <= end(w, k, n) + .01); })"""
    for device in range(8):
        browser.js("document.querySelector(`[data-device='${arguments[0]}']`).click()", device)
        assert browser.js("return document.querySelector('.device').textContent") == str(
            device
        ) and browser.js(inside)


def test_everything_is_reached_by_the_tab_key(browser: Browser, pages: dict[str, str]) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["one"], "one")
    browser.js("document.querySelectorAll('.stretch').forEach((d, k) => { d.open = k === 1; })")
    reached = set()
    for _ in range(150):
        browser.keys(Keys.TAB)
        here = browser.js(
            """const e = document.activeElement; return !e || e === document.body ? null : [e.id, e.className.toString().split(' ')[0], e.tagName,
          getComputedStyle(e).outlineStyle !== 'none' || e.type === 'range'];"""
        )
        if here is None:
            break
        assert here[3], f"{here} shows no focus"
        reached.add(here[0] or here[1] or here[2])
    assert {"skip", "theme", "part", "plot", "SUMMARY", "scroll"} <= reached and any(
        r.startswith("ax") for r in reached
    )


LARGE = {
    "gpt3-175b": (1024, 1536),
    "llama3-405b": (16384, 2048),
    "resnet50": (8, 256),
    "llama3-8b": (64, 512),
}
"""Zoo model -> devices, batch."""


@pytest.fixture(scope="module")
def large() -> dict[str, View]:
    """Plans of large models with their detail; A and B are two ways to train one."""
    import planner
    from planner.commands.common import priced
    from planner.report.html.derive import work_out

    def planned(name: str, letter: str = "", file: str = "", **how: Any) -> View:
        devices, batch = LARGE[name]
        s = planner.plan(f"zoo:{name}", devices=devices, batch=batch, **how)
        return View(letter, file or f"{name}.plan.json", s, work_out(priced(s, f"zoo:{name}")))

    made = {name: planned(name) for name in ("gpt3-175b", "llama3-405b", "resnet50")}
    return made | {
        "A": planned("llama3-8b", "A", "mine.json", pins="dp=8,tp=8", baselines=False),
        "B": planned("llama3-8b", "B", "best.json"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("name", ["gpt3-175b", "llama3-405b", "resnet50", "compared"])
def test_large_models_open_in_two_seconds(
    name: str, width: int, scheme: str, browser: Browser, large: dict[str, View]
) -> None:
    views = [large["A"], large["B"]] if name == "compared" else [large[name]]
    browser.console()
    browser.open(page(views), name, width, scheme)
    assert browser.console() == []
    assert browser.js("return performance.getEntriesByType('navigation')[0].domComplete") < 2000
    assert browser.js(LEGIBLE)[1] == [] and browser.js(OVERFLOW)[1] == []
    assert browser.shot(f"{name}-{width}-{scheme}").stat().st_size > 20_000


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_pages_of_the_documentation_keep_to_the_window_and_switch_colours(
    browser: Browser, site: Path, width: int
) -> None:
    browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE},
    )
    for name in ("tutorial", "scaling", "readme"):
        browser.driver.get((site / f"{name}.html").as_uri())
        assert browser.js("return document.documentElement.scrollWidth") <= width, name
        assert (
            browser.js(
                "document.querySelector('[data-bs-theme-value=dark]').click(); return"
                " document.documentElement.dataset.bsTheme"
            )
            == "dark"
        )
        browser.js("document.querySelector('[data-bs-theme-value=light]').click()")
        assert not [said for said in browser.console() if "worker.js" not in said], (
            name
        )  # the search needs a server: browsers start no worker from a file
    browser.shot(f"docs-readme-{width}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(folder)],
        cwd=SHOTS.parents[1],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder
