"""What only a GPU shows: large products, more than 2^31 elements, CUDA graphs, streams, second calls."""

import pytest

from flashnumba.stages.gemm import matmul as host
from flashnumba.stages.gemm import mma, simt, wgmma
from flashnumba.stages.gemm.matmul import KERNELS, matmul
from flashnumba.stages.gemm.problem import Shape

pytestmark = pytest.mark.gpu
FLOAT32 = tuple(simt.PLANS)


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is a CPU build")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def operands(torch, m, n, k, dtype, majors="kn"):
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    return (a if majors[0] == "k" else a.t().contiguous().t()), (b if majors[1] == "n" else b.t().contiguous().t())


def assert_product(torch, out, a, b):
    """Within twice the error of one rounding of the result and float32 sums, as the comparator has it."""
    exact = a.double() @ b.double()
    kind = torch.finfo(out.dtype)
    sums = a.abs().double() @ b.abs().double()
    allowed = kind.eps * exact.abs() + 2 * torch.finfo(torch.float32).eps * a.shape[1] ** 0.5 * sums
    assert ((out.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("majors", ["kn", "kk", "mn", "mk"])
@pytest.mark.parametrize("size", [(1024, 1024, 1024), (1000, 904, 520), (777, 1025, 333)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_products(torch, kernel, size, majors):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a, b = operands(torch, *size, dtype, majors)
        if (dtype == torch.float32 and kernel not in FLOAT32) or (kernel == "wgmma" and size[0] == 777):
            with pytest.raises(ValueError, match=kernel):
                matmul(a, b, kernel=kernel)
        else:
            assert_product(torch, matmul(a, b, kernel=kernel), a, b)


@pytest.mark.parametrize("element", ["float32", "float16"])
@pytest.mark.parametrize("size", [(512, 768, 256), (511, 765, 257)], ids=str)
def test_every_variant(torch, element, size):
    from flashnumba.machine import gpu, launcher

    dtype = getattr(torch, element)
    a, b = operands(torch, *size, dtype)
    shape = Shape.packed(element, *size, arch=gpu.device_arch())
    makers = [simt.variants] if element == "float32" else [simt.variants, mma.variants]
    makers += [wgmma.variants] if element == "float16" and host.takes("wgmma", shape) else []
    for make in makers:
        for name, plan in make(shape).items():
            out = torch.full((size[0], size[1]), float("nan"), device="cuda", dtype=dtype)
            launcher.launch(plan.kernel, plan.grid, plan.threads, plan.arguments(a, b, out), shared=plan.shared)
            assert torch.isfinite(out).all(), name
            assert_product(torch, out, a, b)


@pytest.mark.parametrize("kernel", ["register_tile", "mma", "wgmma"])
def test_more_than_2_to_the_31_elements(torch, kernel):
    """Offsets beyond 32 bits in A and in C, whose rows are picked out and compared."""
    m, n, k = 2**31 // 2048 + 129, 2056, 2048
    if torch.cuda.mem_get_info()[0] < 5 * m * n:
        pytest.skip("not enough memory on the GPU")
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    out = matmul(a, b, kernel=kernel)
    picked = torch.tensor([0, 127, m // 2, 2**30 // k, m - 130, m - 1], device="cuda")
    assert_product(torch, out[picked], a[picked], b)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_graph_capture(torch, kernel):
    a, b = operands(torch, 256, 320, 128, torch.float16)
    out = torch.empty(256, 320, device="cuda", dtype=torch.float16)
    matmul(a, b, out, kernel=kernel)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(a, b, out, kernel=kernel)
    for scale in (1, 2):
        a.mul_(scale)
        out.fill_(float("nan"))
        graph.replay()
        assert_product(torch, out, a, b)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_stream_of_ones_own(torch, kernel):
    a, b = operands(torch, 256, 320, 128, torch.float16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    out = matmul(a, b[:, ::2], kernel=kernel, stream=stream)  # copies B on that stream
    stream.synchronize()
    assert_product(torch, out, a, b[:, ::2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_bitwise_repeatable(torch, kernel):
    a, b = operands(torch, 1000, 904, 520, torch.float16)
    first = matmul(a, b, kernel=kernel)
    for _ in range(10):
        assert torch.equal(matmul(a, b, kernel=kernel), first)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_second_call_is_looked_up_and_right(torch, dtype):
    host.RECIPES.known.clear()
    for round_ in range(3):
        a, b = operands(torch, 256, 320, 128, getattr(torch, dtype))
        out = matmul(a, b)
        assert_product(torch, out, a, b)
        assert len(host.RECIPES.known) == 1, round_
    assert_product(torch, matmul(a[1:], b), a[1:], b)
    assert_product(torch, matmul(a[:, ::2], b[::2]), a[:, ::2], b[::2])  # copied: not kept
    assert len(host.RECIPES.known) == 2
    with pytest.raises(ValueError, match="b requires a gradient"):
        matmul(a, b.requires_grad_())


def test_empty_sums(torch):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        a, b = torch.zeros(5, 0, device="cuda", dtype=dtype), torch.zeros(0, 7, device="cuda", dtype=dtype)
        assert (matmul(a, b) == 0).all()
        assert matmul(a, b).shape == (5, 7)
