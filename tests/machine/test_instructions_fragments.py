"""Which lane holds what: the maps against CuTe's layouts, ldmatrix and the chain from one product to the next."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine.instructions import fragments
from flashnumba.machine.instructions.fragments import a_map, b_map, c_map, from_fragments, to_fragments


def cute(shape: list[int], stride: list[int], lane: int, value: int) -> int:
    """Offset of (lane, value) in a CuTe layout whose first two modes are the lane's."""
    sizes, offset = iter(zip(shape, stride, strict=True)), 0
    for number, modes in ((lane, 2), (value, len(shape) - 2)):
        for _ in range(modes):
            size, step = next(sizes)
            offset += number % size * step
            number //= size
    return offset


# (thread modes, value modes), strides over a column-major operand; mma_traits_sm75, sm80 and sm89 of CUTLASS.
CUTE = {
    ("a", "m16n8k8"): ([4, 8, 2, 2], [32, 1, 16, 8]),
    ("b", "m16n8k8"): ([4, 8, 2], [16, 1, 8]),
    ("a", "m16n8k16"): ([4, 8, 2, 2, 2], [32, 1, 16, 8, 128]),
    ("b", "m16n8k16"): ([4, 8, 2, 2], [16, 1, 8, 64]),
    ("a", "m16n8k32"): ([4, 8, 4, 2, 2], [64, 1, 16, 8, 256]),
    ("b", "m16n8k32"): ([4, 8, 4, 2], [32, 1, 8, 128]),
    ("c", "m16n8k16"): ([4, 8, 2, 2], [32, 1, 16, 8]),
}


@pytest.mark.parametrize(("operand", "shape"), CUTE)
def test_maps_are_those_of_cute(operand: str, shape: str) -> None:
    rows = 8 if operand == "b" else 16
    places = {"a": a_map, "b": b_map, "c": c_map}[operand](shape).reshape(32, -1, 2)
    for lane in range(32):
        for value in range(places.shape[1]):
            offset = cute(*CUTE[operand, shape], lane, value)
            first, second = offset % rows, offset // rows
            expected = (second, first) if operand == "b" else (first, second)  # CuTe's B is (n, k)
            assert tuple(places[lane, value]) == expected


@pytest.mark.parametrize("shape", ["m16n8k8", "m16n8k16", "m16n8k32", "m64n8k16", "m64n24k32", "m64n256k16"])
def test_every_element_is_held_once(shape: str) -> None:
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    for operand, size in (("a", (m, k)), ("b", (k, n)), ("c", (m, n))):
        if operand == "b" and m == 64:
            with pytest.raises(ValueError, match="shared memory"):
                b_map(shape)
            continue
        matrix = np.arange(size[0] * size[1]).reshape(size)
        held = to_fragments(matrix, operand, shape)
        assert sorted(held.ravel()) == list(range(matrix.size))
        np.testing.assert_array_equal(from_fragments(held, operand, shape), matrix)


def test_a_warpgroup_is_four_warps() -> None:
    places = c_map("m64n16k16").reshape(4, 32, 2, 4, 2)
    for warp in range(4):
        for tile in range(2):
            np.testing.assert_array_equal(places[warp, :, tile], c_map("m16n8k16") + np.array([16 * warp, 8 * tile]))


def test_accumulators_of_two_tiles_are_one_operand() -> None:
    """S = Q K^T becomes P in P V without moving between lanes: c0..c3 of two tiles are the A of 16 keys."""
    tiles = np.stack([c_map("m16n8k16"), c_map("m16n8k16") + np.array([0, 8])], axis=1)  # [lane, tile, 4, 2]
    np.testing.assert_array_equal(tiles.reshape(32, 4, 2, 2), a_map("m16n8k16"))


def test_fp8_operands_take_accumulators_in_another_order_of_keys() -> None:
    """Four tiles of S fill A of m16n8k32 in registers if the keys of V are permuted (SageAttention)."""
    held = np.stack([c_map("m16n8k16") + np.array([0, 8 * t]) for t in range(4)], axis=1)  # [lane, tile, c, 2]
    slots = a_map("m16n8k32")  # [lane, register, byte, 2]
    key_of = np.full(32, -1)
    for register in range(4):
        for byte in range(4):
            tile, c = 2 * (register >> 1) + (byte >> 1), 2 * (register & 1) + (byte & 1)
            np.testing.assert_array_equal(held[:, tile, c, 0], slots[:, register, byte, 0])
            key_of[slots[:, register, byte, 1]] = held[:, tile, c, 1]
    first = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert key_of.tolist() == first + [16 + key for key in first]


def test_unknown_shapes_are_refused() -> None:
    for shape in ("m16n16k16", "m64n12k16", "m64n264k16", "m64n64k8", "m8n8k4", "16x8x16"):
        with pytest.raises(ValueError, match=shape):
            c_map(shape)


def test_maps_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(ValueError, match="read-only"):
        a_map("m16n8k16")[0, 0, 0, 0] = 5
    assert set(fragments.__all__) == {"a_map", "b_map", "c_map", "from_fragments", "to_fragments"}
