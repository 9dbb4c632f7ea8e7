"""Warp-specialised attention: every convention, tails, head dimensions, layouts; and each planted fault is caught."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flashnumba.compare import assert_close
from flashnumba.machine.tensor_map import TensorMap
from flashnumba.stages.flash_forward import wgmma
from flashnumba.stages.heads import Plan, Shape
from flashnumba.tiles import specialised
from flashnumba.tiles.specialised_tiles import SpecialisedTiles, tiles_for
from tests.stages.faults import seeds_for
from tests.stages.flash_forward.attention_cases import (
    LAYOUTS,
    assert_attention,
    caught,
    hard_case,
    hard_cases,
    laid_out,
    normal,
    one_odd_row,
    run,
)

pytestmark = pytest.mark.usefixtures("hopper")
BFLOAT16 = ml_dtypes.bfloat16
SMALL = SpecialisedTiles(64, 64)
"""Small tiles, so that small problems have several."""


def with_tiles(tiles: SpecialisedTiles, broken: str = "", blocks: int = 0):
    """A planner for given tiles, and for so many blocks at most."""

    def plan(shape: Shape) -> Plan:
        (launch,) = wgmma.plan_of(shape, tiles, blocks).launches
        return Plan((replace(launch, kernel=wgmma.make_wgmma(tiles, shape.element, broken=broken)),))

    return plan


# -- every convention --------------------------------------------------------------------------------------------------
ONE_TILE, THREE_TILES = {"n": 37}, {"n": 150}
EMULATED = (
    ("causal, rows that see nothing", ONE_TILE), ("one key, scale 0", ONE_TILE), ("scale 0, causal", ONE_TILE),
    ("negative scale", ONE_TILE), ("smallest scale", ONE_TILE), ("a maximum that grows", THREE_TILES),
    ("scores of -1e5 that differ little", ONE_TILE), ("scores of any size, negative scale", ONE_TILE),
    ("a NaN in a key that not all see", ONE_TILE), ("a NaN in a value", ONE_TILE),
    ("infinity in a key, scale 0, causal", ONE_TILE), ("infinity in a key, scale 0, causal", THREE_TILES),
    ("first keys -infinity, causal", THREE_TILES),
)  # fmt: skip
"""Those of the hard cases that differ in what this kernel does."""


@pytest.mark.parametrize(("name", "sizes"), EMULATED, ids=[name for name, _ in EMULATED])
def test_hard_cases(name, sizes):
    case = hard_case(name, np.float16, **sizes)
    assert_attention(run(with_tiles(SMALL), case), case)


@pytest.mark.parametrize("name", ["causal", "negative scale", "large scale", "keys of -infinity"])
def test_hard_cases_in_bfloat16(name):
    case = hard_case(name, BFLOAT16)
    assert_attention(run(with_tiles(SMALL), case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("n", [37, 150])
def test_all_hard_cases_on_a_gpu(dtype, n):
    for case in hard_cases(dtype, n=n):
        assert_attention(run(with_tiles(SMALL), case, "cuda"), case)


# -- sizes and layouts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("m", "n", "causal"),
    [(1, 65, True), (63, 64, True), (64, 127, False), (65, 63, True), (127, 129, True), (129, 1, False)],
)
def test_tails(machine, m, n, causal):
    case = normal(m, n, 64, np.float16, causal=causal)
    assert_attention(run(with_tiles(SMALL), case, machine), case)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_all_tails_on_a_gpu(causal):
    """Sums are compared together: of a size of which one row sees one key the low precision is right by chance, while
    the tensor core cuts products off where it adds them."""
    sizes = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 257)
    sums = []
    for m in sizes:
        for n in sizes:
            case = normal(m, n, 64, np.float16, causal=causal)
            o, lse = run(with_tiles(SMALL), case, "cuda")
            assert_close(o, case.expected[0], case.lowprec[0], what=f"o of {case.name}")
            sums.append([x.ravel() for x in (lse, case.expected[1], case.lowprec[1])])
    assert_close(*(np.concatenate(x) for x in zip(*sums, strict=True)), what="lse of all")


@pytest.mark.parametrize("d", [8, 40, 64, 72, 128, 136, 192, 200, 256])
def test_the_tiles_that_are_launched(machine, d):
    """On a size that takes one tile of keys or two, by rows of which some see a part."""
    n = {64: 150, 128: 140}.get(d, 100)
    case = normal(70, n, d, BFLOAT16 if d % 16 else np.float16, causal=True)
    assert_attention(run(wgmma.plan_wgmma, case, machine), case)


def test_the_tiles_for_many_keys(machine):
    tiles = tiles_for(128, 10_000)
    assert tiles != tiles_for(128, 1000)
    case = normal(3, 100, 128, np.float16)
    assert_attention(run(with_tiles(tiles), case, machine), case)


@pytest.mark.parametrize(
    ("tiles", "case"),
    [
        (SMALL, normal(129, 40, 64, np.float16, heads=2, kv_heads=1, causal=True)),
        (SpecialisedTiles(64, 64, consumers=3), normal(70, 150, 64, np.float16, causal=True)),
        (SpecialisedTiles(64, 80, slots=4), normal(70, 390, 64, np.float16)),
    ],
    ids=["two heads share keys", "3 consumers", "4 slots"],
)
def test_grids_and_other_tiles(machine, tiles, case):
    """Blocks that start with the longest tile, each at its own head and rows; more tiles of keys than slots."""
    assert_attention(run(with_tiles(tiles), case, machine), case)


# -- blocks that stay --------------------------------------------------------------------------------------------------
IN_Q, APART = SpecialisedTiles(192, 112), SpecialisedTiles(128, 64)
"""O goes out by Q's place; it has places of its own."""


@pytest.mark.parametrize(
    ("tiles", "blocks", "sizes"),
    [
        (SMALL, 1, {"m": 260, "n": 200, "causal": True, "scale": -0.3}),
        (SMALL, 2, {"m": 390, "n": 150, "causal": True}),
        (SMALL, 1, {"m": 300, "n": 60, "causal": True, "scale": -0.3}),
        (SpecialisedTiles(64, 64, 3, 3), 2, {"m": 200, "n": 70, "heads": 2}),
        (IN_Q, 1, {"m": 135, "n": 60, "scale": -0.3}),
        (APART, 1, {"m": 130, "n": 100}),
        (SpecialisedTiles(192, 96), 1, {"m": 135, "n": 20}),
    ],
    ids=[
        "pairs, and middle ones alone", "rows that see nothing", "no keys, Q turned", "more than two", "O in Q's place",
        "O apart", "O apart, two panels of three",
    ],
)  # fmt: skip
def test_a_block_for_several_row_tiles(machine, tiles, blocks, sizes):
    case = normal(d=tiles.d, dtype=np.float16, **sizes)
    assert_attention(run(with_tiles(tiles, blocks=blocks), case, machine), case)


def test_how_many_blocks():
    """One for each multiprocessor; and one for each row tile where these are fewer, or uneven and O goes out by Q, or
    in pairs that 132 multiprocessors cannot share."""
    assert IN_Q.out_panels == 0 and APART.out_panels == 2 and tiles_for(128, 16384).out_panels == 1
    for tiles, causal, m, heads, blocks in (
        (APART, True, 16384, 16, 132), (APART, False, 16384, 16, 132), (IN_Q, False, 16384, 16, 132),
        (IN_Q, True, 16384, 16, 2048), (APART, False, 300, 2, 6), (APART, True, 300, 2, 6),
        (APART, True, 2048, 20, 320), (APART, False, 2048, 20, 132), (APART, True, 1024, 264, 132),
    ):  # fmt: skip
        shape = Shape("float16", 1, heads, heads, m, m, tiles.d, causal=causal, multiprocessors=132)
        assert wgmma.plan_of(shape, tiles).launches[0].grid == blocks, (tiles, causal, m, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [SMALL, SpecialisedTiles(64, 64, 3), SpecialisedTiles(128, 64, 2, 3), IN_Q], ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_blocks_that_stay_on_a_gpu(tiles, blocks):
    for m, n, causal, scale, heads in (
        (900, 700, True, -0.3, 2), (990, 150, True, 1.0, 3), (700, 490, False, 0.0, 2), (1500, 1700, True, 0.1, 4),
    ):  # fmt: skip
        case = normal(m, n, tiles.d, np.float16, heads=heads, causal=causal, scale=scale)
        first, *others = (run(with_tiles(tiles, blocks=blocks), case, "cuda") for _ in range(3))
        assert_attention(first, case)
        for other in others:
            for a, b in zip(first, other, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_many_blocks_on_a_gpu(consumers, slots):
    case = normal(400, 700, 64, np.float16, batch=3, heads=4, kv_heads=2, causal=True)
    assert_attention(run(with_tiles(SpecialisedTiles(64, 64, consumers, slots)), case, "cuda"), case)


def test_layouts_that_are_mapped(machine):
    case = normal(9, 40, 40, np.float16, heads=2)
    for which, layout in (("q", "heads inside rows"), ("k", "longer rows"), ("v", "every second row")):
        case = case.with_arrays("laid out", LAYOUTS[layout], which)
    assert case.shape.mapped
    assert_attention(run(with_tiles(SMALL), case, machine), case)


def test_repeatable_to_the_bit(machine):
    case = normal(70, 70, 64, np.float16, causal=True)
    first, *others = (
        run(with_tiles(SMALL), case, machine, seed=seed) for seed in range(2 if machine != "cuda" else 20)
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_what_wgmma_does_not_take():
    shape = Shape("float16", 1, 1, 1, 8, 8, 64)
    for wrong, words in (
        ({"element": "float32"}, "wgmma of float32 on sm_90a: .* for float16 and bfloat16 on sm_90a; use simt"),
        ({"arch": "80"}, "wgmma of float16 on sm_80: .* use mma"),
        ({"arch": "120a", "element": "bfloat16"}, "wgmma of bfloat16 on sm_120a: .* use mma"),
        ({"mapped": False}, "do not lie as the copy engine takes them: rows at multiples of 16 bytes, .*; use mma, or"),
    ):
        with pytest.raises(ValueError, match=words):
            wgmma.plan_wgmma(replace(shape, **wrong))


def maps(case) -> bool:
    """Whether the copy engine takes q, k and v, as tensor maps themselves say."""
    try:
        for which in "qkv":
            TensorMap(getattr(case, which), (1, 1, 64, 64), element="float16")
    except ValueError:
        return False
    return True


def test_what_is_mapped():
    """What a shape says of its arrays is what tensor maps take, but for one row out of odd ones."""
    plain = normal(9, 20, 40, np.float16, batch=2, heads=2)
    cases = [plain, *laid_out(plain), *(plain.with_arrays(name, LAYOUTS[name]) for name in LAYOUTS)]
    cases += [normal(9, 20, d, np.float16) for d in (1, 4, 8, 36, 44, 256)]
    cases += [normal(m, n, 64, np.float16, batch=batch) for m, n, batch in ((0, 5, 1), (5, 0, 1), (5, 5, 0))]
    for case in cases:
        assert case.shape.mapped == maps(case), case.name
    found = {case.name: case.shape.mapped for case in cases}
    assert all(found[name] for name in ("heads inside rows", "longer rows", "every second row"))
    refused = [
        "one element off",
        "rows reversed",
        "all heads one in k and v",
        "all rows one in q",
        "1 x 1/1 x 5 x 0 x 64",
    ]
    assert not any(found[name] for name in refused)
    assert plain.with_arrays(
        "one head, not moved on", lambda x: np.broadcast_to(x[:1, :1], (1, 1, *x.shape[2:]))
    ).shape.mapped
    assert not one_odd_row(1, 64).shape.mapped
    with pytest.raises(ValueError, match="do not lie as the copy engine takes them"):
        wgmma.plan_wgmma(normal(5, 0, 64, np.float16).shape)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"d": 96}, "d is 96; it must be a multiple of 64 up to 256"),
        ({"d": 320}, "d is 320"),
        ({"bn": 72}, "bn is 72; it must be a multiple of 16 from 64 to 256"),
        ({"bn": 272}, "bn is 272"),
        ({"consumers": 1}, "1 consumers and 2 slots; they must be 2 or 3, and 2 to 4"),
        ({"slots": 5}, "2 consumers and 5 slots"),
        ({"d": 256, "bn": 128}, "take 224 registers for O, S and P, and 24 the rest; a thread of 2 consumers has 232"),
        ({"d": 128, "bn": 128, "consumers": 3}, "a thread of 3 consumers has 160"),
        ({"d": 192, "bn": 128}, r"takes \d+ bytes of shared memory; a block has 232448"),
    ],
)
def test_tiles_that_do_not_fit_say_so(sizes, words):
    with pytest.raises(ValueError, match=words):
        SpecialisedTiles(**{"d": 64, "bn": 64, **sizes})


# -- planted faults ----------------------------------------------------------------------------------------------------
FAULTS = {
    "init": ("MbarrierMisuse",),
    "k_wait": ("ReadInFlight",),
    "v_wait": ("ReadInFlight",),
    "release": ("OverwriteInFlight",),
    "turn": ("BarrierMismatch",),
    "s_wait": ("AccumulatorInFlight",),
    "pv_wait": ("AccumulatorInFlight",),
    "fence": ("MissingFence",),
    "sign": ("wrong result",),
    "tail": ("wrong result",),
    "causal": ("wrong result",),
    "rescale": ("wrong result",),
    "sign_fence": ("MissingProxyFence",),
    "stride": ("wrong result",),
    "bytes": ("Deadlock",),
    "empty": ("MbarrierMisuse",),
    "full": ("MbarrierMisuse",),
    "head": ("wrong result",),
    "q_empty": ("ReadInFlight",),
    "rows": ("ReadInFlight",),
    "last_v": ("Deadlock",),
}
STAYING = ("q_empty", "rows", "last_v")
"""What only a second row tile of a block shows."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    n, heads, scale = 150, 1, -0.2 if fault.startswith("sign") else 1.0
    if fault == "head":
        n, heads = 40, 2
    m, blocks = (140, 1) if fault in STAYING else (40, 0)
    case = normal(m, n, 64, np.float16, causal=fault == "causal", scale=scale, heads=heads)
    plan = with_tiles(SMALL, fault, blocks)
    found = caught(lambda seed: run(plan, case, seed=seed), case, seeds_for(FAULTS[fault], 2))
    assert set(found) <= set(FAULTS[fault]), found


def test_every_fault_that_can_be_planted_is_tested():
    assert set(specialised.FAULTS) == set(FAULTS)
