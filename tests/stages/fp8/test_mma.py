"""Every kernel against the rounding-exact reference: formats, scales, masks, tails, dimensions, GPUs of every age."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from flashnumba import fp8
from flashnumba.machine import launcher
from flashnumba.machine.emulator import Fault
from flashnumba.stages import fp8_heads
from flashnumba.stages.fp8 import mma, scales, split
from flashnumba.stages.heads import Shape
from flashnumba.tiles import descale
from flashnumba.tiles import fp8 as fp8_tiles
from flashnumba.tiles.sizes import AttentionTiles
from tests.stages.fp8.problems import made

SMALL = AttentionTiles(64, 32, 64, warps=2, slots=2, nbytes=1)
HALVES = AttentionTiles(64, 32, 32, warps=2, slots=2, q_held=2, kv_bytes=1)
WEIGHTS = {"k32": "e4m3", "emulated": "float16", "split": "float16"}
PLANS = {
    "k32": partial(mma.plan_k32, tiles=SMALL), "emulated": partial(mma.plan_emulated, tiles=HALVES),
    "split": split.plan_split,
}  # fmt: skip


def check(problem, name, machine, plan=None, step=64):
    results = problem.run(plan or PLANS[name], machine)
    assert results[0].dtype == ml_dtypes.bfloat16
    assert not (wrong := problem.why_wrong(results, WEIGHTS[name], machine, step)), wrong


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("k32", made(33, 150, 64, "e4m3", "block", causal=True)), ("k32", made(7, 70, 64, "e5m2", heads=2, kv_heads=1)),
        ("k32", made(40, 15, 64, causal=True)), ("k32", made(3, 1, 64, "e4m3", "tensor")),
        ("emulated", made(33, 150, 64, "e5m2", "block", causal=True)),
        ("emulated", made(7, 70, 64, heads=2, kv_heads=1)),
        ("emulated", made(3, 31, 64, "e5m2", "tensor")),
        ("split", made(3, 150, 64, "e4m3", "block", heads=4, kv_heads=2, causal=True)),
        ("split", made(17, 40, 64, "e4m3")),
        ("k32", made(2, 9, 64, heads=2, kv_heads=2, batch=2)),  # each sequence's heads of k have scales of their own
        ("k32", made(70, 5, 64, "e5m2", "block")),  # and blocks of q
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.fmt} {x.codes['q'].shape}",
)  # fmt: skip
def test_formats_scales_masks_and_tails(machine, name, problem):
    check(problem, name, machine, step=32 if name == "emulated" else 64)


def test_teams_keep_o_in_the_units_of_their_own_tiles(machine):
    """Each has every fourth tile of a part, two or three of them, and no two lie in one block of scales."""
    problem = made(1, 330, 128, "e5m2", "block", heads=8, kv_heads=1, batch=2)
    check(problem, "split", machine, lambda shape: split.plan_split(replace(shape, multiprocessors=1)))


@pytest.mark.parametrize(("name", "d"), [("k32", 256), ("emulated", 100), ("split", 256)])
def test_head_dimensions(machine, name, d):
    """With the tiles that a GPU gets; 100 columns are copied into longer rows."""
    problem = made(9, 66, d, "e4m3", "block", causal=True)
    check(problem, name, machine, mma.PLANS[name])


@pytest.mark.parametrize(("arch", "fmt"), [("75", "e4m3"), ("80", "e4m3"), ("80", "e5m2")])
def test_older_gpus_convert_in_integers(machine, arch, fmt):
    """sm_75 copies and multiplies otherwise, too. Neither has instructions for these formats."""
    problem = made(20, 40, 64, fmt, causal=True)
    check(problem, "emulated", machine, lambda shape: mma.plan_emulated(replace(shape, arch=arch)), 32)
    if arch == "80":
        check(
            made(2, 130, 64, fmt, heads=2), "split", machine, lambda shape: split.plan_split(replace(shape, arch=arch))
        )


@pytest.mark.parametrize(
    ("name", "scale"),
    [("k32", 0.0), ("k32", -0.3), ("k32", 2.0), ("k32", 1e-38), ("emulated", 0.0), ("emulated", -2.0)],
)
def test_scales_of_scores(machine, name, scale):
    problem = made(9, 70, 64, scale=scale, scaling="block" if scale == 2 else "head")
    if scale == 1e-38:  # the factor would vanish
        problem = replace(problem, scales={x: s * np.float32(1e-10) for x, s in problem.scales.items()})
    check(problem, name, machine)


@pytest.mark.parametrize("name", WEIGHTS)
def test_numbers_that_are_none(machine, name):
    problem = made(5, 40, 64, causal=True)
    problem.codes["q"][0, 0, 2, 3] = problem.codes["v"][0, 0, 7, 9] = 0x7F
    problem.codes["k"][0, 0, 38] = 0xFF
    o, lse = problem.run(PLANS[name], machine)
    o_ref, lse_ref = problem.expected(WEIGHTS[name])
    np.testing.assert_array_equal(np.isnan(o.astype(np.float32)), np.isnan(o_ref.astype(np.float32)))
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(lse_ref))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("m", "n"), [(3, 0), (0, 5)])
def test_nothing(machine, name, m, n):
    o, lse = made(m, n, 64, "e5m2", "block").run(PLANS[name], machine)
    assert (o == 0).all() and (lse == -np.inf).all() and o.shape == (1, 1, m, 64)


def test_weights_that_only_the_factor_saves(machine):
    """One key outweighs 127 others by 2^12: e4m3 would round each of their weights to 0."""
    q, k, v = (np.zeros((1, 1, rows, 64), np.float32) for rows in (4, 128, 128))
    q[..., 0], k[..., 0, 0] = 1, 1
    v[..., 1:, :] = 448
    codes = [fp8.encode(x, "e4m3") for x in (q, k, v)]
    o, _ = fp8_heads.forward(*codes, PLANS["k32"], fmt="e4m3", scale=12 * np.log(2), machine=machine)
    assert (np.abs(o.astype(float) - 448 * 127 / (127 + 4096)) < 0.1).all(), "12 is lost without it"


# -- scales ------------------------------------------------------------------------------------------------------------
def test_a_scale_is_a_scale_in_any_of_its_forms():
    name, problem = "k32", made(3, 70, 64, heads=2, kv_heads=2)
    scales_of = problem.scales
    expected = problem.run(PLANS[name], "emulator")
    forms = (
        {x: s[..., None] for x, s in scales_of.items()},
        {x: s.astype(np.float64).tolist() for x, s in scales_of.items()},
    )
    for form in forms:
        for a, b in zip(expected, replace(problem, scales=form).run(PLANS[name], "emulator"), strict=True):
            np.testing.assert_array_equal(a, b)
    blocks = {x: np.repeat(s[..., None], -(-problem.codes[x[0]].shape[-2] // 64), -1) for x, s in scales_of.items()}
    by_blocks = replace(problem, scales=blocks)
    assert not by_blocks.why_wrong(by_blocks.run(PLANS[name], "emulator"), WEIGHTS[name], "cuda")


def test_scales_of_q_by_heads_of_k():
    """As FlashAttention-3 has them."""
    problem = made(1, 70, 64, heads=4, kv_heads=2)
    of_k = np.array([[0.01, 0.03]], np.float32)
    few, all_ = ({**problem.scales, "q_descale": x} for x in (of_k, np.repeat(of_k, 2, -1)))
    for a, b in zip(*(replace(problem, scales=x).run(PLANS["split"], "emulator") for x in (few, all_)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_are_the_same_everywhere():
    assert scales.BLOCK == descale.BLOCK == fp8.BLOCK


# -- planted faults ----------------------------------------------------------------------------------------------------
CASES = [(name, fault) for name, faults in mma.FAULTS.items() for fault in faults] + [("split", "twice")]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_planted_faults(name, fault):
    """The emulator names them, or the result is not the reference's; on every one of three seeds."""
    scaled = "block" if name == "split" else "head"
    problem = made(
        20, 150, 64, scaling=scaled, causal=fault == "causal", scale=-0.5 if fault == "sign" else 0.5, seed=1
    )
    if fault in ("stale", "saturate", "rescale"):  # the greatest scores come late
        problem.codes["k"][..., 70:, :] = fp8.encode(3 * fp8.decode(problem.codes["k"][..., 70:, :], "e4m3"), "e4m3")
    tiles = {"k32": SMALL, "emulated": HALVES, "split": None}[name]
    for seed in range(3):
        plan = partial(mma.PLANS[name], broken=fault, **({"tiles": tiles} if tiles else {}))
        try:
            results = with_seed(problem, plan, seed)
            seen = problem.why_wrong(results, WEIGHTS[name], "emulator", 32 if name == "emulated" else 64)
        except Fault as found:
            seen = found.name
        assert (seen in ("Race", "Uninitialised")) == (fault in ("barrier", "o_barrier")), seen
        assert seen, f"{fault} of {name} was not caught with seed {seed}"
        if fault not in ("barrier", "o_barrier"):
            break  # a wrong result is the same whatever the order of threads


def with_seed(problem, plan, seed):
    """The problem on the emulator with the threads in another order."""
    one = fp8_heads.prepare_fp8(
        *problem.codes.values(), fmt=problem.fmt, **problem.scales, causal=problem.causal, scale=problem.scale,
        machine="emulator", stream=None,
    )  # fmt: skip
    made_plan = plan(one.shape)
    heads = one.heads(v_by_columns=made_plan.v_by_columns)
    known = {**heads.arrays, "scale": np.float32(heads.scale), "causal": np.int32(one.shape.causal)}
    known |= {name: np.full(shape, np.nan, np.float32) for name, shape in made_plan.scratch.items()}
    for launch in made_plan.launches:
        launcher.launch(
            launch.kernel, launch.grid, launch.threads, tuple(known[x] for x in launch.args), shared=launch.shared,
            machine="emulator", emulate={"seed": seed},
        )  # fmt: skip
    return heads.results


# -- on a GPU, at its own sizes ----------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("scaling", ["head", "block"])
def test_at_size(name, fmt, d, scaling):
    m = 5 if name == "split" else 300
    for causal in (False, True):
        problem = made(m, 1111, d, fmt, scaling, heads=4, kv_heads=2, batch=2, causal=causal)
        tiles = mma.PLANS[name](Shape(fp8_heads.FORMATS[fmt], 2, 4, 2, m, 1111, d, scaled=scaling)).launches
        step = (
            mma.emulated_tiles(d, "90a", narrow=fmt == "e5m2" or scaling == "block").bn
            if tiles and name == "emulated"
            else 64
        )
        check(problem, name, "cuda", mma.PLANS[name], step)


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["75", "80"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_older_tiers_at_size(arch, d):
    problem = made(200, 555, d, heads=2, causal=True)
    check(
        problem,
        "emulated",
        "cuda",
        lambda shape: mma.plan_emulated(replace(shape, arch=arch)),
        mma.emulated_tiles(d, arch).bn,
    )


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu():
    torch = pytest.importorskip("torch")
    from flashnumba import attention

    problem = made(100, 1200, 128, "e4m3", "block", heads=4, kv_heads=2, causal=True)
    given = [torch.from_numpy(problem.codes[x]).cuda().view(torch.float8_e4m3fn) for x in "qkv"]
    for where in ("cuda", "cpu"):
        of = {x: torch.from_numpy(s).to(where) for x, s in problem.scales.items()}
        for backend in ("auto", "fp8.k32", "fp8.emulated", "fp8.split"):
            o = attention(*given, **of, causal=True, backend=backend)
            assert o.dtype == torch.bfloat16 and o.is_cuda and o.shape == given[0].shape
            expected, _ = problem.exact()
            assert np.abs(o.float().cpu().numpy() - expected).max() < 0.05 * np.abs(expected).max()


# -- what does not fit -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90a", "100a", "120a"])
@pytest.mark.parametrize("d", [16, 64, 100, 128, 192, 256])
def test_the_tiles_fit(arch, d):
    room = {"75": 64, "80": 163, "90a": 227, "100a": 227}.get(arch, 99) * 1024
    for narrow in (False, True):
        assert mma.emulated_tiles(d, arch, narrow=narrow).shared <= room
    assert arch == "75" or max(split.tiles_for(d, rows, arch).shared for rows in (1, 64)) <= room
    assert fp8_tiles.tiles_for(d, arch).shared <= room or arch in ("75", "80", "86")


def test_bad_arguments_are_named():
    shape = Shape("float8_e4m3fn", 1, 1, 1, 8, 8, 64)
    with pytest.raises(
        ValueError, match="tensor cores multiply float8_e4m3fn from sm_89 on, this is sm_86: use emulated"
    ):
        mma.plan_k32(replace(shape, arch="86"))
    with pytest.raises(ValueError, match="q is float16 with rows of 64; it must be float8_e4m3fn or float8_e5m2"):
        mma.plan_emulated(replace(shape, element="float16"))
    with pytest.raises(ValueError, match=r"fp8\.split needs sm_80, this is sm_75: use fp8\.emulated"):
        split.plan_split(replace(shape, arch="75"))
    with pytest.raises(ValueError, match="bn is 128; with scales of blocks it must divide 64"):
        mma.make_forward(AttentionTiles(64, 64, 128, kv_bytes=1), "float8_e4m3fn", scaled="block")
    with pytest.raises(ValueError, match="kv_bytes is 1; it must be 0, or 1 with nbytes 2 and a multiple of 64 for d"):
        AttentionTiles(96, 64, 64, kv_bytes=1)
    problem = made(5, 70, 64, heads=2)
    for change, error, words in (
        ({"q_descale": -1.0}, ValueError, r"q_descale has -1\.0 in it; it must be finite and above 0"),
        ({"k_descale": np.ones(3)}, ValueError, r"k_descale has shape \(3,\); it must be \(\) or \(1, 1\)"),
        ({"v_descale": True}, TypeError, "v_descale is True; it must be a number or an array of them"),
    ):
        with pytest.raises(error, match=words):
            replace(problem, scales={**problem.scales, **change}).run(PLANS["k32"], "emulator")
    codes = problem.codes.values()
    with pytest.raises(TypeError, match="q has elements of type uint8, and fmt is None; say fmt='e4m3' or fmt='e5m2'"):
        fp8_heads.forward(*codes, PLANS["k32"])
    with pytest.raises(ValueError, match="fmt is 'fp8'; it must be 'e4m3' or 'e5m2'"):
        fp8_heads.forward(*codes, PLANS["k32"], fmt="fp8")
    with pytest.raises(TypeError, match="q has elements of type float8_e5m2, and fmt is 'e4m3'"):
        fp8_heads.forward(*(x.view(ml_dtypes.float8_e5m2) for x in codes), PLANS["k32"], fmt="e4m3")
