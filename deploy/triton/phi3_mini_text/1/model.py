"""Triton model: token ids -> the answer so far as text, by our own detokenizer."""

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
        self._codec = TextCodec.load(Path(__file__).parent / "model")

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            return pb_utils.InferenceResponse(self._spell(request))
        except Exception as error:  # raised, it would leave shared memory behind
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))

    def _spell(self, request):
        ids = pb_utils.get_input_tensor_by_name(request, "token_id").as_numpy()
        answers = pb_utils.get_input_tensor_by_name(request, "answer_ids")
        if answers is not None:
            ids = np.concatenate([answers.as_numpy(), ids], axis=1)
        texts = [self._text(row) for row in ids.tolist()]
        ended = np.isin(ids[:, -1:], list(self._codec.eos_ids))
        return [
            pb_utils.Tensor("text_output", np.array(texts, dtype=object).reshape(-1, 1)),
            pb_utils.Tensor("output_ids", ids),
            pb_utils.Tensor("has_ended", ended),
        ]

    def _text(self, ids):
        """Half a character, as the last token may bring, is held back."""
        return self._codec.detokenizer().feed(ids).encode()
