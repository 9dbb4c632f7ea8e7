"""The three ways in FP8: every convention within the budget of e4m3, layouts of V, and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close, compare
from flashnumba.machine import launcher
from flashnumba.machine.emulator import Fault
from flashnumba.stages import fp8_heads
from flashnumba.stages.chained_gemm import fp8
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.fp8 import reference
from flashnumba.stages.heads import Shape
from flashnumba.tiles import chain
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.faults import seeds_for

E4M3 = ml_dtypes.float8_e4m3fn
SMALL = AttentionTiles(64, 32, 64, warps=2, slots=2, lazy=True, nbytes=1)
ONE_SLOT = AttentionTiles(64, 64, 64, warps=2, q_held=1, nbytes=1)


def made(m, n, d, heads=1, kv_heads=1, batch=1, seed=0, dtype=E4M3):
    rng = np.random.default_rng((seed, m, n, d, batch, heads))
    q = rng.standard_normal((batch, heads, m, d)) * np.geomspace(0.5, 2, max(m, 1))[:m, None]
    k = rng.standard_normal((batch, kv_heads, n, d)) + 0.3 * np.arange(kv_heads)[:, None, None]
    v = rng.standard_normal((batch, kv_heads, n, d)) + np.linspace(-1, 1, d) + np.arange(kv_heads)[:, None, None]
    return tuple(x.astype(dtype) for x in (q, k, v))


def low_precision(q, k, v, scale=None, causal=False):
    codes = (x.view(np.uint8) for x in (q, k, v))
    return reference.attention(*codes, "e4m3", scale=scale, causal=causal)


def planner(way, tiles=SMALL, broken=""):
    return lambda shape: fp8.plan_chained(way, shape, tiles, broken=broken)


def check(results, q, k, v, scale=None, causal=False):
    exact, low = (f(q, k, v, scale, causal) for f in (dense, low_precision))
    for name, got, expected, rough in zip(("o", "lse"), results, exact, low, strict=True):
        assert_close(got, expected, rough, what=name)


@pytest.mark.parametrize(
    ("way", "m", "n", "causal", "sizes"),
    [
        *((way, 33, 70, True, {}) for way in chain.WAYS), ("shared", 7, 33, False, {"heads": 4, "kv_heads": 2}),
        ("shuffles", 40, 15, True, {}), ("registers", 1, 129, False, {"batch": 2}), ("shared", 3, 1, False, {}),
    ],
)  # fmt: skip
def test_tails_and_masks(machine, way, m, n, causal, sizes):
    q, k, v = made(m, n, 64, **sizes)
    check(fp8.forward(q, k, v, planner(way), causal=causal, machine=machine), q, k, v, causal=causal)


@pytest.mark.parametrize("n", range(1, 34, 4))
def test_every_number_of_keys_of_a_step(machine, n):
    q, k, v = made(3, n, 64)
    way = chain.WAYS[n % 3]
    check(fp8.forward(q, k, v, planner(way), machine=machine), q, k, v)


@pytest.mark.parametrize("d", [1, 16, 100, 128])
def test_head_dimensions(machine, d):
    """Rows that are no multiple of 16 bytes are copied into longer ones."""
    q, k, v = made(9, 37, d)
    o, lse = fp8.forward(q, k, v, causal=True, machine=machine)
    assert o.dtype == ml_dtypes.bfloat16 and o.shape == q.shape
    check((o, lse), q, k, v, causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0, 1e-38])
def test_scales(machine, scale):
    q, k, v = made(9, 70, 64)
    way = {0.0: "shared", -0.3: "shuffles"}.get(scale, "registers")
    check(fp8.forward(q, k, v, planner(way, ONE_SLOT), scale=scale, machine=machine), q, k, v, scale)


@pytest.mark.parametrize("way", chain.WAYS)
def test_weights_that_only_the_factor_saves(machine, way):
    """One key outweighs 127 others by 2^12: e4m3 would round each of their weights to 0."""
    q, k, v = (np.zeros((1, 1, rows, 64), np.float32) for rows in (4, 128, 128))
    q[..., 0], k[..., 0, 0] = 1, 1
    v[..., 1:, :] = 448
    q, k, v = (x.astype(E4M3) for x in (q, k, v))
    scale = 12 * np.log(2)
    o, _ = results = fp8.forward(q, k, v, planner(way), scale=scale, machine=machine)
    check(results, q, k, v, scale)
    assert (np.abs(o.astype(float) - 448 * 127 / (127 + 4096)) < 0.1).all(), "12 is lost without it"


def test_numbers_that_are_none(machine):
    q, k, v = made(5, 40, 64)
    q[0, 0, 2, 3] = np.nan
    v[0, 0, 7, 9] = np.nan
    k[0, 0, 38] = np.nan
    check(fp8.forward(q, k, v, planner("shuffles"), causal=True, machine=machine), q, k, v, causal=True)


@pytest.mark.parametrize(("m", "n"), [(3, 0), (0, 5)])
def test_nothing(machine, m, n):
    q, k, v = made(m, n, 64)
    o, lse = fp8.forward(q, k, v, machine=machine)
    assert (o == 0).all() and (lse == -np.inf).all() and o.shape == q.shape


def test_leading_axes_may_be_left_out(machine):
    q, k, v = made(9, 20, 64)
    whole = fp8.forward(q, k, v, planner("registers"), machine=machine)
    for a, b in zip(whole, fp8.forward(q[0, 0], k[0, 0], v[0, 0], planner("registers"), machine=machine), strict=True):
        np.testing.assert_array_equal(a[0, 0], b)


# -- layouts -----------------------------------------------------------------------------------------------------------
def test_a_v_by_columns_is_v_and_is_not_copied(monkeypatch):
    q, k, v = made(9, 37, 64, heads=2, kv_heads=2)
    turned = fp8_heads.by_columns(v)
    assert turned.dtype == v.dtype and turned.shape == v.shape
    np.testing.assert_array_equal(turned.view(np.uint8), v.view(np.uint8))
    assert turned.strides[-2] == 1 and turned.strides[-1] == 48
    expected = fp8.forward(q, k, v, planner("registers"), machine="emulator")
    monkeypatch.setattr(fp8_heads, "_transposed", lambda *args: pytest.fail("it was copied"))
    for a, b in zip(expected, fp8.forward(q, k, turned, planner("registers"), machine="emulator"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("change", ["reversed", "one byte off", "every second column", "heads inside rows"])
def test_other_layouts_give_the_same_bits(which, change):
    arrays = dict(zip("qkv", made(5, 20, 64, heads=2, kv_heads=2), strict=True))
    expected = fp8.forward(*arrays.values(), planner("registers"), machine="emulator")
    x = arrays[which]
    if change == "reversed":
        x = np.flip(np.flip(x, (2, 3)).copy(), (2, 3))
    elif change == "one byte off":
        x = np.concatenate([x[..., :1], x], -1)[..., 1:]
    elif change == "every second column":
        x = np.repeat(x, 2, -1)[..., ::2]
    else:
        x = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    arrays[which] = x
    for a, b in zip(expected, fp8.forward(*arrays.values(), planner("registers"), machine="emulator"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_by_columns_of_torch():
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this torch has no float8_e4m3fn")
    q, k, v = made(5, 20, 64)
    given = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in (q, k, v)]
    turned = fp8_heads.by_columns(given[2])
    assert turned.shape == given[2].shape and turned.dtype == torch.float8_e4m3fn and turned.stride()[-2] == 1
    expected = fp8.forward(q, k, v, planner("registers"), machine="emulator")
    o, lse = fp8.forward(*given[:2], turned, planner("registers"), machine="emulator")
    assert o.dtype == torch.bfloat16
    np.testing.assert_array_equal(o.float().numpy(), expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), expected[1])


# -- planted faults ----------------------------------------------------------------------------------------------------
FAULTS = {
    "sync": {"Race"}, "overwrite": {"Race"}, "pitch": {"wrong result"}, "unit": {"Race"}, "round": {"wrong result"},
    "o_barrier": {"Race"}, "halves": {"wrong result"},
    "order": {"wrong result"}, "tail": {"wrong result"}, "causal": {"wrong result"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "fault"),
    [(way, fault) for way in chain.WAYS for fault in (*chain.FAULTS[way], "order", "tail", "causal")]
    + [("registers", "o_barrier")],
)
def test_planted_faults(way, fault):
    causal = fault == "causal"
    q, k, v = made(20, 70, 64, seed=1)
    exact, low = (f(q, k, v, 0.5, causal) for f in (dense, low_precision))
    turned = fp8_heads.by_columns(v)
    shape = Shape(fp8.ELEMENT, 1, 1, 1, 20, 70, 64, causal)
    (launch,) = fp8.plan_chained(way, shape, SMALL, broken=fault).launches
    for seed in seeds_for(FAULTS[fault]):
        o, lse = np.full(q.shape, np.nan, ml_dtypes.bfloat16), np.full(q.shape[:3], np.nan, np.float32)
        args = (*(x.view(np.uint8) for x in (q, k, turned)), o, lse, np.float32(0.5), np.int32(causal))
        try:
            launcher.launch(
                launch.kernel, launch.grid, launch.threads, args, shared=launch.shared, machine="emulator",
                emulate={"seed": seed},
            )  # fmt: skip
            seen = "" if all(compare(*x).ok for x in zip((o, lse), exact, low, strict=True)) else "wrong result"
        except Fault as found:
            seen = found.name
        assert seen in FAULTS[fault], f"{fault} of {way}: {seen or 'not caught'} with seed {seed}"


# -- what does not fit -------------------------------------------------------------------------------------------------
def test_bad_arguments_are_named():
    q, k, v = made(5, 20, 64)
    with pytest.raises(TypeError, match="k has elements of type float16; it must be float8_e4m3fn or float8_e5m2"):
        fp8.forward(q, k.astype(np.float16), v)
    with pytest.raises(
        TypeError, match="v has elements of type float8_e5m2 and q of float8_e4m3fn; they must be the same"
    ):
        fp8.forward(q, k, v.astype(ml_dtypes.float8_e5m2))
    with pytest.raises(ValueError, match=r"v has shape .* they must be the same"):
        fp8.forward(q, k, v[:, :, :-1])
    shape = Shape(fp8.ELEMENT, 1, 1, 1, 8, 8, 64)
    with pytest.raises(ValueError, match="float8_e4m3fn from sm_89 on; this is sm_86"):
        fp8.PLANS["shared"](replace(shape, arch="86"))
    with pytest.raises(ValueError, match="q is float8_e4m3fn with rows of 40; it must be"):
        fp8.PLANS["shared"](replace(shape, d=40))
    with pytest.raises(ValueError, match=r"chained_gemm\.shared of float8_e4m3fn knows no descales"):
        fp8.forward(q, k, v, fp8.PLANS["shared"], q_descale=2.0)
    with pytest.raises(ValueError, match="nbytes is 1; it must be 2, or 1 with multiples of 64 for d and bn"):
        AttentionTiles(96, 64, 64, nbytes=1)


@pytest.mark.parametrize("arch", ["89", "90a", "100a", "120a"])
@pytest.mark.parametrize("d", [16, 64, 100, 128, 192, 256])
def test_the_tiles_fit(arch, d):
    tiles = fp8.tiles_for(d, arch)
    (launch,) = fp8.plan_chained("shared", Shape(fp8.ELEMENT, 1, 1, 1, 8, 8, -(-d // 16) * 16, arch=arch)).launches
    assert tiles.d >= d and launch.shared <= 99 * 1024
