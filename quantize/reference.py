"""What the unquantized graph says of a text, read a few layers at a time, in little memory.

The graph is cut into pieces in the order of its nodes. Each piece becomes a session, reads what the
pieces before it left, and is dropped; at the end only the hidden state of every token is left, and
the LM head to turn it into logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from . import MODEL_FILE
from .errors import QuantizeError
from .graph_file import load_graph
from .rewrite import names_read
from .tensors import Weights

_PIECE_BYTES = 1 << 30
# Between the hidden state and the LM head lies the choice of each row's last token.
_CHOICE = ("GatherND", "Unsqueeze")


class Reference:
    """The graph in `folder`, having read `ids`, shape (rows, tokens), at once.

    `on_piece` is called as the work goes on, with the share of the weights that was read.
    """

    def __init__(
        self,
        folder: Path,
        ids: NDArray[np.int64],
        on_piece: Callable[[float], object] = lambda _: None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        self._folder = folder
        self._model = load_graph(folder / MODEL_FILE)
        self._weights = Weights(self._model, folder)
        self._head_session: ort.InferenceSession | None = None
        body, hidden = self._split()
        values = self._inputs(ids)
        pieces = list(self._cut(body, piece_bytes))
        for index, piece in enumerate(pieces):
            later = {name for after in pieces[index + 1 :] for n in after for name in names_read(n)}
            values = self._run(piece, values, later | {hidden})
            on_piece((index + 1) / len(pieces))
        self._hidden = values[hidden]  # (rows, tokens, width)

    def _split(self) -> tuple[list[onnx.NodeProto], str]:
        """The nodes that make the hidden state, and its name; notes those of the LM head and what
        they read of it."""
        nodes = list(self._model.graph.node)
        producers = {name: node for node in nodes for name in node.output}
        self._entry = hidden = _lm_head(producers).input[0]
        while hidden in producers and producers[hidden].op_type in _CHOICE:
            hidden = producers[hidden].input[0]
        before = {o for n in _needed(nodes, [self._entry], producers) for o in n.output}
        self._head = [
            node
            for node in _needed(nodes, ["logits"], producers)
            if node.op_type == "Constant" or not before.intersection(node.output)
        ]
        return _needed(nodes, [hidden], producers), hidden

    def logits(self, column: int) -> NDArray[np.float32]:
        """Behind the token in `column` of each row: (rows, vocab)."""
        hidden = np.ascontiguousarray(self._hidden[:, column : column + 1])
        if self._head_session is None:
            self._head_session = self._session(self._head, {self._entry: hidden}, ["logits"])
        [logits] = self._head_session.run(["logits"], {self._entry: hidden})
        found: NDArray[Any] = logits[:, 0]
        return found.astype(np.float32, copy=False)

    def _inputs(self, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The graph's inputs with nothing in the cache."""
        rows, num_tokens = ids.shape
        positions = np.tile(np.arange(num_tokens, dtype=np.int64), (rows, 1))
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
        values: dict[str, NDArray[Any]] = {}
        for value in self._model.graph.input:
            if value.name in known:
                values[value.name] = known[value.name]
            elif value.name.startswith("past_"):
                dims = value.type.tensor_type.shape.dim
                dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                shape = (rows, dims[1].dim_value, 0, dims[3].dim_value)
                values[value.name] = np.zeros(shape, dtype)
        return values

    def _cut(self, nodes: list[onnx.NodeProto], piece_bytes: int) -> Iterator[list[onnx.NodeProto]]:
        piece: list[onnx.NodeProto] = []
        size = 0
        for node in nodes:
            piece.append(node)
            size += sum(self._weights.num_bytes(n) for n in names_read(node) if n in self._weights)
            if size >= piece_bytes:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece

    def _run(
        self, nodes: list[onnx.NodeProto], values: dict[str, NDArray[Any]], later: set[str]
    ) -> dict[str, NDArray[Any]]:
        """Those of the values that are known, with what `nodes` make, that are needed later."""
        made = [name for node in nodes for name in node.output if name and name in later]
        read = {name for node in nodes for name in names_read(node)}
        feeds = {name: value for name, value in values.items() if name in read}
        session = self._session(nodes, feeds, made)
        found = dict(zip(made, session.run(made, feeds), strict=True))
        return {name: value for name, value in values.items() if name in later} | found

    def _session(
        self, nodes: list[onnx.NodeProto], feeds: dict[str, NDArray[Any]], outputs: list[str]
    ) -> ort.InferenceSession:
        # Beside the data file, which ONNX Runtime finds by the place of the graph.
        path = self._folder / "piece.onnx"
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            path.write_bytes(self._graph_of(nodes, feeds, outputs).SerializeToString())
            return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        finally:
            path.unlink(missing_ok=True)

    def _graph_of(
        self, nodes: list[onnx.NodeProto], feeds: dict[str, NDArray[Any]], outputs: list[str]
    ) -> onnx.ModelProto:
        """`nodes` as a model of their own; ONNX Runtime finds out the types of its outputs."""
        read = {name for node in nodes for name in names_read(node)}
        # With its sizes: of a packed query without, the size of what attention makes is not found.
        inputs = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for name, value in feeds.items()
        ]
        graph = helper.make_graph(
            nodes,
            "piece",
            inputs,
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [tensor for tensor in self._model.graph.initializer if tensor.name in read],
        )
        return helper.make_model(
            graph,
            opset_imports=self._model.opset_import,
            ir_version=self._model.ir_version,
            functions=self._model.functions,
        )


def _lm_head(producers: dict[str, onnx.NodeProto]) -> onnx.NodeProto:
    """The product that makes the logits; scales and caps may come behind it."""
    node = producers.get("logits")
    while node is not None and node.op_type not in ("MatMul", "Gemm"):
        node = next((producers[name] for name in node.input if name in producers), None)
    if node is None:
        raise QuantizeError("the graph's LM head was not found")
    return node


def _needed(
    nodes: list[onnx.NodeProto], values: list[str], producers: dict[str, onnx.NodeProto]
) -> list[onnx.NodeProto]:
    """Those that `values` depend on, in their order."""
    needed: set[str] = set()
    found = list(values)
    while found:
        name = found.pop()
        if name in producers and name not in needed:
            needed.update(producers[name].output)
            found += names_read(producers[name])
    return [node for node in nodes if needed.intersection(node.output)]
