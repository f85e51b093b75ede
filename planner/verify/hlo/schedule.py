"""What the schedule of an optimised program hides of its collectives: what runs between the start
and the done of each.

Instructions stand in the order in which they are issued. A collective that is not split into a
start and a done is waited for where it stands. A loop between the start and the done of a
collective is work of all its trips; the collectives in it are followed for one trip, and wait in
every one as they do in that. Of a conditional the branch with most seconds counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from costmodels.overlap import Step, waited_s
from planner.verify.hlo.kernels import COLLECTIVE
from planner.verify.hlo.text import Computation, Instruction, Module
from planner.verify.hlo.trip_counts import trip_count

KernelSeconds = Callable[[Instruction, Computation], float]


@dataclass(frozen=True)
class Timed:
    """A computation that has been followed. seconds: from its first instruction to its last;
    waited: collective -> seconds waited for it, loops within multiplied."""

    seconds: float
    waited: Mapping[str, float]


@dataclass
class Schedule:
    """kernel_s: seconds of one run of a kernel (0 of anything else); collective_s: name of a
    collective's instruction -> seconds of one run on the links."""

    module: Module
    kernel_s: KernelSeconds
    collective_s: Mapping[str, float]
    _known: dict[str, Timed] = field(default_factory=dict)

    def followed(self, name: str = "") -> Timed:
        """A computation, by default the whole program."""
        name = name or self.module.entry
        if name not in self._known:
            self._known[name] = self._follow(self.module.computations[name])
        return self._known[name]

    def _follow(self, computation: Computation) -> Timed:
        steps: list[Step] = []
        work, inner = 0.0, dict[str, float]()
        for instruction in computation.instructions:
            if sent := self._sent(instruction):
                steps.append(Step("start", self.collective_s.get(sent, 0.0), sent))
                if not instruction.opcode.endswith("-start"):
                    steps.append(Step("wait", name=sent))
            elif instruction.opcode.endswith("-done") and instruction.operands:
                started = computation.by_name.get(instruction.operands[0])
                steps.append(Step("wait", name=self._sent(started) if started else ""))
            else:
                seconds, waits = self._seconds(computation, instruction)
                if seconds:
                    steps.append(Step("work", seconds))
                work += seconds
                for name, wait_s in waits.items():
                    inner[name] = inner.get(name, 0.0) + wait_s
        waited = waited_s(steps)
        return Timed(work + sum(waited.values()), {**inner, **waited})

    def _sent(self, instruction: Instruction) -> str:
        """The collective that an instruction runs or starts, "" for none."""
        if COLLECTIVE.match(instruction.opcode):
            return instruction.name
        if instruction.opcode == "async-start" and instruction.callees:
            wrapped = self.module.computations[instruction.callees[0]]
            return next((i.name for i in wrapped.instructions if COLLECTIVE.match(i.opcode)), "")
        return ""

    def _seconds(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[float, Mapping[str, float]]:
        """Seconds of all an instruction runs, and the waits in it."""
        if instruction.opcode == "while":
            body = self.followed(instruction.attribute(r"\bbody=%?([\w.\-]+)"))
            trips = trip_count(self.module, computation, instruction) or 1
            return trips * body.seconds, {k: trips * s for k, s in body.waited.items()}
        if instruction.opcode in ("conditional", "call", "async-start"):
            branches = [
                self.followed(name)
                for name in instruction.callees
                if name in self.module.computations
            ]
            if not branches:
                return 0.0, {}
            slowest = max(branches, key=lambda timed: timed.seconds)
            return slowest.seconds, slowest.waited
        return self.kernel_s(instruction, computation), {}
