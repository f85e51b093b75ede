"""Weights of uneven pipeline stages, which lie in flat buffers. These functions take the place of
those of their names in other files."""

from __future__ import annotations

import math
import zlib

import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.emit.runtime.files.checkpoint import wholes, write_named
from planner.emit.runtime.files.frame import labels_of
from planner.emit.runtime.files.tables import (
    GRADIENTS,
    MESH,
    NO_DECAY,
    PARAMS,
    PATHS,
    STAGE_BUFFERS,
)


def places_of(key, row):
    """(label, place in the buffer, shape of a device's piece, place in the weight) of every
    device's piece of every weight in a buffer, padding of the weight left out."""
    axes = tuple(row[-1])[1 : len(row[0]) - 1]
    for label, (virtual, first, piece, whole, _, spec) in zip(
        labels_of(key, row), STAGE_BUFFERS[key], strict=True
    ):
        cells = [
            c if isinstance(c, tuple) else (c,) if c else ()
            for c in (*spec, *[None] * (len(whole) - len(spec)))
        ]
        for index in np.ndindex(*(MESH[a] for a in axes)):
            where, starts = dict(zip(axes, index, strict=True)), []
            for cell, size in zip(cells, piece, strict=True):
                place = 0
                for a in cell:
                    place = place * MESH[a] + where[a]
                starts.append(place * size)
            inside = tuple(
                slice(s, max(s, min(s + n, end)))
                for s, n, end in zip(starts, piece, whole, strict=True)
            )
            for at in sorted({path[virtual % len(path)] for path in PATHS}):
                yield (
                    label,
                    (at, *index, slice(first, first + int(np.prod(piece, dtype=int)))),
                    piece,
                    inside,
                )


def packed(key, row, values):
    """A buffer from its weights by label, in the type of the first."""
    buffer = np.zeros(row[0], next(iter(values.values())).dtype)
    for label, where, piece, inside in places_of(key, row):
        part = values[label][inside]
        buffer[where] = np.pad(
            part, [(0, n - m) for n, m in zip(piece, part.shape, strict=True)]
        ).ravel()
    return buffer


def unpacked(key, row, buffer):
    """label -> weight of what is in a buffer (of parameters, gradients or moments)."""
    weights = {
        label: np.zeros(whole, buffer.dtype)
        for label, (_, _, _, whole, *_) in zip(labels_of(key, row), STAGE_BUFFERS[key], strict=True)
    }
    for label, where, piece, inside in places_of(key, row):
        weights[label][inside] = buffer[where].reshape(piece)[
            tuple(slice(0, s.stop - s.start) for s in inside)
        ]
    return weights


def packing():
    """Buffer -> of each weight in it the places along axis "stage" that have it, its first element
    there, and the shape of a device's piece."""
    return {
        key: [
            [sorted({path[virtual % len(path)] for path in PATHS}), first, list(piece)]
            for virtual, first, piece, *_ in STAGE_BUFFERS[key]
        ]
        for key in PARAMS
    }


def copies(key):
    """How many devices have the same piece of a buffer's gradient: those that differ over no axis
    of it, at every place that takes this device's stage."""
    cut = [cell if isinstance(cell, tuple) else (cell,) for cell in GRADIENTS[key][-1]]
    alike = math.prod(n for axis, n in MESH.items() if not any(axis in axes for axes in cut))
    stage_at = {place: k for path in PATHS for k, place in enumerate(path)}
    places = [list(stage_at.values()).count(stage_at[place]) for place in range(MESH["stage"])]
    return alike * jnp.array(places)[lax.axis_index("stage")]


def decays(key):
    """Of each element of a device's piece of a buffer: whether weight decay moves it. Those that it
    does not are between the edges, the first and the second, the third and the fourth."""
    axes, length = GRADIENTS[key][2], PARAMS[key][0][-1]
    edges: list = [[] for _ in range(MESH["stage"])]
    for label, (virtual, first, piece, *_) in zip(
        labels_of(key, PARAMS[key]), STAGE_BUFFERS[key], strict=True
    ):
        for place in {path[virtual % len(path)] for path in PATHS}:
            edges[place] += [first, first + math.prod(piece)] if label in NO_DECAY else []
    longest = max(map(len, edges))
    table = jnp.array([row + [length] * (longest - len(row)) for row in edges], int)
    size = length // math.prod(MESH[a] for a in axes)
    element = (lax.axis_index(axes) * size if axes else 0) + jnp.arange(size)
    return (element >= table[lax.axis_index("stage")][:, None]).sum(0) % 2 == 0


def initial_value(key, row, seed, weights):
    """A buffer of stored values, else seeded normal (norm scales around one), drawn by their names:
    the same under every plan. Floats as float32."""
    values, dtype = {}, np.float32 if row[1] == "float" else row[1]
    for label, (_, _, _, whole, mean, _) in zip(
        labels_of(key, row), STAGE_BUFFERS[key], strict=True
    ):
        if label in weights:
            values[label] = np.asarray(weights[label]).astype(dtype)
        elif row[1] == "float":
            values[label] = mean + np.float32(0.02) * np.random.default_rng(
                [seed, zlib.crc32(label.encode())]
            ).standard_normal(whole, np.float32)
        else:
            values[label] = np.zeros(whole, dtype)
    return packed(key, row, values)


def export(path, params, state):
    """Parameters in float32 by their names in the model, as .safetensors: what --weights reads."""
    shapes = {
        label: place[3]
        for key, row in PARAMS.items()
        for label, place in zip(labels_of(key, row), STAGE_BUFFERS[key], strict=True)
    }
    write_named(
        path,
        shapes,
        (unpacked(key, PARAMS[key], whole).values() for key, whole in wholes(params, state)),
    )
