"""Blocks of 8 and 4 bits: what the kernel makes of them is what was meant."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from quantize import MODEL_FILE
from quantize.decoding import Decoding
from quantize.errors import QuantizeError
from quantize.rewrite import rewrite
from quantize.weight_only import Blocks, WeightOnly, round_blocks

from .conftest import Build, Named, TinyModel
from .edits import edit_graph
from .matrices import Float, answer, attributes, draw, nodes_of, product, weights_of, write_graph

IDS = np.random.default_rng(5).integers(0, 260, (1, 20))
FOUR = functools.partial(WeightOnly, bits=4)
FORMS = [(8, True), (4, False), (4, True)]


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Along the last axis: of a byte with two numbers, the lower half comes first."""
    if bits == 8:
        return packed.astype(np.int64)
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1).astype(np.int64)


def dequantized(blocks: Blocks, bits: int, width: int) -> Float:
    """(in, out), by the definition of MatMulNBits."""
    numbers = unpack(blocks.packed, bits)  # (out, blocks, 32)
    num_outputs, num_blocks, _ = numbers.shape
    scales = blocks.scales.reshape(num_outputs, num_blocks, 1)
    zeros = unpack(blocks.zero_points.reshape(num_outputs, -1), bits)[:, :num_blocks, None]
    found: Float = ((numbers - zeros) * scales).reshape(num_outputs, -1)[:, :width].T
    return found


@pytest.mark.parametrize("width", [32, 96, 80, 100])
@pytest.mark.parametrize(("bits", "is_symmetric"), FORMS)
def test_every_weight_is_within_half_a_step(bits: int, is_symmetric: bool, width: int) -> None:
    """Also where the last block is not full, and where an odd number of blocks shares bytes."""
    weight = draw(width, 21) * draw(1, 21, seed=4) + 0.3
    blocks = round_blocks(weight, bits, is_symmetric=is_symmetric)
    step = np.repeat(blocks.scales.reshape(21, -1), 32, axis=1)[:, :width].T
    assert blocks.packed.shape == (21, -(-width // 32), 32 * bits // 8)
    # A zero point is rounded, too.
    most = 0.501 if is_symmetric else 1.001
    assert np.all(np.abs(dequantized(blocks, bits, width) - weight) <= most * step)


@pytest.mark.parametrize("bits", [8, 4])
def test_block_of_zeros_stays_zeros(bits: int) -> None:
    weight = draw(64, 5)
    weight[32:, 2] = 0
    blocks = round_blocks(weight, bits, is_symmetric=bits == 8)
    assert np.all(dequantized(blocks, bits, 64)[32:, 2] == 0)
    assert np.all(np.isfinite(blocks.scales))


def test_two_numbers_share_a_byte_the_first_in_its_lower_half() -> None:
    """Symmetric, steps of 1: the numbers are the weights and 8."""
    weight = np.zeros((32, 1), np.float32)
    weight[:4, 0] = [7, -7, 3, -1]
    blocks = round_blocks(weight, 4, is_symmetric=True)
    assert blocks.scales.tolist() == [1]
    assert blocks.packed[0, 0, :3].tolist() == [0x1F, 0x7B, 0x88]


def test_odd_zero_point_has_its_byte_alone() -> None:
    weight = np.zeros((96, 1), np.float32)
    for block, low in enumerate((-3, -5, -9)):  # steps of 1
        weight[32 * block, 0], weight[32 * block + 1, 0] = low, low + 15
    blocks = round_blocks(weight, 4, is_symmetric=False)
    assert blocks.scales.tolist() == [1, 1, 1]
    assert blocks.zero_points.tolist() == [0x53, 0x09]


def exact(folder: Path) -> Path:
    """Without the rounding of activations in the kernel."""

    def edit(model: Any) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 0

    edit_graph(folder, edit)
    return folder


@pytest.mark.parametrize("width", [64, 96, 80, 100])
@pytest.mark.parametrize(("method", "bits"), [(WeightOnly, 8), (FOUR, 4)])
def test_kernel_multiplies_by_what_was_meant(
    method: Any, bits: int, width: int, tmp_path: Path
) -> None:
    weight, x = draw(width, 101) + 0.3, draw(2, 3, width, seed=4)
    plain = write_graph(tmp_path / "plain", [product("mlp")], {"mlp": weight})
    (folder := tmp_path / "quantized").mkdir()
    done = rewrite(plain, folder, method)
    assert done == {
        "operator": "MatMulNBits",
        "matrices": 1,
        "bits": [bits],
        "block_size": 32,
        "accuracy_level": 4,
    }
    meant = x @ dequantized(round_blocks(weight, bits, is_symmetric=bits == 8), bits, width)
    size = np.abs(meant).max()
    np.testing.assert_allclose(answer(folder, x), meant, atol=0.02 * size)
    np.testing.assert_allclose(answer(exact(folder), x), meant, atol=1e-5 * size)


def test_rounding_is_no_worse_than_that_of_onnxruntimes_own_quantizer(tmp_path: Path) -> None:
    """Which takes the largest weight of a block for -128; here it is 127 or -127."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    weight, x = draw(96, 101), draw(1, 50, 96, seed=4)
    plain = write_graph(tmp_path / "plain", [product("w")], {"w": weight})
    theirs = MatMulNBitsQuantizer(
        onnx.load(plain / MODEL_FILE), bits=8, block_size=32, is_symmetric=True, accuracy_level=0
    )
    theirs.process()
    (tmp_path / "theirs").mkdir()
    theirs.model.save_model_to_file(str(tmp_path / "theirs" / MODEL_FILE))
    (tmp_path / "ours").mkdir()
    rewrite(plain, tmp_path / "ours", WeightOnly)
    expected = x @ weight
    errors = {
        name: np.abs(answer(exact(tmp_path / name), x) - expected).mean()
        for name in ("ours", "theirs")
    }
    assert errors["ours"] < 1.05 * errors["theirs"]
    ours, other = (nodes_of(tmp_path / name, "MatMulNBits")[0] for name in ("ours", "theirs"))
    shapes = [weights_of(tmp_path / "ours")[ours.input[1]].shape]
    shapes.append(weights_of(tmp_path / "theirs")[other.input[1]].shape)
    assert shapes == [(101, 3, 32)] * 2


def bits_by_name(folder: Path) -> dict[str, int]:
    return {n.name: attributes(n)["bits"] for n in nodes_of(folder, "MatMulNBits")}


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "opt"])
def test_with_4_bits_attention_and_lm_head_keep_8(
    name: str, family_graph: Named, tmp_path: Path
) -> None:
    done = rewrite(family_graph(name), tmp_path, FOUR)
    assert done["bits"] == [4, 8]
    found = bits_by_name(tmp_path)
    assert found.pop(next(node for node in found if "lm_head" in node or "embed_out" in node)) == 8
    attention = {bits for node, bits in found.items() if "attn" in node or "attention" in node}
    assert attention == {8}
    others = [bits for node, bits in found.items() if "attn" not in node and "atten" not in node]
    assert others == [4] * (2 * 3 if name == "llama" else 2 * 2)


def test_graph_whose_names_do_not_tell_the_mlp_is_refused_for_4_bits(tmp_path: Path) -> None:
    plain = write_graph(tmp_path / "plain", [product("w")], {"w": draw(64, 101)})
    with pytest.raises(QuantizeError, match="do not say which belong to an MLP"):
        rewrite(plain, tmp_path, FOUR)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_graph_for_cuda_keeps_fp16_and_leaves_activations_alone(
    precision: str, tiny_llama: TinyModel, built: Build
) -> None:
    folder = built(tiny_llama.source, precision, "cuda")
    weights = weights_of(folder)
    quantized = nodes_of(folder, "MatMulNBits")
    assert len(quantized) == 11
    for node in quantized:
        assert "accuracy_level" not in attributes(node)
        assert len(node.input) == 3  # no zero points
        assert weights[node.input[2]].dtype == np.float16
    session = ort.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    assert {node.type for node in session.get_inputs()[2:]} == {"tensor(float16)"}


def test_graph_for_cuda_says_what_the_fp16_graph_says(tiny_llama: TinyModel, built: Build) -> None:
    """On the CPU, whose kernels take fp16 too."""
    found, expected = (
        Decoding(built(tiny_llama.source, precision, "cuda"), 1, 20).feed(IDS)
        for precision in ("int8", "fp16")
    )
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    assert not np.array_equal(found, expected)
