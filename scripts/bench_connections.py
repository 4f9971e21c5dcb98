"""Measure what open streams cost the server, on a stub model whose steps take a set time.

    python scripts/bench_connections.py [--queued 500,2000,5000] [--running 500x2,500x20] \\
        [--seconds 15] [--route generate|chat] [--json FILE]

Each case has a server process of its own (`scripts/paced_server.py`: real routes and sockets, a
model that only counts) and a client process that opens N streams and reads them with epoll.

    queued    one long request holds the only row of the batch, N more wait behind it: what they get
              are keep-alive comments
    NxR       N streams get R tokens a second each, an event a token

CPU is what the kernel has counted for the server process, over --seconds once all streams are open,
as a share of one core: of the whole process, and of its two threads apart (the hub has HTTP, the
engine thread steps, the stub model's arithmetic included); `system_share` is what of the whole was
spent in the kernel, for the sockets above all. /health/live is asked every 50 ms on a
kept connection meanwhile, which costs the server its share, too. Memory is what the process holds
more than before the streams came, for each of them.

At the end every stream is checked: chunks whole, events in order, none lost or doubled, nothing but
comments in those that waited. What is wrong is named, and the exit status is 1. The last line on
stdout is one JSON object with everything.
"""

import contextlib
import http.client
import json
import math
import multiprocessing
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

SERVER = Path(__file__).with_name("paced_server.py")
VOCAB = 128  # of the stub: token n is " n"
PROBE_SECONDS = 0.05
QUEUED_PACE_MS = 50.0
QUEUE = ["--max-queued-requests", "10000", "--max-queued-tokens", "100000000"]
SPARE_SECONDS = 20.0  # in which all streams have come, and the measurement has begun
SETTLE_SECONDS = 2.0  # what was piled up while the streams came is worked off
GIVE_UP_SECONDS = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ROUTES = {"generate": "/generate", "chat": "/v1/chat/completions"}
TABLE = "{:>12} {:>9} {:>8} {:>8} {:>8} {:>22} {:>12} {:>9}"
TITLES = (
    "case",
    "events/s",
    "CPU",
    "hub",
    "engine",
    "health p50/p99/max ms",
    "KB/stream",
    "failures",
)


@dataclass(frozen=True)
class Case:
    """`rate` is tokens a second for each stream; 0: they wait in the queue."""

    streams: int
    rate: float
    route: str

    @property
    def name(self) -> str:
        return f"{self.streams}x{self.rate:g}" if self.rate else f"{self.streams} queued"

    def num_tokens(self, seconds: float) -> int:
        """Enough for the whole measurement: a stream that comes first is one token ahead of the
        next, as one prompt is read in each step."""
        return self.streams + math.ceil((seconds + SPARE_SECONDS) * self.rate)


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU by thread, those of all within the system, and resident bytes."""

    threads: dict[int, float]
    system: float
    rss: int


# --- the client process -------------------------------------------------------------------------


def request(route: str, num_tokens: int) -> bytes:
    asked: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0, "stream": True}
    if route == "chat":
        asked |= {"messages": [{"role": "user", "content": "a"}]}
    else:
        asked |= {"prompt": "a"}
    body = json.dumps(asked).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_streams(port: int, case: Case, num_tokens: int, told: Connection) -> None:
    """Opens the streams and reads them. On each word of `told` it answers; on "end" it closes them
    and answers with what is wrong."""
    selector = selectors.DefaultSelector()
    parts: dict[socket.socket, list[bytes]] = {}
    asked = request(case.route, num_tokens)
    counts = {"events": 0, "ended": 0, "begun": 0}

    def read(connection: socket.socket) -> None:
        data = connection.recv(1 << 18)
        counts["begun"] += not parts[connection]
        counts["events"] += data.count(b"\n\n")
        parts[connection].append(data)
        if not data or data.endswith(b"0\r\n\r\n"):
            counts["ended"] += 1
            selector.unregister(connection)

    def turn(seconds: float) -> bool:
        for key, _ in selector.select(seconds):
            if key.fileobj is told:
                if told.recv() == "end":
                    return False
                told.send(counts)
            else:
                read(key.data)
        return True

    selector.register(told, selectors.EVENT_READ)
    for _ in range(case.streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(asked)
        parts[connection] = []
        selector.register(connection, selectors.EVENT_READ, connection)
        turn(0.001)  # a thousand a second
    while turn(1.0):
        pass
    for connection in parts:
        connection.close()
    expected = num_tokens if case.rate else 0
    told.send([wrong for got in parts.values() if (wrong := fault(b"".join(got), expected))])


def fault(received: bytes, num_tokens: int) -> str | None:
    """What is wrong with a stream's bytes; None if they are an answer of so many tokens. With 0
    nothing may have come but comments."""
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        return f"no 200: {received[:80]!r}"
    if b"\r\nTransfer-Encoding: chunked" not in head:
        return "not in chunks"
    events = []
    is_ended = False
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if len(body) < length + 2 or body[length : length + 2] != b"\r\n":
            return f"a chunk is not whole: {body[:80]!r}"
        is_ended = length == 0
        events += [event for event in body[:length].split(b"\n\n") if event]
        body = body[length + 2 :]
    said = [event for event in events if not event.startswith(b":")]
    if num_tokens == 0:
        return f"an event in the queue: {said[0]!r}" if said else None
    texts = [text for event in said for text in texts_of(event)]
    if texts != [f" {n % VOCAB}" for n in range(num_tokens)]:
        return f"{len(texts)} of {num_tokens} tokens, or not in order; the last ones: {texts[-5:]}"
    return None if is_ended else "no end"


def texts_of(event: bytes) -> list[str]:
    """The text of an event, token by token: several come together after a stall."""
    if event == b"data: [DONE]":
        return []
    fields = json.loads(event[len(b"data: ") :])
    if "choices" in fields:
        text = fields["choices"][0]["delta"].get("content", "")
    else:
        text = fields["text"]
    return re.findall(r" \d+", text)


class Client:
    """The client process, asked from here."""

    def __init__(self, port: int, case: Case, num_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._asked, told = context.Pipe()
        self._process = context.Process(target=read_streams, args=(port, case, num_tokens, told))
        self._process.start()

    def counts(self) -> dict[str, int]:
        self._asked.send("count")
        found: dict[str, int] = self._asked.recv()
        return found

    def end(self) -> list[str]:
        """What is wrong with the streams."""
        self._asked.send("end")
        faults: list[str] = self._asked.recv()
        self._process.join()
        return faults

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


# --- the server process -------------------------------------------------------------------------


class Server:
    """The paced server. It fills its batch fast, until told otherwise."""

    def __init__(self, case: Case, folder: Path) -> None:
        (folder / "model.onnx").touch()
        (folder / "config.json").write_text('{"max_position_embeddings": 1048576}')
        self._pace = folder / "pace"
        self._log = folder / "log"
        rows = case.streams if case.rate else 1
        pace = 1000 / case.rate if case.rate else QUEUED_PACE_MS
        environment = {"PACE_MS": str(pace), "PACE_FILE": str(self._pace)}
        arguments = ["--model", str(folder), "--host", "127.0.0.1", "--port", "0"]
        self.set_pace("fill")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), *arguments, "--max-batch-size", str(rows), *QUEUE],
                env=os.environ | environment,
                stderr=log,
            )
        self.port = int(wait_for(self._find_port, "the server to listen"))
        wait_for(lambda: self.get("/health/ready")[0] == 200, "the server to be ready")
        self.engine_thread = int(json.loads(self.get("/info")[1])["engine_thread"])

    def set_pace(self, word: str) -> None:
        aside = self._pace.with_suffix(".new")
        aside.write_text(word)
        aside.rename(self._pace)

    def get(self, path: str) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def gauge(self, name: str) -> float:
        found = re.search(rf"^phi_serve_{name} (\S+)$", self.get("/metrics")[1].decode(), re.M)
        return float(found[1]) if found else 0.0

    def usage(self) -> Usage:
        root = Path(f"/proc/{self._process.pid}")
        threads, system = {}, 0.0
        for task in (root / "task").iterdir():
            # man 5 proc_pid_stat: behind the name in parentheses, utime and stime are 12 and 13
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            threads[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICKS
            system += int(fields[12]) / TICKS
        return Usage(threads, system, int((root / "statm").read_text().split()[1]) * PAGE)

    def shares(self, before: Usage, after: Usage, seconds: float) -> dict[str, float]:
        used = {t: cpu - before.threads.get(t, 0.0) for t, cpu in after.threads.items()}
        shares = {
            "cpu_share": sum(used.values()),
            "hub_share": used[self._process.pid],
            "engine_share": used[self.engine_thread],
            "system_share": after.system - before.system,
        }
        return {name: round(value / seconds, 4) for name, value in shares.items()}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _find_port(self) -> str | None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended: {self._log.read_text()}")
        found = re.search(r"listening on http://[\w.]+:(\d+)", self._log.read_text())
        return found[1] if found else None


class Probe:
    """Asks /health/live every 50 ms while it is entered; milliseconds of each answer."""

    def __init__(self, port: int) -> None:
        self.times: list[float] = []
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Probe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._connection.close()

    def percentile(self, share: float) -> float:
        """By nearest rank."""
        ordered = sorted(self.times)
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 2)

    def _ask(self) -> None:
        while not self._is_over.wait(PROBE_SECONDS):
            started_at = time.monotonic()
            self._connection.request("GET", "/health/live")
            self._connection.getresponse().read()
            self.times.append((time.monotonic() - started_at) * 1000)


# --- a case -------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < give_up_at:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise RuntimeError(f"waited {GIVE_UP_SECONDS:.0f} s for {what}")


@contextlib.contextmanager
def row_held(port: int) -> Iterator[None]:
    """One long answer runs, read by nobody before its first event is there."""
    with socket.create_connection(("127.0.0.1", port)) as holder:
        holder.sendall(request("generate", 1_000_000))
        while b"\n\n" not in holder.recv(65536):
            pass
        is_over = threading.Event()

        def drain() -> None:
            while not is_over.is_set() and holder.recv(65536):
                pass

        reader = threading.Thread(target=drain)
        reader.start()
        yield
        is_over.set()
        reader.join()


def measure(case: Case, seconds: float) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Server(case, folder)
        stack.callback(server.stop)
        if not case.rate:
            stack.enter_context(row_held(server.port))
        before_streams = server.usage()
        num_tokens = case.num_tokens(seconds)
        client = Client(server.port, case, num_tokens)
        stack.callback(client.kill)
        gauge = "num_requests_running" if case.rate else "num_requests_waiting"
        wait_for(lambda: server.gauge(gauge) == case.streams, f"{gauge} to be {case.streams}")
        server.set_pace("steady")
        wait_for(lambda: client.counts()["begun"] == case.streams, "every stream to begin")
        time.sleep(min(SETTLE_SECONDS, seconds))
        with Probe(server.port) as probe:
            time.sleep(0.2)
            before, counts, started_at = server.usage(), client.counts(), time.monotonic()
            time.sleep(seconds)
            after, end_counts, ended_at = server.usage(), client.counts(), time.monotonic()
        num_ended = end_counts["ended"]
        server.set_pace("end")
        if case.rate:
            wait_for(lambda: client.counts()["ended"] == case.streams, "the streams to end")
        faults = client.end()
        if num_ended:
            faults.append(f"{num_ended} streams had ended before the measurement had")
        took = ended_at - started_at
    return {
        "case": case.name,
        **asdict(case),
        "seconds": round(took, 2),
        "events_per_second": round((end_counts["events"] - counts["events"]) / took, 1),
        **server.shares(before, after, took),
        "health_ms": {
            "p50": probe.percentile(0.5),
            "p99": probe.percentile(0.99),
            "max": probe.percentile(1.0),
            "num": len(probe.times),
        },
        "rss_bytes": after.rss,
        "rss_bytes_per_stream": (after.rss - before_streams.rss) // case.streams,
        "num_failures": len(faults),
        "failures": faults[:3],
    }


def shown(result: dict[str, Any]) -> str:
    health = "{p50}/{p99}/{max}".format(**result["health_ms"])
    shares = [f"{result[name]:.1%}" for name in ("cpu_share", "hub_share", "engine_share")]
    memory = f"{result['rss_bytes_per_stream'] / 1024:.1f}"
    events = f"{result['events_per_second']:.0f}"
    return TABLE.format(result["case"], events, *shares, health, memory, result["num_failures"])


def describe(seconds: float) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "seconds": seconds,
    }


def cases(queued: str, running: str, route: str) -> list[Case]:
    """Raises ValueError for what is no number."""
    waiting = [Case(int(number), 0.0, route) for number in queued.split(",") if number]
    pairs = [pair.split("x") for pair in running.split(",") if pair]
    return waiting + [Case(int(number), float(rate), route) for number, rate in pairs]


@click.command(help=__doc__)
@click.option("--queued", default="500,2000,5000", show_default=True)
@click.option("--running", default="500x2,500x20", show_default=True)
@click.option("--seconds", default=15.0, show_default=True)
@click.option("--route", type=click.Choice([*ROUTES]), default="generate", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def main(queued: str, running: str, seconds: float, route: str, json_path: Path | None) -> None:
    try:
        asked = cases(queued, running, route)
    except ValueError as error:
        raise click.BadParameter(f"--queued, --running: {error}") from None
    print(TABLE.format(*TITLES))
    results = []
    for case in asked:
        results.append(measure(case, seconds))
        print(shown(results[-1]), flush=True)
        for failure in results[-1]["failures"]:
            print(f"FAILED {failure}")
    report = {"config": describe(seconds), "results": results}
    if json_path:
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    sys.exit(any(result["num_failures"] for result in results))


if __name__ == "__main__":
    main()
