"""Which tile size is chosen."""

from flashnumba.stages.gemm.mma import CHOICES, LARGE, MEDIUM, SMALL
from flashnumba.stages.gemm.problem import Shape
from flashnumba.stages.gemm.waves import cheapest, tiles_of


def test_large_products_take_large_tiles_and_small_ones_fill_the_gpu():
    def chosen(m, n, sms=132):
        return cheapest(Shape.packed("float16", m, n, 1024), CHOICES, sms)

    assert chosen(8192, 8192) is chosen(4096, 4096) is LARGE
    assert chosen(64, 64) is chosen(512, 512) is SMALL
    assert chosen(1408, 1536) is MEDIUM
    assert chosen(512, 512, sms=4) is LARGE


def test_tiles_cover():
    assert tiles_of(Shape.packed("float16", 129, 256, 8), LARGE) == (2, 1)
