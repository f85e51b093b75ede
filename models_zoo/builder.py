"""A small writer of ONNX graphs whose weights are nowhere.

`Net` collects nodes, inputs, outputs and initializers; a `Scope` is a module path inside it and
names what it writes the way exporters do: node "/model/layers.3/self_attn/q_proj/MatMul", weight
"model.layers.3.self_attn.q_proj.weight".

Weights are float32 references into an absent file `weights.bin`, laid out back to back in the order
they are declared (offset and length in bytes), so the size of a model does not matter: a trillion
parameters cost a few megabytes of names. With `inline=True` each weight w is instead drawn from
N(mean, std^2), seeded by (seed, name): two ways of writing one model get equal weights, and adding
a layer changes no other. Small integer and float constants are always inline.

onnx is imported when a `Net` is made, not with this module.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import PlanError

if TYPE_CHECKING:
    import onnx

WEIGHTS_FILE = "weights.bin"
INLINE_LIMIT_BYTES = 1 << 30  # a protobuf holds less than 2 GiB
FILE_LIMIT_BYTES = (1 << 63) - 1  # offsets are signed 64-bit

# First opset that has each operator the families use in a form newer than `_OLDEST`.
_OLDEST = 18
_SINCE = {
    "LinearAttention": 27,
    "Attention": 23,
    "RMSNormalization": 23,
    "RotaryEmbedding": 23,
    "GroupNormalization": 21,
    "Gelu": 20,
    "Resize": 19,
}
_IR_VERSION = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 27: 13}

Dim = int | str


class Net:
    """A graph under construction.

    Args:
        name: name of the ONNX graph. batch: the global batch; None leaves dim 0 of the inputs the
        symbol "batch". default_batch: what a reader should take for the symbol when the user says
        nothing (metadata "default_batch"). inline: write seeded weight values into the model
        instead of references. seed: seed of those values.
    """

    def __init__(
        self,
        name: str,
        *,
        batch: int | None = None,
        default_batch: int = 1,
        inline: bool = False,
        seed: int = 0,
    ) -> None:
        import onnx

        self._onnx = onnx
        self.name, self.inline, self.seed = name, inline, seed
        self.batch: Dim = "batch" if batch is None else batch
        self.default_batch = default_batch if batch is None else batch
        self._model = onnx.ModelProto(producer_name="meshwright-zoo")
        self._graph = self._model.graph
        self._graph.name = name
        self._opset = _OLDEST
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._weights_bytes = 0
        self.notes: list[str] = []
        self.left_out: list[str] = []

    @property
    def root(self) -> Scope:
        """The scope with no path."""
        return Scope(self, "")

    def fix_batch(self) -> int:
        """Make the batch the default one where the graph cannot keep a symbol (products of dims);
        returns it."""
        self.batch = self.default_batch
        return self.default_batch

    def input(self, name: str, shape: Sequence[Dim], dtype: str = "float32") -> str:
        """Declare a graph input; `dtype` is a numpy name."""
        self._graph.input.append(self._value_info(name, shape, dtype))
        return name

    def output(self, name: str, shape: Sequence[Dim], dtype: str = "float32") -> None:
        """Declare a graph output; some node must already write the tensor `name`."""
        self._graph.output.append(self._value_info(name, shape, dtype))

    def declare(self, name: str, shape: Sequence[Dim], dtype: str = "float32") -> str:
        """Write the shape of a tensor whose operator has no shape inference in onnx; returns the
        name."""
        self._graph.value_info.append(self._value_info(name, shape, dtype))
        return name

    def _value_info(self, name: str, shape: Sequence[Dim], dtype: str) -> onnx.ValueInfoProto:
        elem = self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._onnx.helper.make_tensor_value_info(name, elem, list(shape))

    def constant(self, value: np.ndarray) -> str:
        """An inline constant, one per distinct value."""
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = f"const_{len(self._constants)}"
            self._graph.initializer.append(
                self._onnx.numpy_helper.from_array(value, self._constants[key])
            )
        return self._constants[key]

    def weight(self, name: str, shape: Sequence[int], std: float, mean: float) -> str:
        """A float32 weight, by reference or seeded. Raises PlanError when it passes what a file or
        a protobuf holds."""
        size_bytes = 4 * math.prod(shape)
        limit, what = (
            (INLINE_LIMIT_BYTES, "inline weights")
            if self.inline
            else (FILE_LIMIT_BYTES, "the weight file")
        )
        if self._weights_bytes + size_bytes > limit:
            detail = [f"at {name} {list(shape)}, after {self._weights_bytes} bytes"]
            raise PlanError(
                "P072",
                f"{self.name}: {what} would pass {limit} bytes",
                detail=detail,
                help=["smaller sizes or fewer layers"],
            )
        tensor = self._graph.initializer.add(
            name=name, data_type=self._onnx.TensorProto.FLOAT, dims=shape
        )
        if self.inline:
            draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).standard_normal(
                tuple(shape), dtype=np.float32
            )
            tensor.raw_data = (draw * np.float32(std) + np.float32(mean)).astype("<f4").tobytes()
        else:
            tensor.data_location = self._onnx.TensorProto.EXTERNAL
            for key, entry in (
                ("location", WEIGHTS_FILE),
                ("offset", self._weights_bytes),
                ("length", size_bytes),
            ):
                tensor.external_data.add(key=key, value=str(entry))
        self._weights_bytes += size_bytes
        return name

    def node(
        self,
        path: str,
        op: str,
        inputs: Sequence[str],
        outputs: int,
        out: str,
        attrs: dict[str, Any],
        last: str = "",
    ) -> tuple[str, ...]:
        """Append a node and return its output names. out: the name of its one output; last: of the
        last of several."""
        base = f"{path}/{op}" if path else f"/{op}"
        seen = self._used.get(base, 0)
        self._used[base] = seen + 1
        name = f"{base}_{seen}" if seen else base
        names = (out,) if out else tuple(f"{name}_output_{i}" for i in range(outputs))
        names = (*names[:-1], last) if last else names
        self._graph.node.append(
            self._onnx.helper.make_node(op, list(inputs), list(names), name, **attrs)
        )
        self._opset = max(self._opset, _SINCE.get(op, _OLDEST))
        return names

    def model(self) -> onnx.ModelProto:
        """The finished model, at the lowest opset its operators allow (18 to 27)."""
        self._model.ir_version = _IR_VERSION[self._opset]
        self._model.opset_import.add(domain="", version=self._opset)
        metadata = {"notes": "\n".join(self.notes), "left_out": "\n".join(self.left_out)}
        properties = {"default_batch": str(self.default_batch)} | {
            k: v for k, v in metadata.items() if v
        }
        self._onnx.helper.set_model_props(self._model, properties)
        return self._model


@dataclass(frozen=True, slots=True)
class Scope:
    """A module path of a `Net`. `path` is "" or "/model/layers.3"."""

    net: Net
    path: str

    def at(self, name: str) -> Scope:
        """The sub-module `name`, e.g. "layers.3"."""
        return Scope(self.net, f"{self.path}/{name}")

    def op(self, op: str, *inputs: str, out: str = "", **attrs: Any) -> str:
        """A node with one output; `out` names it (for graph outputs). An absent optional input is
        ""."""
        return self.net.node(self.path, op, inputs, 1, out, attrs)[0]

    def ops(
        self, outputs: int, op: str, *inputs: str, last: str = "", **attrs: Any
    ) -> tuple[str, ...]:
        """A node with several outputs; `last` names the last of them."""
        return self.net.node(self.path, op, inputs, outputs, "", attrs, last)

    def weight(self, suffix: str, *shape: int, std: float, mean: float = 0.0) -> str:
        """A weight named after this scope."""
        return self.net.weight(f"{self.path}/{suffix}"[1:].replace("/", "."), shape, std, mean)

    def ints(self, *values: int) -> str:
        """An int64 constant of rank 1."""
        return self.net.constant(np.array(values, dtype=np.int64))

    def i64(self, value: int) -> str:
        """An int64 scalar."""
        return self.net.constant(np.array(value, dtype=np.int64))

    def f32(self, value: float) -> str:
        """A float32 scalar."""
        return self.net.constant(np.array(value, dtype=np.float32))
