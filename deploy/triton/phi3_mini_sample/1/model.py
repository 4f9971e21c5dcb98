"""Triton model: logits -> the next token of each row, by our own sampler."""

import secrets
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))  # before where Triton was started

from app.sampler import sample
from app.sequence import SamplingParams, Sequence

# name -> what is allowed, and how that is said
LIMITS = {
    "temperature": (lambda value: 0 <= value <= 2, "from 0 to 2"),
    "top_p": (lambda value: 0 < value <= 1, "above 0, 1 at most"),
    "top_k": (lambda value: value >= 0, "0 or more"),
    "seed": (lambda value: True, ""),
}


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            return pb_utils.InferenceResponse([self._choose(request)])
        except Exception as error:  # raised, it would leave shared memory behind
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))

    def _choose(self, request):
        logits = _read(request, "logits")
        rows = np.arange(len(logits))
        # A graph gives the logits of every position, or of each row's last token alone.
        last = np.minimum(_read(request, "attention_mask").sum(axis=1), logits.shape[1]) - 1
        logits = logits[rows, last].astype(np.float32)
        sampled = sample(logits, [self._sequence(request, row) for row in rows.tolist()])
        if not sampled.is_finite.all():
            raise ValueError("the model gave logits that are no numbers")
        return pb_utils.Tensor("token_id", sampled.token_ids.reshape(-1, 1).astype(np.int64))

    def _sequence(self, request, row):
        given = {"seed": secrets.randbits(64)}
        for name, (is_allowed, limit) in LIMITS.items():
            values = _read(request, name)
            if values is not None:
                given[name] = values[row, 0].item()
                if not is_allowed(given[name]):
                    raise ValueError(f"{name} must be {limit}, not {given[name]:g}")
        answer = _read(request, "answer_ids")
        return Sequence(
            request_id="",
            prompt_ids=[],
            params=SamplingParams(max_tokens=1, **given),
            output_ids=[] if answer is None else answer[row].tolist(),
        )


def _read(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()
