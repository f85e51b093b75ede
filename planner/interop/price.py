"""Settings of launchers, priced: what a plan loses when it is handed over, and what a configuration
costs as it is.

Both go the way of any pinned plan (planner.pins.pins, planner.search.search): the degrees are pins
of the mesh, techniques are pinned, "tensor" cuts columns and rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import TYPE_CHECKING, Any

from costmodels.hardware.units import show_bytes
from costmodels.optimizers import DEFAULT_OPTIMIZER
from costmodels.precision import load_recipe
from costmodels.runtimes import as_framework
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.pipeline import largest_repeated_block
from planner.execution.techniques import BESIDE, BLOCK_KEEP, WAITING
from planner.interop.foreign import project_of
from planner.interop.keys import Keys, read_keys
from planner.interop.launchers import hf, levanter, maxtext, megatron, torchtitan
from planner.interop.model_sizes import Claim, claims_of, layers_of, mixes
from planner.interop.settings import Facts, Settings, settings_of
from planner.interop.tables import EXPECTED
from planner.machine.topology import Topology
from planner.pins.launcher_space import SPACES, choose_launcher
from planner.pricing.frameworks.selective import modules
from planner.pricing.frameworks.stages import work_outside
from planner.report.commands import options_of
from planner.search.request import Progress, Request
from planner.search.search import Search
from planner.strategy.strategy import Strategy
from planner.whatif.no_plan import no_plan

if TYPE_CHECKING:
    from planner.workload.model import Model

LAUNCHERS: dict[str, ModuleType] = {
    m.NAME: m for m in (maxtext, hf, levanter, megatron, torchtitan)
}
"""Name -> the module that writes and reads its settings. MARKS of a module: keys by which a
configuration of it is known."""
YAML = (".yaml", ".yml")
"""How files of YAML end."""
DEAR = 0.05
"""Share of a step beyond which what rounding costs is refused."""


@dataclass(frozen=True)
class Row:
    """One line of what handing over costs: the reason of a rounding, and the price after it. cost:
    as a strategy file's, None where it has no price, and why."""

    reason: str
    cost: Mapping[str, Any] | None
    why: str = ""


@dataclass(frozen=True)
class Handover:
    """text: the settings; rows: the plan, the same under the splits that degrees mean, then
    rounding by rounding; inexpressible: what the launcher has no setting for and no price has;
    to_set: what is priced and no part of what is written; behind: what goes behind the file where
    it is read again."""

    text: str
    rows: tuple[Row, ...]
    inexpressible: tuple[str, ...]
    to_set: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


def facts_of(model: str, topology: Topology, base: GraphFacts) -> Facts:
    """What launchers need to know of a model on a machine."""
    run = largest_repeated_block(base.graph, base.runs)
    blocks = run[2] if run else 0
    outside, layers_per_block = (0.0, 0.0), 1
    if run is not None:
        first, period, _ = run
        outside = work_outside(base, range(first, first + period * blocks), blocks)
        block = base.graph.nodes[first : first + period]
        layers_per_block = max(1, sum(mixes(n.op) for n in block))
    beside = max(0, layers_of(base.graph) - blocks * layers_per_block)
    return Facts(model, topology, blocks, beside, outside, modules(base.graph), layers_per_block)


def refuse_dear(handover: Handover, to: str, strategy: Strategy, source: str) -> None:
    """Raises PlanError P194 where what a launcher can say of a plan takes over a twentieth longer,
    or does not fit where the plan does, or has no price."""
    planned, last = handover.rows[0].cost, handover.rows[-1].cost
    assert planned is not None
    if last is None:
        why = f"what {to} can say of this plan has no price: {handover.rows[-1].why}"
    elif planned["fit"] != "no" and last["fit"] == "no":
        why = (
            f"what {to} can say of this plan does not fit:"
            f" {show_bytes(last['memory_per_device_bytes'])} a device,"
            f" {show_bytes(last['memory_limit_bytes'])} usable"
        )
    elif (slower := last["step_time_s"] / planned["step_time_s"] - 1) > DEAR:
        why = f"what {to} can say of this plan takes {100 * slower:.1f} % longer"
    else:
        return
    again = " ".join(["plan", quote(source), *options_of(strategy), "--for", to])
    raise PlanError(
        "P194",
        why,
        detail=[row.reason for row in handover.rows[2:]],
        help=[
            f"{again} finds the best plan that {to} can say"
            if to in SPACES
            else f"plan again with pins that {to} can say: what was rounded is above"
        ],
    )


def hand_over(strategy: Strategy, source: str | Path, to: str, suffix: str = "") -> Handover:
    """A plan as another launcher's settings. suffix: how the file ends, where a launcher has files
    of several forms. Raises PlanError: P192 where it cannot be expressed at all, P051 for another
    model, P003 where the launcher has no file that ends so."""
    from planner.whatif.reprice import machine_now, own_model, reprice

    choose_launcher("to", to, tuple(LAUNCHERS))
    launcher = LAUNCHERS[to]
    write = form_of(launcher, suffix)
    if strategy.workload["kind"] != "train" and to != hf.NAME:
        raise PlanError(
            "P192",
            f"{to} trains; this is a plan of inference",
            help=["--to hf says how weights are cut"],
        )
    model = own_model(strategy, source)
    topology, _ = machine_now(strategy)
    planned = reprice(strategy, model, topology)
    rounds = settings_of(
        replace(strategy, graph=planned.base.graph), loops=to in SPACES and SPACES[to].loops
    )
    facts = facts_of(model.name, topology, planned.base)
    first = rounds.now
    inexpressible = launcher.round_off(rounds, facts)
    rows = [Row("as planned", planned.table)]
    last: Strategy | None = None
    for settings, reason in ((first, "with the splits that these degrees mean"), *rounds.steps):
        try:
            last = priced(model, replace(planned.request, baselines=False), settings)
            rows.append(Row(reason, last.costs))
        except PlanError as e:
            last = None
            rows.append(Row(reason, None, e.what))
    settings = rounds.now
    if to == hf.NAME and last is not None and settings.tensor > 1:
        settings = styled(model, planned.request, settings, last)
        named = priced(model, replace(planned.request, baselines=False), settings).costs
        if any(named[key] != last.costs[key] for key in ("step_time_s", "memory_per_device_bytes")):
            rows.append(Row("weights that no style of a module cuts are whole", named))
    return Handover(
        write(settings, facts),
        tuple(rows),
        tuple(inexpressible),
        _to_set(strategy, to),
        tuple(behind(launcher, settings, suffix)),
    )


def _to_set(strategy: Strategy, to: str) -> tuple[str, ...]:
    """What a plan is priced with that is no part of a layout, where it is not what launchers do
    unasked."""
    training = strategy.workload.get("training") or {}
    optimizer = str(training.get("optimizer", DEFAULT_OPTIMIZER))
    if optimizer == DEFAULT_OPTIMIZER:
        return ()
    return (f"the optimizer: the plan is priced with {optimizer}, {to} takes its own unless told",)


def styled(model: Model, request: Request, settings: Settings, plan: Strategy) -> Settings:
    """Settings with the style of each module that "tensor" cuts in their plan (Hugging Face)."""
    base = Search(model, request).base(settings.microbatches)
    assert base is not None, "a plan was made of it"
    return replace(settings, styles=hf.styles_of(plan, base))


def forms_of(launcher: ModuleType) -> Mapping[str, Callable[[Settings, Facts], str]]:
    """Suffix of a file -> what writes it, beside the form that `write` has."""
    return getattr(launcher, "FORMS", {})


def behind(launcher: ModuleType, settings: Settings, suffix: str) -> list[str]:
    """What goes behind a file that ends so, of which the file itself does not speak."""
    write = getattr(launcher, "BEHIND", {}).get(suffix)
    return [] if write is None else list(write(settings))


def form_of(launcher: ModuleType, suffix: str) -> Callable[[Settings, Facts], str]:
    """What writes a launcher's file that ends so ("": its default). Raises PlanError P003 where it
    has none: such a file would be read as something else than it is."""
    default = YAML if launcher.SUFFIX in YAML else (launcher.SUFFIX,)
    forms = {"": launcher.write, **dict.fromkeys(default, launcher.write), **forms_of(launcher)}
    if suffix in forms:
        return forms[suffix]
    raise PlanError(
        "P003",
        f"{launcher.NAME} has no settings in a file that ends in {suffix!r}",
        help=[f"-o FILE with one of {', '.join(filter(None, forms))} (docs/exchange.md)"],
    )


def priced(
    model: Model,
    request: Request,
    settings: Settings,
    provenance: Mapping[str, Any] | None = None,
    assumed: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Strategy:
    """The best plan under the pins of some settings; where none fits the smallest, whose `fit` is
    "no". Raises PlanError where there is none at all."""
    from planner.search.to_strategy import compose

    if request.runtime.kernels is not None or model.workload.kind != "train":
        settings = replace(settings, blocks="")
    request = replace(request, pins=settings.pins(), offload=settings.offload, mode="semi-auto")
    if settings.styles:
        base = Search(model, request).base(settings.microbatches)
        assert base is not None, "a pinned number of microbatches is read or an error"
        request = replace(
            request, pins=replace(request.pins, nodes=hf.node_pins(settings.styles, base))
        )
    search = Search(model, request, progress)
    result = search.run()
    if result.best is None:
        if result.smallest is None or result.stopped:
            raise no_plan(request, result)
        base = search.base(result.smallest.plan.microbatches)
        assert base is not None
        result = replace(result, best=result.smallest, base=base)
    return compose(model, request, result, provenance or {}, assumed)


@dataclass(frozen=True)
class Configuration:
    """A configuration as it was read. unread: keys that mean nothing to the planner or that it does
    not know; claims: what it says of the model (planner.interop.model_sizes.hold); keys: as the
    file has them."""

    launcher: str
    settings: Settings
    notes: tuple[str, ...]
    unread: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    keys: Keys = field(default_factory=lambda: Keys({}), compare=False)


def precision_under(runtime: str, recipe: str) -> str:
    """The recipe that a configuration's is priced in: of emitted programs the one that they are
    written in, where those of the launcher differ."""
    if not recipe or as_framework(runtime):
        return recipe
    return load_recipe(recipe).program or recipe


def as_priced(configuration: Configuration, request: Request) -> Configuration:
    """A configuration as a request's runtime prices it: selective recompute is a framework's (what
    emitted programs call so saves less), and so are gradients of bf16 in float32; experts' rows are
    sent beside other kernels by some frameworks alone."""
    settings, notes = configuration.settings, list[str]()
    if settings.exchanges == BESIDE and not request.runtime.exchange_slows:
        notes.append("kernels are priced as waiting for experts' rows")
        settings = replace(settings, exchanges=WAITING)
    if request.runtime.kernels is None:
        precision = precision_under(request.runtime.name, settings.precision)
        if precision != settings.precision:
            notes.append(
                "gradients in float32 are priced in bfloat16, as emitted programs have them"
            )
            settings = replace(settings, precision=precision)
        if settings.recompute == BLOCK_KEEP:
            notes.append("selective recompute is priced as none")
            settings = replace(settings, recompute="none")
    if not notes:
        return configuration
    notes[-1] += f": --runtime {SPACES[configuration.launcher].runtime} has its price"
    return replace(configuration, settings=settings, notes=(*configuration.notes, *notes))


def read_configuration(
    path: str | Path,
    devices: int,
    kind: str = "",
    domain: int = 0,
    overrides: Sequence[str] = (),
    layers: Callable[[], int] = lambda: 0,
) -> Configuration:
    """Read a launcher's file. path: FILE, or FILE.py:FUNCTION; kind: of LAUNCHERS, "" to tell by
    its keys; domain: devices on fast links, 0 for all; overrides: `key=value` each; layers: of the
    model, asked where a file counts layers and not stages. Raises PlanError P190, P191."""
    keys, notes = read_keys(path, overrides, lambda table: _is_known(Keys(table)))
    keys.layers = layers
    others = [k for k in _hits(keys) if k != kind] if kind else []
    if others and kind not in _hits(
        keys
    ):  # else its defaults would be priced, as if the file said them
        raise PlanError(
            "P190",
            f"{path} has keys of {' and '.join(others)}, none of {kind}",
            help=[f"--from {others[0]}"],
        )
    kind = kind or _kind(keys, path, notes)
    keys.first = getattr(LAUNCHERS[kind], "FIRST", ())
    read: Callable[[Keys, int, int], tuple[Settings, list[str]]] = LAUNCHERS[kind].read
    settings, more_notes = read(keys, devices, domain or devices)
    started = keys.whole(devices, "num_processes")
    if started != devices:
        more_notes.append(f"it starts {started} processes, and is priced on {devices} devices")
    launcher = LAUNCHERS[kind]
    say = getattr(launcher, "claims", lambda keys: claims_of(keys, {}))
    claims = say(keys)  # counts as reading them
    unread = keys.unread()
    if not keys.any_read:  # else its defaults would be priced, as if the file said them
        has = ", ".join(map(repr, unread[:5])) or "nothing"
        raise PlanError(
            "P190",
            f"no key of {path} is read of {kind}: it has {has}",
            help=[*notes[:2], f"--from {'|'.join(LAUNCHERS)}"],
        )
    more_notes += keys.passed_over.values()
    return Configuration(kind, settings, (*notes, *more_notes), unread, claims, keys)


def _kind(keys: Keys, path: str | Path, notes: Sequence[str]) -> str:
    hits, named = _hits(keys), f"--from {'|'.join(LAUNCHERS)}"
    if not hits:
        has = ", ".join(map(repr, keys.unread()[:5])) or "nothing"
        raise PlanError(
            "P190",
            f"{path} has no key of {', '.join(LAUNCHERS)}: it has {has}",
            help=[
                *notes[:2],
                f"the file that sets mesh, batch or recompute: {EXPECTED}",
                f"{named} reads it as that launcher's",
            ],
        )
    if len(hits) > 1:
        raise PlanError(
            "P190", f"{path} has keys of {' and '.join(hits)}", help=[*notes[:2], named]
        )
    return hits[0]


def _is_known(keys: Keys) -> bool:
    """Whether keys are of a launcher, or of a project that is told by name."""
    return bool(_hits(keys)) or project_of(keys.names()) is not None


def _hits(keys: Keys) -> list[str]:
    """Launchers that a key is known of; one alone that has keys nobody else has."""
    marked = [
        name
        for name, launcher in LAUNCHERS.items()
        if any(k in keys for k in getattr(launcher, "OWN", ()))
    ]
    return marked or [
        name
        for name, launcher in LAUNCHERS.items()
        if any(re.fullmatch(launcher.MARKS, key) for key in keys.names())
    ]
