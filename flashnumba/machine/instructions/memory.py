"""Loads and stores by address: 16 to 128 bits a thread, with hints on what the caches should keep.

A kernel asks an array for its address once and counts bytes from there::

    base = global_address(x)                    # 64-bit
    ld_global_v4(frag, 0, base + uint64(16 * i))
    tile = shared_address(smem)                 # 32-bit
    st_shared_v4(tile + uint32(16 * i), frag, 0)

An address is a multiple of the access's size: 16 bytes for ``v4``, 8 for ``v2``. 16 bytes a thread is the widest access
there is; a warp then moves 512 bytes with one instruction. ::

    name                     what the caches do
    ld_global_*              keep the line in L1 and L2
    ld_global_nc_*           as above, through the read-only path: the data must not change while the kernel runs
    ld_global_once_*         read-only, read once: L1 keeps nothing, L2 fetches 128 bytes
    st_global_*              write to L2
    st_global_once_*         L1 keeps nothing
    st_global_stream_*       as above, and L2 evicts the line first (.cs)

``b16``, ``b32`` and ``f32`` forms move one register, ``v2`` and ``v4`` two and four of 32 bits into or out of a local
array, uint32, or float32 in the forms with ``_f32``.

Source: PTX ISA, "Data movement and conversion instructions: ld, ld.global.nc, st"; "Cache operators".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnumba.machine.instruction import Fragment, Instruction, Scalar, instruction

__all__ = [
    "global_address",
    "ld_global_b16",
    "ld_global_b32",
    "ld_global_f32",
    "ld_global_nc_b16",
    "ld_global_nc_b32",
    "ld_global_nc_f32",
    "ld_global_nc_v2",
    "ld_global_nc_v2_f32",
    "ld_global_nc_v4",
    "ld_global_nc_v4_f32",
    "ld_global_once_b16",
    "ld_global_once_b32",
    "ld_global_once_f32",
    "ld_global_once_v2",
    "ld_global_once_v2_f32",
    "ld_global_once_v4",
    "ld_global_once_v4_f32",
    "ld_global_v2",
    "ld_global_v2_f32",
    "ld_global_v4",
    "ld_global_v4_f32",
    "ld_shared_b16",
    "ld_shared_b32",
    "ld_shared_f32",
    "ld_shared_v2",
    "ld_shared_v2_f32",
    "ld_shared_v4",
    "ld_shared_v4_f32",
    "shared_address",
    "st_global_b16",
    "st_global_b32",
    "st_global_f32",
    "st_global_once_v2",
    "st_global_once_v2_f32",
    "st_global_once_v4",
    "st_global_once_v4_f32",
    "st_global_stream_v2",
    "st_global_stream_v2_f32",
    "st_global_stream_v4",
    "st_global_stream_v4_f32",
    "st_global_v2",
    "st_global_v2_f32",
    "st_global_v4",
    "st_global_v4_f32",
    "st_shared_b16",
    "st_shared_b32",
    "st_shared_f32",
    "st_shared_v2",
    "st_shared_v2_f32",
    "st_shared_v4",
    "st_shared_v4_f32",
]

_ADDRESS = {"global": "u64", "shared": "u32"}
_NUMPY = {"u16": np.uint16, "u32": np.uint32, "f32": np.float32}
# word of the name -> (PTX after ld.global, after st.global, what it says in the documentation)
_CACHE = {
    "nc": (".nc", None, " through the read-only path"),
    "once": (".nc.L1::no_allocate.L2::128B", ".L1::no_allocate", " past L1"),
    "stream": (None, ".cs", ", to be evicted first"),
}


def _parsed(name: str) -> tuple[str, str, str, int, str, str]:
    """(space, cache word, register type, registers, PTX suffix, width in words) of a name like ld_global_nc_v4_f32."""
    _, space, *rest = name.split("_")
    cache = rest.pop(0) if rest[0] in _CACHE else ""
    count = int(rest[0][1]) if rest[0].startswith("v") else 1
    kind = "f32" if rest[-1] == "f32" else "u16" if rest[0] == "b16" else "u32"
    suffix = (f".v{count}" if count > 1 else "") + {"f32": ".f32", "u16": ".b16", "u32": ".b32"}[kind]
    nbytes = count * np.dtype(_NUMPY[kind]).itemsize
    return space, cache, kind, count, suffix, f"{nbytes} bytes as {f'{count} x ' if count > 1 else ''}{kind}"


def _load(name: str) -> Instruction:
    space, cache, kind, count, suffix, width = _parsed(name)
    dtype, nbytes = _NUMPY[kind], count * np.dtype(_NUMPY[kind]).itemsize

    def emulate(memory: Any, addr: np.ndarray) -> np.ndarray:
        data = memory.read_global(addr, nbytes) if space == "global" else memory.read_shared(addr, nbytes)
        values = data.view(dtype)
        return values if count > 1 else values[0] if values.ndim == 1 else values[..., 0]

    emulate.__module__ = __name__
    ptx, _, how = _CACHE.get(cache, ("", "", ""))
    return instruction(
        name,
        f"ld.{space}{ptx}{suffix} {'{%frag}' if count > 1 else '%result'}, [%addr];",
        ((Fragment("frag", kind, count, "out"),) if count > 1 else ()) + (Scalar("addr", _ADDRESS[space]),),
        returns=None if count > 1 else kind,
        effect="memory",
        doc=f"Load {width} from {space} memory{how}; the address is a multiple of {nbytes}.",
    )(emulate)


def _store(name: str) -> Instruction:
    space, cache, kind, count, suffix, width = _parsed(name)
    nbytes = count * np.dtype(_NUMPY[kind]).itemsize

    def emulate(memory: Any, addr: np.ndarray, value: np.ndarray) -> tuple[()]:
        data = np.ascontiguousarray(value if count > 1 else np.asarray(value)[..., None]).view(np.uint8)
        (memory.write_global if space == "global" else memory.write_shared)(addr, data)
        return ()

    emulate.__module__ = __name__
    _, ptx, how = _CACHE.get(cache, ("", "", ""))
    return instruction(
        name,
        f"st.{space}{ptx}{suffix} [%addr], {'{%frag}' if count > 1 else '%value'};",
        (Scalar("addr", _ADDRESS[space]), Fragment("frag", kind, count, "in") if count > 1 else Scalar("value", kind)),
        effect="memory",
        doc=f"Store {width} to {space} memory{how}; the address is a multiple of {nbytes}.",
    )(emulate)


ld_global_b16 = _load("ld_global_b16")
ld_global_b32 = _load("ld_global_b32")
ld_global_f32 = _load("ld_global_f32")
ld_global_nc_b16 = _load("ld_global_nc_b16")
ld_global_nc_b32 = _load("ld_global_nc_b32")
ld_global_nc_f32 = _load("ld_global_nc_f32")
ld_global_nc_v2 = _load("ld_global_nc_v2")
ld_global_nc_v2_f32 = _load("ld_global_nc_v2_f32")
ld_global_nc_v4 = _load("ld_global_nc_v4")
ld_global_nc_v4_f32 = _load("ld_global_nc_v4_f32")
ld_global_once_b16 = _load("ld_global_once_b16")
ld_global_once_b32 = _load("ld_global_once_b32")
ld_global_once_f32 = _load("ld_global_once_f32")
ld_global_once_v2 = _load("ld_global_once_v2")
ld_global_once_v2_f32 = _load("ld_global_once_v2_f32")
ld_global_once_v4 = _load("ld_global_once_v4")
ld_global_once_v4_f32 = _load("ld_global_once_v4_f32")
ld_global_v2 = _load("ld_global_v2")
ld_global_v2_f32 = _load("ld_global_v2_f32")
ld_global_v4 = _load("ld_global_v4")
ld_global_v4_f32 = _load("ld_global_v4_f32")
ld_shared_b16 = _load("ld_shared_b16")
ld_shared_b32 = _load("ld_shared_b32")
ld_shared_f32 = _load("ld_shared_f32")
ld_shared_v2 = _load("ld_shared_v2")
ld_shared_v2_f32 = _load("ld_shared_v2_f32")
ld_shared_v4 = _load("ld_shared_v4")
ld_shared_v4_f32 = _load("ld_shared_v4_f32")
st_global_b16 = _store("st_global_b16")
st_global_b32 = _store("st_global_b32")
st_global_f32 = _store("st_global_f32")
st_global_once_v2 = _store("st_global_once_v2")
st_global_once_v2_f32 = _store("st_global_once_v2_f32")
st_global_once_v4 = _store("st_global_once_v4")
st_global_once_v4_f32 = _store("st_global_once_v4_f32")
st_global_stream_v2 = _store("st_global_stream_v2")
st_global_stream_v2_f32 = _store("st_global_stream_v2_f32")
st_global_stream_v4 = _store("st_global_stream_v4")
st_global_stream_v4_f32 = _store("st_global_stream_v4_f32")
st_global_v2 = _store("st_global_v2")
st_global_v2_f32 = _store("st_global_v2_f32")
st_global_v4 = _store("st_global_v4")
st_global_v4_f32 = _store("st_global_v4_f32")
st_shared_b16 = _store("st_shared_b16")
st_shared_b32 = _store("st_shared_b32")
st_shared_f32 = _store("st_shared_f32")
st_shared_v2 = _store("st_shared_v2")
st_shared_v2_f32 = _store("st_shared_v2_f32")
st_shared_v4 = _store("st_shared_v4")
st_shared_v4_f32 = _store("st_shared_v4_f32")


@instruction(
    "global_address",
    "cvta.to.global.u64 %result, %array;",
    (Scalar("array", "array"),),
    returns="u64",
    effect="control",
)
def global_address(thread: Any, array: np.ndarray) -> int:
    """64-bit global address of an array's first element."""
    return thread.address_of(array)


@instruction(
    "shared_address",
    "{ .reg .u64 t; cvta.to.shared.u64 t, %array; cvt.u32.u64 %result, t; }",
    (Scalar("array", "array"),),
    returns="u32",
    effect="control",
)
def shared_address(thread: Any, array: np.ndarray) -> int:
    """32-bit shared address of a shared array's first element."""
    return thread.address_of(array)
