"""Who may import whom, read off the source: at the top, inside functions and for types alike."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "quantize")

# module of app -> those of app that it may import. A new module needs a row, a new import a reason.
OWN: dict[str, set[str]] = {
    "__init__": set(),
    # state and names: nothing of ours
    "sequence": set(),
    "errors": set(),
    "departure": {"errors"},
    "direct": {"errors"},
    "edge_options": set(),
    "queue_options": {"edge_options"},
    "metrics_options": {"edge_options"},
    "device_options": {"edge_options"},
    "cache_options": {"edge_options"},
    "tracing_options": {"edge_options"},
    "access": set(),
    "logs": set(),
    "machine": set(),
    "memory": set(),
    "repetition": set(),
    "pulse": set(),
    "batch_limit": set(),
    "arena": set(),
    "origin": set(),
    "garbage": set(),
    "pace": set(),
    "stops": set(),
    "precision": set(),
    # the model folder, as far as it can be read without its weights
    "record": {"errors"},
    "folder": {"errors", "record"},
    "external_data": set(),
    "attention": {"errors"},
    "graph": {"attention", "errors", "external_data", "folder"},
    "context": {"folder", "graph", "record"},
    # one idea each
    "quota": {"errors"},
    "keys": {"quota"},
    "key_ring": {"keys"},
    "key_options": {"edge_options", "keys"},
    "config": {
        *{"cache_options", "device_options", "edge_options", "errors", "folder", "key_options"},
        *{"keys", "metrics_options", "queue_options", "record", "tracing_options"},
    },
    "kv_cache": {"sequence"},
    "masks": {"sequence"},
    "candidates": {"sequence"},
    "edits": {"sequence"},
    "logprobs": {"candidates", "sequence"},
    "sampler": {"candidates", "edits", "logprobs", "sequence"},
    "waiting": {"sequence"},
    "work": {"sequence"},
    "backlog": {"errors", "pace", "sequence", "work"},
    "prefill_budget": {"sequence"},
    "runner": set(),
    "cuda": set(),
    "session": {"cuda", "errors", "folder", "graph"},
    "form": {"graph", "kv_cache", "runner"},
    "advances": {"repetition", "sequence"},
    "slots": {"prefixes", "sequence"},
    "prefixes": set(),
    "scheduler": {
        *{"advances", "arena", "batch_limit", "prefill_budget", "sampler", "sequence", "slots"},
        "waiting",
    },
    "fused": {"form", "graph", "kv_cache"},
    "portable": {"errors", "form", "kv_cache"},
    "model": {
        *{"context", "form", "fused", "graph", "kv_cache", "machine"},
        *{"portable", "precision", "record", "sequence", "session"},
    },
    "device_sampler": {"kv_cache", "model", "sampler", "sequence"},
    "control": {"errors"},
    "plain": {"control"},
    "detokenizer": {"errors"},
    "ends": {"folder"},
    "text": {"control", "detokenizer", "ends", "errors", "plain"},
    # conversations and tools
    "tools": set(),
    "call_json": set(),
    "tool_calls": {"call_json", "stops", "tools"},
    "tool_grammar": {"schema", "tools"},
    "template": {"call_json", "tool_calls", "tools"},
    "chat": {"control", "errors", "template", "text", "tools"},
    "patterns": set(),
    "schema": {"patterns"},
    "lark": {"schema"},
    "tool_schemas": {"errors", "schema", "tool_grammar", "tools"},
    "grammar": {
        *{"detokenizer", "errors", "lark", "masks", "schema", "tool_grammar", "tool_schemas"},
    },
    "histogram": set(),
    "metric_families": {"errors", "histogram", "sequence"},
    "slow_steps": {"access"},
    "metrics": {
        *{"arena", "backlog", "busy", "metric_families", "saturation", "sequence", "slow_steps"},
    },
    "metric_aliases": {"metric_families"},
    "exposition": set(),
    "gpu_driver": set(),
    "gpu_metrics": {"gpu_driver", "metric_families"},
    "busy": set(),
    "saturation": set(),
    # the engine, its thread, and an answer as it comes out of it
    "engine": {"arena", "backlog", "kv_cache", "masks", "sampler", "scheduler", "sequence"},
    "off_hub": {"departure", "errors"},
    "engine_thread": {"backlog", "engine", "garbage", "pulse", "sequence"},
    "bridge": {"backlog", "engine", "engine_thread", "errors", "off_hub", "pulse", "sequence"},
    "closing": set(),
    "drain": {"bridge", "closing", "errors"},
    "readiness": {"errors"},
    "probe": {"engine", "errors", "kv_cache", "machine", "record", "sequence"},
    "completion": {"backlog", "detokenizer", "errors", "sequence", "stops"},
    "passage": {"completion", "direct", "sequence"},
    "answer": {"backlog", "completion", "direct", "errors", "passage"},
    # HTTP
    "framing": {"config", "errors"},
    "body": {"config", "errors", "framing"},
    "traced": {"answer"},
    "tracing": {"answer", "config", "routes", "traced"},
    "connection": {
        *{"access", "body", "cors", "departure", "direct", "errors", "framing", "traced"},
    },
    "edge": {"config", "connection", "tracing"},
    "fields": {"sequence"},
    "generate_requests": {"fields"},
    "openai_requests": {"fields", "tools"},
    "protocol": {"errors"},
    "limits": {"errors", "fields"},
    "replies": {"answer", "completion", "errors", "text"},
    "generate_replies": {"answer", "completion", "passage", "replies", "text"},
    "openai_replies": {
        *{"answer", "call_json", "completion", "passage", "replies", "sequence", "text"},
        *{"tool_calls"},
    },
    "responses": set(),
    "routes": {"generate_requests", "openai_requests", "responses"},
    "guard": {"access", "closing", "errors", "key_ring", "keys", "quota", "routes"},
    "cors": set(),
    "openapi": {"config", "http", "limits", "responses", "routes"},
    "docs_page": {"http", "openapi"},
    "chat_page": set(),
    "loading": {
        *{"arena", "chat", "config", "engine", "errors", "grammar", "graph", "kv_cache"},
        *{"device_sampler", "machine", "memory", "model", "prefixes", "probe", "record"},
        *{"sampler", "scheduler", "text"},
    },
    "served": {
        *{"answer", "backlog", "bridge", "chat", "completion", "config", "departure", "engine"},
        *{"errors", "fields", "grammar", "limits", "loading", "metrics", "off_hub", "origin"},
        *{"sequence", "tools"},
    },
    "service": {
        *{"access", "bridge", "config", "drain", "engine", "errors", "graph", "guard", "key_ring"},
        *{"gpu_metrics", "loading", "metric_aliases", "metrics", "quota", "readiness", "served"},
        "tracing",
    },
    # Triton's python backend in the place of HTTP, another thread in the place of the hub
    "triton_requests": {"errors", "fields", "generate_requests", "protocol"},
    "triton_settings": {"config", "errors"},
    "triton_metrics": set(),
    "triton_answer": {"backlog", "completion", "errors", "sequence"},
    "triton_intake": {
        *{"errors", "generate_requests", "limits", "loading", "sequence", "triton_requests"},
    },
    "triton_backend": {
        *{"backlog", "completion", "config", "engine", "engine_thread", "errors", "graph"},
        *{"limits", "loading", "logs", "machine", "metrics", "pulse", "sequence"},
        *{"triton_answer", "triton_intake", "triton_metrics", "triton_requests"},
        "triton_settings",
    },
    "triton_once": {"errors", "triton_answer"},
    "switch": {"bridge", "errors", "garbage", "origin", "served", "service"},
    "admin_api": {
        *{"errors", "generate_requests", "guard", "http", "keys", "served", "service", "switch"},
    },
    "http": {
        *{"access", "answer", "completion", "config", "departure", "direct", "errors", "limits"},
        *{"off_hub", "protocol", "replies", "served", "service", "traced"},
    },
    "generate_api": {
        *{"generate_replies", "generate_requests", "http", "limits", "served", "service"},
    },
    "openai_api": {
        *{"errors", "fields", "http", "limits", "openai_replies", "openai_requests", "service"},
        *{"chat", "schema", "served", "tool_calls", "tool_grammar", "tools"},
    },
    "ops_api": {"exposition", "http", "service"},
    "api": {
        *{
            "admin_api",
            "chat_page",
            "config",
            "cors",
            "docs_page",
            "errors",
            "generate_api",
            "http",
            "openai_api",
        },
        *{"ops_api", "service", "switch"},
    },
    "__main__": {
        *{"api", "bridge", "config", "edge", "errors", "logs", "machine", "service", "switch"},
    },
}

# third-party library -> the modules of app that are its door
DOORS: dict[str, set[str]] = {
    "click": {
        *{"cache_options", "config", "device_options", "edge_options", "key_options"},
        *{"metrics_options", "queue_options", "tracing_options"},
        *{"triton_settings"},
    },
    "flask": {
        *{"admin_api", "api", "cors", "docs_page", "edge", "generate_api", "guard", "http"},
        *{"chat_page", "openai_api", "ops_api"},
    },
    "gevent": {
        *{"__main__", "answer", "bridge", "connection", "departure", "direct", "drain"},
        *{"edge", "framing", "guard", "off_hub", "passage", "readiness", "service", "switch"},
    },
    "jinja2": {"chat", "docs_page"},
    "llguidance": {"grammar", "masks"},
    "numpy": {
        *{"candidates", "edits", "engine", "form", "fused", "grammar", "logprobs", "masks"},
        *{"device_sampler", "model", "portable", "prefixes", "probe", "runner", "sampler"},
        *{"triton_answer", "triton_once"},
    },
    "onnx": {"attention", "external_data", "graph"},
    "onnxruntime": {"cuda", "form", "fused", "model", "runner", "session"},
    "opentelemetry": {"tracing"},
    "optimum": {"session"},
    "orjson": {"connection", "http", "openai_replies", "passage", "protocol", "replies"},
    "prometheus_client": {
        *{"exposition", "gpu_metrics", "histogram", "metric_aliases", "metric_families"},
        *{"metrics", "service"},
        *{"triton_backend", "triton_metrics"},
    },
    "psutil": {"machine"},
    "pydantic": {
        *{"fields", "generate_requests", "http", "openai_requests", "openapi", "protocol"},
        *{"keys", "record", "responses", "routes"},
        *{"triton_requests"},
    },
    "pydantic_core": {"protocol"},
    "pynvml": {"gpu_driver"},
    "pythonjsonlogger": {"logs"},
    "tokenizers": {"detokenizer", "grammar", "plain", "text"},
    "torch": {
        *{"cuda", "device_sampler", "form", "fused", "kv_cache", "model", "portable", "precision"},
        *{"gpu_driver", "runner"},
    },
    "transformers": {"ends", "text"},
    "werkzeug": {"api"},
}


def modules(package: str) -> dict[str, Path]:
    """By dotted name within the package."""
    root = ROOT / package
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("*.py")
    }


def imports(package: str, module: str, source: str) -> Iterator[str]:
    """Absolute dotted names of all that `source` imports; of `from a import b`, `a.b`."""
    parents = [package, *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            origin = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def imports_of(package: str, module: str) -> set[str]:
    return set(imports(package, module, modules(package)[module].read_text()))


def own(module: str) -> set[str]:
    """The modules of app that `module` imports."""
    names = [name.split(".") for name in imports_of("app", module)]
    return {name[1] for name in names if name[0] == "app"}


def third_party(module: str) -> set[str]:
    return {
        library
        for name in imports_of("app", module)
        if (library := name.split(".")[0]) not in {*sys.stdlib_module_names, *PACKAGES}
    }


APP = sorted(modules("app"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os.path", {"os.path"}),
        ("from flask import Flask, request", {"flask.Flask", "flask.request"}),
        ("from . import protocol", {"app.protocol"}),
        ("from .errors import ServeError", {"app.errors.ServeError"}),
        ("def f():\n    import torch", {"torch"}),
        ("if TYPE_CHECKING:\n    from app.engine import Engine", {"app.engine.Engine"}),
        ("class A:\n    def f(self):\n        from .. import quantize", {"quantize"}),
    ],
)
def test_imports_are_found_wherever_they_stand(source: str, found: set[str]) -> None:
    assert set(imports("app", "any", source)) == found


@pytest.mark.parametrize(
    ("package", "other"), [("app", "quantize"), ("quantize", "app"), ("app", "tests")]
)
def test_package_never_imports_the_other(package: str, other: str) -> None:
    roots = {
        module: {name.split(".")[0] for name in imports_of(package, module)}
        for module in modules(package)
    }
    assert len(roots) > 5
    assert [module for module, names in roots.items() if other in names] == []


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    assert set(APP) == OWN.keys()


@pytest.mark.parametrize("module", APP)
def test_module_imports_only_what_its_row_allows(module: str) -> None:
    assert own(module) - OWN.get(module, set()) == set()


@pytest.mark.parametrize("module", OWN)
def test_row_allows_nothing_that_the_module_has_no_use_for(module: str) -> None:
    assert OWN[module] - own(module) == set()


def test_rows_have_no_circle() -> None:
    left = {module: set(allowed) for module, allowed in OWN.items()}
    while free := {module for module, allowed in left.items() if not allowed & left.keys()}:
        left = {module: allowed for module, allowed in left.items() if module not in free}
    assert left == {}


@pytest.mark.parametrize("module", APP)
def test_library_is_imported_through_its_door_only(module: str) -> None:
    assert [
        library for library in third_party(module) if module not in DOORS.get(library, ())
    ] == []


@pytest.mark.parametrize("door", sorted(set().union(*DOORS.values())))
def test_doors_are_modules(door: str) -> None:
    assert door in APP


def test_routes_can_be_imported_without_the_models_libraries() -> None:
    code = "import sys; import app.api; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.split(".")[0] for name in run.stdout.split()}
    assert not imported & {"torch", "transformers", "tokenizers", "onnxruntime", "optimum"}
