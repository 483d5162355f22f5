"""Files in buckets (`gs://`, `s3://`): access checks, listings and local copies."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import is_url

SCHEMES = {"gs": "gcsfs", "s3": "s3fs"}
"""For each URL scheme, the package that fsspec reads and writes with. orbax uses it, too, through `etils.epath`."""
CACHE = "MESHPAR_CACHE"
"""Environment variable with the folder for copies of remote files."""
_PROBE_S = 60.0


def join(url: str | os.PathLike[str], *names: str) -> str:
    """Return the URL of a file in a folder. Accepts a `Path`, which lacks a slash after the scheme."""
    scheme, _, rest = str(url).partition(":")
    rest = rest.removeprefix("//") if rest.startswith("///") else rest.lstrip("/")  # `s3:///x` names no bucket
    return f"{scheme}://" + "/".join([rest.rstrip("/"), *names])


def check_url(url: str, where: str) -> None:
    """Raise `ValueError` if the scheme is not supported, its package is missing, or the URL names no bucket."""
    scheme, _, rest = url.partition("://")
    requested = f"use {url[:200]}"
    if scheme not in SCHEMES:
        reason, fix = f"the scheme `{scheme}:` is not supported", "use gs://, s3:// or a local path"
        raise problem(where[:200], requested, reason, fix, code="unsupported-feature")
    if not re.match(r"[^/\s]+", rest):
        raise problem(where[:200], requested, "it names no bucket", f"write {scheme}://BUCKET/FOLDER", "bad-syntax")
    if importlib.util.find_spec(SCHEMES[scheme]) is None:
        reason, fix = f"the package {SCHEMES[scheme]} is not installed", "pip install 'meshpar[remote]'"
        raise problem(where[:200], requested, reason, fix, code="missing-package")


def filesystem(url: str, where: str) -> Any:
    """Return the fsspec file system of a URL. Raises as `check_url` does, and if there are no credentials for gs://."""
    check_url(url, where)
    with accessing(url, where, "use it"):
        return _filesystem(url.partition(":")[0])


@functools.cache
def _filesystem(scheme: str) -> Any:
    import fsspec

    # Other processes write to the same folders. orbax uses the same instance as this module.
    for name in ("gcs", "gs", "s3"):
        fsspec.config.conf.setdefault(name, {})["use_listings_cache"] = False
    if scheme == "gs" and "STORAGE_EMULATOR_HOST" not in os.environ and "token" not in fsspec.config.conf["gs"]:
        import google.auth

        google.auth.default()  # without credentials, gcsfs would try anonymous requests for a minute
    if "GCSFS_DEBUG" not in os.environ:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of each error that it raises
    return fsspec.filesystem(scheme)


@contextlib.contextmanager
def accessing(url: str, where: str, requested: str) -> Iterator[None]:
    """Convert the errors of a bucket to `MeshparError`."""
    try:
        yield
    except MeshparError:
        raise
    except Exception as error:  # the packages have no common base class for their errors
        text = " ".join(str(error).split())[:200]
        reason, code = f"that failed ({type(error).__name__}: {text})", "unusable-file"
        bucket = url.partition("://")[2].partition("/")[0]
        fix = "check the network, the endpoint and the permissions of the bucket"
        if "credentials" in f"{type(error).__name__} {text}".lower() or "Anonymous caller" in text:
            reason, code = f"there are no valid credentials ({text})", "missing-credentials"
            fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            if url.startswith("gs:"):
                fix = (
                    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; set "
                    "FSSPEC_GS_TOKEN=anon to read a public bucket"
                )
        elif isinstance(error, PermissionError):
            reason, code, fix = f"access is denied ({text})", "not-writable", "use credentials with access to it"
        elif isinstance(error, FileNotFoundError):
            reason, code = f"the bucket or the object does not exist ({text})", "missing-file"
            fix = f"create the bucket {bucket}, or use an existing bucket"
        raise problem(where[:200], requested, reason, fix, code=code) from error


def check_access(url: str, where: str) -> None:
    """Check that this process can write, read and remove objects in a folder, before a run depends on it.

    orbax writes arrays through TensorStore, which looks for credentials on its own, so it reads the probe as well.
    """
    import tensorstore as ts

    check_url(url, where)
    name = f".probe-{secrets.token_hex(8)}"
    with accessing(url, where, "write to it"):
        files = filesystem(url, where)
        files.pipe_file(f"{url}/{name}", b"meshpar")
        try:
            store = ts.KvStore.open(kvstore(f"{url}/")).result(timeout=_PROBE_S)
            if store.read(name).result(timeout=_PROBE_S).value != b"meshpar":
                raise FileNotFoundError("TensorStore does not find an object that was just written")
        finally:
            files.rm_file(f"{url}/{name}")


def kvstore(url: str) -> dict[str, Any]:
    """Return the specification of a TensorStore key-value store."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    # TensorStore does not read these variables.
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it logs an error for each missing profile file
        spec["aws_credentials"] = {"type": "environment"}
    return spec


# ---- Local copies ----------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder for copies of remote files: `$MESHPAR_CACHE`, by default `~/.cache/meshpar`."""
    return Path(os.environ.get(CACHE) or "~/.cache/meshpar").expanduser().absolute()


def fetch(objects: Mapping[str, Mapping[str, Any]], where: str) -> list[Path]:
    """Return local copies of objects, from their URLs and fsspec's information about them.

    An object is downloaded once. The folder of a copy depends on the object's version, so a changed object is
    downloaded again. The path of a copy ends with the path of the object.
    """
    copies, missing = [], dict[str, Path]()
    for url, info in objects.items():
        version = [str(info.get(key)) for key in ("ETag", "etag", "generation", "LastModified", "mtime", "size")]
        digest = hashlib.blake2b(" ".join([url, *version]).encode(), digest_size=16).hexdigest()
        parts = url.partition("://")[2].split("/")
        if {"", ".", ".."} & {*parts}:
            reason = "its name has a component that is empty or consists of dots"
            raise problem(where, f"copy {url[:200]}", reason, "rename the object", code="bad-syntax")
        copies.append(cache_folder().joinpath("files", digest, *parts))
        if not copies[-1].is_file():
            missing[url] = copies[-1]
    if missing:
        # Other processes may copy the same files, so a complete copy is renamed.
        partial = [path.with_name(f"{path.name}.{secrets.token_hex(8)}") for path in missing.values()]
        for path in partial:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with accessing(next(iter(missing)), where, f"copy it to {cache_folder()}"):
            filesystem(next(iter(missing)), where).get(list(missing), list(map(str, partial)))
        for source, target in zip(partial, missing.values(), strict=True):
            source.replace(target)
    return copies


def copy_of(path: str, where: str) -> str:
    """Return a local copy of a file if `path` is a URL, and otherwise `path`."""
    if not is_url(path):
        return path
    url = join(path)
    with accessing(url, where, "read it"):
        info = filesystem(url, where).info(url)
    return str(fetch({url: info}, where)[0])
