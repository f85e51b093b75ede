"""What the price of one node is made of: the kernels that its formulas ask a price of, with their
FLOPs, bytes and seconds, and the constants behind these with the place of each in its file.

Nothing is worked out a second time: the node is priced again by a pricer that writes down what it
is asked (`Noting`), so that the terms are those of the price.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path

import numpy as np

from costmodels.frameworks.kernels import KernelNeed, KernelPart, kernel_parts
from costmodels.hardware.device import DEVICES, AttentionPass, Device
from costmodels.kernels import slowdown
from costmodels.products import Product
from costmodels.runtimes import FOLDER
from planner.analysis.facts import GraphFacts
from planner.ops import operator_of
from planner.ops.cost import Kernel
from planner.pricing.frameworks.kernels import need_of
from planner.pricing.kernels import kernel_times, local_bytes
from planner.pricing.pricer import Pricer
from planner.sharding.rule import Split

PRODUCT_KEYS = ("units", "tiles", "efficiency", "start", "kernel", "sums", "splitting")


@dataclass(frozen=True)
class Term:
    """A kernel of one pass. often: how many of it run; dtype: what it computes in; attention:
    the pass of the device's fused attention, None for others; extents: rows, columns, sums and
    batch of a product that is priced by them, else none; convolution: whether it is one."""

    flops: float
    moved_bytes: float
    often: float
    dtype: str
    attention: AttentionPass | None
    seconds: float
    extents: tuple[float, ...] = ()
    convolution: bool = False


@dataclass(frozen=True)
class Constant:
    """A figure behind a price. value: as its file writes it; place: file and line; source: where
    the figure is from, or that it is guessed and why."""

    name: str
    value: str
    place: str
    source: str


@dataclass(frozen=True)
class Terms:
    """kernels: what was asked of the pricer in turn; forward_s, backward_s: of one pass, which are
    made of them (a backward pass that is a multiple of the forward pass asks for nothing). parts:
    the same of a node as a framework runs it, which asks the pricer for none."""

    kernels: tuple[Term, ...]
    forward_s: float
    backward_s: float
    constants: tuple[Constant, ...]
    parts: tuple[KernelPart, ...] = ()


@dataclass
class Noting(Pricer):
    """A pricer that writes down the kernels that it prices."""

    noted: list[Term] = field(default_factory=list)

    def kernel_s(self, flops: float, size_bytes: float, dtype: str) -> float:
        """Seconds as a Pricer has them, noted."""
        seconds = super().kernel_s(flops, size_bytes, dtype)
        self.noted.append(Term(flops, size_bytes, 1.0, dtype, None, seconds))
        return seconds

    def carried_s(self, size_bytes: np.ndarray, dtype: str) -> np.ndarray:
        """Seconds as a Pricer has them, noted."""
        each_s = super().carried_s(size_bytes, dtype)
        for size, seconds in zip(size_bytes.tolist(), each_s.tolist(), strict=True):
            self.noted.append(Term(0.0, size, 1.0, dtype, None, seconds))
        return each_s

    def kernels_s(
        self, flops: np.ndarray, size_bytes: np.ndarray, dtype: str, product: Product | None = None
    ) -> np.ndarray:
        """As Pricer's, products by their extents noted (others are by `kernel_s`)."""
        each_s = super().kernels_s(flops, size_bytes, dtype, product)
        if product is not None and self.device.tiles is not None:
            extents = (product.rows, product.columns, product.sums, product.batch)
            rows = np.stack([flops, size_bytes, each_s, *extents]).T.tolist()
            for work, size, seconds, *sizes in rows:
                term = Term(
                    work, size, 1.0, dtype, None, seconds, tuple(sizes), product.convolution
                )
                self.noted.append(term)
        return each_s

    def pass_s(self, kernels: Sequence[Kernel], dtype: str) -> float:
        """As Pricer's, each kernel noted."""
        for k in kernels:
            one = super().pass_s([replace(k, often=1)], dtype)
            self.noted.append(Term(k.flops, k.moved_bytes, k.often, dtype, k.attention, one))
        return super().pass_s(kernels, dtype)


def terms_of(
    base: GraphFacts, i: int, split: Split, pricer: Pricer, axes: Iterable[str] = ()
) -> Terms:
    """The terms of node i under a split. axes: those that its collectives run over."""
    noting = Noting(pricer.topology, pricer.mesh, pricer.runtime, pricer.recipe)
    forward, backward = kernel_times(base, i, split, noting)
    kernels, set_of = tuple(noting.noted), pricer.runtime.kernels
    if not base.training:
        kernels = _of_forward(kernels, forward)
    figures = constants(pricer, kernels, axes)
    if set_of is None or operator_of(base.graph.nodes[i].op).free:
        return Terms(kernels, forward, backward, figures)
    need = need_of(base, i, split, *local_bytes(base, i, split, pricer), pricer)
    parts = kernel_parts(need, pricer.topology.device, set_of, pricer.rates)
    return Terms(kernels, forward, backward, (*of_parts(pricer, need), *figures), parts)


def _of_forward(kernels: tuple[Term, ...], forward_s: float) -> tuple[Term, ...]:
    """The kernels of a forward pass, which is asked for before the backward pass of formulas that
    have both at once (attention)."""
    total = 0.0
    for count, kernel in enumerate(kernels, 1):
        total += kernel.often * kernel.seconds
        if isclose(total, forward_s):
            return kernels[:count]
    return kernels


def of_parts(pricer: Pricer, need: KernelNeed) -> tuple[Constant, ...]:
    """The figures behind the seconds of a framework's kernels, those of links aside."""
    chip = pricer.topology.device
    path = Path(chip.file) if chip.file else DEVICES / f"{chip.name}.toml"
    keys = ["memory.bandwidth", "memory.efficiency"]
    if need.flops:
        keys = [f"peak.{need.dtype}", "matmul.efficiency", *keys]
    figures = [_of_device(chip, path, key) for key in keys]
    runtime = pricer.runtime
    profile, sets = FOLDER / f"{runtime.name}.toml", FOLDER / "kernel_sets.toml"
    section = f"per_device.{chip.name}" if chip.name in runtime.per_device else "rates"
    for key in ("matmul", "memory") if runtime.name not in chip.rates else ():
        figures.append(_constant(profile, section, key, runtime.sources, runtime.guessed))
    if need.rows:
        fitted = {"expert_waits_s": "fitted to runs of mixtures (docs/published-runs.md)"}
        figures.append(_constant(sets, "fsdp", "expert_waits_s", fitted, {}))
    return tuple(c for c in figures if c.value)


def constants(
    pricer: Pricer, kernels: Sequence[Term], axes: Iterable[str] = ()
) -> tuple[Constant, ...]:
    """The figures that the seconds of these kernels, and of collectives over these axes, come
    from."""
    chip, figures = pricer.topology.device, list[Constant]()
    path = Path(chip.file) if chip.file else DEVICES / f"{chip.name}.toml"
    for dtype in dict.fromkeys(k.dtype for k in kernels if k.flops):
        figures.append(_of_device(chip, path, f"peak.{dtype}"))
    if any(k.extents for k in kernels):
        figures += [_of_device(chip, path, f"products.{key}") for key in PRODUCT_KEYS]
    if any(k.convolution for k in kernels):
        figures.append(_of_device(chip, path, "products.convolutions"))
    if any(k.flops and not k.attention for k in kernels):
        figures.append(_of_device(chip, path, "matmul.efficiency"))
    for which, backward in (("forward", False), ("backward", True)):
        if any(k.attention and k.attention.backward is backward for k in kernels):
            figures.append(_of_device(chip, path, f"attention.{which}"))
    if any(k.attention for k in kernels):
        figures.append(_of_device(chip, path, "attention.passes"))
    if kernels:
        for key in ("memory.bandwidth", "memory.efficiency", "kernel.launch"):
            figures.append(_of_device(chip, path, key))
    over = set(axes)
    levels = {k for a in pricer.mesh.axes if a.name in over for k, _ in a.parts}
    outermost = len(pricer.topology.levels) - 1
    links = {"outer" if k == outermost and outermost else "inner" for k in levels}
    figures += [
        _of_device(chip, path, f"{link}.{key}")
        for link in sorted(links)
        for key in ("bandwidth", "efficiency", "latency")
    ]
    return tuple(c for c in figures if c.value) + _of_runtime(pricer, bool(kernels or levels))


def _of_runtime(pricer: Pricer, any_kernel: bool) -> tuple[Constant, ...]:
    """The figures of the runtime profile that change rates of the device's file."""
    runtime, rates, chip = pricer.runtime, pricer.rates, pricer.topology.device
    path, figures = FOLDER / f"{runtime.name}.toml", list[Constant]()
    if any_kernel and slowdown(chip, rates, pricer.topology.devices) != 1.0:
        where = chip.name if chip.name in runtime.per_device else chip.kind
        figures.append(
            _constant(path, f"per_device.{where}", "stragglers", runtime.sources, runtime.guessed)
        )
    if any_kernel and chip.anchor:
        step = f"a measured step of {chip.anchor} (--calibrate-with)"
        figures.append(Constant("rates", f"x {rates.matmul:.3g}", "the plan's file", step))
    return tuple(figures)


def _of_device(chip: Device, path: Path, key: str) -> Constant:
    table, name = key.split(".")
    return _constant(path, table, name, chip.sources, chip.guessed)


def _constant(
    path: Path, table: str, name: str, sources: Mapping[str, str], guessed: Mapping[str, str]
) -> Constant:
    """A figure by the line of its file."""
    key = f"{table}.{name}"
    value, line = _found(path, table, name)
    known = {**sources, **{k: f"guessed: {v}" for k, v in guessed.items()}}
    source = known.get(key) or known.get(table.partition(".")[0]) or known.get(name) or ""
    return Constant(key, value, f"{path.name}:{line}" if line else path.name, source)


def _found(path: Path, table: str, name: str) -> tuple[str, int]:
    """(value as written, line) of a key of a TOML file; ("", 0) where it has none."""
    inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.match(r"\[(.+)\]", line.strip()):
            inside = match[1] == table
        elif inside and (match := re.match(rf"{re.escape(name)}\s*=\s*(.+)", line)):
            return match[1].strip().strip('"'), number
    return "", 0
