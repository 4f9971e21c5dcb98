"""The cache's arithmetic, and that a move copies the filled part of a row and nothing else."""

import pytest
import torch

from app.kv_cache import KVCache, KVShape
from app.sequence import Move

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16]
NUM_ROWS, MAX_LEN = 4, 6


def filled_cache(dtype: torch.dtype = torch.float32) -> KVCache:
    """Every number in it is another one, so any copy can be told."""
    cache = KVCache(KVShape(2, 3, 2, dtype), NUM_ROWS, MAX_LEN, CPU)
    for index, layer in enumerate(cache.layers):
        # 144 numbers a layer: all integers up to 2048 are exact in float16.
        layer.copy_(torch.arange(layer.numel()).view(layer.shape) + index * layer.numel())
    return cache


def copies(cache: KVCache) -> list[torch.Tensor]:
    return [layer.clone() for layer in cache.layers]


def test_token_of_phi_3_mini_in_half_precision_takes_393216_bytes() -> None:
    assert KVShape(32, 32, 96, torch.float16).bytes_per_token == 393_216


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        (KVShape(32, 32, 96, torch.float32), 786_432),
        (KVShape(30, 3, 64, torch.float32), 46_080),  # SmolLM2-135M: grouped heads
        (KVShape(1, 1, 1, torch.float16), 4),
    ],
)
def test_bytes_per_token_count_keys_and_values_of_all_layers(
    shape: KVShape, num_bytes: int
) -> None:
    assert shape.bytes_per_token == num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_holds_keys_and_values_of_every_layer_in_the_graphs_shape(dtype: torch.dtype) -> None:
    cache = KVCache(KVShape(5, 3, 2, dtype), NUM_ROWS, MAX_LEN, CPU)
    assert [(layer.dtype, tuple(layer.shape)) for layer in cache.layers] == [
        (dtype, (NUM_ROWS, 3, MAX_LEN, 2))
    ] * 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_takes_the_bytes_that_the_shape_says(dtype: torch.dtype) -> None:
    shape = KVShape(5, 3, 2, dtype)
    cache = KVCache(shape, NUM_ROWS, MAX_LEN, CPU)
    assert sum(layer.nbytes for layer in cache.layers) == NUM_ROWS * MAX_LEN * shape.bytes_per_token


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_cache_is_contiguous_and_zero(dtype: torch.dtype) -> None:
    cache = KVCache(KVShape(2, 3, 2, dtype), NUM_ROWS, MAX_LEN, CPU)
    assert all(layer.is_contiguous() and not layer.any() for layer in cache.layers)


def test_layers_share_no_memory() -> None:
    cache = KVCache(KVShape(2, 3, 2, torch.float32), NUM_ROWS, MAX_LEN, CPU)
    cache.layers[0].fill_(1)
    assert not any(layer.any() for layer in cache.layers[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, MAX_LEN])
def test_move_copies_the_filled_part_of_all_layers_and_touches_nothing_else(
    num_tokens: int, dtype: torch.dtype
) -> None:
    cache = filled_cache(dtype)
    expected = copies(cache)
    for layer in expected:
        for head in range(3):
            for position in range(num_tokens):
                layer[1, head, position] = layer[3, head, position]
    cache.apply([Move(source=3, target=1, num_tokens=num_tokens)])
    assert all(map(torch.equal, cache.layers, expected))


def test_moves_run_in_order() -> None:
    cache = filled_cache()
    before = copies(cache)
    cache.apply([Move(1, 0, MAX_LEN), Move(2, 1, MAX_LEN)])  # the other order would put 2 in 0
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer, old[[1, 2, 2, 3]])


def test_row_moved_on_arrives_with_what_it_had() -> None:
    cache = filled_cache()
    before = copies(cache)
    cache.apply([Move(3, 2, 5), Move(2, 0, 5)])
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[0, :, :5], old[3, :, :5])


def test_no_moves_change_nothing() -> None:
    cache = filled_cache()
    before = copies(cache)
    cache.apply([])
    assert all(map(torch.equal, cache.layers, before))


def test_memory_stays_where_it_is() -> None:
    cache = filled_cache()  # the model binds these addresses once
    addresses = [layer.data_ptr() for layer in cache.layers]
    cache.apply([Move(3, 0, 2)])
    assert [layer.data_ptr() for layer in cache.layers] == addresses


@pytest.mark.parametrize(("num_tokens", "num_back"), [(3, 5), (5, 3), (4, 4), (0, 6)])
def test_move_that_goes_both_ways_exchanges_the_filled_parts(
    num_tokens: int, num_back: int
) -> None:
    cache = filled_cache()
    before = copies(cache)
    cache.apply([Move(3, 1, num_tokens, num_back)])
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[1, :, :num_tokens], old[3, :, :num_tokens])
        assert torch.equal(layer[3, :, :num_back], old[1, :, :num_back])
        assert torch.equal(layer[::2], old[::2])


def test_cache_holds_what_is_written_or_where_memory_is_taken_at_once_all_of_it() -> None:
    shape = KVShape(2, 3, 2, torch.float16)
    lazy, eager = (KVCache(shape, 4, 6, torch.device(name)) for name in ("cpu", "meta"))
    assert lazy.bytes_held(5) == 5 * shape.bytes_per_token
    assert eager.bytes_held(5) == 4 * 6 * shape.bytes_per_token
