"""Text in, text out, as a stream: our engine (`app.triton_backend`) in Triton's python backend."""

import triton_python_backend_utils as pb_utils

from app.triton_backend import Backend


class TritonPythonModel:
    def initialize(self, args):
        self._backend = Backend(pb_utils, args)

    def execute(self, requests):
        self._backend.execute(requests)

    def finalize(self):
        self._backend.close()
