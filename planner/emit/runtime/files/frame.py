"""Mesh, weights, batches and the command line: the same for every program."""

from __future__ import annotations

import argparse
import functools
import json
import os
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from planner.emit.runtime.files.tables import (
    COMPUTE,
    EXTERNAL,
    GPU_MEMORY,
    INPUTS,
    LABELS,
    MESH,
    MODEL_FOLDER,
    STATE,
)


@functools.cache
def make_mesh():
    """The planned mesh; refuses another number of devices."""
    need, have = int(np.prod(list(MESH.values()), dtype=int)), len(jax.devices())
    if have != need:
        raise SystemExit(
            f"this program is planned for {need} devices and finds {have}: plan again with"
            f" --devices {have}, or --virtual-devices {need}"
        )
    return mesh_of(jax.devices())


def mesh_of(devices):
    """The planned mesh of these devices."""
    places = np.empty(len(devices), object)
    places[:] = by_links(devices)
    shape = tuple(MESH.values())
    return Mesh(places.reshape(shape), tuple(MESH), axis_types=(AxisType.Auto,) * len(shape))


def by_links(devices):
    """Devices as the plan numbers them, so that its inner axes lie on inner links: cores of a chip,
    chips along each dim of a torus, the shortest first, then slices (of GPUs what NVLink joins)."""
    where = [d.coords if d.platform == "tpu" else () for d in devices]
    extents = [len(set(along)) for along in zip(*where, strict=True)]
    dims = sorted(range(len(extents)), key=lambda k: -extents[k])  # of equal ones any

    def where_is(i):
        d = devices[i]
        core = d.core_on_chip if d.platform == "tpu" else 0
        return getattr(d, "slice_index", 0), *(where[i][k] for k in dims), core, d.id

    return [devices[i] for i in sorted(range(len(devices)), key=where_is)]


def read_safetensors(path, prefix=""):
    """name -> array, memory-mapped, of the names that begin with `prefix`, which is left out.
    Leaves with a line on a file that is none, or not whole."""
    kinds = {
        "F64": "f8",
        "F32": "f4",
        "F16": "f2",
        "BF16": jnp.bfloat16,
        "I64": "i8",
        "I32": "i4",
        "I16": "i2",
        "I8": "i1",
        "U8": "u1",
        "BOOL": "?",
    }
    arrays = {}
    try:
        if not path.is_file():  # a pipe would never end
            raise ValueError("no plain file")
        raw = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(raw[:8].tobytes(), "little")
        if size > len(raw) - 8:
            raise ValueError(
                f"its first 8 bytes say that {size} bytes of header follow, and"
                f" {max(len(raw) - 8, 0)} do"
            )
        for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name != "__metadata__" and name.startswith(prefix):
                (low, high), shape, kind = (
                    entry["data_offsets"],
                    tuple(entry["shape"]),
                    np.dtype(kinds[entry["dtype"]]),
                )
                if not 0 <= low <= high <= len(raw) - 8 - size:
                    raise ValueError(
                        f"{name!r} ends {8 + size + high - len(raw)} bytes behind the end of the"
                        " file"
                    )
                arrays[name.removeprefix(prefix)] = (
                    raw[8 + size + low : 8 + size + high].view(kind).reshape(shape)
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise SystemExit(
            f"{path} cannot be read as .safetensors:"
            f" {type(e).__name__ + ': ' if type(e) is not ValueError else ''}{e}"
        ) from None
    return arrays


def read_external(folder):
    """name -> array, memory-mapped from the model's own data files, which must lie inside `folder`;
    files that are missing are left out."""
    arrays, home = {}, folder.resolve()
    for key, (file, dtype, offsets, shape, steps) in EXTERNAL.items():
        path = (home / file).resolve()
        if not path.is_relative_to(home):
            raise SystemExit(f"{file!r} leads out of {home}")
        if not path.exists():
            continue
        for i, offset in enumerate(offsets):
            name = key.replace("*", str(i)) if len(offsets) > 1 else key
            if (
                path.stat().st_size
                < offset + int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
            ):
                raise SystemExit(f"{path} is too short for {name!r}")
            array = (
                np.memmap(path, dtype, "r", offset, shape)
                if np.prod(shape)
                else np.zeros(shape, dtype)
            )
            for kind, argument in steps:
                array = array.reshape(argument) if kind == "reshape" else array.transpose(argument)
            arrays[name] = array
    return arrays


def labels_of(key, row):
    """Names in the weights file of a parameter: one, or one per repeat of a stacked block."""
    return LABELS.get(key) or (
        tuple(key.replace("*", str(i)) for i in range(row[2])) if row[2] else (key,)
    )


def repeat_dims(row):
    """How many first dims of a parameter count its repeats: none, one, or with several virtual
    stages two."""
    shape, _, repeats, *_ = row
    return (1 if shape[0] == repeats else 2) if repeats else 0


def initial_value(key, row, seed, weights):
    """A parameter's stored value, else seeded normal (norm scales around one), drawn by its names:
    the same under every plan. Floats as float32."""
    shape, dtype, repeats, mean, _ = row
    names = labels_of(key, row)
    if all(name in weights for name in names):
        parts = [weights[name] for name in names]
        wrong = next(
            (i for i, part in enumerate(parts) if part.shape != shape[repeat_dims(row) :]), None
        )
        if wrong is not None:
            raise SystemExit(
                f"the stored weights are of another model: {names[wrong]!r} is {parts[wrong].shape}"
                f" in them, here {shape[repeat_dims(row) :]}"
            )
    elif dtype == "float":
        parts = [
            mean
            + 0.02
            * np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
                shape[repeat_dims(row) :], np.float32
            )
            for name in names
        ]
    else:
        return np.zeros(shape, dtype)
    return (np.stack(parts).reshape(shape) if repeats else parts[0]).astype(
        np.float32 if dtype == "float" else dtype
    )


def initial_values(table, seed, weights):
    """Values of every parameter of a table."""
    return {key: initial_value(key, row, seed, weights) for key, row in table.items()}


def place(values, specs, mesh):
    """Arrays on the mesh under their PartitionSpecs, padded up to what their shards need; each
    process gives its devices' pieces."""
    arrays = {}
    for key, value in values.items():
        full = padded_shape(value.shape, specs[key])
        value = (
            np.pad(value, [(0, f - n) for f, n in zip(full, value.shape, strict=True)])
            if full != value.shape
            else value
        )
        arrays[key] = jax.make_array_from_callback(
            full,
            NamedSharding(mesh, specs[key]),
            functools.partial(np.ndarray.__getitem__, np.asarray(value)),
        )
    return arrays


def padded_shape(shape, spec):
    """The shape rounded up to multiples of its shards."""
    cells = [
        c if isinstance(c, tuple) else (c,) if c else ()
        for c in (*spec, *[None] * (len(shape) - len(spec)))
    ]
    counts = [int(np.prod([MESH[a] for a in c], dtype=int)) for c in cells]
    return tuple(-(-n // k) * k for n, k in zip(shape, counts, strict=True))


def specs_of(table):
    """name -> PartitionSpec of a table."""
    return {key: row[-1] for key, row in table.items()}


def apart(results, carried):
    """What a block hands on to the next, and what it hands out of the program."""
    return results[0] if carried == 1 else results[:carried], results[carried:]


def has_masters():
    """Whether the optimizer keeps a copy of parameters in a longer type than theirs."""
    return jnp.dtype(STATE).itemsize > jnp.dtype(COMPUTE).itemsize


def computed(values):
    """Floats in the type the program computes in."""
    return {
        key: v.astype(COMPUTE) if np.issubdtype(v.dtype, np.floating) else v
        for key, v in values.items()
    }


def synthetic_batch(seed):
    """Seeded data of the right shapes: integers below their tables, floats normal, masks all
    true."""
    rng, arrays = np.random.default_rng(seed), {}
    for key, (shape, dtype, high, _) in INPUTS.items():
        if high:
            arrays[key] = rng.integers(0, high, shape).astype(dtype)
        elif dtype == "float":
            arrays[key] = rng.standard_normal(shape, np.float32)
        else:
            arrays[key] = np.ones(shape, dtype)
    return arrays


def at_least(least):
    """A reader of options' values: whole numbers of at least so much."""

    def whole_number(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return whole_number


# Long: one statement per option of the command line.
def command_line(more=()):
    """Options, `more` of them as (name, add_argument's keywords); sets up the devices, and joins
    the other processes, before jax first looks for devices."""
    global COMPUTE, STATE
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument(
        "--virtual-devices",
        type=int,
        metavar="N",
        help="run on N virtual CPU devices, of this process",
    )
    parser.add_argument("--float32", action="store_true", help="compute in float32 throughout")
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        help="of the data, and of weights that are stored nowhere",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default=Path(__file__).with_suffix(".safetensors"),
        help="parameters by name, default beside this program",
    )
    parser.add_argument(
        "--model-folder",
        type=Path,
        default=Path(__file__).parent / MODEL_FOLDER,
        help="where the model's own data files lie",
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=(
            "of process 0, where several processes run this program together; auto: as the cluster"
            " says"
        ),
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="with --coordinator: how many there are"
    )
    parser.add_argument(
        "--process", type=int, metavar="I", help="with --coordinator: which of them this is, from 0"
    )
    for name, keywords in more:
        parser.add_argument(name, **keywords)
    args = parser.parse_args()
    if args.virtual_devices:
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={args.virtual_devices} "
            + os.environ.get("XLA_FLAGS", "")
        )
        # Threads of XLA: a device runs independent collectives at once, each holding a thread; with
        # hardly more threads than devices they wait for ever.
        os.environ.setdefault("NPROC", str(min(32 * args.virtual_devices, 2048)))
        jax.config.update("jax_platforms", "cpu")
    elif (
        GPU_MEMORY
        and not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys()
    ):  # JAX refuses both at once
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_MEMORY)
    if args.coordinator:
        # One that fails waits for the others when it leaves: not for long, so that whoever started
        # it hears of it.
        cluster = (
            {}
            if args.coordinator == "auto"
            else {
                "coordinator_address": args.coordinator,
                "num_processes": args.processes,
                "process_id": args.process,
            }
        )
        jax.distributed.initialize(**cluster, shutdown_timeout_seconds=30)
    if args.float32:
        COMPUTE = STATE = jnp.float32
    if jnp.dtype(COMPUTE) == jnp.float32:
        # By default GPUs multiply float32 as TF32, and TPUs in one pass of bfloat16.
        jax.config.update("jax_default_matmul_precision", "highest")
    return args


def say(text):
    """Print, by the first process alone."""
    if jax.process_index() == 0:
        print(text, flush=True)


def stored_weights(args, *tables):
    """name -> array of everything stored for the parameters; says how much there is."""
    weights = read_external(args.model_folder)
    if args.weights.exists():
        weights |= read_safetensors(args.weights)
    elif args.weights != Path(__file__).with_suffix(".safetensors"):
        raise SystemExit(f"--weights {args.weights}: there is no such file")
    names = [name for table in tables for key, row in table.items() for name in labels_of(key, row)]
    stored = sum(name in weights for name in names)
    rest = "" if stored == len(names) else f", {len(names) - stored} seeded normal"
    mesh = ", ".join(f"{axis}={size}" for axis, size in MESH.items()) or "one device"
    say(
        f"mesh {mesh} on {jax.default_backend()}, {np.dtype(COMPUTE).name}; parameters: {stored} of"
        f" {len(names)} stored{rest}"
    )
    return weights
