"""The two graphs of serving, each a model that the planner's search takes as it takes any other.

    prompts   the whole prompts of all sequences, cache empty           step   one token of each,
              cache full

Both are read from one file at their own shapes. Prompts may be of several lengths: shorter ones are
padded on the left, and the mask says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from planner.errors import PlanError
from planner.execution.fewer_repeats import Run, fewer_repeats
from planner.graph.ir import Graph
from planner.graph.rescale import same
from planner.reader import read_model
from planner.reader.onnx.check import Checked
from planner.serving.cached import Form, form_of, with_constants
from planner.serving.latent import absorbed, latents
from planner.serving.quantize import quantized
from planner.serving.readings import READ_AT, Phase, Readings, Sights
from planner.serving.result import Service
from planner.serving.rewrite import (
    Sight,
    prompt_graph,
    sight,
    step_graph,
    unpadded,
    unseen,
    with_cache_of,
)
from planner.serving.states import all_real, from_nothing, going_on
from planner.workload.model import Model, Workload


@dataclass
class PhaseModel(Model):
    """A model whose graphs are those of one phase."""

    phase: Phase = "prompts"
    service: Service = field(default_factory=lambda: Service(1, 1, 1))
    form: Form | None = None
    sights: Sights = field(default_factory=dict, compare=False)
    """Of all services."""
    readings: Readings | None = field(default=None, compare=False)
    """What graphs are derived from; None: all are read."""
    own: bool = field(default=False, compare=False)
    """Whether this one is read in any case."""

    @classmethod
    def of(
        cls, model: Model, phase: Phase, service: Service, readings: Readings | None = None
    ) -> PhaseModel:
        """A phase of a model that was opened. Raises PlanError P220, P221 where it has no cache
        that is understood."""
        form = form_of(model.proto, model.name, model.workload.dims)
        if not form.pairs and service.cache_type != "compute":
            raise PlanError(
                "P222",
                f"--cache-type {service.cache_type}: {model.name} keeps no keys and values, and"
                " states stay in float32",
                help=["plan without --cache-type"],
            )
        return cls(
            model.name,
            Workload("infer", dims=model.workload.dims),
            model.devices,
            model.folder,
            model.proto,
            model.lengths,
            left_out=model.left_out,
            phase=phase,
            service=service,
            form=form,
            sights=readings.sights if readings else {},
            readings=readings,
        )

    def at(self, **changes: int) -> PhaseModel:
        """The phase under another service: concurrency or wave."""
        return self._like(self.phase, replace(self.service, **changes))  # type: ignore[arg-type]

    def of_size(self, phase: Phase, rows: int, tokens: int) -> PhaseModel:
        """A phase of so many sequences: whole prompts of so many tokens, or a step with as many in
        the cache."""
        if phase == "prompts":
            sizes = {"prompt": tokens, "wave": rows}
        else:
            sizes = {"prompt": tokens - 1, "generate": 1}
        return self._like(phase, replace(self.service, concurrency=rows, **sizes))  # type: ignore[arg-type]

    def _like(self, phase: Phase, service: Service) -> PhaseModel:
        like = PhaseModel(
            self.name,
            self.workload,
            self.devices,
            self.folder,
            self.proto,
            self.lengths,
            left_out=self.left_out,
            phase=phase,
            service=service,
            form=self.form,
            sights=self.sights,
            readings=self.readings,
        )
        vars(like)["_checked"] = self._checked
        return like

    @property
    def rows(self) -> int:
        """Sequences of this phase's batch."""
        return self.service.at_once if self.phase == "prompts" else self.service.concurrency

    @property
    def tokens(self) -> int:
        """Tokens of a prompt, or in the cache."""
        return self.service.prompt if self.phase == "prompts" else self.service.length

    @property
    def batch(self) -> int:
        """Sequences of this phase's batch: said, and not read from its graph."""
        return self.rows

    @property
    def plain(self) -> Graph:
        """The graph without what the search adds; where it is derived that one stands for it."""
        return super().plain if self.own else self._derived or super().plain

    def graph(self, microbatches: int = 1) -> Graph:
        """The graph of the phase, derived where there are readings to derive it from."""
        derived = self._derived if microbatches == 1 and not self.own else None
        return derived or super().graph(microbatches)

    @cached_property
    def _derived(self) -> Graph | None:
        readings = self.readings
        return readings.graph(self.phase, self.rows, self.tokens) if readings else None

    def with_repeats(self, run: Run, kept: int) -> Graph:
        """The phase's graph with so many repeats of a run."""
        if self.readings is not None:
            derived = self.readings.graph(self.phase, self.rows, self.tokens, (run, kept))
            if derived is not None:
                return derived
        return fewer_repeats(self.graph(1), (run,), kept)

    def as_read(self) -> bool:
        """Whether the graph is what is read at its own size."""
        derived, self.own = self._derived, True
        return derived is None or same(derived, self.graph(1))

    def sees_all(self, tokens: int) -> bool:
        """Whether each attention of a step sees all of so many tokens in its cache."""
        assert self.form is not None
        return set(self._sight(self.form, tokens + 1).values()) <= {tokens + 1}

    def read(self, batch: int | None, *, part: bool = False) -> Graph:
        """The graph of the phase; the batch is the service's, in one part."""
        form, s = self.form, self.service
        assert form is not None and batch in (None, self.rows)
        if self.phase == "prompts":
            proto = with_constants(self.proto, self._empty(form, self.rows))
            checked = Checked.of(proto, self.folder)
            read = self._read(checked, s.prompt, s.prompt, ())
            graph = prompt_graph(from_nothing(read, form), form)
        else:
            read = self._read(self._checked, 1, s.length + 1, form.pasts)
            if self.rows <= max(READ_AT):
                self.sights.setdefault((s.length + 1, 0), sight(read, form, 0))
            graph = step_graph(going_on(read, form), form, self._windows(form))
            graph = with_cache_of(graph, form, s.cache_type)
        if s.engine and self.phase == "prompts":
            graph = all_real(unpadded(graph), form)
        if s.quantize != "none":
            graph = self.in_a_byte(graph, s.quantize)
        notes = tuple(n for n in graph.notes if not n.startswith("batch "))  # it was given
        dims = {**graph.dims, "batch": self.rows}
        return replace(graph, name=self.name, dims=dims, notes=notes, unstacked=True)

    def in_a_byte(self, graph: Graph, how: str) -> Graph:
        """The phase's graph with its weights of products in a byte."""
        form = self.form
        assert form is not None
        return quantized(
            graph, how, self._absorbed(form), frozenset(form.handed[len(form.pairs) :])
        )

    def _windows(self, form: Form) -> dict[str, Sight]:
        """Attention -> what it sees in a step with a full cache, where that is not all. Raises
        PlanError P221 where it is neither the last tokens nor a chunk's."""
        total = self.service.length + 1
        for (total_tokens, padding), seen in self.sights.items():
            if total_tokens >= total and not padding and set(seen.values()) <= {total_tokens}:
                return {}  # who sees all of more tokens
        seen = self._sight(form, total)
        fewer = {node: tokens for node, tokens in seen.items() if tokens < total}
        if not fewer:
            return {}
        try:
            before, chunks = self._sight(form, total - 1), dict[int, int]()
            sights = {}
            for node, tokens in fewer.items():
                if before.get(node) == tokens:
                    sights[node] = Sight(tokens)
                    continue
                if tokens not in chunks:
                    chunks[tokens] = self._chunk(form, node, total - tokens)
                sights[node] = Sight(chunks[tokens], by_chunks=True)
        except PlanError as e:  # masks of one length
            raise unseen(self.name, next(iter(fewer))) from e
        return sights

    def _chunk(self, form: Form, node: str, start: int) -> int:
        """Tokens of the chunks that an attention sees, of which one begins at `start`. Raises
        PlanError P221 where what it sees does not begin anew with each, counted from the first
        token that is no padding."""
        total = self.service.length + 1
        chunk = self._sight(form, start).get(node, 0) if start > 1 else 0
        seen = {(t, pad): (t - pad - 1) % max(1, chunk) + 1 for t, pad in ((total, 0), (total, 1))}
        seen |= {(t, 0): (t - 1) % max(1, chunk) + 1 for t in (total - 1, start, start + 1)}
        if chunk < 2 or any(
            self._sight(form, *lengths).get(node) != n for lengths, n in seen.items()
        ):
            raise unseen(self.name, node)
        return chunk

    def _absorbed(self, form: Form) -> frozenset[str]:
        """Weights that steps read otherwise than the pass over prompts does."""
        read = self._read(self._checked, 1, 2, form.pasts, batch=1)
        return absorbed(latents(read, frozenset(form.presents)))

    def _sight(self, form: Form, total: int, padding: int = 0) -> dict[str, int]:
        """`sight` of so many tokens. Sequences see their keys alike: one tells, where masks of all
        would take gigabytes."""
        key = total, padding
        if key not in self.sights:
            read = self._read(self._checked, 1, total, form.pasts, batch=1)
            self.sights[key] = sight(read, form, padding)
        return self.sights[key]

    def _read(
        self, model: Checked, tokens: int, total: int, pasts: tuple[str, ...], batch: int = 0
    ) -> Graph:
        """The model with so many tokens of `total`; batch: 0 for the phase's own."""
        form, batch = self.form, batch or self.rows
        assert form is not None
        inputs = {i.name for i in model.model.graph.input}
        shapes: dict[str, tuple[int, ...]] = {
            form.ids: (batch, tokens),
            form.positions: (batch, tokens),
            form.mask: (batch, total),
        }
        shapes |= {p: (batch, form.sizes[p][0], total - 1, form.sizes[p][1]) for p in pasts}
        shapes |= {p: (batch, *shape) for p, shape in form.shapes.items()}
        caches = [i for i in self.proto.graph.input if i.name in form.sizes]
        symbols = {d.dim_param for i in caches for d in i.type.tensor_type.shape.dim}
        return read_model(
            model,
            self.folder,
            dims={n: v for n, v in self.workload.dims.items() if n not in symbols},
            shapes={n: shape for n, shape in shapes.items() if n in inputs},
            devices=self.devices,
        )

    def _empty(self, form: Form, batch: int) -> list[tuple[str, np.ndarray]]:
        from onnx import helper

        kinds = {
            i.name: helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
            for i in self.proto.graph.input
        }
        return [
            (p, np.zeros((batch, heads, 0, width), kinds[p]))
            for p, (heads, width) in form.sizes.items()
        ]


def readings_of(
    model: Model, kept: Service, spans: Mapping[Phase, tuple[int, int]] | None = None
) -> Readings:
    """Readings of both phases of a model that was opened. kept: how weights and caches are; its
    sizes say nothing. Raises PlanError P220, P221 where it has no cache that is understood."""
    step = PhaseModel.of(model, "step", kept)

    def read(phase: Phase, rows: int, tokens: int) -> Graph:
        return step.of_size(phase, rows, tokens).graph(1)

    return Readings(read, step.sees_all, step.sights, spans or {})
