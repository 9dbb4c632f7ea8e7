"""What is said of the bytes that kernels move, beside what they do on the emulator."""

import numpy as np
import pytest

from flashnumba.machine.emulator.accesses import SECTOR, record
from flashnumba.machine.emulator.launch import launch
from flashnumba.stages.gemm import STAGE, mma, recorded, simt, wgmma
from flashnumba.stages.gemm.problem import Shape
from flashnumba.stages.gemm.traffic import Lanes, Tiled
from tests.stages.gemm.products import product

TRAFFIC = {rung.name: rung.traffic for rung in STAGE.kernels}


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize(("kernel", "size"), [("naive", (32, 16, 32)), ("coalesced", (16, 32, 32))])
def test_sectors_of_one_element_a_thread(dtype, kernel, size):
    m, n, k = size
    made = product(m, n, k, dtype)
    plan = simt.PLANS[kernel](made.shape)
    # Lines of 16 elements or more begin with a sector: 32 bytes.
    a, b, c = (np.empty(x.size + 32, dtype) for x in (made.a, made.b, made.expected))
    a, b, c = (x[-x.ctypes.data % SECTOR // x.itemsize :] for x in (a, b, c))
    a, b, c = a[: m * k].reshape(m, k), b[: k * n].reshape(k, n), c[: m * n].reshape(m, n)
    a[...], b[...] = made.a, made.b
    seen = record(plan.kernel, plan.grid, plan.threads, (a, b, c))
    moved = sum(int(seen.sectors(operand).sum()) for operand in "ab") * SECTOR
    assert moved == TRAFFIC[kernel].per_step(a.itemsize) * m * n * k


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    ("plan", "size"),
    [
        (simt.plan_shared_tile, (32, 48, 32)), (lambda shape: simt.plan_of(shape, simt.SMALL), (64, 32, 24)),
        (lambda shape: simt.plan_of(shape, simt.MEDIUM), (64, 128, 16)),
    ],
    ids=["shared_tile", "small register tile", "medium register tile"],
)  # fmt: skip
def test_bytes_of_tiles(dtype, plan, size):
    m, n, k = size
    made = product(m, n, k, dtype)
    planned = plan(made.shape)
    out = made.guarded()
    report = launch(planned.kernel, planned.grid, planned.threads, (made.a, made.b, out.array), shared=planned.shared)
    area = m * n // planned.grid
    side = int(area**0.5)
    traffic = Tiled(side, side)
    itemsize = made.a.itemsize
    assert report.loaded == traffic.per_step(itemsize) * m * n * k
    assert report.stored == m * n * itemsize


def test_what_is_said_of_tiles_is_true_of_large_products():
    shape = Shape.packed("float32", 8192, 8192, 8192)
    half = Shape.packed("float16", 8192, 8192, 8192)
    plans = {
        "shared_tile": simt.plan_shared_tile(shape), "register_tile": simt.plan_register_tile(shape),
        "mma": mma.plan_mma(half),
    }  # fmt: skip
    for name, plan in plans.items():
        assert plan.grid == (8192 // TRAFFIC[name].rows) * (8192 // TRAFFIC[name].cols)
    assert (wgmma.LARGE.bm, wgmma.LARGE.bn) == (TRAFFIC["wgmma"].rows, TRAFFIC["wgmma"].cols)


def test_the_bytes_of_a_case():
    case = STAGE.cases("emulator", False)[0]
    k = case.inputs["a"].shape[1]
    assert Lanes(32, 1)(case) == 33 * k + 2
    assert Tiled(32, 64)(case) == 2 * (1 / 32 + 1 / 64) * k + 2
    assert [str(TRAFFIC[name]) for name in ("naive", "register_tile")] == ["32x1", "128x128"]


def test_the_picture_of_one_warp():
    loads = recorded()
    assert {name: [len(offsets) for offsets in found.values()] for name, found in loads.items()} == {
        "naive": [32, 1],
        "coalesced": [1, 32],
    }
    np.testing.assert_array_equal(loads["naive"]["a"], np.arange(32) * 128)
    np.testing.assert_array_equal(loads["coalesced"]["b"], np.arange(32) * 4)
