"""On which device a folder is opened, and what is said when it is not the GPU."""

from __future__ import annotations

import onnxruntime as ort
import pytest
import torch
from optimum.onnxruntime import ORTModelForCausalLM

from app import cuda
from app.errors import WrongSetting
from app.fused import FusedForm
from app.model import OnnxModel
from app.session import find_fallback

from .conftest import TinyModel
from .engines import loaded_service

CPU = "CPUExecutionProvider"
STREAM = 1234


class WithoutCuda(ORTModelForCausalLM):
    """optimum's loader where CUDA is installed but its libraries do not load."""

    @classmethod
    def from_pretrained(
        cls, *arguments: object, provider: str, provider_options: dict[str, str], **options: object
    ) -> object:
        assert provider == cuda.PROVIDER
        assert provider_options["user_compute_stream"] == str(STREAM)
        return super().from_pretrained(*arguments, provider=CPU, **options)


@pytest.fixture
def gpu_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu, beside the torch that is here: of the CPU."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [cuda.PROVIDER, CPU])


@pytest.fixture
def cuda_that_does_not_load(gpu_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_problem", lambda: None)
    monkeypatch.setattr(cuda, "open_stream", lambda: STREAM)
    monkeypatch.setattr(cuda, "free_bytes", lambda: 10)
    monkeypatch.setattr("app.session.ORTModelForCausalLM", WithoutCuda)


def test_strict_cuda_without_its_runtime_is_refused(tiny_llama: TinyModel) -> None:
    with pytest.raises(WrongSetting, match=r"DEVICE=cuda.*requirements-gpu\.txt"):
        OnnxModel.load(tiny_llama.folder, "cuda", num_threads=1)


@pytest.mark.usefixtures("gpu_runtime")
def test_strict_cuda_with_a_torch_that_has_none_is_refused(tiny_llama: TinyModel) -> None:
    with pytest.raises(WrongSetting, match="DEVICE=cuda.*torch"):
        OnnxModel.load(tiny_llama.folder, "cuda", num_threads=1)


@pytest.mark.usefixtures("cuda_that_does_not_load")
def test_strict_cuda_that_does_not_load_is_refused_with_the_library_that_is_missing(
    tiny_llama: TinyModel,
) -> None:
    with pytest.raises(WrongSetting, match=r"DEVICE=cuda.*libonnxruntime_providers_cuda\.so"):
        OnnxModel.load(tiny_llama.folder, "cuda", num_threads=1)


@pytest.mark.usefixtures("cuda_that_does_not_load")
def test_strict_cuda_is_refused_before_the_graph_is_put_to_the_proof(
    tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedForm, "check", lambda self: pytest.fail("it was checked first"))
    with pytest.raises(WrongSetting, match="DEVICE=cuda"):
        OnnxModel.load(tiny_llama.folder, "cuda", num_threads=1)


@pytest.mark.parametrize("trouble", ["gpu_runtime", "cuda_that_does_not_load"])
def test_auto_falls_back_to_the_cpu_and_says_so(
    trouble: str, tiny_llama: TinyModel, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(trouble)
    model = OnnxModel.load(tiny_llama.folder, "auto", num_threads=1)
    described = model.describe(tiny_llama.folder)
    assert (described["provider"], described["device"]) == (CPU, "cpu")
    assert described["device_fallback"] is True
    [warning] = described["warnings"]
    assert warning.startswith("served on the CPU: ")
    assert model.free_memory() > 10  # the machine's, not the GPU's


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cpu_without_a_gpu_runtime_is_no_fallback(device: str, tiny_llama: TinyModel) -> None:
    model = OnnxModel.load(tiny_llama.folder, device, num_threads=1)
    described = model.describe(tiny_llama.folder)
    assert (described["device_fallback"], described["warnings"]) == (False, [])


def test_bound_of_a_gpus_memory_that_bounds_nothing_is_a_warning(tiny_llama: TinyModel) -> None:
    model = OnnxModel.load(tiny_llama.folder, "auto", num_threads=1, max_gpu_bytes=1 << 30)
    assert model.warnings == ["MAX_GPU_MEMORY_BYTES bounds nothing: this is the CPU"]


@pytest.mark.parametrize(("trouble", "fallback"), [("gpu_runtime", "1"), (None, "0")])
def test_fallback_is_in_the_metrics(
    trouble: str | None, fallback: str, tiny_llama: TinyModel, request: pytest.FixtureRequest
) -> None:
    if trouble is not None:
        request.getfixturevalue(trouble)
    service = loaded_service(tiny_llama.folder)
    assert service.current.loaded is not None
    [family] = [f for f in service.registry.collect() if f.name == "phi_serve_model_info"]
    [sample] = family.samples
    assert sample.value == 1
    assert sample.labels == {
        "model": service.current.loaded.name,
        "precision": "fp32",
        "form": "fused",
        "provider": CPU,
        "fallback": fallback,
    }


def test_session_where_it_was_asked_to_be_is_no_fallback() -> None:
    assert find_fallback(cuda.PROVIDER, cuda.PROVIDER) is None
    told = find_fallback(cuda.PROVIDER, CPU)
    assert told is not None and cuda.PROVIDER in told and CPU in told


def test_options_put_the_session_on_the_stream_and_let_its_arena_grow_by_need() -> None:
    options = cuda.provider_options(STREAM)
    assert options["user_compute_stream"] == "1234"
    assert options["arena_extend_strategy"] == "kSameAsRequested"
    assert "gpu_mem_limit" not in options
    assert cuda.provider_options(STREAM, 5)["gpu_mem_limit"] == "5"


def test_default_stream_which_onnxruntime_would_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="default stream"):
        cuda.provider_options(0)


def test_torch_of_the_cpu_can_use_no_gpu() -> None:
    assert torch.version.cuda is None
    assert "torch" in str(cuda.find_problem())


def test_session_options_for_cuda_are_known_to_onnxruntime(
    tiny_llama: TinyModel,
) -> None:
    options = ort.SessionOptions()
    cuda.prepare(options)
    assert not options.enable_mem_pattern
    ort.InferenceSession(tiny_llama.folder / "model.onnx", options, [CPU])


@pytest.mark.parametrize(
    ("free", "limit", "usable"),
    [
        (700, 0, 700),
        (700, 500, 200),  # 300 are taken of 500
        (700, 2000, 700),
        (400, 500, 0),
        (1200, 500, 500),  # others let go of memory: nothing is taken
    ],
)
def test_limit_leaves_what_the_process_has_not_taken(free: int, limit: int, usable: int) -> None:
    assert cuda.usable_bytes(free, free_at_start=1000, max_bytes=limit) == usable
