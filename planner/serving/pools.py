"""Prompts and generation on devices apart: so many replicas that pass prompts, so many that
generate, and the cache that goes from one to the other.

Each replica is planned for its phase alone, on devices of its own: its layout need not suit the
other phase. A request's prompt is passed by the first replica in turn (no other generates there);
then its keys, values and states go to a replica that generates, one request after the other over
the links of the replica they leave. They are cut evenly over the devices on both sides, so the
busier side has max(received, sent) bytes of a device, and the link is the outermost of the machine:
pools of one node are joined by the node's.

How the devices are divided follows from what a replica of each kind serves at most: of each pair of
replica sizes the divisions that serve most are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np

from costmodels.collectives import Span, collective_time_s
from planner.errors import PlanError
from planner.machine.topology import Topology
from planner.pins.pins import Pins
from planner.search.request import Request, SearchResult
from planner.serving.arrivals import Requests
from planner.serving.continuous import (
    BLOCK,
    Course,
    Limits,
    most_a_second,
    overlap_s,
    serve_all,
    settled,
)
from planner.serving.joint import NO_TECHNIQUES, Joint
from planner.serving.outcome import Outcome
from planner.serving.result import Service
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices
from planner.serving.traffic import AT_ONCE, STEP_TOKENS, Traffic, figures_of, most_waiting

DIVISIONS = 3
"""Divisions of the devices that are simulated for each pair of replica sizes."""
HAND_WORTH = 0.98
"""A layout by hand is taken that serves so much of what the free one does: engines can say it."""


class Asked(Protocol):
    """What is asked of a machine (planner.serving.asked)."""

    @property
    def request(self) -> Request:
        """The machine and how it computes."""
        ...

    @property
    def prefill_tokens(self) -> int | None:
        """Tokens of a step, where they are said."""
        ...

    def served(self, prompt: int, generate: int, concurrency: int) -> Service:
        """So many sequences of these lengths."""
        ...

    def joint(self, service: Service) -> Joint:
        """The search for a service."""
        ...


@dataclass(frozen=True)
class Unit:
    """A replica of one phase on `split` devices. per_s: requests a second that it serves at most;
    token_bytes: of a device, of a token's keys and values; sequence_bytes: likewise what a sequence
    has beside these; memory_bytes: of a device, with as many sequences as are let in at mean
    lengths."""

    asked: Asked
    joint: Joint
    split: int
    label: str
    result: SearchResult
    prices: PlanPrices
    limits: Limits
    per_s: float
    token_bytes: float
    memory_bytes: int
    weights_bytes: int
    cache_bytes: int
    sequence_bytes: float = 0.0
    state_bytes: int = 0

    @property
    def row(self) -> dict[str, Any]:
        """What a plan's file says of it."""
        return {
            "split": self.split,
            "label": self.label,
            "per_s": self.per_s,
            "sequences": self.limits.sequences,
            "step_tokens": self.limits.step_tokens,
        }


@dataclass(frozen=True)
class Apart:
    """Replicas of both kinds under the traffic. sent_s: seconds that each request's keys and values
    are on their way [n]; there_s: when they have come [n]."""

    prefill: Unit
    decode: Unit
    replicas: tuple[int, int]
    outcome: Outcome
    courses: tuple[Sequence[Course], Sequence[Course]]
    sent_s: np.ndarray
    there_s: np.ndarray
    link: str

    @property
    def label(self) -> str:
        """What it is called in the table."""
        return f"apart: {self.prefill.label} + {self.decode.label}"

    @property
    def words(self) -> str:
        """`2 x 1 + 1 x 4`: replicas that pass prompts, and that generate."""
        (p, d), (a, b) = self.replicas, (self.prefill.split, self.decode.split)
        return f"{p} x {a} + {d} x {b}"

    def figures(self) -> dict[str, Any]:
        """Figures as of a pair of plans; the memory is the fuller kind's."""
        p, d, (n, m) = self.prefill, self.decode, self.replicas
        fuller = max(p, d, key=lambda unit: unit.memory_bytes)
        mean = self.decode.joint.step.service
        devices = n * p.split + m * d.split
        base_s, key_s = d.prices.decode(d.limits.sequences)
        return {
            "replicas": n + m,
            "split": max(p.split, d.split),
            "wave": 0,
            "ttft_s": p.prices.pass_s(1, mean.prompt),
            "tpot_s": base_s + key_s * d.limits.sequences * mean.length,
            "tokens_per_s_per_device": self.outcome.most_per_s * mean.generate / devices,
            "memory_bytes": fuller.memory_bytes,
            "cache_bytes": fuller.cache_bytes,
            "weights_bytes": fuller.weights_bytes,
            "fits": True,
            **({"state_bytes": fuller.state_bytes} if fuller.state_bytes else {}),
            "pools": self.words,
            "units": {
                name: {**unit.row, "replicas": replicas}
                for name, unit, replicas in (("prefill", p, n), ("decode", d, m))
            },
        }

    def said(self) -> dict[str, Any]:
        """What happened, by name."""
        first, second = self.courses
        p, d, (n, m) = self.prefill, self.decode, self.replicas
        figures = figures_of(second, d.limits)
        prompts = figures_of(first, p.limits)
        start, end = settled(first)
        busy_s = overlap_s(self.there_s - self.sent_s, self.there_s, start, end).sum()
        return {
            **figures,
            "waiting": figures["waiting"] + prompts["waiting"],
            "most_waiting": most_waiting((*first, *second)),
            "pools": {
                "prefill": {**p.row, "replicas": n, "busy": prompts["busy"]},
                "decode": {**d.row, "replicas": m, "busy": figures["busy"]},
                "transfer": {
                    "bytes_per_token": d.token_bytes * d.split,
                    **(
                        {"bytes_per_sequence": d.sequence_bytes * d.split}
                        if d.sequence_bytes
                        else {}
                    ),
                    "mean_s": float(self.sent_s.mean()),
                    "busy": float(busy_s) / n / (end - start),
                    "link": self.link,
                },
            },
        }


class Pools:
    """Replicas of both kinds, planned once for each size. on: what is asked of so many devices;
    sizes: of replicas, rising."""

    def __init__(self, on: Callable[[int], Asked], sizes: Sequence[int], at_once: float) -> None:
        self.on, self.sizes, self.at_once = on, sizes, at_once
        self._units: dict[int, tuple[list[Unit], list[Unit]]] = {}

    def units(self, split: int, traffic: Traffic) -> tuple[list[Unit], list[Unit]]:
        """Replicas on so many devices, those that serve most first: that pass prompts, that
        generate."""
        if split not in self._units:
            replicas = _Replicas(self, split, traffic)
            self._units[split] = replicas.units("prompts"), replicas.units("step")
        return self._units[split]

    def best(self, topology: Topology, traffic: Traffic, objective: str) -> list[Apart]:
        """The best division of the machine's devices, and the best whose replicas are all cut by
        hand, which engines can say, where that is another; none where nothing is generated behind
        the first token, or there are too few devices."""
        devices = topology.devices
        if int(traffic.requests.generate.max()) == 1 or devices <= min(self.sizes):
            return []
        divisions: dict[tuple[str, str], Apart] = {}
        known = [self.units(s, traffic) for s in self.sizes if s < devices]
        for by_hand in (False, True):
            kinds = [
                [first for units in of if (first := _first(units, by_hand))]
                for of in zip(*known, strict=True)
            ]
            loads = [
                _simulated(p, d, replicas, traffic, topology)
                for p, d in product(*kinds)
                for replicas in _divisions(p, d, devices)
            ]
            order = lambda a: (a.outcome.key(objective, traffic.targets), a.words)  # noqa: E731
            if loads:
                best = min(loads, key=order)
                divisions.setdefault((best.label, best.words), best)
        return list(divisions.values())


class _Replicas:
    """The replicas of one size, of both kinds."""

    def __init__(self, pools: Pools, split: int, traffic: Traffic) -> None:
        self.asked, self.split, self.traffic = pools.on(split), split, traffic
        sequences = max(1, int((pools.at_once or AT_ONCE) * split))
        self.joint = self.asked.joint(self.asked.served(*traffic.mean_lengths, sequences))
        self.longest = traffic.longest

    @cached_property
    def pairs(self) -> list[tuple[str, SearchResult, SearchResult]]:
        """(label, plan for prompts, plan for steps)"""
        mesh = self.joint.axes(1, self.split)
        hand = Pins(mesh, {**NO_TECHNIQUES, "tensor": "megatron"})
        rows = []
        for label, pins in ((f"tp={self.split}", hand), ("free", Pins(mesh, NO_TECHNIQUES))):
            prompts, step = (
                self.joint.solve(model, pins) for model in (self.joint.prompts(1), self.joint.step)
            )
            if prompts and step and prompts.best and step.best:
                rows.append((label, prompts, step))
        return rows

    def units(self, phase: str) -> list[Unit]:
        """Replicas of a phase that fit, the one first that serves most; by hand where that is
        hardly less."""
        units = [unit for row in self.pairs if (unit := self._unit(phase, *row))]
        most = max((u.per_s for u in units), default=0.0)
        return sorted(units, key=lambda u: u.per_s < HAND_WORTH * most)

    def _unit(
        self, phase: str, label: str, prompts: SearchResult, step: SearchResult
    ) -> Unit | None:
        assert prompts.best and step.best
        joint, result = self.joint, prompts if phase == "prompts" else step
        service = joint.step.service
        generating = joint.phase(step.base, step.best)
        cache = joint.cache_bytes(generating)
        token = joint.token_bytes(generating) / service.concurrency
        passing = phase == "prompts"
        cost = joint.phase(prompts.base, prompts.best).cost if passing else generating.cost
        states = joint.state_bytes(generating)
        state = states / service.concurrency
        used = cost.memory.total - (0 if passing else cache + states)
        sizes = Sizes(joint, self.longest, service.prompt)
        limits = self._limits(joint.request.limit_bytes - used, token, state, sizes)
        if limits is None:
            return None
        sequences = limits.sequences
        prices = PlanPrices(sizes, 1, prompts.best, step.best, token, state)
        full = self.traffic.repeated(limits.full(self.traffic.mean_lengths))
        full = _prompts_of(full) if passing else full
        per_s = most_a_second(full, prices, limits, prefilled=not passing)
        weights = cost.memory.parameters - (0 if passing else cache + states)
        kept = token * (0 if passing else sequences * float(limits.kept(np.array(service.length))))
        state_bytes = 0 if passing else int(state * sequences)
        figures = (int(used + kept + state_bytes), int(weights), int(kept), state, state_bytes)
        return Unit(
            self.asked, joint, self.split, label, result, prices, limits, per_s, token, *figures
        )

    def _limits(self, free_bytes: float, token: float, state: float, sizes: Sizes) -> Limits | None:
        """What a replica takes whose devices have so many bytes left for keys and values, so many a
        token, and states; None where the longest request has no room."""
        service = self.joint.step.service
        step_tokens = self.asked.prefill_tokens or max(STEP_TOKENS)
        of_state = state / token if token else 0.0
        if token:
            room = int(free_bytes / token) // BLOCK * BLOCK
        else:  # states alone, which do not grow
            fitting = min(service.concurrency, int(free_bytes / state))
            room = fitting * (self.longest + 2 * BLOCK)
        limits = Limits(1, step_tokens, room, sizes.windows)
        longest, mean = limits.room(np.array([self.longest, service.length])).tolist()
        if room < longest + BLOCK + of_state:
            return None
        sequences = max(1, min(service.concurrency, int(room // (mean + BLOCK + of_state))))
        room -= int(np.ceil(of_state * sequences / BLOCK)) * BLOCK
        return replace(limits, sequences=sequences, cache_tokens=room)


def _first(units: Sequence[Unit], by_hand: bool) -> Unit | None:
    """The first of replicas, or of those cut by hand."""
    return next((u for u in units if not by_hand or u.label == f"tp={u.split}"), None)


def _prompts_of(requests: Requests) -> Requests:
    """Requests that are done with their first token."""
    return Requests(requests.arrival_s, requests.prompt, np.ones_like(requests.generate))


def _divisions(p: Unit, d: Unit, devices: int) -> list[tuple[int, int]]:
    """Numbers of replicas of both kinds, those that serve most: all devices are used where that is
    possible."""
    every = [(n, (devices - n * p.split) // d.split) for n in range(1, devices // p.split + 1)]
    some = [(n, m) for n, m in every if m]
    full = [(n, m) for n, m in some if n * p.split + m * d.split == devices]
    return sorted(full or some, key=lambda r: -min(r[0] * p.per_s, r[1] * d.per_s))[:DIVISIONS]


def _simulated(
    p: Unit, d: Unit, replicas: tuple[int, int], traffic: Traffic, topology: Topology
) -> Apart:
    """Requests through both kinds of replicas."""
    requests, (n, m) = traffic.requests, replicas
    first = serve_all(_prompts_of(requests), n, p.prices, p.limits)
    level = topology.levels[-1]
    span = (Span(2, level.effective_bytes_per_s, level.latency_s),)
    busier = max(1.0, d.split / p.split)
    token, state = d.token_bytes * busier, d.sequence_bytes * busier
    sent = np.array(
        [
            collective_time_s("collective-permute", token * k + state, span)
            for k in d.limits.kept(requests.prompt).tolist()
        ]
    )
    first_s, there_s = np.empty(len(requests)), np.empty(len(requests))
    for i, course in enumerate(first):
        first_s[i::n] = course.first_s
        there_s[i::n] = list(_one_by_one(course.first_s, sent[i::n]))
    going = np.flatnonzero(requests.generate > 1)
    order = going[np.argsort(there_s[going], kind="stable")]
    later = Requests(there_s[order], requests.prompt[order], requests.generate[order])
    second = serve_all(later, m, d.prices, d.limits, prefilled=True)
    finish_s = first_s.copy()
    for i, course in enumerate(second):
        finish_s[order[i::m]] = course.finish_s
    most = min(n * p.per_s, m * d.per_s, n / float(sent.mean()))
    r = requests
    outcome = Outcome.of_requests(
        r.arrival_s, r.generate, first_s, finish_s, most, traffic.rate_per_s
    )
    return Apart(p, d, replicas, outcome, (first, second), sent, there_s, level.name)


def _one_by_one(ready_s: np.ndarray, takes_s: np.ndarray) -> Iterator[float]:
    """When each is there that is ready at a time, in the order of its place; prompts of a replica
    are passed in that order."""
    free = 0.0
    for ready, takes in zip(ready_s.tolist(), takes_s.tolist(), strict=True):
        free = max(free, ready) + takes
        yield free


def refusal(pools: Mapping[str, Any]) -> PlanError:
    """The error for a program of pools."""
    return PlanError(
        "P224",
        "prompts and generation on devices apart: no program here passes the cache from one to the"
        " other",
        detail=[
            f"{k}: {pools[k]['replicas']} x {pools[k]['split']}" for k in ("prefill", "decode")
        ],
        help=["plan export --to vllm or sglang starts both", "plan without --pools"],
    )
