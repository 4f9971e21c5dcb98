"""What a Triton server with our models is asked by tritonclient: an answer, a stream, the pipeline.

Knows the models' inputs and outputs by name, and nothing of a command line.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SECONDS = 300  # of silence: a server that hangs must not hang its client
# numpy's types by Triton's names.
_TYPES: dict[str, Any] = {"BYTES": object, "INT32": np.int32, "INT64": np.int64}
_TYPES |= {"UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}


class NoSuchInput(Exception):
    """The model takes no input of that name."""


@dataclass
class Answer:
    """`text_at` are instants of each text that came, on time.perf_counter's clock."""

    text: str = ""
    finish_reason: str = ""
    num_tokens: int = 0
    sent_at: float = field(default_factory=time.perf_counter)
    text_at: list[float] = field(default_factory=list)
    done_at: float = 0.0

    def take(self, outputs: Callable[[str], Any]) -> None:
        """One response: `outputs` gives an output's array by its name, or None."""
        if (text := outputs("text_output")) is not None:
            self.text += text.reshape(-1)[0].decode()
            self.text_at.append(time.perf_counter())
        if (reason := outputs("finish_reason")) is not None:
            self.finish_reason = reason.reshape(-1)[0].decode()
            self.num_tokens = int(outputs("completion_tokens").reshape(-1)[0])

    @property
    def seconds(self) -> float:
        return self.done_at - self.sent_at

    def __str__(self) -> str:
        rate = self.num_tokens / self.seconds
        first = f", first text after {1000 * (self.text_at[0] - self.sent_at):.0f} ms"
        return (
            f"{self.text!r}\n  {self.finish_reason}, {self.num_tokens} tokens in "
            f"{1000 * self.seconds:.0f} ms, {rate:.1f} tokens/s"
            f"{first if len(self.text_at) > 1 else ''}"
        )


class Triton:
    """A model on one of Triton's two sockets; `library` is tritonclient.grpc or tritonclient.http.

    Tensors get the types and shapes that the server's metadata names. Use as a context manager.
    """

    def __init__(self, library: Any, url: str, model: str) -> None:
        self.model = model
        self._library = library
        self.client = library.InferenceServerClient(url)
        self._inputs: dict[str, tuple[str, list[int]]] = {}

    def __enter__(self) -> Triton:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def infer(self, **values: Any) -> Callable[[str], Any]:
        """The outputs by name; each of `values` is one value or a list, a row each."""
        inputs = self.tensors(**values)
        return self.client.infer(self.model, inputs).as_numpy  # type: ignore[no-any-return]

    def ask(self, **values: Any) -> Answer:
        answer = Answer()
        answer.take(self.infer(**values))
        answer.done_at = time.perf_counter()
        return answer

    def tensors(self, **values: Any) -> list[Any]:
        """Raises NoSuchInput."""
        if not self._inputs:
            self._inputs = self._read_inputs()
        return [self._tensor(name, value) for name, value in values.items()]

    def _tensor(self, name: str, value: Any) -> Any:
        if name not in self._inputs:
            raise NoSuchInput(f"{self.model} has no input {name}; it has {', '.join(self._inputs)}")
        kind, shape = self._inputs[name]
        rows = np.array(_encoded(value), dtype=_TYPES[kind])
        # (rows, values of each): one value is a row of one.
        array = rows if rows.ndim == len(shape) else rows.reshape(-1, *[1] * (len(shape) - 1))
        tensor = self._library.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        return tensor

    def _read_inputs(self) -> dict[str, tuple[str, list[int]]]:
        metadata = self.client.get_model_metadata(self.model)
        if isinstance(metadata, dict):  # HTTP's
            found = [(each["name"], each["datatype"], each["shape"]) for each in metadata["inputs"]]
        else:
            found = [(each.name, each.datatype, list(each.shape)) for each in metadata.inputs]
        return {name: (kind, [int(size) for size in shape]) for name, kind, shape in found}


def _encoded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in value]
    return value.encode() if isinstance(value, str) else value


class Stream:
    """One stream over gRPC, with one request on it. Iterating gives the outputs of each response
    and raises what the server says instead; tritonclient's error of a cancelled stream, too."""

    def __init__(self, triton: Triton, **values: Any) -> None:
        self._client = triton.client
        self._came: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        inputs = triton.tensors(**values)
        self._client.start_stream(lambda result, error: self._came.put((result, error)))
        self._client.async_stream_infer(triton.model, inputs, enable_empty_final_response=True)

    def __iter__(self) -> Iterator[Callable[[str], Any]]:
        while True:
            result, error = self._came.get(timeout=SECONDS)
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                yield result.as_numpy
            if response.parameters["triton_final_response"].bool_param:
                return

    def leave(self) -> None:
        """The server hears that nobody waits any more."""
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.stop_stream()


def stream_answer(triton: Triton, **values: Any) -> Answer:
    answer = Answer()
    stream = Stream(triton, stream=True, **values)
    try:
        for outputs in stream:
            answer.take(outputs)
    finally:
        stream.close()
    answer.done_at = time.perf_counter()
    return answer


def complete_by_ensemble(triton: Triton, prompts: list[str], max_tokens: int) -> list[Answer]:
    """A request for each token, which reads all of the prompts again. A row that has ended goes
    on, but nothing of it is taken any more."""
    answers = [Answer() for _ in prompts]
    values: dict[str, Any] = {"text_input": prompts}
    for num_tokens in range(1, max_tokens + 1):
        outputs = triton.infer(**values)
        values["answer_ids"] = outputs("output_ids").tolist()
        texts, ended = outputs("text_output"), outputs("has_ended")
        now = time.perf_counter()
        for row, answer in enumerate(answers):
            if answer.finish_reason:
                continue
            answer.text, answer.num_tokens = texts[row, 0].decode(), num_tokens
            answer.text_at.append(now)
            is_last = num_tokens == max_tokens
            answer.finish_reason = "stop" if ended[row, 0] else "length" if is_last else ""
            answer.done_at = now
        if all(answer.finish_reason for answer in answers):
            break
    return answers
