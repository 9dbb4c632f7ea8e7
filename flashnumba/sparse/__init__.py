"""Attention that leaves out tiles of keys: by threshold, by prediction, by a mask of your own, or SLA.

>>> import numpy as np
>>> from flashnumba.data.structured import structured
>>> from flashnumba.sparse import blasst_attention
>>> q, k, v = structured(512, 32, heads=1)
>>> o, info = blasst_attention(q, k, v, threshold=0.01, return_info=True, backend="numpy")
>>> o.shape, info.tile_map.shape, info.skipped() > 0
((1, 1, 512, 32), (1, 1, 4, 8), True)

What the methods are and what they cost is told in :mod:`flashnumba.stages.sparsity.reference`. Nothing heavy is
imported before the first call.
"""

from flashnumba.sparse.calibration import PUBLISHED, Calibration, calibrate
from flashnumba.sparse.methods import (
    blasst_attention,
    block_sparse_attention,
    sparge_attention,
    warp_skip_attention,
)
from flashnumba.sparse.running import BACKENDS, SparseInfo
from flashnumba.sparse.sla import SlaInfo, sla_attention, sla_attention_backward

__all__ = ["BACKENDS", "PUBLISHED", "Calibration", "SlaInfo", "SparseInfo", "blasst_attention",
           "block_sparse_attention", "calibrate", "sla_attention", "sla_attention_backward", "sparge_attention",
           "warp_skip_attention"]  # fmt: skip
