"""Each way, lane by lane, is attention; what it costs; and what is wrong is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnumba.stages.chained_gemm import reference
from flashnumba.stages.chained_gemm.layouts import ORDERS, accumulators, fused, operands, order_of, unit
from flashnumba.stages.flash_forward.reference import dense

MMAC = unit("mmac16x16x16")
CHAINS = [
    ("mmac16x16x16", None, ("shared", "shuffles")),
    ("mmac16x16x16", "fused", ("registers", "shared")),
    ("m16n8k16", "natural", ("registers",)),
    ("m16n8k16", "strided", ("shared", "shuffles")),
    ("m16n8k32", "natural", ("shared", "shuffles")),
    ("m16n8k32", "quads", ("registers",)),
]


def order_named(name: str | None, columns: int = 64) -> np.ndarray | None:
    if name is None:
        return None
    return fused(columns) if name == "fused" else order_of(*ORDERS[name], columns=columns)


def made(m, n, d, seed=0):
    rng = np.random.default_rng([seed, m, n, d])
    q = rng.standard_normal((m, d)) * np.geomspace(0.5, 4, m)[:, None]
    return q, rng.standard_normal((n, d)), rng.standard_normal((n, d)) + np.linspace(-1, 1, d)


@pytest.mark.parametrize(("name", "order", "ways"), CHAINS)
@pytest.mark.parametrize("kpack", [1, 2])
@pytest.mark.parametrize(("m", "n", "d", "causal"), [(16, 64, 32, False), (21, 100, 40, True), (33, 7, 16, True)])
def test_it_is_attention(name, order, ways, kpack, m, n, d, causal):
    q, k, v = made(m, n, d)
    expected, _ = dense(q, k, v, causal=causal)
    for way in ways:
        got = reference.attention(q, k, v, unit(name), way, order_named(order), causal=causal, kpack=kpack)
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


def test_scale_and_another_width():
    q, k, v = made(9, 50, 32)
    got = reference.attention(q, k, v, MMAC, "shuffles", scale=-0.7, columns=32)
    np.testing.assert_allclose(got, dense(q, k, v, -0.7)[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("name", "order"), [("mmac16x16x16", None), ("m16n8k16", "strided"), ("m16n8k32", "natural")])
def test_registers_alone_do_not_do_in_any_order(name, order):
    q, k, v = made(4, 64, 16)
    with pytest.raises(ValueError, match="768 of 1024 elements are in another lane; another order is needed"):
        reference.attention(q, k, v, unit(name), "registers", order_named(order))


@pytest.mark.parametrize("way", ["shared", "shuffles"])
def test_a_wrong_order_is_wrong(way):
    """K dealt out in one order, P handed over as if in another."""
    held, wanted = accumulators(MMAC, 64, fused()), operands(MMAC, 64)
    p = np.arange(16 * 64.0).reshape(16, 64)
    registers = p[held[..., 0], held[..., 1]]
    right, _ = reference.WAYS[way](registers, held, wanted)
    wrong, _ = reference.WAYS[way](registers, accumulators(MMAC, 64), wanted)
    np.testing.assert_array_equal(right, p[wanted[..., 0], wanted[..., 1]])
    assert (wrong != right).mean() > 0.5


# -- one instruction ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["m16n8k16", "m16n8k32", "mmac16x16x16"])
def test_an_instruction_multiplies(name):
    one = unit(name)
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(size) for size in ((one.m, one.k), (one.k, one.n), (one.m, one.n)))

    def to_lanes(x, layout):
        return x[layout[..., 0], layout[..., 1]]

    got = reference.multiply(one, to_lanes(c, one.c)[..., 0], to_lanes(a, one.a), to_lanes(b, one.b))
    np.testing.assert_allclose(got, to_lanes(c + a @ b, one.c)[..., 0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["m16n8k16", "m16n8k32", "mmac16x16x16"])
@pytest.mark.parametrize("kpack", [1, 2, 4])
def test_depths_name_each_column_once(name, kpack):
    one = unit(name)
    assert sorted(reference.depths(one, kpack).ravel()) == list(range(kpack * one.k))


def test_kpack_doubles_what_a_lane_reads_at_once():
    """16 x 64 x 32: eight neighbours, k = 8 (lane // 16) + v, in one read of 128 bits, for two instructions."""
    assert [reference.read_widths(MMAC, kpack) for kpack in (1, 2)] == [(1, 8), (1, 16)]
    both = reference.depths(MMAC, 2)[:, MMAC.a[..., 1]]  # [2, lane, register, element]
    for lane in range(64):
        assert both[:, lane].ravel().tolist() == list(range(8 * (lane // 16), 8 * (lane // 16) + 8))
    assert [reference.read_widths(unit("m16n8k16"), kpack) for kpack in (1, 2)] == [(4, 4), (4, 8)]


# -- what it costs -----------------------------------------------------------------------------------------------------
def cost(name, order, way, columns, **options):
    held, wanted = accumulators(unit(name), columns, order_named(order, columns)), operands(unit(name), columns)
    return reference.WAYS[way](np.zeros(held.shape[:3]), held, wanted, **options)[1]


def test_rounds_of_exchange():
    """A lane of m16n8k16 exchanges a register for each of P; of mmac, 12 of 16 elements, two a register."""
    assert cost("m16n8k16", "strided", "shuffles", 16).shuffles == 4
    assert cost("m16n8k16", "strided", "shuffles", 16, together=1).shuffles == 8
    assert cost("m16n8k32", "natural", "shuffles", 32, together=4).shuffles == 4
    assert cost("mmac16x16x16", None, "shuffles", 64).shuffles == 6
    assert cost("mmac16x16x16", None, "shuffles", 64, together=1).shuffles == 12
    assert cost("mmac16x16x16", "fused", "shuffles", 64).shuffles == 0


def test_banks():
    """The kernels' tile, 16 rows of 32 bytes: chunks that change places, or longer rows, keep lanes from meeting."""
    for name, order, columns, size in (("m16n8k16", "strided", 16, 2), ("m16n8k32", "natural", 32, 1)):
        swizzled, plain, padded = (
            cost(name, order, "shared", columns, itemsize=size, **more)
            for more in ({}, {"swizzled": False}, {"pitch": 48})
        )
        assert (swizzled.stores, swizzled.loads, swizzled.shared) == (8, 4, 512)
        assert swizzled.conflicts == padded.conflicts == 0
        assert plain.conflicts == 12, "each store and each load of eight rows meets a bank twice"
        assert padded.shared == 768


def test_neighbours_are_stored_together():
    """In the natural order a lane's two columns are one store."""
    assert cost("m16n8k16", "natural", "shared", 16).stores == 4
    assert cost("mmac16x16x16", None, "shared", 64).loads == 4, "four elements, 8 bytes"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=40))
def test_no_lane_is_asked_twice_and_no_round_is_wasted(pairs):
    rounds = reference.in_rounds(pairs, 6)
    assert len(rounds) == len(pairs)
    for i in (0, 1):
        asked = [(pair[i], colour) for pair, colour in zip(pairs, rounds, strict=True)]
        assert len(set(asked)) == len(asked)
    busiest = max((sum(pair[i] == lane for pair in pairs) for i in (0, 1) for lane in range(6)), default=0)
    assert max(rounds, default=-1) + 1 == busiest
