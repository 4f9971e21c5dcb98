"""The part of `check` that really loads the graph: which provider takes which nodes."""

from __future__ import annotations

from collections import Counter, defaultdict

import onnxruntime as ort

from .model_folder import ModelFolder
from .report import Report

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def check_sessions(folder: ModelFolder, report: Report) -> None:
    """A session on the CPU, and on CUDA where this onnxruntime has it."""
    for_cuda = folder.record.get("device") == "cuda"
    _check_session(folder, [_CPU], report, is_needed=not for_cuda)
    if _CUDA in ort.get_available_providers():
        _check_session(folder, [_CUDA, _CPU], report, is_needed=for_cuda)


def _check_session(
    folder: ModelFolder, providers: list[str], report: Report, *, is_needed: bool
) -> None:
    assert folder.graph is not None
    asked = providers[0]
    tell_failure = report.error if is_needed else report.warning
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = ort.InferenceSession(folder.graph, options, providers=providers)
    except Exception as error:  # onnxruntime raises a dozen kinds without a common base
        tell_failure("session", f"{asked} cannot load the graph: {error}")
        return
    if (obtained := session.get_providers()[0]) != asked:
        report.warning("session", f"{asked} is installed but does not start; {obtained} took over")
        return
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name].update(node.op_type for node in part.get_nodes())
    for name, operators in counts.items():
        shown = ", ".join(f"{number} {kind}" for kind, number in operators.most_common())
        text = f"{asked}: {operators.total()} nodes on {name}: {shown}"
        if name == asked:
            report.ok("session", text)
        else:
            report.warning("session", text)
