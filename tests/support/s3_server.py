"""Runs a real S3 server for tests, RADOS Gateway by radosgw.sh, and disturbs it as a test asks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

SCRIPT = Path(__file__).with_name("radosgw.sh")
KEY, SECRET = "test-key", "test-secret"
READER = "reader"  # A role with all permissions, for sessions that expire.
BUCKET = "adapters"


def why_not() -> str | None:
    """Returns why there is no such server on this machine, or None if there is one."""
    root = os.environ.get("RADOSGW_ROOT")
    if shutil.which("radosgw", path=f"{root}/usr/bin" if root else None) is None:
        return (
            "no radosgw: install Debian's packages radosgw, ceph-mon and ceph-osd, or unpack them with "
            "tests/support/radosgw.sh unpack DIR and set RADOSGW_ROOT=DIR"
        )
    return None


def write_credentials(file: Path, key: str, secret: str, token: str = "") -> None:
    """Writes the credentials in the format of AWS's tools."""
    lines = ["[default]", f"aws_access_key_id={key}", f"aws_secret_access_key={secret}"]
    file.write_text("\n".join(lines + [f"aws_session_token={token}"] * bool(token)) + "\n")


class RadosGateway:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_role = False
        port = _two_free_ports()
        self._run("start", str(port))
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, data: bytes, **fields: Any) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data, **fields)

    def put_folder(self, folder: Path, prefix: str) -> None:
        for file in folder.iterdir():
            self.put(f"{prefix}/{file.name}", file.read_bytes())

    def rot(self, key: str) -> None:
        """Replaces bytes of the object without changing its size and ETag; the object may have at most 4 MiB."""
        self._run("rot", key)

    def suspend_user(self) -> None:
        self._run("admin", "user", "suspend", "--uid=test")

    def enable_user(self) -> None:
        self._run("admin", "user", "enable", "--uid=test")

    def session(self, seconds: int) -> tuple[str, str, str]:
        """Returns the key, secret and token of a session that expires."""
        if not self._has_role:
            may = {"Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/test"]}, "Action": ["sts:AssumeRole"]}
            role = f"--role-name={READER}"
            self._run("admin", "role", "create", role, f"--assume-role-policy-doc={_policy(may)}")
            all_of_s3 = _policy({"Effect": "Allow", "Action": ["s3:*"], "Resource": ["*"]})
            self._run("admin", "role-policy", "put", role, "--policy-name=s3", f"--policy-doc={all_of_s3}")
            self._has_role = True
        sts: Any = boto3.client(
            "sts",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(parameter_validation=False),  # AWS itself allows no sessions below 900 s.
        )
        asked = {"RoleArn": f"arn:aws:iam:::role/{READER}", "RoleSessionName": "session", "DurationSeconds": seconds}
        given = sts.assume_role(**asked)["Credentials"]
        return given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"]

    def kill(self) -> None:
        """Kills the server at once; the objects stay."""
        pid = int((self.folder / "client.rgw.a.pid").read_text())
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        self._run("gateway")

    def stop(self) -> None:
        self._run("stop")

    def _run(self, verb: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(SCRIPT), verb, str(self.folder), *arguments], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr


def _policy(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _two_free_ports() -> int:
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
