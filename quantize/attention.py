"""Gives every GroupQueryAttention node the window and the rotary embedding that transformers uses.

The builder writes one window for all layers of Qwen2 and Qwen3, puts Gemma 2's into the wrong ones,
assumes Gemma 3's pattern, and breaks on layers without rotary embeddings (SmolLM3).
"""

from __future__ import annotations

import re

import onnx
from onnx import helper
from transformers import PretrainedConfig

from .errors import QuantizeError
from .families import LayerAttention, layer_attention

NODE = re.compile(r"/model/layers\.(\d+)/attn/GroupQueryAttention")
_COS_CACHE, _SIN_CACHE = 7, 8  # inputs of the node


def set_attention(graph: onnx.GraphProto, config: PretrainedConfig) -> None:
    """Raises QuantizeError if the nodes and the layers of `config` do not match one to one."""
    layers = layer_attention(config)
    nodes: dict[int, onnx.NodeProto] = {}
    for node in graph.node:
        found = NODE.fullmatch(node.name)
        if found is not None:
            nodes[int(found[1])] = node
    if sorted(nodes) != list(range(len(layers))):
        raise QuantizeError(
            f"the graph has attention in {len(nodes)} layers, config.json has {len(layers)} layers"
        )
    for index, layer in enumerate(layers):
        _set_attribute(nodes[index], "local_window_size", layer.window)
        _set_rotary(nodes[index], layer)


def _set_rotary(node: onnx.NodeProto, layer: LayerAttention) -> None:
    if not layer.has_rotary:
        _set_attribute(node, "do_rotary", 0)
        node.input[_COS_CACHE] = node.input[_SIN_CACHE] = ""
    elif "cache_" in node.input[_COS_CACHE]:  # Gemma 3 has two pairs
        place = "local" if layer.is_local else "global"
        node.input[_COS_CACHE] = f"cos_cache_{place}"
        node.input[_SIN_CACHE] = f"sin_cache_{place}"


def _set_attribute(node: onnx.NodeProto, name: str, value: int) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
