"""What a training program with tables on hosts or servers does when it is run."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from planner.emit.runtime.files.feed import next_batch, open_data
from planner.emit.runtime.files.frame import (
    command_line,
    computed,
    initial_values,
    labels_of,
    make_mesh,
    place,
    say,
    specs_of,
    stored_weights,
)
from planner.emit.runtime.files.host_tables import ids_of, open_tables, places_of, pull, push, serve
from planner.emit.runtime.files.settings import set_constants, setting_options
from planner.emit.runtime.files.start import begin, lost_at
from planner.emit.runtime.files.tables import FROZEN, HOST_TABLES, INPUTS, PARAMS
from planner.emit.runtime.step.one_step import step_text
from planner.emit.runtime.step.step_device import make_step

TABLE_OPTIONS = (
    (
        "--data",
        {
            "metavar": "WHERE",
            "help": (
                "folder with .safetensors or INPUT.npy shards, or FILE.py:function that returns a"
                " dataset; default: seeded random"
            ),
        },
    ),
    (
        "--tables",
        {
            "metavar": "HOST:PORT,...",
            "help": (
                "the servers of the tables, in the order of their parts; default: in this process,"
                " which must then be the only one"
            ),
        },
    ),
    (
        "--tables-timeout",
        {
            "type": float,
            "default": 600.0,
            "metavar": "S",
            "help": "seconds to wait for a server to come up, and for each answer (default 600)",
        },
    ),
    (
        "--serve",
        {"metavar": "I/N", "help": "be the server of part I of N of the tables, and nothing else"},
    ),
    (
        "--port",
        {
            "type": int,
            "default": 8477,
            "metavar": "PORT",
            "help": "with --serve: where (default 8477)",
        },
    ),
)


def main():
    """Train up to --steps steps, or serve."""
    args = command_line((*TABLE_OPTIONS, *setting_options()))
    set_constants(args)
    if args.serve:
        return serve(args, stored_weights(args, PARAMS, FROZEN))
    mesh = make_mesh()
    data = open_data(args.data)
    weights = stored_weights(args, PARAMS, FROZEN)
    frozen = place(computed(initial_values(FROZEN, args.seed, weights)), specs_of(FROZEN), mesh)
    tables = open_tables(args, weights)
    _, params, state = begin(
        args,
        weights
        | {
            name: np.zeros(PARAMS[key][0], np.float32)
            for key in HOST_TABLES
            for name in labels_of(key, PARAMS[key])
        },
        mesh,
    )
    step, lost = make_step(mesh), False
    for i in range(args.steps):
        rows, places = places_of(ids_of(data, i, args.seed))
        batch = next_batch(data, i, args.seed, mesh) | place(
            places, {key: INPUTS[key][-1] for key in places}, mesh
        )
        start = time.perf_counter()
        params, state = pull(tables, rows, params, state, mesh)
        pulled = time.perf_counter()
        params, state, *seen = step(params, state, frozen, batch, jnp.float32(i + 1))
        jax.block_until_ready(seen)
        ended = time.perf_counter()
        push(tables, rows, params, state)
        spent = [1e3 * t for t in (pulled - start, ended - pulled, time.perf_counter() - ended)]
        line = step_text(i, seen, sum(spent) / 1e3)
        say(f"{line}: pull {spent[0]:.1f}, step {spent[1]:.1f}, push {spent[2]:.1f}")
        lost = lost or lost_at(i, seen)


if __name__ == "__main__":
    main()
