"""Measure what answers held to a JSON schema cost, them and the rows beside them.

    python scripts/bench_grammar.py [--model models/default] [--rows 1,16] [--steps 48] \\
        [--repeats 5] [--threads 2] [--json FILE]

An engine decodes in this process, no server: N rows with no constraint, with one constrained row
and with all rows constrained, in turns. Every row samples with temperature 1. None can end
early: the schema wants a long answer, and rows without it ignore end tokens.

    tokens/s        rows x steps / time of the steps after all prompts were read
    ratio           to the run without constraints of the same repeat, median (min..max)
    mask            time to fill the masks of one step alone, without a model beside it, p50 and p95
                    over the states that the answers went through

The last line on stdout is one JSON object with everything.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench
import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from app.engine import Engine, Unobserved
from app.grammar import Grammar, Grammars
from app.kv_cache import KVCache
from app.masks import MaskWorker
from app.model import OnnxModel
from app.scheduler import Scheduler
from app.sequence import SamplingParams, Sequence
from app.text import TextCodec

SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 40,  # no answer ends within a measurement
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "color": {"enum": ["red", "green", "blue"]},
                },
                "required": ["name", "age", "color"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}


def make_sequences(
    prompt: list[int], rows: int, constrained: int, grammar: Grammar, steps: int
) -> list[Sequence]:
    params = [
        SamplingParams(steps, temperature=1.0, seed=row, ignore_eos=row >= constrained)
        for row in range(rows)
    ]
    return [
        Sequence(f"r{i}", list(prompt), p, grammar.constraint() if i < constrained else None)
        for i, p in enumerate(params)
    ]


def decode(engine: Engine, sequences: list[Sequence], steps: int) -> float:
    """Tokens per second once every row decodes."""
    for sequence in sequences:
        engine.submit(sequence)
    while not all(sequence.output_ids for sequence in sequences):
        engine.step()
    started_at = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - started_at
    assert not any(sequence.is_finished for sequence in sequences), "an answer ended early"
    for sequence in sequences:
        sequence.params = SamplingParams(max_tokens=1)  # ends with its next token
    while not engine.is_idle:
        engine.step()
    return len(sequences) * steps / seconds


def mask_ms(answers: list[list[int]], grammar: Grammar, threads: int) -> list[float]:
    """Of each step of these answers, side by side."""
    worker = MaskWorker(threads)
    rows = [Sequence("r", [0], SamplingParams(1), grammar.constraint()) for _ in answers]
    times = []
    for ids in zip(*answers, strict=False):
        started_at = time.perf_counter()
        worker.start(rows)
        worker.collect()
        times.append((time.perf_counter() - started_at) * 1000)
        for row, id_ in zip(rows, ids, strict=True):
            assert row.constraint is not None
            row.constraint.accept(id_)
    return times


def summarize(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def measure(
    engine: Engine,
    prompt: list[int],
    rows: int,
    grammar: Grammar,
    steps: int,
    repeats: int,
    threads: int,
) -> dict[str, Any]:
    kinds = {"none": 0, "one": 1, "all": rows}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    times: list[float] = []
    for _ in range(repeats):
        for kind, constrained in kinds.items():
            total = steps + rows * 4 + 8  # rows that come first decode while the others are read
            sequences = make_sequences(prompt, rows, constrained, grammar, total)
            rates[kind].append(decode(engine, sequences, steps))
            if kind == "all":
                times += mask_ms([s.output_ids for s in sequences], grammar, threads)
    ratio = {
        kind: summarize([a / b for a, b in zip(rates[kind], rates["none"], strict=True)])
        for kind in ("one", "all")
    }
    times.sort()
    return {
        "rows": rows,
        "tokens_per_second": {kind: summarize(values) for kind, values in rates.items()},
        "ratio_to_none": ratio,
        "mask_ms_of_all_rows": {
            "p50": round(times[len(times) // 2], 4),
            "p95": round(times[int(len(times) * 0.95)], 4),
        },
    }


@click.command()
@click.option("--model", default="models/default", type=click.Path(exists=True, path_type=Path))
@click.option("--rows", default="1,16", show_default=True)
@click.option("--steps", default=48, show_default=True, type=click.IntRange(1))
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write it here.")
def main(
    model: Path, rows: str, steps: int, repeats: int, threads: int, json_file: Path | None
) -> None:
    """Measure constrained decoding in this process."""
    counts = [int(number) for number in rows.split(",")]
    codec = TextCodec.load(model)
    onnx_model = OnnxModel.load(model, "cpu", num_threads=threads)
    length = steps + max(counts) * 4 + 64
    cache = KVCache(onnx_model.spec.kv, max(counts), length, onnx_model.device)
    scheduler = Scheduler(max(counts), length, 64, codec.eos_ids)
    engine = Engine(onnx_model, cache, scheduler, Unobserved(), num_threads=threads)
    grammars = Grammars(codec.tokenizer, onnx_model.spec.vocab_size, codec.eos_ids)
    started_at = time.perf_counter()
    grammar = grammars.json_schema(SCHEMA, "schema")
    compile_ms = round((time.perf_counter() - started_at) * 1000, 3)
    prompt = codec.encode("people as json")

    results = []
    for count in counts:
        results.append(measure(engine, prompt, count, grammar, steps, repeats, threads))
        click.echo(json.dumps(results[-1]))
    config = {"model": model.name, "steps": steps, "repeats": repeats, "threads": threads}
    bench.publish({"config": config, "compile_ms": compile_ms, "results": results}, json_file)


if __name__ == "__main__":
    main()
