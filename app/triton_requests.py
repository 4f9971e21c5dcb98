"""What a Triton request may say: the inputs of `phi3_mini`, held to `/generate`'s rules.

Knows tensors by their names and numpy's values, nothing of Triton's library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from .errors import InvalidRequest
from .fields import StopString, StopStrings
from .generate_requests import GenerateRequest
from .protocol import read_object, validate

_MORE = "sampling_parameters"  # what has no input of its own, as a JSON object
_LISTS = frozenset({"stop_words"})
_OTHER_NAMES = {"random_seed": "seed"}  # TensorRT-LLM's


class TritonRequest(GenerateRequest):
    """`/generate`'s fields, prompt and stop under Triton's names."""

    prompt: str = Field(
        alias="text_input", min_length=1, description="text of at least one character"
    )
    stop: StopString | StopStrings | None = Field(
        None,
        alias="stop_words",
        description="a list of at most 16 strings, of 1 to 1024 characters each; the answer ends "
        "in front of the first",
    )


def read_inputs(tensors: Iterable[tuple[str, Any]]) -> TritonRequest:
    """Of the inputs' names and arrays. Raises InvalidRequest, naming the input."""
    given: dict[str, Any] = {}
    for name, array in tensors:
        values = _values(name, array)
        if name in _LISTS:
            _add(given, name, values)
        elif len(values) != 1:
            raise InvalidRequest(f"{name}: {len(values)} values, and it must be one", param=name)
        elif name == _MORE:
            for key, value in _more(values[0]).items():
                _add(given, key, value)
        else:
            _add(given, _OTHER_NAMES.get(name, name), values[0])
    request = validate(TritonRequest, given)
    if request.num_choices > 1:
        raise InvalidRequest("n: a request has one answer here", param="n")
    if request.logprobs is not None:
        raise InvalidRequest("logprobs: there is no output for them here", param="logprobs")
    return request


def _values(name: str, array: Any) -> list[Any]:
    if array.dtype.name == "float32":  # as the client wrote it: 0.7, not 0.699999988
        return [float(str(value)) for value in array.reshape(-1)]
    try:
        plain = array.reshape(-1).tolist()
        return [each.decode() if isinstance(each, bytes) else each for each in plain]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name}: not valid UTF-8: {error}", param=name) from None


def _more(text: str) -> dict[str, Any]:
    try:
        return read_object(text.encode())
    except InvalidRequest as error:
        message = error.message.replace("the body", "it")
        raise InvalidRequest(f"{_MORE}: {message}", param=_MORE) from None


def _add(given: dict[str, Any], name: str, value: Any) -> None:
    if name in given:
        raise InvalidRequest(f"{name}: is given twice", param=name)
    given[name] = value
