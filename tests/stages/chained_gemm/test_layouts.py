"""The fragment maps, beside those that the emulator computes with, and who sends what to whom."""

from __future__ import annotations

import numpy as np
import pytest

from flashnumba.machine.instructions.fragments import a_map, b_map, c_map
from flashnumba.stages.chained_gemm.layouts import (
    ORDERS,
    accumulators,
    fused,
    operands,
    order_of,
    senders,
    unit,
)

NAMES = ("m16n8k16", "m16n8k32", "mmac16x16x16")


@pytest.mark.parametrize("name", NAMES)
def test_every_element_lies_in_one_lane(name):
    one = unit(name)
    for layout, shape in ((one.a, (one.m, one.k)), (one.b, (one.k, one.n)), (one.c, (one.m, one.n))):
        assert len(layout) == one.lanes
        places = layout.reshape(-1, 2)
        assert sorted(map(tuple, places.tolist())) == [(r, c) for r in range(shape[0]) for c in range(shape[1])]


@pytest.mark.parametrize("name", NAMES[:2])
def test_they_are_those_of_the_instructions(name):
    one = unit(name)
    np.testing.assert_array_equal(one.a, a_map(name))
    np.testing.assert_array_equal(one.b, b_map(name))
    np.testing.assert_array_equal(one.c[:, :, 0], c_map(name))


def test_mmac_as_its_makers_traits_have_it():
    """CuTe's layouts of the fork: index = row + 16 column, of (lane % 16, lane // 16) and a value's number."""
    one = unit("mmac16x16x16")
    for lane in range(64):
        for v in range(4):
            assert one.a[lane, v // 2, v % 2].tolist() == [lane % 16, 4 * (lane // 16) + v]
            assert one.b[lane, v // 2, v % 2].tolist() == [4 * (lane // 16) + v, lane % 16]
            assert one.c[lane, v, 0].tolist() == [lane % 16, lane // 16 + 4 * v]


def test_an_unknown_instruction_is_named():
    with pytest.raises(ValueError, match=r"no matrix instruction 'm8n8k4'; there are m16n8k16, m16n8k32, mmac16x16x16"):
        unit("m8n8k4")


@pytest.mark.parametrize("order", [order_of(*order, columns=32) for order in ORDERS.values()] + [fused(), fused(128)])
def test_an_order_names_each_key_once(order):
    assert sorted(order) == list(range(len(order)))


def test_the_order_of_the_notes():
    """Product j takes keys 4c + j, and then register v of lane (c, h) of product j is key 16 v + 4 h + j."""
    held = accumulators(unit("mmac16x16x16"), 64, fused())
    for lane in range(64):
        for j in range(4):
            for v in range(4):
                assert held[lane, 4 * j + v, 0].tolist() == [lane % 16, 16 * v + 4 * (lane // 16) + j]


def test_strided_is_what_mmac_leaves_to_four_lanes():
    held = accumulators(unit("m16n8k16"), 16, order_of(*ORDERS["strided"]))
    for lane in range(32):
        of_row = [held[lane, r, 0, 1] for r in (0, 1, 4, 5)]
        assert of_row == [lane % 4 + 4 * v for v in range(4)]


@pytest.mark.parametrize(
    ("name", "columns", "order", "stay", "move"),
    [
        ("m16n8k16", 16, "natural", 256, 0),
        ("m16n8k16", 16, "strided", 64, 192),
        ("m16n8k16", 32, "strided", 128, 384),
        ("m16n8k32", 32, "natural", 128, 384),
        ("m16n8k32", 32, "quads", 512, 0),
        ("mmac16x16x16", 16, None, 64, 192),
        ("mmac16x16x16", 64, None, 256, 768),
        ("mmac16x16x16", 64, "fused", 1024, 0),
    ],
)
def test_how_many_elements_change_lanes(name, columns, order, stay, move):
    order = fused(columns) if order == "fused" else order and order_of(*ORDERS[order], columns=columns)
    sent = senders(accumulators(unit(name), columns, order), operands(unit(name), columns))
    assert (sent.stay, sent.move) == (stay, move)
    assert sent.between().sum() == stay + move and np.trace(sent.between()) == stay


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_what_is_wanted(name):
    one = unit(name)
    matrix = np.arange(one.m * 64.0).reshape(one.m, 64)
    held, wanted = accumulators(one, 64, np.random.default_rng(0).permutation(64)), operands(one, 64)
    registers = matrix[held[..., 0], held[..., 1]]
    np.testing.assert_array_equal(registers[senders(held, wanted)], matrix[wanted[..., 0], wanted[..., 1]])


def test_a_quad_of_fp8_stands_as_one_of_mmac():
    """Pairs of keys in FP8 are where single keys are in mmac's order: one exchange serves both."""
    sixteen = accumulators(unit("m16n8k16"), 16, order_of(*ORDERS["strided"]))
    eight = accumulators(unit("m16n8k32"), 32)
    for lane in range(32):
        single = [sixteen[lane, r, 0, 1] for r in (0, 1, 4, 5)]
        pairs = [eight[lane, 4 * t, 0, 1] // 2 for t in range(4)]
        assert single == pairs
        wanted = [unit("m16n8k16").a[lane, r, i, 1] for r in (0, 2) for i in (0, 1)]
        assert wanted == [unit("m16n8k32").a[lane, r, i, 1] // 2 for r in (0, 2) for i in (0, 2)]


def test_what_does_not_fit_says_so():
    one = unit("m16n8k16")
    with pytest.raises(ValueError, match="columns is 12; m16n8k16 makes 8 at a time"):
        accumulators(one, 12)
    with pytest.raises(ValueError, match="columns is 24; m16n8k16 takes 16 at a time"):
        operands(one, 24)
    with pytest.raises(ValueError, match="order has 16 keys; it must name each of 16 once"):
        accumulators(one, 16, np.zeros(16, int))
    with pytest.raises(ValueError, match="do not hold the same elements"):
        senders(accumulators(one, 32), operands(one, 16))
