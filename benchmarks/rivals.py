"""Installs rivals that this project does not depend on: once, into build/rivals, outside of the virtual environment.

`deepspeed()` puts DeepSpeed on the path of this process. It is a source distribution whose operators are compiled on
first use (a minute or two each). Both installing and compiling happen once per checkout and print a line.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

RIVALS = Path(__file__).parents[1] / "build" / "rivals"
DEEPSPEED = "deepspeed==0.19.8"
NEEDS = ("einops", "hjson", "msgpack", "psutil", "py-cpuinfo", "tqdm")
"""what DeepSpeed imports beyond the trainer's own dependencies"""


def deepspeed() -> None:
    """Makes `import deepspeed` work in this process: on the CPU, with one rank. Builds operators under build/rivals."""
    site = RIVALS / "site"
    if not (site / "deepspeed").is_dir():
        _install(site)
    sys.path.append(str(site))  # last, so that torch and numpy are the environment's
    extensions = RIVALS / "extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    # Held until this process ends, because benchmarks that run at the same time would disturb each other. So nothing
    # else is building now, and a build's lock was left by a killed build; the next one would wait for it forever.
    fcntl.flock(os.open(RIVALS / "turn", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_EX)
    for lock in extensions.glob("*/lock"):
        lock.unlink()
    os.environ.update(
        DS_ACCELERATOR="cpu",
        DS_SKIP_CUDA_CHECK="1",
        TORCH_EXTENSIONS_DIR=str(extensions),
        PATH=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",  # ninja
    )
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ.update(rank)


def _install(site: Path) -> None:
    print(f"once: installing {DEEPSPEED} into {site}", flush=True)
    begin = time.perf_counter()
    installer = RIVALS / "installer"
    venv.create(installer, with_pip=True, clear=True)
    pip = [str(installer / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    unfinished = site.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    command = [*pip, "--no-deps", "--target", str(unfinished), DEEPSPEED, *NEEDS]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"pip could not install {DEEPSPEED}, the rival of this benchmark:\n{ended.stderr}")
    shutil.rmtree(site, ignore_errors=True)
    unfinished.rename(site)
    print(f"once: installed in {time.perf_counter() - begin:.0f} s", flush=True)
