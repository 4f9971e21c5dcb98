"""What can go wrong, as a client sees it.

    ServeError
    |-- InvalidRequest        400  a field is missing, unknown or out of range; `param` names it
    |   |-- PromptTooLong     400  the prompt leaves no room for a token
    |   |   `-- TooManyMessages    more messages than the context has tokens
    |   |-- AnswerTooLong     400  the prompt leaves no room for so many tokens
    |   |-- DeadEnd           400  its grammar or its allowed tokens leave no token to choose
    |   |-- UnreadableBody    400  shorter than announced, or broken chunks
    |   |-- MalformedRequest  400  not HTTP, or HTTP that could be read in two ways
    |   `-- UnservableFolder  400  the server cannot switch to that model
    |-- InvalidApiKey         401  none, or one that is not known
    |-- AdminOff              403  the server has no key for it
    |-- ModelNotFound         404  another model than the one that is served
    |-- SlowClient            408  the request did not arrive in time
    |-- SwitchRunning         409  another model is being loaded already
    |-- PayloadTooLarge       413
    |-- UriTooLong            414
    |-- UnsupportedMediaType  415
    |-- ExpectationFailed     417
    |-- Overloaded            429  too much waits already
    |-- RateLimited           429  a key's requests, tokens or open requests are spent
    |-- HeadersTooLarge       431
    |-- ClientLeft            499  for the log: nobody is there to be told
    |-- DeadlineExceeded      504  no token within the request's time
    |-- NotReady              503  loading, hung or failed
    |   `-- Draining          503  the server ends
    |-- TooManyConnections    503
    |-- ModelFailure          500  the model run failed for this request
    `-- SwitchFailed          500  a model could not be loaded, though its folder is right
    UnservableModel           the folder cannot be served correctly; ends the process at start
    `-- WrongSetting          a setting asks for what this machine or model cannot do

Each class holds its HTTP status, its `type` and `code` in OpenAI's error shape, and whether and
when a client may send the same request again.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class ServeError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    may_retry: ClassVar[bool] = True
    retry_after: float | None = None  # seconds, where they are known

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.type, self.code, self.param)

    def headers(self) -> dict[str, str]:
        """What goes with it in the answer's head."""
        said = {}
        if self.retry_after is not None:
            said["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if not self.may_retry:
            said["x-should-retry"] = "false"  # OpenAI's client would, twice
        return said


def error_body(message: str, type_: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": type_, "code": code, "param": param}}


class InvalidRequest(ServeError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_model_len: int, param: str = "prompt") -> None:
        super().__init__(
            f"{param}: {num_tokens} tokens leave no room for an answer in the context of "
            f"{max_model_len} tokens; at most {max_model_len - 1} fit",
            param=param,
        )


class TooManyMessages(PromptTooLong):
    """Told before any template has run: each message has at least one token."""

    def __init__(self, num_messages: int, max_model_len: int) -> None:
        message = (
            f"messages: {num_messages} messages are more than the context of {max_model_len} "
            f"tokens has room for; at most {max_model_len - 1} fit"
        )
        InvalidRequest.__init__(self, message, param="messages")


class AnswerTooLong(InvalidRequest):
    code = "context_length_exceeded"


class DeadEnd(InvalidRequest):
    code = "dead_end"
    may_retry = False


class UnreadableBody(InvalidRequest):
    code = "unreadable_body"


class MalformedRequest(InvalidRequest):
    code = "malformed_request"


class UnservableFolder(InvalidRequest):
    code = "unservable_model"


class InvalidApiKey(ServeError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"WWW-Authenticate": "Bearer"}


class AdminOff(ServeError):
    status = 403
    type = "invalid_request_error"
    code = "admin_off"


class ModelNotFound(ServeError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class SlowClient(ServeError):
    status = 408
    type = "timeout_error"
    code = "request_timeout"


class SwitchRunning(ServeError):
    status = 409
    type = "invalid_request_error"
    code = "switch_running"
    may_retry = False


class PayloadTooLarge(ServeError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class UriTooLong(ServeError):
    status = 414
    type = "invalid_request_error"
    code = "uri_too_long"


class UnsupportedMediaType(ServeError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class ExpectationFailed(ServeError):
    status = 417
    type = "invalid_request_error"
    code = "expectation_failed"


class Overloaded(ServeError):
    """`position` is the place in the queue that there was no room for, `length` how many wait,
    `seconds` how long what is in front will take."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, position: int, length: int, seconds: float) -> None:
        super().__init__(message)
        self.position = position
        self.length = length
        self.retry_after = seconds

    def body(self) -> dict[str, Any]:
        body = super().body()
        body["error"] |= {
            "queue_position": self.position,
            "queue_length": self.length,
            "estimated_wait_seconds": round(self.retry_after or 0.0, 1),
        }
        return body


class RateLimited(ServeError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HeadersTooLarge(ServeError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class ClientLeft(ServeError):
    status = 499  # nginx's
    type = "invalid_request_error"
    code = "client_left"


class DeadlineExceeded(ServeError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    may_retry = False


class NotReady(ServeError):
    status = 503
    type = "service_unavailable_error"
    code = "not_ready"
    retry_after: float | None = 5.0


class Draining(NotReady):
    code = "draining"
    retry_after = None  # another server takes it at once; this one never will


class TooManyConnections(ServeError):
    status = 503
    type = "service_unavailable_error"
    code = "too_many_connections"
    retry_after = 1.0


class ModelFailure(ServeError):
    code = "model_failure"
    may_retry = False


class SwitchFailed(ServeError):
    code = "switch_failed"
    may_retry = False


def all_codes() -> set[str]:
    """That a client can be refused with; one that left is not refused. Flask's own are last."""
    classes = [ServeError]
    for each in classes:
        classes += each.__subclasses__()
    codes = {each.code for each in classes if each is not ClientLeft}
    return codes | {"bad_request", "not_found", "method_not_allowed"}


class UnservableModel(Exception):
    """The model folder cannot be served correctly; the message is the whole report."""


class WrongSetting(UnservableModel):
    """A setting that only the loaded model could refuse; the message names its variable."""
