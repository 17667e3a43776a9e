"""A container image as one file without a container engine: the docker-archive format, one layer."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    """with tag, as in local/pause:1; not `latest`, which the kubelet would pull"""
    folders: Mapping[str, int] = field(default_factory=dict)
    """empty ones, with their modes"""
    links: Mapping[str, str] = field(default_factory=dict)
    """path -> target"""
    programs: Mapping[str, Path] = field(default_factory=dict)
    """path -> executable on this machine"""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


def write(image: Image, target: Path) -> None:
    layer = _layer(image)
    layer_digest = hashlib.sha256(layer).hexdigest()
    settings = {
        "Cmd": list(image.command),
        "Env": [f"{name}={value}" for name, value in image.environment.items()],
    }
    config = json.dumps(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created_by": "spillway test bed"}],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [image.name], "Layers": [layer_name]}]).encode()
    unfinished = target.with_suffix(".new")
    with tarfile.open(unfinished, "w") as archive:
        for name, content in ((config_name, config), (layer_name, layer), ("manifest.json", manifest)):
            _add(archive, name, content)
    unfinished.rename(target)


def _layer(image: Image) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as layer:
        for path, mode in image.folders.items():
            entry = tarfile.TarInfo(path.strip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            layer.addfile(entry)
        for path, destination in image.links.items():
            entry = tarfile.TarInfo(path.strip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, destination
            layer.addfile(entry)
        for path, program in image.programs.items():
            _add(layer, path.strip("/"), program.read_bytes(), 0o755)
    return stream.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
