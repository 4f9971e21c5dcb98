"""Tools, and what goes wrong, through OpenAI's own client, on a model that says what it is told:
with chat templates that know tools, that know none, and in each format of calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema_rs
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from .clients import MODEL, Told, failing_after, failing_at, told, waiting_for

ASK: list[Any] = [{"role": "user", "content": "the weather?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS: list[Any] = [tool("weather", CITY, description="of a city"), tool("time", TIME)]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
TIME_CALL = '{"name": "time", "arguments": {"zone": "cet"}}'
ARGUMENTS = '{"city": "Rome", "days": 2}'
# How each template's model writes that call.
SAID = {
    "qwen": f"<tool_call>\n{WEATHER}\n</tool_call>",
    "chatml": f"<tool_call>\n{WEATHER}\n</tool_call>",
    "phi3-first": f"<tool_call>\n{WEATHER}\n</tool_call>",
    "phi4": f"<|tool_call|>[{WEATHER}]<|/tool_call|>",
    "mistral": f"[TOOL_CALLS][{WEATHER}]",
    "llama31": WEATHER.replace("arguments", "parameters"),
}


@pytest.fixture(scope="module", params=SAID)
def any_format(request: pytest.FixtureRequest) -> Iterator[tuple[str, Told]]:
    with told(request.param) as ready:
        yield request.param, ready


@pytest.fixture(scope="module")
def qwen() -> Iterator[Told]:
    with told("qwen") as ready:
        yield ready


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "qwen" in request.fixturenames:
        request.getfixturevalue("qwen").model.change = lambda plan: None


def ask(ready: Told, **fields: Any) -> ChatCompletion:
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": 1} | fields
    answer: ChatCompletion = ready.client.chat.completions.create(**fields)
    ChatCompletion.model_validate(answer.to_dict())
    return answer


def stream(ready: Told, **fields: Any) -> list[ChatCompletionChunk]:
    fields = {
        "model": MODEL,
        "messages": ASK,
        "max_tokens": 300,
        "seed": 1,
        "stream": True,
    } | fields
    chunks = list(ready.client.chat.completions.create(**fields))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    return chunks


def calls_of(answer: ChatCompletion, choice: int = 0) -> list[tuple[str, str]]:
    calls = answer.choices[choice].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]


def finals(ready: Told, **fields: Any) -> Any:
    """The same as a stream, as the client's helper puts it together."""
    fields = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": 1} | fields
    with ready.client.chat.completions.stream(**fields) as events:
        return events.until_done().current_completion_snapshot


# --- calls ---------------------------------------------------------------------------------------


def test_call_in_the_format_of_the_model_is_a_tool_call(any_format: tuple[str, Told]) -> None:
    name, ready = any_format
    ready.say(SAID[name])
    answer = ask(ready, tools=TOOLS)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(answer) == [("weather", ARGUMENTS)]
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].id.startswith("call_")


def test_streamed_call_accumulates_to_the_plain_one(any_format: tuple[str, Told]) -> None:
    name, ready = any_format
    ready.say(SAID[name])
    snapshot = finals(ready, tools=TOOLS)
    assert calls_of(snapshot) == [("weather", ARGUMENTS)]
    assert snapshot.choices[0].finish_reason == "tool_calls"
    assert not snapshot.choices[0].message.content


def test_result_of_a_call_goes_into_the_next_request(any_format: tuple[str, Told]) -> None:
    """Messages of a plain answer and of a stream, as the client gives them."""
    name, ready = any_format
    for asked in (ask, finals):
        ready.say(SAID[name])
        message = asked(ready, tools=TOOLS).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "hail"}
        ready.say("there will be hail")
        answer = ask(ready, tools=TOOLS, messages=[*ASK, message, result])
        said = answer.choices[0].message
        assert (said.content or "").strip() == "there will be hail"
        assert (said.tool_calls, answer.choices[0].finish_reason) == (None, "stop")


def test_text_in_front_of_calls_stays_and_calls_are_numbered(qwen: Told) -> None:
    calls = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in (WEATHER, TIME_CALL))
    qwen.say(f"let me see\n{calls}")
    plain, streamed = ask(qwen, tools=TOOLS), finals(qwen, tools=TOOLS)
    for answer in (plain, streamed):
        assert answer.choices[0].message.content == "let me see"
        assert calls_of(answer) == [("weather", ARGUMENTS), ("time", '{"zone": "cet"}')]
    assert len({call.id for call in plain.choices[0].message.tool_calls or []}) == 2


def test_every_choice_has_calls_of_its_own(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    for answer in (ask(qwen, tools=TOOLS, n=2), finals(qwen, tools=TOOLS, n=2)):
        assert [calls_of(answer, i) for i in range(2)] == [[("weather", ARGUMENTS)]] * 2
        ids = {c.message.tool_calls[0].id for c in answer.choices if c.message.tool_calls}
        assert len(ids) == 2


@pytest.mark.parametrize(
    "text",
    [
        "1 < 2 and <tool_call or </tool_call> is none\n",
        '{"name": "weather", "arguments": {}}',
        "<think>\nwhich one?\n</think>\n\nhail",
    ],
)
def test_text_that_is_no_call_comes_as_it_is(qwen: Told, text: str) -> None:
    qwen.say(text)
    for tools in (TOOLS, openai.omit):
        for asked in (ask, finals):
            answer = asked(qwen, tools=tools)
            assert answer.choices[0].message.content == text
            assert (calls_of(answer), answer.choices[0].finish_reason) == ([], "stop")


def test_without_tools_a_call_is_text(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = ask(qwen, **fields)
        assert answer.choices[0].message.content == SAID["qwen"]
        assert (calls_of(answer), answer.choices[0].finish_reason) == ([], "stop")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}], ids=["auto", "required"])
def test_call_that_is_cut_short_has_the_start_of_its_arguments(
    any_format: tuple[str, Told], fields: dict[str, Any]
) -> None:
    name, ready = any_format
    ready.say(SAID[name])
    starts = []
    for max_tokens in range(3, 100, 8):
        answer = ask(ready, tools=TOOLS, max_tokens=max_tokens, **fields)
        if answer.choices[0].finish_reason != "length":
            break
        text, calls = answer.choices[0].message.content, calls_of(answer)
        text = (text or "").strip()
        assert not text or (not fields and SAID[name].startswith(text) and "weather" not in text)
        for called, arguments in calls:
            assert called == "weather"
            assert '{"city": "'.startswith(arguments[:10])
            starts.append(arguments)
    assert starts == sorted(starts, key=len)
    assert any(start and not start.endswith("}") for start in starts)


def test_streamed_call_that_is_cut_short_is_the_plain_one(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    for max_tokens in (5, 48):
        fields = {"tools": TOOLS, "max_tokens": max_tokens}
        plain, parts = ask(qwen, **fields), stream(qwen, **fields)
        assert parts[-1].choices[0].finish_reason == plain.choices[0].finish_reason == "length"
        deltas = [chunk.choices[0].delta for chunk in parts]
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert [(call.name, call.arguments) for call in calls if call] == calls_of(plain)
        text = "".join(delta.content or "" for delta in deltas)
        assert text == (plain.choices[0].message.content or "")


def test_stream_of_a_call_has_no_chunks_that_say_nothing(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    opening, call, end = stream(qwen, tools=TOOLS)
    assert opening.choices[0].delta.role == "assistant"
    assert call.choices[0].delta.tool_calls is not None
    assert end.choices[0].finish_reason == "tool_calls"


def test_stream_of_a_call_has_the_logprobs_of_its_tokens(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    fields = {"tools": TOOLS, "logprobs": True}
    plain = ask(qwen, **fields).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in stream(qwen, **fields)]
    assert plain is not None
    assert plain.content == [each for part in parts if part for each in part.content or ()]


def test_streaming_helper_tells_of_arguments(qwen: Told) -> None:
    qwen.say(SAID["qwen"])
    with qwen.client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[{**TOOLS[0]}]
    ) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("weather", ARGUMENTS)]
    assert calls_of(final) == [("weather", ARGUMENTS)]


def test_template_without_tools_is_told_of_them_in_the_system_prompt() -> None:
    body: dict[str, Any] = {"messages": ASK, "tools": TOOLS}
    for name in ("chatml", "phi3-first"):
        with told(name) as ready:
            rendered = ready.post("/v1/chat/render", body)
            ready.say("hail")
            answer = ask(ready, tools=TOOLS)
        for word in ("weather", "of a city", '"enum": ["utc", "cet"]', "<tool_call>"):
            assert word in rendered["prompt"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == rendered["count"]


# --- calls of a model that says anything ---------------------------------------------------------

VALID = {
    name: jsonschema_rs.validator_for(s) for name, s in {"weather": CITY, "time": TIME}.items()
}


def assert_valid(answer: Any, *, most: int | None = None) -> None:
    """Every choice has calls and nothing else, and they fit their tools."""
    for i, choice in enumerate(answer.choices):
        calls = calls_of(answer, i)
        assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
        assert 0 < len(calls) <= (most or len(calls))
        for name, arguments in calls:
            VALID[name].validate(json.loads(arguments))


@pytest.mark.parametrize("strict", [False, True])
def test_required_call_is_one_and_fits_its_schema(
    any_format: tuple[str, Told], strict: bool
) -> None:
    _, ready = any_format
    ready.roll()
    tools = [
        tool(name, schema, strict=strict) for name, schema in zip(VALID, (CITY, TIME), strict=True)
    ]
    fields = {"tools": tools, "tool_choice": "required", "n": 12, "max_tokens": 600}
    assert_valid(ask(ready, **fields, parallel_tool_calls=False), most=1)
    assert_valid(finals(ready, **fields, parallel_tool_calls=False), most=1)


def test_named_tool_is_the_one_that_is_called(any_format: tuple[str, Told]) -> None:
    _, ready = any_format
    ready.roll()
    choice = {"type": "function", "function": {"name": "time"}}
    answer = ask(ready, tools=TOOLS, tool_choice=choice, n=8)
    assert_valid(answer, most=1)
    assert {calls_of(answer, i)[0][0] for i in range(8)} == {"time"}


def test_required_calls_may_be_several(qwen: Told) -> None:
    qwen.roll()
    answer = ask(qwen, tools=TOOLS[1:], tool_choice="required", n=24, max_tokens=2000)
    whole = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    assert len(whole) > 12
    assert max(len(choice.message.tool_calls or ()) for choice in whole) > 1


def test_references_of_a_tool_lead_into_its_own_schema(qwen: Told) -> None:
    qwen.roll()
    schemas = {
        name: {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/leaf"}},
            "required": ["a"],
            "$defs": {"leaf": {"enum": values}},
        }
        for name, values in {"one": [1, 2], "two": ["b", "c"]}.items()
    }
    tools = [tool(name, schema) for name, schema in schemas.items()]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = ask(qwen, **fields, n=12)
    named = [calls_of(answer, i)[0] for i in range(12)]
    assert {name for name, _ in named} == {"one", "two"}
    for name, arguments in named:
        jsonschema_rs.validate(schemas[name], json.loads(arguments))


def test_required_call_that_is_cut_short_is_a_length(qwen: Told) -> None:
    qwen.roll()
    answer = ask(qwen, tools=TOOLS, tool_choice="required", max_tokens=12)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content or "") == ("length", "")
    assert calls_of(answer) == []


class Zone(BaseModel):
    """Where the clock hangs."""

    zone: Literal["utc", "cet"]
    hours: Annotated[list[Literal[1, 2]], Field(max_length=2)]


def test_pydantic_function_tool_is_parsed_into_its_model(any_format: tuple[str, Told]) -> None:
    _, ready = any_format
    ready.roll()
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": ASK,
        "tools": [openai.pydantic_function_tool(Zone)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 600,
    }
    plain = ready.client.chat.completions.parse(**fields)
    with ready.client.chat.completions.stream(**fields) as events:
        streamed = events.get_final_completion()
    for answer in (plain, streamed):
        [call] = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Zone)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        fields["messages"] = [*ASK, answer.choices[0].message, result]
        ready.client.chat.completions.parse(**fields)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "iri-template"}, "iri-template"),
        ({"type": "string", "pattern": "^(?!a)b$"}, "look-around"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
def test_tool_that_cannot_be_kept_to_is_refused_if_it_is_strict(
    qwen: Told, schema: dict[str, Any], word: str
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    qwen.say("hail")
    ask(qwen, tools=[tool("f", parameters)])
    with pytest.raises(openai.BadRequestError) as refused:
        ask(qwen, tools=[tool("f", parameters, strict=True)])
    assert refused.value.param == "tools[0].function.parameters"
    assert word in refused.value.message


def test_as_many_tools_as_may_be_are_taken(qwen: Told) -> None:
    qwen.roll()
    tools = [tool(f"f{i}", TIME) for i in range(128)]
    answer = ask(qwen, tools=tools, tool_choice="required", parallel_tool_calls=False)
    [(name, _)] = calls_of(answer)
    assert name in {f"f{i}" for i in range(128)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "x"}, "stop"),
        ({"extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_fields_against_a_forced_call_are_refused(
    qwen: Told, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(qwen, tools=TOOLS, tool_choice="required", **fields)
    assert refused.value.param == param


def test_stop_string_ends_an_answer_that_need_not_be_a_call(qwen: Told) -> None:
    qwen.say("hail and snow")
    answer = ask(qwen, tools=TOOLS, stop="and")
    assert answer.choices[0].message.content == "hail "
    assert answer.choices[0].finish_reason == "stop"
    qwen.say(SAID["qwen"])
    answer = ask(qwen, tools=TOOLS, stop="nowhere")
    assert calls_of(answer) == [("weather", ARGUMENTS)]


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [tool("a b", {})]}, "tools[0].function.name"),
        ({"tools": [tool("f", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", {}, strictly=True)]}, "tools[0].function.strictly"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_wrong_tools_are_refused_by_name(qwen: Told, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(qwen, **fields)
    assert refused.value.param == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "parameters", [nested(31), {"type": "object", "description": "x" * 40_000}]
)
def test_tools_that_are_too_much_are_named_by_answers_and_by_render_alike(
    qwen: Told, parameters: dict[str, Any]
) -> None:
    tools = [TOOLS[0], tool("f", parameters)]
    assert_refused_alike(qwen, tools, "tools[1].function.parameters")


def test_strict_tool_that_cannot_be_kept_to_is_refused_by_render_too(qwen: Told) -> None:
    tools = [tool("f", {"type": "object", "minProperties": 1, "contains": {}}, strict=True)]
    assert_refused_alike(qwen, tools, "tools[0].function.parameters")


def assert_refused_alike(ready: Told, tools: list[Any], param: str) -> None:
    bodies = {"messages": ASK, "tools": tools}
    paths = ("/v1/chat/completions", "/v1/chat/render")
    errors = [ready.flask.post(path, json=bodies).get_json()["error"] for path in paths]
    assert errors[0] == errors[1]
    assert errors[0]["param"] == param


def test_calls_of_a_conversation_are_checked(qwen: Told) -> None:
    for arguments in ("[]", "{", "1", '{"a": NaN}', '{"a": [1e999]}', '{"a": {"b": 1, "b": 2}}'):
        function = {"name": "weather", "arguments": arguments}
        call = {"id": "c1", "type": "function", "function": function}
        messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
        with pytest.raises(openai.BadRequestError) as refused:
            ask(qwen, messages=messages)
        assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_tools_of_a_template_with_unknown_calls_are_refused() -> None:
    with told("unknown") as ready, pytest.raises(openai.BadRequestError) as refused:
        ask(ready, tools=TOOLS)
    assert refused.value.param == "tools"


# --- what goes wrong -----------------------------------------------------------------------------


def test_time_that_is_over_before_the_first_token_is_a_504(qwen: Told) -> None:
    qwen.say("too late")
    told_so = threading.Event()
    qwen.model.change = waiting_for(told_so)
    try:
        for asked in (ask, stream):
            with pytest.raises(openai.InternalServerError) as refused:
                asked(qwen, extra_body={"timeout_ms": 20})
            assert (refused.value.status_code, refused.value.code) == (504, "deadline_exceeded")
            assert refused.value.response.headers["x-should-retry"] == "false"
    finally:
        told_so.set()


def test_failure_in_mid_stream_is_an_error_while_iterating(qwen: Told) -> None:
    qwen.say("it goes on and on")
    first_is_read = threading.Event()
    qwen.model.change = failing_after(first_is_read)
    chunks = iter(qwen.client.chat.completions.create(model=MODEL, messages=ASK, stream=True))
    next(chunks)
    first_is_read.set()
    with pytest.raises(openai.APIError) as failed:
        list(chunks)
    assert (failed.value.code, failed.value.type) == ("model_failure", "server_error")


def test_failure_before_the_first_token_is_an_error_that_the_client_does_not_repeat(
    qwen: Told,
) -> None:
    again = qwen.client.with_options(max_retries=2)
    qwen.say("at last")
    for fields in ({}, {"stream": True}):
        qwen.model.change = failing_at(0)
        with pytest.raises(openai.InternalServerError) as failed:
            again.chat.completions.create(model=MODEL, messages=ASK, **fields)
        assert failed.value.code == "model_failure"
    answer = again.chat.completions.create(model=MODEL, messages=ASK)
    assert answer.choices[0].message.content == "at last"


def test_stream_that_is_closed_ends_its_answer(qwen: Told) -> None:
    qwen.roll()
    registry, name = qwen.service.registry, "phi_serve_request_success_total"

    def aborted() -> float:
        return registry.get_sample_value(name, {"finish_reason": "abort"}) or 0

    before = aborted()
    with qwen.client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        next(iter(chunks))
    ask(qwen, max_tokens=1)  # a step later
    assert aborted() == before + 1
