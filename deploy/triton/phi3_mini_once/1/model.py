"""Text in, text out, at once: hands requests on to `phi3_mini` (`app.triton_once`)."""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).parent))  # before where Triton was started

from app.triton_once import Once


class TritonPythonModel:
    def initialize(self, args):
        self._once = Once(pb_utils, args)

    def execute(self, requests):
        self._once.execute(requests)

    def finalize(self):
        self._once.close()
