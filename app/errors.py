"""What can go wrong, as a client sees it.

    ServeError
    |-- InvalidRequest        400  a field is missing, unknown or out of range; `param` names it
    |   |-- PromptTooLong     400  the prompt leaves no room for a token
    |   |-- DeadEnd           400  its grammar or its allowed tokens leave no token to choose
    |   `-- UnreadableBody    400  shorter than announced, or broken chunks
    |-- ModelNotFound         404  another model than the one that is served
    |-- PayloadTooLarge       413
    |-- UnsupportedMediaType  415
    |-- DeadlineExceeded      504  no token within the request's time
    |-- NotReady              503  loading, hung or failed
    |   `-- Draining          503  the server ends
    `-- ModelFailure          500  the model run failed for this request
    UnservableModel           the folder cannot be served correctly; ends the process at start
    `-- WrongSetting          a setting asks for what this machine or model cannot do

Each class holds its HTTP status and its `type` and `code` in OpenAI's error shape.
"""

from __future__ import annotations

from typing import Any, ClassVar


class ServeError(Exception):
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.type, self.code, self.param)


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


class DeadEnd(InvalidRequest):
    code = "dead_end"


class UnreadableBody(InvalidRequest):
    code = "unreadable_body"


class ModelNotFound(ServeError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class PayloadTooLarge(ServeError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class UnsupportedMediaType(ServeError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class DeadlineExceeded(ServeError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class NotReady(ServeError):
    status = 503
    type = "service_unavailable_error"
    code = "not_ready"


class Draining(NotReady):
    code = "draining"


class ModelFailure(ServeError):
    code = "model_failure"


class UnservableModel(Exception):
    """The model folder cannot be served correctly; the message is the whole report."""


class WrongSetting(UnservableModel):
    """A setting that only the loaded model could refuse; the message names its variable."""
