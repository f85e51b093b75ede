"""The two graphs of serving, each a model that the planner's search takes as it takes any other.

    prompts   the whole prompts of all sequences, cache empty           step   one token of each,
              cache full

Both are read from one file at their own shapes. Prompts may be of several lengths: shorter ones are
padded on the left, and the mask says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.serving.cached import Form, form_of, with_constants
from planner.serving.latent import absorbed, latents
from planner.serving.quantize import quantized
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

Phase = Literal["prompts", "step"]


@dataclass
class PhaseModel(Model):
    """A model whose graphs are those of one phase."""

    phase: Phase = "prompts"
    service: Service = field(default_factory=lambda: Service(1, 1, 1))
    form: Form | None = None
    sights: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    """(tokens, of them padding) -> attention -> how many it sees (`sight`), of all services."""

    @classmethod
    def of(cls, model: Model, phase: Phase, service: Service) -> PhaseModel:
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
        )

    def at(self, **changes: int) -> PhaseModel:
        """The same under another service: concurrency or wave."""
        service = replace(self.service, **changes)  # type: ignore[arg-type]
        return PhaseModel(
            self.name,
            self.workload,
            self.devices,
            self.folder,
            self.proto,
            self.lengths,
            left_out=self.left_out,
            phase=self.phase,
            service=service,
            form=self.form,
            sights=self.sights,
        )

    @property
    def rows(self) -> int:
        """Sequences of this phase's batch."""
        return self.service.at_once if self.phase == "prompts" else self.service.concurrency

    def read(self, batch: int | None, *, part: bool = False) -> Graph:
        """The graph of the phase; the batch is the service's, in one part."""
        form, s = self.form, self.service
        assert form is not None and batch in (None, self.rows)
        if self.phase == "prompts":
            proto = with_constants(self.proto, self._empty(form, self.rows))
            read = self._read(proto, s.prompt, s.prompt, ())
            graph = prompt_graph(from_nothing(read, form), form)
        else:
            read = self._read(self.proto, 1, s.length + 1, form.pasts)
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
        seen = self._sight(form, total)
        fewer = {node: tokens for node, tokens in seen.items() if tokens < total}
        if not fewer:
            return {}
        try:
            before, chunks = self._sight(form, total - 1), dict[int, int]()
            found = {}
            for node, tokens in fewer.items():
                if before.get(node) == tokens:
                    found[node] = Sight(tokens)
                    continue
                if tokens not in chunks:
                    chunks[tokens] = self._chunk(form, node, total - tokens)
                found[node] = Sight(chunks[tokens], by_chunks=True)
        except PlanError as e:  # masks of one length
            raise unseen(self.name, next(iter(fewer))) from e
        return found

    def _chunk(self, form: Form, node: str, start: int) -> int:
        """Tokens of the chunks that an attention sees, of which one begins at `start`. Raises
        PlanError P221 where what it sees does not begin anew with each, counted from the first
        token that is no padding."""
        total = self.service.length + 1
        chunk = self._sight(form, start).get(node, 0) if start > 1 else 0
        seen = {(t, pad): (t - pad - 1) % max(1, chunk) + 1 for t, pad in ((total, 0), (total, 1))}
        seen |= {(t, 0): (t - 1) % max(1, chunk) + 1 for t in (total - 1, start, start + 1)}
        if chunk < 2 or any(self._sight(form, *at).get(node) != n for at, n in seen.items()):
            raise unseen(self.name, node)
        return chunk

    def _absorbed(self, form: Form) -> frozenset[str]:
        """Weights that steps read otherwise than the pass over prompts does."""
        read = self._read(self.proto, 1, 2, form.pasts, batch=1)
        return absorbed(latents(read, frozenset(form.presents)))

    def _sight(self, form: Form, total: int, padding: int = 0) -> dict[str, int]:
        """`sight` of so many tokens. Sequences see their keys alike: one tells, where masks of all
        would take gigabytes."""
        at = total, padding
        if at not in self.sights:
            read = self._read(self.proto, 1, total, form.pasts, batch=1)
            self.sights[at] = sight(read, form, padding)
        return self.sights[at]

    def _read(
        self, proto: Any, tokens: int, total: int, pasts: tuple[str, ...], batch: int = 0
    ) -> Graph:
        """The model with so many tokens of `total`; batch: 0 for the phase's own."""
        form, batch = self.form, batch or self.rows
        assert form is not None
        given = {i.name for i in proto.graph.input}
        shapes: dict[str, tuple[int, ...]] = {
            form.ids: (batch, tokens),
            form.positions: (batch, tokens),
            form.mask: (batch, total),
        }
        shapes |= {p: (batch, form.sizes[p][0], total - 1, form.sizes[p][1]) for p in pasts}
        shapes |= {p: (batch, *shape) for p, shape in form.shapes.items()}
        caches = [i for i in self.proto.graph.input if i.name in form.sizes]
        said = {d.dim_param for i in caches for d in i.type.tensor_type.shape.dim}
        return read_model(
            proto,
            self.folder,
            dims={n: v for n, v in self.workload.dims.items() if n not in said},
            shapes={n: shape for n, shape in shapes.items() if n in given},
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
