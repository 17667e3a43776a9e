"""The contestants of activation_spill.py: each is a process that trains a model of `transformers` and holds its
activations in one way (its mode).

Every mode trains the same steps from the same weights: forward, backward and SGD; gradients stay allocated between
steps. The process first trains one step without any hook. The resident bytes after that step are the idle bytes. The
peak of a later step is what it occupies beyond them, by the kernel's count, including everything that the mode needs.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from transformers.models.t5.modeling_t5 import T5Attention

from spillway.plan import Policy
from spillway_trainer.activation_spill import Spilling
from spillway_trainer.activation_spill.store import SpillStore
from spillway_trainer.kernels import native
from spillway_trainer.resident_parameters import ResidentParameters
from spillway_trainer.saved_tensors import SavedTensors
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab

MIB = 1 << 20
VOCABULARY = 2048
SEED = 11


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its micro-batch. (hidden, num_layers) is a pair of the paper, an eighth as wide and twice as deep."""

    family: str
    hidden: int
    num_layers: int
    sequence: int
    batch: int


@dataclass(frozen=True, slots=True)
class Mode:
    """How activations are held. `share` (ours only) is the part of keep's saved bytes that may stay in memory.
    `num_layers` layers, the first ones in forward, are recomputed (checkpoint) or spilled (cut); None means all of them
    (checkpoint) or all but the last (cut)."""

    name: str
    share: float = 1.0
    num_layers: int | None = None
    batch_factor: int = 1


class StepFigures(NamedTuple):
    """The figures of one step."""

    seconds: float
    forward_seconds: float
    cpu_seconds: float
    peak_bytes: int
    """highest resident bytes, beyond the idle bytes"""
    saved_bytes: int
    """the ledger's peak: bytes of saved tensors on the device, including reloaded ones"""
    stalled_seconds: float
    written_bytes: int


class Built(NamedTuple):
    """What a process reports before the first step."""

    saved_bytes: int
    """bytes that mode keep holds at the end of forward; each storage counts once, parameters do not count"""
    idle_bytes: int
    num_saves: int
    """the number of tensors that one forward saves; parameters and every view count"""
    num_large_saves: int
    """how many of those are views of storages that are large enough to move"""


def build(shape: Shape) -> nn.Module:
    hidden, layers, sequence = shape.hidden, shape.num_layers, shape.sequence
    heads = hidden // 128
    torch.manual_seed(SEED)
    model: nn.Module
    if shape.family == "bert":
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                intermediate_size=4 * hidden, max_position_embeddings=sequence,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip
    elif shape.family == "gpt":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=sequence,
                activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    elif shape.family == "t5":
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=hidden, d_kv=128, num_heads=heads, d_ff=4 * hidden,
                num_layers=layers // 2, num_decoder_layers=layers - layers // 2, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0,
            )
        )  # fmt: skip
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads, intermediate_size=hidden * 11 // 4, max_position_embeddings=sequence,
            )
        )  # fmt: skip
    model.config.use_cache = False
    return model.train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers in the order of forward."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    layer = transformers.modeling_layers.GradientCheckpointingLayer
    return [each for one in lists for each in one if isinstance(each, layer)]


class Contestant:
    """One mode of one model in this process."""

    def __init__(self, shape: Shape, mode: Mode, directory: Path) -> None:
        torch.set_num_threads(1)
        self._model = build(shape)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, foreach=False)
        generator = torch.Generator().manual_seed(SEED)
        size = (shape.batch * mode.batch_factor, shape.sequence)
        self._tokens = torch.randint(1, VOCABULARY, size, generator=generator)
        self._exit = ExitStack()
        saved = SavedBytes(self._model)
        with saved:
            loss = self._loss()
        loss.backward()
        del loss
        self._optimizer.zero_grad(set_to_none=False)
        saved_bytes = saved.nbytes
        _trim()
        self.built = Built(saved_bytes, _resident("VmRSS"), saved.num_saves, saved.num_large_saves)
        self._spilling: Spilling | None = None
        self._lanes: CpuLanes | None = None
        self._ledger: DeviceLedger | None = None
        self._saved_bytes = saved_bytes
        self._around = self._attach(mode, directory)

    def step(self) -> StepFigures:
        before = self._moved()
        if self._ledger is not None:
            self._ledger.reset_peak()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        cpu, begin = time.process_time(), time.perf_counter()
        with self._around():
            loss = self._loss()
        middle = time.perf_counter()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self.loss = loss.item()
        del loss
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        after = self._moved()
        return StepFigures(
            seconds,
            middle - begin,
            cpu,
            _resident("VmHWM") - self.built.idle_bytes,
            self._ledger.peak_bytes if self._ledger is not None else self._saved_bytes,
            after[0] - before[0],
            int(after[1] - before[1]),
        )

    def digest(self) -> str:
        """Returns a hash of the last loss and of the present value of every parameter."""
        digest = hashlib.sha256(repr(self.loss).encode())
        for parameter in self._model.parameters():
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def close(self) -> None:
        self._exit.close()

    def _loss(self) -> Tensor:
        loss: Tensor = self._model(input_ids=self._tokens, labels=self._tokens).loss
        return loss

    def _moved(self) -> tuple[float, int]:
        if self._lanes is None:
            return 0.0, 0
        return self._lanes.stalled_seconds(), self._lanes.moved_bytes().get("nvme_write", 0)

    def _attach(self, mode: Mode, directory: Path) -> Callable[[], AbstractContextManager[object]]:
        """Sets `mode` up and returns a function that makes the context manager for each forward."""
        if mode.name == "keep":
            return nullcontext
        if mode.name == "checkpoint":
            self._checkpoint(mode.num_layers)
            return nullcontext
        if mode.name == "save_on_cpu":
            return save_on_cpu
        if mode.name == "torch.save":
            return partial(saved_to_files, self._model, directory, self._exit)
        if mode.name == "cut":
            self._cut(mode.num_layers, directory)
            return nullcontext
        spilling = Spilling(
            self._model,
            directory,
            nvme_bytes=2 * self._saved_bytes,
            device_bytes=max(1, int(mode.share * self._saved_bytes)),
        )
        self._exit.callback(spilling.close)
        self._lanes, self._ledger = spilling.lanes, spilling.ledger
        return lambda: spilling

    def _checkpoint(self, num_layers: int | None) -> None:
        self._model.activation_checkpointing_enable({"use_reentrant": False})
        for layer in layers_of(self._model)[num_layers:] if num_layers is not None else ():
            layer.gradient_checkpointing = False
        # If T5's attention knows of checkpointing, it makes its mask of zeros require a gradient. torch then uses
        # another kernel, which gives other bits. Checkpointing happens in the layers around it, so turn it off here.
        for module in self._model.modules():
            if isinstance(module, T5Attention):
                module.gradient_checkpointing = False

    def _cut(self, num_layers: int | None, directory: Path) -> None:
        """Follows the paper's plan: spills the first layers whole, keeps all others, and reloads one layer ahead."""
        layers = layers_of(self._model)
        count = len(layers) - 1 if num_layers is None else num_layers
        answers = {str(index): Policy.NVME if index < count else Policy.KEEP for index in range(len(layers))}
        native.attach_tensor_pool()  # as Spilling does
        host, ledger = HostSlab(2 * self._saved_bytes), DeviceLedger(None)
        lanes, nvme = CpuLanes(host, ledger), NvmeSlab(directory, 2 * self._saved_bytes, 2)
        nvme.reclaim = lanes.reclaim
        parameters = ResidentParameters([*self._model.named_parameters(), *self._model.named_buffers()])
        hook = SavedTensors(answers, parameters, SpillStore(lanes, ledger, nvme, MIB, 256 * MIB), ledger)
        for index, layer in enumerate(layers):
            layer.forward = partial(_under, hook, str(index), layer.forward)  # type: ignore[method-assign]
        self._model.register_forward_hook(lambda *_: hook.start_backward())
        self._lanes, self._ledger = lanes, ledger
        self._exit.callback(nvme.close)
        self._exit.callback(lanes.close)


def _under(hook: SavedTensors, name: str, forward: Callable[..., Tensor], *inputs: object, **named: object) -> Tensor:
    return hook.run(name, partial(forward, **named), *inputs)


class SavedBytes:
    """A context manager that counts the bytes that autograd saves within it: each storage once, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._parameters |= {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        self._held: dict[int, object] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.nbytes = self.num_saves = self.num_large_saves = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.num_saves += 1
        if storage.data_ptr() in self._parameters:
            return tensor
        self.num_large_saves += storage.nbytes() >= MIB
        if storage._cdata not in self._held:
            self._held[storage._cdata] = storage
            self.nbytes += storage.nbytes()
        return tensor

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *given: Any) -> None:
        self._hooks.__exit__(*given)
        self._held.clear()


@contextmanager
def saved_to_files(model: nn.Module, directory: Path, closing: ExitStack) -> Iterator[None]:
    """Writes every saved tensor of at least 1 MiB to a file of its own by torch.save, and reads it by torch.load when
    backward needs it. This is the method of torch's tutorial, except that parameters are not written."""
    folder = Path(tempfile.mkdtemp(dir=directory))
    closing.callback(shutil.rmtree, folder, ignore_errors=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class File:
        def __init__(self, tensor: Tensor, number: int) -> None:
            self.path = folder / str(number)
            torch.save(tensor, self.path)

        def __del__(self) -> None:
            self.path.unlink(missing_ok=True)

    numbers = iter(range(1 << 30))

    def pack(tensor: Tensor) -> Tensor | File:
        if tensor.untyped_storage().data_ptr() in parameters or tensor.nbytes < MIB:
            return tensor
        return File(tensor, next(numbers))

    def unpack(packed: Tensor | File) -> Tensor:
        return torch.load(packed.path) if isinstance(packed, File) else packed

    with saved_tensors_hooks(pack, unpack):
        yield


def _resident(name: str) -> int:
    """Returns the bytes of `name` (VmRSS or VmHWM) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _trim() -> None:
    gc.collect()
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve(shape: Shape, mode: Mode, directory: str, connection: Connection) -> None:
    """The main function of a contestant's process: sends what it built, then answers requests ("step", "digest") until
    "close"."""
    contestant = Contestant(shape, mode, Path(directory))
    connection.send(contestant.built)
    while (word := connection.recv()) != "close":
        connection.send(contestant.step() if word == "step" else contestant.digest())
    contestant.close()
    connection.send(os.getpid())
