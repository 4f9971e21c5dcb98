"""Checks a Triton model repository without a server.

    python scripts/triton_lint.py REPOSITORY

Every config.pbtxt, and every variant in configs/, is parsed with tritonclient's protobuf and
compared with its folder: name, version, files, batch sizes, and what an ensemble maps to what.
Prints what is wrong, a line each; the exit status is 1 then. A missing model.py would hang the
start of tritonserver, and a wrong map is told only by a request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Which file a version folder must have; an ensemble's has none.
_FILES = {"onnxruntime_onnx": "model.onnx", "onnxruntime": "model.onnx", "python": "model.py"}


def lint(repository: Path) -> list[str]:
    """What is wrong with it, each problem with the file it is in; an empty list if all is well."""
    folders = sorted(path for path in repository.iterdir() if path.is_dir())
    if not folders:
        return [f"{repository}: no model in it"]
    problems: list[str] = []
    configs: dict[str, Any] = {}
    for folder in folders:
        files = [folder / "config.pbtxt", *sorted(folder.glob("configs/*.pbtxt"))]
        for file in files:
            config = _parse(file, problems)
            if config is None:
                continue
            problems += [f"{file}: {problem}" for problem in _check(config, folder)]
            if file == files[0]:
                configs[folder.name] = config
    for name, config in configs.items():
        where = repository / name / "config.pbtxt"
        problems += [f"{where}: {problem}" for problem in _check_steps(config, configs)]
    return problems


def _parse(file: Path, problems: list[str]) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    if not file.is_file():
        problems.append(f"{file}: missing")
        return None
    try:
        return text_format.Parse(file.read_text(), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        problems.append(f"{file}: {error}")
        return None


def _check(config: Any, folder: Path) -> Iterator[str]:
    if config.name != folder.name:
        yield f"its name is {config.name!r}, its folder's {folder.name!r}"
    kind = config.platform or config.backend
    if not kind:
        yield "it has neither platform nor backend"
    versions = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()]
    if not any(int(path.name) > 0 for path in versions):
        yield "there is no version folder (a number above 0)"
    needed = config.default_model_filename or _FILES.get(kind)
    if needed is not None:
        missing = [path.name for path in versions if not (path / needed).is_file()]
        yield from (f"version {version} has no {needed}" for version in missing)
    for warmup in config.model_warmup:
        for each in warmup.inputs.values():
            if each.input_data_file and not (folder / "warmup" / each.input_data_file).is_file():
                yield f"there is no warmup/{each.input_data_file}"
    if not (config.input and config.output):
        yield "it names no inputs or no outputs"
    preferred = list(config.dynamic_batching.preferred_batch_size)
    if preferred and max(preferred) > config.max_batch_size:
        yield f"a preferred batch of {max(preferred)} is above the largest, {config.max_batch_size}"
    if config.HasField("dynamic_batching") and config.max_batch_size < 2:
        yield f"dynamic batching, but the largest batch is {config.max_batch_size}"


def _check_steps(ensemble: Any, configs: dict[str, Any]) -> Iterator[str]:
    """Each tensor of an ensemble has one type and shape, and somebody who brings it."""
    if not ensemble.HasField("ensemble_scheduling"):
        return
    known = {each.name: _kind(each) for each in ensemble.input}
    steps = ensemble.ensemble_scheduling.step
    missing = sorted({step.model_name for step in steps} - configs.keys())
    yield from (f"there is no model {name!r}" for name in missing)
    steps = [step for step in steps if step.model_name in configs]
    for step in steps:
        given = {each.name: each for each in configs[step.model_name].output}
        for theirs, ours in step.output_map.items():
            if theirs in given:
                known[ours] = _kind(given[theirs])
            else:
                yield f"{step.model_name} has no output {theirs!r}"
    for step in steps:
        yield from _check_inputs(step, configs[step.model_name], known)
    for each in ensemble.output:
        if known.get(each.name) != _kind(each):
            given = known.get(each.name)
            yield f"its output {each.name!r} is {_kind(each)}, the steps give {given}"


def _check_inputs(step: Any, model: Any, known: dict[str, tuple[str, list[int]]]) -> Iterator[str]:
    taken = {each.name: each for each in model.input}
    for theirs, ours in step.input_map.items():
        if theirs not in taken:
            yield f"{step.model_name} has no input {theirs!r}"
        elif ours not in known:
            yield f"nothing gives {ours!r} to {step.model_name}"
        elif known[ours] != _kind(taken[theirs]):
            wanted = _kind(taken[theirs])
            yield f"{step.model_name} takes {theirs!r} as {wanted}, but is given {known[ours]}"
    for name, each in taken.items():
        if name not in step.input_map and not each.optional:
            yield f"{step.model_name} is not given its input {name!r}"


def _kind(tensor: Any) -> tuple[str, list[int]]:
    from tritonclient.grpc import model_config_pb2

    return model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    try:
        problems = lint(Path(sys.argv[1]))
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error}: pip install --no-deps -r requirements-triton.txt brings it"
        ) from None
    for problem in problems:
        print(problem)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
