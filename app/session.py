"""Opens a folder's graph on the device that was asked for, through optimum, and tells where it is.

`auto` may fall back to the CPU and says why; `cuda` never does (FR27: asked for CUDA, runs on the
CPU, says CUDA).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from optimum.onnxruntime import ORTModelForCausalLM

from . import cuda
from .errors import UnservableModel, WrongSetting
from .folder import CONFIG_FILE
from .graph import Graph

_CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class Opened:
    """A session, and an account of the GPU's memory if it is there, begun before the weights were.

    `fallback` is why it is not on the GPU that onnxruntime is built for.
    """

    session: ort.InferenceSession
    memory: cuda.DeviceMemory | None
    fallback: str | None


def open_session(
    folder: Path, graph: Graph, device: str, num_threads: int, max_gpu_bytes: int = 0
) -> Opened:
    """`device` is "auto", "cpu" or "cuda". On CUDA the session runs on a stream that is made here
    and becomes torch's current one, in this thread.

    Raises UnservableModel for a graph that cannot be loaded, WrongSetting when "cuda" was asked for
    and cannot be had.
    """
    provider, problem = _choose_provider(device)
    _refuse_fallback(device, problem)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if provider != cuda.PROVIDER:
        return Opened(_load(folder, graph, provider, options, {}), None, problem)
    cuda.load_libraries()
    cuda.prepare(options)
    memory = cuda.DeviceMemory(max_gpu_bytes)
    provider_options = cuda.provider_options(cuda.open_stream(), max_gpu_bytes)
    session = _load(folder, graph, provider, options, provider_options)
    problem = find_fallback(provider, session.get_providers()[0])
    _refuse_fallback(device, problem)
    return Opened(session, None if problem else memory, problem)


def _refuse_fallback(device: str, problem: str | None) -> None:
    if device == "cuda" and problem is not None:
        raise WrongSetting(f"DEVICE=cuda: {problem}")


def find_fallback(asked: str, obtained: str) -> str | None:
    """Why the session is not where it was asked to be; None if it is."""
    if asked == obtained:
        return None
    reason = cuda.find_unloadable() or "there is no GPU that it can use"
    return f"onnxruntime runs on {obtained} although it has {asked}: {reason}"


def _choose_provider(device: str) -> tuple[str, str | None]:
    """Where to run, and what keeps that from being the GPU that onnxruntime is built for."""
    available = ort.get_available_providers()
    if device == "cpu" or (device == "auto" and cuda.PROVIDER not in available):
        return _CPU, None
    if cuda.PROVIDER not in available:
        return _CPU, (
            f"this onnxruntime has no {cuda.PROVIDER} (it has {', '.join(available)}); install "
            "requirements-gpu.txt"
        )
    problem = cuda.find_problem()
    return (cuda.PROVIDER, None) if problem is None else (_CPU, problem)


def _load(
    folder: Path,
    graph: Graph,
    provider: str,
    options: ort.SessionOptions,
    provider_options: dict[str, str],
) -> ort.InferenceSession:
    # optimum takes a graph without position_ids for an old export; GroupQueryAttention derives each
    # row's positions itself, and a portable graph is put to the proof.
    logging.getLogger("optimum.onnxruntime.modeling_decoder").setLevel(logging.ERROR)
    try:
        if not (folder / CONFIG_FILE).is_file():
            # ONNX Runtime GenAI's layout: optimum asks for a config.json that is not there.
            return ort.InferenceSession(graph.path, options, [(provider, provider_options)])
        return ORTModelForCausalLM.from_pretrained(
            folder,
            file_name=graph.path.name,
            provider=provider,
            provider_options=provider_options,
            session_options=options,
            local_files_only=True,
        ).session
    except Exception as error:
        raise UnservableModel(f"{folder} cannot be loaded: {error}") from error
