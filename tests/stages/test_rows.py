"""Arrays seen as rows: what needs no copy, how wide loads may be, what overlaps."""

import numpy as np
import pytest

from flashnumba.machine.arrays import describe
from flashnumba.stages import rows
from flashnumba.stages.host import overlaps_itself
from flashnumba.stages.softmax.simt import softmax


def collapsed(array):
    return rows._collapsed(describe(array))


def test_leading_axes_at_one_distance_are_one_axis():
    x = np.zeros((2, 3, 5, 8), np.float32)
    assert collapsed(x) == (32, 4)
    assert collapsed(x[..., :5]) == (32, 4)
    assert collapsed(x[:, :, ::-1][:, :, ::-1]) == (32, 4)
    assert collapsed(x[:, 0]) is None, "5 rows, then a gap"
    assert collapsed(x[:, :, 0]) == (160, 4)
    assert collapsed(x[:1, :1, :, 0]) == (0, 32)
    assert collapsed(x.transpose(0, 2, 1, 3)) is None
    assert collapsed(x[::-1]) is None
    assert collapsed(x[0, 0, ::-1]) == (-32, 4)
    assert collapsed(np.broadcast_to(x[0, 0, 0], (7, 6, 8))) == (0, 4)
    assert collapsed(x[0, 0, 0]) == (0, 4)


@pytest.mark.parametrize(
    ("start", "cols", "row", "expected"),
    [(0, 8, 8, 16), (4, 8, 8, 16), (1, 8, 8, 4), (2, 8, 8, 8), (0, 6, 8, 8), (0, 8, 10, 8), (0, 7, 8, 4), (0, 8, 9, 4)],
)
def test_the_widest_load(start, cols, row, expected):
    buffer = np.zeros(256, np.float32)
    buffer = buffer[(-buffer.ctypes.data % 64) // 4 :]
    x = np.lib.stride_tricks.as_strided(buffer[start:], (3, cols), (4 * row, 4))
    out = np.lib.stride_tricks.as_strided(buffer[128:], (3, cols), (4 * cols, 4))
    views = [(describe(a), rows._collapsed(describe(a))) for a in (x, out)]
    assert rows.widest(*views[0], *views[1], 3, cols) == min(expected, rows.widest(*views[1], *views[1], 3, cols))
    if row != cols:
        assert rows.widest(*views[0], *views[0], 1, cols) >= expected, "one row has no next one"
    turned = describe(x.T)
    assert rows.widest(turned, rows._collapsed(turned), *views[1], cols, 3) == 4


def test_overlap():
    wide = np.zeros((4, 16), np.float32)
    apart = wide[:, :8], wide[:, 8:]
    assert not rows._overlap(*map(describe, apart))
    assert not rows._overlap(*map(describe, apart[::-1]))
    assert rows._overlap(describe(wide[:, :8]), describe(wide[:, 7:15]))
    assert rows._overlap(describe(wide[:3]), describe(wide[1:]))
    assert not rows._overlap(describe(wide[:2]), describe(wide[2:]))
    assert not rows._overlap(describe(wide[::2]), describe(wide[1::2]))
    assert rows._overlap(describe(wide[:4, :4]), describe(wide[:4, :4].T))


def test_an_output_that_overlaps_itself():
    out = np.lib.stride_tricks.as_strided(np.zeros(200, np.float32), (4, 40), (4, 4))
    with pytest.raises(ValueError, match="several elements lie in one place"):
        rows.prepare_rows(np.zeros((4, 40), np.float32), out, "auto", ("a",), "emulator", None)
    assert not overlaps_itself(describe(np.zeros((3, 5), np.float32).T[::-1]))


@pytest.mark.parametrize("rows_of_x", [0, 2])
def test_an_output_that_is_given_is_returned(rows_of_x):
    jax = pytest.importorskip("jax")
    out = np.zeros((rows_of_x, 3), np.float32)
    assert softmax(jax.numpy.zeros((rows_of_x, 3)), out, machine="emulator") is out


def test_masked_arrays_are_refused():
    with pytest.raises(TypeError, match="x is a masked array"):
        rows.prepare_rows(np.ma.zeros((2, 3), dtype=np.float32), None, "auto", ("a",), "emulator", None)


def test_a_gradient_is_not_dropped_silently():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="x requires a gradient, and this function records none"):
        rows.prepare_rows(x, None, "auto", ("a",), "emulator", None)
    with torch.no_grad():
        rows.prepare_rows(x, None, "auto", ("a",), "emulator", None)


def test_a_tangent_is_not_dropped_silently():
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    x = torch.ones(2, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(
            ValueError, match=r"x has a tangent.*pass torch\.autograd\.forward_ad\.unpack_dual\(x\)\.primal"
        ):
            rows.prepare_rows(dual, None, "auto", ("a",), "emulator", None)
        rows.prepare_rows(forward_ad.unpack_dual(dual).primal, None, "auto", ("a",), "emulator", None)
    rows.prepare_rows(dual, None, "auto", ("a",), "emulator", None)


def test_names_that_are_no_strings():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"kernel is array\(\[1, 2\]\); it must be 'auto' or one of a"):
        rows.prepare_rows(x, None, np.array([1, 2]), ("a",), "emulator", None)
    with pytest.raises(ValueError, match=r"machine is array\(\[1, 2\]\); it must be one of"):
        rows.prepare_rows(x, None, "auto", ("a",), np.array([1, 2]), None)


def test_what_dlpack_cannot_carry():
    class Exporter:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            raise BufferError("no")

    with pytest.raises(TypeError, match="x is a Exporter that NumPy cannot take through DLPack"):
        describe(Exporter(), "x")
