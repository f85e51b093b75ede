"""Times and bytes of all options of all variables of a space in a row, as planner.space.assemble
adds them up. Derived once a space."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.liveness import WeightReaders, least_above_saved
from planner.analysis.passing import readers
from planner.space.variables import Space


@dataclass(frozen=True)
class OptionCosts:
    """Times and usage of all variables' options in a row. [options]"""

    first: np.ndarray  # [variables] first option of each
    count: np.ndarray  # nodes of each option's variable
    once: np.ndarray  # seconds forward and backward
    again_s: np.ndarray  # seconds of the replay in repeated blocks
    again_keep_s: np.ndarray  # the same with results of collectives kept
    each: dict[int, np.ndarray]  # level -> seconds each microbatch
    sums: dict[int, np.ndarray]  # level -> seconds each microbatch, of several, to add up gradients
    reduce: dict[int, np.ndarray]  # level -> seconds once a step
    state: dict[int, np.ndarray]  # level -> bytes of state
    kept: np.ndarray  # kept activations
    again: np.ndarray  # the same under recomputation
    saved_collective: np.ndarray  # what is kept beside it with results of collectives, at least
    inner: np.ndarray  # what of that one repeat keeps
    pieces: np.ndarray  # into how many the graph's batch may be cut on
    least_pieces: float  # the least of them
    held: dict[int, np.ndarray]  # level -> bytes of the sums over microbatches
    tail: np.ndarray  # activations kept by nodes after the repeated blocks
    late: np.ndarray  # gradients of repeated blocks
    work: dict[
        bool, np.ndarray
    ]  # working set of one node, where weights are gathered (True) without them
    after: np.ndarray  # whether that is after the repeated blocks
    least: dict[
        bool, tuple[float, float]
        # as `work`: the largest of the operators' smallest, those after the repeated blocks aside;
        # the least that is alive only at
    ]
    # the end of the forward pass
    most_late: float
    weights: Weights | None
    """Of a graph without repeated blocks, whose memory is that of
    costmodels.liveness."""


@dataclass(frozen=True)
class Weights:
    """Variables with weights that have gradients: which, and the operators that read each
    variable's."""

    rows: np.ndarray
    read: WeightReaders


def _weights(space: Space) -> Weights | None:
    if not space.base.written_out:
        return None
    graph, rows, found = space.base.graph, list[int](), list[list[int]]()
    for k, v in enumerate(space.variables):
        if v.kind == "op" and any(
            n in space.base.own and n in space.base.grad for n in graph.nodes[v.node].inputs
        ):
            rows.append(k)
            found.append([v.node])
        elif v.kind == "weight" and v.name in space.base.grad:
            rows.append(k)
            found.append([i for i, _ in graph.consumers[v.name]])
    return Weights(np.array(rows, np.int64), readers(graph, found))


def costs_of(space: Space) -> OptionCosts:
    """Those of a space, kept in its memo."""
    if "flat" not in space.memo:
        every, levels = space.variables, tuple(space.variables[0].state_bytes)
        sizes = np.array([len(v.saved_bytes) for v in every])

        def row(part: str) -> np.ndarray:
            return np.concatenate([getattr(v, part) for v in every])

        def rows(part: str) -> dict[int, np.ndarray]:
            return {z: np.concatenate([getattr(v, part)[z] for v in every]) for z in levels}

        count = np.repeat([v.count for v in every], sizes)
        repeated = np.repeat(
            [v.kind == "op" and v.node in space.base.replayed for v in every], sizes
        )
        forward = row("forward_s")
        space.memo["flat"] = OptionCosts(
            first=(first := np.concatenate([[0], np.cumsum(sizes)[:-1]])),
            count=count,
            once=forward + row("backward_s"),
            again_s=np.where(repeated, forward, 0.0),
            again_keep_s=np.where(repeated, forward - row("not_recomputed_s"), 0.0),
            each=rows("grad_reduce_per_microbatch_s"),
            sums=rows("grad_accumulate_s"),
            reduce=rows("grad_reduce_per_step_s"),
            state={z: count * x for z, x in rows("state_bytes").items()},
            kept=row("saved_bytes"),
            again=row("saved_bytes_remat"),
            saved_collective=row("saved_collective_bytes"),
            inner=row("saved_bytes_one_repeat"),
            pieces=(pieces := row("pieces")),
            least_pieces=float(pieces.min(initial=np.inf)),
            held={z: count * x for z, x in rows("grad_accumulator_bytes").items()},
            tail=(tail := row("saved_bytes_epilogue")),
            late=count * row("block_grad_bytes"),
            work=(
                work := {
                    False: row("workspace_bytes"),
                    True: row("workspace_without_weights_bytes"),
                }
            ),
            after=np.repeat(
                after := np.array([v.node in space.base.epilogue for v in every]), sizes
            ),
            least={
                bare: _least_work(
                    space, np.minimum.reduceat(each, first), after, np.minimum.reduceat(tail, first)
                )
                for bare, each in work.items()
            },
            most_late=sum(v.count * float(v.block_grad_bytes.max()) for v in every),
            weights=_weights(space),
        )
    found: OptionCosts = space.memo["flat"]
    return found


def _least_work(
    space: Space, least: np.ndarray, late: np.ndarray, tail: np.ndarray
) -> tuple[float, float]:
    """The largest of the operators' smallest working sets before the tail (of a program without a
    loop, what is left of it above all that is kept), and what is alive only at the end of the
    forward pass. least, tail: the least of each variable's options; late: whether it is of the
    tail. [variables]
    """
    end = sum(tail.tolist()) + float(least[late].max(initial=0.0))
    if space.base.written_out:
        ops = [k for k, v in enumerate(space.variables) if v.kind == "op" and not late[k]]
        return (
            least_above_saved(
                least[ops], np.array([space.variables[k].saved_bytes.max() for k in ops])
            ),
            end,
        )
    return float(least[~late].max(initial=0.0)), end
