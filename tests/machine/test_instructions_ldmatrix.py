"""ldmatrix, stmatrix and movmatrix: the emulation against the layout written out, and against the operands of mma."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine import instructions
from flashnumba.machine.instructions.fragments import to_fragments
from tests.machine.conformance.cases import PlainMemory

LANE = np.arange(32)


def tile(rows: int, columns: int) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns) + 1000


def memory_of(matrix: np.ndarray) -> PlainMemory:
    return PlainMemory(matrix.reshape(-1).view(np.uint8).copy())


def address(row: np.ndarray, column: np.ndarray, width: int) -> np.ndarray:
    return (2 * (row * width + column)).astype(np.uint32)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_lane_gets_its_pair(count: int, trans: bool) -> None:
    held = tile(8 * count, 8)
    addresses = address(LANE % (8 * count), 0 * LANE, 8)
    addresses[8 * count :] = 999_983  # the hardware does not look at these
    load = getattr(instructions, f"ldmatrix_x{count}{'_trans' * trans}")
    registers = load.emulate(memory_of(held), addresses)
    assert registers.shape == (32, count) and registers.dtype == np.uint32
    for i in range(count):
        matrix = held[8 * i : 8 * i + 8].T if trans else held[8 * i : 8 * i + 8]
        for lane in range(32):
            low, high = matrix[lane // 4, 2 * (lane % 4)], matrix[lane // 4, 2 * (lane % 4) + 1]
            assert registers[lane, i] == int(low) | int(high) << 16


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_undoes_ldmatrix(count: int, trans: bool) -> None:
    held, suffix = tile(8 * count, 8), f"x{count}{'_trans' * trans}"
    addresses = address(LANE % (8 * count), 0 * LANE, 8)
    registers = getattr(instructions, f"ldmatrix_{suffix}").emulate(memory_of(held), addresses)
    addresses[8 * count :] = 999_983
    empty = memory_of(np.zeros_like(held))
    getattr(instructions, f"stmatrix_{suffix}").emulate(empty, addresses, registers)
    np.testing.assert_array_equal(empty.data.view(np.uint16).reshape(held.shape), held)


def test_movmatrix_transposes() -> None:
    matrix = tile(8, 8)
    registers = matrix.reshape(32, 2).copy().view(np.uint32)[:, 0]
    moved = instructions.movmatrix_trans.emulate(registers)
    np.testing.assert_array_equal(moved.copy().view(np.uint16).reshape(8, 8), matrix.T)


def words(matrix: np.ndarray, operand: str) -> np.ndarray:
    return to_fragments(matrix, operand, "m16n8k16").copy().view(np.uint32)[..., 0]


def test_operands_of_mma_are_loaded_by_the_usual_addresses() -> None:
    """One ldmatrix each for Q, for K as it lies, and for V as it lies gives the fragments that mma.sync takes."""
    q = tile(16, 16)
    at = address(LANE % 16, 8 * (LANE // 16), 16)
    np.testing.assert_array_equal(instructions.ldmatrix_x4.emulate(memory_of(q), at), words(q, "a"))

    k = tile(16, 16)  # [key][d]: B of S = Q K^T is [d][key]
    at = address(LANE % 8 + 8 * (LANE // 16), 8 * (LANE // 8 % 2), 16)
    loaded = instructions.ldmatrix_x4.emulate(memory_of(k), at)
    np.testing.assert_array_equal(loaded[:, :2], words(k[:8].T, "b"))
    np.testing.assert_array_equal(loaded[:, 2:], words(k[8:].T, "b"))

    v = tile(16, 16)  # [key][d] is B of O = P V as it lies
    at = address(LANE % 16, 8 * (LANE // 16), 16)
    loaded = instructions.ldmatrix_x4_trans.emulate(memory_of(v), at)
    np.testing.assert_array_equal(loaded[:, :2], words(v[:, :8], "b"))
    np.testing.assert_array_equal(loaded[:, 2:], words(v[:, 8:], "b"))
