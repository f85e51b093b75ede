"""An ONNX backend (`onnx.backend.base`) over the kernels of emitted programs: what is planned is
what is run here.

A model is read as planning reads it and run by the statements the emitter writes. What a static
graph cannot hold - sequences, optionals, strings, loops, sizes that depend on data - is run node by
node (planner.onnx_backend.machine). `python -m benchmarks.onnx_backend` runs the ONNX project's own
suite over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx.backend.base import Backend as _Backend
from onnx.backend.base import BackendRep, namedtupledict

from planner.errors import PlanError

__all__ = ["Backend", "Prepared", "prepare", "run_model", "run_node", "supports_device"]


class Prepared(BackendRep):
    """A model that can be run. `way` says how the last call was run: "graph" (statements of a
    program) or "nodes" (one by one)."""

    def __init__(self, model: Any, folder: str | None = None) -> None:
        from planner.onnx_backend.machine import Machine
        from planner.onnx_backend.model import Static

        self.model = model
        self.static = Static(model, folder)
        self.machine = Machine(model)
        initialized = {t.name for t in model.graph.initializer}
        self.names = [i.name for i in model.graph.input if i.name not in initialized]
        self.way = ""
        self.reason = ""

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs in the model's order, as a named tuple. `inputs`: a sequence in the model's
        order, a mapping by name, or one array.

        Raises PlanError when the number of inputs is wrong or a node cannot be run.
        """
        values = self._named(inputs)
        try:
            outputs: list[Any] = list(self.static(values))
            self.way, self.reason = "graph", ""
        except PlanError as error:
            self.way, self.reason = "nodes", str(error)
            outputs = self.machine(values)
        return namedtupledict("Outputs", [o.name for o in self.model.graph.output])(*outputs)

    def _named(self, inputs: Any) -> dict[str, Any]:
        from onnx import TensorProto, numpy_helper

        if isinstance(inputs, Mapping):
            values = dict(inputs)
        else:
            listed = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(listed) > len(self.names):
                raise PlanError(
                    "P172", f"{len(listed)} inputs are given, the model has {len(self.names)}"
                )
            values = dict(zip(self.names, listed, strict=False))
        missing = [n for n in self.names if n not in values]
        if missing:
            raise PlanError("P172", f"input {missing[0]!r} is not given")
        return {
            n: (
                numpy_helper.to_array(v)
                if isinstance(v, TensorProto)
                else np.asarray(v)
                if isinstance(v, np.generic)
                else v
            )
            for n, v in values.items()
        }


class Backend(_Backend):
    """`onnx.backend.base.Backend` on the CPU devices jax has."""

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Prepared:
        """A runnable form of a ModelProto. Raises PlanError for another device."""
        if not cls.supports_device(device):
            raise PlanError("P173", f"device {device!r} is not supported", help=["use device CPU"])
        return Prepared(model, kwargs.get("folder"))

    @classmethod
    def run_model(
        cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Prepare a model and run it once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: Any,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one NodeProto; `opset_version` (default: the newest) says which version of the
        operator it is."""
        from onnx import defs, helper

        from planner.onnx_backend.values import value_info

        arrays = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        names = [n for n in dict.fromkeys(node.input) if n]
        if len(arrays) != len(names):
            raise PlanError("P172", f"{len(arrays)} inputs are given, the node has {len(names)}")
        infos = [
            value_info(name, np.asarray(array)) for name, array in zip(names, arrays, strict=True)
        ]
        graph = helper.make_graph(
            [node],
            "node",
            infos,
            [helper.make_empty_tensor_value_info(o) for o in node.output if o],
        )
        opset = helper.make_opsetid(
            node.domain, int(kwargs.get("opset_version", defs.onnx_opset_version()))
        )
        return cls.run_model(
            helper.make_model(graph, opset_imports=[opset]), [np.asarray(a) for a in arrays], device
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether programs can be run on a device: "CPU" only."""
        return device.split(":")[0] == "CPU"


prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device
