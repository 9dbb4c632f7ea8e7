"""Launches looked up on a second call: the same results, the same refusals."""

from types import SimpleNamespace

import numpy as np
import pytest

from flashnumba.stages.again import Recipes, _reach
from flashnumba.stages.online_softmax import simt


def test_what_is_looked_at_each_time():
    x = np.zeros((2, 4), np.float32)
    assert Recipes.key(x, None, "auto", "auto", None) is None
    torch = pytest.importorskip("torch")
    assert Recipes.key(torch.zeros(2, 4), None, "auto", "auto", None) is None


def test_reach():
    def tensor(shape, strides):
        return SimpleNamespace(
            shape=shape, stride=lambda: strides, numel=lambda: int(np.prod(shape)), element_size=lambda: 2
        )

    assert _reach(tensor((3, 4), (10, 1))) == 2 * (2 * 10 + 3 + 1)
    assert _reach(tensor((3, 4), (0, 1))) == 8
    assert _reach(tensor((0, 4), (4, 1))) == 0


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["auto", "two_pass", "split"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 100), (7,), (4, 40_000)])
def test_again_and_again(torch, kernel, shape):
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(*shape, device="cuda", dtype=torch.float16)
        out = torch.full_like(x, float("nan"))
        expected = torch.softmax(x.float(), -1).half()
        torch.testing.assert_close(simt.softmax(x, kernel=kernel), expected)
        assert simt.softmax(x, out, kernel=kernel) is out
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(simt.softmax(x, x, kernel=kernel), expected)


@pytest.mark.gpu
def test_other_places_and_layouts(torch):
    wide = torch.randn(6, 129, device="cuda")
    for x in (wide[:, :128], wide[:, 1:], wide[:, :128].t(), wide[:, :128], wide[::2, 1:]):
        torch.testing.assert_close(simt.softmax(x), torch.softmax(x, -1))


@pytest.mark.gpu
def test_overlap_is_refused_again(torch):
    x = torch.randn(4, 64, device="cuda")
    out = torch.empty_like(x)
    simt.softmax(x, out)
    line = torch.randn(5 * 64, device="cuda")
    with pytest.raises(ValueError, match="out overlaps x in part"):
        simt.softmax(line[: 4 * 64].view(4, 64), line[64:].view(4, 64))
