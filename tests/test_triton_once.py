"""`app.triton_once` beside a stand-in for the model that it hands requests on to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from app.triton_once import Once

SECONDS = 60


class Target:
    """Answers a request once it is cancelled, and hears of no cancel in front of its second."""

    def __init__(self) -> None:
        self.num_cancels = 0
        self.is_ended = threading.Event()

    def __call__(self, **request: Any) -> SimpleNamespace:
        is_cancel = any(each.name == "cancel" for each in request["inputs"])
        return SimpleNamespace(exec=lambda decoupled: self._answer(is_cancel))

    def _answer(self, is_cancel: bool) -> Iterator[Any]:
        if is_cancel:
            self.num_cancels += 1
            if self.num_cancels > 1:
                self.is_ended.set()
        elif not self.is_ended.wait(SECONDS):
            raise AssertionError("it was cancelled once, and never again")
        yield SimpleNamespace(has_error=lambda: False, output_tensors=lambda: ["text"])


class Sender:
    """Of a request whose client has left at once."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.has_ended = threading.Event()

    def is_cancelled(self) -> bool:
        return True

    def send(self, response: Any, flags: int) -> None:
        self.sent.append(response)
        self.has_ended.set()


def test_cancel_that_overtakes_its_request_is_said_again() -> None:
    target, sender = Target(), Sender()
    pb_utils = SimpleNamespace(
        Tensor=lambda name, value: SimpleNamespace(name=name),
        InferenceRequest=target,
        InferenceResponse=lambda tensors: tensors,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    text = SimpleNamespace(name=lambda: "text_input", as_numpy=lambda: np.array([[b"a"]]))
    request = SimpleNamespace(inputs=lambda: [text], get_response_sender=lambda: sender)
    parameters = {"TARGET": {"string_value": "phi3_mini"}}
    once = Once(pb_utils, {"model_config": json.dumps({"parameters": parameters})})
    once.execute([request])
    assert target.is_ended.wait(SECONDS)
    assert sender.has_ended.wait(SECONDS)
    once.close()
    assert sender.sent == [["text"]]
