"""The public functions of sparse attention: NumPy and kernels agree, and bad input is refused before anything runs."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from flashnumba import attention
from flashnumba.compare import assert_close
from flashnumba.data.structured import structured
from flashnumba.sparse import (
    PUBLISHED,
    Calibration,
    blasst_attention,
    block_sparse_attention,
    calibrate,
    sparge_attention,
    warp_skip_attention,
)
from flashnumba.stages.sparsity import reference as R
from flashnumba.tiles.sparse import COMPUTED, SKIPPED

Q, K, V = structured(200, 32, heads=2, kv_heads=1)
MASK = np.array([[1, 0, 1, 1], [1, 1, 0, 1]], bool)[None, None].repeat(2, 1)
CALLS = {
    "blasst": (blasst_attention, {"threshold": 0.2}),
    "warp_skip": (warp_skip_attention, {"threshold": 0.01}),
    "warp_skip, causal": (warp_skip_attention, {"threshold": 0.01, "causal": True}),
    "sparge": (sparge_attention, {"simthreshd1": 0.1, "cdfthreshd": 0.7}),
    "sparge, skipping": (sparge_attention, {"simthreshd1": 0.1, "cdfthreshd": 1.0, "pvthreshd": 3.0}),
    "block_sparse": (block_sparse_attention, {"mask": MASK}),
}

SKIPPING = ("blasst", "warp_skip", "sparge, skipping")
"""Those that leave out a tile whose scores they have; of the causal one each tile that a warp sees is needed."""


@pytest.mark.parametrize("name", CALLS)
def test_numpy_and_kernels_agree(name):
    function, options = CALLS[name]
    by_numpy, of_numpy = function(Q, K, V, **options, return_info=True, backend="numpy")
    o, info = function(Q, K, V, **options, return_info=True, backend="emulator")
    kept = R.expand(of_numpy.tile_map == COMPUTED, *of_numpy.tile, 200, 200)
    causal = options.get("causal", False)
    seen = ~np.isneginf(R.scores(Q, K, causal=causal))
    kept &= seen
    summed = seen if "warp_skip" in name else kept
    exact = R.attend(R.scores(Q, K, causal=causal), V, kept, summed)[0]
    low = R.low_precision(Q, K, V, kept, summed)[0]
    np.testing.assert_array_equal(by_numpy, exact.astype(np.float16))
    assert_close(o, exact, low, what=name)
    assert info.computed() > 0
    assert info.tile == of_numpy.tile and (info.skipped() > 0) == (name in SKIPPING)
    np.testing.assert_array_equal(info.tile_map, of_numpy.tile_map)
    if name == "sparge":
        np.testing.assert_array_equal(info.mask, of_numpy.mask)
        assert info.mask.sum() < info.mask.size
    if name == "block_sparse":
        options = {"mask": MASK[:, :1]}
    plain = function(Q[:, :1], K, V, **options, backend="emulator")
    np.testing.assert_array_equal(plain, o[:, :1], err_msg="whether a map is made changes no bit")


def test_blasst_of_rows_that_the_copy_engine_does_not_take():
    """Tiles are then those of mma, which NumPy has too."""
    q, k, v = Q[:, ::-1], K, V
    results = [blasst_attention(q, k, v, threshold=0.2, return_info=True, backend=b) for b in ("numpy", "emulator")]
    (exact, of_numpy), (o, info) = results
    assert info.tile == of_numpy.tile == (128, 64) and info.skipped() > 0
    np.testing.assert_array_equal(info.tile_map, of_numpy.tile_map)
    np.testing.assert_allclose(o.astype(np.float32), exact.astype(np.float32), atol=4e-3)


def test_decoding_and_no_threshold():
    o, info = blasst_attention(Q[:, :, -3:], K, V, threshold=0.02, return_info=True, backend="emulator")
    assert info.tile == (16, 32) and info.tile_map.shape == (1, 1, 1, 7)
    dense = attention(Q[:, :, -3:], K, V, backend="numpy")
    assert np.abs(o.astype(float) - dense).max() < 200 * 0.02
    q, k, v = structured(40, 96, heads=1)
    exact = blasst_attention(q, k, v, threshold=0.0, backend="emulator")
    np.testing.assert_array_equal(exact, attention(q, k, v, backend="flash_forward.mma"))


def test_what_kernels_are_told(monkeypatch):
    """Thresholds, budgets and switches on their way to a launch; the calibration is that of what is launched."""
    told = []
    monkeypatch.setattr("flashnumba.stages.sparsity.problem.run", lambda _, __, given: told.append(given) or {})
    sparge_attention(Q, K, V, pvthreshd=3.0, simthreshd1=0.2, topk=0.5, attention_sink=True, backend="emulator")
    assert told.pop() == {"limit": -3.0, "alike": 0.2, "kept": 2, "sink": True}
    sparge_attention(Q, K, V, cdfthreshd=0.7, backend="emulator")
    assert told.pop() == {"limit": -np.inf, "alike": 0.6, "kept": 0.7, "sink": False}
    for rows, name in ((200, "prefill"), (3, "decode")):
        blasst_attention(Q[:, :, -rows:], K, V, target_sparsity=0.1, backend="emulator")
        assert told.pop() == {"limit": np.log2(PUBLISHED[name].threshold(0.1, 200))}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "function, rows, options",
    [
        (blasst_attention, 2, {"threshold": 0.02}),
        (warp_skip_attention, 700, {"threshold": 0.01, "causal": True}),
        (sparge_attention, 700, {"simthreshd1": 0.1, "cdfthreshd": 0.7, "pvthreshd": 3.0}),
    ],
)
def test_what_is_left_out_in_a_graph(cuda_torch, function, rows, options):
    """A capture refuses what waits for the host; a map that is made in it says what each replay left out."""
    torch = cuda_torch
    runs, maps = [], []
    for seed in range(3):
        qkv = structured(1000, 64, heads=4, kv_heads=2, seed=seed)
        runs.append([torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in (qkv[0][:, :, -rows:], *qkv[1:])])
    given = [x.clone() for x in runs[0]]
    function(*given, **options, return_info=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, info = function(*given, **options, return_info=True)
    for run in runs[1:]:
        for to, x in zip(given, run, strict=True):
            to.copy_(x)
        graph.replay()
        same, anew = function(*run, **options, return_info=True)
        assert torch.equal(o, same) and torch.equal(info.tile_map, anew.tile_map)
        assert (info.mask is None) == (anew.mask is None) and (info.mask is None or torch.equal(info.mask, anew.mask))
        maps.append(info.tile_map.clone())
    assert all((x == SKIPPED).any() for x in maps) and not torch.equal(*maps), "each replay leaves out its own"


def test_leading_axes_and_nothing():
    few = blasst_attention(Q[0, 0, :5], K[0, 0], V[0, 0], threshold=0.0, backend="numpy")
    assert few.shape == (5, 32)
    o, info = warp_skip_attention(Q, K[:, :, :0], V[:, :, :0], threshold=0.5, return_info=True, backend="emulator")
    assert (o == 0).all() and info.computed() == 0 and info.skipped() == 0 and info.tile_map.shape == (1, 2, 7, 0)
    assert block_sparse_attention(Q[0], K[0], V[0], mask=MASK[0], backend="numpy").shape == (2, 200, 32)
    nobody = np.zeros((1, 0, 4, 32), np.float16)
    for backend in ("numpy", "emulator"):
        o, info = blasst_attention(nobody, nobody, nobody, threshold=0.1, return_info=True, backend=backend)
        assert o.shape == nobody.shape and info.computed() == 0
    for (m, n), backend in product([(0, 200), (200, 0)], ("numpy", "emulator")):
        o, info = sparge_attention(Q[:, :, :m], K[:, :, :n], V[:, :, :n], return_info=True, backend=backend)
        assert o.shape == (1, 2, m, 32) and (o == 0).all() and info.mask.shape == (1, 2, -(-m // 128), -(-n // 64))


def test_what_is_no_number_by_numpy():
    """A key that is NaN is not below any threshold; what the mask leaves out is not read."""
    k, v = K.copy(), V.copy()
    k[:, :, 150] = v[:, :, 64:128] = np.nan
    with np.errstate(invalid="ignore"):
        assert np.isnan(blasst_attention(Q, k, V, threshold=0.01, backend="numpy")).all()
    mask = np.ones((1, 2, 2, 4), bool)
    mask[..., 1] = False
    assert np.isfinite(block_sparse_attention(Q, K, v, mask=mask, backend="numpy")).all()
    mask[:, :, 1, 1] = True
    for backend in ("numpy", "emulator"):
        o = block_sparse_attention(Q, K, v, mask=mask, backend=backend)
        assert np.isfinite(o[:, :, :128]).all() and np.isnan(o[:, :, 128:]).all(), "only who lists it reads it"


def test_calibration_goes_through_its_points():
    made = Calibration(7.92, 8.615)
    assert made.threshold(0.5, 65536) == pytest.approx(587.18 / 65536, rel=0.01), "as published"
    assert made.threshold(0.0, 10) == 0.0 and made.threshold(0.99, 1) < 1
    q, k, v = structured(1024, 32, heads=4)
    fitted = calibrate([(q, k, v)], trials=(0.01, 0.05, 0.2, 0.5), causal=False, backend="numpy")
    _, info = blasst_attention(q, k, v, target_sparsity=0.3, calibration=fitted, return_info=True, backend="numpy")
    assert 0.2 < info.skipped() < 0.4, "four heads and one length are few samples"
    with pytest.raises(ValueError, match="a line takes two that differ"):
        calibrate([(q[:, :, :64], k[:, :, :64], v[:, :, :64])], backend="numpy")


def test_no_calibration_that_goes_down(monkeypatch):
    """Numbers that no threshold comes of, and data where a greater threshold left out less."""
    for alpha, beta in ((0.0, 1.0), (np.nan, 1.0), (1.0, np.inf), (1.0, -0.1)):
        with pytest.raises(ValueError, match=f"alpha is {alpha}"):
            Calibration(alpha, beta)
    assert Calibration(1e308, 1e3).threshold(0.9, 7) < 1, "what overflows is the greatest threshold"
    for shares, words in (((0.8, 0.3), "it must rise"), ((0.5, 0.5 + 1e-9), "a line takes two that differ")):
        found = iter(shares)
        info = SimpleNamespace(skipped=lambda found=found: next(found))
        monkeypatch.setattr("flashnumba.sparse.methods.blasst_attention", lambda *_, info=info, **__: (None, info))
        with pytest.raises(ValueError, match=words):
            calibrate([(Q, K, V)], trials=(0.1, 0.2))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: blasst_attention(Q, K, V), ValueError, "give one of the two"),
        (lambda: blasst_attention(Q, K, V, threshold=1.0), ValueError, "threshold is 1.0"),
        (lambda: blasst_attention(Q, K, V, threshold="a"), TypeError, "threshold is 'a'"),
        (lambda: blasst_attention(Q, K, V, target_sparsity=1.0), ValueError, "target_sparsity is 1.0"),
        (lambda: blasst_attention(Q, K, V, target_sparsity=0.5, calibration=5), TypeError, "calibration is 5"),
        (lambda: blasst_attention(Q, K, V, threshold=10**400), TypeError, "threshold is 1000"),
        (lambda: blasst_attention(Q, K, V, threshold=0.1, backend="gpu"), ValueError, "backend is 'gpu'"),
        (lambda: blasst_attention(Q, K, V, threshold=0.1, return_info=1), TypeError, "return_info is 1"),
        (lambda: warp_skip_attention(*(x.astype(np.float32) for x in (Q, K, V)), threshold=0.1), ValueError, "float32"),
        (lambda: warp_skip_attention(Q, K, V, threshold=0.1, keep_sum=0), TypeError, "keep_sum is 0"),
        (lambda: sparge_attention(Q, K, V, cdfthreshd=1.5), ValueError, "cdfthreshd is 1.5"),
        (lambda: sparge_attention(Q, K, V, pvthreshd=1e-20), ValueError, "pvthreshd is 1e-20"),
        (lambda: sparge_attention(Q, K, V, pvthreshd=-2000), ValueError, "pvthreshd is -2000"),
        (lambda: sparge_attention(Q, K, V, topk=2.0), ValueError, "topk is 2.0"),
        (lambda: sparge_attention(Q, K, V, block_m=100), ValueError, "block_m is 100"),
        (lambda: block_sparse_attention(Q, K, V, mask=MASK[:, :1]), ValueError, "mask has shape"),
        (lambda: block_sparse_attention(Q, K, V, mask=MASK.astype(np.int32)), TypeError, "bool or uint8"),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
