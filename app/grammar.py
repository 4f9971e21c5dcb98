"""Answers held to a grammar: compiles what a request asks for, and tells which tokens may follow.

The only door to llguidance. Masks are filled on a thread of their own while the model runs;
llguidance releases the GIL for that. Knows nothing of HTTP, nor of logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Many
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .errors import InvalidRequest
from .schema import prepare_schema
from .sequence import Sequence
from .text import token_bytes

Masks = dict[int, NDArray[np.uint32]]  # row -> a bit per token, the lowest of each word first

MAX_REGEX_CHARS = 4096
MAX_LARK_CHARS = 32_768
MAX_TOOLS_CHARS = 131_072  # of all tools together: 128 usual ones have 40,000
_MAX_LARK_LINES = 1000  # a chain of some thousand rules overflows llguidance's stack
_MAX_LARK_OPERATORS = 16  # of & and ~: fifty take ten seconds and 650 MB

# What one grammar may cost: about a second to compile, and per matcher some 40 MB.
_LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2000,
    "verbose_errors": False,
}
# Rules written by hand can be ambiguous, and then a step's time grows with the square of its items.
_LARK_LIMITS = _LIMITS | {"step_max_items": 4000, "max_items_in_row": 300}

_TAG = re.compile(r"<[!-~]+>$")
_BYTE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


class GrammarConstraint:
    """One answer's way through a grammar. Never raises: a matcher that gave up has an `error`,
    and permits nothing."""

    def __init__(self, matcher: LLMatcher, num_words: int, eos_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.num_words = num_words  # of 32 bits, of a mask
        self._eos_ids = eos_ids

    @property
    def error(self) -> str | None:
        return _first_line(self.matcher.get_error()) if self.matcher.is_error() else None

    def accept(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        matcher = self.matcher
        return matcher.is_stopped() and matcher.is_accepting() and not matcher.is_error()

    def finish_mask(self, mask: NDArray[np.uint32], end_ids: frozenset[int]) -> None:
        """In place: nothing after an error; end tokens of the request's own as the EOS tokens,
        if and only if the answer may end here."""
        if self.matcher.is_error():  # llguidance would let it end, as if it were whole
            mask[:] = 0
            return
        if own := end_ids - self._eos_ids:
            may_end = self.matcher.is_accepting()
            for id_ in own:
                word, bit = id_ // 32, np.uint32(1 << id_ % 32)
                mask[word] = mask[word] | bit if may_end else mask[word] & ~bit


class Grammar:
    """A compiled grammar: a start for any number of answers, each independent of the others."""

    def __init__(self, matcher: LLMatcher, num_words: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._eos_ids = eos_ids

    def constraint(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._num_words, self._eos_ids)


class Grammars:
    """Compiles for one model. Thread-safe: what is shared is only read. The methods may take a
    second, without the GIL for the most part: call them off the hub.

    All raise InvalidRequest about `param` for what is invalid, unsupported or too large.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`vocab_size` is the graph's, which may be more than the tokenizer's; the tokens behind
        the tokenizer's last are never permitted. Raises ValueError where llguidance takes a token
        for other bytes than we do."""
        self._eos_ids = eos_ids
        self._tokenizer = LLTokenizer(
            _tokenizer_json(tokenizer), n_vocab=vocab_size, eos_token=sorted(eos_ids)
        )
        for id_, expected in enumerate(token_bytes(tokenizer)):
            # Special are the control tokens, holes, and the byte 0xFF, which no text contains.
            is_special = self._tokenizer.is_special_token(id_)
            if not is_special and self._tokenizer.decode_bytes([id_]) != expected:
                raise ValueError(f"llguidance reads token {id_} as other bytes")

    def json_object(self, param: str) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, param)

    def json_schema(self, schema: Any, param: str) -> Grammar:
        """What a JSON schema permits; `schema.KEYWORDS` lists what it may use."""
        try:
            prepared = prepare_schema(schema)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return self._compile(LLMatcher.grammar_from_json_schema(prepared), param, _LIMITS)

    def regex(self, regex: str, param: str) -> Grammar:
        """Text that a regular expression matches as a whole, in the syntax of Rust's regex crate:
        no look-around, no back references."""
        if len(regex) > MAX_REGEX_CHARS:
            raise _too_long(param, len(regex), MAX_REGEX_CHARS)
        return self._compile(LLMatcher.grammar_from_regex(regex), param, _LIMITS)

    def lark(self, grammar: str, param: str) -> Grammar:
        """A grammar in llguidance's dialect of Lark. `%json {...}` embeds a JSON schema; a control
        token is written as it is, if it has the form `<...>` (`start: <|tool_call|> "x"`), or by
        its id, `<[5]>`."""
        if len(grammar) > MAX_LARK_CHARS:
            raise _too_long(param, len(grammar), MAX_LARK_CHARS)
        try:
            prepared = _prepare_lark(grammar)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return self._compile(LLMatcher.grammar_from_lark(prepared), param, _LARK_LIMITS)

    def tools(self, grammar: str, param: str) -> Grammar:
        """What `tool_grammar` writes: Lark whose embedded schema says itself how it is read, in
        its `x-guidance`. Where that is leniently, what cannot be kept to is left out."""
        if len(grammar) > MAX_TOOLS_CHARS:
            raise _too_long(param, len(grammar), MAX_TOOLS_CHARS)
        try:
            prepared = _prepare_lark(grammar, has_options=True)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        lark = LLMatcher.grammar_from_lark(prepared)
        return self._compile(lark, param, _LARK_LIMITS, warns=False)

    def _compile(
        self, grammar: str, param: str, limits: dict[str, Any], *, warns: bool = True
    ) -> Grammar:
        """Without `warns`, only what is no grammar is refused."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
        if not (problem := _problem(matcher, warns)):
            probe = matcher.deep_copy()
            mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
            problem = _problem(probe, warns) or ("" if mask.any() else "nothing matches it")
        if problem:
            raise InvalidRequest(f"{param}: {problem}", param=param)
        return Grammar(matcher, (self._tokenizer.vocab_size + 31) // 32, self._eos_ids)


Rows = dict[int, tuple[GrammarConstraint, frozenset[int]]]  # row -> constraint, end ids


class MaskWorker:
    """Fills the masks of a step on a thread of its own, between `start` and `collect`. Nobody else
    may touch the constraints of the step meanwhile.

    Without constrained rows nothing happens and there is no thread.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._pending: Future[Masks] | None = None

    def start(self, sequences: Many[Sequence]) -> None:
        """Sequence r is row r. A step that was started before and not collected is forgotten."""
        self._pending = None
        rows = {
            row: (s.constraint, s.end_ids)
            for row, s in enumerate(sequences)
            if isinstance(s.constraint, GrammarConstraint)
        }
        if not rows:
            return
        if self._pool is None or self._executor is None:
            self._pool = ThreadPoolExecutor(1, "masks")
            self._executor = LLExecutor(self._num_threads)
        self._pending = self._pool.submit(self._fill, self._executor, rows)

    def collect(self) -> Masks:
        """The masks by row, once they are there."""
        pending, self._pending = self._pending, None
        return {} if pending is None else pending.result()

    def _fill(self, executor: LLExecutor, rows: Rows) -> Masks:
        num_words = max(constraint.num_words for constraint, _ in rows.values())
        masks = np.zeros((len(rows), num_words), np.uint32)
        places = [(constraint.matcher, i) for i, (constraint, _) in enumerate(rows.values())]
        executor.unsafe_compute_mask_ptr(places, masks.ctypes.data, num_words * 4, len(rows))
        for mask, (constraint, end_ids) in zip(masks, rows.values(), strict=True):
            constraint.finish_mask(mask, end_ids)
        return dict(zip(rows, masks, strict=True))


def _tokenizer_json(tokenizer: Tokenizer) -> str:
    """llguidance infers from the decoder how tokens stand for bytes, and knows no Metaspace. It
    takes every added token in angle brackets for a special one, which no text can hold; those that
    are not (`<tool_call>` in Qwen's tokenizers) it knows as text if the vocabulary has them."""
    description = json.loads(tokenizer.to_str())
    if (description["decoder"] or {}).get("type") == "Metaspace":
        description["decoder"] = _BYTE_DECODER
    vocabulary, added = description["model"]["vocab"], description["added_tokens"]
    if isinstance(vocabulary, dict):
        # All of them: what is added and not in the vocabulary is numbered anew.
        vocabulary |= {token["content"]: token["id"] for token in added}
        description["added_tokens"] = [
            token for token in added if token["special"] or not _TAG.match(token["content"])
        ]
    return json.dumps(description)


def _prepare_lark(grammar: str, *, has_options: bool = False) -> str:
    """Embedded schemas are checked and get our whitespace, or else, with `has_options`, keep their
    own `x-guidance`. Raises ValueError."""
    pieces, at = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() < at:  # written in the schema before
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema behind %json is no JSON: {error}") from None
        if has_options:
            options = schema.pop("x-guidance")
            prepared = prepare_schema(schema, options, MAX_TOOLS_CHARS)
        else:
            prepared = prepare_schema(schema)
        pieces += [grammar[at : found.start()], f"%json {prepared}"]
        at = end
    pieces.append(grammar[at:])
    rules = "".join(pieces[::2])
    if rules.count("\n") >= _MAX_LARK_LINES:
        raise ValueError(f"the grammar has more than {_MAX_LARK_LINES} lines")
    bare = re.sub(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/', "", rules)
    if sum(map(bare.count, "&~")) > _MAX_LARK_OPERATORS:
        raise ValueError(f"the grammar has more than {_MAX_LARK_OPERATORS} of & and ~")
    return "".join(pieces)


def _problem(matcher: LLMatcher, warns: bool) -> str:
    if matcher.is_error():
        error = matcher.get_error().replace("<non-verbose/>", "").strip()
        # A schema that only refers to itself, or a pattern without a match.
        return "nothing matches it" if error.startswith("NoExtension") else error[:1000]
    return "; ".join(matcher.get_grammar_warnings())[:1000] if warns else ""


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _too_long(param: str, length: int, limit: int) -> InvalidRequest:
    return InvalidRequest(f"{param}: {length} characters, at most {limit} can be", param=param)
