"""Fixtures with buckets on loopback: `bucket` (S3, served by moto) and `gs_bucket` (gcp-storage-emulator)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

GS_SERVER = """
import contextlib, sys
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

download = objects.download

def download_with_generation(request, response, storage, *args, **kwargs):
    with contextlib.suppress(NotFound):
        file = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = file["generation"]
    return download(request, response, storage, *args, **kwargs)

objects.download = download_with_generation

from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True).run()
"""
"""The emulator, with the header that TensorStore reads the version of an object from. It ignores preconditions."""


@contextlib.contextmanager
def served(package: str, *args: str) -> Iterator[str]:
    """Run a server, with the port as its last argument, and yield its address when it accepts connections."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"serves buckets with {package}, which needs `pip install meshpar[dev]`")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *args, str(port)], **quiet) as server:
        deadline = time.monotonic() + 120
        while True:
            assert server.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with served("moto", "-m", "moto.server", "-p") as address:
        yield address


@pytest.fixture(scope="session")
def gs_server() -> Iterator[str]:
    with served("gcp_storage_emulator", "-c", GS_SERVER) as address:
        yield address


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket. This process and its children have access to it."""
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    places = {"AWS_ENDPOINT_URL": s3_server, "AWS_EC2_METADATA_DISABLED": "true", "MESHPAR_CACHE": f"{tmp_path}/cache"}
    return _new_bucket("s3", {**keys, **places}, monkeypatch)


@pytest.fixture
def gs_bucket(gs_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket of the other store."""
    places = {"STORAGE_EMULATOR_HOST": gs_server, "TENSORSTORE_GCS_HTTP_URL": gs_server}
    account = {"GOOGLE_CLOUD_PROJECT": "test", "CLOUDSDK_CONFIG": os.devnull, "MESHPAR_CACHE": f"{tmp_path}/cache"}
    return _new_bucket("gs", {**places, **account}, monkeypatch)


def _new_bucket(scheme: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    from meshpar.sharding import remote

    for name, value in env.items():
        monkeypatch.setenv(name, value)
    url = f"{scheme}://test-{secrets.token_hex(8)}"
    remote.filesystem(url, "the tests").mkdir(url.partition("://")[2])
    return url
