"""Settings: precedence, and a wrong value told by the name of its variable, before slow imports."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from app.config import OPTIONS, VERSION, Settings, read_settings
from app.keys import read_pairs

ROOT = Path(__file__).parents[1]
# What takes seconds to import, and what only a server that starts needs.
SLOW = {"torch", "transformers", "tokenizers", "onnxruntime", "optimum", "gevent", "flask"}

CONTEXT = 131072

DEFAULTS: dict[str, Any] = {
    "model_path": Path("models/default"),
    "host": "0.0.0.0",
    "port": 8080,
    "device": "auto",
    "strict_precision": False,
    "deterministic": False,
    "threads": 0,
    "max_batch_size": 0,
    "max_model_len": 0,
    "prefill_chunk": 192,
    "prefill_stall": 1.0,
    "max_body_bytes": 1 << 20,
    "max_timeout_ms": 3_600_000,
    "max_step_seconds": 60,
    "slow_step_ms": 50,
    "max_load_seconds": 1800,
    "pre_drain_seconds": 0,
    "drain_seconds": 30,
    "served_model_name": (),
    "log_level": "info",
    "admin_api_key": "",
    "max_connections": 8_192,
    "reserved_connections": 32,
    "max_request_line": 8_192,
    "max_header_bytes": 32_768,
    "max_headers": 100,
    "max_json_depth": 100,
    "keepalive_timeout_ms": 75_000,
    "header_timeout_ms": 10_000,
    "read_timeout_ms": 10_000,
    "body_timeout_ms": 60_000,
    "write_timeout_ms": 30_000,
    "tcp_user_timeout_ms": 30_000,
    "log_format": "json",
    "max_queued_requests": 1024,
    "max_queued_tokens": 524_288,
    "saturation_wait_seconds": 5,
    "metrics_aliases": "none",
    "max_gpu_memory_bytes": 0,
    "kv_memory_share": 0.8,
    "kv_idle_seconds": 60,
    "prefix_cache": True,
    "ops_port": 0,
    "ops_host": "",
    "otlp_traces_endpoint": "",
    "api_keys": (),
    "api_keys_file": None,
    "cors_origins": (),
}
# name -> least and most
BOUNDS = {
    "max_connections": (1, 1_000_000),
    "reserved_connections": (1, 10_000),
    "max_request_line": (16, 1_048_576),
    "max_header_bytes": (16, 16_777_216),
    "max_headers": (1, 10_000),
    "max_json_depth": (1, 1_000),
    "keepalive_timeout_ms": (1, 86_400_000),
    "header_timeout_ms": (1, 86_400_000),
    "read_timeout_ms": (1, 86_400_000),
    "body_timeout_ms": (1, 86_400_000),
    "write_timeout_ms": (1, 86_400_000),
    "tcp_user_timeout_ms": (1_000, 86_400_000),
    "max_queued_requests": (1, 1_000_000),
    "max_queued_tokens": (1, 1 << 30),
    "saturation_wait_seconds": (1, 86_400),
    "kv_idle_seconds": (0, 86_400),
}
# variable -> two right values, as written and as read; neither is the default
RIGHT: dict[str, tuple[tuple[str, Any], tuple[str, Any]]] = {
    "MODEL_PATH": (("one", Path("one")), ("two", Path("two"))),
    "HOST": (("127.0.0.1", "127.0.0.1"), ("::", "::")),
    "PORT": (("1", 1), ("65535", 65535)),
    "DEVICE": (("cpu", "cpu"), ("cuda", "cuda")),
    "STRICT_PRECISION": (("true", True), ("1", True)),
    "DETERMINISTIC": (("true", True), ("1", True)),
    "THREADS": (("1", 1), ("1024", 1024)),
    "MAX_BATCH_SIZE": (("1", 1), ("1024", 1024)),
    "MAX_MODEL_LEN": (("2", 2), (str(CONTEXT), CONTEXT)),
    "PREFILL_CHUNK": (("1", 1), ("65536", 65536)),
    "PREFILL_STALL": (("0", 0.0), ("2.5", 2.5)),
    "MAX_BODY_BYTES": (("1", 1), ("2000000", 2000000)),
    "MAX_TIMEOUT_MS": (("0", 0), ("1000", 1000)),
    "MAX_STEP_SECONDS": (("1", 1), ("86400", 86_400)),
    "SLOW_STEP_MS": (("1", 1), ("86400000", 86_400_000)),
    "MAX_LOAD_SECONDS": (("0", 0), ("86400", 86_400)),
    "PRE_DRAIN_SECONDS": (("5", 5), ("3600", 3600)),
    "DRAIN_SECONDS": (("0", 0), ("86400", 86_400)),
    "ADMIN_API_KEY": (("sesame", "sesame"), ("a/b+c=", "a/b+c=")),
    "SERVED_MODEL_NAME": (("a", ("a",)), (" a/b , gpt-4o", ("a/b", "gpt-4o"))),
    "LOG_LEVEL": (("debug", "debug"), ("error", "error")),
    "LOG_FORMAT": (("text", "text"), ("text", "text")),
    "METRICS_ALIASES": (("vllm", "vllm"), ("vllm", "vllm")),
    "KV_MEMORY_SHARE": (("0.05", 0.05), ("0.95", 0.95)),
    "PREFIX_CACHE": (("false", False), ("0", False)),
    "OPS_PORT": (("9090", 9090), ("65535", 65535)),
    "OPS_HOST": (("127.0.0.1", "127.0.0.1"), ("::", "::")),
    "OTLP_TRACES_ENDPOINT": (("http://a:1/x",) * 2, ("https://b/v1/traces",) * 2),
    "API_KEYS": (("ann:a", read_pairs("ann:a")), ("bob:b,zoe:c", read_pairs("bob:b,zoe:c"))),
    "API_KEYS_FILE": (("one.json", Path("one.json")), ("two.json", Path("two.json"))),
    "CORS_ORIGINS": (("*", ("*",)), ("http://a:1, https://b.c", ("http://a:1", "https://b.c"))),
    "MAX_GPU_MEMORY_BYTES": (("1", 1), (str(1 << 50), 1 << 50)),
    **{name.upper(): ((str(low), low), (str(high), high)) for name, (low, high) in BOUNDS.items()},
}
# Without it the other is refused.
NEEDS = {"OPS_HOST": ("--ops-port", "9090")}
# HOST and OPS_HOST are any text: only binding to them can tell.
WRONG: dict[str, list[str]] = {
    "MODEL_PATH": ["nowhere", "no-graph", "one/model.onnx"],
    "PORT": ["nope", "-1", "65536", "80.5"],
    "DEVICE": ["gpu", "cuda:0"],
    "STRICT_PRECISION": ["maybe", "2"],
    "DETERMINISTIC": ["maybe", "2"],
    "OTLP_TRACES_ENDPOINT": [
        "a:4318",
        "grpc://a:4317/x",
        "http://a:4318",
        "http://[x/y",
        "http:///x",
    ],
    "THREADS": ["many", "-1", "1025"],
    "MAX_BATCH_SIZE": ["many", "-1", "1025"],
    "MAX_MODEL_LEN": ["long", "-1", "1e3", "1", str(CONTEXT + 1)],
    "PREFILL_CHUNK": ["big", "0", "65537"],
    "PREFILL_STALL": ["none", "-0.1", "1000.1", "nan"],
    "MAX_BODY_BYTES": ["1MB", "0", "-1"],
    "MAX_TIMEOUT_MS": ["1s", "-1", "1.5"],
    "MAX_STEP_SECONDS": ["1m", "0", "86401"],
    "SLOW_STEP_MS": ["1s", "0", "86400001"],
    "MAX_LOAD_SECONDS": ["1m", "-1", "86401"],
    "PRE_DRAIN_SECONDS": ["5s", "-1", "3601"],
    "DRAIN_SECONDS": ["30s", "-1", "86401"],
    "ADMIN_API_KEY": ["a key", "schl\u00fcssel", " "],
    "SERVED_MODEL_NAME": [",", "a,", "a,,b", " "],
    "LOG_LEVEL": ["loud", "10"],
    "LOG_FORMAT": ["xml"],
    "METRICS_ALIASES": ["triton", "vllm,none"],
    "PREFIX_CACHE": ["maybe", "2"],
    "KV_MEMORY_SHARE": ["80 %", "0.04", "0.96", "nan", "inf"],
    "OPS_PORT": ["nope", "-1", "65536"],
    "API_KEYS": ["secret", "ann:", ",", "ann:a,ann:b"],
    "API_KEYS_FILE": ["nowhere.json", "broken.json", "one"],
    "CORS_ORIGINS": ["a.example", "https://a/", "https://A.example", "*,https://a", ",", "null"],
    "MAX_GPU_MEMORY_BYTES": ["8GB", "-1", str((1 << 50) + 1)],
    **{name.upper(): ["many", str(low - 1), str(high + 1)] for name, (low, high) in BOUNDS.items()},
}
WRONG_VALUES = [(variable, value) for variable, values in WRONG.items() for value in values]


def variable_of(option: click.Parameter) -> str:
    assert isinstance(option.envvar, str)
    return option.envvar


FLAGS = {variable_of(option): option.opts[0] for option in OPTIONS}
NAMES = {variable_of(option): str(option.name) for option in OPTIONS}


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with model folders, as the working folder, and none of the variables set."""
    for folder in ("models/default", "one", "two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.onnx").touch()
        config = json.dumps({"max_position_embeddings": CONTEXT})
        (tmp_path / folder / "config.json").write_text(config)
    (tmp_path / "no-graph").mkdir()
    for name in ("one", "two"):
        keys = {"keys": [{"name": f"of-{name}", "secret": "in-a-file"}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(keys))
    (tmp_path / "broken.json").write_text('{"keys": [')
    monkeypatch.chdir(tmp_path)
    for variable in FLAGS:
        monkeypatch.delenv(variable, raising=False)


def test_tables_here_cover_every_option() -> None:
    assert RIGHT.keys() == WRONG.keys() | {"HOST", "OPS_HOST"} == FLAGS.keys()


def test_every_setting_has_an_option_of_its_name() -> None:
    assert {field.name for field in fields(Settings)} == set(NAMES.values())


def test_defaults_are_the_documented_ones() -> None:
    assert read_settings([]) == Settings(**DEFAULTS)


def expected(variable: str, read: Any) -> Settings:
    needed = {"ops_port": 9090} if variable in NEEDS else {}
    return Settings(**DEFAULTS | needed | {NAMES[variable]: read})


@pytest.mark.parametrize("variable", RIGHT)
def test_environment_beats_the_default(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, read = RIGHT[variable][0]
    monkeypatch.setenv(variable, written)
    assert read_settings(NEEDS.get(variable, [])) == expected(variable, read)


@pytest.mark.parametrize("variable", RIGHT)
def test_flag_beats_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_environment, _), (on_command_line, read) = RIGHT[variable]
    monkeypatch.setenv(variable, in_environment)
    settings = read_settings([FLAGS[variable], on_command_line, *NEEDS.get(variable, [])])
    assert settings == expected(variable, read)


@pytest.mark.parametrize("variable", RIGHT)
def test_empty_variable_means_the_default(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "")
    assert read_settings([]) == Settings(**DEFAULTS)


@pytest.mark.parametrize(("variable", "value"), WRONG_VALUES)
def test_wrong_value_in_the_environment_exits_2_and_names_the_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as exit_:
        read_settings([])
    assert exit_.value.code == 2
    assert f"'{variable}'" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "value"), WRONG_VALUES)
def test_wrong_value_of_a_flag_exits_2_and_names_the_variable(
    variable: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings([FLAGS[variable], value])
    assert exit_.value.code == 2
    assert f"'{variable}'" in capsys.readouterr().err


def test_model_folder_without_a_graph_is_told_with_its_path_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL_PATH", "no-graph")
    with pytest.raises(SystemExit):
        read_settings([])
    message = " ".join(capsys.readouterr().err.split())
    assert "'no-graph' is not a model folder: it has no model.onnx" in message
    assert "python -m quantize" in message


def test_key_of_the_variable_that_is_also_in_the_file_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_KEYS", "ann:in-a-file")
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--api-keys-file", "one.json"])
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "'API_KEYS_FILE'" in message
    assert "one.json: ann and of-one have the same secret" in message


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"API_KEYS": "ann:open-sesame"}, "(env var: 'API_KEYS'): ann has"),
        ({"API_KEYS_FILE": "admin.json"}, "(env var: 'API_KEYS_FILE'): admin.json: zoe has"),
    ],
)
def test_admin_key_that_is_also_an_api_key_exits_2_and_names_both_variables(
    keys: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_file = {"keys": [{"name": "zoe", "secret": "open-sesame"}]}
    Path("admin.json").write_text(json.dumps(in_file))
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    read_settings([])
    monkeypatch.setenv("ADMIN_API_KEY", "open-sesame")
    with pytest.raises(SystemExit) as exit_:
        read_settings([])
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"{said} the same secret as ADMIN_API_KEY" in message
    assert "open-sesame" not in message


def test_no_secret_is_in_the_settings_text_the_help_or_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("API_KEYS", "ann:do-not-tell")
    assert "do-not-tell" not in repr(read_settings([]))
    for arguments in (["--help"], ["--api-keys", "do-not-tell"], ["--port", "x"]):
        with pytest.raises(SystemExit):
            read_settings(arguments)
    shown = capsys.readouterr()
    assert "do-not-tell" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("arguments", "variable", "told"),
    [
        (["--port", "9090", "--ops-port", "9090"], "OPS_PORT", "9090 is PORT's too"),
        (["--ops-host", "::1"], "OPS_HOST", "'::1' is the address of OPS_PORT, which is not set"),
        (
            ["--device", "cpu", "--max-gpu-memory-bytes", "1"],
            *("MAX_GPU_MEMORY_BYTES", "1 bounds a GPU's memory, and DEVICE=cpu uses none"),
        ),
        (["--served-model-name", "a,b, a"], "SERVED_MODEL_NAME", "'a' is there twice"),
        (["--api-keys", "ann:a,do-not-tell"], "API_KEYS", "entry 2 has no colon"),
        (["--api-keys", "a b:do-not-tell"], "API_KEYS", "entry 1: a name must be"),
        (["--api-keys", "ann:do-not-tell\u00e9"], "API_KEYS", "the secret of ann (entry 1): a"),
    ],
)
def test_settings_at_odds_are_told_by_name_and_without_a_secret(
    arguments: list[str], variable: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings(arguments)
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"'{variable}'" in message and told in message
    assert "do-not-tell" not in message


def test_version_is_shown_and_nothing_else_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--version", "--model", "nowhere"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"phi-serve {VERSION}\n"


def test_unknown_flag_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--prot", "1"])
    assert exit_.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_help_exits_0_and_lists_every_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert [variable for variable in FLAGS if variable not in shown] == []


@pytest.mark.parametrize(
    "content",
    [
        *("{", "{}", "[]", "7"),
        '{"max_position_embeddings": null}',
        '{"max_position_embeddings": "4096"}',
        '{"max_position_embeddings": 0}',
    ],
)
def test_config_that_does_not_tell_the_context_is_named(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("one/config.json").write_text(content)
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--model", "one"])
    assert exit_.value.code == 2
    assert "one/config.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["strict_precision", "deterministic"])
def test_yes_or_no_is_a_flag_of_its_own_too(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    assert getattr(read_settings([flag, "--port", "1"]), name)
    assert not getattr(read_settings([flag, "false"]), name)


def write_record(**record: Any) -> None:
    Path("one/quantization.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("limit", "context"), [(4096, 4096), (CONTEXT, CONTEXT), (2**20, CONTEXT)])
def test_capped_context_is_the_limit_of_the_model_len(
    limit: int, context: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lower of config.json's and the record's; the message has both numbers and the note."""
    write_record(context_length=limit, context_note="short side")
    arguments = ["--model", "one", "--max-model-len"]
    assert read_settings([*arguments, str(context)]).max_model_len == context
    with pytest.raises(SystemExit) as exit_:
        read_settings([*arguments, str(context + 1)])
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "'MAX_MODEL_LEN'" in message
    assert f"{context + 1} is more than the model's context of {context} tokens" in message
    assert "(short side)" in message


def test_wrong_record_is_named_with_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    write_record(context_length="4096")
    with pytest.raises(SystemExit) as exit_:
        read_settings(["--model", "one"])
    assert exit_.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "'MODEL_PATH'" in message
    assert "one/quantization.json: context_length" in message


def test_command_with_a_wrong_port_exits_2_before_any_slow_import() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "app", "--port", "nope"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    timed = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    message = [line for line in run.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in timed}
    assert run.returncode == 2
    assert "'PORT'" in message[-1]
    assert "click" in imported  # the list of imports was read rightly
    assert not imported & SLOW


def test_reading_right_settings_imports_nothing_slow(tmp_path: Path) -> None:
    code = "import sys; from app.config import read_settings; read_settings(); print(*sys.modules)"
    command = [sys.executable, "-c", code, "--model", str(tmp_path / "one")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {name.split(".")[0] for name in run.stdout.split()}
    assert "click" in imported
    assert not imported & SLOW
