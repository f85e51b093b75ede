"""What the rooms of emission share: the program being written, its parameters, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from planner.emit.body import Body
from planner.emit.local_names import renamed
from planner.emit.values import Backend, Line
from planner.execution.layout_flow import Flow
from planner.execution.loops import RepeatedBlock
from planner.execution.pipeline import Pipeline
from planner.execution.plan import WeightPlan
from planner.execution.stage_buffers import Buffer
from planner.execution.uneven_pipeline import UnevenPipeline
from planner.execution.weight_offload import offloaded_names

Workload = Literal["train", "infer"]


@dataclass(frozen=True)
class Training:
    """What the emitted step does after the gradients, and what the program's figures are made of:
    `items` (tokens or samples) and FLOPs of a step over all devices, of causal attention half, and
    a device's peak; 0 where they are not known. state: dtype of the optimizer's moments, and of
    master copies, which there are where it is longer than that of parameters."""

    optimizer: str = "adamw"
    lr: float = 1e-4
    state: str = "float32"
    items: int = 0
    item: str = "samples"
    model_flops: float = 0.0
    peak_flops: float = 0.0


@dataclass(frozen=True)
class Program:
    """The text and the arrays it reads from the .safetensors beside it (constants too long for the
    text)."""

    text: str
    constants: Mapping[str, np.ndarray]
    labels: Mapping[str, tuple[str, ...]]
    """program parameter -> labels of the graph weights stacked in it (one when it is not
    stacked)."""
    unrolled_because: tuple[str, ...] = ()
    model: str = ""
    """The same program as model.py beside the runtime."""


@dataclass
class Parameter:
    """One entry of the program's parameter dict: a weight, or the stacked weights of a repeated
    block."""

    key: str
    tensors: tuple[str, ...]
    stacked: bool
    plan: WeightPlan


@dataclass
class Function:
    """A function of the program. Its arguments and results are read from the body when the text is
    put together."""

    name: str
    doc: str
    body: Body
    first: tuple[str, ...] = ()
    """Arguments before those the body asked for."""
    as_tuple: bool = False
    """Whether a single result is returned as a tuple of one."""
    in_rows: bool = False
    """Whether a single result that a product makes (Body.products) leaves as rows of its last dim
    and has its shape again outside."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return (*self.first, *(a for a in self.body.arguments if a not in self.first))

    def call(
        self, outputs: str = "", through: str = "{}", arguments: tuple[str, ...] | None = None
    ) -> str:
        """The call: results assigned to the names they have inside, or to `outputs`."""
        argument_text = ", ".join(arguments if arguments is not None else self.arguments)
        results = outputs or ", ".join(self.body.results)
        shape = f".reshape({self._rows_of})" if self._rows_of else ""
        return f"{results} = {through.format(self.name)}({argument_text}){shape}"

    @property
    def _rows_of(self) -> tuple[int, ...]:
        """The shape of the result that leaves as rows; () where none does."""
        one = self.in_rows and len(self.body.results) == 1
        return self.body.products.get(self.body.results[0], ()) if one else ()

    def text(self) -> str:
        """The whole definition."""
        lines = [f"def {self.name}({', '.join(self.arguments)}):", f'    """{self.doc}"""']
        lines += [f"    {line}" for line in rendered(self.body.lines)]
        one = self.as_tuple and len(self.body.results) == 1
        rows = f".reshape(-1, {self._rows_of[-1]})" if self._rows_of else ""
        lines.append(f"    return {', '.join(self.body.results)}{rows}{',' if one else ''}")
        return renamed("\n".join(lines), self.body.stems)


def rendered(lines: list[Line]) -> list[str]:
    """Lines with those that waited for the rest of the program filled in."""
    return [line if isinstance(line, str) else line() for line in lines]


@dataclass
class Writer:
    """One program while it is written."""

    flow: Flow
    backend: Backend
    unroll: bool
    training: Training
    blocks: tuple[RepeatedBlock, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)  # by first tensor
    reasons: list[str] = field(default_factory=list)
    counted: (
        str
        # with microbatches: the tensor that counts the rows of each, where that is a part of the
        # data
    ) = ""
    pipeline: Pipeline | None = None
    stages: UnevenPipeline | None = None  # uneven pipeline stages
    packed: tuple[Buffer, ...] = ()  # what the weights of uneven stages lie in
    compute: str = "float32"  # type of products with weights
    gpu_memory: float | None = (
        None  # share of a GPU's memory that the plan may use, None where no GPU is planned for
    )
    tables: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    counter: list[int] = field(default_factory=lambda: [0])
    """of variables, where a program has several functions of its own"""
    prefix: str = ""
    """of the names of functions and tables, where a program holds several models"""

    @property
    def float8(self) -> bool:
        """Whether linear layers multiply float8 operands; what lies between is bfloat16 then."""
        return self.compute.startswith("float8")

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need the loss to be scaled to stay within their type's range."""
        return self.compute == "float16" and self.flow.training

    @cached_property
    def weight_rows(self) -> int:
        """Rows that the weight of a microbatch is counted in, where rows of the loss are counted.
        Where the loss is scaled, about as many as there are: sums over rows are then as large as
        means over them, and neither leaves the range of gradients."""
        if not (self.counted and self.scales_loss):
            return 1
        graph = self.flow.graph
        labels = graph.nodes[graph.producer[graph.outputs[0]]].inputs[1]
        return 1 << (graph.tensors[labels].elements.bit_length() - 1)

    def scaled(self, loss: str, frozen: str = "frozen") -> str:
        """The expression of a loss, which programs in float16 scale for the backward pass."""
        return f"scaled({loss}, {frozen})" if self.scales_loss else loss

    def rows(self, counted: str) -> str:
        """The expression of a microbatch's weight, from that of its rows that count."""
        return f"({counted} / WEIGHT_ROWS)" if self.weight_rows > 1 else counted

    def staged(self, parameter: Parameter) -> bool:
        """Whether the parameter's repeats are cut over pipeline stages."""
        return (
            self.pipeline is not None
            and parameter.stacked
            and any(
                i in self.pipeline.nodes for i, _ in self.flow.graph.consumers[parameter.tensors[0]]
            )
        )

    def virtual_stages(self, parameter: Parameter) -> int:
        """Virtual stages that a pipeline stage holds of the parameter's repeats."""
        return (
            self.pipeline.virtual_stages
            if self.pipeline is not None and self.staged(parameter)
            else 1
        )

    @property
    def offloads_weights(self) -> bool:
        """Whether any weights are offloaded to the host's memory."""
        return bool(self.offloaded)

    @cached_property
    def offloaded(self) -> frozenset[str]:
        """Weights offloaded to the host's memory."""
        return offloaded_names(self.flow, self.blocks)

    def is_offloaded(self, parameter: Parameter) -> bool:
        """Whether the parameter is in the host's memory between its uses."""
        return parameter.tensors[0] in self.offloaded

    @property
    def together(self) -> list[tuple[str, ...]]:
        """Matrices of all repeats of a block that are orthogonalised together, where these are
        arrays of their own."""
        matrices = self.flow.graph.orthogonalised & self.flow.grad
        return [
            names
            for block in (self.blocks if self.unroll else ())
            for names in block.weights
            if names[0] in matrices
        ]

    def container(self, tensor: str) -> str:
        """The dict a weight's parameter is in."""
        return "params" if tensor in self.flow.grad else "frozen"
