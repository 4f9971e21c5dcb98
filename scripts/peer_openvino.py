"""OpenVINO GenAI behind /v1/completions, for compare_peers.py.

    VENV/bin/pip install openvino-genai
    VENV/bin/python scripts/peer_openvino.py --model MODEL.gguf --port 8090

Its continuous batching, stepped by one thread; greedy, exactly as many tokens as asked for. The
model is a GGUF file or a folder of optimum-intel. It detokenizes token by token, which is wrong
for characters of several tokens and costs what a server would pay.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import openvino_genai as genai
from peer_server import Request, serve

CACHE_GB = 2


class OpenVino:
    def __init__(self, asked: argparse.Namespace) -> None:
        config = genai.SchedulerConfig()
        config.cache_size = CACHE_GB
        config.max_num_seqs = asked.max_batch_size
        self._pipeline = genai.ContinuousBatchingPipeline(asked.model, config, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._running: list[tuple[Request, Any]] = []
        self._num_added = 0

    def run(self, take: Callable[[bool], Sequence[Request]]) -> None:
        while True:
            for request in take(not self._running):
                self._add(request)
            self._pipeline.step()
            for request, handle in self._running:
                self._deliver(request, handle)
            self._running = [pair for pair in self._running if pair[0].max_tokens]

    def _add(self, request: Request) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = request.max_tokens, True
        config.do_sample = False
        prompt_ids = self._tokenizer.encode(request.prompt).input_ids
        request.num_prompt = prompt_ids.shape[1]
        self._num_added += 1
        handle = self._pipeline.add_request(self._num_added, prompt_ids, config)
        self._running.append((request, handle))

    def _deliver(self, request: Request, handle: Any) -> None:
        """`max_tokens` counts down to what is still to come."""
        while handle.can_read():
            for output in handle.read().values():
                for token in output.generated_ids:
                    request.tokens.put(self._tokenizer.decode([token]))
                    request.max_tokens -= 1
        if not request.max_tokens:
            request.tokens.put(None)


if __name__ == "__main__":
    serve(OpenVino, "OpenVINO GenAI behind /v1/completions.")
