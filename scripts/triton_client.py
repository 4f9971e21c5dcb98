"""Asks a Triton server that serves a repository of make_triton_repo.py.

    python scripts/triton_client.py [OPTIONS] [one] [batch] [stream] [cancel] [ensemble]

one       a request over HTTP and one over gRPC, to the model that answers once
batch     four requests at once over gRPC: the engine batches them
stream    token by token over gRPC
cancel    a stream that the client leaves after three texts
ensemble  the tutorial's pipeline: a batch of four, a request for each token

Without a name: all but the ensemble. Prints the answer, its latency and tokens/s. Needs
tritonclient: pip install --no-deps -r requirements-triton.txt
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from triton_ask import (
    SECONDS,
    Answer,
    NoSuchInput,
    Stream,
    Triton,
    complete_by_ensemble,
    stream_answer,
)

FOUR = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "The three primary colours are red,",
)


def load_libraries() -> tuple[Any, Any]:
    """tritonclient's for gRPC and for HTTP. Raises click.ClickException where they are missing."""
    try:
        import tritonclient.grpc
        import tritonclient.http
    except ImportError as error:
        raise click.ClickException(
            f"{error}: pip install --no-deps -r requirements-triton.txt brings tritonclient"
        ) from None
    return tritonclient.grpc, tritonclient.http


@dataclass(frozen=True)
class Asked:
    """What the command line says, and the libraries."""

    grpc_library: Any
    http_library: Any
    grpc: str
    http: str
    prompt: str
    max_tokens: int

    def over_grpc(self, model: str) -> Triton:
        return Triton(self.grpc_library, self.grpc, model)

    def one(self) -> None:
        values = {"text_input": self.prompt, "max_tokens": self.max_tokens}
        with Triton(self.http_library, self.http, "phi3_mini_once") as triton:
            click.echo(f"HTTP: {triton.ask(**values)}")
        with self.over_grpc("phi3_mini_once") as triton:
            click.echo(f"gRPC: {triton.ask(**values)}")

    def batch(self) -> None:
        with self.over_grpc("phi3_mini_once") as triton:
            begun_at = time.perf_counter()
            came: queue.SimpleQueue[tuple[int, Any, Any]] = queue.SimpleQueue()
            answers = [Answer() for _ in FOUR]
            for index, prompt in enumerate(FOUR):
                inputs = triton.tensors(text_input=prompt, max_tokens=self.max_tokens)
                triton.client.async_infer(triton.model, inputs, _put_into(came, index))
            for _ in FOUR:
                index, result, error = came.get(timeout=SECONDS)
                if error is not None:
                    raise error
                answers[index].take(result.as_numpy)
                answers[index].done_at = time.perf_counter()
        _print_together(answers, begun_at)

    def stream(self) -> None:
        with self.over_grpc("phi3_mini") as triton:
            values = {"text_input": self.prompt, "max_tokens": self.max_tokens}
            click.echo(f"{stream_answer(triton, **values)}")

    def cancel(self) -> None:
        with self.over_grpc("phi3_mini") as triton:
            stream = Stream(triton, text_input=self.prompt, max_tokens=self.max_tokens, stream=True)
            texts: list[str] = []
            for outputs in stream:
                texts.append(outputs("text_output").reshape(-1)[0].decode())
                if len(texts) == 3:
                    break
            left_at = time.perf_counter()
            stream.leave()
            milliseconds = 1000 * (time.perf_counter() - left_at)
        click.echo(f"{''.join(texts)!r}\n  left; the stream was closed {milliseconds:.0f} ms later")

    def ensemble(self) -> None:
        with self.over_grpc("phi3_mini_ensemble") as triton:
            begun_at = time.perf_counter()
            answers = complete_by_ensemble(triton, list(FOUR), self.max_tokens)
        _print_together(answers, begun_at)


def _put_into(came: Any, index: int) -> Callable[[Any, Any], None]:
    return lambda result, error: came.put((index, result, error))


def _print_together(answers: list[Answer], begun_at: float) -> None:
    seconds = max(answer.done_at for answer in answers) - begun_at
    num_tokens = sum(answer.num_tokens for answer in answers)
    for answer in answers:
        click.echo(f"{answer}")
    click.echo(f"together: {num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s")


WHAT = ("one", "batch", "stream", "cancel", "ensemble")


@click.command(help=__doc__)
@click.argument("what", nargs=-1, type=click.Choice(WHAT))
@click.option("--grpc", default="127.0.0.1:8001", show_default=True, help="Host and port.")
@click.option("--http", default="127.0.0.1:8000", show_default=True, help="Host and port.")
@click.option("--prompt", default=FOUR[0], show_default=True)
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1))
def main(what: tuple[str, ...], grpc: str, http: str, prompt: str, max_tokens: int) -> None:
    grpc_library, http_library = load_libraries()
    asked = Asked(grpc_library, http_library, grpc, http, prompt, max_tokens)
    for name in what or WHAT[:-1]:
        click.echo(f"== {name}")
        try:
            getattr(asked, name)()
        except (NoSuchInput, queue.Empty, OSError) as error:
            raise click.ClickException(str(error) or "the server is silent") from None
        except grpc_library.InferenceServerException as error:
            raise click.ClickException(f"{error}") from None


if __name__ == "__main__":
    main()
