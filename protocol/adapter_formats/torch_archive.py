"""Reads the names, dtypes and shapes of the tensors of a legacy adapter_model.bin, and where their values are.

Only torch's zip format is opened. torch is not needed, and the pickle is not run (torch_index.py).
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lorafleet.protocol.adapter_formats.adapter_files import OpenFile
from lorafleet.protocol.adapter_formats.safetensors_header import MAX_TENSORS, TensorInfo
from lorafleet.protocol.adapter_formats.torch_index import StoredTensor, read_index
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil

if TYPE_CHECKING:
    from hashlib import _Hash

MAX_PICKLE_BYTES = 16 << 20  # data.pkl of a .bin, which has names and shapes but no values
MAX_RECORDS = 4 * MAX_TENSORS  # in a .bin's archive
COUNT_BYTES = 16 << 20
_ENTRY = b"PK\1\2"  # begins each record's entry in an archive's list of records
_NO_ARCHIVE = (ValueError, NotImplementedError, OverflowError, struct.error)


class TorchArchive:
    """A whole adapter_model.bin in memory, and its tensors' places."""

    def __init__(self, file: OpenFile, digest: _Hash) -> None:
        self._file = file
        self.data = bytearray(file.size)
        file.read_into(memoryview(self.data), digest)
        file.check_unchanged()
        with _archive(self.data, file.name) as archive:
            self._records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            self.tensors = read_index(self._index(archive), file.name)
        if len(self.tensors) > MAX_TENSORS:
            raise AdapterMalformed(f"{file.name} has {len(self.tensors)} tensors; at most {MAX_TENSORS} are read.")
        for key, tensor in yielding_gil(self.tensors.items()):
            self._check(key, tensor)
        self.infos: Mapping[str, TensorInfo] = {
            key: TensorInfo(tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()
        }

    def start(self, tensor: StoredTensor) -> int:
        """Returns the offset of the tensor's record in `data`."""
        return self._start(self._records[f"data/{tensor.record}"])

    def _index(self, archive: zipfile.ZipFile) -> bytes:
        record = self._records.get("data.pkl")
        if record is None:
            raise AdapterMalformed(f"{self._file.name} is a zip file without data.pkl, so torch did not write it.")
        if record.file_size > MAX_PICKLE_BYTES:
            raise AdapterMalformed(f"{self._file.name} has an index of more than {MAX_PICKLE_BYTES} bytes.")
        try:
            order = archive.read(self._records["byteorder"]) if "byteorder" in self._records else b"little"
            pickled = archive.read(record)
        except (zipfile.BadZipFile, RuntimeError, EOFError, *_NO_ARCHIVE):
            raise AdapterMalformed(f"{self._file.name} has a damaged record.") from None
        if order != b"little":
            raise AdapterUnsupported(f"{self._file.name} was written on a big-endian machine. Save it on another.")
        return pickled

    def _check(self, key: str, tensor: StoredTensor) -> None:
        """Raises AdapterMalformed unless the tensor's record exists, is aligned and holds what the index says."""
        name = self._file.name
        record = self._records.get(f"data/{tensor.record}")
        if record is None or record.file_size != tensor.num_values * tensor.value_bytes:
            raise AdapterMalformed(
                f"{name}: the record of {shown(key)} is missing, or its size is not the one in the index."
            )
        if math.prod(tensor.shape) > tensor.num_values:
            raise AdapterMalformed(
                f"{name}: {shown(key)} has more values than its storage, so it repeats some of them."
            )
        if self._start(record) % tensor.value_bytes:
            raise AdapterMalformed(f"{name}: the record of {shown(key)} is not aligned as torch aligns it.")
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        if 0 not in tensor.shape and tensor.offset + last >= tensor.num_values:
            raise AdapterMalformed(f"{name}: {shown(key)} reaches beyond its record.")

    def _start(self, record: zipfile.ZipInfo) -> int:
        """Returns the offset of the record's bytes in the file.

        They lie behind the record's own header, whose name and extra field have their own lengths.
        """
        header = record.header_offset
        if not 0 <= header <= len(self.data) - 30 or self.data[header : header + 4] != b"PK\3\4":
            raise AdapterMalformed(f"{self._file.name} has a damaged record.")
        name_bytes, extra_bytes = struct.unpack("<HH", self.data[header + 26 : header + 30])
        start: int = header + 30 + name_bytes + extra_bytes
        if start + record.file_size > len(self.data):
            raise AdapterMalformed(f"{self._file.name} has a record that reaches beyond the file's end.")
        return start


def _archive(data: bytearray, name: str) -> zipfile.ZipFile:
    """Opens the file as a zip archive.

    Its records must be uncompressed, as torch stores them, so that a small file cannot unpack to a large one.
    """
    steps = range(0, len(data), COUNT_BYTES)
    if sum(data.count(_ENTRY, start, start + COUNT_BYTES + 3) for start in yielding_gil(steps)) > MAX_RECORDS:
        raise AdapterMalformed(f"{name} has more than {MAX_RECORDS} records.")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, *_NO_ARCHIVE):
        raise AdapterMalformed(
            f"{name} is not in torch's zip format (a bare pickle is never opened), or is truncated. Save the adapter "
            "again with safetensors."
        ) from None
    records = archive.infolist()
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > len(data):
        raise AdapterMalformed(f"{name} has compressed records, which torch does not write.")
    return archive
