"""What the outer search may choose from under a request: meshes, the splits that mode and pins
leave, ZeRO stages, recomputation, schedules, microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import gcd, prod

from planner.analysis.axis_roles import role_named
from planner.analysis.facts import GraphFacts
from planner.errors import PlanError
from planner.execution.block_values import names_there
from planner.execution.save_policies import BLOCK, is_named, kept_among
from planner.execution.techniques import (
    BESIDE,
    BLOCK_KEEP,
    BY_NAME,
    INTERLEAVED,
    RECOMPUTE,
    SCHEDULES,
    TECHNIQUES,
    WEIGHTS,
    WRITTEN_OUT,
)
from planner.execution.uneven_pipeline import MOST_CHUNKS
from planner.execution.weight_offload import lookup_tables
from planner.machine.mesh_choices import (
    across,
    divisors,
    finer_meshes,
    for_long_sequences,
    grouped,
    mesh_on_levels,
    meshes,
    pinned_mesh,
    staged_meshes,
)
from planner.machine.topology import Mesh, MeshAxis
from planner.pricing.frameworks.selective import modules
from planner.search.launcher_domain import (
    replicas,
    sayable,
    with_groups,
    with_whole_heads,
    zero_stages,
)
from planner.search.microbatch_counts import with_whole_rows
from planner.search.request import Candidate, Request
from planner.search.stage_reasons import AskedStages, reason_against
from planner.sharding.candidates import candidates
from planner.sharding.layout import STAGE
from planner.sharding.rule import Limits
from planner.space.families import Allowed, as_named, batch_only, exchanging
from planner.space.propagation import MODES, by_hand, propagated
from planner.workload.host_tables import PLACES
from planner.workload.model import Model

FINER = 2
"""Three-axis meshes tried around the best plan: most of what more axes gain is in the most even
ones."""
MOST_MICROBATCHES = 1024
MICROBATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (2, 4)
"""Chunks that a pipeline stage may hold: each takes the bubble down, and what they hand on, hold
and begin with up."""
AWAY = (("activations",), ("optimizer",), ("optimizer", "activations"))
MORE_OFFLOAD = (
    ("optimizer",),
    ("optimizer", "activations"),
    ("optimizer", "activations", "parameters"),
    ("optimizer", "activations", "parameters", "embeddings"),
)
"""What waits in the host's memory where nothing fits without: state first, which is read once a
step; weights last, which every pass over a block reads, and tables."""
LITTLE_STATE = 0.01
"""Optimizer state, cut over all devices, of less than this share of a device's memory (adapters'
beside frozen weights) makes no room worth a search by going to the host's memory. A guess."""
BATCH = ("data", "fsdp")
"""Axes that are named for cutting the batch."""
Family = Callable[[GraphFacts, Mesh], Allowed]
"""The splits that a base's operators may have on a mesh."""


class SearchDomain:
    """The values of one request. base: rules and blocks at a number of microbatches
    (planner.search.workspace.Workspace.base); out_of_time: nothing more is offered."""

    def __init__(
        self,
        model: Model,
        request: Request,
        base: Callable[[int], GraphFacts | None],
        out_of_time: Callable[[], bool],
    ) -> None:
        self.model, self.request, self.base, self.out_of_time = model, request, base, out_of_time
        self.training = model.workload.kind == "train"
        self.free = request.mode == "auto" and request.pins.empty
        """Whether any plan will do, a baseline's too."""
        whole = any(t.of_axes and t.name in request.pins.techniques for t in TECHNIQUES)
        self.parts_axes = (
            request.mode in ("auto", "semi-auto")
            and request.pins.axes <= {STAGE}
            and not request.pins.levels
            and not whole
        )
        """Whether meshes are tried whose tensor axis is two: where the user names no axis but
        stages."""

    def meshes(self) -> tuple[Mesh, ...]:
        """Meshes of one and two axes, with and without stages, or those that pins and mode leave;
        of pins of a schedule those with stages. Raises PlanError P015, P022, P024."""
        request = self.request
        meshes, pinned = self._dividing(self._grouped()), request.staged_pin
        if request.partitioned:  # of a list of pinned stages
            meshes = tuple(m for m in meshes if m.stages == 1)
        if pinned and not any(m.stages > 1 for m in meshes):
            other = (
                f"a mesh of {', '.join(self.request.pins.mesh)}"
                if self.request.pins.mesh
                else "what else is asked for, which leaves no pipeline stages,"
            )
            raise PlanError(
                "P024",
                f"pins {pinned} and {other} contradict each other: it says how microbatches pass"
                " through stages",
                help=["remove one of them, or pp=2"],
            )
        meshes = tuple(m for m in meshes if m.stages > 1) if pinned else meshes
        base = self.base(1) if request.launcher is not None else None
        if base is None:
            return meshes
        meshes = with_groups(with_whole_heads(meshes, request, base), request)
        return sayable(meshes, self.model, request, base)

    def _dividing(self, meshes: tuple[Mesh, ...]) -> tuple[Mesh, ...]:
        """Of meshes that were asked for those whose axes of the batch cut it, in the pinned number
        of microbatches: the devices of another would all do the same. Raises PlanError P035."""
        pins, base, mode = self.request.pins, self.base(1), self.request.mode
        pins_batch_axes = mode == "data-parallel" or not pins.mesh.keys().isdisjoint(BATCH)
        by_hand = mode in MODES or any(
            a in BATCH
            for row in pins.nodes.values()
            for axes in row.get("split", {}).values()
            for a in axes
        )
        if not pins_batch_axes or by_hand or base is None or not any(base.batch_factors):
            return meshes
        micro = int(pins.techniques.get("microbatches", 1))
        if self.model.batch % micro:
            return meshes  # refused where microbatches are offered
        rows = self.model.batch // micro
        dividing = tuple(
            m
            for m in meshes
            if (n := prod(_over_batch(m).values())) == 1 or rows % n == 0 or _padded(rows, n)
        )
        if dividing or not meshes:
            return dividing
        axes = min(map(_over_batch, meshes), key=lambda sizes: prod(sizes.values()))
        n = prod(axes.values())
        below, above = rows // n * n * micro, -(-rows // n) * n * micro
        nearest_batches = " or ".join(str(b) for b in (below, above) if b)
        fewer = max(k for k in divisors(n) if rows % k == 0)
        what = f"batch {self.model.batch}" + (f" in {micro} microbatches" if micro > 1 else "")
        axes_text, only_axis = (
            " x ".join(f"{a}={k}" for a, k in axes.items()),
            (next(iter(axes)) if len(axes) == 1 else ""),
        )
        raise PlanError(
            "P035",
            f"{what} does not divide over {axes_text}: its devices would all compute the same rows",
            detail=[f"{rows} rows over {n} devices"],
            help=[
                f"--batch {nearest_batches}",
                *(
                    [f"{only_axis}={fewer}, and other axes for the rest of the devices"]
                    if only_axis in pins.mesh and fewer > 1
                    else []
                ),
                "without the pin or the mode: the search then cuts something else",
            ],
        )

    def _grouped(self) -> tuple[Mesh, ...]:
        """The meshes, with the group that shares optimizer state where one is pinned."""
        request = self.request
        if n := request.pins.techniques.get("zero_group"):
            every = tuple(
                m
                for mesh in self._ungrouped()
                if (m := grouped(request.topology, mesh, int(n))) is not None
            )
            if not every:
                raise PlanError(
                    "P022",
                    f"no mesh has groups of {n} neighbouring devices to share optimizer state"
                    " (zero_group)",
                    help=[
                        "a number that the axes inside a stage multiply to, or a divisor of the"
                        " data axis times those inside it"
                    ],
                )
            return every
        if "fsdp" in request.pins.mesh:  # beside it, data is the copies of what it cuts
            return tuple(
                (
                    Mesh(m.axes, tuple(a.name for a in m.inner if a.name != "data"))
                    if "data" in dict(m.shape)
                    else m
                )
                for m in self._ungrouped()
            )
        return self._ungrouped()

    def _ungrouped(self) -> tuple[Mesh, ...]:
        """Meshes whose optimizer state is cut over all axes."""
        request = self.request
        if request.pins.mesh:
            return self._pinned()
        every = meshes(request.topology)
        if request.mode == "data-parallel":
            return every[:1]
        # One axis of all devices is the same by either name.
        return (
            *(
                m
                for m in every
                if len(m.axes) == 2 or m.shape[0] == ("data", request.topology.devices)
            ),
            *self.staged(),
        )

    def _pinned(self) -> tuple[Mesh, ...]:
        """The meshes of the pins, on the levels that they name."""
        topology, pins = self.request.topology, self.request.pins
        self._refuse_experts()
        choices = pins.mesh_choices(topology.devices)
        if not pins.levels:
            return self._aligned(choices)
        meshes = tuple(
            m
            for sizes in choices
            if (m := mesh_on_levels(topology, sizes, pins.levels, tuple(pins.mesh))) is not None
        )
        if not meshes:
            wanted = ", ".join(f"{a} over {' + '.join(names)}" for a, names in pins.levels.items())
            raise PlanError(
                "P022",
                f"the pinned mesh does not lie so on the links: {wanted}",
                help=[
                    "levels here, innermost first:"
                    f" {', '.join(f'{x.name} of {x.size}' for x in topology.levels)}"
                ],
            )
        return meshes

    def _refuse_experts(self) -> None:
        """Raises PlanError P023 where experts are to be divided and the model has none."""
        base, degree = self.base(1), min(self.request.pins.mesh.get("expert", (1,)))
        roles = base.roles.values() if base is not None else ()
        if degree > 1 and not any("expert" in by_factor.values() for by_factor in roles):
            raise PlanError(
                "P023",
                f"ep={degree} divides experts, and the model has none",
                help=[f"tp={degree} or dp={degree} cuts what there is"],
            )

    def _aligned(self, choices: Sequence[dict[str, int]]) -> tuple[Mesh, ...]:
        """Those of several meshes that lie on the links. Raises PlanError P015 where none does."""
        meshes, refused = list[Mesh](), None
        for sizes in choices:
            try:
                meshes.append(pinned_mesh(self.request.topology, sizes))
            except PlanError as e:
                refused = refused or e
        if refused is not None and not meshes:
            raise refused
        return tuple(meshes)

    def finer(self, *best: Candidate | None, stages: Collection[int] = ()) -> tuple[Mesh, ...]:
        """The meshes of good plans with the tensor axis split in two, the most even ways first:
        heads over one part and rows over the other, say; and for some numbers of stages those whose
        wide tensor axis is parted where the links are (planner.machine.mesh_choices.across), though
        no plan with it in one piece need be good.
        """
        if not self.parts_axes or self.out_of_time():
            return ()
        topology, good = self.request.topology, [c for c in best if c is not None]
        finer = [m for c in good for m in finer_meshes(topology, c.mesh)[:FINER]]
        # Where optimizer state is worth cutting, once in every node: what it is reduced and
        # gathered over is near, what is left to sum over nodes is a piece.
        grouped_by_node = [
            grouped(topology, c.mesh, topology.levels[0].size)
            for c in good
            if c.plan.zero_stage and len(c.mesh.inner) <= 2
        ]
        split_across = [m for n in stages for m in across(topology, n)]
        return tuple(
            dict.fromkeys(
                [
                    *finer,
                    *split_across,
                    *(m for m in grouped_by_node if m is not None and len(m.group) < len(m.inner)),
                ]
            )
        )

    def by_name(self, meshes: Collection[Mesh]) -> tuple[Mesh, ...]:
        """Of meshes of three axes those of an expert's usual plan: data, positions over the middle
        axis, columns and rows over the inner one (`named`)."""
        if self.request.pins.nodes:
            return ()
        named = (
            Mesh(
                (
                    *m.axes[:-2],
                    MeshAxis("sequence", m.axes[-2].parts),
                    MeshAxis("tensor", m.axes[-1].parts),
                )
            )
            for m in meshes
            if len(m.inner) == 3 and not m.group
        )
        return tuple(dict.fromkeys(named))

    def for_long_sequences(self, stages: Collection[int]) -> tuple[Mesh, ...]:
        """Meshes that cut positions beside heads, for some numbers of stages, where the batch has
        fewer rows than there are devices."""
        request, rows, base = self.request, self.model.batch, self.base(1)
        if not self.parts_axes or request.pins.nodes or request.launcher is not None:
            return ()
        if rows >= request.topology.devices or base is None or self.out_of_time():
            return ()
        if not any("sequence" in roles.values() for roles in base.roles.values()):
            return ()
        return tuple(m for n in stages for m in for_long_sequences(request.topology, n, rows))

    def named(self, base: GraphFacts, mesh: Mesh) -> Allowed:
        """The splits of plans whose every axis does what it is called."""
        limits = Limits(
            spatial=self.model.batch < self.request.topology.devices,
            forbidden=self.request.pins.forbidden_factors,
        )
        return as_named(base, mesh, [a.name for a in mesh.axes], {}, limits)

    def by_alphabet(self, mesh: Mesh) -> bool:
        """Whether of a mesh only those splits are tried that cut what plans found before cut: three
        axes have too many."""
        return self.parts_axes and len(mesh.inner) > 2

    def alphabet(
        self, base: GraphFacts, mesh: Mesh, cuts: Mapping[str, Collection[str]]
    ) -> Allowed:
        """Per class of nodes the splits over more axes that cut no other factors than these, by
        node."""
        allowed: Allowed = {}
        for i in base.times:
            used = cuts.get(base.graph.nodes[i].id, ())
            allowed[i] = base.reachable(
                i,
                tuple(
                    s
                    for s in candidates(base.rules[i], dict(mesh.shape))
                    if all(f in used for f, _ in s.pairs)
                ),
            )
        return allowed

    def staged(self) -> tuple[Mesh, ...]:
        """Meshes with pipeline stages, unless the user says what the mesh is."""
        base, pins, topology = self.base(1), self.request.pins, self.request.topology
        most_stages = self.most_stages(base) if base is not None else 0
        offloads = "activations" in pins.techniques.get("offload", ()) or bool(
            set(WEIGHTS) & set(self.request.offload)
        )
        if (
            not most_stages
            or pins.axes
            or self.request.blocks is not None  # stages loop: the search of both ways has them
            or offloads
            or self.request.partitioned
            or self.request.copies > 1
            or self.request.mode == "data-parallel"
            or self.out_of_time()
        ):
            return ()
        return tuple(
            m
            for n in divisors(topology.devices)
            if 1 < n <= most_stages
            for m in staged_meshes(topology, n)
        )

    def most_stages(self, base: GraphFacts) -> int:
        """Pipeline stages that the graph may have at most: one for every repeated block, or where
        none is assigned to stages as many as it can be cut into."""
        if not self.training:
            return 0
        if base.dealt:
            return base.dealt[0][2]
        return (
            min(MOST_CHUNKS, len(base.places) + 1)
            if base.places
            and self.request.runtime.kernels is None
            and not base.graph.orthogonalised  # no program of uneven stages does so
            else 0
        )

    def allowed(self) -> Family | None:
        """What the mode leaves; None leaves everything the pins do."""
        return (
            (lambda b, m: batch_only(b, m.shape)) if self.request.mode == "data-parallel" else None
        )

    def restricted(self, base: GraphFacts, mesh: Mesh, limits: Limits) -> Allowed:
        """What the pins and the names of pinned axes leave."""
        pins = self.request.pins
        by_pins = pins.allowed(base, dict(mesh.shape))
        if self.request.mode == "propagate":
            return propagated(base, mesh, by_pins)
        names = pins.axes | (
            {a for a, _ in mesh.shape if role_named(a) in (pins.axes or ("data",))}
            if "zero_group" in pins.techniques or self.request.launcher is not None
            else frozenset()
        )
        named = as_named(base, mesh, names, by_pins, limits, pins.tensor) if names else by_pins
        if pins.techniques.get("exchanges") == BESIDE:
            named = exchanging(base, mesh, named, limits)
        return by_hand(base, mesh, by_pins, named) if self.request.mode == "hybrid" else named

    def keeps(self, c: Candidate) -> bool:
        """Whether a plan from elsewhere, a baseline, is one of those that pins and mode leave."""
        plan, mesh, base, request = c.plan, c.mesh, self.base(c.plan.microbatches), self.request
        if self.free:
            return True
        if (
            base is None
            or mesh not in self.meshes()
            or plan.zero_stage not in self.zero_stages(mesh)
            or plan.overlapped_microbatches != max(1, request.copies)
        ):
            return False
        if plan.recompute not in self.recomputes(
            base, mesh
        ) or plan.microbatches not in self.microbatches(mesh):
            return False
        if mesh.stages > 1 and (plan.schedule, plan.virtual_stages) not in self.schedules(mesh):
            return False
        inner, forbidden = Mesh(mesh.inner), request.pins.forbidden_factors
        try:
            by_pins, family = (
                self.restricted(base, inner, Limits(forbidden=forbidden)),
                self.allowed(),
            )
        except PlanError:  # a pin that this mesh cannot follow
            return False
        restrictions = (by_pins, family(base, inner)) if family is not None else (by_pins,)
        split_of = ((i, plan.splits[base.graph.nodes[i].id]) for i in base.times)
        return all(
            all(split in table.get(i, (split,)) for table in restrictions)
            and not any(f in forbidden and axes for f, axes in split.pairs)
            for i, split in split_of
        )

    def offload(self) -> tuple[str, ...] | None:
        """What is sent to the host's memory where nothing fits with what was; None where that is
        all, or for the user to say."""
        request = self.request
        own = (
            request.mode in ("auto", "semi-auto", "data-parallel")
            and "offload" not in request.pins.techniques
        )
        if (
            not own
            or not self.training
            or request.runtime.kernels is not None
            or not request.recipe.state_bytes
        ):
            return None
        if request.partitioned or self.model.workload.tables != PLACES[0]:  # no program does so
            return None
        levels: tuple[tuple[str, ...], ...] = (
            MORE_OFFLOAD if request.copies <= 1 else MORE_OFFLOAD[:2]
        )  # weights are brought for one microbatch at a time
        if request.launcher is not None:
            levels = tuple((what,) for what in request.launcher.offloads)
        return next((more for more in levels if len(more) > len(request.offload)), None)

    def away(self) -> tuple[tuple[str, ...], ...]:
        """What may go to the host's memory one after the other where the limit of memory is
        dear."""
        if self.request.offload or (first := self.offload()) is None:
            return ()
        if self.request.launcher is not None:
            return (first,)
        request, graph = self.request, self.model.plain
        trained = sum(graph.tensors[name].elements for name in graph.trainable)
        state = trained * request.recipe.state_bytes / request.topology.devices
        little = state < LITTLE_STATE * request.limit_bytes
        return tuple(what for what in AWAY if not (little and "optimizer" in what))

    def offloaded(self, base: GraphFacts, mesh: Mesh, recompute: str) -> tuple[str, ...]:
        """What of the request's a plan has in the host's memory."""
        possible = {
            "optimizer": True,
            "activations": recompute != "none" and mesh.stages == 1,
            "parameters": recompute != "none" and mesh.stages == 1,
            "embeddings": mesh.stages == 1 and bool(lookup_tables(base.graph)),
        }
        return tuple(w for w in self.request.offload if possible[w])

    def levels(self) -> tuple[int, ...]:
        """ZeRO stages to consider."""
        pinned, launcher = self.request.pins.techniques.get("zero_stage"), self.request.launcher
        if pinned is not None:
            return (int(pinned),)
        stages: tuple[int, ...] = BY_NAME["zero_stage"].choices
        if self.request.blocks == WRITTEN_OUT:  # what stage 3 gathers it gathers in loops
            stages = tuple(z for z in stages if z < 3)
        if launcher is not None and self.training and self.request.topology.devices > 1:
            return launcher.zero_stages
        return stages if self.training and self.request.topology.devices > 1 else stages[:1]

    def zero_stages(self, mesh: Mesh) -> tuple[int, ...]:
        """Of these those that go with a mesh of the launcher that is planned for."""
        launcher, pinned = self.request.launcher, self.request.pins.techniques.get("zero_stage")
        if launcher is None or pinned is not None or not self.training:
            return self.levels()
        return zero_stages(mesh, self.request)

    def recomputes(self, base: GraphFacts, mesh: Mesh) -> tuple[str, ...]:
        """Recomputation to consider, the least first. uneven stages run their forward pass
        again. Raises PlanError P023 where blocks have no value of a pinned name."""
        if mesh.stages > 1 and base.dealt is None:
            return ("block",)
        if not self.training or not base.loops or self.request.blocks == WRITTEN_OUT:
            return ("none",)
        pinned = self.request.pins.techniques.get("recompute")
        if pinned is None and (
            "activations" in self.request.pins.techniques.get("offload", ())
            or "parameters" in self.request.offload
        ):
            return tuple(r for r in RECOMPUTE if r != "none")
        if pinned is not None and is_named(pinned) and self.request.runtime.kernels is not None:
            raise PlanError(
                "P024",
                f"recompute = {pinned!r}: programs that save values by name are emitted, and"
                f" --runtime {self.request.runtime.name} is priced as that framework runs",
                help=["recompute=none, block or block-keep, or leave --runtime out"],
            )
        if pinned is not None:
            return (_of_blocks(str(pinned), base),)
        if (launcher := self.request.launcher) is None:
            return RECOMPUTE
        some = launcher.modules and bool(modules(base.graph))
        return tuple(r for r in RECOMPUTE if r in launcher.recompute or (r == BLOCK_KEEP and some))

    def saves_by_name(self, base: GraphFacts, mesh: Mesh) -> bool:
        """Whether it is for the search to say which values recomputed blocks save by name."""
        return (
            BLOCK in self.recomputes(base, mesh)
            and len(self.recomputes(base, mesh)) > 1
            and self.request.runtime.kernels is None
            and self.request.blocks is None  # such plans loop: the search of both ways has them
            and (self.request.launcher is None or bool(self.request.launcher.names))
        )

    @property
    def offloads_by_name(self) -> bool:
        """Whether it is for the search to say which values of blocks wait in the host's memory: of
        plans without pipeline stages, on devices whose memory is not the host's."""
        request = self.request
        return (
            "offload" not in request.pins.techniques
            and request.launcher is None
            and not request.partitioned
            and request.mode in ("auto", "semi-auto", "data-parallel")
            and request.topology.device.kind != "cpu"
            and self.model.workload.tables == PLACES[0]
        )

    def policy(self, recompute: str) -> str:
        """A way to recompute that was found, as the launcher that is planned for can say it."""
        launcher = self.request.launcher
        return recompute if launcher is None else launcher.policy(recompute)

    def schedules(self, mesh: Mesh) -> tuple[tuple[str, int], ...]:
        """(how microbatches pass through the stages of a mesh, chunks a stage) to consider: 1F1B,
        which takes GPipe's time and less memory, and in chunks."""
        pins, base = self.request.pins.techniques, self.base(1)
        pinned, chunks = pins.get("schedule"), pins.get("virtual")
        if mesh.stages == 1:  # a baseline's, where a schedule is pinned
            return ((SCHEDULES[0], 1),)

        launcher = self.request.launcher
        laid_out = launcher.layouts if launcher else self.request.runtime.kernels is not None

        def enough(n: int) -> bool:
            """Whether there are so many chunks, of equally many blocks each but where a launcher
            says how many, or where no block of the graph is assigned to stages."""
            return (
                base is not None
                and n <= self.most_stages(base)
                and (not base.dealt or base.dealt[0][2] % n == 0 or laid_out)
            )

        if launcher is not None and pinned is None and INTERLEAVED not in launcher.schedules:
            return tuple((s, 1) for s in launcher.schedules)
        if self.request.runtime.interleave > 1 and chunks is None and pinned is None:
            chunks = 1  # the runtime has its own
        finer = tuple(
            (INTERLEAVED, v)
            for v in ((int(chunks),) if chunks else CHUNKS)
            if v > 1 and mesh.stages > 1 and enough(mesh.stages * v)
        )
        if pinned == INTERLEAVED or int(chunks or 1) > 1:
            return finer
        return (
            ((str(pinned), 1),)
            if pinned
            else ((SCHEDULES[0], 1), *(finer if chunks is None else ()))
        )

    def microbatches(self, mesh: Mesh) -> tuple[int, ...]:
        """Numbers of microbatches to consider on a mesh: with pipeline stages at least as many as
        keep half of the ticks busy, and one row a device."""
        pinned = self.request.pins.techniques.get("microbatches")
        if pinned:
            if self.model.batch % int(pinned):
                raise PlanError(
                    "P035",
                    f"batch {self.model.batch} does not divide into {pinned} microbatches",
                    help=[
                        f"--batch {-(-self.model.batch // int(pinned)) * int(pinned)}, or"
                        f" micro={gcd(self.model.batch, int(pinned))}"
                    ],
                )
            return (int(pinned),)
        batch = self.model.batch
        usual = (1, *(m for m in MICROBATCHES if batch % m == 0)) if self.training else (1,)
        copies = max(1, self.request.copies)
        if copies > 1:
            usual = tuple(m for m in usual if m % copies == 0)
            if not usual:
                raise PlanError(
                    "P035",
                    f"batch {batch} does not divide into {copies} overlapped microbatches (copies)",
                    help=["an even batch, or pin copies=1"],
                )
        launcher = self.request.launcher
        if launcher is not None and batch % replicas(mesh):
            launcher = None  # a baseline's mesh
        if self.training:
            devices = replicas(mesh) if launcher else gcd(batch, prod(a.size for a in mesh.inner))
            most = MOST_MICROBATCHES if launcher else max(MICROBATCHES)
            whole = with_whole_rows(batch // devices, most)
            usual = tuple(sorted({*usual, *(m for m in whole if m % copies == 0)}))
        if launcher is not None:
            usual = launcher.microbatches(usual, batch // replicas(mesh), mesh.stages)
        if mesh.stages == 1:
            return usual
        if launcher is not None:
            return tuple(m for m in usual if m >= max(2, mesh.stages - 1))
        sizes = dict(mesh.shape)
        data = sizes.get("data", 1) * sizes.get("fsdp", 1)
        rows = [
            batch // n
            for n in (data, data * sizes.get("expert", 1))
            if batch % n == 0 and batch // n <= MOST_MICROBATCHES
        ]
        return tuple(m for m in sorted({*usual, *rows}) if m >= max(2, mesh.stages - 1))

    def unstaged(self, base: GraphFacts, mesh: Mesh) -> PlanError | None:
        """Why the model has no blocks for every stage of the mesh; None where it has."""
        if mesh.stages == 1:
            return None
        blocks = base.dealt[0][2] if self.training and base.dealt else None
        most_stages = self.most_stages(base)
        what, instead = reason_against(
            AskedStages(
                request=self.request,
                batch=self.model.batch,
                stages=mesh.stages,
                most_stages=most_stages,
                blocks=blocks,
                training=self.training,
                orthogonalised=bool(base.graph.orthogonalised),
                divides=bool(self.schedules(mesh)),
                chunks=CHUNKS,
            )
        )
        if not what:
            return None
        return PlanError(
            "P068",
            f"{mesh.stages} pipeline stages are not possible: {what}",
            help=[*instead, "pin less, or other stages"] if most_stages else [],
        )

    def replicas(self) -> Mesh:
        """The mesh of data parallelism: all devices, or where they do not divide the batch (a
        little padding aside) as many as do, the rest doing the same again."""
        topology, batch = self.request.topology, self.model.batch
        n = topology.devices
        if batch >= n and (-(-batch // n) * n - batch) / batch > Limits().waste:
            for data in sorted((d for d in divisors(n) if batch % d == 0), reverse=True):
                mesh = next(
                    (m for m in meshes(topology) if len(m.axes) == 2 and m.axes[0].size == data),
                    None,
                )
                if mesh is not None:
                    return mesh
        return pinned_mesh(topology, {"data": n})


def _over_batch(mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh that are named for cutting the batch, and their sizes."""
    return {a: k for a, k in mesh.shape if a in BATCH and k > 1}


def _padded(rows: int, n: int) -> bool:
    """Whether rows may be padded to a multiple of n, as candidates are."""
    wide = -(-rows // n) * n
    return rows >= n and (wide - rows) / wide <= Limits().waste


def _of_blocks(recompute: str, base: GraphFacts) -> str:
    """A pinned way to recompute without names that no value of the graph's blocks has. Raises
    PlanError P023 where that leaves none."""
    if not is_named(recompute):
        return recompute
    block_names = names_there(base.graph, base.loops)
    remaining = kept_among(recompute, block_names)
    if is_named(remaining):
        return remaining
    raise PlanError(
        "P023",
        f"recompute = {recompute!r} saves nothing: no value of the model's blocks is called so",
        help=[f"its values are {', '.join(block_names)}" if block_names else "recompute=block"],
    )
