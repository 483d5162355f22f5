"""A folder of safetensors files, read part by part and written whole or not at all. Nothing in it is executed.

The library reads and writes the files; here is what it does not see to: that an index stays within its folder and says
what the files hold, and that a folder is only there when all of it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from meshpar.interop.blocks import (
    FLOAT8,
    SCALE,
    STANDS_FOR,
    Block,
    Bytes,
    bytes_of,
    dequantized,
    scale_shape,
    scale_slices,
)
from meshpar.loop.signals import scratch
from meshpar.sharding import host_resources as host
from meshpar.sharding.types import problem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
}  # fmt: skip
"""The dtypes of weights, as safetensors names them."""
_COMPARED_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As numpy names it; of 8-bit floats what they stand for."""
    stored_as: str | None = None
    """Its name in the file; `None` if it was not renamed."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


def library() -> Any:
    """The safetensors library. Raises `ValueError`: it is not installed."""
    try:
        import safetensors.numpy
    except ImportError as error:
        asked = "read and write safetensors files"
        raise problem("meshpar.interop", asked, "the library is not installed", "pip install 'meshpar[hf]'") from error
    return safetensors


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
      ValueError: no file, one that is too large to be one of these, or something else in it.
    """
    fix = "take the file of the release"
    document = host.read_json(path, str(path), fix, requested="read it as JSON")
    if not isinstance(document, dict):
        raise problem(str(path), "read an object", f"it holds a {type(document).__name__}", fix)
    return document


class Folder:
    """The tensors of a folder: what there is, checked, and parts of each.

    A context manager; files are mapped, not read, and stay open until it ends.

    Args:
      path: of the folder.
      single: the file's name where there is no index.
      block: rows and columns that share a factor, where weights are 8-bit floats: they are read as what they stand for.

    Raises:
      ValueError: no such folder or no safetensors in it; an index that names files outside, or says what they do not
        hold; a file that is none; a dtype that is none of weights; factors that are missing, surplus, or of another
        shape.
    """

    def __init__(self, path: str | Path, *, single: str = SINGLE, block: Block | None = None) -> None:
        self.path, self._single, self._block = Path(path), single, block
        self._files: dict[str, Any] = {}
        self._eight_bits: dict[str, Bytes] = {}
        self._scales: dict[str, Entry] = {}
        self._opened = contextlib.ExitStack()
        try:
            self.entries = self._scaled(self._entries())
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._opened.close()

    def read(self, name: str, slices: Sequence[slice]) -> np.ndarray:
        """A part of a tensor, copied out of the file; no more than that is read of its rows.

        What 8-bit floats stand for comes as float32, and of their factors those of the part are read.
        """
        entry = self.entries[name]
        name = entry.stored_as or name
        try:
            if name not in self._eight_bits:
                return self._files[entry.file].get_slice(name)[tuple(slices)]
            assert self._block is not None
            scale = self._files[self._scales[name].file].get_slice(name + SCALE)[scale_slices(slices, self._block)]
            return dequantized(self._eight_bits[name].read(slices), scale, slices, self._block)
        except Exception as error:  # whatever the library meets in a file
            raise self._unreadable(self.path / entry.file, error) from error

    def whole(self, name: str) -> np.ndarray:
        """All of a tensor."""
        entry = self.entries[name]
        return self.read(name, [slice(0, size) for size in entry.shape]).astype(jnp.dtype(entry.dtype), copy=False)

    def rename(self, name: str, to: str) -> None:
        """Give a tensor another name."""
        self.entries[to] = dataclasses.replace(self.entries.pop(name), stored_as=name)

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers. Reads some rows of each at a time."""
        shape = self.entries[name].shape
        if self.entries[other].shape != shape or not shape:
            return False
        rows = max(_COMPARED_BYTES // max(4 * math.prod(shape[1:]), 1), 1)
        rest = [slice(0, size) for size in shape[1:]]
        parts = ([slice(at, min(at + rows, shape[0])), *rest] for at in range(0, shape[0], rows))
        return all(np.array_equal(self.read(name, part), self.read(other, part)) for part in parts)

    @property
    def is_scaled(self) -> bool:
        """Whether some of it is 8-bit floats."""
        return bool(self._eight_bits)

    def _scaled(self, entries: dict[str, Entry]) -> dict[str, Entry]:
        """The tensors without the factors of those in 8 bits, which are checked and kept aside."""
        for name in self._eight_bits:
            assert self._block is not None
            entry, scale, where = entries[name], entries.pop(name + SCALE, None), f"{self.path}, `{name[:100]}{SCALE}`"
            fix = "take all files of the release, and its config.json"
            if scale is None:
                raise problem(where, "read the factors of its blocks", "there is no such tensor", fix)
            if len(entry.shape) != 2 or scale.shape != scale_shape(entry.shape, self._block):
                exists = f"of {list(entry.shape)} in blocks of {list(self._block)}"
                raise problem(where, f"take {list(scale.shape)} as its factors", exists, fix)
            dtype = FLOAT8 if name + SCALE in self._eight_bits else scale.dtype
            if dtype not in ("float32", "bfloat16"):
                raise problem(where, f"take factors in {dtype}", "they are float32 or bfloat16", fix)
            self._scales[name] = scale
        return entries

    def _entries(self) -> dict[str, Entry]:
        files = self._listed()
        entries: dict[str, Entry] = {}
        for file in sorted({*files.values()} or {self._single}):
            for name, entry in self._held(file):
                if name in entries:
                    exists = f"{entries[name].file} has a tensor of that name, too"
                    raise problem(f"{self.path / file}, `{name}`", "read it", exists, "take the files of one release")
                entries[name] = entry
        for name, file in files.items():
            if name not in entries or entries[name].file != file:
                exists = "it is not there" if name not in entries else f"it is in {entries[name].file}"
                where = f"{self.path / INDEX}, `{name[:100]}`"
                raise problem(where, f"find it in {file}", exists, "take the index and the files of one release")
        return entries

    def _listed(self) -> dict[str, str]:
        """The file of each tensor by the index, or nothing where there is no index."""
        if not self.path.is_dir():
            raise problem(f"folder `{self.path}`", "read a model", "there is no such folder", "name a folder")
        index = self.path / INDEX
        if self._single != SINGLE or not index.exists():
            if not (self.path / self._single).is_file():
                pickled = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*"))
                exists = f"it has neither {self._single} nor {INDEX}"
                exists += "; pickled files are never read: they run what they like" * pickled
                fix = "save it by save_pretrained(..., safe_serialization=True)" if pickled else "download the weights"
                raise problem(f"folder `{self.path}`", "read a model", exists, fix)
            return {}
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise problem(f"{index}, `weight_map`", "read it", "it is no object with names", "take the release's")
        for name, file in listed.items():
            is_plain = isinstance(file, str) and file == os.path.basename(file) and "\\" not in file
            if not is_plain or not file.endswith(".safetensors") or "\0" in file:
                where = f"{index}, `{name[:100]}`"
                asked, fix = f"read it from {str(file)[:100]!r}", "take the index of the release"
                raise problem(where, asked, "an index names safetensors files of its own folder only", fix)
        return listed

    def _held(self, file: str) -> Iterator[tuple[str, Entry]]:
        """What a file's header says it holds; the library checks that offsets and sizes agree with the file."""
        path = self.path / file
        safetensors = library()
        if not path.is_file():
            raise problem(str(path), "read it", "there is no such file", "download all files of the release")
        try:
            opened = self._opened.enter_context(safetensors.safe_open(str(path), framework="np"))
            self._files[file] = opened
            found = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118  (no dict)
            held = [(name, one.get_shape(), one.get_dtype()) for name, one in found]
        except Exception as error:
            raise self._unreadable(path, error) from error
        if self._block is not None and any(dtype == FLOAT8 for *_, dtype in held):
            self._eight_bits |= bytes_of(path)
        for name, shape, dtype in held:
            if name in self._eight_bits:
                yield name, Entry(file, tuple(shape), STANDS_FOR)
                continue
            if dtype not in DTYPES:
                exists = f"weights are {', '.join(DTYPES)} here, or {FLOAT8} by `quantization_config`"
                fix = "take the release in bfloat16, or convert it to that first"
                raise problem(f"{path}, `{name[:100]}`", f"read {dtype}", exists, fix)
            yield name, Entry(file, tuple(shape), DTYPES[dtype])

    def _unreadable(self, path: Path, error: Exception) -> Exception:
        reason = " ".join(str(error).split())[:160]
        return problem(str(path), "read it", f"it is no sound safetensors file ({reason})", "download it again")


def assigned(sizes: Iterable[tuple[str, int]], most_bytes: int) -> dict[str, str]:
    """The file of each tensor: in order, each file full before the next, as transformers does it."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes:
        if groups[-1] and filled + nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], SINGLE)
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, group in enumerate(groups, 1)
        for name in group
    }


def in_order(files: Mapping[str, str]) -> list[str]:
    """Tensors in the order in which `write` asks for them, by the file of each."""
    return [name for file in dict.fromkeys(files.values()) for name, of in files.items() if of == file]


def write(
    folder: Path, files: Mapping[str, str], make: Callable[[str], np.ndarray], total_bytes: int, *, index: bool = True
) -> None:
    """Write tensors to their files, one file in memory at a time, and the index where there are several."""
    save_file = library().numpy.save_file
    for file in dict.fromkeys(files.values()):
        held = {name: np.ascontiguousarray(make(name)) for name, of in files.items() if of == file}
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(held, str(path), metadata={"format": "pt"})
        except library().SafetensorError as error:
            raise problem(
                file, "write it", f"that failed ({error})", "free some room, or name another folder"
            ) from None
        path.chmod(mode)  # the library makes files that only their owner may read, whatever the umask
    if index and set(files.values()) != {SINGLE}:
        document = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
        write_json(folder / INDEX, document)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write an object as transformers does."""
    with host.naming(path):
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def whole_folder(path: str | Path, *, mode: int = 0o777) -> Iterator[Path]:
    """A folder to fill, that is at `path` when all of it is written and nowhere before; its mode is less the umask.

    Raises:
      ValueError: something is there already, or nothing can be.
    """
    to = new_folder(path)
    try:
        fresh = to.parent / f".{to.name}.{secrets.token_hex(8)}"
        fresh.mkdir(mode)
    except OSError as error:
        raise _not_made(path, error) from error
    scratch.add(fresh)  # a command ends at Ctrl-C, without what follows below
    try:
        yield fresh
        fresh.replace(to)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        scratch.discard(fresh)


def new_folder(path: str | Path) -> Path:
    """Where a path leads, links followed; the folder above it is there then.

    Raises:
      ValueError: something is there already, or nothing can be.
    """
    host.check_local(path, f"folder `{path}`", "name a local folder, and copy it to the bucket afterwards")
    to = Path(os.path.realpath(path))  # a folder can take the place of an empty one, but not of a link to it
    try:
        if to.exists() and (not to.is_dir() or any(to.iterdir()) or to.samefile(".")):
            exists = "you are in it" if to.samefile(".") else "something is there already"
            raise problem(f"folder `{path}`", "write to it", exists, "name a new folder")
        to.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(path, error) from error
    return to


def _not_made(path: str | Path, error: OSError) -> Exception:
    return problem(f"folder `{path}`"[:200], "write to it", f"{error.strerror}", "name one that can be made")
