"""Build time: a model in, a folder that `app` can serve out. Never imported by `app`."""

MODEL_FILE = "model.onnx"  # its weights lie beside it, in model.onnx.data
