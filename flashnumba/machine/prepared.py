"""A kernel ready to launch: compiled, its shared memory granted, its parameters laid out, so that a launch only writes
what has changed and calls the driver. Each thread has its own parameter buffer.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from typing import Any

from flashnumba.machine import gpu
from flashnumba.machine.arrays import Described, describe, is_array
from flashnumba.machine.function import Kernel
from flashnumba.machine.layout import Frame, Parameter, dimensions, parameters
from flashnumba.machine.streams import current_stream, stream_handle
from flashnumba.machine.tensor_map import TensorMap

__all__ = ["Fixed", "OnHost", "Prepared"]


class OnHost(Exception):
    """An array argument lies in host memory: the launch has to go through copies."""


class Prepared:
    """A compiled kernel on one device. Call it with ``(grid, block, args, stream=None)``.

    Attributes:
        kernel, signature, device, shared: what it was prepared for; ``shared`` is dynamic, in bytes.
        machine: ``"cuda"``.
    """

    machine = "cuda"

    def __init__(self, kernel: Kernel, signature: tuple[Any, ...], device: int, shared: int, function: Any) -> None:
        self.kernel, self.signature, self.device, self.shared = kernel, signature, device, shared
        self.function = function
        self.parameters = parameters(kernel, signature)
        self._places = tuple(
            (p, None, p.at + 4) if p.packer is None else (p, p.packer.pack_into, 8 * p.at) for p in self.parameters
        )
        self._maps = tuple(i for i, p in enumerate(self.parameters) if p.element == "uint64" and p.array is None)
        self._driver = gpu.bindings()
        self._launch = self._driver.cuLaunchCooperativeKernel if kernel.concurrent else self._driver.cuLaunchKernel
        self._last = () if kernel.concurrent else (0,)
        self._configs: dict[tuple[int, ...], Any] = {}
        if kernel.early:
            self._launch = self._launch_early
        self._context = int(gpu.primary_context(device))
        self._threads = threading.local()
        self._shapes: dict[Any, tuple[int, ...] | None] = {}

    def __call__(self, grid: Any, block: Any, args: tuple[Any, ...], stream: Any = None) -> None:
        """Launch, and return at once.

        Args:
            grid, block: an int or up to three. A grid with a zero launches nothing.
            args: of the types prepared for. Arrays all on this device; or all in host memory: then they are copied to
                the GPU, the kernel runs, writable ones are copied back, and the call waits for that.
            stream: handle or stream object; None follows torch's or CuPy's current stream, by the arguments' kind.

        Raises:
            TypeError, ValueError: an argument, or the grid or block, does not fit; the message says what would.
            GpuError: the driver refused the launch.
        """
        try:
            sizes = self._shapes[grid, block]
        except (KeyError, TypeError):
            sizes = self._sizes(grid, block)
        # A finaliser may launch while this launch is writing: it must find another buffer.
        threads = self._threads
        frame = getattr(threads, "frame", None) or Frame(self.parameters)
        threads.frame = None
        try:
            kind, named = self._write(frame, args)
            if sizes is not None:
                handle = current_stream(kind, self.device, named) if stream is None else stream_handle(stream)
                self._go(sizes, handle, frame)
                self._pin(args, handle)
                if kind == "jax":
                    # JAX's streams cannot be seen from outside, so its next operation would not wait for this one.
                    gpu.call(self._driver.cuStreamSynchronize, handle)
            return
        except OnHost:
            pass
        finally:
            threads.frame = frame
        if sizes is not None:
            from flashnumba.machine.copies import run_on_copies

            run_on_copies(self, grid, block, args, 0 if stream is None else stream_handle(stream))

    def fixed(self, grid: Any, block: Any, args: tuple[Any, ...]) -> Fixed:
        """This launch with everything but its arrays' addresses, and those that its tensor maps lie at, as it is now.

        Raises:
            TypeError, ValueError: as a launch; and for an array in host memory, also one of a tensor map.
        """
        sizes, frame = self._sizes(grid, block), Frame(self.parameters)
        try:
            self._write(frame, args)
        except OnHost:
            raise ValueError(
                f"{self.kernel.__name__} was given arrays in host memory; addresses on a GPU can be exchanged"
            ) from None
        maps = {i: args[i] for i in self._maps if args[i].__class__ is TensorMap}
        return Fixed(self, sizes, bytes(frame.buffer), maps)

    def _write(self, frame: Frame, args: tuple[Any, ...]) -> tuple[str | None, int | None]:
        """Bring the buffer up to date; return the arrays' kind and the stream that one of them names.

        A torch tensor laid out as the last one in its place changes one word; this path decides what a launch costs.
        """
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.kernel.__name__} takes {len(self.parameters)} arguments, not {len(args)}")
        words, buffer, device = frame.words, frame.buffer, self.device
        torch_seen, kind, named = False, None, None
        for (place, pack, at), arg, seen in zip(self._places, args, frame.seen, strict=True):
            if pack is None:
                if (
                    seen is not None
                    and arg.__class__ is seen[0]
                    and arg.dtype is seen[1]
                    and arg.shape == seen[2]
                    and arg.stride() == seen[3]
                    and arg.get_device() == device
                ):
                    words[at] = arg.data_ptr()
                    torch_seen = True
                    continue
                found = self._describe(frame, place, arg)
                torch_seen = torch_seen or found.kind == "torch-cuda"
                kind = "jax" if "jax" in (kind, found.kind) else found.kind
                named = found.stream or named
            elif arg.__class__ is TensorMap and place.element == "uint64":
                if arg.device is None:
                    raise OnHost
                self._same_device(place, arg.device)
                words[place.at] = arg.device_address
                torch_seen = torch_seen or arg.found.kind == "torch-cuda"
            else:
                try:
                    pack(buffer, at, arg)
                except (struct.error, TypeError, ValueError, OverflowError) as error:
                    raise self._unfit(place, arg, error) from None
        return "torch-cuda" if torch_seen and kind != "jax" else kind, named

    def _describe(self, frame: Frame, place: Parameter, arg: Any) -> Described:
        """Check an array and write all its words."""
        frame.seen[place.index] = None
        found = describe(arg, place.name)
        self._fits(place, found)
        frame.array(place, found)
        if found.kind == "torch-cuda":
            frame.seen[place.index] = (arg.__class__, arg.dtype, arg.shape, arg.stride())
        elif found.kind == "jax":
            arg.block_until_ready()
        return found

    def _unfit(self, place: Parameter, arg: Any, error: Exception) -> Exception:
        name = self.kernel.__name__
        if is_array(arg):
            return TypeError(f"{place.name} is an array; {name} takes one {place.element}")
        wrong_type = isinstance(error, TypeError) or "required argument is not" in str(error)
        kind = TypeError if wrong_type else ValueError
        return kind(f"{place.name} is {arg!r}; for {name} it must be of type {place.element} ({error})")

    def _fits(self, place: Parameter, found: Described) -> None:
        if found.device is None:
            raise OnHost
        self._same_device(place, found.device)
        want = place.array
        if str(found.dtype) != place.element or len(found.shape) != want.ndim:
            raise TypeError(
                f"{place.name} has {len(found.shape)} axes of {found.element}; this launch was prepared for "
                f"{want.ndim} of {place.element}"
            )
        if want.layout == "C" and not found.contiguous:
            raise ValueError(
                f"{place.name} has strides {found.strides} for shape {found.shape}; this launch was prepared for a "
                "packed array, so pass a contiguous one or prepare with a strided one"
            )

    def _same_device(self, place: Parameter, device: int) -> None:
        if device != self.device:
            raise ValueError(
                f"{place.name} is on cuda:{device}; the launch is on cuda:{self.device}, where all arguments must be"
            )

    def _go(self, sizes: tuple[int, ...], stream: int, frame: Frame) -> None:
        driver = self._driver
        current = int(driver.cuCtxGetCurrent()[1])
        if current != self._context:
            if current == 0:
                # As the runtime API does for a thread that has no context yet.
                gpu.call(driver.cuCtxSetCurrent, gpu.primary_context(self.device))
            else:
                with gpu.on_device(self.device):
                    self._go(sizes, stream, frame)
                return
        status = self._launch(self.function, *sizes, self.shared, stream, frame.address, *self._last)[0]
        if status:
            raise gpu.GpuError(
                f"{self.kernel.__name__} was not launched: {getattr(status, 'name', status)}; grid {sizes[:3]}, "
                f"block {sizes[3:]}, {self.shared} bytes of dynamic shared memory on cuda:{self.device}"
            )

    def _launch_early(self, function: Any, *rest: Any) -> Any:
        """``cuLaunchKernel``, but for the permission to start before the kernel ahead has ended."""
        driver = self._driver
        *place, parameters, extra = rest
        key = tuple(place)
        config = self._configs.get(key)
        if config is None:
            may = driver.CUlaunchAttribute()
            may.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            may.value.programmaticStreamSerializationAllowed = 1
            config = driver.CUlaunchConfig()
            (
                config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ,
                config.sharedMemBytes, config.hStream,
            ) = (*key[:-1], driver.CUstream(key[-1]))  # fmt: skip
            config.attrs, config.numAttrs = [may], 1
            if len(self._configs) >= 1024:
                self._configs.clear()
            self._configs[key] = config
        return driver.cuLaunchKernelEx(config, function, parameters, extra)

    def _pin(self, args: tuple[Any, ...], stream: int) -> None:
        """Keep the tensor maps of a launch that a graph records."""
        for i in self._maps:
            if args[i].__class__ is TensorMap and self._capturing(stream):
                args[i].pin()

    def _capturing(self, stream: int) -> bool:
        # The legacy stream answers with an error while another stream captures; keeping the map is the safe reading.
        status, state = self._driver.cuStreamIsCapturing(stream)[:2]
        return bool(status) or state != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def _sizes(self, grid: Any, block: Any) -> tuple[int, ...] | None:
        """Check a grid and a block; None if nothing is to run. The answer is kept for the next launch."""
        g, b = dimensions(grid, "grid"), dimensions(block, "block")
        name, threads = self.kernel.__name__, math.prod(b)
        if not 1 <= threads <= self.kernel.threads:
            raise ValueError(f"block is {block}, {threads} threads; {name} is declared for 1 to {self.kernel.threads}")
        if g[0] >= 1 << 31 or g[1] > 65535 or g[2] > 65535:
            raise ValueError(f"grid is {grid}; a GPU takes at most 2147483647 x 65535 x 65535 blocks")
        blocks = math.prod(g)
        if self.kernel.concurrent and blocks > (room := self.resident_blocks(b)):
            raise ValueError(
                f"grid is {grid}, {blocks} blocks; the blocks of {name} wait for one another, and cuda:{self.device} "
                f"holds {room} at once with {threads} threads and {self.shared} bytes of dynamic shared memory each"
            )
        sizes = (*g, *b) if blocks else None
        if isinstance(grid, int | tuple) and isinstance(block, int | tuple):
            if len(self._shapes) >= 1024:
                self._shapes.clear()
            self._shapes[grid, block] = sizes
        return sizes

    def resident_blocks(self, block: Any) -> int:
        """Blocks of this kernel that the whole device holds at once."""
        threads = math.prod(dimensions(block, "block"))
        with gpu.on_device(self.device):
            query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            each = gpu.call(query, self.function, threads, self.shared)
        return each * gpu.multiprocessors(self.device)


class Fixed:
    """A launch of which only the addresses of its arrays change from call to call: see :meth:`Prepared.fixed`.

    It checks nothing: who calls it answers for arrays of the same type, shape, strides and device as those before, at
    addresses that the kernel's loads allow. A tensor map counts as the array that it is of.
    """

    def __init__(
        self, prepared: Prepared, sizes: tuple[int, ...] | None, written: bytes, maps: dict[int, TensorMap]
    ) -> None:  # fmt: skip
        self._prepared, self._sizes, self._written = prepared, sizes, written
        places: list[tuple[int, _Moved | None]] = []
        for parameter in prepared.parameters:
            if parameter.array is not None:
                places.append((parameter.at + 4, None))
            elif parameter.index in maps:
                places.append((parameter.at, _Moved(maps[parameter.index])))
        self._places = tuple(places)
        self._threads = threading.local()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream, given by its handle; one address for each array argument, in their order."""
        threads = self._threads
        frame = getattr(threads, "frame", None) or self._frame()
        threads.frame = None  # as in Prepared: a finaliser must find another buffer
        held = []  # maps, until they are launched with: another thread may bring so many that they are forgotten
        try:
            words = frame.words
            for (place, moved), address in zip(self._places, addresses, strict=True):
                if moved is None:
                    words[place] = address
                else:
                    held.append(moved(address))
                    words[place] = held[-1].device_address
            if self._sizes is not None:
                self._prepared._go(self._sizes, stream, frame)
                if held and self._prepared._capturing(stream):
                    for tensor_map in held:
                        tensor_map.pin()
        finally:
            threads.frame = frame

    def _frame(self) -> Frame:
        frame = Frame(self._prepared.parameters)
        frame.buffer[:] = self._written
        return frame


class _Moved:
    """The tensor maps of arrays like one another, by address; some stay encoded, and all are forgotten when too many
    have come. What kernels under way have been given is freed when these are done."""

    capacity = 256

    def __init__(self, like: TensorMap) -> None:
        self._like = like.moved(like.found.pointer)  # which does not keep the array
        self._known: dict[int, TensorMap] = {}

    def __call__(self, address: int) -> TensorMap:
        known = self._known
        found = known.get(address)
        if found is None:
            found = self._like.moved(address)
            if len(known) >= self.capacity:
                known = self._known = {}
            known[address] = found
        return found
