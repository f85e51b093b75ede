"""Generation: the pass over the prompts, the loop of steps, and what a serving program does when it
is run."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from planner.emit.runtime.files.frame import (
    command_line,
    computed,
    initial_value,
    make_mesh,
    padded_shape,
    place,
    say,
    specs_of,
    stored_weights,
)
from planner.emit.runtime.files.tables import (
    BEFORE,
    CACHE,
    CACHE_TYPE,
    COMPUTE,
    FROZEN,
    GENERATE,
    IDS,
    MASK,
    MESH,
    POSITIONS,
    PRODUCTS_APART,
    PROMPT,
    PROMPTS_INPUTS,
    PROMPTS_OUTPUT_SPECS,
    QUANTIZED,
    ROWS,
    STATES,
    STEP_INPUTS,
    STEP_OUTPUT_SPECS,
    VOCABULARY,
    WAVE,
    WEIGHT_TYPE,
    WINDOWS,
    prompts_forward,
    step_forward,
)


def all_kept():
    """The tables of all that is kept of sequences, in the order in which phases hand it out."""
    return {**CACHE, **BEFORE, **STATES}


def on_pieces(mesh, forward, inputs, outputs, weights):
    """A phase's model on arrays of the mesh: run(weights, batch) -> its outputs."""
    names = {**specs_of(FROZEN), **specs_of(all_kept())}
    specs = {key: names[key] for key in weights}, specs_of(inputs)
    return jax.shard_map(
        lambda w, b: forward({}, w, b), mesh=mesh, in_specs=specs, out_specs=outputs
    )


def taken(values, table):
    """Those of the values that a phase's model reads."""
    return {key: values[key] for key in table}


def resized(x, shape):
    """x cut or padded with zeros to a shape: pieces of other layouts have other padding."""
    x = x[tuple(slice(min(n, m)) for n, m in zip(x.shape, shape, strict=True))]
    return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, shape, strict=True)])


def batch_pieces():
    """Into how many pieces the caches' sequences are cut: neighbouring rows of a cache are
    neighbours in a piece."""
    *_, spec = next(iter(all_kept().values()))
    cells = spec[0] if len(spec) else None
    axes = cells if isinstance(cells, tuple) else (cells,) if cells else ()
    return int(np.prod([MESH[a] for a in axes], dtype=int))


def rows_of(wave):
    """The sequences of a wave: as many in each piece of the caches, one after the other."""
    pieces = batch_pieces()
    return (np.arange(ROWS).reshape(pieces, ROWS // WAVE, WAVE // pieces))[:, wave].reshape(-1)


def options(mesh):
    """Compiler options: on GPUs products of one operand become one product, for which the compiler
    copies their weights beside one another where one has few columns."""
    gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return {"xla_gpu_dot_merger_threshold_mb": 0} if gpu and PRODUCTS_APART else {}


def make_caches(mesh):
    """Empty caches and states on the mesh."""
    shapes = {
        key: (padded_shape(row[0], row[-1]), NamedSharding(mesh, row[-1]))
        for key, row in all_kept().items()
    }
    return jax.jit(
        lambda: {key: jnp.zeros(shape, kept_type(key)) for key, (shape, _) in shapes.items()},
        out_shardings={key: on for key, (_, on) in shapes.items()},
    )()


def kept_type(key):
    """The type in which something is kept."""
    if key in STATES:
        return jnp.float32
    return CACHE_TYPE or COMPUTE if key in CACHE else COMPUTE


def as_kept(key, x):
    """Keys, values or states in the type that they are kept in, those of eight bits no larger than
    its largest number: beyond it there is none."""
    kept = kept_type(key)
    if CACHE_TYPE is None or key not in CACHE:
        return x.astype(kept)
    most = float(jnp.finfo(kept).max)
    return jnp.clip(x, -most, most).astype(kept)


def in_slots(new, size):
    """Keys or values of whole prompts [.., PROMPT, features] as a cache of `size` tokens keeps
    them: the last ones, token t in slot t % size."""
    if size >= PROMPT:
        return new
    return jnp.roll(new[:, :, PROMPT - size : PROMPT], PROMPT % size, axis=2)


def seen_slots(size, at, first, by_chunks=False):
    """Which slots of a cache of `size` tokens the token `at` sees, 1 or 0 [sequences, size], where
    it sees as many, itself among them, or those of its own chunk of so many; first: the first real
    token of each [sequences, 1]."""
    token = at - 1 - (at - 1 - jnp.arange(size)[None, :]) % size  # the last before `at` in a slot
    begin = at - (at - first) % size if by_chunks else at - size + 1
    return ((token >= first) & (token >= begin)).astype(jnp.int32)


def make_prefill(mesh):
    """prefill(weights, caches, ids [WAVE, PROMPT], real likewise, wave) -> (first token of each,
    caches), compiled once; caches are written in place, for the sequences rows_of(wave). real: 1,
    and 0 where a shorter prompt is padded, which is on its left.
    """
    kept = all_kept()
    specs = specs_of(kept)

    def fill(key, cache, new, wave):
        shape = padded_shape(kept[key][0], specs[key])
        new = in_slots(new, kept[key][0][2]) if key in CACHE else new
        new = as_kept(key, resized(new, (WAVE, *shape[1:])))
        piece = lambda cache, new, wave: lax.dynamic_update_slice(  # noqa: E731
            cache, new, (wave * new.shape[0], *(0,) * (new.ndim - 1))
        )
        return jax.shard_map(
            piece,
            mesh=mesh,
            in_specs=(specs[key], specs[key], type(specs[key])()),
            out_specs=specs[key],
        )(cache, new, wave)

    def prefill(weights, caches, ids, real, wave):
        where = jnp.maximum(jnp.cumsum(real, 1) - 1, 0)
        token, *new = on_pieces(
            mesh, prompts_forward, PROMPTS_INPUTS, PROMPTS_OUTPUT_SPECS, weights
        )(weights, taken({IDS: ids, MASK: real, POSITIONS: where}, PROMPTS_INPUTS))
        return token, {
            **caches,
            **{key: fill(key, caches[key], x, wave) for key, x in zip(kept, new, strict=True)},
        }

    return jax.jit(prefill, donate_argnums=1, compiler_options=options(mesh))


def pass_prompts(prefill, weights, caches, ids, real):
    """All prompts, a wave at a time: (first tokens [ROWS, 1], caches)."""
    token = np.zeros((ROWS, 1), np.int32)
    waves = []
    for wave in range(ROWS // WAVE):
        rows = rows_of(wave)
        first, caches = prefill(weights, caches, ids[rows], real[rows], wave)
        waves.append((rows, first))
    for rows, first in waves:
        token[rows] = np.asarray(first)
    return token, caches


def make_generate(mesh):
    """generate(weights, caches, token, real, count, end) -> (tokens [sequences, GENERATE], how
    many, caches), compiled once: steps until there are `count` tokens, or every sequence has met
    the token `end`. Caches are updated in place."""

    def generate(weights, caches, token, real, count, end):
        tokens = jnp.zeros((token.shape[0], GENERATE), jnp.int32).at[:, 0].set(token[:, 0])
        length, lengths = PROMPT + GENERATE, jnp.sum(real, 1, dtype=jnp.int32)[:, None]
        filled = jnp.pad(real, [(0, 0), (0, GENERATE)])
        slot = jnp.arange(length)[None, :]
        run = on_pieces(mesh, step_forward, STEP_INPUTS, STEP_OUTPUT_SPECS, {**weights, **caches})

        def step(state):
            generated, token, caches, tokens, _ = state
            mask = jnp.where((slot >= PROMPT) & (slot < PROMPT + generated - 1), 1, filled)
            at_token, first = PROMPT + generated - 1, PROMPT - lengths
            batch = {
                **{key: seen_slots(n, at_token, first, by) for key, (n, by) in WINDOWS.items()},
                IDS: token,
                MASK: jnp.pad(mask, [(0, 0), (0, 1)], constant_values=1),
                POSITIONS: lengths + generated - 1,
            }
            token, *new = run({**weights, **caches}, taken(batch, STEP_INPUTS))
            caches = {
                **caches,
                **{
                    key: write(mesh, key, caches[key], x, at_token)
                    for key, x in zip(all_kept(), new, strict=True)
                },
            }
            tokens = lax.dynamic_update_slice(tokens, token.astype(jnp.int32), (0, generated))
            return generated + 1, token, caches, tokens, jnp.all(jnp.any(tokens == end, 1))

        state = (jnp.int32(1), token, caches, tokens, jnp.all(token == end))
        generated, _, caches, tokens, _ = lax.while_loop(
            lambda s: (s[0] < count) & ~s[-1], step, state
        )
        return tokens, generated, caches

    return jax.jit(generate, donate_argnums=1, compiler_options=options(mesh))


def write(mesh, key, cache, new, token):
    """The cache with the new keys (or values) of a token, written where the cache lies: in its own
    slot, or in that of a token that is seen no more. It may be cut along positions. Of
    what does not grow the new one takes the old one's place."""
    (shape, *_, spec), axes = all_kept()[key], ()
    if key not in CACHE:
        new = as_kept(key, resized(new, padded_shape(shape, spec)))
        return lax.with_sharding_constraint(new, NamedSharding(mesh, spec))
    dim = len(shape) - 2
    slot = token % shape[dim]
    if len(spec) > dim and spec[dim] is not None:
        axes = spec[dim]

    def piece(cache, new, slot):
        size = cache.shape[dim]
        local = slot - lax.axis_index(axes) * size if axes else slot
        start = tuple(jnp.clip(local, 0, size - 1) if d == dim else 0 for d in range(cache.ndim))
        old = lax.dynamic_slice(cache, start, new.shape)
        return lax.dynamic_update_slice(
            cache, jnp.where((local >= 0) & (local < size), new, old), start
        )

    whole = padded_shape(shape, spec)
    new = as_kept(key, resized(new, (*whole[:dim], 1, whole[-1])))
    rows = type(spec)(*(None if d == dim else cell for d, cell in enumerate(spec)))
    return jax.shard_map(piece, mesh=mesh, in_specs=(spec, rows, type(spec)()), out_specs=spec)(
        cache, new, slot
    )


def load_weights(args, mesh):
    """The stored or seeded weights on the mesh, in the type computed in, one at a time; those of
    QUANTIZED in WEIGHT_TYPE, with scales."""
    scales = {scale for scale, *_ in QUANTIZED.values()}
    weights = stored_weights(args, {key: row for key, row in FROZEN.items() if key not in scales})
    arrays: dict = {}
    for key, (shape, dtype, *rest, spec) in FROZEN.items():
        if key in scales:
            continue
        scale, dim, turned = QUANTIZED.get(key, ("", 0, False))
        stored = shape[::-1] if turned else shape, "float" if scale else dtype, *rest, spec
        values = {key: initial_value(key, stored, args.seed, weights)}
        if scale:
            short, scale_rows = in_a_byte(values[key].T if turned else values[key], dim)
            values = {key: short, scale: scale_rows.squeeze(dim)}
        arrays |= place(computed(values), {k: FROZEN[k][-1] for k in values}, mesh)
    return arrays


def in_a_byte(w, dim):
    """(w / scales in WEIGHT_TYPE, scales): the largest value along a dim is 127 in int8, and in
    float8 as large as a power of two leaves it below the type's largest."""
    largest = np.maximum(np.abs(w).max(dim, keepdims=True), np.finfo(np.float32).tiny)
    if jnp.int8 == WEIGHT_TYPE:
        return np.round(w / (largest / 127)).astype(np.int8), largest / 127
    most = np.float32(jnp.finfo(WEIGHT_TYPE).max)
    scale = np.ldexp(np.float32(1), np.ceil(np.log2(largest / most)).astype(int))
    return np.clip(w / scale, -most, most).astype(WEIGHT_TYPE), scale


def load_prompts(args):
    """(ids, real) [sequences, PROMPT]: of --prompts, an .npy of token ids [any number up to the
    planned, up to PROMPT], 0 on the left where a prompt is shorter and --pad says that 0 is no
    token; seeded otherwise."""
    if not args.prompts:
        ids = (
            np.random.default_rng(args.seed)
            .integers(0, VOCABULARY, (ROWS, PROMPT))
            .astype(np.int32)
        )
        return ids, np.ones_like(ids)
    prompts = np.load(args.prompts)
    if (
        prompts.ndim != 2
        or prompts.dtype.kind not in "iu"
        or prompts.shape[0] > ROWS
        or prompts.shape[1] > PROMPT
        or prompts.min() < 0
        or prompts.max() >= VOCABULARY
    ):
        raise SystemExit(
            f"{args.prompts}: whole numbers below {VOCABULARY}, at most [{ROWS}, {PROMPT}], are"
            f" wanted; found {prompts.dtype} {list(prompts.shape)}"
        )
    ids, real = np.zeros((2, ROWS, PROMPT), np.int32)
    ids[: len(prompts), PROMPT - prompts.shape[1] :] = prompts
    real[:, -1] = 1  # sequences that nobody asked for
    real[: len(prompts), PROMPT - prompts.shape[1] :] = 1
    if args.pad is not None:
        real[: len(prompts)] *= np.cumsum(ids[: len(prompts)] != args.pad, 1) > 0
        real[:, -1] = 1
    return ids, real


def main():
    """Generate for --steps batches of prompts and say how long the first token and the others
    took."""
    options = [
        (
            "--prompts",
            {
                "type": Path,
                "metavar": "FILE.npy",
                "help": "token ids [sequences, tokens]; default: seeded",
            },
        ),
        (
            "--pad",
            {
                "type": int,
                "metavar": "ID",
                "help": "token of --prompts that pads shorter ones on the left",
            },
        ),
        (
            "--end",
            {
                "type": int,
                "default": -1,
                "metavar": "ID",
                "help": "stop when every sequence has met this token",
            },
        ),
        ("--output", {"type": Path, "metavar": "FILE.npy", "help": "write the tokens generated"}),
    ]
    args = command_line(options)
    mesh = make_mesh()
    weights = load_weights(args, mesh)
    ids, real = load_prompts(args)
    prefill, generate, caches = make_prefill(mesh), make_generate(mesh), make_caches(mesh)
    for i in range(args.steps):
        start = time.perf_counter()
        token, caches = jax.block_until_ready(pass_prompts(prefill, weights, caches, ids, real))
        first = time.perf_counter()
        tokens, generated, caches = jax.block_until_ready(
            generate(weights, caches, token, real, GENERATE, args.end)
        )
        generated, rest = int(generated), time.perf_counter() - first
        pace = (
            f"{1e3 * rest / (generated - 1):.2f} ms a token after it"
            if generated > 1
            else "no more"
        )
        waves = f"prompts in {1e3 * (first - start):.1f} ms ({ROWS // WAVE} x {WAVE} at once)"
        say(
            f"batch {i}  {generated} tokens of {ROWS} sequences: {waves}, {pace}"
            + ("  (compiling included)" if not i else "")
        )
    if args.output and jax.process_index() == 0:
        np.save(args.output, np.asarray(tokens)[:, :generated])


if __name__ == "__main__":
    main()
