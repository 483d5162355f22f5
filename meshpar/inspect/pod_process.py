"""The process that compiles for a pod: requests on standard input, answers on standard output.

A message is an 8-byte length and a pickle. A request is (verb, arguments). An answer is ("ok", value) or
("error", exception or None, text).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

_LENGTH = struct.Struct(">Q")


def write(stream: IO[bytes], message: object) -> None:
    """Send one message."""
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> Any:
    """Receive one message, or raise `EOFError` if the other side has closed the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def load(target: str) -> Callable[..., Any]:
    """Import the function `package.module:function` or `path/to/file.py:function`."""
    location, _, name = target.rpartition(":")
    if not location.endswith(".py"):
        return getattr(importlib.import_module(location), name)
    path = Path(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _compile(module: bytes, cluster: Any, options: Mapping[str, Any] | None) -> Any:
    from meshpar.inspect.target import compile_stablehlo

    return compile_stablehlo(module, cluster, options=options, listen=False)


def _build(target: str, cluster: Any, kwargs: Mapping[str, Any], options: Mapping[str, Any] | None) -> Any:
    from meshpar.inspect.target import compile_stablehlo, stablehlo_of, topology

    traced = load(target)(topology(cluster), **kwargs)
    return compile_stablehlo(stablehlo_of(traced, cluster), cluster, options=options, listen=False)


def _call(target: str, kwargs: Mapping[str, Any]) -> Any:
    return load(target)(**kwargs)


_VERBS: Mapping[str, Callable[..., Any]] = {"compile": _compile, "build": _build, "call": _call}


def _answer(verb: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return "ok", _VERBS[verb](*arguments)
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # not every exception can be pickled, but its text can
            return "error", None, text
        return "error", error, text


def main() -> None:
    """Serve requests until the other side closes the stream."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect prints to standard error, because standard output carries the answers
    while True:
        try:
            verb, arguments = read(sys.stdin.buffer)
        except EOFError:
            return
        write(answers, _answer(verb, arguments))


if __name__ == "__main__":
    main()
