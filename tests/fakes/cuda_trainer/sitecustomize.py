"""Python imports this at its start where the fake CUDA is in a container (`harness.fake_cuda.copied`): a rank gets the
fake's numbers.

Where the image brings Triton's library, Triton's kernels are compiled, loaded and launched as well; on the fake they
compute nothing, and the reference computes after them.
"""

import sys

if {"spillway_trainer", "spillway_trainer.sweep.worker"} & {
    *sys.orig_argv
}:  # a rank or a device of a sweep, no launcher
    import spillway_trainer.environment  # noqa: F401

    # isort: split
    # environment comes before torch
    import torch

    from fakes import cuda_kernels

    cuda_kernels.compose_attention()
    if torch.cuda.is_available():
        cuda_kernels.install()

        from spillway_trainer.kernels import dispatch as kernels
        from spillway_trainer.kernels import triton_kernels

        class Both:
            """A kernel of Triton's, then its reference."""

            def __getattr__(self, name):
                compiled, numbers = getattr(triton_kernels, name), getattr(cuda_kernels.TRITON, name)

                def run(*arguments):
                    compiled(*arguments)
                    return numbers(*arguments)

                return run

        if triton_kernels.DRIVER.exists():
            kernels.triton_kernels = Both
