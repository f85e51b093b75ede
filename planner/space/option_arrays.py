"""Seconds and bytes of all options of all variables of a space in a row, as planner.space.assemble
adds them up. Derived once a space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from costmodels.liveness import WeightReaders, least_above_saved
from planner.analysis.passing import readers
from planner.execution.save_policies import is_named
from planner.execution.techniques import RECOMPUTE
from planner.pricing.frameworks.kernels import host_waits_s
from planner.pricing.frameworks.selective import runs_again
from planner.space.named_policies import policy_costs
from planner.space.variables import OptionCosts, Space


@dataclass(frozen=True)
class TrainedVariables:
    """Variables with weights that have gradients: which, and the operators that read each
    variable's."""

    rows: np.ndarray
    read: WeightReaders


@dataclass(frozen=True)
class SpaceArrays:
    """All options of a space in a row.

    first: number of each variable's first option [variables]. count: nodes, or tensors, that decide
    so [options]. costs: of one of them. state_bytes, grad_accumulator_bytes: of all of them [ZeRO
    stages, options]. block_grad_bytes, outside_grad_bytes: gradients of a microbatch of all of
    them, of operators in repeated blocks and elsewhere; outside_remaining_bytes: what ZeRO stages
    leave of the latter [ZeRO stages, options]. gathered_bytes: what stage 3 gathers of a block,
    part of its state [options]. pass_s: seconds forward and backward [options]. recompute_s: what
    each way to recompute adds to that [options]. copy_s: seconds to copy what a microbatch saves
    into stacks of loops and out of them again, of all nodes, under each of
    planner.execution.techniques.RECOMPUTE [options]. waits_s: of a pass of all nodes what they wait
    for the host however small a microbatch is, at least, under each of the same [options].
    epilogue: whether the variable's nodes follow the repeated blocks [options]. turn: when its
    nodes run (GraphFacts.turns) [variables]. one_repeat_bytes: what one repeat of the blocks has at
    once that the backward pass enters first, with pipeline stages of those with the longest repeats
    [options].

    workspace: bytes of one node [options], by whether weights are left out, as where they are
    gathered, and whether what a repeat of a block has at once is counted apart. least_workspace:
    the largest of the operators' smallest, those of the epilogue aside, and the least that is alive
    only at the end of the forward pass, under either; by whether weights are left out.

    least_pieces: the least of `max_batch_pieces`.
    trained: of a program without a loop over blocks, whose memory is that of costmodels.liveness.
    """

    first: np.ndarray
    count: np.ndarray
    costs: OptionCosts
    state_bytes: np.ndarray
    grad_accumulator_bytes: np.ndarray
    block_grad_bytes: np.ndarray
    gathered_bytes: np.ndarray
    outside_grad_bytes: np.ndarray
    outside_remaining_bytes: np.ndarray
    pass_s: np.ndarray
    recompute_s: Mapping[str, np.ndarray]
    copy_s: Mapping[str, np.ndarray]
    waits_s: Mapping[str, np.ndarray]
    epilogue: np.ndarray
    turn: np.ndarray
    one_repeat_bytes: np.ndarray
    workspace: Mapping[tuple[bool, bool], np.ndarray]
    least_workspace: Mapping[bool, tuple[float, float]]
    least_pieces: float
    trained: TrainedVariables | None


def arrays_of(space: Space) -> SpaceArrays:
    """The arrays of a space, kept in its memo."""
    if "arrays" not in space.memo:
        space.memo["arrays"] = _arrays(space)
    arrays: SpaceArrays = space.memo["arrays"]
    return arrays


def again_s(space: Space, recompute: str) -> np.ndarray:
    """Seconds that a way to recompute adds to a pass of one node [options]."""
    if is_named(recompute):
        return policy_costs(space, recompute).recompute_s
    return arrays_of(space).recompute_s[recompute]


def copied_s(space: Space, recompute: str) -> np.ndarray:
    """Seconds to copy what a microbatch saves under a way to recompute, and to send named values
    to the host's memory and bring them back, of all nodes [options]."""
    copies = arrays_of(space).copy_s
    if not is_named(recompute):
        return copies[recompute]
    policy, price = policy_costs(space, recompute), space.pricer
    copied = copies["block"] + price.loop_copy_s(policy.copied_bytes, policy.copied_bytes)
    return copied + 2 * price.host_s(policy.sent_bytes)


def _arrays(space: Space) -> SpaceArrays:
    base, variables = space.base, space.variables
    costs = OptionCosts.joined(v.costs for v in variables)
    sizes = np.array([v.options for v in variables])
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    count = np.repeat([v.count for v in variables], sizes)
    in_epilogue = np.array([v.node in base.epilogue for v in variables])
    turn = np.array([base.turns[v.node] for v in variables])
    inside, outside = (
        np.repeat(
            [v.kind == "op" and (v.node in base.repeated) is repeated for v in variables], sizes
        )
        for repeated in (True, False)
    )
    again = _runs_again(space)
    workspace = {
        (False, False): costs.workspace_bytes,
        (True, False): costs.workspace_without_weights_bytes,
        (False, True): costs.workspace_apart_bytes,
        (True, True): costs.workspace_apart_without_weights_bytes,
    }
    least_saved = np.minimum.reduceat(costs.saved_bytes_epilogue, first)
    return SpaceArrays(
        first=first,
        count=count,
        costs=costs,
        state_bytes=count * costs.state_bytes,
        grad_accumulator_bytes=count * costs.grad_accumulator_bytes,
        block_grad_bytes=count * costs.gradient_bytes * inside,
        gathered_bytes=count * costs.gathered_bytes[3],
        outside_grad_bytes=count * costs.gradient_bytes * outside,
        outside_remaining_bytes=count * costs.grad_remaining_bytes * outside,
        pass_s=costs.forward_s + costs.backward_s,
        recompute_s={
            "block": _part(again["block"], costs.forward_s),
            "block-keep": _part(again["block-keep"], costs.forward_s - costs.not_recomputed_s),
        },
        copy_s=_copy_s(space, costs),
        waits_s=_waits_s(space, again["block"]),
        epilogue=np.repeat(in_epilogue, sizes),
        turn=turn,
        one_repeat_bytes=costs.saved_bytes_one_repeat
        * np.repeat(turn == _first_entered(space), sizes),
        workspace=workspace,
        least_workspace={
            bare: _least_workspace(
                space,
                np.minimum.reduceat(workspace[bare, True], first),
                turn,
                in_epilogue,
                least_saved,
            )
            for bare in (False, True)
        },
        least_pieces=float(costs.max_batch_pieces.min(initial=np.inf)),
        trained=_trained(space),
    )


def _first_entered(space: Space) -> int:
    """Turn of the blocks of which one repeat is counted (`SpaceArrays.one_repeat_bytes`)."""
    runs, last = space.base.runs, space.base.last_run
    if space.pricer.mesh.stages == 1 or not runs:
        return last
    return 2 * runs.index(max(runs, key=lambda run: run[1])) + 1


def _copy_s(space: Space, costs: OptionCosts) -> dict[str, np.ndarray]:
    """SpaceArrays.copy_s. Uneven pipeline stages have no loops."""
    price, base = space.pricer, space.base
    if base.dealt is None and price.mesh.stages > 1:
        return dict.fromkeys(RECOMPUTE, np.zeros(len(costs.forward_s)))
    sums = costs.saved_collective_bytes / (1 + price.runtime.memory_slack)
    stacked = {
        "none": costs.stacked_bytes,
        "block": costs.stacked_bytes_remat,
        "block-keep": costs.stacked_bytes_remat + sums,
    }
    return {recompute: price.loop_copy_s(size, size) for recompute, size in stacked.items()}


def _runs_again(space: Space) -> dict[str, np.ndarray]:
    """Per way to recompute what part of an option's nodes runs again: in emitted programs what a
    backward pass asks for, in frameworks' what these say. Of layers that decide alike inside a
    block the last may make less again than the others. [options]"""
    base, price, by_recompute = space.base, space.pricer, dict[str, np.ndarray]()
    for recompute in ("block", "block-keep"):
        again = base.recomputed
        if price.runtime.kernels is not None and base.training:
            again = runs_again(base, recompute, price)
        number = Counter(base.shared[i] for i in again)
        of = [number[v.node] / v.count if v.kind == "op" else 0.0 for v in space.variables]
        by_recompute[recompute] = np.repeat(of, [v.options for v in space.variables])
    return by_recompute


def _part(share: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """A part of seconds that may be infinite: of no part none."""
    return np.multiply(share, seconds, out=np.zeros(len(seconds)), where=share > 0)


def _waits_s(space: Space, recomputed: np.ndarray) -> dict[str, np.ndarray]:
    """SpaceArrays.waits_s. recomputed: whether an option's nodes run again with their blocks; with
    results of collectives saved they need not."""
    waits = np.array(
        [
            host_waits_s(space.base, v.node, space.pricer) if v.kind == "op" else (0.0, 0.0)
            for v in space.variables
        ]
    ).reshape(-1, 2)
    counts = np.array([[v.count] for v in space.variables]).reshape(-1, 1)
    forward, backward = np.repeat(counts * waits, [v.options for v in space.variables], axis=0).T
    once = forward + backward
    return dict.fromkeys(RECOMPUTE, once) | {"block": once + recomputed * forward}


def _trained(space: Space) -> TrainedVariables | None:
    if not space.base.written_out:
        return None
    graph, rows, read_by = space.base.graph, list[int](), list[list[int]]()
    for k, v in enumerate(space.variables):
        if v.kind == "op" and any(
            n in space.base.own and n in space.base.grad for n in graph.nodes[v.node].inputs
        ):
            rows.append(k)
            read_by.append([v.node])
        elif v.kind == "weight" and v.name in space.base.grad:
            rows.append(k)
            read_by.append([i for i, _ in graph.consumers[v.name]])
    return TrainedVariables(np.array(rows, np.int64), readers(graph, read_by))


def _least_workspace(
    space: Space, least: np.ndarray, turn: np.ndarray, epilogue: np.ndarray, saved: np.ndarray
) -> tuple[float, float]:
    """The largest of the operators' smallest workspaces in the last repeated blocks, which all that
    is saved is beside (of a program without a loop, what is left of it above all that is saved; of
    stages and of a forward pass alone, in whatever is before the epilogue), and what is alive only
    at the end of the forward pass. least, saved: the least workspace, and bytes saved in the
    epilogue, of each variable's options; turn: when its nodes run; epilogue: whether it is of the
    epilogue. [variables]
    """
    end = sum(saved.tolist()) + float(least[epilogue].max(initial=0.0))
    if space.base.written_out:
        ops = [k for k, v in enumerate(space.variables) if v.kind == "op" and not epilogue[k]]
        most_saved = np.array([space.variables[k].costs.saved_bytes.max() for k in ops])
        return least_above_saved(least[ops], most_saved), end
    parted = space.base.training and space.pricer.mesh.stages == 1
    beside_all = turn == space.base.last_run if parted else ~epilogue
    return float(least[beside_all].max(initial=0.0)), end
