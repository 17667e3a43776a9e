"""The built trainer image without a cluster: unpacked, and run by runc as a pod would be, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from harness.native_builds import run
from harness.places import ROOT
from testbed.layout import cache

USER = 1000


def built_trainer() -> Path:
    """The archive of this checkout's trainer image, which is built if it does not exist yet."""
    run(sys.executable, str(ROOT / "hack" / "images.py"), "trainer")
    found = json.loads((cache() / "images" / "trainer.json").read_text(encoding="utf-8"))
    return Path(found["archive"])


def unpack(archive: Path, bundle: Path) -> dict[str, Any]:
    """Unpacks the image's files into bundle/rootfs; returns the image's settings (Env, User, Entrypoint)."""
    root = bundle / "rootfs"
    root.mkdir(parents=True)
    with tarfile.open(archive) as image:
        manifest = json.load(image.extractfile("manifest.json"))[0]
        settings: dict[str, Any] = json.load(image.extractfile(manifest["Config"]))["config"]
        for layer in manifest["Layers"]:
            with subprocess.Popen(["tar", "-x", "-C", str(root)], stdin=subprocess.PIPE) as tar:
                source = image.extractfile(layer)
                while block := source.read(1 << 24):
                    tar.stdin.write(block)
                tar.stdin.close()
            assert tar.returncode == 0
    return settings


def run_offline(
    bundle: Path, command: list[str], environment: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs `command` in the bundle as uid 1000 without capabilities and without network. The root file system is
    read-only; `folder` is mounted at its own path."""
    run("runc", "spec", "--bundle", str(bundle))
    file = bundle / "config.json"
    given = json.loads(file.read_text(encoding="utf-8"))
    given["process"] |= {
        "terminal": False, "user": {"uid": USER, "gid": USER}, "args": command, "env": environment, "cwd": "/tmp",
        "capabilities": {}, "noNewPrivileges": True, "rlimits": [],
    }  # fmt: skip
    given["root"] = {"path": "rootfs", "readonly": True}
    given["mounts"] += [
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
        {"destination": str(folder), "type": "bind", "source": str(folder), "options": ["rbind", "rw"]},
    ]
    file.write_text(json.dumps(given), encoding="utf-8")
    started = ["runc", "--root", str(bundle / "runc"), "run", "--bundle", str(bundle), f"spillway-{bundle.name}"]
    return subprocess.run(started, capture_output=True, text=True, check=False)
