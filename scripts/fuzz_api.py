"""Send generated requests to every route of a running server; hold each answer against its schema.

    python scripts/fuzz_api.py --url http://127.0.0.1:8080 [--max-examples 40] [--seed N] \\
        [--json FILE]

Reads /openapi.json and lets schemathesis make requests of it, for each route: its own list of
borderline cases, then up to --max-examples random valid requests and as many invalid ones. Most
valid ones are fitted to the model before they are sent (token ids that exist, no foreign model
name, short answers), or nearly all would be refused.

What must hold of each answer: its status is documented, its type, headers and body are those of the
document (of a stream: every event), what the schema forbids is refused, a wrong method is answered
with 405, and nothing is a 5xx but a 504 to a request that sets a time.

Prints the number of requests by route and status, then what failed, each kind once. The last line
on stdout is one JSON object with everything. Exit status 1 if anything failed.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import click
import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
NUM_IDS = 64  # every model has so many tokens
MAX_TOKENS = 6
SPREAD = 8
FITTED = 4  # of so many valid requests all but one are fitted
AGAINST_A_GRAMMAR = (
    *("min_tokens", "ignore_eos", "allowed_token_ids", "banned_token_ids"),
    *("stop", "stop_token_ids"),
)


@dataclass
class Tally:
    """What was sent and what came of it. Failures by kind, with the first example of each."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(counter.total() for counter in self.statuses.values())


def fuzz(schema: Any, max_examples: int, seed: int, session: Any = None) -> Tally:
    """`schema` is schemathesis's; `session` is kept open for all requests, if it has a URL."""
    tally = Tally()
    served = schema["/v1/models"]["GET"].Case()
    listed = served.call(session=session) if session else served.call()
    name = listed.json()["data"][0]["id"]
    for operation in (result.ok() for result in schema.get_all_operations()):
        counter = tally.statuses.setdefault(operation.label, Counter())
        can_stream = "text/event-stream" in str(operation.definition.raw["responses"])

        def send(case: Any, counter: Counter[int] = counter, can_stream: bool = can_stream) -> None:
            shorten(case.body, can_stream)
            if case.method.upper() != case.operation.method.upper() and case.headers:
                case.headers.pop("X-Request-Id", None)  # a wrong one goes before a wrong method
            if case.meta.generation.mode.is_positive and counter.total() % FITTED:
                fit(case.body, name)
                if case.headers and "X-Request-Timeout" in case.headers:
                    case.headers["X-Request-Timeout"] = "60"
                if can_stream and counter.total() % 2:
                    case.body["stream"] = True
                if case.path_parameters:
                    case.path_parameters["name"] = name
            response = case.call(session=session) if session else case.call()
            counter[response.status_code] += 1
            for kind, example in wrong_with(case, response):
                tally.failures.setdefault(f"{case.operation.label}: {kind}", example)

        for case in borderline_cases(schema, operation, max_examples):
            send(case)
        for mode in MODES:
            send_random(operation, mode, max_examples, seed, send)
    return tally


def borderline_cases(schema: Any, operation: Any, max_examples: int) -> Iterator[Any]:
    """Of each mode at most `max_examples`, spread over the first of what may be a long list."""
    for mode in MODES:
        cases = schema.iter_coverage_cases(
            operation,
            generation_modes=[mode],
            generation_config=schema.config.generation_for(operation=operation),
        )
        found = list(islice(cases, SPREAD * max_examples))
        yield from found[:: -(-len(found) // max_examples) or 1]


def send_random(
    operation: Any, mode: GenerationMode, max_examples: int, seed: int, send: Callable[..., None]
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        send(case)

    run()


def wrong_with(case: Any, response: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with an answer, in short and in full."""
    sets_a_time = "timeout_ms" in str(case.body) or "X-Request-Timeout" in (case.headers or {})
    if response.status_code >= 500 and not (response.status_code == 504 and sets_a_time):
        yield f"status {response.status_code}", f"{case.as_curl_command()}\n{response.text:.400}"
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as group:
        for failure in group.exceptions:
            yield failure.title, f"{case.as_curl_command()}\n{failure}\n{response.text:.400}"


def shorten(body: Any, generates: bool) -> None:
    """In place: what is valid stays valid, but asks for little."""
    if not isinstance(body, dict):
        return
    limits = ("max_tokens", "max_completion_tokens")
    if generates and all(body.get(name) is None for name in limits):
        body["max_tokens"] = MAX_TOKENS
    most = {"n": 2, "best_of": 2, "min_tokens": MAX_TOKENS} | dict.fromkeys(limits, MAX_TOKENS)
    for name, limit in most.items():
        if type(body.get(name)) is int and body[name] > limit:
            body[name] = limit


def fit(body: Any, model: str) -> None:
    """In place: changes a valid body so that the model, of that name, has what it asks for."""
    if not isinstance(body, dict):
        return
    if body.get("model") is not None:
        body["model"] = model
    for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "tokens", "prompt"):
        body.update({name: fitting_ids(body[name])} if isinstance(body.get(name), list) else {})
    if body.get("logit_bias"):
        body["logit_bias"] = {
            str(int(id_) % NUM_IDS): bias for id_, bias in body["logit_bias"].items()
        }
    if body.get("regex") is not None:
        body["regex"] = "[a-z]{1,9}"
    if body.get("grammar") is not None:
        body["grammar"] = "start: /[a-z]{1,9}/"
    structures = [
        name for name in ("response_format", "regex", "grammar") if body.get(name) is not None
    ]
    is_held = structures or body.get("tools")
    for name in structures[1:] + (list(AGAINST_A_GRAMMAR) if is_held else []):
        body.pop(name, None)
    if body.get("timeout_ms") is not None:
        body["timeout_ms"] = 60_000
    if body.get("max_tokens") is not None or body.get("best_of") is not None:
        body.pop("max_completion_tokens", None)
        body.pop("best_of", None)
    if not body.get("stream"):
        body.pop("stream_options", None)
    for message in body.get("messages", ()):
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = "{}"
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message["content"] = message.get("content") or "a"
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if not body.get("tools") or isinstance(body.get("tool_choice"), dict):
        body.pop("tool_choice", None)
    if not body.get("tools"):
        body.pop("parallel_tool_calls", None)


def fitting_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [fitting_ids(each) for each in value]
    return value % NUM_IDS if isinstance(value, int) else value


def report(tally: Tally) -> None:
    for label, counter in tally.statuses.items():
        counts = "  ".join(f"{status}: {num}" for status, num in sorted(counter.items()))
        print(f"{label:28} {counter.total():6}   {counts}")
    for kind, example in tally.failures.items():
        print(f"\nFAILED {kind}\n{example}")


@click.command(help="Sends generated requests to every route; holds answers against their schemas.")
@click.option("--url", required=True, help="Of the server, as http://127.0.0.1:8080.")
@click.option("--max-examples", default=40, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True, help="Of the random requests.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the last line here.")
def main(url: str, max_examples: int, seed: int, file: Path | None) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        tally = fuzz(schema, max_examples, seed, session)
    report(tally)
    by_route = {label: dict(sorted(c.items())) for label, c in tally.statuses.items()}
    statuses = sum(tally.statuses.values(), Counter())
    summary = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": requests.get(f"{url}/info", timeout=10).json()["model"],
        "max_examples": max_examples,
        "requests": tally.num_requests,
        "server_errors": sum(n for status, n in statuses.items() if 500 <= status != 504),
        "deadlines": statuses[504],
        "failures": list(tally.failures),
        "seed": seed,
        "by_route": by_route,
    }
    if file is not None:
        file.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    sys.exit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
