"""Time of one node's kernels under a split, what its backward pass saves and what it needs while it
runs: shared by the space, which asks for all splits of a node at once (`SplitArrays`), and by the
price of whole plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodels.products import Product
from planner.execution.collective import inner_collectives
from planner.execution.odd_heads import ALIGNED, odd_heads, widenings
from planner.graph.ir import KEPT_FLOAT8, OF_PRODUCT, Graph, Node
from planner.ops import operator_of
from planner.ops.control import Region, region, trips
from planner.ops.cost import Kernel, Pieces
from planner.ops.expert_kernels import FLOAT8
from planner.pricing.split_arrays import SplitArrays, compute_type, program_type
from planner.sharding.layout import local_shape
from planner.sharding.rule import Split

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts
    from planner.pricing.float8 import float8_times
from planner.pricing.float8 import float8_times
from planner.pricing.frameworks.dispatch import EXCHANGE, dispatch_of
from planner.pricing.pricer import Pricer
from planner.pricing.product_extents import product_of


def kernel_times(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """(forward, backward) seconds of the node's kernels on its local pieces, collectives excluded.

    Products: one kernel forward, one as large per operand with a gradient; attention makes its
    scores again. Memory-bound work: operands and results cross memory once (a fused operator only
    writes its result), twice that backward (norms on GPUs more), and once more in a gated unit,
    which makes it again. On GPUs biases of products and other orders of elements pay no launch
    forward: another kernel does that as it writes or reads them. On TPUs kernels of products do all
    element-wise work on their results.
    """
    ins, outs = local_bytes(base, i, split, pricer)
    forward, backward = times_of(
        base, i, SplitArrays.of((split,), pricer.sizes), np.array([ins]), np.array([outs]), pricer
    )
    return float(forward[0]), float(backward[0])


def times_of_class(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """`kernel_times`, worked out once for all nodes of a class, in all plans that split it so."""
    # The base is kept, so that its id stays unique.
    _, known = pricer.memo.setdefault(("times of classes", id(base.alike)), (base.alike, {}))
    key = base.graph.nodes[base.shared[i]].id, split
    if key not in known:
        known[key] = kernel_times(base, i, split, pricer)
    seconds: tuple[float, float] = known[key]
    return seconds


def local_bytes(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> tuple[float, float]:
    """Bytes of the node's local operands and of its results."""
    graph, node, rule = base.graph, base.graph.nodes[i], base.rules[i]
    mesh, order = pricer.sizes, tuple(pricer.sizes)
    live = [o for o in node.outputs if o]
    ins = sum(
        _bytes(
            base,
            pricer,
            n,
            local_shape(graph.tensors[n].shape, rule.operand(slot, split, order), mesh),
        )
        for slot, n in enumerate(node.inputs)
        if n
    )
    outs = sum(
        _bytes(
            base, pricer, n, local_shape(graph.tensors[n].shape, rule.result(k, split, order), mesh)
        )
        for k, n in enumerate(live)
    )
    return ins, outs


def times_of(
    base: GraphFacts, i: int, cuts: SplitArrays, ins: np.ndarray, outs: np.ndarray, pricer: Pricer
) -> tuple[np.ndarray, np.ndarray]:
    """`kernel_times` of several splits. ins, outs: bytes of the node's local operands and results.
    [splits] each"""
    graph, rule, mesh, splits = base.graph, base.rules[i], pricer.sizes, cuts.splits
    node, on_gpu = graph.nodes[i], pricer.topology.device.kind == "gpu"
    if pricer.runtime.kernels is not None:
        from planner.pricing.frameworks.kernels import times

        return times(base, i, cuts, ins, outs, pricer)
    operator, dtype = operator_of(node.op), program_type(graph, i, pricer.recipe)
    of_product = pricer.topology.device.kind == "tpu" and i in base.after_products
    if operator.free or node.attrs.get(OF_PRODUCT) or of_product:
        return np.zeros(len(splits)), np.zeros(len(splits))
    if operator.passes is None and dtype not in ("float32", pricer.recipe.between):
        return float8_times(base, i, cuts, pieces_of(base, i, splits, pricer, cuts), outs, pricer)
    if operator.passes is not None:
        pieces = pieces_of(base, i, splits, pricer, cuts)
        if pieces.grouped_experts and operator.kind == "experts":
            dtype = compute_type(graph, i, pricer.recipe)
        passes = operator.passes(pieces, ins, outs)
        forward, backward = (
            np.array([pricer.pass_s(of_split[k], dtype) for of_split in passes]) for k in (0, 1)
        )
        return forward, backward if pieces.trained else 0 * backward
    if node.bodies:
        forward = np.array(
            [_bodies_s(node, graph, base.regions[i], split, pricer, dtype) for split in splits]
        )
    else:
        # A core's time is that of its elements, wherever their operands are.
        fused = operator.fusible and not pricer.topology.virtual
        fused &= base.shared[i] not in base.begins_turns
        moved = (outs * pricer.runtime.fused_traffic if fused else ins + outs) * operator.traffic
        wider = _widened(base, i, cuts) if rule.flops else 1.0
        flops = rule.flops * cuts.share(rule) * wider if rule.flops else 0 * outs
        conv = operator.kind == "convolution"
        product = product_of(rule, cuts, flops, wider, conv) if pricer.device.tiles else None
        if on_gpu and (i in base.biases or (operator.rearranges and fused)):
            forward = pricer.carried_s(moved, dtype)
        else:
            forward = pricer.kernels_s(flops, moved, dtype, product)
        if on_gpu and operator.gpu_beside:
            copies = [Kernel(0.0, 2 * size, operator.gpu_beside) for size in outs.tolist()]
            forward = forward + np.array([pricer.pass_s((kernel,), dtype) for kernel in copies])
        if product is not None:
            return forward, _gradients_s(base, i, cuts, product, moved, pricer)
    if not base.training or base.grad.isdisjoint(node.outputs):
        return forward, np.zeros(len(splits))
    again = (operator.gpu_backward if on_gpu else 2) + (i in base.gated.nodes)
    backward_passes = base.backward[i] if rule.flops else again
    if rule.flops and rule.fringe and node.inputs[0] in base.grad:
        return forward, (
            backward_passes + np.array([rule.beyond(split, mesh) for split in splits])
        ) * forward
    sums = on_gpu and operator.gpu_sums > 0 and node.inputs[1] in base.grad
    # What another kernel does forward has kernels of its own backward.
    alone = np.maximum(forward, (forward > 0) * pricer.device.launch_s)
    return forward, backward_passes * alone + sums * operator.gpu_sums * pricer.device.launch_s


def _gradients_s(
    base: GraphFacts, i: int, cuts: SplitArrays, product: Product, moved: np.ndarray, pricer: Pricer
) -> np.ndarray:
    """Seconds of a product's backward pass: of one product for each operand with a gradient, of the
    same FLOPs and bytes; that of operand 0 over rows of the neighbours, too. [splits]"""
    node, rule = base.graph.nodes[i], base.rules[i]
    seconds = np.zeros(len(cuts.splits))
    if not base.training or base.grad.isdisjoint(node.outputs):
        return seconds
    dtype = program_type(base.graph, i, pricer.recipe)
    beyond = [rule.beyond(split, pricer.sizes) for split in cuts.splits]
    for slot, of in enumerate((product.of_left, product.of_right)):
        if node.inputs[slot] in base.grad:
            product_s = pricer.kernels_s(of.flops, moved, dtype, of)
            seconds = seconds + (product_s * (1 + np.array(beyond)) if slot == 0 else product_s)
    return seconds


def _bodies_s(
    node: Node, graph: Graph, bodies: Region, split: Split, pricer: Pricer, dtype: str
) -> float:
    """Seconds of the slower body, as often as it runs: each kernel of an iteration pays its launch;
    what fuses is one more."""
    slowest = 0.0
    for body, rules, splits in zip(
        node.bodies, bodies.rules, bodies.splits(node, split), strict=True
    ):
        seconds = fused = 0.0
        for inner, rule in zip(body.nodes, rules, strict=True):
            body_split, operator = splits[inner.id], operator_of(inner.op)
            share = float(SplitArrays.of((body_split,), pricer.sizes).share(rule)[0])
            written_bytes = share * sum(
                body.tensors[o].elements * pricer.itemsize(body.tensors[o].dtype)
                for o in inner.outputs
                if o
            )
            read = share * sum(
                body.tensors[n].elements * pricer.itemsize(body.tensors[n].dtype)
                for n in inner.inputs
                if n
            )
            if inner.bodies:
                seconds += _bodies_s(inner, body, region(inner, body), body_split, pricer, dtype)
            elif operator.fusible:
                fused += written_bytes * pricer.runtime.fused_traffic
            elif not operator.free:
                cuts, flops = (
                    SplitArrays.of((body_split,), pricer.sizes),
                    np.array([rule.flops * share]),
                )
                product = product_of(rule, cuts, flops)
                seconds += float(
                    pricer.kernels_s(flops, np.array([read + written_bytes]), dtype, product)[0]
                )
        slowest = max(slowest, seconds + (pricer.kernel_s(0.0, fused, dtype) if fused else 0.0))
    return trips(node) * slowest


def pieces_of(
    base: GraphFacts,
    i: int,
    splits: Sequence[Split],
    pricer: Pricer,
    cuts: SplitArrays | None = None,
) -> Pieces:
    """Node i under splits, as its operator is asked of it."""
    node, rule = base.graph.nodes[i], base.rules[i]
    return Pieces(
        node=node,
        graph=base.graph,
        rule=rule,
        splits=splits,
        mesh=pricer.sizes,
        share=lambda without: (cuts or SplitArrays.of(splits, pricer.sizes)).share(rule, without),
        itemsize=pricer.itemsize,
        weight_itemsize=pricer.weight_itemsize,
        bytes_of=lambda name, shape: _bytes(base, pricer, name, shape),
        trained=base.training and not base.grad.isdisjoint(node.outputs),
        repeated=i in base.repeated,
        trained_slots=frozenset(k for k, n in enumerate(node.inputs) if n in base.grad),
        backward=base.backward.get(i, 0.0) if base.training else 0.0,
        attention_kernel=pricer.topology.device.attention_kernel,
        head_widths=pricer.topology.device.head_widths,
        compute=pricer.recipe.between,
        partitioned=pricer.runtime.partitioned,
        on_chip=pricer.topology.device.on_chip_bytes,
        float8=FLOAT8 in pricer.topology.device.peak_flops_per_s,
        serves=pricer.runtime.serves,
        grouped_experts=pricer.runtime.grouped_experts,
        programs=pricer.runtime.kernels is None and not pricer.runtime.grouped_experts,
    )


# Many parameters: a node, its split, and the bytes of what it reads and makes.
def working_bytes(
    base: GraphFacts,
    i: int,
    split: Split,
    ins: float,
    outs: float,
    weights: float,
    pricer: Pricer,
    apart: bool = False,
) -> float:
    """Bytes that live only while the node runs, where it needs most: training, its backward pass.
    ins, outs, weights: bytes of its local operands, results and weights. apart: what a repeat of a
    block has at once is counted elsewhere (planner.pricing.saved_activations.repeat_is_apart)."""
    return float(
        working_of(
            base,
            i,
            SplitArrays.of((split,), pricer.sizes),
            np.array([ins]),
            np.array([outs]),
            np.array([weights]),
            pricer,
            apart,
        )[0]
    )


def working_of(
    base: GraphFacts,
    i: int,
    cuts: SplitArrays,
    ins: np.ndarray,
    outs: np.ndarray,
    weights: np.ndarray,
    pricer: Pricer,
    apart: bool = False,
) -> np.ndarray:
    """`working_bytes` of several splits. [splits]

    Gradients of operands and results are as large as they are. In a repeated block operands,
    results and weights are also cut out of what all repeats save, and a weight's gradient is made
    before it is put with the others. Where all that a repeat has is there at once, and counted
    apart, gradients come on top, and of a gated unit the product that is made again; an elementwise
    operator's take the place of its result's. The gradient of logits takes the place of what the
    loss saved. An operand's gradient that devices have terms of is copied into the order of its
    collective.
    """
    node, rule, splits = base.graph.nodes[i], base.rules[i], cuts.splits
    trained = base.training and not base.grad.isdisjoint(node.outputs)
    looped = trained and i in base.repeated
    size = 2 * (ins + outs + weights) if looped else ins + outs
    if apart and looped:
        size = ins + outs + weights + ins * (i in base.gated.inside)
    operator = operator_of(node.op)
    # Written out, an elementwise operator's gradient takes the place of its result's; on a TPU the
    # products behind it make it.
    in_place = base.written_out or pricer.topology.device.kind == "tpu" or (apart and looped)
    if trained and in_place and operator.fusible:
        size = np.where(weights, ins + outs, np.maximum(ins, outs))
    # Walked operator by operator, what the loss saved is gone while the head's product runs.
    there = not (base.written_out and rule.flops) and i in base.handing_back
    if trained and not pricer.runtime.partitioned and there:
        size = size - outs
    if not base.training:
        # An elementwise result takes its operand's place, but not that of a convolution.
        of_images = not base.images.isdisjoint(
            base.graph.tensors[n].shape for n in node.outputs if n
        )
        size = np.maximum(ins, outs) if operator.fusible and not of_images else size
        size = size - outs * base.has_its_place(i)
    if i in odd_heads(base.graph):  # beside the logits that the loss saves, and the weight as it is
        padding = _padded_weight(base, i, cuts, pricer)
        size = size + outs * (_widened(base, i, cuts) - 1) + padding
    if rule.flops and (i in base.epilogue or base.written_out):
        whole = _widened(base, i, cuts) <= 1
        size = size + np.where(whole, weights, 0) * _copied(base, i, splits, pricer)
    if rule.flops and trained and i in base.epilogue and not base.written_out:
        size = size + ins * _sums_operand_gradient(base, i, cuts)
    if operator.in_place and trained:
        size = size - ins
    if program_type(base.graph, i, pricer.recipe) != pricer.recipe.between and rule.flops:
        kept = bool(node.attrs.get(KEPT_FLOAT8))
        size = size + (ins - weights if kept else ins + outs) / 2  # float8 copies
    if operator.workspace is not None:
        size = size + operator.workspace(pieces_of(base, i, splits, pricer, cuts), outs)
    return size


def _widened(base: GraphFacts, i: int, cuts: SplitArrays) -> np.ndarray:
    """The factor by which padding of odd heads makes node i more work. [splits]"""
    whole = np.ones(len(cuts.splits))
    if i not in odd_heads(base.graph):
        return whole
    return widenings(base.rules[i], cuts.parts.get("n", whole))


def _padded_weight(base: GraphFacts, i: int, cuts: SplitArrays, pricer: Pricer) -> np.ndarray:
    """Bytes of an odd head's weight with its padding, 0 where none is added. [splits]"""
    wide = _widened(base, i, cuts)
    name, rule, order = base.graph.nodes[i].inputs[1], base.rules[i], tuple(pricer.sizes)
    shape = base.graph.tensors[name].shape
    pieces = [local_shape(shape, rule.operand(1, s, order), pricer.sizes) for s in cuts.splits]
    return (wide > 1) * wide * np.array([_bytes(base, pricer, name, piece) for piece in pieces])


def _copied(base: GraphFacts, i: int, splits: Sequence[Split], pricer: Pricer) -> np.ndarray:
    """Whether a product's weights are copied: compilers pad odd extents of a product's operands
    (vocabularies). [splits]"""
    graph, rule, order = base.graph, base.rules[i], tuple(pricer.sizes)
    shapes = {
        slot: graph.tensors[n].shape
        for slot, n in enumerate(base.graph.nodes[i].inputs)
        if n in graph.weights and len(graph.tensors[n].shape) == 2
    }
    return np.array(
        [
            any(
                n % ALIGNED
                for slot, shape in shapes.items()
                for n in local_shape(shape, rule.operand(slot, s, order), pricer.sizes)
            )
            for s in splits
        ]
    )


def _sums_operand_gradient(base: GraphFacts, i: int, cuts: SplitArrays) -> np.ndarray:
    """Whether devices have terms of the gradient of a product's operand: a factor that the operand
    does not have is cut. [splits]"""
    rule, node = base.rules[i], base.graph.nodes[i]
    slot = next((k for k, n in enumerate(node.inputs) if n not in base.graph.weights), 0)
    read = {f for dim in rule.operands[slot] for f in dim}
    summed = np.zeros(len(cuts.splits), bool)
    for choice, parts in cuts.parts.items():
        if read.isdisjoint(rule.members(choice)):
            summed = summed | (parts > 1)
    return summed


def inner_times(
    base: GraphFacts, i: int, split: Split, pricer: Pricer
) -> tuple[float, float, float]:
    """Seconds of the collectives inside the node's kernel: forward, backward, and those of the
    forward pass whose results a block may save. Frameworks cut sequences for a balanced ring where
    they read them: no halves change places."""
    forward = backward = saved = 0.0
    framework = pricer.runtime.kernels is not None
    own_exchanges = framework or pricer.runtime.serves
    dispatch = dispatch_of(base, i, split, pricer) if own_exchanges else None
    for inner in inner_collectives(
        base.graph.nodes[i],
        base.rules[i],
        split,
        base.grad,
        pricer.sizes,
        pricer.itemsize("float32"),
    ):
        if framework and inner.of.halved:
            continue
        kind, sent = inner.of.kind, float(inner.payload_bytes)
        if dispatch is not None:
            runs, again = (dispatch.share(kind, sent, phase) for phase in ("forward", "backward"))
            kind = dispatch.kind if kind == EXCHANGE else kind
        else:
            runs = again = 1.0
        each_s, back = (pricer.collective_s(kind, inner.axes, sent * n) for n in (runs, again))
        forward += inner.forward * each_s
        backward += inner.backward * back
        saved += inner.forward * each_s * inner.of.kept
    return forward, backward, saved


def _bytes(base: GraphFacts, pricer: Pricer, name: str, shape: tuple[int, ...]) -> float:
    tensor = base.graph.tensors[name]
    size = pricer.stored_bytes(shape, tensor.dtype, base.kind_of(tensor.shape))
    return size * kept_share(base.graph, name, pricer)


def kept_share(graph: Graph, name: str, pricer: Pricer) -> float:
    """Bytes of a tensor in memory over those of one of activations: below 1 for weights that are
    kept in fewer; caches are what activations are."""
    if pricer.recipe.parameter_bytes >= pricer.itemsize("float32") or name not in graph.weights:
        return 1.0
    if "caches" not in graph.memo:
        graph.memo["caches"] = {c for n in graph.nodes for c in operator_of(n.op).cached(n)}
    dtype = graph.tensors[name].dtype
    cached = name in graph.memo["caches"]
    return 1.0 if cached else pricer.weight_itemsize(dtype) / pricer.itemsize(dtype)


def saved_beside_of(
    base: GraphFacts, i: int, slot: int, splits: Sequence[Split], pricer: Pricer
) -> Any:
    """Bytes that a kernel saves for its backward pass beside operands and results of the graph,
    counted with its operand `slot`. [splits], or 0 where none saves anything"""
    saves = operator_of(base.graph.nodes[i].op).saves_beside
    return saves(pieces_of(base, i, splits, pricer)) if saves and not slot else 0.0


def reads_whole(base: GraphFacts, i: int, cuts: SplitArrays) -> np.ndarray:
    """Whether several devices read the same rows of node i's first operand (`Operator.gathers`).
    [splits]"""
    cut: np.ndarray = (
        cuts.parts.get(operator_of(base.graph.nodes[i].op).gathers, np.ones(len(cuts.splits))) > 1
    )
    return cut


def named_beside(base: GraphFacts, i: int, split: Split, pricer: Pricer) -> float:
    """Bytes that are saved with a result of node i where that is saved by name."""
    beside = operator_of(base.graph.nodes[i].op).named_beside
    return float(beside(pieces_of(base, i, (split,), pricer))[0]) if beside else 0.0


def saved_beside(base: GraphFacts, i: int, slot: int, split: Split, pricer: Pricer) -> float:
    """`saved_beside_of` one split."""
    saved = saved_beside_of(base, i, slot, (split,), pricer)
    return float(saved[0]) if isinstance(saved, np.ndarray) else 0.0
