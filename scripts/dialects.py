"""How a request is written and its answer read: our /generate, and OpenAI's two routes.

A dialect turns a conversation into a Request of load_client.py and puts what comes back into an
Answer. Every answer is asked to be greedy and exactly as long as wanted (`ignore_eos`, which vLLM
and llama.cpp's server know too).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from load_client import Answer, Request, RequestFailed

PATHS = {
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


@dataclass(frozen=True)
class Target:
    """The server, and what every request to it has in common."""

    url: str
    api: str = "generate"  # a key of PATHS
    stream: bool = True
    model: str = ""  # OpenAI's routes want a name
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the body
    may_end_early: bool = False  # for servers that do not know ignore_eos

    def request(
        self, history: Sequence[str], output_tokens: int, turn: int = 1, prompt_tokens: int = 0
    ) -> Request:
        """`history`: what was said in turn, the user's first and last."""
        body: dict[str, Any] = {"max_tokens": output_tokens, "stream": self.stream}
        if self.api == "chat":
            roles = ("user", "assistant")
            said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(history)]
            body["messages"] = said
        else:
            body["prompt"] = "\n".join(history)
        if self.api != "generate":
            body["model"] = self.model
            if self.stream:
                body["stream_options"] = {"include_usage": True}
        body |= {"ignore_eos": True, "temperature": 0} | self.extra

        def check(answer: Answer) -> None:
            check_length(answer, output_tokens, self.may_end_early)

        read = read_generate if self.api == "generate" else read_openai
        return Request(self._pack(body), read, check, turn, prompt_tokens)

    def _pack(self, body: dict[str, Any]) -> bytes:
        parts, payload = urlsplit(self.url), json.dumps(body).encode()
        head = (
            f"POST {parts.path.rstrip('/')}{PATHS[self.api]} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


def check_length(answer: Answer, wanted: int, may_end_early: bool) -> None:
    """Raises: RequestFailed"""
    if answer.finish_reason is None and not answer.completion_tokens:
        raise RequestFailed("short_answer", "the stream ended without a last event")
    if not answer.completion_tokens:  # no `usage`: a server that sends an event for each token
        answer.completion_tokens = len(answer.text_at)
    got = answer.completion_tokens
    if got != wanted and not (may_end_early and 0 < got < wanted):
        told = f"{got} tokens instead of {wanted}, finish_reason {answer.finish_reason}"
        raise RequestFailed("short_answer", told)


def read_generate(event: dict[str, Any], answer: Answer) -> None:
    _refuse_error(event)
    answer.text += event["text"]
    _read_usage(event, answer)
    answer.finish_reason = event.get("finish_reason") or answer.finish_reason


def read_openai(event: dict[str, Any], answer: Answer) -> None:
    """An event of either route, streamed or whole."""
    _refuse_error(event)
    for choice in event.get("choices", ()):
        said = choice.get("delta") or choice.get("message") or choice
        for name in ("text", "content", "reasoning_content"):
            answer.text += said.get(name) or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    _read_usage(event, answer)


def _refuse_error(event: dict[str, Any]) -> None:
    if (error := event.get("error")) is not None:
        shown = error.get("message", error) if isinstance(error, dict) else error
        raise RequestFailed("error_event", f"error event: {shown}")


def _read_usage(event: dict[str, Any], answer: Answer) -> None:
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
