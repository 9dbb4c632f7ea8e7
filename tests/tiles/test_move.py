"""Copies of tiles and warps' operands: what they refuse; that they are right is for the kernels' tests."""

import pytest

from flashnumba.tiles.move import make_mover
from flashnumba.tiles.operands import make_operand


def test_tiles_that_do_not_divide():
    with pytest.raises(ValueError, match="copies of 3 bytes; the widths are 16, 8, 4 and 2"):
        make_mover(64, 8, 128, 3)
    with pytest.raises(ValueError, match="30 lines of 8 chunks for 128 threads; each thread must have equally many"):
        make_mover(30, 8, 128, 16)
    with pytest.raises(ValueError, match="in one column"):
        make_mover(64, 12, 128, 16)


def test_registers_that_wait():
    assert make_mover(128, 4, 256, 16).registers == 0
    assert make_mover(128, 4, 256, 16, through_registers=True).registers == make_mover(128, 4, 256, 2).registers == 8


def test_operands_that_are_no_fragments():
    with pytest.raises(ValueError, match="24 of 48 by 32: fragments take multiples of 16"):
        make_operand("a", True, 24, 48, 32)
    with pytest.raises(ValueError, match="48 of 64 by 32"):
        make_operand("b", False, 48, 64, 32)


@pytest.mark.parametrize("which", ["a", "b"])
def test_registers_of_operands(which):
    along, across = (make_operand(which, k, 64, 128, 32) for k in (True, False))
    assert along.registers == across.registers == 16
    assert (along.offsets, across.offsets) == (2, 4)
