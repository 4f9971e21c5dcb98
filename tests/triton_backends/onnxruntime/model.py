"""A stand-in for Triton's ONNX Runtime backend, which the PyPI wheel has not.

It runs the very config of an onnxruntime_onnx model, with the onnxruntime wheel. Requests that the
server has merged run as one batch.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        return config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._inputs = [each["name"] for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]
        file = config.get("default_model_filename") or "model.onnx"
        path = Path(args["model_repository"]) / args["model_version"] / file
        options = ort.SessionOptions()
        threads = config["parameters"].get("intra_op_thread_count", {"string_value": "0"})
        options.intra_op_num_threads = int(threads["string_value"])
        self._session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._check(config)

    def _check(self, config):
        """As the real one does: names, types and shapes of the config are the graph's."""
        nodes = [*self._session.get_inputs(), *self._session.get_outputs()]
        found = {node.name: node for node in nodes}
        types = {"TYPE_INT64": "int64", "TYPE_FP32": "float", "TYPE_FP16": "float16"}
        for each in [*config["input"], *config["output"]]:
            node, dims = found[each["name"]], [int(size) for size in each["dims"]]
            shape = [size if isinstance(size, int) else -1 for size in node.shape]
            if node.type != f"tensor({types[each['data_type']]})" or shape[1:] != dims:
                raise pb_utils.TritonModelException(
                    f"{each['name']} is {node.type} {node.shape} in the graph, in the config "
                    f"{each['data_type']} {dims}"
                )

    def execute(self, requests):
        try:
            parts = {name: [_read(each, name) for each in requests] for name in self._inputs}
            whole = {name: np.concatenate(rows) for name, rows in parts.items()}
            results = self._session.run(self._outputs, whole)
        except Exception as error:  # raised, it would leave shared memory behind
            failure = pb_utils.TritonError(str(error))
            return [pb_utils.InferenceResponse([], failure) for _ in requests]
        ends = np.cumsum([len(rows) for rows in parts[self._inputs[0]]])[:-1]
        split = zip(*(np.split(result, ends) for result in results), strict=True)
        return [self._respond(arrays) for arrays in split]

    def _respond(self, arrays):
        pairs = zip(self._outputs, arrays, strict=True)
        tensors = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in pairs]
        return pb_utils.InferenceResponse(tensors)


def _read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
