"""Rivals that the house does not depend on, installed once into build/rivals, beside the environment and not in it.

`deepspeed()` puts DeepSpeed on the path of this process. It is a source distribution whose operators are compiled on
first use (a minute or two each); both steps happen once per checkout and say so.
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
    """After this `import deepspeed` works in this process: on the CPU, one rank, operators built under build/rivals."""
    site = RIVALS / "site"
    if not (site / "deepspeed").is_dir():
        _install(site)
    sys.path.append(str(site))  # behind the environment: its torch and numpy are the ones that are compared
    extensions = RIVALS / "extensions"
    extensions.mkdir(parents=True, exist_ok=True)
    # Until this process ends: benchmarks beside each other would measure each other. So nobody is building now, and a
    # lock that is there was left by a build that was killed; the next one would wait for it for ever.
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
