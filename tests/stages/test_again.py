"""Launches looked up on a second call: the same results, the same refusals."""

from types import SimpleNamespace

import numpy as np
import pytest

from flashnumba.stages import again
from flashnumba.stages.again import Recipes, _reach, rows_key
from flashnumba.stages.online_softmax import simt
from flashnumba.stages.softmax import simt as three_passes
from tests.machine.fakes import Tensor


def test_what_is_looked_at_each_time():
    x = np.zeros((2, 4), np.float32)
    assert rows_key(x, None, "auto", "auto", None) is None
    torch = pytest.importorskip("torch")
    assert rows_key(torch.zeros(2, 4), None, "auto", "auto", None) is None


def test_what_a_key_holds(fake_torch):
    def tensor(pointer=4096, dtype="torch.float32", shape=(2, 4), stride=(4, 1), device=0):
        return Tensor(pointer, dtype, shape, stride, device)

    def key(x, out=None, kernel="auto", machine="auto", stream=None):
        return rows_key(x, out, kernel, machine, stream)

    known = key(tensor())
    assert hash(known) is not None
    assert key(tensor(4096 + 16 * 5)) == known, "only the alignment of an address counts"
    others = [tensor(4096 + 4), tensor(dtype="torch.float16"), tensor(shape=(4, 2)), tensor(stride=(8, 1)),
              tensor(device=1)]  # fmt: skip
    keys = [known, *map(key, others), key(tensor(), kernel="split"), key(tensor(), machine="cuda"),
            key(tensor(), tensor()), key(tensor(), tensor(8192)), key(tensor(), tensor(8196))]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key(tensor(), tensor(4096 + 16)) is None, "overlap is refused each time"
    asks = tensor()
    asks.requires_grad = True
    assert key(asks) is None and key(tensor(), asks) is None
    assert key(tensor(), stream=7) is None and key(tensor(), machine="emulator") is None
    assert key(tensor(), kernel=None) is None and key(tensor(), np.zeros(3)) is None


def test_recipes_are_kept_by_key(monkeypatch):
    known = Recipes()
    known.add(None, "a recipe")
    known.add("kind", None)
    assert known.get(None) is None and known.get("kind") is None
    monkeypatch.setattr(Recipes, "capacity", 2)
    for i in range(3):
        known.add(i, f"recipe {i}")
    assert [known.get(i) for i in range(3)] == [None, None, "recipe 2"]


# -- on a stand-in for a GPU -------------------------------------------------------------------------------------------
@pytest.fixture
def no_second_look(monkeypatch):
    """After ``no_second_look()`` a call that describes or plans anew fails."""

    def armed():
        for module in (simt, three_passes):
            monkeypatch.setattr(module, "prepare_rows", lambda *args: pytest.fail("looked a second time"))

    for module in (simt, three_passes):
        monkeypatch.setattr(module, "RECIPES", again.Recipes())
    return armed


@pytest.mark.parametrize(
    ("shape", "stride"), [((5, 64), (64, 1)), ((2, 3, 100), (300, 100, 1)), ((7,), (1,)), ((4, 40), (200, 3))]
)
@pytest.mark.parametrize("given", ["", "out", "x"])
def test_a_second_launch_differs_in_addresses_alone(fake_gpu, fake_torch, no_second_look, shape, stride, given):
    launched = []
    for pointer in (0x4000, 0x8000):
        x = Tensor(pointer, "torch.float16", shape, stride)
        out = {"": None, "out": Tensor(pointer + 0x1000, "torch.float16", shape), "x": x}[given]
        got = three_passes.softmax(x, out)
        assert (got.shape, got.dtype) == (shape, "torch.float16")
        assert got is out if given else got is fake_torch.made[-1]
        (function, *how, values) = fake_gpu.launches.pop()
        assert (values[4], values[9 + 4]) == (pointer, got.data_ptr())
        assert how[-1] == 1000, "the current stream"
        launched.append((function, how, values[:4], values[5:9], values[9:13], values[14:]))
        no_second_look()
    assert launched[0] == launched[1]


def test_scratch_is_zeroed_each_time(fake_gpu, fake_torch, no_second_look):
    x = Tensor(0x4000, "torch.float32", (2, 300_000))
    for _ in range(3):
        before = len(fake_torch.zeroed)
        out = simt.softmax(x, kernel="split")
        (*_, values) = fake_gpu.launches.pop()
        words = {zeros.data_ptr(): zeros for zeros in fake_torch.zeroed[before:]}
        assert (values[4], values[9 + 4]) == (0x4000, out.data_ptr())
        assert words[values[18 + 4]].shape == (values[23],)
        no_second_look()


def test_another_kind_is_looked_at_anew(fake_gpu, fake_torch, no_second_look):
    three_passes.softmax(Tensor(0x4000, "torch.float16", (5, 64)))
    no_second_look()
    for other in (Tensor(0x4002, "torch.float16", (5, 64)), Tensor(0x4000, "torch.float16", (5, 63))):
        with pytest.raises(pytest.fail.Exception, match="looked a second time"):
            three_passes.softmax(other)


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
