"""Where a model comes from and what its workload is: a file, a zoo spec or a Hugging Face config,
read at any batch.

`Model.graph(microbatches)` is the canonical graph of one microbatch, with its loss for training and
shared work hoisted: what every later room plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.optimizers import OPTIMIZERS
from planner.errors import PlanError
from planner.graph.findings import TRAINING
from planner.graph.ir import Graph
from planner.graph.rescale import Scaled, same
from planner.graph.value_digest import value_bytes
from planner.ops.matrices import orthogonalised
from planner.reader import read_model
from planner.reader.onnx.file import load
from planner.reader.onnx.norm_records import folded_norms
from planner.support.model_folder import model_file
from planner.workload.block_order import in_blocks
from planner.workload.file_missing import refuse_name
from planner.workload.host_tables import with_host_tables
from planner.workload.routing import Spread, with_routing
from planner.workload.train_eval_mode import evaluation, mode_notes
from planner.workload.train_eval_mode import training as training_mode
from planner.workload.trainable import choose

if TYPE_CHECKING:
    from planner.reader.onnx.check import Checked

TRAINING_ONLY = (
    "loss",
    "logits",
    "shift_labels",
    "ignore_index",
    "trainable",
    "freeze",
    "lora",
    "optimizer",
    "lr",
    "tables",
    "capacity",
)

SMALL_PARTS = tuple(2**k for k in range(1, 9))
"""Parts of the batch that may be read beside the whole, to see what grows with it."""


@dataclass(frozen=True)
class Workload:
    """What is run: kind "train" or "infer", the global batch (None: the exported one), other dims,
    and what training means."""

    kind: str = "train"
    batch: int | None = None
    tokens_per_step: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    loss: str = ""
    logits: str = ""
    shift_labels: bool = False
    ignore_index: int | None = None
    trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    tie: tuple[str, ...] = ()
    lora: str = ""
    optimizer: str = "adamw"
    lr: float = 1e-4
    tables: str = "device"
    imbalance: Spread | None = None
    """How a router's choices spread over experts (planner.workload.routing); None: not known."""
    capacity: float | None = None
    """What an expert takes, over the mean; None: whatever it is sent."""

    def __post_init__(self) -> None:
        """Raises PlanError for inference with options that only training has: they would change
        nothing."""
        if self.kind != "infer":
            return
        defaults = {f.name: f.default for f in fields(self)}
        options = [
            "--" + n.replace("_", "-") for n in TRAINING_ONLY if getattr(self, n) != defaults[n]
        ]
        if options:
            raise PlanError(
                "P028",
                f"{' and '.join(options)} {'say' if len(options) > 1 else 'says'} how to train, and"
                " the"
                " workload is infer",
                help=[
                    "leave it out" if len(options) == 1 else "leave them out",
                    "--workload train",
                ],
            )

    def to_json(self, graph: Graph, batch: int, loss: str) -> dict[str, Any]:
        """The strategy file's `workload`, without precision and runtime."""
        training = {
            "loss": loss,
            "logits": self.logits,
            "shift_labels": self.shift_labels,
            "trainable": list(self.trainable),
            "freeze": list(self.freeze),
            "optimizer": self.optimizer,
            "lr": self.lr,
        }
        chosen = {
            "ignore_index": self.ignore_index,
            "tie": list(self.tie),
            "lora": self.lora,
            "tables": self.tables,
        }  # in the file only where they say something
        training |= {k: v for k, v in chosen.items() if v not in (None, [], "", "device")}
        return {
            "kind": self.kind,
            "batch": batch,
            "dims": dict(sorted(self.dims.items())),
            "shapes": {k: list(v) for k, v in sorted(self.shapes.items())},
            "training": training if self.kind == "train" else None,
        } | self._routing()

    def _routing(self) -> dict[str, Any]:
        """Of the same file: what the user said of routers, where that is something."""
        counts = isinstance(self.imbalance, tuple)
        chosen = {
            "counts": list(self.imbalance) if isinstance(self.imbalance, tuple) else None,
            "imbalance": None if counts else self.imbalance,
            "capacity": self.capacity,
        }
        known = {k: v for k, v in chosen.items() if v is not None}
        return {"routing": known} if known else {}


def _no_options(spec: str, proto: Any, dims: Mapping[str, int]) -> None:
    """Raises PlanError P141 for dims that the spec has as options."""
    from models_zoo import find
    from models_zoo.spec import options

    symbols = {d.dim_param for i in proto.graph.input for d in i.type.tensor_type.shape.dim}
    for name, n in dims.items():
        if name not in symbols and name in options(find(spec)[0].config_type):
            others = [part for part in spec.split(",") if part.partition("=")[0] != name]
            raise PlanError(
                "P141",
                f"no input of the model has a dim named {name!r}: the zoo writes it with a fixed"
                " one",
                help=[",".join([*others, f"{name}={n}"])],
            )


@dataclass
class Model:
    """A model to plan; graphs are cached per number of microbatches."""

    name: str
    workload: Workload
    devices: int
    folder: Path | None = None
    proto: Any = None
    lengths: frozenset[str] = frozenset()
    """Dims of the workload that the model was built with: the graph has no symbols for them."""
    said: tuple[str, ...] = ()
    """Lengths that nobody gave, and what is not as in the library, for the assumptions."""
    left_out: tuple[str, ...] = ()
    """Parts of the model that the graph does not have, a sentence each."""
    written: bool = False
    """Whether the zoo writes it, of a spec or a config.json: nothing was exported."""
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _plain: Graph | None = None
    _sketches: dict[int, Graph] = field(default_factory=dict)
    _scaled: Scaled | None = None
    _derives: bool | None = None
    """Whether graphs are derived from others; None before the first was asked for."""

    @classmethod
    def open(cls, source: Any, workload: Workload, devices: int = 1) -> Model:
        """A file, `zoo:SPEC`, a Hugging Face config.json, or a ModelProto. Raises PlanError for
        anything that cannot be read."""
        if not isinstance(source, str | Path):
            return cls(source.graph.name, workload, devices, None, source)
        text = str(source)
        if text.startswith("zoo:"):
            import models_zoo
            from models_zoo.spec import told

            proto = models_zoo.build(text)
            _no_options(text, proto, workload.dims)
            return cls(
                text,
                workload,
                devices,
                None,
                proto,
                said=told(proto, "notes"),
                written=True,
                left_out=told(proto, "left_out"),
            )
        text = model_file(text)
        path = Path(text)
        if ".json" in path.name:
            from models_zoo.hf_config import CACHE, split_config, with_lengths
            from models_zoo.spec import told

            file, sizes = (text, dict[str, int]()) if path.exists() else split_config(text)
            path = Path(file)
            if path.suffix == ".json":
                cached = bool(sizes.pop(CACHE, 0))
                workload = replace(workload, dims={**sizes, **workload.dims})
                proto, taken, assumed = with_lengths(path, workload.dims, cached)
                said = (
                    *(f"{dim} {n:,} (--dim {dim}={n})" for dim, n in assumed.items()),
                    *told(proto, "notes"),
                )
                return cls(
                    path.name,
                    workload,
                    devices,
                    path.parent,
                    proto,
                    lengths=frozenset(taken),
                    said=said,
                    written=True,
                    left_out=told(proto, "left_out"),
                )

        if not path.exists():
            refuse_name(text)
        return cls(path.name, workload, devices, path.parent, load(path))

    def under(self, **workload: Any) -> Model:
        """The model under another workload, nothing of it read yet."""
        return replace(
            self,
            workload=replace(self.workload, **workload),
            _graphs={},
            _plain=None,
            _sketches={},
            _scaled=None,
            _derives=None,
        )

    def read(self, batch: int | None, *, part: bool = False) -> Graph:
        """The plain canonical graph at a batch (no loss). part: it is a part of the batch that dims
        and shapes may say."""

        w = self.workload
        tokens = None if part else w.tokens_per_step
        dims, shapes = {k: v for k, v in w.dims.items() if k not in self.lengths}, w.shapes
        if part and batch is not None and (dims or shapes):
            from planner.reader.onnx.dims import with_batch

            dims, shapes = with_batch(self.proto.graph, dims, shapes, batch)
        graph = read_model(
            self._checked,
            self.folder,
            batch=batch,
            dims=dims,
            shapes=shapes,
            tokens_per_step=tokens,
            devices=self.devices,
        )
        return replace(graph, name=self.name)

    @cached_property
    def _checked(self) -> Checked:
        """The file as every reading takes it."""
        from planner.reader.onnx.check import Checked

        return Checked.of(self.proto, self.folder)

    @cached_property
    def _folded(self) -> int | None:
        """Layers of BatchNormalization that the exporter folded away; None where it is not
        recorded."""
        return folded_norms(self.proto.graph)

    def _chosen(self, graph: Graph) -> Graph:
        """The graph with ties, adapters and the choice of what trains."""

        w = self.workload
        graph = with_routing(graph, w.imbalance, w.capacity)
        graph = choose(graph, trainable=w.trainable, freeze=w.freeze, tie=w.tie, lora=w.lora)
        # Nothing trains in inference, and a model that the zoo writes parts what its family parts.
        idle = TRAINING if w.kind == "infer" else {"tie"} if self.written else frozenset()
        graph = replace(
            graph, notes=tuple(n for n in graph.notes if getattr(n, "kind", "") not in idle)
        )
        if w.kind == "infer":
            return graph
        if self.folder is not None and self.proto.producer_name and not self.written:
            graph = replace(graph, notes=(*graph.notes, *mode_notes(graph, self._folded)))
        from planner.workload.loss import left_out

        return replace(graph, notes=(*graph.notes, *left_out(graph, w.loss, w.logits)))

    @property
    def plain(self) -> Graph:
        """The graph at the global batch, without a loss."""
        if self._plain is None:
            self._plain = self._placed(self._chosen(self.read(self.workload.batch)), 1)
        return self._plain

    def _placed(self, graph: Graph, microbatches: int) -> Graph:
        """The graph with its tables where the workload has them."""

        return (
            graph
            if self.workload.tables == "device"
            else with_host_tables(graph, microbatches, self.workload.tables)
        )

    @property
    def batch(self) -> int:
        """The global batch per optimizer step."""
        return int(self.plain.dims.get("batch", 1))

    def graph(self, microbatches: int = 1) -> Graph:
        """The graph of one microbatch. Raises PlanError when the batch does not divide."""
        if microbatches not in self._graphs:
            if self.batch % microbatches:
                raise PlanError(
                    "P035", f"batch {self.batch} does not divide into {microbatches} microbatches"
                )
            plain = (
                self.plain
                if microbatches == 1
                else self._placed(
                    self._chosen(self.read(self.batch // microbatches, part=True)), microbatches
                )
            )
            if self.workload.kind == "train":
                from planner.workload.loss import add_loss

                w = self.workload
                plain = add_loss(
                    training_mode(plain, microbatches),
                    self.loss,  # of the whole batch: one row's output may be a single number
                    w.logits,
                    w.shift_labels,
                    w.ignore_index,
                )
            else:
                from planner.workload.loss import prune

                plain = prune(evaluation(plain))
            hoisted = in_blocks(plain)
            if OPTIMIZERS[self.workload.optimizer].orthogonalises:
                hoisted = replace(hoisted, orthogonalised=orthogonalised(hoisted))
            self._graphs[microbatches] = hoisted
        return self._graphs[microbatches]

    def sketch(self, microbatches: int) -> Graph:
        """`graph`, derived from readings of the whole batch and of a small part of it where these
        differ in nothing but the batch: for searches, which ask for many and have the one they
        choose confirmed (`confirm`)."""
        if microbatches in self._graphs:
            return self._graphs[microbatches]
        if microbatches not in self._sketches:
            scaled = self._scaled_at(microbatches)
            if scaled is None:
                return self.graph(microbatches)
            self._sketches[microbatches] = scaled
        return self._sketches[microbatches]

    def _scaled_at(self, microbatches: int) -> Graph | None:
        """The derived graph, None where it has to be read: a batch of one, say, loses its dim in
        many exports."""
        if self.batch % microbatches or self.batch // microbatches < 2:
            return None
        if self._derives is None:
            try:
                self._scaled = Scaled.of(self.graph(1), self.graph(self.small))
            except PlanError:  # no part can be read, or this one cannot
                self._scaled = None
            self._derives = self._scaled is not None
        return (
            self._scaled.at(self.batch // microbatches)
            if self._derives and self._scaled is not None
            else None
        )

    @property
    def small(self) -> int:
        """How many of the small parts that are read make the batch."""
        return max(
            (m for m in SMALL_PARTS if self.batch % m == 0 and self.batch // m >= 2), default=1
        )

    def derived(self, microbatches: int) -> bool:
        """Whether `sketch` derived this graph from those of 1 and `small` microbatches."""
        return microbatches in self._sketches and microbatches not in self._graphs

    def confirm(self, microbatches: int) -> bool:
        """Read what `sketch` derived: whether it was right. Where it was not, nothing is derived
        from now on."""
        derived = self._sketches.get(microbatches)
        if derived is None or same(derived, self.graph(microbatches)):
            return True
        self._derives = False
        self._sketches.clear()
        return False

    @property
    def loss(self) -> str:
        """The loss as resolved."""
        from planner.workload.loss import default_loss

        return self.workload.loss or (
            default_loss(self.plain, self.workload.logits) if self.workload.kind == "train" else ""
        )

    def sha256(self) -> str:
        """Hash of the canonical graph without metadata: the same for a re-export that changes
        nothing."""
        digest = hashlib.sha256()
        graph = self.plain
        index: dict[str, str] = {n: f"i{k}" for k, n in enumerate(graph.inputs)}
        for k, n in enumerate(sorted(graph.weights, key=lambda n: graph.labels.get(n, n))):
            index[n] = f"w{k}"
        for node in graph.nodes:
            for slot, n in enumerate(node.inputs):
                if n in graph.constants:
                    index[n] = hashlib.sha256(value_bytes(graph.constants[n])).hexdigest()[:12]
                index.setdefault(n, f"?{slot}")
            cells = [index[n] for n in node.inputs]
            for n in node.outputs:
                index[n] = f"t{len(index)}"
            row = (
                node.op,
                cells,
                sorted((k, repr(v)) for k, v in node.attrs.items()),
                [graph.tensors[o].shape for o in node.outputs if o],
            )
            digest.update(repr(row).encode())
        return digest.hexdigest()
