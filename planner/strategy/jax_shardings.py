"""A strategy as jax shardings: for `jax.device_put`, `in_shardings` of `jax.jit`, and restoring
checkpoints.

Any pytree will do: a flat dict by label, nested dicts, the state of an optimizer. The path to a
leaf ends in the name of its parameter ("layers.3.mlp.up.weight", whatever holds the tree comes
before); leaves of optimizer states that have no parameter's shape (step counters) are whole on
every device.

Arrays of jax are cut evenly. A dim that the plan pads is whole here, and so is, on every stage, a
weight that one pipeline stage alone holds: the emitted program keeps both in forms of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

from planner.errors import PlanError, did_you_mean


class Placed(Protocol):
    """What shardings need of a strategy."""

    @property
    def mesh_shape(self) -> tuple[tuple[str, int], ...]:
        """(axis, size) pairs, outermost first."""

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Any]]:
        """The file's table of tensors."""


def mesh_of(strategy: Placed) -> Any:
    """The jax.sharding.Mesh of a strategy; the compiler partitions along its axes. Raises PlanError
    P160 where there are too few devices."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    sizes = dict(strategy.mesh_shape)
    if len(jax.devices()) < prod(sizes.values()):
        raise PlanError(
            "P160",
            f"the plan is for {prod(sizes.values())} devices, jax has {len(jax.devices())}",
            help=["--xla_force_host_platform_device_count in XLA_FLAGS"],
        )
    places = np.empty(prod(sizes.values()), object)
    places[:] = by_links(jax.devices())[: len(places)]
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(places.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def by_links(devices: Sequence[Any]) -> list[Any]:
    """Devices in the order in which plans number them: as emitted programs have it
    (planner/emit/runtime/files/frame.py), so that the shardings are theirs. jax.make_mesh refuses
    meshes over several NVLink domains or slices.
    """
    where = [tuple(d.coords) if d.platform == "tpu" else () for d in devices]
    extents = [len(set(along)) for along in zip(*where, strict=True)]
    dims = sorted(range(len(extents)), key=lambda k: -extents[k])

    def place(i: int) -> tuple[int, ...]:
        core = devices[i].core_on_chip if devices[i].platform == "tpu" else 0
        joined = getattr(devices[i], "slice_index", 0)
        return (joined, *(where[i][k] for k in dims), core, devices[i].id)

    return [devices[i] for i in sorted(range(len(devices)), key=place)]


def shardings(
    strategy: Placed,
    tree: Any,
    *,
    optimizer: bool = False,
    rows: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """NamedSharding for every leaf of a pytree of parameters, or (optimizer) of an optimizer's
    state, in its structure.

    rows: parameter -> its row, where that is not the strategy's. The optimizer's state is cut
    from ZeRO stage 1 on, parameters themselves at ZeRO stage 3. Raises PlanError P052: no parameter
    of that name or shape.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, sizes = mesh_of(strategy), dict(strategy.mesh_shape)
    if rows is None:
        rows = {name: row for name, row in strategy.tensors.items() if row.get("label")}
        rows = {**rows, **{row["label"]: row for row in rows.values()}}
    known = rows

    def one(path: Any, leaf: Any) -> Any:
        words = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
        names = [".".join(words[i:]) for i in range(len(words))]
        row = next((known[n] for n in names if n in known), None)
        shape = tuple(leaf.shape) if hasattr(leaf, "shape") else None
        if row is None and optimizer and shape is not None and prod(shape) <= 1:
            return NamedSharding(mesh, PartitionSpec())
        if row is None or shape not in (None, tuple(row["shape"])):
            what = (
                f"no parameter named {names[0] if names else ''!r}"
                if row is None
                else f"{row['label']} has shape {tuple(row['shape'])}, not {shape}"
            )
            raise PlanError(
                "P052",
                what,
                help=[h for h in [did_you_mean(names[-1] if names else "", list(known))] if h],
            )
        return partition(mesh, row, sizes, optimizer)

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: x is None)


def partition(mesh: Any, row: Mapping[str, Any], sizes: Mapping[str, int], optimizer: bool) -> Any:
    """The NamedSharding of a row of a strategy's tensors."""
    from jax.sharding import NamedSharding, PartitionSpec

    return NamedSharding(
        mesh, PartitionSpec(*(_axes(axes) for axes in _dims(row, sizes, optimizer)))
    )


def _dims(
    row: Mapping[str, Any], sizes: Mapping[str, int], optimizer: bool
) -> list[tuple[str, ...]]:
    """Mesh axes per dim, as far as they divide it."""
    dims = [tuple(a) for a in row["layout"]]
    zero = row.get("zero")
    if zero and (zero["level"] == 3 or optimizer):
        dims[zero["dim"]] += tuple(a for a in zero["axes"] if a not in dims[zero["dim"]])
    return [
        axes if n % prod(sizes[a] for a in axes) == 0 else ()
        for n, axes in zip(row["shape"], dims, strict=True)
    ]


def _axes(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes
