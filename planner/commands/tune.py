"""`plan tune`: a launcher's configuration in, better ones that the same launcher can say out."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError
from planner.execution.techniques import WAITING
from planner.support import console

if TYPE_CHECKING:
    from planner.interop.price import Configuration
    from planner.interop.settings import Settings
    from planner.interop.tune import Choice, Tuned
    from planner.machine.topology import Topology
    from planner.workload.model import Model

INTERRUPTED = 130
PER = 1e6
"""Tokens (or samples) that the price of training is shown for."""


def run(args: argparse.Namespace) -> int:
    """`plan tune`."""
    import planner.api as api
    from planner.commands.common import machine
    from planner.commands.exchange import opened, precision_of
    from planner.interop.keys import function_of
    from planner.interop.price import as_priced
    from planner.interop.tune import tune
    from planner.pins.launcher_space import SPACES
    from planner.report.commands import options_of
    from planner.search.options import DEFAULT_RUNTIME

    begun = time.monotonic()
    options = machine(args)
    topology = api.make_request(**options).topology
    configuration, model = opened(args, topology)
    target = _target(args, configuration)
    space = SPACES.get(configuration.launcher)
    if space is not None and args.runtime == DEFAULT_RUNTIME:
        options["runtime"] = space.runtime
    options |= precision_of(args, configuration, options["runtime"])
    request = api.make_request(**options, workload=args.workload, optimizer=args.optimizer)
    configuration = as_priced(configuration, request)
    compile_for = api.target_of(args.confirm, args.model, request) if args.confirm else None
    with console.live(not args.quiet and not args.json) as line:
        tuned = tune(model, request, configuration, line.report)
    searched = time.monotonic() - begun
    compiled_rows, stopped = _compiled(args, tuned, compile_for)
    table = as_table(tuned, compiled_rows, searched)
    lines, gone = _changes(configuration, tuned, topology, function_of(args.config)[0].suffix)
    if args.json:
        console.data(json.dumps(table, indent=2))
    else:
        console.data(in_words(model, args, configuration, tuned, compiled_rows, lines) + "\n")
        console.say(f"{tuned.tried} plans priced, {searched:.1f} s")
    if tuned.best and tuned.best[0] is not tuned.yours:
        from planner.support.atomic_write import write_atomically

        text = _written(tuned, tuned.best[0].settings, target.suffix)
        write_atomically(target, _leaving_out(gone, target.suffix) + text)
        read = " ".join([str(target), *_behind(tuned, tuned.best[0].settings, target.suffix)])
        console.say(
            f"wrote {target}, the first of them   next: plan import {read} --model {args.model}"
            f" {' '.join(options_of(tuned.best[0].strategy, configured=True))}"
        )
    return INTERRUPTED if stopped or tuned.stopped == "interrupt" else 0


def _target(args: argparse.Namespace, configuration: Configuration) -> Path:
    """Where the better settings go. Raises PlanError P053 for a file that is there."""
    from planner.interop.keys import function_of
    from planner.interop.price import LAUNCHERS, forms_of

    (config, function), launcher = function_of(args.config), LAUNCHERS[configuration.launcher]
    suffix = config.suffix if config.suffix in forms_of(launcher) else launcher.SUFFIX
    target = Path(args.output or f"{function or config.stem}.tuned{suffix}")
    if target.resolve() == config.resolve():
        raise PlanError("P053", f"{target} is the configuration itself", help=["-o another file"])
    if target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    return target


def _leaving_out(gone: Sequence[str], suffix: str) -> str:
    """A first line of what is written: keys of the user's file that contradict it. JSON has no
    comments."""
    return "" if not gone or suffix == ".json" else f"# In the place of {', '.join(gone)}.\n"


def _written(tuned: Tuned, settings: Settings, suffix: str = "") -> str:
    """Settings as their launcher's text, in the form that a file's ending says. A precision that
    not every form has words for stays as it is in the file."""
    from planner.interop.precisions import IN_SOME_FORMS
    from planner.interop.price import LAUNCHERS, forms_of

    launcher = LAUNCHERS[tuned.launcher]
    if settings.precision in IN_SOME_FORMS.get(tuned.launcher, ()):
        settings = replace(settings, precision="")
    return str(forms_of(launcher).get(suffix, launcher.write)(settings, tuned.facts))


def _behind(tuned: Tuned, settings: Settings, suffix: str) -> list[str]:
    """What goes behind the file that has these settings."""
    from planner.interop.price import LAUNCHERS, behind

    return behind(LAUNCHERS[tuned.launcher], settings, suffix)


def _compiled(
    args: argparse.Namespace, tuned: Tuned, target: Any
) -> tuple[list[dict[str, Any]], bool]:
    """What the compiler says of the best, as programs of ours, one after the other; and whether
    the user stopped it."""
    compiled_rows: list[dict[str, Any]] = []
    if target is None:
        return compiled_rows, False
    from planner.verify.confirm import compiled

    with console.live(not args.quiet and not args.json, "compiling") as line:
        for i, choice in enumerate(tuned.best):
            line.report(
                f"compiling {i + 1} of {len(tuned.best)} for {target.text}", choice.step_s, None
            )
            try:
                compiled_rows.append(compiled(choice.strategy, args.model, target, "shard_map"))
            except PlanError as e:
                compiled_rows.append({"peak_bytes": 0, "why": e.what})
            except KeyboardInterrupt:
                return compiled_rows, True
    return compiled_rows, False


def pins_words(s: Settings) -> str:
    """Settings as pins: `pp=4 vpp=4 dp=16 cp=2 tp=4 zero=1 micro=64 recompute=block`."""
    degrees = {
        "pp": s.stage,
        "vpp": s.virtual_stages,
        "dp": s.data,
        "ep": s.expert,
        "cp": s.sequence,
        "tp": s.tensor,
    }
    words = [f"{name}={n}" for name, n in degrees.items() if n > 1] or ["dp=1"]
    words += [f"zero={s.zero_stage}"] if s.zero_stage else []
    words += [f"zero_group={s.zero_group}"] if s.zero_group else []
    words += [f"micro={s.microbatches}"]
    recompute = "selective" if s.recompute == "block-keep" else s.recompute  # as launchers say
    words += [f"recompute={recompute}"] if recompute != "none" else []
    words += [f"exchanges={s.exchanges}"] if s.exchanges != WAITING else []
    return " ".join(words)


def in_words(
    model: Model,
    args: argparse.Namespace,
    configuration: Configuration,
    tuned: Tuned,
    compiled_rows: Sequence[dict[str, Any]],
    changed: Sequence[str],
) -> str:
    """What was found, for people. changed: `_changes`."""
    from planner.interop.unread import told
    from planner.pins.launcher_space import SPACES
    from planner.support.text import table

    head = (
        f"{model.name} · {Path(args.config).name} of {configuration.launcher}"
        f" ({SPACES[tuned.launcher].version}) · batch {configuration.settings.batch}"
    )
    rows = [["", "settings", "step", "", "memory", "fits", "USD/M tokens"]]
    if tuned.yours is not None:
        rows.append(_row("yours", tuned.yours, tuned))
    rows += [_row(str(i + 1), c, tuned) for i, c in enumerate(tuned.best) if c is not tuned.yours]
    lines = [head, "", *table(rows, right=(2, 3, 4, 6)), ""]
    if tuned.yours is None:
        lines.append(f"yours has no price: {tuned.why}")
    lines += [_answer(tuned), *_peaks(tuned, compiled_rows), *_smaller(tuned)]
    lines += ["", "what changes:", *(f"  {line}" for line in changed)] if changed else []
    lines += [f"note: {note}" for note in configuration.notes]
    if configuration.unread:
        lines.append(f"note: not read: {told(configuration.unread)}")
    return "\n".join(lines)


def _row(name: str, choice: Choice, tuned: Tuned) -> list[str]:
    from costmodels.hardware.units import show_bytes, show_time

    costs = choice.strategy.costs
    change = (
        f"{100 * (choice.step_s / tuned.yours.step_s - 1):+.1f} %"
        if tuned.yours is not None and choice is not tuned.yours
        else ""
    )
    usd = _usd(choice)
    return [
        name,
        pins_words(choice.settings),
        show_time(choice.step_s),
        change,
        show_bytes(costs["memory_per_device_bytes"]),
        str(costs["fit"]),
        "" if usd is None else f"{usd:.2f}",
    ]


def _usd(choice: Choice) -> float | None:
    """USD for a million tokens (or samples) at the device's list price; None without one."""
    from planner.machine.topology import from_json

    price = from_json(choice.strategy.topology).device.usd_per_h
    costs = choice.strategy.costs
    if price is None or not costs["tokens_per_s_per_device"]:
        return None
    return float(price / 3600 / costs["tokens_per_s_per_device"] * PER)


def _answer(tuned: Tuned) -> str:
    """How much is left on the table."""
    if not tuned.best:
        return "nothing that the launcher can say fits"
    if tuned.best[0] is tuned.yours:
        return "left on the table: nothing, yours is the fastest that was found"
    margin = tuned.left
    if margin is None:
        return "the first of them is what to run"
    share, error = 100 * margin[0], 100 * margin[1]
    text = f"left on the table: {share:.1f} % ± {error:.1f}"
    if tuned.yours is not None and tuned.yours.strategy.costs["fit"] == "no":
        if share <= 0:
            return (
                "by this price yours does not fit; the fastest that does takes"
                f" {-share:.1f} % ± {error:.1f} longer"
            )
        return f"{text}; by this price yours does not fit"
    return text + (", too little to be told apart from nothing" if share < error else "")


def _peaks(tuned: Tuned, compiled_rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the compiler says, a line each."""
    from costmodels.hardware.units import show_bytes

    return [
        f"{i + 1} compiled as a program of ours: "
        + (row["why"] if "why" in row else f"{show_bytes(row['peak_bytes'])}, fits")
        + f" ({show_bytes(choice.strategy.costs['memory_per_device_bytes'])} planned as"
        f" {tuned.launcher} runs it)"
        for i, (choice, row) in enumerate(zip(tuned.best, compiled_rows, strict=False))
    ]


def _smaller(tuned: Tuned) -> list[str]:
    """Plans that take longer and less memory."""
    from costmodels.hardware.units import show_bytes, show_time
    from planner.support.text import table

    rows = [
        [pins_words(t.settings), show_time(t.step_s), show_bytes(t.memory_bytes)]
        for t in tuned.front[1:]
    ]
    return ["", "more room for more time:", *(f"  {x}" for x in table(rows, right=(1, 2)))] * bool(
        rows
    )


def _changes(
    configuration: Configuration, tuned: Tuned, topology: Topology, suffix: str
) -> tuple[list[str], list[str]]:
    """What changes in the file, of this ending, for the first of the best: lines, and the keys that
    go."""
    import tempfile

    from planner.interop.changes import Rewrite, changes
    from planner.interop.keys import Keys, read_keys
    from planner.interop.price import LAUNCHERS
    from planner.machine.topology import domain_of

    if tuned.yours is None or not tuned.best or tuned.best[0] is tuned.yours:
        return [], []
    launcher, best = LAUNCHERS[tuned.launcher], tuned.best[0].settings
    before, after = (_written(tuned, s, suffix) for s in (tuned.yours.settings, best))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"written{_ending(tuned, suffix)}"
        path.write_text(after)
        written, _ = read_keys(path, (), bool)

    def read(keys: Keys) -> Settings:
        settings: Settings = launcher.read(keys, topology.devices, domain_of(topology))[0]
        return settings

    stages, kinds = getattr(launcher, "STAGE_KEYS", ()), getattr(launcher, "KIND_KEYS", {})
    of = Rewrite(tuned.yours.settings, best, before, after, written, read, stages, kinds)
    lines, gone = changes(configuration.keys, of)
    now, then = (_behind(tuned, s, suffix) for s in (tuned.yours.settings, best))
    lines += [
        f"{sign} behind it: {word}"
        for old, new in zip(now, then, strict=True)
        if old != new
        for sign, word in (("-", old), ("+", new))
    ]
    return lines, gone


def _ending(tuned: Tuned, suffix: str) -> str:
    """The ending of what `_written` writes for a file with this ending."""
    from planner.interop.price import LAUNCHERS, forms_of

    launcher = LAUNCHERS[tuned.launcher]
    return suffix if suffix in forms_of(launcher) else str(launcher.SUFFIX)


def as_table(
    tuned: Tuned, compiled_rows: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What `plan tune --json` prints: what `in_words` says, as a table."""

    def row(choice: Choice) -> dict[str, Any]:
        costs = choice.strategy.costs
        return {
            "settings": pins_words(choice.settings),
            "step_time_s": choice.step_s,
            "step_time_range_s": list(costs["step_time_range_s"]),
            "memory_per_device_bytes": costs["memory_per_device_bytes"],
            "fit": costs["fit"],
            "usd_per_million_tokens": _usd(choice),
        }

    best = [row(c) for c in tuned.best]
    for shown, compiled in zip(best, compiled_rows, strict=False):
        shown["compiled"] = compiled
    margin = tuned.left
    return {
        "launcher": tuned.launcher,
        "yours": None if tuned.yours is None else row(tuned.yours),
        "why": tuned.why,
        "best": best,
        "left": None if margin is None else {"share": margin[0], "error": margin[1]},
        "front": [row(c) for c in tuned.front],
        "tried": tuned.tried,
        "seconds": round(seconds, 2),
        "stopped": tuned.stopped,
    }
