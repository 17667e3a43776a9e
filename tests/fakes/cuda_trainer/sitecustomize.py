"""Python imports this at its start in a container with the fake CUDA (`harness.fake_cuda.copied`), so that a rank has
the fake's operators, which compute.

If the image contains Triton's library, Triton's kernels are also compiled, loaded and launched. On the fake they
compute nothing, so the reference computes after them.
"""

import sys

if {"spillway_trainer", "spillway_trainer.sweep.worker"} & {
    *sys.orig_argv
}:  # this is a rank or a sweep's device, and not a launcher
    import spillway_trainer.environment  # noqa: F401

    # isort: split
    # environment must be imported before torch
    import torch

    from fakes import cuda_kernels

    cuda_kernels.compose_attention()
    if torch.cuda.is_available():
        cuda_kernels.install()

        from spillway_trainer.kernels import dispatch as kernels
        from spillway_trainer.kernels import triton_kernels

        class Both:
            """Kernels that run Triton's kernel first, and then the reference."""

            def __getattr__(self, name):
                compiled, numbers = getattr(triton_kernels, name), getattr(cuda_kernels.TRITON, name)

                def run(*arguments):
                    compiled(*arguments)
                    return numbers(*arguments)

                return run

        if triton_kernels.DRIVER.exists():
            kernels.triton_kernels = Both
