"""The AdamW update on the CPU, from the gradient that backward produces to the parameter that the next forward reads.

Ours: csrc through kernels.native. Rivals: torch's fused AdamW (`torch.optim.AdamW(fused=True)`, and its kernel
`torch._fused_adamw_(grad_scale=...)`, which saves a pass over the gradient when it is clipped) and DeepSpeed (its real
`engine.step()`: ZeRO-2 with the optimizer offloaded, DeepSpeedCPUAdam). All run in turn in one process, with the same
number of threads and the same kind of memory.

  kernel      one AdamW step. Ours reads a bfloat16 gradient and writes a bfloat16 parameter; theirs are float32 only.
  sequence    bfloat16 gradient -> norm -> clip -> update -> bfloat16 parameter, and the same without norm and clip.
              torch: upcast, clip_grad_norm_, step, downcast; or upcast, norm, step with grad_scale, downcast; the
              faster of the two counts. DeepSpeed: engine.step() and one plain copy of the gradient to float32.
              DeepSpeed makes this copy in engine.backward(), where it takes several times as long. That time
              (`backward DeepSpeed`, for a backward that computes nothing) is shown but not counted.
  memory      our rate (28 bytes a parameter) over that of a loop that only reads and writes the same arrays.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

# isort: off
from spillway_trainer import environment  # noqa: F401 - before torch is imported
# isort: on

import torch
from torch import Tensor

import paired
import rivals
from compiled import compiled
from spillway_trainer.kernels import native
from spillway_trainer.kernels.reference import UpdateScalars

NUM_PARAMETERS = 16 * 2**20
"""about 300 MiB of arrays per contestant; they take turns, so none finds its arrays in a cache"""
MAX_NORM = 1.0
RATE, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
BYTES_PER_PARAMETER = 28
NUM_THREADS = len(os.sched_getaffinity(0))


def scalars(gradient_scale: float) -> UpdateScalars:
    return UpdateScalars(RATE, *BETAS, EPS, DECAY, BETAS[0], BETAS[1], gradient_scale)


def initial_values() -> Tensor:
    """Returns the initial parameters, in bfloat16 because DeepSpeed makes its masters from bfloat16 parameters."""
    return (torch.randn(NUM_PARAMETERS, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()


def clip_factor(norm: float) -> float:
    return min(1.0, MAX_NORM / (norm + 1e-6))


class Ours:
    """float32 masters and moments in host memory, bfloat16 gradient and parameter."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self.master = initial_values().float()
        self.exp_avg, self.exp_avg_sq = torch.zeros(NUM_PARAMETERS), torch.zeros(NUM_PARAMETERS)
        self.parameter = self.master.bfloat16()
        self.accumulator = torch.zeros(NUM_PARAMETERS)

    def update(self, gradient_scale: float = 1.0, gradient: Tensor | None = None) -> None:
        moments = (self.exp_avg, self.exp_avg_sq)
        given = self.gradient if gradient is None else gradient
        native.update(scalars(gradient_scale), self.master, moments, given, self.parameter, num_threads=NUM_THREADS)

    def norm(self) -> float:
        return native.square_sum(self.gradient, num_threads=NUM_THREADS).norm()

    def clipped(self) -> None:
        self.update(clip_factor(self.norm()))

    def accumulated(self) -> None:
        """Clips and updates as with several micro-batches, whose gradients are first summed in float32."""
        native.accumulate(self.accumulator, self.gradient, True, num_threads=NUM_THREADS)
        norm = native.square_sum(self.accumulator, num_threads=NUM_THREADS).norm()
        self.update(clip_factor(norm), self.accumulator)


class Torch:
    """torch.optim.AdamW on a float32 master, with the casts that a bfloat16 model needs."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self.master = torch.nn.Parameter(initial_values().float())
        self.master.grad = gradient.float()
        self.parameter = self.master.detach().bfloat16()
        self.optimizer = torch.optim.AdamW([self.master], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)
        self.optimizer.state[self.master] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros(NUM_PARAMETERS),
            "exp_avg_sq": torch.zeros(NUM_PARAMETERS),
        }

    def plain(self) -> None:
        self._upcast()
        self.optimizer.step()
        self._downcast()

    def clipped(self) -> None:
        self._upcast()
        torch.nn.utils.clip_grad_norm_([self.master], MAX_NORM)
        self.optimizer.step()
        self._downcast()

    def clipped_in_the_kernel(self) -> None:
        self._upcast()
        norm = torch.linalg.vector_norm(self.master.grad)
        state = self.optimizer.state[self.master]
        state["step"] += 1
        with torch.no_grad():
            torch._fused_adamw_(
                [self.master],
                [self.master.grad],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                lr=RATE,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=DECAY,
                eps=EPS,
                amsgrad=False,
                maximize=False,
                grad_scale=torch.clamp((norm + 1e-6) / MAX_NORM, min=1.0),
                found_inf=torch.zeros(()),
            )
        self._downcast()

    def _upcast(self) -> None:
        assert self.master.grad is not None
        self.master.grad.copy_(self.gradient)

    def _downcast(self) -> None:
        self.parameter.copy_(self.master.detach())


class GivesGradient(torch.autograd.Function):
    """A loss of 0 whose backward computes nothing: it removes the gradient from the list `given` and returns it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, given: list[Tensor]) -> Tensor:
        ctx.given = given
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.given.pop(), None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(initial_values())

    def forward(self, given: list[Tensor]) -> Tensor:
        return GivesGradient.apply(self.weight, given)


class DeepSpeed:
    """ZeRO-2, optimizer on the CPU, bfloat16, one rank."""

    def __init__(self, gradient: Tensor) -> None:
        import deepspeed  # noqa: PLC0415
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        }
        model = Model()
        options = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "adamw_mode": True}
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=DeepSpeedCPUAdam(model.parameters(), **options), config=config
        )
        self.gradient = gradient
        self.parameter = torch.nn.Parameter(initial_values().float())
        self.parameter.grad = gradient.float()
        self.kernel = DeepSpeedCPUAdam([self.parameter], **options)

    def sequence_seconds(self, max_norm: float) -> float:
        """Returns the seconds of one copy of the gradient to float32 and of engine.step()."""
        self.engine.backward(self.engine([self.gradient.clone()]))
        self.optimizer.clip_grad = max_norm

        def upcast_and_step() -> None:
            self.parameter.grad.copy_(self.gradient)
            self.engine.step()

        return paired.timed(upcast_and_step)()

    def backward_seconds(self) -> float:
        loss = self.engine([self.gradient.clone()])
        seconds = paired.timed(lambda: self.engine.backward(loss))()
        self.engine.step()
        return seconds


def copy_update_loop() -> Callable[..., None]:
    """Returns the function of benchmarks/copy_update.c."""
    function = compiled("copy_update").copy_update
    function.argtypes = [*[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32]
    function.restype = None
    return function


def check_that_all_do_the_same(ours: Ours, theirs: Torch, deepspeed: DeepSpeed) -> None:
    """Takes one clipped step from the same state with each. Exits unless the results are equal up to rounding, because
    only then may their times be compared."""
    ours.clipped()
    theirs.clipped_in_the_kernel()
    deepspeed.sequence_seconds(MAX_NORM)
    for name, parameter in (("torch", theirs.parameter), ("DeepSpeed", deepspeed.engine.module.weight.detach())):
        apart = float((parameter.float() - ours.parameter.float()).abs().max())
        if apart > 2**-9:  # one unit of a bfloat16 near 0.1, the largest value
            raise SystemExit(f"{name} computes something else: a parameter is {apart} apart from ours")


def measure(quick: bool) -> dict[str, float]:
    torch.set_num_threads(NUM_THREADS)
    rivals.deepspeed()
    gradient = (torch.randn(NUM_PARAMETERS, generator=torch.Generator().manual_seed(0)) * 1e-3).bfloat16()
    ours, theirs, deepspeed = Ours(gradient), Torch(gradient), DeepSpeed(gradient)
    check_that_all_do_the_same(ours, theirs, deepspeed)
    loop = copy_update_loop()
    arrays = (ours.master, ours.exp_avg, ours.exp_avg_sq, gradient, ours.parameter)
    pointers = [tensor.data_ptr() for tensor in arrays]
    # Contestants alternate, so that none finds its arrays in the cache.
    cells = {
        "kernel ours": paired.timed(ours.update),
        "kernel torch": paired.timed(theirs.optimizer.step),
        "kernel DeepSpeed": paired.timed(deepspeed.kernel.step),
        "loop plain": paired.timed(lambda: loop(*pointers, NUM_PARAMETERS, 0, NUM_THREADS)),
        "clip torch": paired.timed(theirs.clipped),
        "clip ours": paired.timed(ours.clipped),
        "clip torch kernel": paired.timed(theirs.clipped_in_the_kernel),
        "clip DeepSpeed": lambda: deepspeed.sequence_seconds(MAX_NORM),
        "loop streaming": paired.timed(lambda: loop(*pointers, NUM_PARAMETERS, 1, NUM_THREADS)),
        "no clip torch": paired.timed(theirs.plain),
        "no clip ours": paired.timed(ours.update),
        "no clip DeepSpeed": lambda: deepspeed.sequence_seconds(0.0),
        "accumulated ours": paired.timed(ours.accumulated),
        "norm ours": paired.timed(ours.norm),
    }
    samples = paired.alternate(cells, seconds=18 if quick else 240)
    seconds = {name: paired.median(values) for name, values in samples.items()}
    print(
        f"{NUM_PARAMETERS / 1e6:.1f} M parameters, {NUM_THREADS} threads, {native.isa()}, "
        f"{len(samples['norm ours'])} rounds"
    )
    seconds["backward DeepSpeed"] = paired.median([deepspeed.backward_seconds() for _ in range(3)])
    print(f"{'':>20}  ns/parameter  28 B x rate")
    for name, value in seconds.items():
        rate = BYTES_PER_PARAMETER * NUM_PARAMETERS / value
        print(f"{name:>20}  {value / NUM_PARAMETERS * 1e9:12.3f}  {rate / 1e9:6.1f} GB/s")

    def against(ours: str, *rivals: str) -> float:
        """Returns the median paired ratio of `ours` to the fastest rival."""
        fastest = min(rivals, key=seconds.__getitem__)
        ratio = paired.paired_ratio(samples[ours], samples[fastest])
        print(f"{ours:>20} is {ratio} times as fast as {fastest}")
        return ratio.median

    return {
        "kernel_vs_best_rival": against("kernel ours", "kernel torch", "kernel DeepSpeed"),
        "sequence_vs_deepspeed": min(
            against("clip ours", "clip DeepSpeed"), against("no clip ours", "no clip DeepSpeed")
        ),
        "sequence_vs_torch": min(
            against("clip ours", "clip torch", "clip torch kernel"), against("no clip ours", "no clip torch")
        ),
        "fraction_of_copy_update": against("kernel ours", "loop plain"),
        "fraction_of_streaming_copy_update": against("kernel ours", "loop streaming"),
    }


if __name__ == "__main__":
    paired.main("cpu_adam", __doc__ or "", measure)
