"""What only a GPU shows: tensors of more than 2^31 elements, CUDA graphs, streams other than the current one."""

import pytest

from flashnumba.stages.online_softmax import simt as online
from flashnumba.stages.softmax import simt as three_pass

pytestmark = pytest.mark.gpu
EVERY = [(stage, kernel) for stage in (three_pass, online) for kernel in stage.KERNELS]


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    return torch


@pytest.mark.parametrize(
    ("stage", "kernel"), EVERY, ids=lambda v: v if isinstance(v, str) else v.__name__.split(".")[-2]
)
@pytest.mark.parametrize("cols", [64, 65_536])
def test_more_than_2_to_the_31_elements(torch, stage, kernel, cols):
    rows = 2**31 // cols + 3
    if torch.cuda.mem_get_info()[0] < 2.2 * rows * cols:
        pytest.skip("not enough memory on the GPU")
    x = torch.randn(rows, cols, device="cuda", dtype=torch.float16)
    picked = torch.tensor([0, 1, rows // 2, 2**30 // cols, rows - 2, rows - 1], device="cuda")
    expected = torch.softmax(x[picked].float(), -1).half()
    assert stage.softmax(x, x, kernel=kernel) is x
    torch.testing.assert_close(x[picked], expected)
    # Every row was written: softmax's rows add up to one, those of the input do not.
    for part in x.split(1 << 24 if cols == 64 else 1 << 14):
        assert ((part.sum(-1, dtype=torch.float32) - 1).abs() < 0.02).all()


@pytest.mark.parametrize("kernel", online.KERNELS)
def test_graph_capture(torch, kernel):
    x = torch.randn(8, 20_000, device="cuda", dtype=torch.float16)
    out = torch.empty_like(x)
    online.softmax(x, out, kernel=kernel)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        online.softmax(x, out, kernel=kernel)
    for scale in (1, 2):
        x.mul_(scale)
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, torch.softmax(x.float(), -1).half())


@pytest.mark.parametrize("kernel", online.KERNELS)
def test_a_stream_of_ones_own(torch, kernel):
    x = torch.randn(8, 20_000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = online.softmax(x, kernel=kernel, stream=stream)
    stream.synchronize()
    torch.testing.assert_close(out, torch.softmax(x, -1))


@pytest.mark.parametrize("kernel", online.KERNELS)
def test_bitwise_repeatable(torch, kernel):
    x = torch.randn(300, 30_000, device="cuda")
    first = online.softmax(x, kernel=kernel)
    for _ in range(10):
        assert torch.equal(online.softmax(x, kernel=kernel), first)
