"""Weights of uneven pipeline stages, which lie in flat buffers. These functions take the place of
those of their names in other files."""

from __future__ import annotations

import zlib

import numpy as np

from planner.emit.runtime.files.checkpoint import wholes, write_named
from planner.emit.runtime.files.frame import labels_of
from planner.emit.runtime.files.tables import MESH, PARAMS, PATHS, STAGE_BUFFERS


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
    out = np.zeros(row[0], next(iter(values.values())).dtype)
    for label, where, piece, inside in places_of(key, row):
        part = values[label][inside]
        out[where] = np.pad(
            part, [(0, n - m) for n, m in zip(piece, part.shape, strict=True)]
        ).ravel()
    return out


def unpacked(key, row, buffer):
    """label -> weight of what is in a buffer (of parameters, gradients or moments)."""
    out = {
        label: np.zeros(whole, buffer.dtype)
        for label, (_, _, _, whole, *_) in zip(labels_of(key, row), STAGE_BUFFERS[key], strict=True)
    }
    for label, where, piece, inside in places_of(key, row):
        out[label][inside] = buffer[where].reshape(piece)[
            tuple(slice(0, s.stop - s.start) for s in inside)
        ]
    return out


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
