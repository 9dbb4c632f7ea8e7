"""``for i in range(...)`` as one plain loop, so that every NVVM unrolls it.

Numba steps a range inside a branch of its own ("if there is a next value, take it"), which makes each loop header two
blocks. The NVVM that serves sm_75 to sm_90 folds them. The newer one that serves sm_100 and sm_120 does not when loops
are nested: such loops stay rolled, indices into register arrays stay variable, and the arrays move to local memory
(a FlashAttention-2 style kernel: 768 bytes a thread, and 144 of its 256 ``mma``). Stepping without the branch gives a
header of one block; the loops then unroll on all of them, and code for the older ones is the same as before.

After the last value the counter goes on below zero and the value one step further; nothing reads them any more.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["install"]

_LOCK = threading.Lock()
_installed: list[Any] = []


def install() -> None:
    """Give Numba's CUDA target this stepping of ranges, once a process; a later registration takes precedence there."""
    with _LOCK:
        if _installed:
            return
        from numba.cuda.descriptor import cuda_target

        cuda_target.target_context.refresh()  # its own ranges come first
        registry = _registry()
        cuda_target.target_context.install_registry(registry)
        _installed.append(registry)


def _registry() -> Any:
    from numba.cuda import cgutils, types
    from numba.cuda.core.imputils import RefType, Registry, iternext_impl

    registry = Registry("flashnumba ranges")

    def lower(iterator: Any, integer: Any) -> None:
        @registry.lower("iternext", iterator)
        @iternext_impl(RefType.BORROWED)
        def step(context: Any, builder: Any, sig: Any, args: Any, result: Any) -> None:
            state = cgutils.create_struct_proxy(iterator)(context, builder, args[0])
            count, value = builder.load(state.count), builder.load(state.iter)
            result.set_valid(builder.icmp_signed(">", count, context.get_constant(integer, 0)))
            result.yield_(value)
            builder.store(builder.sub(count, context.get_constant(integer, 1)), state.count)
            builder.store(builder.add(value, state.step), state.iter)

    lower(types.range_iter32_type, types.int32)
    lower(types.range_iter64_type, types.int64)
    lower(types.unsigned_range_iter64_type, types.uint64)
    return registry
