"""Text in, text out, as a stream: our engine (`app.triton_backend`) in Triton's python backend."""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))  # before where Triton was started

from app.triton_backend import Backend


class TritonPythonModel:
    def initialize(self, args):
        self._backend = Backend(pb_utils, args)

    def execute(self, requests):
        self._backend.execute(requests)

    def finalize(self):
        self._backend.close()
