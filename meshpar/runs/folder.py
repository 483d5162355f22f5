"""Run folders: local, or in a bucket with a local copy of all files except the checkpoints.

    s3://bucket/runs/gpt/    checkpoints/   written and read by orbax
                             metrics.jsonl, recipe.json, loss.png, ...   ◄── upload ── a temporary folder

Objects cannot be appended to or mapped into memory, and have no locks. So a run writes local files, which are uploaded
periodically, before each checkpoint and at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshpar.loop.checkpoint import Checkpoints
from meshpar.pod.coordination import this_pod
from meshpar.pod.signals import scratch
from meshpar.sharding import remote
from meshpar.sharding.errors import MeshparError, problem
from meshpar.sharding.host_resources import is_url

CHECKPOINTS = "checkpoints"
"""Subfolder of a run with its checkpoints."""
UPLOAD_EVERY_S = 15.0
"""Seconds between two uploads of changed files."""
LEASE_S = 60.0
"""A run in a bucket has ended if it has not renewed its lease for this time."""
_LEASE = ".lease"
_NOT_READ = {CHECKPOINTS, _LEASE, "profile", "tensorboard", "wandb"}
"""Objects and folders that are not downloaded. A resumed run only adds files to the profiles and event files."""
_MAX_UPLOAD_SHARE = 0.1
"""Maximum fraction of the time that is spent on uploads in the background: metrics.jsonl is uploaded in full."""


class RunFolder:
    """A folder of a run. `folder / name` is a local path; `str(folder)` is the path or URL for messages.

    Attributes:
      local: the folder, or the temporary copy of a folder in a bucket.
      url: the URL of a folder in a bucket, or None.
      uploads: whether files are uploaded in the background and after an error. The first `upload` turns it on.
    """

    def __init__(self, local: Path, url: str | None = None) -> None:
        self.local, self.url = local, url
        self._uploaded: dict[str, tuple[int, int]] = {}
        self.uploads, self._lock, self._lost = False, threading.Lock(), False

    def __str__(self) -> str:
        return self.url or str(self.local)

    def __truediv__(self, name: str) -> Path:
        return self.local / name

    @property
    def path(self) -> Any:
        """The folder as a path, to read the files of a finished run: an `epath.Path` for a bucket."""
        from etils import epath

        return self.local if self.url is None else epath.Path(self.url)

    @property
    def checkpoints(self) -> Any:
        """The folder of the checkpoints, for `Checkpoints`."""
        return self.local / CHECKPOINTS if self.url is None else remote.join(self.url, CHECKPOINTS)

    def has_checkpoints(self) -> bool:
        """Return whether the run has a checkpoint folder; in a bucket, whether it has a complete checkpoint."""
        return self.checkpoints.is_dir() if self.url is None else bool(Checkpoints(self.checkpoints).steps())

    def download(self) -> None:
        """Copy the files that a resumed run or a command reads to the local folder."""
        if self.url is None:
            return
        files, root = remote.filesystem(self.url, self._where), self.url.partition("://")[2]
        with remote.accessing(self.url, self._where, "read it"), contextlib.suppress(FileNotFoundError):
            names = [name for name in files.ls(root, detail=False) if Path(name).name not in _NOT_READ]
            paths = [path for name in names for path in files.find(name)]
            targets = [self.local / path.removeprefix(f"{root}/") for path in paths]
            for target in targets:
                if not target.resolve().is_relative_to(self.local.resolve()):
                    reason, fix = "its name leads out of the folder", "remove the object"
                    raise problem(self._where, f"copy {target.name}", reason, fix, code="bad-syntax")
                target.parent.mkdir(parents=True, exist_ok=True)
            if paths:
                files.get(paths, list(map(str, targets)))
        self._uploaded = self._states()

    def upload(self) -> None:
        """Upload the files that changed since the last upload.

        Raises:
          ValueError: if an upload fails, or if a second run has replaced the lease.
        """
        if self.url is None:
            return
        with self._lock, remote.accessing(self.url, self._where, "upload files to it"):
            self.uploads = True
            if self._lost:
                reason, fix = "a second run has replaced the lease of this run", "use a different --name"
                raise problem(self._where, "write to it", reason, fix, code="conflict")
            states = self._states()
            changed = [name for name, state in states.items() if self._uploaded.get(name) != state]
            if changed:
                targets = [remote.join(self.url, name) for name in changed]
                remote.filesystem(self.url, self._where).put([str(self.local / name) for name in changed], targets)
            self._uploaded = states

    @property
    def _where(self) -> str:
        return f"run {self}"

    def _states(self) -> dict[str, tuple[int, int]]:
        """Return the size and time of each file. Temporary files of `replace_file` and links are left out."""
        states = {}
        for path in self.local.rglob("*"):
            if path.suffix != ".new" and not path.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if path.is_file():
                        states[path.relative_to(self.local).as_posix()] = (status.st_size, status.st_mtime_ns)
        return states

    @contextlib.contextmanager
    def leased(self, *, warn: Callable[[str], object]) -> Iterator[None]:
        """Refuse a second run in this folder during the block, and upload changed files in the background.

        The lease is an object with a counter, which increases every `UPLOAD_EVERY_S` seconds while the run is alive.
        Clocks of hosts are not compared.

        Raises:
          ValueError: if the folder has a lease whose counter increases.
        """
        assert self.url is not None
        files, path = remote.filesystem(self.url, self._where), remote.join(self.url, _LEASE)
        identity = {"host": socket.gethostname(), "pid": os.getpid(), "id": secrets.token_hex(8)}
        with remote.accessing(self.url, self._where, "read its lease"):
            self._await_lease(lambda: json.loads(files.cat_file(path)) if files.exists(path) else None, warn)
        ended, count = threading.Event(), 0

        def renew() -> None:
            nonlocal count
            count += 1
            files.pipe_file(path, json.dumps({**identity, "count": count}).encode())

        def keep() -> None:
            was_reported, next_upload = False, 0.0
            while not ended.wait(UPLOAD_EVERY_S):
                try:
                    self._lost = json.loads(files.cat_file(path))["id"] != identity["id"]
                    if self._lost:
                        return  # the next `upload` raises
                    renew()
                    if self.uploads and (began := time.monotonic()) >= next_upload:
                        self.upload()
                        next_upload = began + (time.monotonic() - began) / _MAX_UPLOAD_SHARE
                    was_reported = False
                except Exception as error:  # the next upload before a checkpoint raises, if this persists
                    if not was_reported:
                        warn(f"{self}: files could not be uploaded; the run continues and tries again ({error})")
                    was_reported = True

        with remote.accessing(self.url, self._where, "write its lease"):
            renew()
        thread = threading.Thread(target=keep, name="meshpar-uploads", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if not self._lost:
                with contextlib.suppress(Exception):  # an old lease only delays the next start
                    files.rm_file(path)

    def _await_lease(self, read: Callable[[], Any], warn: Callable[[str], object]) -> None:
        first, deadline = read(), time.monotonic() + LEASE_S
        if first is None:
            return
        owner = f"process {first['pid']} on {first['host']}"
        warn(f"{self} has a lease of {owner}: waiting up to {LEASE_S:.0f} s to see whether it is renewed")
        while time.monotonic() < deadline:
            time.sleep(UPLOAD_EVERY_S / 10)
            current = read()
            if current is None:
                return
            if current != first:
                fix = "stop that process, wait until it ends, or use a different --name"
                raise problem(self._where, "write to it", f"{owner} is training in this folder", fix, code="conflict")


@contextlib.contextmanager
def run_folder(
    path: str | os.PathLike[str], *, write: bool = False, warn: Callable[[str], object] = warnings.warn
) -> Iterator[RunFolder]:
    """Yield the folder of a run. A folder in a bucket is copied to a temporary folder without its checkpoints.

    Args:
      path: a local path, or a gs:// or s3:// URL.
      write: whether a run writes to the folder. In a bucket, this process checks that it can write and uploads changed
        files, and process 0 takes the lease.
      warn: receives messages about the lease and about failed uploads.

    Raises:
      ValueError: if the scheme is not supported, the bucket cannot be used, or a second run writes to the folder.
    """
    if not is_url(path):
        yield RunFolder(Path(path))
        return
    url = remote.join(path)
    if write:
        remote.check_access(url, f"run {url}")
    temporary = Path(tempfile.mkdtemp(prefix="meshpar-run-"))
    scratch.add(temporary)  # on Ctrl-C the command may exit without running the `finally` block
    folder = RunFolder(temporary / url.rpartition("/")[2], url)
    pod, is_kept = this_pod(), False
    has_lease = write and (pod is None or pod.process_id == 0)

    def upload_last_changes() -> None:
        nonlocal is_kept
        try:
            folder.upload()
        except MeshparError as error:
            is_kept = True
            error.add_note(f"the files of the run are in {folder.local}")
            raise

    try:
        with folder.leased(warn=warn) if has_lease else contextlib.nullcontext():
            folder.download()
            try:
                yield folder
            except BaseException as error:
                if folder.uploads:
                    try:
                        upload_last_changes()
                    except MeshparError as upload_error:  # the error that ended the block is more important
                        error.add_note(" ".join([str(upload_error), *upload_error.__notes__]))
                raise
            if write:
                upload_last_changes()
    finally:
        if not is_kept:
            shutil.rmtree(temporary, ignore_errors=True)
        scratch.discard(temporary)
