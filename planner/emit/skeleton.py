"""The fixed parts of a program: imports, tables, parameter set-up, the step and main; and how the body is put between them."""

from __future__ import annotations

from planner.emit.body import Body, spec_text
from planner.emit.program import Parameter, Writer
from planner.emit.source import comment, helper_sources, literal
from planner.flow import cut_layout, stored_layout
from planner.graph import Graph
from planner.layout import Layout

IMPORTS = '''import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
'''

SETUP = '''

def make_mesh():
    """The planned mesh; refuses another number of devices."""
    need, have = int(np.prod(list(MESH.values()), dtype=int)), len(jax.devices())
    if have != need:
        raise SystemExit(f"this program is planned for {need} devices and finds {have}: plan again with --devices {have}, or --virtual-devices {need}")
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))


def read_safetensors(path):
    """name -> array, memory-mapped."""
    raw = np.memmap(path, np.uint8, "r")
    size = int(raw[:8].view("<u8")[0])
    kinds = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
    out = {}
    for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            out[name] = raw[8 + size + low : 8 + size + high].view(kinds[entry["dtype"]]).reshape(entry["shape"])
    return out


def initial_values(table, seed, weights):
    """Values of every parameter of a table: from the weights file where it has them, else seeded normal (norm scales around one)."""
    rng, out = np.random.default_rng(seed), {}
    for key, (shape, dtype, labels, start, _) in table.items():
        kept = [weights[name] for name in labels if name in weights]
        if len(kept) == len(labels):
            out[key] = np.stack(kept) if len(labels) > 1 or len(shape) > kept[0].ndim else kept[0]
        elif np.issubdtype(np.dtype(dtype), np.floating):
            out[key] = (start + rng.normal(0, 0.02, shape)).astype(dtype)
        else:
            out[key] = np.zeros(shape, dtype)
    return out


def place(values, table, mesh):
    """Arrays on the mesh, padded up to what their shards need (saved files hold them unpadded)."""
    out = {}
    for key, value in values.items():
        spec = table[key][-1]
        full = [-(-n // k) * k for n, k in zip(value.shape, _cuts(spec, value.ndim))]
        value = np.pad(value, [(0, f - n) for f, n in zip(full, value.shape)]) if full != list(value.shape) else value
        out[key] = jax.device_put(value, NamedSharding(mesh, spec))
    return out


def _cuts(spec, rank):
    """Number of pieces per dim under a PartitionSpec."""
    cells = [c if isinstance(c, tuple) else (c,) if c else () for c in (*spec, *[None] * (rank - len(spec)))]
    return [int(np.prod([MESH[a] for a in c], dtype=int)) for c in cells]


def synthetic_batch(seed):
    """Seeded data of the right shapes: integers below their tables, floats normal, masks all true."""
    rng, out = np.random.default_rng(seed), {}
    for key, (shape, dtype, high, _) in INPUTS.items():
        if high:
            out[key] = rng.integers(0, high, shape).astype(dtype)
        elif np.issubdtype(np.dtype(dtype), np.floating):
            out[key] = rng.normal(size=shape).astype(dtype)
        else:
            out[key] = np.ones(shape, dtype)
    return out
'''

OPTIMIZERS = {
    "sgd": '''

def start_state(params):
    """Plain gradient descent keeps nothing."""
    return {}


def update(p, g, s, count):
    """One parameter's step (local pieces)."""
    return p - LEARNING_RATE * g, s
''',
    "adamw": '''
BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01


def start_state(params):
    """Two float32 moments per parameter."""
    return {key: (jnp.zeros(p.shape, jnp.float32), jnp.zeros(p.shape, jnp.float32)) for key, p in params.items()}


def update(p, g, s, count):
    """One parameter's AdamW step (local pieces)."""
    m = BETA1 * s[0] + (1 - BETA1) * g
    v = BETA2 * s[1] + (1 - BETA2) * jnp.square(g)
    step = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
    return (p - LEARNING_RATE * (step + WEIGHT_DECAY * p)).astype(p.dtype), (m, v)
''',
}

MAIN = '''

def main():
    """Run --steps steps on the devices found, or on virtual CPU devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual-devices", type=int, help="run on this many virtual CPU devices")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, default=Path(__file__).with_suffix(".safetensors"), help="a .safetensors file of the parameters")
    args = parser.parse_args()
    if args.virtual_devices:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.virtual_devices} " + os.environ.get("XLA_FLAGS", "")
        jax.config.update("jax_platforms", "cpu")
    weights = read_safetensors(args.weights) if args.weights.exists() else {}
    mesh = make_mesh()
    named = sum(len(row[2]) for row in (*PARAMS.values(), *FROZEN.values()))
    found = sum(name in weights for row in (*PARAMS.values(), *FROZEN.values()) for name in row[2])
    print(f"mesh {dict(mesh.shape)} on {jax.default_backend()}; weights: {found} of {named} from {args.weights.name}, the rest seeded normal")
    params = place(initial_values(PARAMS, args.seed, weights), PARAMS, mesh)
    frozen = place(initial_values(FROZEN, args.seed + 1, weights), FROZEN, mesh)
'''

MAIN_TRAIN = '''    state = jax.jit(start_state, out_shardings={k: named_sharding(mesh, s) for k, s in STATE_SPECS.items()})(params)
    step = make_step(mesh)
    for i in range(args.steps):
        batch = place(synthetic_batch(args.seed + i), INPUTS, mesh)
        start = time.perf_counter()
        params, state, loss = step(params, state, frozen, batch, jnp.float32(i + 1))
        loss.block_until_ready()
        print(f"step {i}  loss {float(loss):.6f}  {1e3 * (time.perf_counter() - start):.1f} ms", flush=True)


def named_sharding(mesh, specs):
    """NamedSharding of each PartitionSpec of a tuple."""
    return tuple(NamedSharding(mesh, s) for s in specs)


if __name__ == "__main__":
    main()
'''

MAIN_INFER = '''    run = make_inference(mesh)
    for i in range(args.steps):
        batch = place(synthetic_batch(args.seed + i), INPUTS, mesh)
        start = time.perf_counter()
        outputs = jax.block_until_ready(run(params, frozen, batch))
        shapes = ", ".join(f"{o.shape}" for o in outputs)
        print(f"step {i}  outputs {shapes}  {1e3 * (time.perf_counter() - start):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
'''


def assemble(w: Writer, body: Body, workload: str, header: str, weights_file: str) -> str:
    """The program's text."""
    flow, graph = w.flow, w.flow.graph
    train = workload == "train"
    parts = [f'"""{header or comment(graph.name)}\n"""\n', IMPORTS, "\n"]
    parts.append(f"MESH = {dict(flow.plan.mesh)!r}\n")
    parts.append(_inputs(w))
    params = [p for p in w.parameters.values() if train and p.tensors[0] in flow.grad]
    frozen = [p for p in w.parameters.values() if p not in params]
    parts.append(_table("PARAMS", "trained parameters", params, w))
    parts.append(_table("FROZEN", "weights that do not change", frozen, w))
    sharded = w.backend == "shard_map"
    if train:
        parts.append(f"LEARNING_RATE = {w.training.lr!r}\nMICROBATCHES = {flow.plan.microbatches}\n")
        parts.append(_reduction(params, w))
    if w.arrays:
        parts.append(f"CONSTANTS = {_constants_text(weights_file)}\n")
    result = [body.value(o, flow.source[o].stored if flow.source[o].partial else flow.source[o]) for o in graph.outputs]
    inner = _function(body, result, train)
    parts += ["\n\n" + text for text in helper_sources(w.helpers | ({"reduce_gradient", "local_piece", "zeros_for"} if train and sharded else set()))]
    parts.append(inner)
    out_specs = "".join(spec_text(flow.source[o].stored, *_even(w, o)) + ", " for o in graph.outputs)
    if train:
        parts.append(OPTIMIZERS[w.training.optimizer])
        parts.append(TRAIN_SHARDED if sharded else TRAIN_JIT)
    else:
        parts.append((INFER_SHARDED if sharded else INFER_JIT).replace("OUT_SPECS", f"({out_specs})"))
    parts += [SETUP, MAIN, MAIN_TRAIN if train else MAIN_INFER]
    return "".join(parts)


def _even(w: Writer, tensor: str) -> tuple:
    """For jit programs: the shape and mesh that decide which axes divide evenly."""
    return (w.flow.graph.tensors[tensor].shape, dict(w.flow.plan.mesh)) if w.backend == "jit" else ()


def _inputs(w: Writer) -> str:
    graph, micro = w.flow.graph, w.flow.plan.microbatches
    rows = ["# name: (global shape, dtype, integers below this (0: not integer data), how it is cut)", "INPUTS = {"]
    for name in graph.inputs:
        if name not in w.flow.source:
            continue
        t = graph.tensors[name]
        shape = (t.shape[0] * micro, *t.shape[1:]) if t.shape and micro > 1 else t.shape
        dtype = {"int64": "int32", "uint64": "uint32", "float64": "float32"}.get(t.dtype, t.dtype)
        rows.append(f"    {literal(name)}: ({shape}, {dtype!r}, {index_limit(graph, name)}, {spec_text(w.flow.source[name], *_even(w, name))}),")
    return "\n".join([*rows, "}", ""])


def index_limit(graph: Graph, name: str) -> int:
    """Exclusive upper bound of an integer input: the smallest table it looks up in, 0 when it looks up nothing (a mask, a length)."""
    if graph.tensors[name].is_float:
        return 0
    limits, queue, seen = [], [name], {name}
    while queue:
        tensor = queue.pop()
        for i, slot in graph.consumers.get(tensor, ()):
            node = graph.nodes[i]
            if node.op in ("Gather", "GatherElements") and slot == 1:
                limits.append(graph.tensors[node.inputs[0]].shape[int(node.attrs["axis"])])  # type: ignore[arg-type]
            elif node.op == "CrossEntropyLoss" and slot == 1:
                limits.append(graph.tensors[node.inputs[0]].shape[int(node.attrs["axis"])])  # type: ignore[arg-type]
            elif node.op == "OneHot":
                limits.append(int(node.attrs["depth"]))  # type: ignore[arg-type]
            elif node.op in ("Cast", "Reshape", "Slice", "Transpose", "Expand", "Identity", "Squeeze", "Concat"):
                for o in node.outputs:
                    if o not in seen and not graph.tensors[o].is_float:
                        seen.add(o)
                        queue.append(o)
    return min(limits, default=0)


def _table(name: str, what: str, parameters: list[Parameter], w: Writer) -> str:
    graph, mesh = w.flow.graph, dict(w.flow.plan.mesh)
    rows = [f"# {what}: name -> (shape, dtype, labels in the weights file, mean of a fresh start, how it is cut)", f"{name} = {{"]
    for p in parameters:
        shape = graph.tensors[p.tensors[0]].shape
        layout = stored_layout(p.plan) if w.backend == "shard_map" else p.plan.layout
        if p.stacked:
            shape, layout = (len(p.tensors), *shape), Layout(((), *layout.dims))
        spec = spec_text(layout, shape, mesh) if w.backend == "jit" else spec_text(layout)
        labels = [graph.labels.get(t, t) for t in p.tensors]
        shown = _label_list(p.key, labels)
        dtype = {"float64": "float32", "int64": "int32", "bfloat16": "float32"}.get(graph.tensors[p.tensors[0]].dtype, graph.tensors[p.tensors[0]].dtype)
        rows.append(f"    {literal(p.key)}: ({shape}, {dtype!r}, {shown}, {initial_mean(graph, p.tensors[0])}, {spec}),")
    return "\n".join([*rows, "}", ""])


def _label_list(key: str, labels: list[str]) -> str:
    if len(labels) > 2 and labels == [key.replace("*", str(i)) for i in range(len(labels))]:
        return f"[{literal(key)}.replace('*', str(i)) for i in range({len(labels)})]"
    return "[" + ", ".join(literal(x) for x in labels) + "]"


def initial_mean(graph: Graph, tensor: str) -> float:
    """Scales of normalisations and variances start around one."""
    for i, slot in graph.consumers.get(tensor, ()):
        op = graph.nodes[i].op
        if (op.endswith("Normalization") and slot == 1) or (op == "BatchNormalization" and slot == 4):
            return 1.0
    return 0.0


def _reduction(parameters: list[Parameter], w: Writer) -> str:
    """Per parameter: axes its gradient is summed over, axes it is scattered over and the dim; and the specs of gradients and state."""
    rows = ["# how each gradient, a sum still pending per device, is reduced: (all-reduce axes, reduce-scatter axes, dim)", "REDUCE = {"]
    grads, states = ["# how each reduced gradient is cut", "GRADIENT_SPECS = {"], ["STATE_SPECS = {"]
    for p in parameters:
        lift = 1 if p.stacked else 0
        plan = p.plan
        scatter = plan.axes if plan.zero in (1, 2) and plan.dim >= 0 else ()
        rest = tuple(a for a in p.plan.fan if not (plan.zero and plan.dim >= 0 and a in plan.axes))
        rows.append(f"    {literal(p.key)}: ({rest!r}, {scatter!r}, {plan.dim + lift if scatter else 0}),")
        layout = cut_layout(plan) if plan.zero else plan.layout
        spec = Layout(((), *layout.dims)) if p.stacked else layout
        shape = w.flow.graph.tensors[p.tensors[0]].shape
        shape = (len(p.tensors), *shape) if p.stacked else shape
        text = spec_text(spec) if w.backend == "shard_map" else spec_text(spec, shape, dict(w.flow.plan.mesh))
        grads.append(f"    {literal(p.key)}: {text},")
        state = f"({text}, {text})" if w.training.optimizer == "adamw" else "()"
        if state != "()":
            states.append(f"    {literal(p.key)}: {state},")
    if w.backend == "jit":
        return "\n".join([*grads, "}", *states, "}", ""])
    fans = ["# axes over which each gradient is pending when it leaves the backward pass", "PENDING = {"]
    fans += [f"    {literal(p.key)}: {tuple(a for a in p.plan.fan if not (p.plan.zero == 3 and p.plan.dim >= 0 and a in p.plan.axes))!r}," for p in parameters]
    each = any(p.plan.zero == 2 and p.plan.dim >= 0 for p in parameters)
    return "\n".join([*rows, "}", *fans, "}", *grads, "}", *states, "}", f"REDUCE_EACH_MICROBATCH = {each}", ""])


def _constants_text(weights_file: str) -> str:
    name = literal(weights_file)
    return f'{{k.removeprefix("constant/"): v for k, v in read_safetensors(Path(__file__).with_name({name})).items() if k.startswith("constant/")}}'


def _function(body: Body, result: list[str], train: bool) -> str:
    if train:
        lines = ["", "", "def loss_of(params, frozen, batch):", '    """Mean loss of one microbatch, on local pieces; equal on every device."""']
        lines += [f"    {line}" for line in body.lines]
        lines.append(f"    return {result[0]}")
    else:
        lines = ["", "", "def forward(params, frozen, batch):", '    """The model on local pieces."""']
        lines += [f"    {line}" for line in body.lines]
        lines.append(f"    return ({', '.join(result)},)")
    if body.backend == "jit":
        lines[3] = lines[3].replace(", on local pieces; equal on every device", "").replace(" on local pieces", "")
        at = ["", "", "def at(x, spec):", '    """x cut over the mesh as `spec` says."""', "    return lax.with_sharding_constraint(x, NamedSharding(make_mesh(), spec))"]
        lines = at + lines
    return "\n".join([*lines, ""])


TRAIN_SHARDED = '''

def gradients(params, frozen, batch):
    """(loss, gradients) of the whole batch: contributions stay per-device sums until the one reduction of each parameter."""
    pending = {k: lax.pcast(p, PENDING[k], to="varying") if PENDING[k] else p for k, p in params.items()}

    def reduced(grads):
        return {k: reduce_gradient(g, *REDUCE[k]) for k, g in grads.items()}

    if MICROBATCHES == 1:
        loss, grads = jax.value_and_grad(loss_of)(pending, frozen, batch)
        return loss, reduced(grads)

    def one(total, piece):
        loss, grads = jax.value_and_grad(loss_of)(pending, frozen, piece)
        grads = reduced(grads) if REDUCE_EACH_MICROBATCH else grads
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    pieces = {k: b.reshape(MICROBATCHES, -1, *b.shape[1:]) for k, b in batch.items()}
    first_loss, first = jax.value_and_grad(loss_of)(pending, frozen, {k: b[0] for k, b in pieces.items()})
    first = reduced(first) if REDUCE_EACH_MICROBATCH else first
    (loss, grads), _ = lax.scan(one, (first_loss, first), {k: b[1:] for k, b in pieces.items()})
    loss, grads = jax.tree.map(lambda t: t / MICROBATCHES, (loss, grads))
    return loss, grads if REDUCE_EACH_MICROBATCH else reduced(grads)


def local_step(params, state, frozen, batch, count):
    """One optimizer step on local pieces; sharded state updates its piece of the parameter, which is then gathered."""
    loss, grads = gradients(params, frozen, batch)
    new_params, new_state = {}, {}
    for k, p in params.items():
        _, scatter, dim = REDUCE[k]
        piece = local_piece(p, scatter, dim) if scatter else p
        piece, moments = update(piece, grads[k], state.get(k, ()), count)
        new_params[k] = lax.all_gather(piece, scatter, axis=dim, tiled=True, to="invarying") if scatter else piece
        if moments:
            new_state[k] = moments
    return new_params, new_state, loss


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> (params, state, loss), compiled once; params and state are updated in place."""
    p, f, b = ({k: row[-1] for k, row in table.items()} for table in (PARAMS, FROZEN, INPUTS))
    step = jax.shard_map(local_step, mesh=mesh, in_specs=(p, STATE_SPECS, f, b, P()), out_specs=(p, STATE_SPECS, P()))
    return jax.jit(step, donate_argnums=(0, 1))


def make_gradients(mesh):
    """gradients(params, frozen, batch) -> (loss, gradients): for checks against another program."""
    p, f, b = ({k: row[-1] for k, row in table.items()} for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(p, f, b), out_specs=(P(), GRADIENT_SPECS)))
'''

TRAIN_JIT = '''

def gradients(params, frozen, batch):
    """(loss, gradients) of the whole batch; the compiler places the collectives."""
    if MICROBATCHES == 1:
        return jax.value_and_grad(loss_of)(params, frozen, batch)

    def one(total, piece):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, frozen, piece)), None

    pieces = {k: jnp.moveaxis(b.reshape(-1, MICROBATCHES, *b.shape[1:]), 1, 0) for k, b in batch.items()}
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(one, zero, pieces)
    return jax.tree.map(lambda t: t / MICROBATCHES, total)


def whole_step(params, state, frozen, batch, count):
    """One optimizer step; optimizer state keeps its own cut."""
    loss, grads = gradients(params, frozen, batch)
    new_params, new_state = {}, {}
    for k, p in params.items():
        g = at(grads[k], GRADIENT_SPECS[k])
        new, moments = update(p, g, state.get(k, ()), count)
        new_params[k] = at(new, PARAMS[k][-1])
        if moments:
            new_state[k] = moments
    return new_params, new_state, loss


def make_step(mesh):
    """step(params, state, frozen, batch, count) -> (params, state, loss), compiled once; params and state are updated in place."""
    on = lambda specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    p, f, b = (on({k: row[-1] for k, row in table.items()}) for table in (PARAMS, FROZEN, INPUTS))
    state = on(STATE_SPECS)
    return jax.jit(whole_step, in_shardings=(p, state, f, b, on(P())), out_shardings=(p, state, on(P())), donate_argnums=(0, 1))


def make_gradients(mesh):
    """gradients(params, frozen, batch) -> (loss, gradients): for checks against another program."""
    on = lambda specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    p, f, b = (on({k: row[-1] for k, row in table.items()}) for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(gradients, in_shardings=(p, f, b), out_shardings=(on(P()), on(GRADIENT_SPECS)))
'''

INFER_SHARDED = '''

def make_inference(mesh):
    """run(params, frozen, batch) -> outputs, compiled once."""
    p, f, b = ({k: row[-1] for k, row in table.items()} for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=(p, f, b), out_specs=OUT_SPECS))
'''

INFER_JIT = '''

def make_inference(mesh):
    """run(params, frozen, batch) -> outputs, compiled once."""
    on = lambda specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))
    p, f, b = (on({k: row[-1] for k, row in table.items()}) for table in (PARAMS, FROZEN, INPUTS))
    return jax.jit(forward, in_shardings=(p, f, b), out_shardings=on(OUT_SPECS))
'''
