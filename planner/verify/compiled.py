"""An emitted program compiled from its shapes alone: nothing is allocated or run. Needs jax and as
many (virtual) devices as the plan's mesh, or an abstract mesh to lower for.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from planner.emit.writer import Program, Workload
from planner.verify.numerics import load_program


def compile_step(program: Program, workload: Workload) -> Any:
    """The compiled training step (or forward pass) of a program, from shapes alone."""
    return compile_module(load_program(program), workload)


def compile_module(module: types.ModuleType, workload: Workload) -> Any:
    """The compiled step of a program that was loaded, as `compile_step`, with the constants it has
    by now."""
    return lowered(module, workload, module.make_mesh()).compile()


def lowered(module: types.ModuleType, workload: Workload, mesh: Any) -> Any:
    """A loaded program's training step (or forward pass), lowered from shapes alone."""
    import jax

    params, frozen, batch = (shapes(module, name, mesh) for name in ("PARAMS", "FROZEN", "INPUTS"))
    if workload == "infer":
        return module.make_inference(mesh).lower(params, frozen, batch)
    masters = {key: jax.ShapeDtypeStruct(p.shape, "float32") for key, p in params.items()}
    return module.make_step(mesh).lower(
        params,
        state_shapes(module, masters, mesh),
        frozen,
        batch,
        jax.ShapeDtypeStruct((), "float32"),
    )


def state_shapes(module: types.ModuleType, masters: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """name -> abstract arrays of the optimizer's state, as its shards are padded. masters: the
    parameters it starts from."""
    import jax

    state = {}
    for key, arrays in jax.eval_shape(module.start_state, masters).items():
        spec = module.GRADIENTS[key][-1]
        sharding = module.state_at(mesh, spec)
        state[key] = jax.tree.map(
            lambda s, spec=spec, sharding=sharding: jax.ShapeDtypeStruct(
                module.padded_shape(s.shape, spec), s.dtype, sharding=sharding
            ),
            arrays,
        )
    if hasattr(module, "SCALE"):  # of programs that scale their loss
        state[module.SCALE] = (jax.ShapeDtypeStruct((), "float32"),) * 3
    return state


def shapes(module: types.ModuleType, table: str, mesh: Any) -> dict[str, Any]:
    """name -> abstract array of one of a program's tables, as its shards are padded."""
    import jax

    arrays = {}
    for key, row in getattr(module, table).items():
        dtype = module.COMPUTE if row[1] == "float" else row[1]
        if table in ("CACHE", "BEFORE", "STATES"):
            dtype = module.kept_type(key)
        elif key in getattr(module, "QUANTIZED", ()):
            dtype = module.WEIGHT_TYPE
        sharding = (
            module.parameter_at(mesh, key, row[-1])
            if hasattr(module, "parameter_at")
            else jax.sharding.NamedSharding(mesh, row[-1])
        )
        arrays[key] = jax.ShapeDtypeStruct(
            module.padded_shape(row[0], row[-1]), dtype, sharding=sharding
        )
    return arrays
