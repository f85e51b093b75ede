"""Nodes that run one identical command find each other at HOST:PORT and get their ranks.

The node that HOST is an address of binds PORT and serves; every node, this one too, connects and
says what it runs. When all have come (or no more came for LAST_CALL_S and those that did suffice)
they are ranked by the natural order of their host names (node-2 before node-10: neighbours in name
are mostly neighbours on the links), and the first names the address of jax's coordinator.
Connections stay open while the job runs: a node that fails, or whose connection breaks, ends it for
all.

Messages are lines of JSON: {program, host, port} to the server; {rank, coordinator, joined} or
{refused} back; then {ended: "" or why} and {stop: why}.
"""

from __future__ import annotations

import errno
import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanError

RETRY_S = 0.2
LONGEST_LINE_BYTES = 1 << 16
LAST_CALL_S = 30.0
"""How long nodes that suffice wait for another one to join."""
Suffice = Callable[[int], int]
"""Nodes that joined -> how many of them take part; 0 while they do not suffice."""


@dataclass
class _Member:
    """A node at the server."""

    connection: socket.socket
    address: str
    order: int
    received: bytes = b""
    hello: dict[str, Any] = field(default_factory=dict)
    done: bool = False


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. PlanError P202 otherwise."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise PlanError(
            "P202", f"--coordinator {text!r} is not HOST:PORT", help=["--coordinator node0:29400"]
        )
    return host.strip("[]"), int(port)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Key that sorts node-2 before node-10."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)
    )


class Server:
    """Gathers nodes, `nodes` at most, ranks them, then passes on the first failure. One thread;
    ends with the job."""

    def __init__(
        self,
        listener: socket.socket,
        nodes: int,
        program: str,
        timeout_s: float,
        suffice: Suffice | None = None,
    ) -> None:
        self.listener, self.nodes, self.program = listener, nodes, program
        self.suffice = suffice or (lambda joined: joined if joined == nodes else 0)
        self.deadline = time.monotonic() + timeout_s
        self.joined_at = time.monotonic()
        self.timeout_s = timeout_s
        self.members: list[_Member] = []
        self.ranked = False
        self.selector = selectors.DefaultSelector()
        self.thread = threading.Thread(target=self._run, daemon=True)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, None)
        self.thread.start()

    def _run(self) -> None:
        count = 0
        while not (self.ranked and all(m.done for m in self.members)):
            for key, _ in self.selector.select(RETRY_S):
                if key.data is None:
                    try:
                        connection, (host, *_) = self.listener.accept()
                    except OSError:
                        continue  # it left before it was let in
                    connection.setblocking(False)
                    count += 1
                    self.selector.register(
                        connection, selectors.EVENT_READ, _Member(connection, host, count)
                    )
                else:
                    self._read(key.data)
            if not self.ranked and time.monotonic() > min(
                self.joined_at + LAST_CALL_S, self.deadline
            ):
                self._rank()
            if not self.ranked and time.monotonic() > self.deadline:
                here = ", ".join(m.hello["host"] for m in self.members) or "none"
                for m in list(self.members):
                    self._refuse(
                        m,
                        f"{len(self.members)} of {self.nodes} nodes joined within"
                        f" {self.timeout_s:.0f} s: {here}",
                    )
                break
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()

    def _read(self, m: _Member) -> None:
        try:
            data = m.connection.recv(LONGEST_LINE_BYTES)
        except OSError:
            data = b""
        m.received += data
        *lines, m.received = m.received.split(b"\n")
        for line in lines:
            try:
                self._message(m, json.loads(line))
            except (ValueError, TypeError, KeyError):  # no node of ours: a port scan, a browser
                self._drop(m)
                return
        if not data or len(m.received) > LONGEST_LINE_BYTES:
            self._drop(m)

    def _message(self, m: _Member, message: dict[str, Any]) -> None:
        if m in self.members:
            m.done = True
            if message["ended"]:
                self._stop(m, str(message["ended"]))
            return
        m.hello = {
            "program": str(message["program"]),
            "host": str(message["host"]),
            "port": int(message["port"]),
        }
        if self.ranked:
            return self._refuse(
                m,
                f"all {len(self.members)} nodes have joined already:"
                f" {', '.join(x.hello['host'] for x in self.members)}",
            )
        if m.hello["program"] != self.program:
            return self._refuse(
                m,
                "it has another program, other arguments, or another number of nodes than the"
                " coordinating one",
            )
        self.members.append(m)
        self.joined_at = time.monotonic()
        if len(self.members) == self.nodes:
            self._rank()
        return None

    def _rank(self) -> None:
        """Give those that joined their ranks, where they suffice; those that are left over are
        told."""
        joined = len(self.members)
        used = self.suffice(joined)
        if not used:
            return
        self.ranked = True
        self.members.sort(key=lambda x: (natural(x.hello["host"]), x.order))
        self.members, spare = self.members[:used], self.members[used:]
        first = self.members[0]
        for rank, x in enumerate(self.members):
            self._send(
                x,
                {
                    "rank": rank,
                    "coordinator": f"{first.address}:{first.hello['port']}",
                    "joined": joined,
                },
            )
        for x in spare:
            self._refuse(x, f"{joined} nodes joined, and the plan for them runs on {used}")

    def _stop(self, cause: _Member, why: str) -> None:
        for m in self.members:
            if m is not cause and not m.done:
                self._send(
                    m, {"stop": f"node {self.members.index(cause)} ({cause.hello['host']}) {why}"}
                )

    def _drop(self, m: _Member) -> None:
        self.selector.unregister(m.connection)
        m.connection.close()
        if m in self.members and not self.ranked:
            self.members.remove(m)
        elif m in self.members and not m.done:
            m.done = True
            self._stop(m, "is gone: its connection broke")

    def _refuse(self, m: _Member, why: str) -> None:
        self._send(m, {"refused": why})

    @staticmethod
    def _send(m: _Member, what: dict[str, Any]) -> None:
        with suppress(OSError):  # noted when its connection is read
            m.connection.send(json.dumps(what).encode() + b"\n")


@dataclass
class Seat:
    """A node's place in the job, while it lasts."""

    rank: int
    coordinator: str
    joined: int
    connection: socket.socket
    server: Server | None
    received: bytes = b""
    broken: str = ""

    def stopped(self) -> str:
        """Why another node has ended the job, "" while none has."""
        if not self.broken:
            try:
                data = self.connection.recv(LONGEST_LINE_BYTES)
                self.received += data
                if b"\n" in self.received:
                    self.broken = (
                        str(json.loads(self.received.partition(b"\n")[0])["stop"])
                        + "; the job was ended"
                    )
                elif not data:
                    self.broken = "the coordinating node is gone; the job was ended"
            except BlockingIOError:
                pass
            except (OSError, ValueError, KeyError):
                self.broken = "the connection to the coordinating node broke; the job was ended"
        return self.broken

    def leave(self, why: str = "") -> None:
        """Tell the others how this node ended; the serving node waits until all have."""
        with suppress(OSError):  # nobody to tell
            self.connection.setblocking(True)
            self.connection.sendall(json.dumps({"ended": why}).encode() + b"\n")
        if self.server:
            self.server.thread.join(LEAVE_S)
        self.connection.close()


LEAVE_S = 30.0
"""How long the serving node waits for the others to end after it has."""


def join(
    coordinator: str,
    nodes: int,
    program: str,
    timeout_s: float,
    host: str,
    say: Callable[[str], None],
    suffice: Suffice | None = None,
) -> Seat:
    """Serve where HOST is this machine and nobody serves yet, then join. program: digest of what
    runs, the same on every node. suffice: which numbers of nodes do with fewer than `nodes`, by
    default none.

    Raises PlanError: P202 when nobody answers at the address, P203 when the node is not wanted
    (surplus, another program) or others did not come.
    """
    where = address_of(coordinator)
    server = _serve(where, nodes, program, timeout_s, suffice)
    deadline = time.monotonic() + timeout_s
    say(
        f"{'serving' if server else 'joining'} at {coordinator}, waiting for"
        f" {'at most ' if suffice else ''}{nodes} nodes (at most {timeout_s:.0f} s, --timeout)"
    )
    connection = _connect(where, deadline, coordinator, timeout_s)
    request = {"program": program, "host": host, "port": free_port()}
    connection.sendall(json.dumps(request).encode() + b"\n")
    # The server gives up first, and says who is missing.
    connection.settimeout(max(deadline - time.monotonic(), 0) + 5)
    answer, rest = _answer(connection, coordinator)
    if "refused" in answer:
        connection.close()
        raise PlanError(
            "P203",
            f"this node ({host}) has no place in the job: {answer['refused']}",
            help=[f"the same command on {nodes} nodes, within --timeout of each other"],
        )
    connection.setblocking(False)
    return Seat(
        rank=int(answer["rank"]),
        coordinator=str(answer["coordinator"]),
        joined=int(answer["joined"]),
        connection=connection,
        server=server,
        received=rest,
    )


def _answer(connection: socket.socket, coordinator: str) -> tuple[dict[str, Any], bytes]:
    """The server's line, and what came behind it. Raises PlanError P203 where none comes."""
    received = b""
    try:
        while b"\n" not in received:
            data = connection.recv(LONGEST_LINE_BYTES)
            if not data:
                raise OSError("the connection was closed")
            received += data
        line, _, rest = received.partition(b"\n")
        return json.loads(line), rest
    except (OSError, ValueError) as e:
        connection.close()
        help = [
            "start all nodes within --timeout of each other",
            "another port, where something else listens at this one",
        ]
        raise PlanError(
            "P203", f"{coordinator} did not give this node a rank: {e}", help=help
        ) from e


def _serve(
    where: tuple[str, int], nodes: int, program: str, timeout_s: float, suffice: Suffice | None
) -> Server | None:
    """A server on the address, None where it is not this machine's or is served already."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise PlanError(
            "P202",
            f"--coordinator: the host {where[0]!r} cannot be found: {e.strerror}",
            help=["a name or address that every node resolves"],
        ) from e
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        if e.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise PlanError(
            "P202",
            f"cannot serve at {where[0]}:{where[1]}: {e.strerror}",
            help=["another port of --coordinator, above 1023"],
        ) from e
    return Server(listener, nodes, program, timeout_s, suffice)


def _connect(
    where: tuple[str, int], deadline: float, coordinator: str, timeout_s: float
) -> socket.socket:
    while True:
        try:
            return socket.create_connection(
                where, timeout=max(min(5.0, deadline - time.monotonic()), 0.1)
            )
        except OSError as e:
            if time.monotonic() > deadline:
                raise PlanError(
                    "P202",
                    f"nobody answers at {coordinator} within {timeout_s:.0f} s: {e.strerror or e}",
                    help=[f"run the same command on {where[0]}; --timeout S to wait longer"],
                ) from e
            time.sleep(RETRY_S)
