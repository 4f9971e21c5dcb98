"""Text in, text out, at once: hands requests on to `phi3_mini` (`app.triton_once`)."""

import triton_python_backend_utils as pb_utils

from app.triton_once import Once


class TritonPythonModel:
    def initialize(self, args):
        self._once = Once(pb_utils, args)

    def execute(self, requests):
        self._once.execute(requests)

    def finalize(self):
        self._once.close()
