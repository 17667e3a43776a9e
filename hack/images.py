"""Builds the operator's and the trainer's image with buildah on a base made here: no container engine, no registry.

    python hack/images.py                   both, as docker-archives in ~/.cache/spillway/testbed/images
    python hack/images.py operator          one of them
    python hack/images.py --folder DIR      in another folder

An image is built again if its content has changed: its tag is the hash of the Dockerfile, the files that it copies and
its base. NAME.json beside the archive describes the image (`image`, `archive`, `layers`) for programs that import it:
`ctr --namespace k8s.io images import ARCHIVE`.

Needs root, buildah and debootstrap (Debian packages). This machine's certificate authorities, pip.conf and uv.toml are
mounted while packages are fetched and are in no layer.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20

DEBIAN = "bookworm"
DEBIAN_PACKAGES = ("ca-certificates", "python3", "python3-venv")
REMOVED = ("var/lib/apt/lists", "var/cache/apt", "var/log", "usr/share/man", "usr/share/locale", "usr/share/info")
"""folders whose contents an image does not need; licences stay"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

WHEEL = ("pyproject.toml", "uv.lock", "README.md", "LICENSE", "CMakeLists.txt", "operator", "trainer_image")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One image of this repository."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    """files and folders that the Dockerfile copies"""
    max_bytes: int | None
    """sum of the uncompressed layers; None = no bound"""
    keeps_layers: bool
    """whether the builder's layers stay in buildah's store, so that an edit builds in seconds"""


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("operator", "operator/Dockerfile", WHEEL, 250_000_000, keeps_layers=True),
        Recipe("trainer", "trainer_image/Dockerfile", (*WHEEL, "csrc"), None, keeps_layers=False),
    )
}


@dataclass(frozen=True, slots=True)
class Built:
    """An image in a docker-archive."""

    image: str
    """name and tag, as pods name it"""
    archive: str
    layers: tuple[int, ...]
    """uncompressed bytes of each layer, the base's first"""
    build_seconds: float

    @property
    def total_bytes(self) -> int:
        return sum(self.layers)


class BuildFailed(Exception):
    """Raised if a build fails. The message is printed on the terminal."""


@dataclass(frozen=True, slots=True)
class Buildah:
    """buildah with a store of its own, so that it does not see or change any other images."""

    store: Path
    driver: str
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, store: Path) -> Buildah:
        """Returns buildah with driver overlay (layers are shared) if the kernel allows it, else with vfs (each layer is
        a full copy)."""
        missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
        if missing:
            raise BuildFailed(f"{' and '.join(missing)} not found: apt-get install buildah debootstrap")
        if os.geteuid() != 0:
            raise BuildFailed("images are built by root here (debootstrap, chroot): run it as root")
        (store / "tmp").mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(store / "tmp")}
        for driver in [os.environ["STORAGE_DRIVER"]] if "STORAGE_DRIVER" in os.environ else ["overlay", "vfs"]:
            buildah = cls(store, driver, environment)
            if buildah._works():
                return buildah
        raise BuildFailed(f"buildah cannot use its store {store}: run `buildah --root {store} info` for the reason")

    def _works(self) -> bool:
        probe = self._run("from", "scratch")
        if probe.returncode:
            return False
        container = probe.stdout.strip()
        mounted = self._run("mount", container)
        self._run("rm", container)
        return mounted.returncode == 0

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        place = self.store / self.driver
        line = ["buildah", "--storage-driver", self.driver, "--root", f"{place}", "--runroot", f"{place}-run"]
        return subprocess.run(
            [*line, *arguments], env=self.environment, capture_output=True, text=True, cwd=ROOT, check=False
        )

    def __call__(self, *arguments: str) -> str:
        """Runs one command and returns its standard output. Raises BuildFailed with the end of its output."""
        done = self._run(*arguments)
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
            raise BuildFailed(f"buildah {' '.join(arguments[:2])} ended with {done.returncode}:\n{said}")
        return done.stdout.strip()

    def ids(self, *filters: str) -> set[str]:
        """Returns the ids of the images that match `filters`."""
        found = self._run("images", "--quiet", "--no-trunc", *filters)
        return set(found.stdout.split()) if found.returncode == 0 else set()


# --- the base ---------------------------------------------------------------------------------------------------------


def base_image(buildah: Buildah) -> str:
    """Returns an image of Debian with Python, made once by debootstrap. It replaces the Dockerfiles' default bases."""
    tag = hashlib.sha256(repr((DEBIAN, DEBIAN_PACKAGES, REMOVED)).encode()).hexdigest()[:12]
    image = f"localhost/spillway-base:{tag}"
    if buildah.ids(image):
        return image
    folder = buildah.store / f"base-{tag}"
    shutil.rmtree(folder, ignore_errors=True)
    _debootstrap(folder)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(folder), "/")
    buildah("config", "--env", f"PATH={PATH}", container)
    buildah("commit", "--quiet", "--rm", container, image)
    shutil.rmtree(folder)
    return image


def _debootstrap(folder: Path) -> None:
    packages = f"--include={','.join(DEBIAN_PACKAGES)}"
    line = ["debootstrap", "--variant=minbase", packages, DEBIAN, str(folder), *_mirror()]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"debootstrap ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    for name in REMOVED:
        for entry in (folder / name).iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for file in (folder / "usr/share/doc").rglob("*"):
        if file.is_file() and file.name != "copyright":
            file.unlink()
    for cache in list(folder.rglob("__pycache__")):
        shutil.rmtree(cache)


def _mirror() -> list[str]:
    """Returns the mirror of this machine's own packages if it has the same release, else an empty list."""
    line = ["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages"]
    listed = subprocess.run(line, capture_output=True, text=True, check=False).stdout.splitlines()
    return [words[1] for words in map(str.split, listed) if words[0] == DEBIAN][:1]


# --- an image ---------------------------------------------------------------------------------------------------------


def build(recipe: Recipe, buildah: Buildah, folder: Path) -> Built:
    """Returns the image in `folder`. Builds it unless the same image is there already."""
    base = base_image(buildah)
    image = f"local/spillway-{recipe.name}:{content_hash(recipe, base)}"
    record = folder / f"{recipe.name}.json"
    if record.is_file():
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["image"] == image and Path(known["archive"]).is_file():
            return Built(image, known["archive"], tuple(known["layers"]), 0.0)
    began = time.monotonic()
    outdated = buildah.ids("--filter", "dangling=true") | buildah.ids(
        "--filter", f"reference=localhost/local/spillway-{recipe.name}:*"
    )
    arguments = ["--build-arg", f"BASE={base}", "-f", recipe.dockerfile, "-t", f"localhost/{image}"]
    buildah("bud", f"--layers={str(recipe.keeps_layers).lower()}", *secrets(), *arguments, ".")
    for old in folder.glob(f"{recipe.name}-*.tar"):
        old.unlink()
    archive = folder / f"{recipe.name}-{image.rpartition(':')[2]}.tar"
    buildah("push", "--quiet", f"localhost/{image}", f"docker-archive:{archive}:{image}")
    if not recipe.keeps_layers:
        outdated |= buildah.ids(f"localhost/{image}")
    for old_image in outdated:
        buildah("rmi", "--force", old_image)
    built = Built(image, str(archive), tuple(layer_bytes(archive)), time.monotonic() - began)
    record.write_text(json.dumps(asdict(built), indent=2) + "\n", encoding="utf-8")
    return built


def content_hash(recipe: Recipe, base: str) -> str:
    """Returns the hash of everything that determines the image: names and contents of files, and the base."""
    digest = hashlib.sha256(base.encode())
    for path in (recipe.dockerfile, ".dockerignore", *recipe.inputs):
        for file in _files(ROOT / path):
            digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_mode & 0o111:o}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(path: Path) -> Iterator[Path]:
    """Yields the files at `path` that .dockerignore does not exclude."""
    if path.is_file():
        yield path
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so" and file.name != "Dockerfile":
            yield file


def secrets() -> list[str]:
    """Returns this machine's access to the package index as build secrets; files that it does not have are left out."""
    authorities = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    found = {
        "ca": [authorities],
        "pip": [os.environ.get("PIP_CONFIG_FILE", ""), "~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"],
        "uv": [os.environ.get("UV_CONFIG_FILE", ""), "~/.config/uv/uv.toml", "/etc/uv/uv.toml"],
    }
    lines = []
    for name, candidates in found.items():
        files = [Path(path).expanduser() for path in candidates if path]
        present = [file for file in files if file.is_file()]
        if present:
            lines += ["--secret", f"id={name},src={present[0]}"]
    return lines


def layer_bytes(archive: Path) -> list[int]:
    """Returns the uncompressed bytes of each layer of a docker-archive, in order."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        return [tar.getmember(layer).size for layer in json.load(manifest)[0]["Layers"]]


def report(recipe: Recipe, built: Built) -> str:
    """Describes for people what was built."""
    layers = " + ".join(f"{size / MIB:.1f}" for size in built.layers)
    spent = f"built in {built.build_seconds:.0f} s" if built.build_seconds else "up to date"
    return f"{recipe.name}: {built.image}, {layers} = {built.total_bytes / MIB:.1f} MiB, {spent}\n  {built.archive}"


def check_size(recipe: Recipe, built: Built) -> None:
    if recipe.max_bytes is not None and built.total_bytes > recipe.max_bytes:
        raise BuildFailed(f"{recipe.name} image: {built.total_bytes} bytes, more than its bound, {recipe.max_bytes}")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a lock, so that only one build runs at a time: two would prune each other's layers."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="images.py", description="Build the images as docker-archives.")
    parser.add_argument("images", nargs="*", choices=RECIPES, help="default: both")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spillway" / "testbed"
    parser.add_argument("--folder", type=Path, default=cache / "images", help=f"default: {cache / 'images'}")
    given = parser.parse_args(arguments)
    try:
        with alone(given.folder):
            buildah = Buildah.at(given.folder.parent / "buildah")
            for name in given.images or RECIPES:
                built = build(RECIPES[name], buildah, given.folder)
                sys.stdout.write(report(RECIPES[name], built) + "\n")
                check_size(RECIPES[name], built)
    except BuildFailed as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
