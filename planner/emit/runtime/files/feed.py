"""Batches of training: seeded, from shards on disk, or from a dataset of one's own. Which samples a
step reads follows from its number, so that nothing is kept to resume."""

from __future__ import annotations

import functools
import math
import runpy
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from planner.emit.runtime.files.frame import (
    computed,
    padded_shape,
    place,
    read_safetensors,
    specs_of,
    synthetic_batch,
)
from planner.emit.runtime.files.tables import BATCH, COMPUTE, INPUTS, MICROBATCHES


def open_data(where):
    """(number of samples, number -> {input: array}, whether to shuffle) of --data, None without; a
    sample of a shard is read when it is looked at."""
    if not where:
        return None
    file, _, function = where.rpartition(":")
    if file.endswith(".py"):
        rows = runpy.run_path(file)[function]()
        count, fetch, shuffle = len(rows), rows.__getitem__, False
    else:
        shards = [
            read_safetensors(path) for path in sorted(Path(where).glob("*.safetensors"))
        ] or numpy_shards(Path(where))
        ends = list(accumulate(len(next(iter(shard.values()))) for shard in shards))

        count, fetch, shuffle = (
            ends[-1] if ends else 0,
            functools.partial(sample_of, shards, ends),
            True,
        )
    if count < BATCH:
        raise SystemExit(f"{where} has {count} samples, a step reads {BATCH}")
    sample = functools.lru_cache(2 * BATCH)(fetch)
    first = sample(0)
    for key, (shape, *_) in INPUTS.items():
        lead = leading(shape)
        if lead and (key not in first or np.shape(first[key]) != shape[lead:]):
            has = (
                f"of shape {np.shape(first[key])}"
                if key in first
                else f"not among {', '.join(first)}"
            )
            raise SystemExit(
                f"a sample of {where} needs {key!r} of shape {shape[lead:]}; it is {has}"
            )
    return count, sample, shuffle


def sample_of(shards, ends, number):
    """input -> array of a sample; from the end, where an array is counted from the start of the
    next shard."""
    shard = bisect_right(ends, number)
    return {key: array[number - ends[shard]] for key, array in shards[shard].items()}


def numpy_shards(folder):
    """Shards of a folder with INPUT.npy, or INPUT-0.npy, INPUT-1.npy and so on, memory-mapped."""
    files = {
        key: [
            p
            for p in sorted(folder.glob("*.npy"))
            if p.stem == key or (p.stem.startswith(f"{key}-") and p.stem[len(key) + 1 :].isdigit())
        ]
        for key in INPUTS
    }
    if len({len(paths) for paths in files.values() if paths}) > 1:
        raise SystemExit(
            f"{folder}: inputs have different numbers of files:"
            f" {', '.join(f'{key} {len(own)}' for key, own in files.items())}"
        )
    arrays = {
        key: [np.load(p, mmap_mode="r") for p in paths] for key, paths in files.items() if paths
    }
    return [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]


def leading(shape):
    """How many first dims of an input count samples: 2 where there are microbatches, 0 where its
    dims count something else (positions, a mask)."""
    dims = 2 if MICROBATCHES > 1 else 1
    return dims if BATCH and math.prod(shape[:dims]) == BATCH else 0


@functools.lru_cache(2)
def shuffled(count, seed, epoch):
    """The order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def sample_numbers(data, step, seed):
    """Numbers of the samples of a step: an epoch leaves out what does not fill a batch."""
    count, _, shuffle = data
    if not shuffle:
        return [(step * BATCH + j) % count for j in range(BATCH)]
    epoch, batch = divmod(step, count // BATCH)
    return shuffled(count, seed, epoch)[batch * BATCH : (batch + 1) * BATCH].tolist()


def sample_places(numbers, shape):
    """Numbers of samples by their places in the batch, in order."""
    return np.reshape(numbers, shape)


def next_batch(data, step, seed, mesh):
    """The batch of a step on the mesh. A process reads the samples, and of these the part, that its
    own devices hold."""
    fresh = computed(synthetic_batch(seed + step))
    if data is None:
        return place(fresh, specs_of(INPUTS), mesh)
    numbers, sample = sample_numbers(data, step, seed), data[1]
    arrays: dict = {}
    for key, (shape, dtype, limit, spec) in INPUTS.items():
        lead, full = leading(shape), padded_shape(shape, spec)
        known = sample(numbers[0])
        if not lead:
            arrays |= place(
                {
                    key: (
                        np.reshape(known[key], shape).astype(fresh[key].dtype)
                        if key in known
                        else fresh[key]
                    )
                },
                {key: spec},
                mesh,
            )
            continue

        def piece(index, key=key, shape=shape, lead=lead, full=full, dtype=dtype, limit=limit):
            rows = sample_places(numbers, shape[:lead])[index[:lead]]
            value = (
                np.stack([np.asarray(sample(n)[key][index[lead:]]) for n in rows.ravel().tolist()])
                if rows.size
                else np.zeros((0, *shape[lead:]))
            )
            if limit and value.size and value.max() >= limit:
                raise SystemExit(
                    f"{key!r} has {value.max()}: the model's table ends at {limit - 1}"
                )
            value = value.reshape(*rows.shape, *value.shape[1:]).astype(
                COMPUTE if dtype == "float" else dtype
            )
            sizes = [len(range(*s.indices(n))) for s, n in zip(index, full, strict=True)]
            return np.pad(
                value, [(0, size - n) for size, n in zip(sizes, value.shape, strict=True)]
            )

        arrays[key] = jax.make_array_from_callback(full, NamedSharding(mesh, spec), piece)
    return arrays
