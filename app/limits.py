"""What a request may ask of the model that is loaded: its context, its vocabulary, the time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import AnswerTooLong, InvalidRequest, PromptTooLong, TooManyMessages

if TYPE_CHECKING:
    from .fields import SamplingFields

DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

# Of one request, some 100 bytes each in its answer: 8,192 tokens with 20 beside each fit.
MAX_LOGPROB_ENTRIES = 200_000


def resolve_max_tokens(
    asked: int | None,
    default: int | None,
    num_prompt: int,
    max_model_len: int,
    *,
    prompt_field: str = "prompt",
    max_tokens_field: str = "max_tokens",
) -> int:
    """How many tokens an answer may have; a default gives way to the context's end.

    Raises PromptTooLong or AnswerTooLong, with the numbers and the field as the request names it,
    if prompt and answer do not fit, and InvalidRequest for a prompt without tokens.
    """
    if num_prompt < 1:  # a tokenizer may drop what it does not know
        raise InvalidRequest(f"{prompt_field}: it has no tokens", param=prompt_field)
    room = max_model_len - num_prompt
    if room < 1:
        raise PromptTooLong(num_prompt, max_model_len, prompt_field)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise AnswerTooLong(
            f"{max_tokens_field}: {asked} is too much; the context of {max_model_len} tokens less "
            f"the prompt of {num_prompt} leaves {room}",
            param=max_tokens_field,
        )
    return asked


def check_messages(num_messages: int, max_model_len: int) -> None:
    """Raises TooManyMessages for what cannot fit, before work goes into it."""
    if num_messages >= max_model_len:
        raise TooManyMessages(num_messages, max_model_len)


def check_min_tokens(min_tokens: int | None, max_tokens: int) -> None:
    if min_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that the answer may "
            "have",
            param="min_tokens",
        )


def check_logprobs(num_choices: int, max_tokens: int, num_logprobs: int | None) -> None:
    """An answer's log-probabilities are kept until it is whole: raises InvalidRequest if they could
    fill the memory."""
    if num_logprobs is None:
        return
    most = num_choices * max_tokens * (num_logprobs + 1)
    if most > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"logprobs: {num_logprobs} beside each of {max_tokens} tokens in {num_choices} answers "
            f"are {most} log-probabilities, and one request may have {MAX_LOGPROB_ENTRIES}",
            param="logprobs",
        )


def check_token_ids(fields: SamplingFields, vocab_size: int) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
        check_ids((int(id_) for id_ in getattr(fields, name) or ()), vocab_size, name)


def check_ids(ids: Iterable[int], vocab_size: int, name: str) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequest(
            f"{name}: the model has no token {largest}; ids go from 0 to {vocab_size - 1}",
            param=name,
        )


# Each can forbid what a grammar asks for, so that no token is left,
_AGAINST_A_GRAMMAR = ("min_tokens", "ignore_eos", "allowed_token_ids", "banned_token_ids")
# or cuts its text short.
_CUTS = ("stop", "stop_token_ids")


def check_structure(fields: SamplingFields, structure: str, *, is_free: bool = False) -> None:
    """Raises InvalidRequest for a field that a grammar cannot go with; `structure` is the field
    that asks for one. `is_free`: any text is an answer, too."""
    for name in _AGAINST_A_GRAMMAR if is_free else (*_AGAINST_A_GRAMMAR, *_CUTS):
        if getattr(fields, name):
            raise InvalidRequest(f"{name}: cannot be given together with {structure}", param=name)


def deadline(
    timeout_ms: int | None, header: str | None, max_timeout_ms: int, arrived_at: float
) -> float | None:
    """When the request's time is over, in the clock of `arrived_at`; None for never.

    The time is the shorter of the field `timeout_ms` and the header X-Request-Timeout, in seconds;
    without either, the server's maximum (0 is none). Raises InvalidRequest for more than that.
    """
    # Each as the request says it, with the maximum in its unit.
    asked: list[tuple[str, float, str, str]] = []
    if timeout_ms is not None:
        asked.append(("timeout_ms", timeout_ms, f"{timeout_ms} ms", f"{max_timeout_ms} ms"))
    if header is not None:
        most = f"{max_timeout_ms / 1000:.15g} s"
        asked.append(("X-Request-Timeout", _seconds(header) * 1000, f"{header.strip()} s", most))
    for name, milliseconds, given, most in asked:
        if max_timeout_ms and milliseconds > max_timeout_ms:
            raise InvalidRequest(
                f"{name}: {given} is more than this server's maximum of {most} (MAX_TIMEOUT_MS)",
                param=name,
            )
    milliseconds = min((each for _, each, *_ in asked), default=float(max_timeout_ms))
    return arrived_at + milliseconds / 1000 if milliseconds else None


def _seconds(header: str) -> float:
    # float() alone would take "nan", "1_0" and other scripts' digits.
    seconds = float(header) if DECIMAL.fullmatch(header.strip()) else 0.0
    if seconds < 0.001:
        raise InvalidRequest(
            f"X-Request-Timeout: {header!r:.40} is not a number of seconds, at least 0.001",
            param="X-Request-Timeout",
        )
    return seconds
