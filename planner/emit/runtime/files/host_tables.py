"""Tables that lie on hosts: the rows that a batch reads are pulled into the program's pieces before
the step, with their moments, and pushed back after it.

A table is kept in parts, row r in part r % parts: in this process (one part), or in the processes
that run this program with --serve, one a part, to which --tables names the way. Messages are 8
bytes of length, a header in JSON, and arrays as they lie in memory; the port takes no password.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from planner.emit.runtime.files.checkpoint import values_of
from planner.emit.runtime.files.feed import sample_numbers
from planner.emit.runtime.files.frame import (
    computed,
    has_masters,
    labels_of,
    place,
    specs_of,
    synthetic_batch,
)
from planner.emit.runtime.files.tables import GRADIENTS, HOST_TABLES, INPUTS, PARAMS, STATE
from planner.emit.runtime.step.adamw import start_state

ROWS_AT_ONCE = 1 << 16
LONGEST_HEADER_BYTES = 1 << 12


def first_rows(key, seed, weights, part, parts):
    """Rows part, part + parts, ... of a table: stored, or drawn as a table on the devices is, a
    stretch of rows at a time."""
    (rows, _), (_, width), (name,) = HOST_TABLES[key], PARAMS[key][0], labels_of(key, PARAMS[key])
    if name in weights:
        return np.array(weights[name][part::parts], np.float32)
    rng, mean, values = (
        np.random.default_rng([seed, zlib.crc32(name.encode())]),
        PARAMS[key][3],
        np.empty((len(range(part, rows, parts)), width), np.float32),
    )
    for low in range(0, rows, ROWS_AT_ONCE):
        drawn = mean + 0.02 * rng.standard_normal(
            (min(ROWS_AT_ONCE, rows - low), width), np.float32
        )
        mine = drawn[(part - low) % parts :: parts]
        first = -(-(low - part) // parts) if low > part else 0
        values[first : first + len(mine)] = mine
    return values


def make_part(seed, weights, part, parts):
    """table -> [values, moments...] of the rows of a part."""
    masters = has_masters()
    moments = (
        len(jax.eval_shape(start_state, {"": jax.ShapeDtypeStruct((1,), jnp.float32)})[""])
        - masters
    )
    tables = {}
    for key in HOST_TABLES:
        value = first_rows(key, seed, weights, part, parts)
        tables[key] = [value, *(np.zeros_like(value) for _ in range(moments))]
    return tables


def read_part(arrays, rows):
    """[values and moments, rows, width] of rows of a part."""
    return np.stack([array[rows] for array in arrays])


def connect(address, timeout_s):
    """A connection to the server at HOST:PORT. One that has no name or does not answer yet is asked
    again: servers and workers start in any order."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except OSError as e:
            if time.monotonic() > until:
                raise SystemExit(
                    f"no server of tables at {address} within {timeout_s:g} s: {e}"
                ) from e
            time.sleep(0.2)


def open_tables(args, weights):
    """The parts: connections to the servers of --tables, or this process's own."""
    if args.tables:
        return [connect(address, args.tables_timeout) for address in args.tables.split(",")]
    if jax.process_count() > 1:
        raise SystemExit(
            "several processes share their tables through servers: --serve I/N on hosts that hold"
            " them, and --tables HOST:PORT,... here"
        )
    return [make_part(args.seed, weights, 0, 1)]


def read_rows(tables, key, numbers):
    """[values and moments, rows, width] of distinct rows of a table, asked of all parts before the
    first answer is awaited."""
    parts = len(tables)
    chosen = [numbers[numbers % parts == i] // parts for i in range(parts)]
    for table, rows in zip(tables, chosen, strict=True):
        if isinstance(table, socket.socket):
            send(table, {"do": "read", "table": key}, rows.astype("<i8").tobytes())
    answers = [
        (
            np.frombuffer(receive(table)[1], "<f4")
            if isinstance(table, socket.socket)
            else read_part(table[key], rows)
        )
        for table, rows in zip(tables, chosen, strict=True)
    ]
    answers = [
        a.reshape(-1, len(rows), PARAMS[key][0][1]) if len(rows) else None
        for a, rows in zip(answers, chosen, strict=True)
    ]
    out = np.empty(
        (next(len(a) for a in answers if a is not None), len(numbers), PARAMS[key][0][1]),
        np.float32,
    )
    for i, answer in enumerate(answers):
        if answer is not None:
            out[:, numbers % parts == i] = answer
    return out


def write_rows(tables, key, which, numbers, columns, values):
    """Overwrite columns of rows: of their values (which 0), or of a moment."""
    parts = len(tables)
    for i, table in enumerate(tables):
        mine = numbers % parts == i
        if isinstance(table, socket.socket):
            header = {
                "do": "write",
                "table": key,
                "which": which,
                "rows": int(mine.sum()),
                "from": columns.start,
                "to": columns.stop,
            }
            send(
                table,
                header,
                (numbers[mine] // parts).astype("<i8").tobytes()
                + np.ascontiguousarray(values[mine], "<f4").tobytes(),
            )
            receive(table)
        else:
            table[key][which][numbers[mine] // parts, columns.start : columns.stop] = values[mine]


def ids_of(data, step, seed):
    """input -> the ids of a step's whole batch, of every input that looks up a hosted table."""
    keys = [key for _, inputs in HOST_TABLES.values() for key in inputs]
    if data is None:
        fresh = synthetic_batch(seed + step)
        return {key: fresh[key] for key in keys}
    numbers, sample = sample_numbers(data, step, seed), data[1]
    return {key: np.reshape([sample(n)[key] for n in numbers], INPUTS[key][0]) for key in keys}


def places_of(ids):
    """(table -> its distinct rows that the ids name, input -> places of its ids among them)."""
    rows: dict = {}
    places: dict = {}
    for key, (size, inputs) in HOST_TABLES.items():
        every = np.concatenate([ids[name].ravel() for name in inputs]).astype(np.int64)
        every = np.where(every < 0, every + size, every)
        if every.min() < 0 or every.max() >= size:
            raise SystemExit(f"{inputs[0]!r} has an id of no row: the table {key!r} has {size}")
        rows[key], inverse = np.unique(every, return_inverse=True)
        ends = np.cumsum([0, *(ids[name].size for name in inputs)])
        places |= {
            name: inverse[low:high].reshape(ids[name].shape).astype(INPUTS[name][1])
            for name, low, high in zip(inputs, ends, ends[1:], strict=False)
        }
    return rows, places


def pull(tables, rows, params, state, mesh):
    """(params, state) with the pieces of tables holding these rows; what is left of a piece is
    zeros."""
    params, state = dict(params), dict(state)
    for key, numbers in rows.items():
        read = read_rows(tables, key, numbers)
        full = np.zeros((len(read), *PARAMS[key][0]), np.float32)
        full[:, : len(numbers)] = read
        params |= place(computed({key: full[0]}), specs_of(PARAMS), mesh)
        kept = [*full[1:], *([full[0]] if has_masters() else [])]
        state[key] = tuple(
            place({key: x.astype(STATE)}, specs_of(GRADIENTS), mesh)[key] for x in kept
        )
    return params, state


def push(tables, rows, params, state):
    """The updated rows back to where they came from: each process those of its devices. When it
    returns, those of all processes are there."""
    for key, values in values_of({key: params[key] for key in rows}, state).items():
        numbers, width = rows[key], PARAMS[key][0][1]
        for which, array in enumerate(values):
            for shard in array.addressable_shards:
                down, across = (
                    range(n)[s] for n, s in zip((len(numbers), width), shard.index, strict=True)
                )
                if shard.replica_id == 0 and len(down) and len(across):
                    write_rows(
                        tables,
                        key,
                        which,
                        numbers[down.start : down.stop],
                        across,
                        np.asarray(shard.data)[: len(down), : len(across)],
                    )
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("rows are pushed")


def send(wire, header, payload=b""):
    """Send a message: a header and a payload of bytes."""
    text = json.dumps({**header, "bytes": len(payload)}).encode()
    wire.sendall(len(text).to_bytes(8, "little") + text + payload)


def receive(wire):
    """(header, payload) of a message; ConnectionError when the other side is gone."""

    def exactly(size):
        received = bytearray()
        while len(received) < size:
            data = wire.recv(min(size - len(received), 1 << 20))
            if not data:
                raise ConnectionError("the other side of a table's connection is gone")
            received += data
        return received

    size = int.from_bytes(exactly(8), "little")
    if size > LONGEST_HEADER_BYTES:
        raise ConnectionError("not a message about tables")
    header = json.loads(exactly(size))
    return header, exactly(header["bytes"])


def serve(args, weights):
    """Keep a part of the tables and answer for it, a thread a connection, until it is ended."""
    part, parts = (int(n) for n in args.serve.split("/"))
    tables = make_part(args.seed, weights, part, parts)

    def answer(wire):
        try:
            while True:
                header, payload = receive(wire)
                arrays, width = tables[header["table"]], PARAMS[header["table"]][0][1]
                if header["do"] == "read":
                    send(
                        wire,
                        {},
                        np.ascontiguousarray(
                            read_part(arrays, np.frombuffer(payload, "<i8")), "<f4"
                        ).tobytes(),
                    )
                else:
                    rows, low, high = header["rows"], header["from"], min(header["to"], width)
                    at = np.frombuffer(payload[: 8 * rows], "<i8")
                    arrays[header["which"]][at, low:high] = np.frombuffer(
                        payload[8 * rows :], "<f4"
                    ).reshape(rows, high - low)
                    send(wire, {})
        except (
            ConnectionError,
            KeyError,
            ValueError,
            IndexError,
            TypeError,
        ) as e:  # its worker is gone, or it is none
            print(f"a connection ended: {e}", flush=True)
            wire.close()

    listener = socket.create_server(("", args.port))
    print(
        f"part {part} of {parts}: {sum(a.nbytes for arrays in tables.values() for a in arrays):,}"
        f" bytes at port {listener.getsockname()[1]}",
        flush=True,
    )
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
