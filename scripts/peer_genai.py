"""onnxruntime-genai behind /v1/completions, for compare_peers.py.

    VENV/bin/pip install onnxruntime-genai
    VENV/bin/python scripts/peer_genai.py --model FOLDER --port 8090

Static batches, which is how its Generator works on a CPU: what waits is taken together, up to
--max-batch-size prompts of one length and one number of tokens, and runs to its end before others
start. FOLDER is what its builder writes, with genai_config.json. Greedy; as many tokens as asked.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime_genai as genai
from peer_server import Request, serve


class StaticBatches:
    def __init__(self, asked: argparse.Namespace) -> None:
        self._model = genai.Model(asked.model)
        self._tokenizer = genai.Tokenizer(self._model)
        self._max_batch_size = asked.max_batch_size
        self._waiting: list[tuple[Request, np.ndarray]] = []

    def run(self, take: Callable[[bool], Sequence[Request]]) -> None:
        while True:
            for request in take(not self._waiting):
                ids = np.asarray(self._tokenizer.encode(request.prompt), np.int32)
                request.num_prompt = len(ids)
                self._waiting.append((request, ids))
            batch = self._take_batch()
            requests = [request for request, _ in batch]
            try:
                self._generate(requests, np.stack([ids for _, ids in batch]))
            except Exception as error:  # theirs to hear; the next batch may fare better
                for request in requests:
                    request.tokens.put(error)
            for request in requests:
                request.tokens.put(None)

    def _take_batch(self) -> list[tuple[Request, np.ndarray]]:
        """The first that waits, and those that fit beside it: no padding."""

        def shape(waiting: tuple[Request, np.ndarray]) -> tuple[int, int]:
            return waiting[0].max_tokens, len(waiting[1])

        first = shape(self._waiting[0])
        batch = [it for it in self._waiting if shape(it) == first][: self._max_batch_size]
        taken = {id(request) for request, _ in batch}
        self._waiting = [it for it in self._waiting if id(it[0]) not in taken]
        return batch

    def _generate(self, requests: Sequence[Request], ids: np.ndarray) -> None:
        """`ids`: (rows, tokens)"""
        length = ids.shape[1] + requests[0].max_tokens
        params = genai.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=len(ids), min_length=length, max_length=length, do_sample=False
        )
        generator = genai.Generator(self._model, params)
        generator.append_tokens(ids)
        for _ in range(requests[0].max_tokens):
            generator.generate_next_token()
            tokens = generator.get_next_tokens()
            for request, token in zip(requests, tokens, strict=True):
                request.tokens.put(self._tokenizer.decode(np.asarray([token], np.int32)))


if __name__ == "__main__":
    serve(StaticBatches, "onnxruntime-genai behind /v1/completions.")
