"""Triton model: texts -> token ids and mask, by our own tokenizer code."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

# A tokenizer needs no torch, which takes seconds to import.
os.environ |= {"USE_TORCH": "0", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
sys.path.insert(0, str(Path(__file__).parent))  # before where Triton was started

from app.text import TextCodec


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._max_tokens = int(parameters["context_length"]["string_value"])
        self._codec = TextCodec.load(Path(__file__).parent / "model")

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            return pb_utils.InferenceResponse(self._tokenize(request))
        except Exception as error:  # raised, it would leave shared memory behind
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))

    def _tokenize(self, request):
        # Triton's /generate makes parameters of all that is no input; nothing would read them.
        for name in json.loads(request.parameters() or "{}"):
            raise ValueError(f"{name} is no input here")
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[:, 0]
        answers = pb_utils.get_input_tensor_by_name(request, "answer_ids")
        answers = [[]] * len(texts) if answers is None else answers.as_numpy().tolist()
        rows = [self._encode(*pair) for pair in zip(texts, answers, strict=True)]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        return [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]

    def _encode(self, text, answer):
        ids = self._codec.encode(text.decode()) + answer
        if not ids:
            raise ValueError("text_input is empty")
        if len(ids) > self._max_tokens:
            raise ValueError(f"{len(ids)} tokens; the model takes {self._max_tokens} at most")
        if not all(0 <= id_ < self._codec.vocab_size for id_ in answer):
            raise ValueError(f"answer_ids must be from 0 to {self._codec.vocab_size - 1}")
        return ids
