"""Folders of safetensors files: validated reading of slices and atomic writing.

No code in a folder is executed.
The safetensors library parses and writes the files. This module also checks that an index refers only to files in its
folder and matches their contents. A new folder gets its final name after all files are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from meshpar.interop import mxfp4
from meshpar.interop.block_fp8 import (
    DEQUANTIZED_DTYPE,
    FLOAT8,
    SCALE,
    Block,
    Float8Tensor,
    dequantize,
    float8_tensors,
    scale_shape,
    scale_slices,
)
from meshpar.pod.signals import scratch
from meshpar.sharding import host_resources as host
from meshpar.sharding.errors import problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported dtypes of weights by their names in safetensors files."""
_COMPARE_BYTES = 2**26
RELEASE = "download all files of the release, and use them together"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """NumPy name of the dtype. For quantized weights: the dtype after dequantization."""
    stored_name: str | None = None
    """Name in the file, if `Folder.rename` changed it."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def library() -> types.ModuleType:
    """Import safetensors. Raises `ValueError` if it is not installed."""
    try:
        import safetensors.numpy
    except ImportError as error:
        requested, reason = "read and write safetensors files", "the safetensors package is not installed"
        fix = "pip install 'meshpar[hf]'"
        raise problem("meshpar.interop", requested, reason, fix, code="missing-package") from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    document = host.read_json(path, str(path), RELEASE, requested="read it as JSON")
    if not isinstance(document, dict):
        reason = f"it contains a {type(document).__name__}"
        raise problem(str(path), "read a JSON object", reason, RELEASE, code="wrong-type")
    return document


class Folder:
    """Context manager for the tensors of a folder with safetensors files, which are memory-mapped.

    `single` is the file to read if there is no index, and `block` the block shape of quantized weights.
    """

    def __init__(self, path: str | Path, *, single: str = SINGLE, block: Block | None = None) -> None:
        self.path, self._single, self._block = Path(path), single, block
        self._files: dict[str, Any] = {}
        self.float8: dict[str, Float8Tensor] = {}
        self._scales: dict[str, Entry] = {}
        self.packed: dict[str, tuple[Entry, Entry]] = {}
        """Blocks and scales of MXFP4 tensors."""
        self._stack = contextlib.ExitStack()
        try:
            self.entries = self._read_headers()
            self._separate_scales()
            self._join_packed()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, slices: Sequence[slice]) -> np.ndarray:
        """Read a slice of a tensor. Float8 weights are dequantized to float32, and MXFP4 weights to bfloat16."""
        entry = self.entries[name]
        name = entry.stored_name or name
        try:
            if name in self.packed:
                blocks, scales = (
                    self._files[part.file].get_slice(name + suffix)
                    for part, suffix in zip(self.packed[name], (mxfp4.BLOCKS, mxfp4.SCALES), strict=True)
                )
                return mxfp4.read(blocks.__getitem__, scales.__getitem__, slices)
            if name not in self.float8:
                return self._files[entry.file].get_slice(name)[tuple(slices)]
            assert self._block is not None
            scale = self._files[self._scales[name].file].get_slice(name + SCALE)[scale_slices(slices, self._block)]
            return dequantize(self.float8[name].read(slices), scale, slices, self._block)
        except Exception as error:  # the errors of the library have no common base class
            raise _damaged(self.path / entry.file, error) from error

    def read_full(self, name: str) -> np.ndarray:
        """Read a full tensor."""
        entry = self.entries[name]
        return self.read(name, [slice(0, size) for size in entry.shape]).astype(jnp.dtype(entry.dtype), copy=False)

    def rename(self, name: str, new_name: str) -> None:
        """Change the name of a tensor in `entries`."""
        self.entries[new_name] = dataclasses.replace(self.entries.pop(name), stored_name=name)

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have equal values. The tensors are read in blocks of rows."""
        shape = self.entries[name].shape
        if self.entries[other].shape != shape or not shape:
            return False
        num_rows = max(_COMPARE_BYTES // max(4 * math.prod(shape[1:]), 1), 1)
        trailing = [slice(0, size) for size in shape[1:]]
        parts = ([slice(row, min(row + num_rows, shape[0])), *trailing] for row in range(0, shape[0], num_rows))
        return all(np.array_equal(self.read(name, part), self.read(other, part)) for part in parts)

    def _separate_scales(self) -> None:
        """Move the factors of float8 weights from `entries` to `_scales`."""
        for name in self.float8:
            assert self._block is not None
            shape, scale = self.entries[name].shape, self.entries.pop(name + SCALE, None)
            if scale is None:
                code, actual = "not-found", "none"
            elif len(shape) != 2 or scale.shape != scale_shape(shape, self._block):
                code, actual = "wrong-shape", f"shape {list(scale.shape)}"
            elif name + SCALE in self.float8 or scale.dtype not in ("float32", "bfloat16"):
                code, actual = "wrong-dtype", FLOAT8 if name + SCALE in self.float8 else scale.dtype
            else:
                self._scales[name] = scale
                continue
            requested = f"read float32 or bfloat16 factors for blocks {list(self._block)} of {list(shape)}"
            where, reason = f"{self.path}, `{name[:100]}{SCALE}`", f"the file has {actual}"
            raise problem(where, requested, reason, RELEASE, code)

    def _join_packed(self) -> None:
        """Replace the blocks and scales of MXFP4 weights in `entries` by the tensors that they encode."""
        packed = [name for name, entry in self.entries.items() if entry.dtype == "uint8"]
        for name in packed:
            base = name.removesuffix(mxfp4.BLOCKS)
            blocks, scales = self.entries[name], self.entries.get(base + mxfp4.SCALES)
            if name.endswith(mxfp4.SCALES) and name.removesuffix(mxfp4.SCALES) + mxfp4.BLOCKS in packed:
                continue
            shapes = [list(entry.shape) for entry in (blocks, scales) if entry is not None]
            is_wrong = len(shapes) != 2 or len(shapes[0]) != 4 or shapes[0] != [*shapes[1], 16]
            if is_wrong or base in self.entries:
                requested = (
                    f"read MXFP4 weights [E, outputs, inputs / 32, 16] with scales `{base[-100:]}{mxfp4.SCALES}`"
                )
                code, where = "wrong-shape" if len(shapes) == 2 else "not-found", f"{self.path}, `{name[-100:]}`"
                raise problem(where, requested, f"the file has shapes {shapes}", RELEASE, code)
            assert scales is not None
            self.packed[base] = blocks, scales
        for base, (blocks, _) in self.packed.items():
            del self.entries[base + mxfp4.BLOCKS], self.entries[base + mxfp4.SCALES]
            self.entries[base] = Entry(blocks.file, mxfp4.shape_of(blocks.shape), DEQUANTIZED_DTYPE)

    def _read_headers(self) -> dict[str, Entry]:
        index = self._read_index()
        entries: dict[str, Entry] = {}
        for file in sorted({*index.values()} or {self._single}):
            for name, entry in self._read_header(file):
                if name in entries:
                    where, reason = f"{self.path / file}, `{name}`", f"{entries[name].file} has it too"
                    raise problem(where, "read the tensor", reason, RELEASE, code="conflict")
                entries[name] = entry
        for name, file in index.items():
            if name not in entries or entries[name].file != file:
                reason = f"it is in {entries[name].file}" if name in entries else "no file has it"
                where = f"{self.path / INDEX}, `{name[:100]}`"
                raise problem(where, f"find the tensor in {file}", reason, RELEASE, code="not-found")
        return entries

    def _read_index(self) -> dict[str, str]:
        """Return the file of each tensor, or an empty dict if the folder has no index."""
        index = self.path / INDEX
        if self._single != SINGLE or not index.exists():
            if (self.path / self._single).is_file():
                return {}
            reason, fix = f"it has neither {self._single} nor {INDEX}", "download the weights"
            if any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*")):
                reason += ", and pickled files are never read because they can run any code"
                fix = "save the model with save_pretrained(..., safe_serialization=True)"
            raise problem(f"folder `{self.path}`", "read a model", reason, fix, code="missing-file")
        files: Any = read_json(index).get("weight_map")
        names: list[Any] = [*files.values()] if isinstance(files, dict) and files else [None]
        for file in names:
            is_local = isinstance(file, str) and file == os.path.basename(file) and not {"\\", "\0"} & {*file}
            if not is_local or not file.endswith(".safetensors"):
                requested, reason = f"read {str(file)[:100]!r}", "it must name safetensors files in this folder"
                raise problem(f"{index}, `weight_map`", requested, reason, RELEASE, code="damaged-file")
        return files

    def _read_header(self, file: str) -> Iterator[tuple[str, Entry]]:
        """Yield the tensors of a file. The library checks that sizes and offsets match the file."""
        path, safetensors = self.path / file, library()
        host.check_file(path, str(path), RELEASE, max_bytes=None)
        try:
            reader = self._files[file] = self._stack.enter_context(safetensors.safe_open(str(path), framework="np"))
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  (it is not a dict)
            headers = [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()]
        except Exception as error:
            raise _damaged(path, error) from error
        if self._block is not None and any(dtype == FLOAT8 for *_, dtype in headers):
            self.float8 |= float8_tensors(path)
        for name, shape, dtype in headers:
            if self._block == mxfp4.BLOCK and dtype == mxfp4.UINT8:
                yield name, Entry(file, shape, "uint8")
                continue
            if name not in self.float8 and dtype not in DTYPES:
                reason = f"weights must be {', '.join(DTYPES)}, or {FLOAT8} or MXFP4 with a `quantization_config`"
                fix = "use the bfloat16 release, or convert the weights to bfloat16 first"
                raise problem(f"{path}, `{name[:100]}`", f"read {dtype}", reason, fix, code="wrong-dtype")
            yield name, Entry(file, shape, DEQUANTIZED_DTYPE if name in self.float8 else DTYPES[dtype])


def _damaged(path: Path, error: Exception) -> Exception:
    reason = f"it is not a valid safetensors file ({' '.join(str(error).split())[:160]})"
    return problem(str(path), "read it", reason, "download it again", code="damaged-file")


def assigned(sizes: Iterable[tuple[str, int]], most_bytes: int) -> dict[str, str]:
    """Return the file name of each tensor. As in transformers, files of up to `most_bytes` are filled in order."""
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, nbytes in sizes:
        if groups[-1] and group_bytes + nbytes > most_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += nbytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, group in enumerate(groups, 1)
        for name in group
    }


def tensors_by_file(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the tensors of each file, in the order in which `write` writes them."""
    names: dict[str, list[str]] = {}
    for name, file in files.items():
        names.setdefault(file, []).append(name)
    return names


def write(
    folder: Path, files: Mapping[str, str], make: Callable[[str], np.ndarray], total_bytes: int | None = None
) -> None:
    """Write tensors to safetensors files. With `total_bytes`, write an index if there are multiple files.

    `files` contains the file name of each tensor, and `make` returns a tensor by name. Only the tensors of the current
    file are in memory.
    """
    safetensors = library()
    for file, names in tensors_by_file(files).items():
        tensors = {name: np.ascontiguousarray(make(name)) for name in names}
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        try:
            safetensors.numpy.save_file(tensors, str(path), metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise _not_writable(file, f"safetensors failed ({error})") from None
        path.chmod(mode)  # the library always creates files with mode 0600
    if total_bytes is not None and set(files.values()) != {SINGLE}:
        document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
        write_json(folder / INDEX, document)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object in the format of transformers."""
    with host.naming(path):
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def whole_folder(path: str | Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block ends without an error."""
    target = new_folder(path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    temporary.mkdir(mode)
    scratch.add(temporary)  # on Ctrl-C the command exits without running the `finally` block
    try:
        yield temporary
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        scratch.discard(temporary)


def new_folder(path: str | Path) -> Path:
    """Resolve the path of a new or empty folder, and create its parents."""
    host.check_local(path, f"folder `{path}`", "use a local folder, and copy it to the bucket afterwards")
    target = Path(os.path.realpath(path))  # a rename can replace an empty folder, but not a link to it
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(".")):
        reason = "it is the current folder" if target.samefile(".") else "it exists already"
        raise _not_writable(path, reason, code="already-exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _not_writable(path: str | Path, reason: str | None, code: str = "not-writable") -> Exception:
    return problem(f"`{path}`"[:200], "write to it", f"{reason}", "use a new folder on a disk with free space", code)
