"""Answers held to a grammar: compiles what a request asks for.

With `masks.py`, which follows the answers, the only door to llguidance. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from .detokenizer import token_bytes
from .errors import InvalidRequest
from .lark import MAX_LARK_CHARS, prepare_lark
from .masks import GrammarConstraint, problem_of
from .schema import prepare_schema
from .tool_grammar import ToolForm
from .tool_schemas import compile_tools

MAX_REGEX_CHARS = 4096

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
# Rules written by hand can be ambiguous, and then a step's time grows with the square of its items:
# 32 rows of the worst that was found take 60 to 300 ms a step here, twice that with 1000 in a row.
_LARK_LIMITS = _LIMITS | {"step_max_items": 4000, "max_items_in_row": 300}

_NUM_PROBED = 6  # tokens: as many as lead to the first of an object's properties

# Where only certain bytes can follow, llguidance would permit but the one token that a tokenizer
# makes of them. So any that spells them may come: the model knows best which, and no Python is
# called, which masks would have to wait for (the GIL).
# In front of every grammar: a text that begins with a brace would be no Lark, but llguidance's own
# format, with options that are not for users.
_HEAD = '%llguidance {"no_forcing": true} '


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
        the tokenizer's last are never permitted. Raises ValueError where there is no token that
        could end an answer."""
        self._eos_ids = frozenset(id_ for id_ in eos_ids if id_ < vocab_size)
        tokens = _Tokens(tokenizer, vocab_size, self._eos_ids)
        self._end_tokens = {id_: tokens.tokens[id_].decode() for id_ in sorted(self._eos_ids)}
        self._tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=sorted(self._eos_ids))

    def json_schema(self, schema: Any, param: str) -> Grammar:
        """What a JSON schema permits; `schema.KEYWORDS` lists what it may use."""
        try:
            prepared = prepare_schema(schema)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return self._compile(f"start: %json {prepared}", param, _LIMITS)

    def regex(self, regex: str, param: str) -> Grammar:
        """Text that a regular expression matches as a whole, in the syntax of Rust's regex crate:
        no look-around, no back references."""
        if len(regex) > MAX_REGEX_CHARS:
            raise _too_long(param, len(regex), MAX_REGEX_CHARS)
        [grammar] = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
        return self._compile(grammar["lark_grammar"], param, _LIMITS)

    def lark(self, grammar: str, param: str) -> Grammar:
        """A user's grammar, in llguidance's dialect of Lark. `%json {...}` embeds a JSON schema; a
        special token is written as it is, if it has the form `<...>` (`start: <|tool_call|> "x"`),
        or by its id, `<[5]>`; added tokens that are not special are text. The tokens that end an
        answer cannot be named."""
        if len(grammar) > MAX_LARK_CHARS:
            raise _too_long(param, len(grammar), MAX_LARK_CHARS)
        try:
            prepared = prepare_lark(grammar, self._end_tokens)
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        return self._compile(prepared, param, _LARK_LIMITS)

    def tools(self, form: ToolForm, param: str) -> Grammar:
        """Text in which calls fit their tools' schemas. A strict tool's schema is kept or refused,
        about its own field; of others' what can be kept."""
        return compile_tools(form, param, lambda text, at: self._compile(text, at, _LIMITS))

    def _compile(self, grammar: str, param: str, limits: dict[str, Any]) -> Grammar:
        """Of Lark text."""
        matcher = LLMatcher(
            self._tokenizer, _HEAD + grammar, log_level=0, limits=LLParserLimits(**limits)
        )
        if problem := _problem(matcher) or self._problem_ahead(matcher.deep_copy()):
            raise InvalidRequest(f"{param}: {problem}", param=param)
        return Grammar(matcher, (self._tokenizer.vocab_size + 31) // 32, self._eos_ids)

    def _problem_ahead(self, probe: LLMatcher) -> str:
        """Why no answer could begin: found on the first tokens of some, the lowest permitted."""
        for _ in range(_NUM_PROBED):
            mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
            if problem := _problem(probe):
                return problem
            [permitted] = np.unpackbits(mask, bitorder="little").nonzero()
            if not len(permitted):
                return "nothing matches it"
            following = next((int(i) for i in permitted if int(i) not in self._eos_ids), None)
            if following is None or not probe.consume_token(following) or probe.is_stopped():
                break
        return _problem(probe)


class _Tokens:
    """What llguidance asks of a tokenizer: the bytes of each token, as our detokenizer reads them.
    Left to itself, it takes any added token `<...>` for a special one, which is no text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {id_ for id_, token in added.items() if token.special} | eos_ids
        self.tokens = token_bytes(tokenizer)
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        for id_ in special:
            self.tokens[id_] = (tokenizer.id_to_token(id_) or f"<|{id_}|>").encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id: int | None = min(eos_ids, default=None)
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        """For tokens that are forced: there are none."""
        return []


def _problem(matcher: LLMatcher) -> str:
    if matcher.is_error():
        # A schema that only refers to itself, or a pattern without a match.
        problem = problem_of(matcher)
        return "nothing matches it" if problem.startswith("NoExtension") else problem
    return "; ".join(matcher.get_grammar_warnings())[:1000]


def _too_long(param: str, length: int, limit: int) -> InvalidRequest:
    return InvalidRequest(f"{param}: {length} characters, at most {limit} can be", param=param)
