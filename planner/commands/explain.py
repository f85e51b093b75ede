"""`plan explain`: why a saved plan is as it is, for the whole plan or one node."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.commands import files
from planner.commands.common import priced, priced_step
from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.strategy.strategy import Strategy


def explain(args: argparse.Namespace) -> int:
    """The reasoning, or one node."""
    from planner.report import explain as report

    strategy = files.load(args.strategy)
    columns, colour = console.width(), console.colour(sys.stdout)
    if args.minimal_pins:
        return _minimal_pins(args, strategy)
    if args.pins:
        return _pin_prices(args, strategy)
    if args.untied:
        return _per_layer(args, strategy)
    if args.without or args.slow:
        return _lost_nodes(args, strategy)
    if args.json:
        raise PlanError(
            "P003",
            "--json is of --without and --slow",
            help=["the plan itself is JSON: its file, or plan show FILE --json"],
        )
    if args.node is None and args.price:
        raise PlanError(
            "P003",
            "--price is of one node, and none is named",
            help=["plan explain FILE NODE --price"],
        )
    if args.node is None:
        console.data(report.explain(strategy, columns, colour))
        return 0
    names = report.find_nodes(strategy, args.node)
    console.data(
        report.explain_node(
            strategy, names[0], columns, colour, _detail(args, strategy, names[0]), args.node
        )
    )
    if args.price:
        console.data(_price(args, strategy, names[0]))
    if len(names) > 1:
        from planner.support.text import hang

        rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
        also = f"{args.node!r} also means {', '.join(names[1:4])}{rest}"
        console.say("\n".join(hang("", also, columns)))
    return 0


def _detail(args: argparse.Namespace, strategy: Strategy, name: str) -> Mapping[str, Any] | None:
    """What a node costs: as the file has it, unless --model asks for it anew or the file was edited
    since. None, with a word, where neither file nor model tells."""
    from planner.support.text import hang

    if (
        not args.model
        and name in strategy.details
        and strategy.provenance.get("decisions") == strategy.decisions()
    ):
        return strategy.details[name]
    try:
        repriced = priced_step(strategy, files.model_of(strategy, args.strategy, args.model))
    except PlanError as e:
        if args.model or e.code != "P058":
            raise
        console.say(
            "\n".join(
                hang(
                    "note: ",
                    f"{e.what}; --model FILE adds operands, kernels and collectives",
                    console.width(),
                )
            )
        )
        return None
    from planner.pricing.breakdown import details

    return details(repriced.base, repriced.runs, repriced.flow, repriced.pricer).get(name)


def _price(args: argparse.Namespace, strategy: Strategy, name: str) -> str:
    """What the price of a node is made of."""
    from planner.pricing.breakdown import details
    from planner.pricing.terms import terms_of
    from planner.report.price import price_text
    from planner.search.cost_table import range_of
    from planner.support.text import Style

    repriced = priced_step(strategy, files.model_of(strategy, args.strategy, args.model))
    i = next(k for k, node in enumerate(repriced.base.graph.nodes) if node.id == name)
    spread = range_of(repriced.request, repriced.base, repriced.model, repriced.plan)
    detail = details(repriced.base, repriced.runs, repriced.flow, repriced.pricer)[name]
    axes = {a for move in detail["moves"] for a in move["axes"].split("+")}
    return price_text(
        terms_of(repriced.base, i, repriced.flow.split(i), repriced.pricer, axes),
        detail,
        repriced.pricer,
        spread,
        repriced.cost.step_time_s,
        console.width(),
        Style(console.colour(sys.stdout)),
    )


def _pin_prices(args: argparse.Namespace, strategy: Strategy) -> int:
    """What each pin costs."""
    from planner.report.pins import pin_prices
    from planner.whatif.pin_prices import price_pins

    _whole(args, "--pins")
    rows = list(price_pins(strategy, files.model_of(strategy, args.strategy, args.model)))
    console.data(pin_prices(strategy, rows, console.width(), console.colour(sys.stdout)))
    return 0


def _per_layer(args: argparse.Namespace, strategy: Strategy) -> int:
    """What is lost because repeats of a block decide alike."""
    from planner.report.per_layer import per_layer_text
    from planner.whatif.per_layer import per_layer

    _whole(args, "--untied")
    _one_mesh(strategy, "--untied")
    figures = per_layer(priced(strategy, files.model_of(strategy, args.strategy, args.model)))
    console.data(per_layer_text(strategy, figures, console.width(), console.colour(sys.stdout)))
    return 0


def _one_mesh(strategy: Strategy, option: str) -> None:
    """Raises PlanError P059 for plans in unequal shares, which no search on one mesh answers."""
    if strategy.chosen.islands:
        raise PlanError(
            "P059",
            f"{option} asks the search on one mesh, and this plan has islands",
            help=["plan for one kind of device, and explain that"],
        )


def _lost_nodes(args: argparse.Namespace, strategy: Strategy) -> int:
    """What a missing or a slow node costs."""
    import json

    from planner.report.lost_nodes import lost_nodes_json, lost_nodes_text
    from planner.whatif.lost_nodes import slow_node, without_nodes

    option = "--without" if args.without else "--slow"
    _whole(args, option)
    if args.without and args.slow:
        raise PlanError(
            "P003", "--without and --slow are two questions", help=["one after the other"]
        )
    if args.without:
        nodes = _nodes(args.without)
        lost = without_nodes(
            strategy, files.model_of(strategy, args.strategy, args.model), sorted(set(nodes))
        )
    else:
        node, share = _slow(args.slow)
        source = files.model_of(strategy, args.strategy, args.model)
        lost = slow_node(strategy, source, node, share)
    console.data(
        json.dumps(lost_nodes_json(lost), indent=2, sort_keys=True)
        if args.json
        else lost_nodes_text(strategy, lost, console.width(), console.colour(sys.stdout))
    )
    return 0


def _nodes(text: str) -> list[int]:
    """Numbers of nodes. Raises PlanError P003."""
    words = text.split(",")
    if not all(w.isascii() and w.isdecimal() and len(w) < 10 for w in words):
        raise PlanError(
            "P003",
            f"--without {text!r} names no nodes",
            help=["numbers from 0, joined by commas: --without 3 or --without 3,5"],
        )
    return [int(w) for w in words]


def _slow(text: str) -> tuple[int, float]:
    """A node and its share of speed. Raises PlanError P003."""
    node, _, share_text = text.partition("=")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not (node.isascii() and node.isdecimal() and len(node) < 10 and 0.01 <= share <= 1):
        raise PlanError(
            "P003",
            f"--slow {text!r} is no node and share of its speed",
            help=["NODE=SHARE with a share from 0.01 to 1: --slow 3=0.8"],
        )
    return int(node), share


def _whole(args: argparse.Namespace, option: str) -> None:
    """Raises PlanError P003 where a node is named beside an option that is of the whole plan."""
    if args.node is not None:
        raise PlanError(
            "P003",
            f"{option} is of the whole plan, and {args.node!r} is one node",
            help=["one or the other"],
        )


def _minimal_pins(args: argparse.Namespace, strategy: Strategy) -> int:
    """The fewest annotations that propagation makes the plan of, as a file for --pin."""
    from shlex import quote

    from planner.machine.topology import Mesh
    from planner.report.commands import options_of
    from planner.support.text import hang
    from planner.whatif.fewest_annotations import fewest, pins_file

    _whole(args, "--minimal-pins")
    _one_mesh(strategy, "--minimal-pins")
    repriced = priced(strategy, files.model_of(strategy, args.strategy, args.model))
    base = repriced.base
    nodes = fewest(base, Mesh(repriced.mesh.inner), {c: repriced.flow.split(c) for c in base.times})
    console.data(pins_file(strategy, nodes).rstrip())
    text = (
        f"{len(nodes)} of {len(base.times)} decisions written: with this plan's options,"
        f" propagation makes the others ({len(base.graph.nodes):,} nodes)"
    )
    console.say("\n".join(hang("", text, console.width())))
    source = quote(str(strategy.provenance.get("source", "MODEL")))
    by_hand = replace(strategy, provenance={**strategy.provenance, "mode": "propagate"})
    typed = f"next: plan {source} {' '.join(options_of(by_hand))} --pin FILE.toml"
    console.say("\n".join(hang("", typed, console.width())))
    return 0
