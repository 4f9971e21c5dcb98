"""Serve a model in the plain way, as the design that phi-serve is compared with.

    python scripts/baseline_server.py --model default|HF_FOLDER --port 8081
    python scripts/bench.py --no-stream --url http://127.0.0.1:8081 --concurrency 8

A transformers text-generation pipeline (torch, fp32, CPU) behind Flask on gevent's WSGI server.
The pipeline runs on the hub and blocks it: strictly one request at a time, with the others and the
health check waiting in the listening socket. That is the point of the design, not an oversight of
ours; torch may still use every core for that one request. Decoding is greedy.

    POST /generate      {"prompt", "max_tokens", "ignore_eos"} -> {"text", "finish_reason", "usage"}
    GET  /health/ready  200 once the model is loaded
"""

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from flask import Flask, request
from gevent.pywsgi import WSGIServer
from transformers import TextGenerationPipeline, pipeline

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script's own path is scripts/, not the root
from quantize.sources import resolve  # noqa: E402 (needs the line above)


def generate(generator: TextGenerationPipeline, body: dict[str, Any]) -> dict[str, Any]:
    max_tokens = body.get("max_tokens", 16)
    [result] = generator(
        body["prompt"],
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens if body.get("ignore_eos") else None,
        do_sample=False,
        return_tensors=True,  # token ids, so that usage is counted and not guessed
    )
    num_prompt = len(generator.tokenizer(body["prompt"])["input_ids"])
    new_ids = result["generated_token_ids"][num_prompt:]
    return {
        "text": generator.tokenizer.decode(new_ids, skip_special_tokens=True),
        "finish_reason": "length" if len(new_ids) == max_tokens else "stop",
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(new_ids),
            "total_tokens": num_prompt + len(new_ids),
        },
    }


def create_app(generator: TextGenerationPipeline) -> Flask:
    app = Flask(__name__)

    @app.post("/generate")
    def generate_view() -> dict[str, Any]:
        return generate(generator, request.get_json())

    @app.get("/health/ready")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    return app


@click.command()
@click.option("--model", default="default", show_default=True, help='"default" or an HF folder.')
@click.option("--port", default=8081, show_default=True)
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Keep the default model's file here."
)
def main(model: str, port: int, cache: Path | None) -> None:
    """Serve a model in the plain way, one request at a time."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the temporary folder goes away
    with (
        tempfile.TemporaryDirectory() as scratch,
        resolve(model, cache or Path(scratch), Path(scratch)) as source,
    ):
        folder = str(source.folder)
        generator = pipeline("text-generation", folder, dtype=torch.float32, device="cpu")
    WSGIServer(("127.0.0.1", port), create_app(generator), log=None).serve_forever()


if __name__ == "__main__":
    main()
