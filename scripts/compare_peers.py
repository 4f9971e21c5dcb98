"""Compare this server with its peers, on this machine, with one client, in one run.

    python scripts/compare_peers.py [--concurrency 1,8,32] [--prompt-tokens 64,512] [--repeats 3] \\
        --peer 'llama.cpp=llama-server -m MODEL.gguf --port {port} -np 32 -c 32768' \\
        --peer 'vllm=vllm serve MODEL --port {port}' \\
        --peer-python openvino=VENV/bin/python --peer-model openvino=MODEL.gguf \\
        --peer-python onnxruntime-genai=VENV/bin/python --peer-model onnxruntime-genai=FOLDER

Every server is started, then loaded in turn, ours, the others, ours, the others, never two at once;
in a turn all get the same words. A ratio is taken within a turn; the median of the turns is
published. The last line on stdout is JSON; docs/measurements/peers-MACHINE.md gets the tables, and
a plot beside it where matplotlib is installed (pip install matplotlib). Known peers that are not
given, or do not start, are named as absent. A failed request makes the exit status 1.

Where peers come from, each in an environment of its own:

    plain              baseline_server.py, in this environment
    openvino           pip install openvino-genai; peer_openvino.py, takes a GGUF file or a folder
                       of optimum-intel
    onnxruntime-genai  pip install onnxruntime-genai; peer_genai.py, takes a folder of its builder
                       (0.14.1 knows int4 and fp32): python -m onnxruntime_genai.models.builder
                       -m x -i HF_FOLDER -o DIR -p int4 -e cpu
    llama.cpp          no wheel on PyPI has its server, but llama-cpp-python's sdist has its source:
                       pip download --no-binary llama-cpp-python --no-deps llama-cpp-python
                       tar xzf llama_cpp_python-*.tar.gz
                       cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -G Ninja \\
                           -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF \\
                           -DGGML_NATIVE=OFF -DGGML_{AVX,AVX2,FMA,F16C,BMI2}=ON \\
                           -DGGML_{AVX512,AVX512_VBMI,AVX512_VNNI}=ON
                       (its AMX kernel, which GGML_NATIVE would take, dies of SIGILL with gcc 12)
                       ninja -C build llama-server llama-quantize     (15 minutes on 2 cores)
                       build/bin/llama-quantize --allow-requantize SMOLLM2.Q4_1.gguf Q8.gguf Q8_0
"""

import random
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import click
from bench import Workload, parse_concurrency
from load_report import TABLE, TITLES, machine, publish, server_facts, summarize, table_row
from peers import OURS, PLAIN, Peer, Running, known_peers, memory_bytes, started
from peers_page import Measured, plot, write_page
from workload import ProbeFailed, Shape, fit

ROOT = Path(__file__).parents[1]
DEFAULT_OURS = f"{sys.executable} -m app --model models/default --host 127.0.0.1 --port {{port}}"
DEFAULT_PLAIN = f"{sys.executable} scripts/baseline_server.py --cache models/.cache --port {{port}}"


def parse_pairs(_: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, as often as wanted."""
    pairs = dict(text.partition("=")[::2] for text in given)
    if not all(name and value for name, value in pairs.items()):
        raise click.BadParameter(f"give {option.opts[0]} NAME=VALUE")
    return pairs


def measure_turn(
    running: Running, prompt_tokens: int, clients: int, asked: dict[str, Any], seed: str
) -> dict[str, Any]:
    """One peer, one load: a row of load_report.py, and the memory behind it."""
    rng = random.Random(seed)  # the same for every peer of a turn
    words = running.fit.words(prompt_tokens)
    workload = Workload(running.target, [Shape(words, asked["output_tokens"], prompt_tokens)])
    run = workload.run_closed(clients, asked["requests"] or max(8, 3 * clients), rng)
    row = summarize(clients, [run]) | {"peer": running.peer.name, "prompt_tokens": prompt_tokens}
    click.echo(f"{running.peer.name:18}{table_row(row)}")
    return row | {"memory_bytes": memory_bytes(running.pid)}


def reduce(turns: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> Measured:
    """The turns of one peer at one load, beside ours of the same turns."""

    def first_token(row: dict[str, Any]) -> float | None:
        times = row["ttft_ms"] or row["e2e_ms"]  # a whole answer is its own first token
        return times and times["p50"]

    rates = [row["tokens_per_second"] for row in turns]
    pairs = zip(ours, turns, strict=True)
    ratios = [us["tokens_per_second"] / max(it["tokens_per_second"], 0.01) for us, it in pairs]
    firsts = [first for row in turns if (first := first_token(row)) is not None]
    return Measured(
        peer=turns[0]["peer"],
        concurrency=turns[0]["concurrency"],
        prompt_tokens=turns[0]["prompt_tokens"],
        rates=rates,
        ratios=ratios,
        ttft_ms=statistics.median(firsts) if firsts else None,
        memory_bytes=max(row["memory_bytes"] for row in turns),
        failed=sum(row["failed"] for row in turns),
    )


def measure_all(
    servers: Sequence[Running], asked: dict[str, Any]
) -> tuple[list[Measured], list[dict[str, Any]]]:
    """All loads, all turns: what is published, and every row."""
    measured, rows = [], []
    for prompt_tokens, clients in product(asked["prompt_tokens"], asked["concurrency"]):
        turns: dict[str, list[dict[str, Any]]] = {server.peer.name: [] for server in servers}
        for repeat in range(asked["repeats"]):
            seed = f"{asked['seed']}-{prompt_tokens}-{clients}-{repeat}"
            for server in servers:
                row = measure_turn(server, prompt_tokens, clients, asked, seed)
                turns[server.peer.name].append(row)
                rows.append(row)
        measured += [reduce(found, turns[OURS]) for found in turns.values()]
    return measured, rows


def start_all(
    peers: Sequence[Peer], longest: int, stack: ExitStack
) -> tuple[list[Running], dict[str, str]]:
    """Those that run and answer, and why the others do not. Ours must."""
    servers, absent = [], {}
    for peer in peers:
        try:
            if peer.absence:
                raise ProbeFailed(peer.absence)
            running = stack.enter_context(started(peer, ROOT))
            rng = random.Random(longest)
            servers.append(running.fitted(fit(running.target, longest, rng)))
        except (ProbeFailed, OSError) as error:
            if peer.name == OURS:
                raise click.ClickException(f"our own server: {error}") from error
            absent[peer.name] = str(error)
            click.echo(f"{peer.name} is absent: {error}", err=True)
    return servers, absent


@click.command()
@click.option("--ours", default=DEFAULT_OURS, help="Our server's command.")
@click.option("--ours-api", default="generate", show_default=True)
@click.option("--plain", default=DEFAULT_PLAIN, help='The plain design\'s; "" leaves it out.')
@click.option("--peer", "commands", multiple=True, callback=parse_pairs, help="NAME=COMMAND.")
@click.option("--peer-python", "pythons", multiple=True, callback=parse_pairs, help="NAME=PATH.")
@click.option("--peer-model", "models", multiple=True, callback=parse_pairs, help="NAME=PATH.")
@click.option("--concurrency", default="1,8,32", show_default=True, callback=parse_concurrency)
@click.option("--prompt-tokens", default="64", show_default=True, callback=parse_concurrency)
@click.option("--output-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--requests", type=click.IntRange(1), help="A turn; max(8, 3 x clients).")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
@click.option("--machine", "name", default="cpu", show_default=True, help="In the page's name.")
@click.option(
    "--output",
    default=ROOT / "docs" / "measurements",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the page and the plot.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(
    ours: str,
    ours_api: str,
    plain: str,
    commands: dict[str, str],
    pythons: dict[str, str],
    models: dict[str, str],
    name: str,
    output: Path,
    json_file: Path | None,
    **asked: Any,
) -> None:
    """Compare this server with its peers, in turns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every server is stopped
    if (few := asked["requests"]) and few < (most := max(asked["concurrency"])):
        raise click.BadParameter(f"{few} requests cannot keep {most} workers busy")
    peers = [Peer(OURS, ours, ours_api)]
    peers += [Peer(PLAIN, plain, "generate", stream=False)] if plain else []
    peers += known_peers(commands, pythons, models)
    with ExitStack() as stack:
        servers, absent = start_all(peers, max(asked["prompt_tokens"]), stack)
        facts = {running.peer.name: server_facts(running.target.url) for running in servers}
        click.echo(f"{'':18}{TABLE.format(*TITLES)}")
        measured, rows = measure_all(servers, asked)
    page = output / f"peers-{name}.md"
    config = asked | {"commands": {running.peer.name: running.shown() for running in servers}}
    drawn = plot(measured, page.with_suffix(".png"))
    write_page(page, measured, absent, config, facts, machine(), drawn)
    publish({"config": config, "servers": facts, "absent": absent, "rows": rows}, json_file)
    sys.exit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()
