"""The few calls of NVIDIA's driver for which torch has none, through ctypes.

By some of them, processes share memory of a GPU (CUDA IPC). torch's own sharing needs its pickles and counts references
in files of both processes. The driver's handles are 64 plain bytes. By the others, memory moves from one address to
another (CUDA virtual memory management), so that tensors and CUDA graphs may outlive the memory behind them.
"""

from __future__ import annotations

import ctypes
import uuid

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that there is.
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class CudaDriverError(Exception):
    """An error of the driver. The message has its own words."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int))


class _AllocationKind(ctypes.Structure):
    """The kind of memory that is created (CUmemAllocationProp)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_attributes", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """The access of a GPU to memory (CUmemAccessDesc)."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver in this process. Raises CudaDriverError if there is none."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaDriverError(f"there is no NVIDIA driver: {error}") from None
        self._call("cuInit", 0)

    def use_first_device(self) -> str:
        """Makes the first visible GPU current in this thread, and returns its UUID as nvidia-smi shows it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        return self._uuid_of(device)

    def current_device(self) -> str:
        """Returns the UUID of the GPU that is current in this thread."""
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        return self._uuid_of(device)

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of new memory of the current GPU, which nothing else shares."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle_of(self, address: int) -> bytes:
        """Returns the handle by which other processes open an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> tuple[int, int]:
        """Maps another process's allocation. Returns its address here, and its size in bytes."""
        address, begin, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        copied = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), address)
        return address.value, size.value - (address.value - begin.value)

    def close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def pinned_memory(self, num_bytes: int) -> memoryview:
        """Returns host memory to which copies are fast. It lasts as long as the process."""
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        return memoryview((ctypes.c_ubyte * num_bytes).from_address(address.value)).cast("B")

    def copy_to_host(self, target: memoryview, address: int) -> None:
        """Fills the target with the bytes at an address of the GPU, and waits for them."""
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(begin), ctypes.c_uint64(address), ctypes.c_size_t(len(target)))

    def has_virtual_memory(self, device: int) -> bool:
        """Returns whether memory of the GPU with this index can be mapped to reserved addresses."""
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(found), _HAS_VIRTUAL_MEMORY, ctypes.c_int(device))
        return bool(found.value)

    def reserve_addresses(self, num_bytes: int) -> int:
        """Returns the first of new addresses, behind which there is no memory yet."""
        address = ctypes.c_uint64()
        size, none = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
        return address.value

    def free_addresses(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def create_memory(self, num_bytes: int, device: int) -> int:
        """Returns the handle of new memory without an address, of the GPU with this index. `num_bytes` is a multiple of
        2 MiB."""
        kind = _AllocationKind(type=_PINNED, location=_Location(_ON_DEVICE, device))
        handle = ctypes.c_uint64()
        self._call(
            "cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(num_bytes), ctypes.byref(kind), ctypes.c_uint64(0)
        )
        return handle.value

    def release_memory(self, handle: int) -> None:
        """Frees memory as soon as it is not mapped any more."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map_memory(self, address: int, num_bytes: int, handle: int) -> None:
        """Puts all of the handle's memory behind reserved addresses. allow_access() must follow."""
        none = ctypes.c_size_t(0), ctypes.c_uint64(handle), ctypes.c_uint64(0)
        self._call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), *none)

    def allow_access(self, address: int, num_bytes: int, device: int) -> None:
        """Lets the GPU read and write memory that has been mapped to consecutive addresses."""
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), size, ctypes.byref(access), ctypes.c_size_t(1))

    def unmap_memory(self, address: int, num_bytes: int) -> None:
        """Takes memory away from addresses. No work on the GPU may use them any more."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def _uuid_of(self, device: ctypes.c_int) -> str:
        found = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise CudaDriverError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
