"""JSON in: what is refused, and how it is told; for every field of every generating route."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, ValidationError

from app.errors import InvalidRequest
from app.fields import SamplingFields
from app.generate_requests import DetokenizeRequest, GenerateRequest, TokenizeRequest
from app.openai_requests import ChatRequest, CompletionRequest, RenderRequest
from app.protocol import parse

Wrong = dict[str, tuple[list[str], str]]


def _ids(num: int) -> str:
    return f"[{', '.join(map(str, range(num)))}]"


_INTEGER = ["1.5", "1.0", '"7"', "true", "[]"]
_FLAG = ['"true"', "0", "1", "[]"]
_NUMBER = ['"1"', "true", "[]"]
_IDS = ["7", '"7"', "{}", "[-1]", "[1.0]", '["1"]', "[true]", "[2147483648]", "[null]"]
_FORMAT = [
    *('"json_object"', "[]", "{}", '{"type": "xml"}', '{"type": "text", "a": 1}'),
    *('{"type": 7}', '{"type": "json_schema"}', '{"type": "json_schema", "json_schema": {}}'),
    '{"type": "json_schema", "json_schema": {"name": "a b"}}',
    '{"type": "json_schema", "json_schema": {"name": "a", "schema": 7}}',
    '{"type": "json_schema", "json_schema": {"name": "a", "strict": "yes"}}',
]
# field -> JSON values that are wrong for it -> what the message says that it must be
SHARED: Wrong = {
    "stream": (_FLAG, "true or false"),
    "max_tokens": (
        ["0", "-1", "1e9", *_INTEGER, "99999999999999999999"],
        "an integer from 1 to what the prompt leaves of the model's context",
    ),
    "min_tokens": (["-1", *_INTEGER], "an integer from 0 to max_tokens"),
    "temperature": (["-0.1", "2.1", "1e308", *_NUMBER], "from 0 (greedy) to 2"),
    "top_p": (["0", "-0.1", "1.01", *_NUMBER], "above 0 and at most 1"),
    "top_k": (["-2", *_INTEGER], "0 or -1 is off"),
    "min_p": (["-0.1", "1.01", *_NUMBER], "a number from 0 (off) to 1"),
    "repetition_penalty": (["0", "-1", "100.1", *_NUMBER], "a number from 0.01 to 100"),
    "presence_penalty": (["-2.1", "2.1", *_NUMBER], "a number from -2 to 2"),
    "frequency_penalty": (["-2.1", "2.1", *_NUMBER], "a number from -2 to 2"),
    "logit_bias": (
        [
            *("7", "[]", '{"a": 1}', '{"-1": 1}', '{"1.0": 1}', '{"": 1}', '{"1": "1"}'),
            *(
                '{"01": 1}',
                '{"00": 1}',
                '{"1": 1, "01": 2}',
                '{"1": 100.1}',
                '{"1": -101}',
                '{"1": null}',
                '{"1": true}',
                '{"1234567890": 1}',
            ),
            "{" + ", ".join(f'"{id_}": 1' for id_ in range(1025)) + "}",
        ],
        "an object of at most 1024 token ids (as strings, without leading zeros), each with a "
        "number from -100 to 100",
    ),
    "allowed_token_ids": ([*_IDS, "[]", _ids(16_385)], "a list of 1 to 16384 token ids"),
    "banned_token_ids": ([*_IDS, _ids(16_385)], "a list of at most 16384 token ids"),
    "seed": ([str(2**63), str(-(2**63) - 1), "1e30", *_INTEGER], "an integer of 64 bits"),
    "n": (["0", "-1", "129", *_INTEGER], "an integer from 1 to 128"),
    "stop": (
        [
            *('""', "7", "{}", '[""]', '["a", ""]', "[7]", "[null]", "true"),
            f'"{"a" * 1025}"',
            str(["a"] * 17).replace("'", '"'),
        ],
        "a string, or a list of at most 16, of 1 to 1024 characters each",
    ),
    "stop_token_ids": ([*_IDS, str(list(range(1025)))], "a list of at most 1024 token ids"),
    "ignore_eos": (_FLAG, "true or false"),
    "repetition_guard": (["0", "1", "-2", "1001", *_INTEGER], "an integer from 2 to 1000"),
    "priority": (["-1001", "1001", *_INTEGER], "an integer from -1000 to 1000"),
    "timeout_ms": (["0", "-1", *_INTEGER], "at most the server's MAX_TIMEOUT_MS"),
    "response_format": (_FORMAT, '"text", "json_object", or "json_schema"'),
}
_LOGPROBS = (["-1", "21", *_INTEGER], "an integer from 0 to 20")
_TEXT = ["7", "[]", "{}", "true"]
OPENAI: Wrong = SHARED | {
    "model": (_TEXT, "GET /v1/models"),
    "stream_options": (["7", "[]", '{"include_usage": 1}', '{"a": true}'], "include_usage"),
    "user": (_TEXT, "a string"),
    "safety_identifier": (_TEXT, "a string"),
    "prompt_cache_key": (_TEXT, "a string"),
    "metadata": (["7", '"a"', "[]"], "an object"),
    "service_tier": (_TEXT, "a string"),
    "store": (["true", '"false"', "1"], "false; nothing is stored"),
}
_USER = '{"role": "user", "content": "a"}'
_TOOL = '{"type": "function", "function": {"name": "a"}}'
_OTHER = _TOOL.replace('"a"', '"b"')
WRONG: dict[type[BaseModel], Wrong] = {
    GenerateRequest: SHARED
    | {
        "prompt": (['""', "null", "7", "1.5", "true", '["a"]', "{}"], "at least one character"),
        "parse_special": (_FLAG, "true or false"),
        "logprobs": _LOGPROBS,
        "regex": (['""', *_TEXT], "a regular expression"),
        "grammar": (['""', *_TEXT], "a grammar"),
    },
    CompletionRequest: OPENAI
    | {
        "prompt": (
            [
                *('""', "[]", '[""]', '["a", ""]', '["a", 7]', "[1, null]", "[[]]", "[[1], []]"),
                *("7", "null", "{}", "[-1]", "[1.0]", "[true]", '[["a"]]', "[[1], 2]"),
            ],
            "a string, a list of strings, a list of token ids, or a list of such lists; at most "
            "128 prompts",
        ),
        "logprobs": _LOGPROBS,
        "best_of": (_INTEGER, "equal to n"),
        "echo": (["true", '"false"', "1"], "false; the prompt is not echoed"),
        "suffix": (['""', '"a"', "7"], "null; text cannot be inserted"),
    },
    ChatRequest: OPENAI
    | {
        "messages": (["null", "7", "{}", "[]", '"a"', "[7]", "[{}]"], "a list of at least one"),
        "tools": (
            ["7", "{}", "[]", "[7]", "[{}]", f"[{', '.join([_TOOL] * 129)}]"],
            "a list of 1 to 128 functions",
        ),
        "max_completion_tokens": (["0", "-1", *_INTEGER], "an integer of at least 1"),
        "logprobs": (_FLAG, "true or false"),
        "top_logprobs": _LOGPROBS,
        "tool_choice": (['"any"', "7", "[]", "{}", '{"type": "tool"}'], "names one of the tools"),
        "parallel_tool_calls": (_FLAG, "true or false"),
        "modalities": (['"text"', '["audio"]', "7"], '["text"]'),
    },
    TokenizeRequest: {
        "prompt": (["null", *_TEXT], "text"),
        "parse_special": (_FLAG, "true or false"),
        "add_special_tokens": (_FLAG, "true or false"),
    },
    DetokenizeRequest: {
        "tokens": (["null", *_IDS, _ids(131_073)], "a list of at most 131072 token ids")
    },
}
WRONG_VALUES = [
    (model, field, value)
    for model, fields in WRONG.items()
    for field, (values, _) in fields.items()
    for value in values
]
RIGHT: dict[type[BaseModel], dict[str, str]] = {
    ChatRequest: {"messages": f"[{_USER}]"},
    RenderRequest: {"messages": f"[{_USER}]"},
    DetokenizeRequest: {"tokens": "[]"},
}

RIGHT_VALUES = [
    ("prompt", "\x00", "\x00"),
    ("prompt", "\U0001f642", "\U0001f642"),
    ("max_tokens", 1, 1),
    ("max_tokens", 1_000_000_000, 1_000_000_000),
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("temperature", None, None),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("max_tokens", None, None),
    ("min_tokens", 0, 0),
    ("top_p", None, None),
    ("top_k", None, None),
    ("top_k", -1, -1),
    ("top_k", 10**9, 10**9),
    ("seed", None, None),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", -(2**63), -(2**63)),
    ("repetition_guard", None, None),
    ("repetition_guard", 2, 2),
    ("repetition_guard", 1000, 1000),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 0.01, 0.01),
    ("repetition_penalty", 100, 100.0),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("logit_bias", {"0": -100, "999999999": 100}, {"0": -100.0, "999999999": 100.0}),
    ("allowed_token_ids", [0], [0]),
    ("banned_token_ids", [], []),
    ("n", 128, 128),
    ("stop", ["a"] * 16, ["a"] * 16),
    ("stop", "a" * 1024, "a" * 1024),
    ("stop", [], []),
    ("stop_token_ids", list(range(1024)), list(range(1024))),
    ("timeout_ms", 1, 1),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
]


def request(**fields: Any) -> GenerateRequest:
    return parse(GenerateRequest, orjson.dumps({"prompt": "hello"} | fields))


def refused(body: bytes, model: type[BaseModel] = GenerateRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse(model, body)
    return raised.value


def body_with(model: type[BaseModel], /, **values: str) -> bytes:
    """A body with `values`, as JSON text, and right otherwise."""
    fields = RIGHT.get(model, {"prompt": '"hello"'}) | values
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"hello",
        b"{",
        b"{'prompt': 'a'}",
        b'{"prompt": "a",}',
        b'{"prompt": "a"} {}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    error = refused(body)
    assert error.message.startswith("the body is not valid JSON: ")
    assert error.param is None


@pytest.mark.parametrize("body", [b"[]", b'"prompt"', b"7", b"null", b"true", b'[{"prompt": "a"}]'])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    assert refused(body).message == "the body must be a JSON object"


def test_wrong_values_are_tried_for_every_field() -> None:
    for model, fields in WRONG.items():
        assert fields.keys() == model.model_fields.keys(), model


@pytest.mark.parametrize(("model", "field", "value"), WRONG_VALUES)
def test_wrong_value_is_refused_naming_the_field_and_its_limit(
    model: type[BaseModel], field: str, value: str
) -> None:
    """`param` is the way to what is wrong; if a part is missing or unknown, that is all."""
    error = refused(body_with(model, **{field: value}), model)
    assert error.param is not None
    assert error.param == field or error.param.startswith((f"{field}.", f"{field}["))
    assert error.message.startswith(f"{error.param}: ")
    is_told = error.message.removeprefix(f"{error.param}: ") in ("is required", "not a field")
    assert is_told or WRONG[model][field][1] in error.message


@pytest.mark.parametrize(
    ("model", "field", "value", "param"),
    [
        (GenerateRequest, "stop", '["a", ""]', "stop[1]"),
        (GenerateRequest, "logit_bias", '{"5": 101}', "logit_bias.5"),
        (GenerateRequest, "allowed_token_ids", "[1, -1]", "allowed_token_ids[1]"),
        (GenerateRequest, "response_format", "{}", "response_format.type"),
        (GenerateRequest, "response_format", '{"type": "xml"}', "response_format.type"),
        (GenerateRequest, "response_format", _FORMAT[-4], "response_format.json_schema.name"),
        (GenerateRequest, "response_format", _FORMAT[-3], "response_format.json_schema.name"),
        (GenerateRequest, "response_format", _FORMAT[-2], "response_format.json_schema.schema"),
        (CompletionRequest, "prompt", '["a", ""]', "prompt[1]"),
        (CompletionRequest, "prompt", "[[1], []]", "prompt[1]"),
        (CompletionRequest, "prompt", "[[1], [1, -1]]", "prompt[1][1]"),
        (CompletionRequest, "stream_options", '{"a": 1}', "stream_options.a"),
        (ChatRequest, "messages", "[{}]", "messages[0].role"),
        (ChatRequest, "messages", f'[{_USER}, {{"role": "bot"}}]', "messages[1].role"),
        (ChatRequest, "messages", '[{"role": "user"}]', "messages[0].content"),
        (ChatRequest, "messages", '[{"role": "user", "content": 7}]', "messages[0].content"),
        (ChatRequest, "messages", '[{"role": "user", "content": []}]', "messages[0].content"),
        (
            *(ChatRequest, "messages"),
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]',
            "messages[0].content[0].type",
        ),
        (
            *(ChatRequest, "messages"),
            '[{"role": "user", "content": [{"type": "text"}]}]',
            "messages[0].content[0].text",
        ),
        (
            *(ChatRequest, "messages"),
            '[{"role": "user", "content": "a", "tool_calls": []}]',
            "messages[0].tool_calls",
        ),
        *(
            (ChatRequest, "messages", f'[{_USER}, {{"role": {role}}}]', "messages[1].role")
            for role in ('"system\\n"', '""', '"function"', "null", '"<|im_end|>"')
        ),
        (ChatRequest, "messages", '[{"role": "user", "content": null}]', "messages[0].content"),
        (
            *(ChatRequest, "messages"),
            '[{"role": "user", "content": "a", "name": 1}]',
            "messages[0].name",
        ),
        (ChatRequest, "messages", '[{"role": "assistant"}]', "messages[0]"),
        (
            *(ChatRequest, "messages"),
            '[{"role": "assistant", "tool_calls": [{}]}]',
            "messages[0].tool_calls[0].id",
        ),
        (
            *(ChatRequest, "messages"),
            '[{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", '
            '"function": {"name": "a b", "arguments": ""}}]}]',
            "messages[0].tool_calls[0].function.name",
        ),
        (ChatRequest, "messages", '[{"role": "tool", "content": "a"}]', "messages[0].tool_call_id"),
        (ChatRequest, "tools", f"[{_TOOL}, {{}}]", "tools[1].type"),
        (ChatRequest, "tools", '[{"type": "custom", "custom": {}}]', "tools[0].type"),
        (ChatRequest, "tools", '[{"type": "function", "function": 1}]', "tools[0].function"),
        (ChatRequest, "tools", f'[{_TOOL[:-1]}, "more": 1}}]', "tools[0].more"),
        (ChatRequest, "tools", '[{"type": "function", "function": {}}]', "tools[0].function.name"),
        *(
            (
                *(ChatRequest, "tools"),
                f'[{{"type": "function", "function": {{"name": {name}}}}}]',
                "tools[0].function.name",
            )
            for name in ('""', f'"{"a" * 65}"', '"a b"', '"a\\n"', '"\u00e9"', "1", "null")
        ),
        *(
            (
                *(ChatRequest, "tools"),
                f'[{{"type": "function", "function": {{"name": "a", "{field}": {value}}}}}]',
                f"tools[0].function.{field}",
            )
            for field, value in (
                *(("parameters", "[]"), ("parameters", '{"type": "string"}')),
                *(("description", "1"), ("strict", '"yes"'), ("schema", "{}")),
            )
        ),
        (ChatRequest, "tools", f"[{_TOOL}, {_OTHER}, {_TOOL}]", "tools[2].function.name"),
        (RenderRequest, "tools", f"[{_TOOL}, {_TOOL}]", "tools[1].function.name"),
        (ChatRequest, "tool_choice", '{"type": "function"}', "tool_choice.function"),
        (ChatRequest, "modalities", '["text", "audio"]', "modalities[1]"),
    ],
)
def test_param_is_the_way_to_what_is_wrong(
    model: type[BaseModel], field: str, value: str, param: str
) -> None:
    assert refused(body_with(model, **{field: value}), model).param == param


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (GenerateRequest, {"regex": '"a"', "grammar": '"b"'}, "grammar"),
        (GenerateRequest, {"regex": '"a"', "response_format": '{"type": "json_object"}'}, "regex"),
        (CompletionRequest, {"stream_options": "{}"}, "stream_options"),
        (CompletionRequest, {"stream_options": "{}", "stream": "false"}, "stream_options"),
        (CompletionRequest, {"best_of": "2"}, "best_of"),
        (CompletionRequest, {"best_of": "1", "n": "2"}, "best_of"),
        (ChatRequest, {"top_logprobs": "2"}, "top_logprobs"),
        (ChatRequest, {"top_logprobs": "2", "logprobs": "false"}, "top_logprobs"),
        (
            *(ChatRequest, {"max_tokens": "1", "max_completion_tokens": "1"}),
            "max_completion_tokens",
        ),
        (ChatRequest, {"tool_choice": '"auto"'}, "tool_choice"),
        (ChatRequest, {"parallel_tool_calls": "true"}, "parallel_tool_calls"),
        (
            ChatRequest,
            {
                "tools": f"[{_TOOL}]",
                "tool_choice": '{"type": "function", "function": {"name": "b"}}',
            },
            "tool_choice",
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused_naming_one(
    model: type[BaseModel], fields: dict[str, str], param: str
) -> None:
    error = refused(body_with(model, **fields), model)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


WIDE = json.dumps({f"k{i}": 1 for i in range(4097)})


@pytest.mark.parametrize("model", WRONG)
@pytest.mark.parametrize(
    "field", ["max_new_tokens", "Prompt", "functions", "__class__", "model_config", ""]
)
def test_unknown_field_is_refused_naming_it_and_the_known_ones(
    model: type[BaseModel], field: str
) -> None:
    error = refused(body_with(model, **{field: "1"}), model)
    assert error.param == field
    assert [name for name in model.model_fields if name not in error.message] == []


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        (None, {f"k{i}": "1" for i in range(4096)}),
        (
            "response_format",
            {"response_format": f'{{"type": "json_schema", "json_schema": {WIDE}}}'},
        ),
        ("messages", {"messages": f'[{{"role": "user", "content": "a"}}, {WIDE}]'}),
        ("logit_bias", {"logit_bias": WIDE}),
    ],
)
def test_object_with_thousands_of_members_is_refused_before_each_has_an_error(
    monkeypatch: pytest.MonkeyPatch, field: str | None, fields: dict[str, str]
) -> None:
    monkeypatch.setattr(ChatRequest, "model_validate", None)
    error = refused(body_with(ChatRequest, **fields), ChatRequest)
    assert error.param == field
    assert error.message.endswith("more than 4096 members")


def test_object_of_as_many_members_as_may_be_is_looked_at() -> None:
    fields = {f"k{i}": 1 for i in range(4096 - 1)}
    error = refused(json.dumps({"prompt": "a"} | fields).encode(), GenerateRequest)
    assert error.param == "k0"


def test_error_repeats_no_more_than_a_bit_of_what_the_client_wrote() -> None:
    long = "x" * 10_000
    for body in (
        body_with(GenerateRequest, **{long: "1"}),
        body_with(GenerateRequest, response_format=f'{{"type": "{long}"}}'),
        body_with(GenerateRequest, logit_bias=f'{{"{long}": 1}}'),
    ):
        error = refused(body)
        assert error.param is not None
        assert len(error.param) < 200
        assert len(error.message) < 1000


@pytest.mark.parametrize(
    ("model", "required"),
    [
        *((GenerateRequest, "prompt"), (CompletionRequest, "prompt"), (ChatRequest, "messages")),
        *((TokenizeRequest, "prompt"), (DetokenizeRequest, "tokens")),
    ],
)
def test_missing_field_is_refused_naming_it(model: type[BaseModel], required: str) -> None:
    error = refused(b"{}", model)
    assert (error.param, error.message) == (required, f"{required}: is required")


def test_refusal_is_a_400_in_openais_shape() -> None:
    error = refused(b"{}")
    assert error.status == 400
    assert error.body() == {
        "error": {
            "message": "prompt: is required",
            "type": "invalid_request_error",
            "code": "invalid_value",
            "param": "prompt",
        }
    }


@pytest.mark.parametrize("model", WRONG)
def test_what_is_required_alone_is_enough(model: type[BaseModel]) -> None:
    parse(model, body_with(model))


@pytest.mark.parametrize("model", [GenerateRequest, CompletionRequest, ChatRequest])
def test_null_is_a_field_that_is_not_given(model: type[SamplingFields]) -> None:
    """As some clients send those that were left out; but for flags and `min_tokens` of ours."""
    nulls = {name: "null" for name, field in model.model_fields.items() if field.default is None}
    assert len(nulls) > 20
    given = parse(model, body_with(model, **nulls))
    assert (
        given.params(9, None).temperature
        == parse(model, body_with(model)).params(9, None).temperature
    )


@pytest.mark.parametrize(("field", "value", "read"), RIGHT_VALUES)
def test_value_at_a_limit_is_taken_as_it_is(field: str, value: Any, read: Any) -> None:
    assert getattr(request(**{field: value}), field) == read


_HELLO: Any = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * 5000}),
        (CompletionRequest, {"prompt": [[-1]] * 5000}),
        (CompletionRequest, {"prompt": [""] * 5000}),
        (CompletionRequest, {"prompt": [{}] * 5000}),
        (ChatRequest, {"messages": [{}] * 5000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 5000}]}),
        (ChatRequest, _HELLO | {"tools": [1] * 5000}),
        (ChatRequest, _HELLO | {"modalities": [1] * 5000}),
        (ChatRequest, _HELLO | {"stop": [1] * 5000}),
        (ChatRequest, _HELLO | {"logit_bias": {f"a{i}": 1 for i in range(5000)}}),
        (ChatRequest, _HELLO | {"banned_token_ids": ["1"] * 5000}),
        (DetokenizeRequest, {"tokens": ["1"] * 5000}),
    ],
)
def test_many_errors_in_a_list_are_not_all_looked_for(model: type[BaseModel], body: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() <= 8
