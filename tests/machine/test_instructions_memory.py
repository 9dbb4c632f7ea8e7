"""Loads and stores by address, the ordered ones among them, and what every declaration must have."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from flashnumba.machine import instructions as ptx
from flashnumba.machine.instruction import REGISTRY, Fragment, Scalar
from tests.machine.conformance.cases import PlainMemory

WIDTHS = {"b16": (np.uint16, 1), "b32": (np.uint32, 1), "f32": (np.float32, 1), "v2": (np.uint32, 2),
          "v4": (np.uint32, 4), "v2_f32": (np.float32, 2), "v4_f32": (np.float32, 4)}  # fmt: skip
LOADS = [n for n in ptx.memory.__all__ if n.startswith("ld_")]
STORES = [n for n in ptx.memory.__all__ if n.startswith("st_")]


def width_of(name: str) -> tuple[type, int]:
    return WIDTHS[re.search(r"(b16|b32|v[24](_f32)?|f32)$", name)[0]]


@pytest.mark.parametrize("name", LOADS)
def test_loads(name: str) -> None:
    dtype, count = width_of(name)
    data = np.random.default_rng(0).integers(0, 256, 256, dtype=np.uint8)
    expected = data.view(dtype).reshape(-1, count)
    order = np.random.default_rng(1).permutation(len(expected))
    step = np.dtype(dtype).itemsize * count
    got = getattr(ptx, name).emulate(PlainMemory(data), (order * step).astype(np.uint64))
    want = expected[order] if count > 1 else expected[order, 0]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.copy().view(np.uint8))
    alone = getattr(ptx, name).emulate(PlainMemory(data), np.uint64(step * 3))
    np.testing.assert_array_equal(np.atleast_1d(alone).view(np.uint8), data[3 * step : 4 * step])
    assert getattr(ptx, name).doc.count(f"multiple of {step}") == 1


@pytest.mark.parametrize("name", STORES)
def test_stores(name: str) -> None:
    dtype, count = width_of(name)
    step, rng = np.dtype(dtype).itemsize * count, np.random.default_rng(2)
    memory = PlainMemory(np.zeros(32 * step, np.uint8))
    value = rng.integers(0, 256, (32, step), dtype=np.uint8).view(dtype)
    order = rng.permutation(32)
    made = getattr(ptx, name).emulate(memory, (order * step).astype(np.uint64), value if count > 1 else value[:, 0])
    assert made == ()
    np.testing.assert_array_equal(memory.data.reshape(32, step)[order], value.view(np.uint8))
    getattr(ptx, name).emulate(memory, np.uint64(0), value[5] if count > 1 else value[5, 0])
    np.testing.assert_array_equal(memory.data[:step], value[5].view(np.uint8))


def test_every_width_exists_wherever_it_makes_sense() -> None:
    for width in WIDTHS:
        for kind in ("ld_global_", "ld_global_nc_", "ld_global_once_", "ld_shared_", "st_global_", "st_shared_"):
            assert f"{kind}{width}" in REGISTRY
    assert "L1::no_allocate" in ptx.ld_global_once_v4.ptx and ".cs" in ptx.st_global_stream_v4.ptx


def test_lanes_that_add_to_one_address_follow_one_another() -> None:
    memory = PlainMemory(np.array([5, 100], np.uint32).view(np.uint8).copy())
    address, value = np.array([0, 4, 0, 0], np.uint64), np.array([1, 2, 3, 0xFFFFFFFF], np.uint32)
    before = ptx.atom_add_acq_rel_gpu_u32.emulate(memory, address, value)
    assert before.tolist() == [5, 100, 6, 9] and before.dtype == np.uint32
    assert memory.data.view(np.uint32).tolist() == [8, 102]  # 9 + 2^32 - 1 wraps
    assert ptx.red_add_release_gpu_u32.emulate(memory, np.uint64(4), np.uint32(1)) == ()
    assert memory.data.view(np.uint32)[1] == 103
    ptx.st_release_gpu_b64.emulate(memory, np.uint64(0), np.uint64(1 << 40))
    assert memory.data.view(np.uint64)[0] == 1 << 40
    ptx.st_release_gpu_b32.emulate(memory, np.uint64(0), np.uint32(7))
    assert memory.data.view(np.uint64)[0] == (1 << 40) + 7


def test_what_asks_the_thread() -> None:
    thread = SimpleNamespace(lane=17, address_of=lambda array: array.address)
    array = SimpleNamespace(address=4096)
    assert ptx.global_address.emulate(thread, array) == ptx.shared_address.emulate(thread, array) == 4096
    assert ptx.lane_id.emulate(thread) == 17
    for clock in (ptx.read_clock, ptx.read_globaltimer):
        assert clock.emulate(thread) <= clock.emulate(thread)


FAMILIES = ("convert", "ldmatrix", "memory", "mma", "ordered", "special")


@pytest.mark.parametrize("name", [i.name for i in REGISTRY.values() if i.family in FAMILIES])
def test_declarations_are_complete(name: str) -> None:
    declared = REGISTRY[name]
    assert getattr(ptx, name) is declared
    assert len(declared.doc) > 20 and declared.family != "instruction"
    assert re.fullmatch(r"\d+a?", declared.arch)
    with pytest.raises(TypeError, match="runs inside a kernel"):
        declared()
    for operand in declared.operands:
        if isinstance(operand, Fragment):
            assert operand.role in ("in", "out", "inout") and operand.count > 0
        elif operand.name == "addr":
            assert operand == Scalar("addr", "u64" if ".global" in declared.ptx else "u32")
