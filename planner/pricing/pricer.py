"""Prices on one mesh: what a collective over some axes, a product or a pass over memory costs, in
seconds.

A thin reading of `costmodels` for the planner: it knows the mesh's axes, the machine under them,
the runtime profile and the precision recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any
from weakref import proxy

import numpy as np

from costmodels import collectives, host_link, overlap
from costmodels import kernels as compute
from costmodels.capacity import tiled_image, tiled_rows
from costmodels.frameworks.kernels import EIGHT_BIT
from costmodels.hardware.device import Device
from costmodels.kernels import Amount
from costmodels.optimizers import OPTIMIZERS
from costmodels.precision import Recipe
from costmodels.products import Product, least_time_s, product_time_s
from costmodels.runtimes import Hidden, Rates, Runtime
from planner.analysis.facts import GraphFacts
from planner.execution.collective import CollectiveUse
from planner.graph.ir import DTYPE_BYTES, FLOATS
from planner.machine.topology import Mesh, Topology
from planner.ops.cost import Kernel
from planner.pricing.reshard import ReshardPrices
from planner.pricing.table_key import TableStore
from planner.sharding.layout import Axes
from planner.sharding.layout_table import LayoutTable

NOTHING = Hidden()


@dataclass
class Pricer:
    """Memoised prices. mesh order is outermost first."""

    topology: Topology
    mesh: Mesh
    runtime: Runtime
    recipe: Recipe
    layout_table: LayoutTable = field(default_factory=LayoutTable)
    """Derivations that do not depend on the sizes of axes: one table serves the pricers of many
    meshes."""
    offload: tuple[str, ...] = ()
    """What the plans of a space keep in the host's memory (planner.execution.plan.Plan.offload)."""
    written_out_up_to: int = 0
    """Operators of models whose blocks a space's plans may have written out
    (planner.pricing.written_out)."""
    memo: dict[tuple, Any] = field(default_factory=dict)
    """Prices of weights and local sizes on this mesh, kept by planner.space.build."""
    kept: TableStore | None = field(default=None, compare=False, repr=False)
    """Where tables of reshards on this machine are looked for and kept
    (planner.cache.reshard_tables); it changes none."""
    _affine: dict[tuple[str, Axes, bool], tuple[tuple[float, float], ...]] = field(
        default_factory=dict
    )
    _sizes: dict[str, int] = field(default_factory=dict)
    _products: dict[tuple[str, bool], dict[tuple[float, ...], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A framework has other kernels on other devices."""
        self.runtime = self.runtime.on(self.topology.device.name, self.recipe.compute in EIGHT_BIT)

    def writes_out(self, base: GraphFacts) -> bool:
        """Whether plans of a graph may have their blocks written out. Weights of phases that serve
        are arrays of their own in any case."""
        few = len(base.graph.nodes) <= self.written_out_up_to
        return bool(base.loops) and few and not base.graph.unstacked

    @property
    def sizes(self) -> Mapping[str, int]:
        """axis -> size, of axes that operators may be cut over."""
        if not self._sizes:
            self._sizes.update((a.name, a.size) for a in self.mesh.inner)
        return self._sizes

    # Many parameters: one collective, and each way in which compilers send it with others.
    def collective_s(
        self,
        kind: str,
        axes: Axes,
        payload_bytes: float,
        *,
        bucketed: bool = False,
        bucket_bytes: float = 0.0,
        stacked: int = 1,
        strided: bool = False,
        joined: float = 1.0,
    ) -> float:
        """Seconds of one collective over the axes; 0 when it moves nothing. bucketed: it travels
        with others of its kind, up to bucket_bytes (0: the runtime's), and pays its share of a
        latency. stacked: so many like it are one array; where the runtime sends that whole, a
        launch is no smaller. strided: as in `lines`. joined: its part of what is sent together,
        where compilers do so up to the size of their buckets (CollectiveUse.joined).
        """
        if not kind or not axes or not payload_bytes:
            return 0.0
        together = (
            kind == "all-reduce" or not self.topology.virtual
        )  # XLA's CPU back end sends all-reduces together, nothing else
        bucket = (bucket_bytes or self.runtime.bucket_bytes) if together else payload_bytes
        stacked = stacked if self.runtime.stacked else 1
        share = overlap.latency_share(payload_bytes, bucket, stacked) if bucketed else 1.0
        if joined < 1 and not bucketed and self.joins:
            share = min(1.0, max(joined, payload_bytes / self.runtime.bucket_bytes))
        return min(
            latency * share + payload_bytes * slope
            for latency, slope in self.lines(kind, axes, strided)
        )

    def collectives_s(
        self,
        kind: str,
        axes_sets: Sequence[Axes],
        of: np.ndarray,
        payload_bytes: np.ndarray,
        bucketed: bool,
        stacked: np.ndarray,
        joined: np.ndarray,
    ) -> np.ndarray:
        """`collective_s` of many: over the axes ways[of]. [collectives]"""
        lines = [self.lines(kind, axes) if axes else ((0.0, 0.0),) for axes in axes_sets]
        wide = max(map(len, lines))
        table = np.array([[*row, *[row[-1]] * (wide - len(row))] for row in lines])[of]
        share = np.ones(len(of))
        if bucketed:
            together = kind == "all-reduce" or not self.topology.virtual
            share = np.minimum(
                1.0 / stacked if self.runtime.stacked else 1.0,
                payload_bytes / self.runtime.bucket_bytes if together else 1.0,
            )
        elif self.joins:
            sized = np.maximum(joined, payload_bytes / self.runtime.bucket_bytes)
            share = np.where(joined < 1, np.minimum(1.0, sized), 1.0)
        elif self.runtime.kernels is not None:  # a block's as one: no weight has the latency alone
            share = np.zeros(len(of))
        seconds = (table[:, :, 0] * share[:, None] + payload_bytes[:, None] * table[:, :, 1]).min(
            axis=1
        )
        return np.where(payload_bytes, seconds, 0.0)

    def use_s(self, use: CollectiveUse, bucket_bytes: float = 0.0) -> float:
        """Seconds a collective of a program takes in one optimizer step. bucket_bytes: as in
        `collective_s`."""
        seconds = self.collective_s(
            use.kind,
            use.axes,
            use.payload_bytes,
            bucketed=use.bucketed,
            bucket_bytes=bucket_bytes,
            stacked=use.stacked,
            strided=use.strided,
            joined=use.joined,
        )
        return use.count * seconds

    @property
    def joins(self) -> bool:
        """Whether the compiler sends what a block gathers together: XLA's on GPUs."""
        return self.runtime.kernels is None and self.device.kind == "gpu"

    def lines(
        self, kind: str, axes: Axes, strided: bool = False
    ) -> tuple[tuple[float, float], ...]:
        """(latency_s, s_per_byte) lines whose minimum is the time of a collective over the axes.
        strided: its pieces lie along an inner dim of a tensor between operators. XLA's CPU back end
        copies the payload such that this dim is the first, and back: virtual devices pay for that.
        """
        key = (kind, axes, strided)
        lines = self._affine.get(key)
        if lines is None:
            group = self._group(axes)
            lines = (
                collectives.ring_lines if self.runtime.flat_rings else collectives.collective_lines
            )(kind, group)
            if strided and kind in collectives.PIECEWISE and self.topology.virtual:
                lines = tuple(
                    (latency, slope + compute.order_s_per_byte(self.device))
                    for latency, slope in lines
                )
            self._affine[key] = lines
        return lines

    @cached_property
    def place(self) -> bytes:
        """The axes of the mesh, written out: all that prices of moves follow from beside the
        machine (planner.search.machine_key.machine_key), the tensor and its layouts."""
        return repr(self.mesh.axes).encode()

    @property
    def sums_shown(self) -> float:
        """Share of what a backward pass sums over devices for tensor parallelism that no framework
        hides under other products (costmodels.frameworks.step_time)."""
        return 1 - self.runtime.tensor_overlap

    @property
    def copies_hidden(self) -> float:
        """What part of the communication that can hide under other copies of the batch does. CPUs
        run one thing after the other."""
        return self.runtime.copies_hidden if self.topology.device.kind != "cpu" else 0.0

    @property
    def hidden(self) -> Hidden:
        """What compiled schedules put beside kernels. Nothing was found in those of TPUs, and CPUs
        run one thing after the other."""
        return self.runtime.hidden if self.topology.device.kind == "gpu" else NOTHING

    def gathered_beside_updates_s(
        self, sent_s: Amount, elements: Amount, offload: tuple[str, ...]
    ) -> Amount:
        """Of the seconds of gathering so many new parameters of a device's own, those that have the
        optimizer's pass over others beside them; none where that waits for the host's link."""
        updated = 0.0 if "optimizer" in offload else self.hidden.updated
        hidden: Amount = np.minimum(sent_s, updated * self.optimizer_s(elements, ()))
        return hidden

    @cached_property
    def rates(self) -> Rates:
        """What the runtime reaches of this device: what was fitted to runs on it goes before what
        ships for it, and that before what ships for its kind; of a device whose figures were
        measured, all of them."""
        device, ships = self.topology.device, self.runtime.per_device
        if self.runtime.name in device.rates:
            return Rates(**device.rates[self.runtime.name])
        if device.measured:
            return self.runtime.rates
        return ships.get(device.name, ships.get(device.kind, self.runtime.rates))

    @cached_property
    def device(self) -> Device:
        """The device as the runtime's programs reach it. Profiles of frameworks apply their rates
        to kernels of their own (costmodels.frameworks)."""
        return self.sustained(self.topology.device)

    def sustained(self, device: Device) -> Device:
        """Another device in this one's place, as the runtime's programs reach it."""
        if self.runtime.kernels is not None:
            return device
        return compute.sustained(device, self.rates, self.topology.devices)

    def _group(self, axes: Axes) -> tuple[collectives.Span, ...]:
        """The links among devices that the axes join. Those within a node have the latency that the
        runtime finds there."""
        group, slower = self._links.group(self.mesh, axes), self.rates.inner_latency
        outer = len(self.topology.levels) - 1
        if slower == 1.0 or any(
            size > 1 and level == outer > 0
            for axis in self.mesh.axes
            if axis.name in axes
            for level, size in axis.parts
        ):
            return group
        return tuple(replace(span, latency_s=span.latency_s * slower) for span in group)

    @cached_property
    def _links(self) -> Topology:
        """The machine with what the runtime reaches of its links."""
        rates, top = self.rates, self.topology
        slower = compute.slowdown(top.device, rates, top.devices)
        if rates.inner == rates.outer == rates.latency == slower == 1.0:
            return self.topology
        levels = self.topology.levels
        inside = max(1, len(levels) - 1)
        inner = [
            replace(x, efficiency=x.efficiency * rates.inner / slower) for x in levels[:inside]
        ]
        outer = [
            replace(
                x,
                efficiency=x.efficiency * rates.outer / slower,
                latency_s=x.latency_s * rates.latency,
            )
            for x in levels[inside:]
        ]
        return replace(self.topology, levels=(*inner, *outer))

    @cached_property
    def reshard_prices(self) -> ReshardPrices:
        """Prices of reshards on this mesh."""
        # A weak reference makes no cycle: a search's objects go with it.
        return ReshardPrices(self.layout_table, proxy(self))

    def kernel_s(self, flops: float, size_bytes: float, dtype: str) -> float:
        """Seconds of one kernel: the slower of arithmetic and memory, and the launch floor."""
        return compute.roofline_time_s(self.device, flops, size_bytes, dtype)

    def carried_s(self, size_bytes: np.ndarray, dtype: str) -> np.ndarray:
        """Seconds of what another kernel does on its way: bytes that it moves more, no launch.
        dtype: what it computes in. [splits]"""
        return compute.memory_time_s(self.device, size_bytes)

    def kernels_s(
        self, flops: np.ndarray, size_bytes: np.ndarray, dtype: str, product: Product | None = None
    ) -> np.ndarray:
        """Seconds of one kernel under each split, alike ones priced once. product: what it
        multiplies, where that is one product, which has a price by its extents on devices whose
        file has tiles. [splits]"""
        if product is not None and self.device.tiles is not None:
            extents = (product.rows, product.columns, product.sums, product.batch)
            rows = np.stack([*extents, size_bytes]).T.tolist()
            return self._products_s(rows, dtype, product.convolution)
        work = list(zip(flops.tolist(), size_bytes.tolist(), strict=True))
        alike = {case: self.kernel_s(*case, dtype) for case in dict.fromkeys(work)}
        return np.array([alike[case] for case in work])

    def _products_s(
        self, listed: Iterable[Sequence[float]], dtype: str, convolution: bool
    ) -> np.ndarray:
        """Seconds of products by their rows, columns, sums, batch and bytes. [products]"""
        work = [tuple(extents) for extents in listed]
        known = self._products.setdefault((dtype, convolution), {})
        if new := [extents for extents in dict.fromkeys(work) if extents not in known]:
            *extents, size_bytes = np.array(new).T
            product = Product(*extents, convolution=convolution)
            seconds = product_time_s(self.device, product, size_bytes, dtype)
            known.update(zip(new, seconds.tolist(), strict=True))
        return np.array([known[extents] for extents in work])

    def least_s(self, flops: float, dtype: str) -> float:
        """Seconds that products of so many FLOPs take at least, however they are cut."""
        return least_time_s(self.device, flops, dtype)

    def pass_s(self, kernels: Sequence[Kernel], dtype: str) -> float:
        """Seconds of kernels that run one after the other."""
        device = self.device
        return sum(
            k.often
            * (
                compute.attention_time_s(device, k.flops, k.moved_bytes, dtype, k.attention)
                if k.attention
                else compute.roofline_time_s(device, k.flops, k.moved_bytes, dtype)
            )
            for k in kernels
        )

    def itemsize(self, dtype: str) -> float:
        """Bytes per element as computed with under the recipe: floats of the model take the
        recipe's type between products."""
        if dtype in ("float32", "float64"):
            return DTYPE_BYTES[self.recipe.between]
        if dtype == "int64":
            return 4
        return DTYPE_BYTES[dtype]

    def weight_itemsize(self, dtype: str) -> float:
        """Bytes per element of a weight as kernels read it: floats as the recipe keeps them, where
        those are fewer than it computes with."""
        size = self.itemsize(dtype)
        return min(size, self.recipe.parameter_bytes) if dtype in FLOATS else size

    def stored_bytes(self, shape: tuple[int, ...], dtype: str, kind: str) -> float:
        """Bytes that an array takes on the device. kind: as
        planner.analysis.facts.GraphFacts.kind_of has it; images and heads lie in whole tiles where
        the device has those."""
        tile = self.topology.device.tile
        stored = {"image": tiled_image, "heads": tiled_rows}.get(kind) if tile else None
        return (stored(shape, tile) if stored and tile else prod(shape)) * self.itemsize(dtype)

    def grad_accumulate_s(self, size_bytes: Amount) -> Amount:
        """Seconds to add a microbatch's gradients, so many bytes of a device, to the sums. Profiles
        of frameworks: nothing, their products add to the sums they write."""
        return (
            compute.sum_time_s(self.device, size_bytes)
            if self.runtime.kernels is None
            else 0 * size_bytes
        )

    def loop_copy_s(self, cut_bytes: Amount, put_bytes: Amount) -> Amount:
        """Seconds to copy so many bytes out of the stacks of loops over repeated blocks, and so
        many into them. Profiles of frameworks: nothing, they have neither loops nor stacks."""
        return (
            compute.loop_copy_time_s(self.device, cut_bytes, put_bytes)
            if self.runtime.kernels is None
            else 0 * cut_bytes
        )

    @property
    def fills_stacks(self) -> bool:
        """Whether kernels put their results into stacks of loops, and read operands there, by
        themselves: those of TPUs (planner.analysis.facts.GraphFacts.copied_apart)."""
        return self.device.kind == "tpu"

    def weight_copy_s(self, cut_bytes: Amount, cuts: Amount | int, put_bytes: Amount) -> Amount:
        """Seconds to copy one repeat's weight out of its stack, so many times, and its gradient
        into another. Profiles of frameworks: nothing, as above."""
        return (
            compute.weight_copy_time_s(self.device, cut_bytes, cuts, put_bytes)
            if self.runtime.kernels is None
            else 0 * cut_bytes
        )

    def host_s(self, size_bytes: Amount) -> Amount:
        """Seconds of the way between a device and its host's memory."""
        return host_link.host_link_s(self.topology.device, size_bytes)

    @cached_property
    def agreement_s(self) -> float:
        """Seconds in which all devices agree whether gradients are finite, where the loss is
        scaled: one number is summed."""
        if not self.recipe.loss_scaled:
            return 0.0
        return self.collective_s(
            "all-reduce", tuple(a.name for a in self.mesh.axes), host_link.FLOAT_BYTES
        )

    def update_launch_s(self, elements: Amount) -> Amount:
        """Seconds by which a kernel that updates so many local parameters takes longer than their
        share of one pass over all."""
        return np.maximum(0.0, self.device.launch_s - self.optimizer_s(elements, ()))

    def optimizer_s(
        self, elements: Amount, offload: tuple[str, ...], matrices: Any = 0.0
    ) -> Amount:
        """Seconds of the optimizer's pass over local parameters. State that waits in the host's
        memory is read from there and written back: two ways of the host's link, one after the
        other, however much of that a device does at once. matrices: of the parameters, those in
        matrices that are orthogonalised, which keep less (and take more:
        planner.pricing.orthogonalising)."""
        recipe, adamw = self.recipe, OPTIMIZERS["adamw"]
        matrix_less = recipe.matrix_less_bytes
        state_bytes = elements * recipe.state_bytes - matrices * matrix_less
        host_s = self.host_s(2 * state_bytes) if "optimizer" in offload else 0.0
        # The runtime's figure is that of AdamW in float32: what is not read and written is less.
        moments_less = adamw.moment_bytes - (recipe.state_bytes - recipe.master_bytes)
        # Those of frameworks hold gradients in float32 whatever they are sent in.
        framework = self.runtime.kernels is not None
        gradient = recipe.parameter_bytes if framework else recipe.gradient_bytes
        value = 2 * (recipe.master_bytes or recipe.parameter_bytes) + gradient
        value += recipe.parameter_bytes if recipe.master_bytes else 0
        moved = (
            self.runtime.optimizer_bytes - 2 * moments_less - (3 * host_link.FLOAT_BYTES - value)
        )
        if recipe.loss_scaled:  # gradients are read for their norm, parameters to be left alone
            moved += recipe.gradient_bytes + recipe.parameter_bytes
        passed = compute.optimizer_time_s(self.device, elements, moved)
        return passed - compute.optimizer_time_s(self.device, matrices, 2 * matrix_less) + host_s
