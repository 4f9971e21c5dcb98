"""Run time: serves a model folder over HTTP. Never imports `quantize`."""
