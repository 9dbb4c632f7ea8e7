"""ldmatrix, stmatrix, movmatrix: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers.

One matrix is eight rows of 16 bytes. Lane l holds of it one register: row l // 4, columns 2 (l % 4) and the next, the
lower half first. ::

    columns    0  1   2  3   4  5   6  7          the rows' addresses come from
    row 0      lane0  lane1  lane2  lane3         lanes  0 ..  7   matrix 0
    row 1      lane4  lane5  lane6  lane7         lanes  8 .. 15   matrix 1   (.x2, .x4)
    ...                                           lanes 16 .. 23   matrix 2   (.x4)
    row 7      lane28 lane29 lane30 lane31        lanes 24 .. 31   matrix 3   (.x4)

With ``.trans`` each matrix is transposed on the way: lane l then holds rows 2 (l % 4) and the next, of column l // 4.
Addresses of lanes beyond those a form needs are ignored. A row's address is a multiple of 16.

This is how the operands of mma.sync are filled: a 16 x 16 tile is four such matrices, registers a0 to a3 in the order
of :func:`~flashnumba.machine.instructions.fragments.a_map`.

Source: PTX ISA, "Warp-level matrix load instruction: ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.machine.instruction import Fragment, Instruction, Scalar, instruction

__all__ = [
    "ldmatrix_x1",
    "ldmatrix_x1_trans",
    "ldmatrix_x2",
    "ldmatrix_x2_trans",
    "ldmatrix_x4",
    "ldmatrix_x4_trans",
    "movmatrix_trans",
    "stmatrix_x1",
    "stmatrix_x1_trans",
    "stmatrix_x2",
    "stmatrix_x2_trans",
    "stmatrix_x4",
    "stmatrix_x4_trans",
]


def _registers(rows: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """What each lane gets of matrices given as rows of bytes: ``[8 count, 16] uint8 -> [32, count] uint32``."""
    matrices = rows.view(np.uint16).reshape(count, 8, 8)
    if trans:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return matrices.view(np.uint32).reshape(count, 32).T


def _rows(registers: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """The inverse of :func:`_registers`."""
    matrices = np.ascontiguousarray(registers.T).view(np.uint16).reshape(count, 8, 8)
    if trans:
        matrices = np.ascontiguousarray(matrices.transpose(0, 2, 1))
    return matrices.view(np.uint8).reshape(8 * count, 16)


_WHICH = {1: "lanes 0-7", 2: "lanes 0-15", 4: "all lanes"}


def _document(verb: str, place: str, count: int, trans: bool) -> str:
    along, across = ("rows", "column") if trans else ("columns", "row")
    return (
        f"{verb} {count} 8x8 matri{'ces' if count > 1 else 'x'} of 16-bit elements {place} shared memory"
        f"{', transposed' if trans else ''}; register i is of matrix i.\n\n"
        f"Row addresses come from {_WHICH[count]}: lane 8i + r gives that of row r of matrix i, 16 bytes each::\n\n"
        f"    register i of lane l: {along} 2 (l % 4) and the next, of {across} l // 4\n"
    )


def _load(count: int, trans: bool) -> Instruction:
    def emulate(memory: Any, addr: np.ndarray) -> np.ndarray:
        rows = memory.read_shared(addr[: 8 * count], 16)
        return _registers(np.ascontiguousarray(rows), count, trans)

    emulate.__module__ = __name__
    return instruction(
        f"ldmatrix_x{count}{'_trans' * trans}",
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 {{%frag}}, [%addr];",
        (Fragment("frag", "u32", count, "out"), Scalar("addr", "u32")),
        arch="75",
        group="warp",
        effect="memory",
        doc=_document("Load", "from", count, trans),
    )(emulate)


def _store(count: int, trans: bool) -> Instruction:
    def emulate(memory: Any, addr: np.ndarray, frag: np.ndarray) -> tuple[()]:
        memory.write_shared(addr[: 8 * count], _rows(frag, count, trans))
        return ()

    emulate.__module__ = __name__
    return instruction(
        f"stmatrix_x{count}{'_trans' * trans}",
        f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * trans}.shared.b16 [%addr], {{%frag}};",
        (Scalar("addr", "u32"), Fragment("frag", "u32", count, "in")),
        arch="90",
        group="warp",
        effect="memory",
        doc=_document("Store", "to", count, trans),
    )(emulate)


ldmatrix_x1 = _load(1, False)
ldmatrix_x1_trans = _load(1, True)
ldmatrix_x2 = _load(2, False)
ldmatrix_x2_trans = _load(2, True)
ldmatrix_x4 = _load(4, False)
ldmatrix_x4_trans = _load(4, True)
stmatrix_x1 = _store(1, False)
stmatrix_x1_trans = _store(1, True)
stmatrix_x2 = _store(2, False)
stmatrix_x2_trans = _store(2, True)
stmatrix_x4 = _store(4, False)
stmatrix_x4_trans = _store(4, True)


@instruction(
    "movmatrix_trans",
    "movmatrix.sync.aligned.m8n8.trans.b16 %result, %x;",
    (Scalar("x", "u32"),),
    returns="u32",
    arch="75",
    group="warp",
)
def movmatrix_trans(x: np.ndarray) -> np.ndarray:
    """Transpose an 8x8 matrix of 16-bit elements across a warp's registers::

    before: lane l holds row l // 4, columns 2 (l % 4), 2 (l % 4) + 1
    after:  lane l holds column l // 4, rows 2 (l % 4), 2 (l % 4) + 1
    """
    return _registers(_rows(x[:, None], 1, False), 1, True)[:, 0]
