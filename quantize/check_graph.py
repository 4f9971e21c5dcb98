"""The part of `check` about the graph: can this ONNX Runtime run it, and is it the model that
config.json describes?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from .graph_facts import GraphFacts, form_problems, operator_names
from .model_folder import GENAI_FILE, ModelFolder
from .report import Report

# Without a CUDA kernel, or with one for few types (MatMulInteger: int8 times int8).
_CPU_ONLY = {
    *("DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
    *("MatMulInteger", "MatMulIntegerToFloat", "ConvInteger"),
}


def check_operators(model: onnx.ModelProto, report: Report) -> None:
    """Opsets and operators are known to the ONNX Runtime that is installed."""
    newest: dict[str, int] = {}
    operators: set[tuple[str, str]] = set()
    for schema in runtime.get_all_operator_schema():
        newest[schema.domain] = max(newest.get(schema.domain, 0), schema.since_version)
        operators.add((schema.domain, schema.name))
    operators |= {(function.domain, function.name) for function in model.functions}
    local_domains = {function.domain for function in model.functions}
    before = report.count("error")
    used = set(operator_names(model))
    domains = {domain for domain, _ in used}
    opsets = {
        "" if opset.domain == "ai.onnx" else opset.domain: opset.version
        for opset in model.opset_import
    }
    for domain, version in opsets.items():
        if domain in domains - local_domains and version > newest.get(domain, version):
            text = f"opset {version} of {domain or 'ai.onnx'} is newer than this onnxruntime knows"
            report.error("opset", f"{text} ({newest[domain]})")
    if unknown := sorted(".".join(filter(None, name)) for name in used - operators):
        report.error("opset", f"this onnxruntime does not know {', '.join(unknown)}")
    if report.count("error") == before:
        known = ", ".join(f"{d or 'ai.onnx'} {v}" for d, v in sorted(opsets.items()))
        report.ok("opset", f"{known}: known to this onnxruntime")


def check_form(facts: GraphFacts, folder: ModelFolder, report: Report) -> None:
    """Inputs and outputs are those of a decoder with a KV cache."""
    before = report.count("error")
    for problem in form_problems(facts):
        report.error("graph", problem)
    if (stated := folder.record.get("form")) not in (None, facts.form):
        report.error("graph", f"quantization.json calls it {stated}, but it is {facts.form}")
    if report.count("error") == before:
        report.ok("graph", _described(facts, folder))


def _described(facts: GraphFacts, folder: ModelFolder) -> str:
    assert folder.graph is not None
    logits = facts.outputs["logits"].dims
    reach = "the last token" if len(logits) > 1 and logits[1] == 1 else "every token"
    return (
        f"{folder.graph.name}: {facts.form} form, {facts.num_layers} layers, "
        f"{min(facts.kv_types)} keys and values, logits of {reach}"
    )


def check_shape(facts: GraphFacts, folder: ModelFolder, report: Report) -> None:
    """Layers, heads and vocabulary against config.json, and genai_config.json where it is."""
    heads = next(iter(facts.kv_dims)) if len(facts.kv_dims) == 1 else (None, None)
    if len(facts.kv_dims) > 1:
        report.error("graph", f"its layers disagree on (KV heads, head size): {facts.kv_dims}")
    found = {
        "layers": facts.num_layers,
        "KV heads": heads[0],
        "head size": heads[1],
        "vocabulary": facts.vocab_size,
    }
    for file, expected in _expectations(folder).items():
        before = report.count("error")
        for name, number in expected.items():
            if number is not None and found[name] is not None and number != found[name]:
                text = f"{file} says {number} for {name}, the graph {found[name]}"
                report.error("config", text, file)
        if report.count("error") == before:
            numbers = ", ".join(f"{name} {number}" for name, number in expected.items())
            report.ok("config", f"{file} fits the graph: {numbers}")
    if unread := [name for name, number in found.items() if number is None]:
        text = f"the graph states no number for {', '.join(unread)}: not compared"
        report.warning("config", text)


def _expectations(folder: ModelFolder) -> dict[str, dict[str, int | None]]:
    expected: dict[str, dict[str, int | None]] = {}
    if folder.config is not None:
        config = folder.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        size, hidden = getattr(config, "head_dim", None), getattr(config, "hidden_size", None)
        if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            size = hidden // heads
        expected["config.json"] = {
            "layers": getattr(config, "num_hidden_layers", None),
            "KV heads": getattr(config, "num_key_value_heads", None) or heads,
            "head size": size,
            "vocabulary": getattr(config, "vocab_size", None),
        }
    if folder.genai:
        model = folder.genai_model
        decoder: dict[str, Any] = found if isinstance(found := model.get("decoder"), dict) else {}
        expected[GENAI_FILE] = {
            "layers": decoder.get("num_hidden_layers"),
            "KV heads": decoder.get("num_key_value_heads"),
            "head size": decoder.get("head_size"),
            "vocabulary": model.get("vocab_size"),
        }
    return expected


def check_placement(
    model: onnx.ModelProto, facts: GraphFacts, folder: ModelFolder, report: Report
) -> None:
    """Counts the nodes, and names those that CUDA would hand to the CPU, with copies each way."""
    counts = Counter(name for _, name in operator_names(model))
    most = ", ".join(f"{number} {name}" for name, number in counts.most_common(6))
    report.ok("nodes", f"{counts.total()}: {most}{' …' if len(counts) > 6 else ''}")
    left = [
        f"{number} {name}"
        for name, number in sorted(counts.items())
        if name in _CPU_ONLY or name.startswith("QLinear")
    ]
    if facts.form == "fused" and "float" in facts.kv_types:
        left.append(f"{len(facts.windows)} GroupQueryAttention in fp32")
    if not left:
        report.ok("cuda", "no node that is known to fall back to the CPU")
    elif folder.record.get("device") == "cpu":
        report.ok("cuda", f"made for the CPU; on CUDA these would fall back to it: {_all(left)}")
    else:
        report.warning("cuda", f"on CUDA these fall back to the CPU, with copies: {_all(left)}")


def _all(names: list[str]) -> str:
    return ", ".join(names)
