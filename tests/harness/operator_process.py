"""The operator as a process on this machine, with the rights of the chart's ServiceAccount: for tests that kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.patience import wait_until

READY_SECONDS = 120.0


def write_kubeconfig(path: Path, server: str, authority: Path | None, token: str) -> Path:
    """Writes a kubeconfig for a bearer token. `authority` is None if the server is a proxy without TLS."""
    cluster = {"server": server} | ({"certificate-authority": str(authority)} if authority else {})
    content = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "operator"}}],
    }  # fmt: skip
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@dataclass(slots=True)
class OperatorProcess:
    process: subprocess.Popen[bytes]
    log: Path
    health_port: int

    @classmethod
    def start(cls, kubeconfig: Path, log: Path, health_port: int, environment: Mapping[str, str]) -> OperatorProcess:
        given = {
            "PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "SPILLWAY_HEALTH_PORT": str(health_port),
            "SPILLWAY_PROGRESS_PORT": "0", "SPILLWAY_NODE_READER": "true", **environment,
        }  # fmt: skip
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spillway_operator"], env=given, stdout=output, stderr=subprocess.STDOUT
            )
        return cls(process, log, health_port)

    def wait_ready(self) -> None:
        def look() -> None:
            assert self.process.poll() is None, f"the operator ended with {self.process.returncode}: {self.tail()}"

        wait_until(self.is_ready, look, self.tail, READY_SECONDS)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Ends the process with SIGKILL, so that it flushes nothing."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def resident_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
