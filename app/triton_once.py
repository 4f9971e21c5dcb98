"""A model of Triton's that answers once: hands each request on to the decoupled one, where the
engine is, and sends what that says as the one response that `/infer` and unary gRPC take.

A thread waits for each answer; another looks who has left, and has those requests ended.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from .errors import InvalidRequest, Overloaded, ServeError
from .triton_answer import Responses

log = logging.getLogger(__name__)

_TARGET = "TARGET"  # parameter: the decoupled model
_MAX_OPEN = 256
_LOOK_SECONDS = 0.05
_OUTPUTS = ["text_output", "finish_reason", "prompt_tokens", "completion_tokens"]


class Once:
    """`initialize`, `execute` and `finalize` of one model. `pb_utils` is Triton's library."""

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        self._pb_utils = pb_utils
        parameters = json.loads(args["model_config"])["parameters"]
        self._target: str = parameters[_TARGET]["string_value"]
        self._open: dict[str, Responses] = {}
        self._threads = ThreadPoolExecutor(_MAX_OPEN, "once")
        self._is_closed = threading.Event()
        self._watch = threading.Thread(target=self._look, name="watch", daemon=True)
        self._watch.start()

    def execute(self, requests: list[Any]) -> None:
        """Takes each, or refuses it at once; answers come later."""
        for request in requests:
            responses = Responses(self._pb_utils, request.get_response_sender())
            try:
                inputs = self._read(request)
                id_ = uuid.uuid4().hex  # its own: who knows it may end the request
                self._open[id_] = responses
                self._threads.submit(self._forward, id_, inputs, responses)
            except ServeError as error:
                responses.fail(error)
            except Exception:
                log.exception("a request has failed")
                responses.fail(ServeError("the server failed on this request"))

    def close(self) -> None:
        """Triton has waited for open requests before."""
        self._is_closed.set()
        self._watch.join()
        self._threads.shutdown(wait=True)

    def _read(self, request: Any) -> list[Any]:
        """Copies of its inputs: the request's own end with `execute`."""
        if (num := len(self._open)) >= _MAX_OPEN:
            message = f"the server is overloaded: {num} requests are open here, the most there may"
            raise Overloaded(message, num + 1, num, 1.0)
        inputs = {each.name(): each.as_numpy() for each in request.inputs()}
        if inputs.pop("stream", np.zeros(1)).any():
            raise InvalidRequest(f"stream: this model answers once, {self._target} streams")
        return [self._pb_utils.Tensor(name, value.copy()) for name, value in inputs.items()]

    def _forward(self, id_: str, inputs: list[Any], responses: Responses) -> None:
        try:
            for response in self._ask(id_, inputs, _OUTPUTS):
                if response.has_error():
                    responses.pass_on(self._pb_utils.InferenceResponse(error=response.error()))
                elif response.output_tensors():
                    responses.pass_on(self._pb_utils.InferenceResponse(response.output_tensors()))
        except Exception:
            log.exception("a request has failed")
            responses.fail(ServeError("the server failed on this request"))
        finally:
            del self._open[id_]

    def _ask(self, id_: str, inputs: list[Any], outputs: list[str]) -> Any:
        """The responses of the decoupled model, as they come."""
        request = self._pb_utils.InferenceRequest(
            model_name=self._target, requested_output_names=outputs, inputs=inputs, request_id=id_
        )
        return request.exec(decoupled=True)

    def _look(self) -> None:
        """Says it until it has ended: the first may be there before the request itself."""
        while not self._is_closed.wait(_LOOK_SECONDS):
            for id_, responses in list(self._open.items()):
                try:
                    if responses.is_cancelled:
                        self._cancel(id_)
                except Exception:
                    log.exception("a request that was cancelled cannot be ended")

    def _cancel(self, id_: str) -> None:
        flag = self._pb_utils.Tensor("cancel", np.array([[True]]))
        for _ in self._ask(id_, [flag], _OUTPUTS[:1]):
            pass
