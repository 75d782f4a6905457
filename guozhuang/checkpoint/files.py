"""Write and read the files of one checkpoint: tensors as safetensors, the rest as JSON; each with its hashes.

The files are written here and not by the package safetensors, because the bytes have to be hashed on their way, in pieces that
let other threads run, and flushed to the disk before the manifest names them. Reading is left to the package.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guozhuang.errors import CheckpointError, explain
from guozhuang.units import shown_path

_PIECE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the package safetensors
#: The dtypes of safetensors, by those of torch.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

#: The size of a file, the hash of its text (of a file with tensors: of its header), and the hash of each tensor.
Facts = dict[str, Any]


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous CPU tensor's bytes, in hexadecimal."""
    found = hashlib.sha256()
    for piece in _pieces(tensor):
        found.update(piece)
    return found.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    in_bytes: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    flat = memoryview(in_bytes)
    for first in range(0, len(flat), _PIECE_BYTES):
        yield flat[first : first + _PIECE_BYTES]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> Facts:
    """Write contiguous CPU tensors to a new file and flush it to the disk.

    Args:
        path: the file, which must not exist.
        tensors: by name.
        digests: the hash of each tensor if it is known already.

    Raises:
        OSError: the file cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        kind = DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    found = {}
    with _NewFile(path) as file:
        file.write(memoryview(head))
        for name in names:
            hashed = hashlib.sha256() if name not in digests else None
            for piece in _pieces(tensors[name]):
                if hashed is not None:
                    hashed.update(piece)
                file.write(piece)
            found[name] = digests[name] if hashed is None else hashed.hexdigest()
        file.sync()
    return {"bytes": len(head) + end, "sha256": hashlib.sha256(head).hexdigest(), "tensors": found}


def write_json(path: Path, value: object) -> Facts:
    """Write JSON to a new file and flush it to the disk.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(value, allow_nan=False).encode()
    with _NewFile(path) as file:
        file.write(memoryview(text))
        file.sync()
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


class _NewFile:
    """A new file, readable by this user alone, opened for writing without buffer."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> _NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, piece: memoryview) -> None:
        """Write all of a piece."""
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]

    def sync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._descriptor)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk.

    Raises:
        OSError: the folder cannot be opened or flushed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(folder: Path, name: str, facts: Facts, *, afresh: bool = False) -> Any:
    """Read a JSON file whose hash is known.

    Args:
        folder: the folder of the checkpoint.
        name: the file.
        facts: what the manifest says about it.
        afresh: read it from the disk, and not from the memory of the operating system.

    Raises:
        CheckpointError: it is not the file that was written.
    """
    text = _open(folder, name, facts, afresh, facts.get("bytes", 0))
    if hashlib.sha256(text).hexdigest() != facts.get("sha256"):
        raise broken(folder, f"{name} does not have the contents that were written")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise broken(folder, f"{name} is no JSON: {error}") from error


def read_tensors(folder: Path, name: str, facts: Facts, *, afresh: bool = False) -> dict[str, Tensor]:
    """Read and verify a file of tensors; they share the memory of the mapped file.

    Raises:
        CheckpointError: it is not the file that was written; the text names the tensor that differs.
    """
    import safetensors

    head = _open(folder, name, facts, afresh, _MAX_HEADER_BYTES + 8, is_header=True)
    if hashlib.sha256(head).hexdigest() != facts.get("sha256"):
        raise broken(folder, f"the header of {name} does not have the contents that were written")
    wanted = facts.get("tensors", {})
    found = {}
    try:
        with _named_by_text(folder / name) as path, safetensors.safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                found[key] = file.get_tensor(key)
    except (
        safetensors.SafetensorError,
        OSError,
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise broken(folder, f"{name} cannot be read: {error}") from error
    if found.keys() != wanted.keys():
        raise broken(folder, f"{name} holds other tensors than the manifest says")
    for key, tensor in found.items():
        if digest(tensor) != wanted[key]:
            raise broken(folder, f"the tensor {key} in {name} does not have the bytes that were written")
    return found


@contextlib.contextmanager
def _named_by_text(path: Path) -> Iterator[Path]:
    """Yield a path to a file that is text, which safetensors asks for: its own, or that of its descriptor."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield Path(f"/dev/fd/{descriptor}")
        finally:
            os.close(descriptor)
    else:
        yield path


def _open(folder: Path, name: str, facts: Facts, afresh: bool, num_bytes: int, *, is_header: bool = False) -> bytes:
    """Return the first bytes of a regular file of the right size; of a file with tensors its header."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise broken(folder, f"{name} cannot be opened: {error.strerror}") from error
    with os.fdopen(descriptor, "rb", buffering=0):
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode):
            raise broken(folder, f"{name} is no regular file")
        if told.st_size != facts.get("bytes"):
            raise broken(folder, f"{name} has {told.st_size} bytes, and {facts.get('bytes')} were written")
        if afresh and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_header:
            num_bytes = min(8 + int.from_bytes(os.pread(descriptor, 8, 0), "little"), num_bytes, told.st_size)
        found = bytearray()
        while len(found) < num_bytes:
            piece = os.pread(descriptor, num_bytes - len(found), len(found))
            if not piece:
                raise broken(folder, f"{name} ends after {len(found)} bytes")
            found += piece
    return bytes(found)


def broken(folder: Path, why: str) -> CheckpointError:
    """Compose the error for a checkpoint that is not as it was written."""
    return CheckpointError(explain(f"the checkpoint {shown_path(folder)} is not whole: {why}"))
