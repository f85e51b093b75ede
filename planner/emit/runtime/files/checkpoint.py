"""Checkpoints: saved by orbax as they lie on the devices, read back as any program of the model
cuts, pads and stacks its parameters."""

from __future__ import annotations

import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from planner.emit.runtime.files.frame import has_masters, labels_of, padded_shape, repeat_dims, say
from planner.emit.runtime.files.tables import COMPUTE, GRADIENTS, PARAMS, STATE
from planner.emit.runtime.step.adamw import start_state
from planner.emit.runtime.step.one_step import noted, state_beside
from planner.emit.runtime.step.state_device import state_at

MOMENTS = ("mu", "nu")
"""What the moments of an optimizer's state are called, as optax does."""


def open_checkpoints(folder, keep):
    """Orbax's manager of a folder, None without one. A checkpoint is written aside, in the
    background, and gets its name when it is whole."""
    if not folder:
        return None
    try:
        import orbax.checkpoint as ocp
    except ImportError as e:
        raise SystemExit("--checkpoints needs orbax: pip install orbax-checkpoint") from e
    where = folder if "://" in folder else os.path.abspath(folder)
    return ocp.CheckpointManager(where, options=ocp.CheckpointManagerOptions(max_to_keep=keep))


def values_of(params, state):
    """parameter -> [value, moments...]: the value is the master copy where there is one."""
    master = has_masters()
    return {
        key: [state[key][-1], *state[key][:-1]] if master else [p, *state[key]]
        for key, p in params.items()
    }


def packing():
    """Where in buffers weights lie, in programs that have such."""
    return {}


def save(saved, done, params, state):
    """Every parameter after `done` steps in `params`, {name: float32 array}, its moments in
    `opt_state`, {mu: {name: array} ...}, as other tools read them; `about` has its names in the
    model and its shape without padding."""
    import orbax.checkpoint as ocp

    values = values_of(params, state)
    count = max(len(v) for v in values.values())
    about = {
        "values": count,
        "names": saved_names(PARAMS),
        "parameters": [
            [list(labels_of(key, row)), repeat_dims(row), row[0]] for key, row in PARAMS.items()
        ],
        "packed": packing(),
        **noted(state),
    }
    trees: dict = {}
    for k in range(count):
        item, inside = place_of(about, k)
        tree = {
            name: values[key][k]
            for name, key in zip(about["names"], PARAMS, strict=True)
            if k < len(values[key])
        }
        trees.setdefault(item, {}).update({inside: tree} if inside else tree)
    items = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items()}
    saved.save(done, args=ocp.args.Composite(about=ocp.args.JsonSave(about), **items))


def saved_names(keys):
    """What parameters are called in a checkpoint: as here, but for what is no name of a file."""
    return [
        key if re.fullmatch(r"\w[\w.*-]{0,199}", key, re.ASCII) else f"parameter+{i}"
        for i, key in enumerate(keys)
    ]


def place_of(about, k):
    """(item, key in it or "") that value k of every parameter is in; checkpoints of before have an
    item a value, without names."""
    if "names" not in about:
        return f"value{k}", ""
    return (
        ("opt_state", MOMENTS[k - 1] if k <= len(MOMENTS) else f"moment{k}")
        if k
        else ("params", "")
    )


def read_arrays(saved, done, about, k, ways):
    """number -> array of value k of the parameters with these numbers in a checkpoint. ways: number
    -> how it is restored."""
    import orbax.checkpoint as ocp

    names = {i: about["names"][i] if "names" in about else str(i) for i in ways}
    item, inside = place_of(about, k)
    want, how = dict.fromkeys(names.values(), 0), {names[i]: way for i, way in ways.items()}
    request = ocp.args.PyTreeRestore(
        {inside: want} if inside else want,
        restore_args={inside: how} if inside else how,
        partial_restore=True,
    )
    tree = saved.restore(done, args=ocp.args.Composite(**{item: request}))[item]
    tree = tree[inside] if inside else tree
    return {i: tree[name] for i, name in names.items()}


def restore(saved, mesh, asked=None):
    """(steps done, params, state) of the last checkpoint, or of that which is asked for, cut as
    this program cuts them; None where there is none.

    Nothing is passed over in silence: a checkpoint that cannot be read ends the program, which
    names the last whole one before it. To go on from an earlier one those behind it are renamed,
    not overwritten.
    """
    steps = sorted(saved.all_steps()) if saved else []
    if asked is not None and asked not in steps:
        there = (
            f"{saved.directory} has checkpoints {steps}" if saved else "it goes with --checkpoints"
        )
        raise SystemExit(f"--resume-from {asked}: {there}")
    if not steps:
        return None
    done = steps[-1] if asked is None else asked
    try:
        loaded = restored(saved, done, mesh)
    except Exception as e:  # whatever orbax and the storage below it make of a damaged file
        whole = next(
            (step for step in reversed(steps) if step < done and is_whole(saved, step, mesh)), None
        )
        offer = (
            "no checkpoint before it is whole"
            if whole is None
            else (
                f"--resume-from {whole} goes on from the last whole one, and renames those"
                " behind it"
            )
        )
        why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
        raise SystemExit(
            f"the checkpoint {saved.directory / str(done)} cannot be read: {offer}. Nothing was"
            f" changed. ({why})"
        ) from None
    for step in [step for step in steps if step > done]:
        set_aside(saved, step)
    return loaded


def is_whole(saved, step, mesh):
    """Whether a checkpoint can be read."""
    try:
        return bool(restored(saved, step, mesh))
    except Exception:
        return False


def set_aside(saved, step):
    """Rename a checkpoint to a name that is no number, so that its own is free and it is kept. The
    first process does it, the others wait."""
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        names = {path.name for path in saved.directory.iterdir()}
        aside = next(
            name
            for name in (f"aside-{step}" + f"-{k}" * bool(k) for k in range(len(names) + 1))
            if name not in names
        )
        (saved.directory / str(step)).rename(saved.directory / aside)
        say(f"{saved.directory / str(step)} is now {aside}")
    multihost_utils.sync_global_devices(f"set aside {step}")
    saved.reload()


def restored(saved, done, mesh):
    """(steps done, params, state) of a checkpoint."""
    import orbax.checkpoint as ocp

    about = saved.restore(done, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
    here = [(labels_of(key, row), repeat_dims(row), row[0]) for key, row in PARAMS.items()]
    there, own = (
        {tuple(names) for names, stacked, _ in rows if len(names) > 1 and not stacked}
        for rows in (about["parameters"], here)
    )
    if (
        there != own or about.get("packed", {}) != packing()
    ):  # several weights that are no repeats: a buffer of uneven stages
        raise SystemExit(
            f"the checkpoint of step {done} has weights in other buffers of pipeline stages than"
            " this program: --export where it was saved, --weights here"
        )
    master = has_masters()
    shapes = {key: jax.ShapeDtypeStruct(row[0], jnp.float32) for key, row in PARAMS.items()}
    kept = {key: len(row) - master for key, row in jax.eval_shape(start_state, shapes).items()}
    moments = max(kept.values())
    if moments != about["values"] - 1:
        raise SystemExit(
            f"the checkpoint of step {done} has {about['values'] - 1} moments a parameter, this"
            f" program's optimizer {moments}: it was saved by another"
        )
    params = read(saved, done, about, 0, PARAMS, COMPUTE, mesh)
    cuts = {key: state_at(mesh, row[-1]) for key, row in GRADIENTS.items()}
    rows = []
    for k in [*range(1, moments + 1), *([0] if master else [])]:
        table = {key: row for key, row in GRADIENTS.items() if k <= kept[key]}
        values = read(saved, done, about, k, table, STATE, mesh)
        rows.append(jax.device_put(values, {key: cuts[key] for key in values}))
    state = {key: tuple(row[key] for row in rows if key in row) for key in params}
    return done, params, state | state_beside(mesh, about)


def read(saved, done, about, k, table, dtype, mesh):
    """Value k of every parameter, cut as `table` says; repeated blocks that the program which saved
    them stacked otherwise are stacked anew."""
    import orbax.checkpoint as ocp

    rows = {key: PARAMS[key] for key in table}
    sources = {key: sources_of(key, done, about) for key in rows}
    same: dict = {}
    ways: dict = {}
    for key, row in rows.items():
        spec = tuple(table[key][-1])
        for i, _ in sources[key]:
            names, stacked, shape = about["parameters"][i]
            if (names, shape) == (list(labels_of(key, row)), list(row[0])):
                same[key] = i
            else:
                spec = (*[None] * stacked, *table[key][-1][repeat_dims(row) :])
            way = ocp.ArrayRestoreArgs(
                sharding=NamedSharding(mesh, P(*spec)),
                global_shape=padded_shape(shape, spec),
                dtype=dtype,
                strict=False,
            )
            ways.setdefault(i, way)
    arrays = read_arrays(saved, done, about, k, ways)
    values = {}
    for key, row in rows.items():
        if key in same:
            values[key] = arrays[same[key]]
            continue
        first = padded_shape(row[0], table[key][-1])[: repeat_dims(row)]
        places = tuple(place_in(about["parameters"][i], j) for i, j in sources[key])
        stack = jax.jit(
            restacked, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, table[key][-1])
        )
        values[key] = stack([arrays[i] for i, _ in sources[key]], places, first)
    return values


def sources_of(key, done, about):
    """Where a parameter, or each of its repeats, is in a checkpoint: (number of the saved array,
    place in its stack)."""
    row = PARAMS[key]
    where = {
        label: (i, j)
        for i, (names, _, _) in enumerate(about["parameters"])
        for j, label in enumerate(names)
    }
    for label in labels_of(key, row):
        here = list(row[0][repeat_dims(row) :])
        _, stacked, shape = (
            about["parameters"][where[label][0]] if label in where else (None, False, None)
        )
        if shape is None or shape[stacked:] != here:
            raise SystemExit(
                f"the checkpoint of step {done} is of another model: {label!r} is"
                f" {shape and shape[stacked:]} in it, here {here}"
            )
    return [where[label] for label in labels_of(key, row)]


def place_in(saved, j):
    """Index of the j-th repeat in a saved array; () of an array that is no stack."""
    _, stacked, shape = saved
    return tuple(int(n) for n in np.unravel_index(j, shape[:stacked])) if stacked else ()


def restacked(arrays, places, first):
    """Parameters of repeats, each at its place in an array, as one stack whose first dims are
    `first`, filled up to them; the only one where there are none."""
    parts = [a[place] for a, place in zip(arrays, places, strict=True)]
    if not first:
        return parts[0]
    stack = jnp.pad(
        jnp.stack(parts), [(0, int(np.prod(first)) - len(parts)), *[(0, 0)] * parts[0].ndim]
    )
    return stack.reshape(*first, *stack.shape[1:])


def export(path, params, state):
    """Parameters in float32 by their names in the model, without padding, as .safetensors: what
    --weights reads."""
    shapes = {
        label: row[0][repeat_dims(row) :]
        for key, row in PARAMS.items()
        for label in labels_of(key, row)
    }
    write_named(path, shapes, ([whole] for _, whole in wholes(params, state)))


def wholes(params, state):
    """(parameter, its value on every process, without padding), one after the other, in the order
    of PARAMS: what a compiled step returns is sorted by name."""
    from jax.experimental import multihost_utils

    values = values_of(params, state)
    for key, row in PARAMS.items():
        yield (
            key,
            np.asarray(multihost_utils.process_allgather(values[key][0], tiled=True))[
                tuple(slice(n) for n in row[0])
            ],
        )


def write_named(path, shapes, groups):
    """A .safetensors file of float32 arrays with names and shapes, in the order in which the groups
    of arrays come. Written aside by the first process, then named."""
    header, end = {}, 0
    for label, shape in shapes.items():
        header[label] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [end, end + 4 * int(np.prod(shape, dtype=int))],
        }
        end = header[label]["data_offsets"][1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}.part") if jax.process_index() == 0 else os.devnull
    with open(aside, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for arrays in groups:
            for array in arrays:
                file.write(np.ascontiguousarray(array, np.float32).tobytes())
    if jax.process_index() == 0:
        os.replace(aside, path)
