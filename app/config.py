"""Settings: one click option each, with a flag and an environment variable.

click checks every value before anything slow is imported, and its message names the variable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from .cache_options import CACHE_OPTIONS
from .device_options import DEVICE_OPTIONS
from .edge_options import EDGE_OPTIONS
from .errors import UnservableModel, WrongSetting
from .folder import find_graph, read_context_length
from .key_options import KEY_OPTIONS
from .keys import BadKeys, Key, check_apart, parse_file, read_file
from .metrics_options import METRICS_OPTIONS
from .queue_options import QUEUE_OPTIONS
from .record import read_record
from .tracing_options import TRACING_OPTIONS

VERSION = "0.1.0"  # pyproject's: a checkout is not installed, so nothing else could tell


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting, checked. The fields are named as the options are."""

    model_path: Path
    host: str
    port: int
    device: str
    strict_precision: bool
    deterministic: bool
    threads: int
    max_batch_size: int
    max_model_len: int
    prefill_chunk: int
    prefill_stall: float
    max_body_bytes: int
    max_timeout_ms: int
    max_step_seconds: int
    slow_step_ms: int
    max_load_seconds: int
    pre_drain_seconds: int
    drain_seconds: int
    served_model_name: tuple[str, ...]
    log_level: str
    admin_api_key: str = field(repr=False)  # empty: nobody may
    max_connections: int
    reserved_connections: int
    max_request_line: int
    max_header_bytes: int
    max_headers: int
    max_json_depth: int
    keepalive_timeout_ms: int
    header_timeout_ms: int
    read_timeout_ms: int
    body_timeout_ms: int
    write_timeout_ms: int
    tcp_user_timeout_ms: int
    ops_port: int
    ops_host: str
    log_format: str
    max_queued_requests: int
    max_queued_tokens: int
    saturation_wait_seconds: int
    metrics_aliases: str
    kv_memory_share: float
    kv_idle_seconds: int
    prefix_cache: bool
    max_gpu_memory_bytes: int
    otlp_traces_endpoint: str  # empty: no tracing
    api_keys: tuple[Key, ...]
    api_keys_file: Path | None
    cors_origins: tuple[str, ...]


def _model_folder(_: click.Context, __: click.Parameter, value: Path) -> Path:
    try:
        find_graph(value)
    except UnservableModel as error:
        raise click.BadParameter(str(error)) from None
    return value


def _not_one(_: click.Context, __: click.Parameter, value: int) -> int:
    if value == 1:
        raise click.BadParameter("1 leaves no room for a prompt and an answer.")
    return value


def _number(_: click.Context, __: click.Parameter, value: float) -> float:
    if math.isnan(value):  # click's range takes it
        raise click.BadParameter("not a number.")
    return value


def _names(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",")) if value else ()
    if not all(names):
        raise click.BadParameter("a name between the commas is empty.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.BadParameter(f"{twice[0]!r:.100} is there twice.")
    return names


def _check(**values: Any) -> Settings:
    """The settings as a whole: a limit must lie within the model's own."""
    settings = Settings(**values)
    _check_keys(settings)
    _check_ports(settings)
    if settings.device == "cpu" and settings.max_gpu_memory_bytes:
        raise click.BadParameter(
            f"{settings.max_gpu_memory_bytes} bounds a GPU's memory, and DEVICE=cpu uses none.",
            param_hint="'--max-gpu-memory-bytes' (env var: 'MAX_GPU_MEMORY_BYTES')",
        )
    try:
        check_folder(settings)
    except WrongSetting as error:
        raise click.BadParameter(
            str(error).removeprefix("MAX_MODEL_LEN: "),
            param_hint="'--max-model-len' (env var: 'MAX_MODEL_LEN')",
        ) from None
    except UnservableModel as error:
        raise click.BadParameter(
            str(error), param_hint="'--model' (env var: 'MODEL_PATH')"
        ) from None
    return settings


def check_folder(settings: Settings) -> None:
    """What can be told of a folder before anything of it is loaded. Raises UnservableModel, and
    WrongSetting for a MAX_MODEL_LEN that is not within its context."""
    find_graph(settings.model_path)
    context = read_context_length(settings.model_path)
    note = read_record(settings.model_path).context_note
    if settings.max_model_len > context:
        raise WrongSetting(
            f"MAX_MODEL_LEN: {settings.max_model_len} is more than the model's context of {context}"
            f" tokens{f' ({note})' if note else ''}"
        )


def _admin_key(_: click.Context, __: click.Parameter, value: str) -> str:
    if not re.fullmatch("[!-~]*", value):
        raise click.BadParameter("a key has visible ASCII characters only, no spaces.")
    return value


def _check_keys(settings: Settings) -> None:
    """Of the variables and the file together."""
    try:
        check_apart([*settings.api_keys], settings.admin_api_key)
    except BadKeys as error:
        raise click.BadParameter(
            str(error), param_hint="'--api-keys' (env var: 'API_KEYS')"
        ) from None
    if settings.api_keys_file is None:
        return
    try:
        in_file = parse_file(read_file(settings.api_keys_file))
        check_apart([*settings.api_keys, *in_file], settings.admin_api_key)
    except BadKeys as error:
        raise click.BadParameter(
            f"{settings.api_keys_file}: {error}",
            param_hint="'--api-keys-file' (env var: 'API_KEYS_FILE')",
        ) from None


def _check_ports(settings: Settings) -> None:
    if settings.ops_port and settings.ops_port == settings.port:
        raise click.BadParameter(
            f"{settings.ops_port} is PORT's too; health and metrics need another one.",
            param_hint="'--ops-port' (env var: 'OPS_PORT')",
        )
    if settings.ops_host and not settings.ops_port:
        raise click.BadParameter(
            f"{settings.ops_host!r:.100} is the address of OPS_PORT, which is not set.",
            param_hint="'--ops-host' (env var: 'OPS_HOST')",
        )


def _option(flag: str, name: str, help_: str, **attributes: Any) -> click.Option:
    return click.Option(
        [flag, name],
        envvar="MODEL_PATH" if name == "model_path" else name.upper(),
        help=help_,
        show_default=True,
        show_envvar=True,
        **attributes,
    )


OPTIONS: list[click.Parameter] = [
    _option(
        "--model",
        "model_path",
        "Folder of the model: what `python -m quantize` writes, an ONNX export of optimum, or "
        "Microsoft's layout.",
        type=click.Path(path_type=Path),
        default="models/default",
        callback=_model_folder,
    ),
    _option("--host", "host", "Address to listen on.", default="0.0.0.0"),
    _option(
        "--port",
        "port",
        "Port to listen on; 0 takes a free one.",
        type=click.IntRange(0, 65535),
        default=8080,
    ),
    _option(
        "--device",
        "device",
        "`cuda` fails without a usable GPU, `auto` falls back to the CPU.",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
    ),
    _option(
        "--strict-precision",
        "strict_precision",
        "Refuse a graph whose precision does not suit the device, instead of warning.",
        type=click.BOOL,
        is_flag=False,
        flag_value="true",
        default=False,
    ),
    _option(
        "--deterministic",
        "deterministic",
        "Answers that do not change with what else runs: each row decodes in a run of its own, so "
        "more rows bring no more tokens/s.",
        type=click.BOOL,
        is_flag=False,
        flag_value="true",
        default=False,
    ),
    _option(
        "--threads",
        "threads",
        "CPU threads of the model; 0 takes all CPUs that the process may use.",
        type=click.IntRange(0, 1024),
        default=0,
    ),
    _option(
        "--max-batch-size",
        "max_batch_size",
        "Most requests that run together; fewer while the KV cache would not fit in memory. 0: one "
        "for each GiB that is free once the model is loaded, from 4 to 32.",
        type=click.IntRange(0, 1024),
        default=0,
    ),
    _option(
        "--max-model-len",
        "max_model_len",
        "Most tokens of prompt and answer together; 0 takes the model's context.",
        type=click.IntRange(0),
        default=0,
        callback=_not_one,
    ),
    _option(
        "--prefill-chunk",
        "prefill_chunk",
        "Most prompt tokens that a step reads: as many as this while no stream is open.",
        type=click.IntRange(1, 65536),
        default=192,
    ),
    _option(
        "--prefill-stall",
        "prefill_stall",
        "How many times what its decoding takes a step of the open streams may grow for the "
        "reading of a prompt: less is smoother for them, more reads prompts faster; 0 always reads "
        "`PREFILL_CHUNK`.",
        type=click.FloatRange(0, 1000),
        callback=_number,
        default=1.0,
    ),
    _option(
        "--max-body-bytes",
        "max_body_bytes",
        "Largest request body.",
        type=click.IntRange(1),
        default=1 << 20,
    ),
    _option(
        "--max-timeout-ms",
        "max_timeout_ms",
        "Most milliseconds that a request may take, and the deadline of those that name none; 0 "
        "is no limit.",
        type=click.IntRange(0),
        default=3_600_000,
    ),
    _option(
        "--max-step-seconds",
        "max_step_seconds",
        "Seconds without progress after which a model with work counts as hung: more than one "
        "token, or one chunk of a prompt, may take.",
        type=click.IntRange(1, 86_400),
        default=60,
    ),
    _option(
        "--slow-step-ms",
        "slow_step_ms",
        "Milliseconds beyond which a step counts in `phi_serve_slow_steps_total`, and may have a "
        "line in the log.",
        type=click.IntRange(1, 86_400_000),
        default=50,
    ),
    _option(
        "--max-load-seconds",
        "max_load_seconds",
        "Seconds after which a model that still loads ends the process; 0 is no limit.",
        type=click.IntRange(0, 86_400),
        default=1800,
    ),
    _option(
        "--pre-drain-seconds",
        "pre_drain_seconds",
        "Seconds after SIGTERM in which requests are still taken, though `/health/ready` says 503: "
        "what a load balancer needs to notice.",
        type=click.IntRange(0, 3600),
        default=0,
    ),
    _option(
        "--drain-seconds",
        "drain_seconds",
        "Seconds that open requests may then go on before they end with an error.",
        type=click.IntRange(0, 86_400),
        default=30,
    ),
    _option(
        "--served-model-name",
        "served_model_name",
        "Names that clients may give as `model`, separated by commas; the first one is shown. "
        "Empty takes the model's own.",
        default="",
        callback=_names,
    ),
    _option(
        "--log-level",
        "log_level",
        "Least severe message to log.",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
    ),
    _option(
        "--admin-api-key",
        "admin_api_key",
        "Key of `/admin/model`, which switches the model; empty turns that off. Better as a "
        "variable, for others see a process's flags.",
        default="",
        callback=_admin_key,
    ),
    *EDGE_OPTIONS,
    *QUEUE_OPTIONS,
    *METRICS_OPTIONS,
    *CACHE_OPTIONS,
    *DEVICE_OPTIONS,
    *TRACING_OPTIONS,
    *KEY_OPTIONS,
]


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"phi-serve {VERSION}")
        context.exit()


_VERSION = click.Option(
    ["--version"],
    help="Show the version and exit.",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
)


def read_settings(arguments: Ordered[str] | None = None) -> Settings:
    """Settings from flags, then environment, then defaults.

    Exits with status 2 and a message that names the variable if a value is wrong.
    """
    command = click.Command(
        "python -m app",
        params=[*OPTIONS, _VERSION],
        callback=_check,
        help="Serves a model folder over HTTP.",
    )
    try:
        settings = command.main(arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    if not isinstance(settings, Settings):  # --help has been printed
        raise SystemExit(0)
    return settings
