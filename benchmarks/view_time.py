"""How long a saved plan takes to look at, each command in a process of its own: `python -m
benchmarks.view_time [--strategy FILE]`.

Marks, of Llama-3 405B (126 layers) planned for 16,384 devices: `plan --help` 150 ms, `plan show`
300 ms, `plan explain` 500 ms, its page open in a browser 2 s, the strategy file 2 MB. Medians of
several runs by the clock, and of their processor time, which other work on the machine stretches
less. The making of the page opens the model and has no mark. The browser is left out where chromium
or selenium are not installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

RUNS = 9
PLAN = ["zoo:llama3-405b", "--devices", "16384", "--batch", "2048", "--quiet"]
HELP_S, SHOW_S, EXPLAIN_S, PAGE_S, FILE_BYTES = 0.150, 0.300, 0.500, 2.0, 2_000_000


@dataclass(frozen=True)
class Took:
    """Medians over the runs of one command, and the slowest, in seconds."""

    wall_s: float
    slowest_s: float
    cpu_s: float


def took(*command: str, runs: int = RUNS) -> Took:
    """Run `plan COMMAND` several times; the first, which may compile bytecode, is left out."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    wall, cpu = [], []
    for _ in range(runs + 1):
        before, start = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "planner.cli", *command],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        after = os.times()
        wall.append(time.perf_counter() - start)
        cpu.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return Took(statistics.median(wall[1:]), max(wall[1:]), statistics.median(cpu[1:]))


def page_opens_s(path: Path) -> float | None:
    """Seconds until a page is complete in headless Chromium; None where there is none."""
    browser, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return None
    if not browser or not driver:
        return None
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        opened.get(path.as_uri())
        return (
            float(
                opened.execute_script(
                    "return performance.getEntriesByType('navigation')[0].domComplete"
                )
            )
            / 1e3
        )
    finally:
        opened.quit()


def main() -> int:
    """Print the table; exit 1 past a mark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--strategy", type=Path, help="the saved plan, where it is at hand (default: planned anew)"
    )
    parser.add_argument("--runs", type=int, default=RUNS)
    args = parser.parse_args()
    late = False
    with tempfile.TemporaryDirectory() as folder:
        path, html = args.strategy or Path(folder) / "405b.json", Path(folder) / "405b.html"
        if args.strategy is None:
            subprocess.run(
                [sys.executable, "-m", "planner.cli", *PLAN, "-o", str(path)], check=True
            )
        commands: tuple[tuple[tuple[str, ...], float | None], ...] = (
            (("--help",), HELP_S),
            (("show", str(path)), SHOW_S),
            (("explain", str(path)), EXPLAIN_S),
            (("explain", str(path), "layers.13.self_attn.q_proj"), EXPLAIN_S),
            (("show", str(path), "--html", str(html)), None),
        )
        for command, mark in commands:
            found = took(*command, runs=args.runs if mark else 1)
            late |= mark is not None and found.wall_s > mark
            name = " ".join(["plan", *(Path(word).name for word in command)])
            times = (
                f"{1e3 * found.wall_s:6.0f} ms   slowest {1e3 * found.slowest_s:6.0f} ms   CPU"
                f" {1e3 * found.cpu_s:6.0f} ms"
            )
            print(f"{name:<52} {times}   " + (f"mark {1e3 * mark:.0f} ms" if mark else "no mark"))
        opens = page_opens_s(html)
        late |= opens is not None and opens > PAGE_S
        said = (
            f"{1e3 * opens:6.0f} ms   mark {1e3 * PAGE_S:.0f} ms"
            if opens is not None
            else "no browser here"
        )
        print(f"{'the page in chromium':<52} {said}   ({html.stat().st_size / 1e3:,.0f} kB)")
        size = path.stat().st_size
        late |= size > FILE_BYTES
        print(f"{'strategy file':<52} {size / 1e3:6.0f} kB   mark {FILE_BYTES / 1e3:,.0f} kB")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
