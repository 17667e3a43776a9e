"""activation_spill.Spilling: any forward, two lines, the same bits; models of transformers and what users write."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fakes.fake_spill_file import FakeSpillFile
from harness.spillings import spillings
from spillway.errors import SpillIOError, SpillVolumeFull, UserError
from spillway.plan import Tier
from spillway_trainer.activation_spill import Spilling, alone
from spillway_trainer.tiers import volumes

KIB = 1 << 10
TOKENS = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Spilling]]:
    """Spilling of small tensors in small transfers, closed in the end; all that is saved, unless it is to be lean."""
    with spillings(tmp_path, minimum_bytes=256, transfer_bytes=2 * KIB, ahead_bytes=4 * KIB, lean=False) as make:
        yield make
    assert list(tmp_path.iterdir()) == []


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=2, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        images = tokens.repeat(1, 12).view(2, 1, 12, 12).float() / 61
        return self.inner(images).square().mean()  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.cell = kind(16, 24, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.cell(self.embedding(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class TiedSplit(nn.Module):
    """A head tied to the embedding, one projection split in three, transposes, and an expanded gate of stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.qkv = nn.Linear(32, 96)
        self.gate = nn.Linear(32, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).split(32, dim=-1)
        y = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        y = y * torch.sigmoid(self.gate(y)).expand_as(y)
        return F.cross_entropy((F.dropout(y, 0.1) @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


class Checkpointed(TiedSplit):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = checkpoint(lambda x: torch.tanh(self.qkv(x)).sin(), x, use_reentrant=self.use_reentrant)
        return torch.tanh(y[..., :32] @ self.embedding.weight.t()).exp().mean() + self.gate(x).tanh().mean()


class SelectivelyCheckpointed(Checkpointed):
    """Products are kept by torch's own policy, all else is recomputed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        policy = partial(create_selective_checkpoint_contexts, keep_products)
        y = checkpoint(lambda x: torch.tanh(self.qkv(x)).sin(), x, use_reentrant=False, context_fn=policy)
        return torch.tanh(y[..., :32] @ self.embedding.weight.t()).exp().mean() + self.gate(x).tanh().mean()


class Normed(nn.Module):
    """Norms, activation functions and dropout as torch has them, in bfloat16 where autocast says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32), nn.GroupNorm(4, 12), nn.LayerNorm(32)])
        self.wide, self.narrow = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for norm, function in zip(self.norms, (F.gelu, F.silu, F.relu, torch.tanh), strict=True):
                x = x + F.dropout(self.narrow(F.dropout(function(self.wide(norm(x))), 0.2)), 0.1)
            return F.cross_entropy((x @ self.embedding.weight.t()).flatten(0, 1), tokens.flatten())


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Compiled(TiedSplit):
    """Its inner function is compiled, as a layer would be; kernels stay torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.inner, backend="aot_eager", fullgraph=True, dynamic=False)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.qkv(x)).sin()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return (self.compiled(x)[..., :32] @ self.embedding.weight.t()).tanh().mean() + self.gate(x).tanh().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "convolutions": Convolutions,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "tied, split, stride 0": TiedSplit,
    "norms, functions, dropout, autocast": Normed,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "re-entrant": lambda: Checkpointed(use_reentrant=True),
    "selectively checkpointed": lambda: SelectivelyCheckpointed(use_reentrant=False),
    "compiled": Compiled,
}


def loss_of(model: nn.Module) -> Tensor:
    if isinstance(model, transformers.PreTrainedModel):
        loss: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
        return loss
    return model(TOKENS)  # type: ignore[no-any-return]


def trained(name: str, spill: Callable[[nn.Module], Spilling] | None, steps: int = 3) -> list[Tensor]:
    """Losses and gradients of `steps` steps, dropout included, and the parameters after them."""
    torch.manual_seed(7)
    model = MODELS[name]().train()
    spilling = spill(model) if spill else None
    found: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        if spilling is None:
            loss = loss_of(model)
        else:
            with spilling:
                loss = loss_of(model)
        loss.backward()
        found.append(loss.detach())
        del loss
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    found.append(parameter.grad)
                    parameter.sub_(parameter.grad * 0.1)
                    parameter.grad = None
    if spilling is not None:
        spilling.store.drain()
        assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}
    return [*found, *(parameter.detach() for parameter in model.parameters())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize(("device_bytes", "lean"), [(0, False), (20 * KIB, False), (0, True), (20 * KIB, True)])
@pytest.mark.parametrize("name", MODELS)
def test_a_spilled_forward_trains_to_the_same_bits(
    name: str, device_bytes: int, lean: bool, make: Callable[..., Spilling]
) -> None:
    made: list[Spilling] = []

    def spill(model: nn.Module) -> Spilling:
        made.append(make(model, device_bytes=device_bytes, lean=lean))
        return made[-1]

    assert same(trained(name, spill), trained(name, None))
    assert made[0].lanes.moved_bytes()["nvme_write"] > 0


def chain(x: Tensor, length: int = 10) -> Tensor:
    """Each sine saves its input, 4 KiB. None of them is the caller's own, which stays where it is."""
    x = x * 1
    for _ in range(length):
        x = x.sin()
    return x.sum()


def leaf() -> Tensor:
    return torch.linspace(-1, 1, KIB).requires_grad_()


def grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_after_one_forward_the_last_saved_tensors_stay_and_the_first_leave(make: Callable[..., Spilling]) -> None:
    spilling = make(nn.Module(), device_bytes=20 * KIB, ahead_bytes=4 * KIB, transfer_bytes=4 * KIB)
    held = []
    for _ in range(2):
        with spilling:
            loss = chain(leaf())
        spilling.store.drain()
        held.append(spilling.held_bytes())
        del loss
    assert held[0] == {Tier.DEVICE: 0, Tier.NVME: 40 * KIB}
    assert held[1] == {Tier.DEVICE: 12 * KIB, Tier.NVME: 28 * KIB}  # 20, less two transfers on their way


@pytest.mark.parametrize("lengths", [(40, 6, 40), (3, 12, 7, 60), (1, 30)], ids=str)
def test_a_longer_forward_after_a_shorter_one_keeps_no_more_than_may_stay(
    lengths: Sequence[int], make: Callable[..., Spilling]
) -> None:
    spilling = make(nn.Module(), device_bytes=20 * KIB, ahead_bytes=4 * KIB, transfer_bytes=4 * KIB)
    for length in lengths:
        plain, spilled = leaf(), leaf()
        chain(plain, length).backward()
        with spilling:
            loss = chain(spilled, length)
        spilling.store.drain()
        assert spilling.held_bytes()[Tier.DEVICE] <= 12 * KIB  # 20, less two transfers on their way
        loss.backward()
        assert torch.equal(grad(plain), grad(spilled))


def test_what_moved_comes_back_when_backward_is_near_it_and_not_before(make: Callable[..., Spilling]) -> None:
    spilling = make(nn.Module(), device_bytes=48 * KIB, ahead_bytes=8 * KIB, transfer_bytes=4 * KIB)
    for _ in range(2):
        with spilling:
            loss = chain(leaf(), 30)
        spilling.store.drain()
        kept = spilling.held_bytes()[Tier.DEVICE]
        spilling.ledger.reset_peak()
        loss.backward()
    assert kept == 40 * KIB
    assert spilling.ledger.peak_bytes == kept  # by the time that the first is back, two of what was kept are gone


def test_backward_holds_no_more_than_what_stays_and_what_runs_ahead(make: Callable[..., Spilling]) -> None:
    spilling = make(nn.Module(), ahead_bytes=8 * KIB, transfer_bytes=4 * KIB)
    with spilling:
        loss = chain(leaf(), 40)
    spilling.store.drain()
    spilling.ledger.reset_peak()
    loss.backward()
    assert spilling.ledger.peak_bytes <= (2 + 1 + 1) * 4 * KIB  # ahead, in use, and one that is on its way out


class Shared(nn.Module):
    """Each of six layers saves three results of 16 KiB and needs one of 32 KiB that was saved before all of them."""

    def forward(self, x: Tensor) -> Tensor:
        shared = x.repeat(8).sin().sin().exp()
        for _ in range(6):
            own = x.repeat(4).sin().sin().sin().view(4, -1).sum(0)
            x = own + shared.cos().view(8, -1).sum(0)
        return x.sum()


def test_tensors_shared_by_all_layers_reload_alone_and_leave_between_uses(make: Callable[..., Spilling]) -> None:
    spilling, peaks = make(Shared(), ahead_bytes=4 * KIB, transfer_bytes=4 * KIB), []
    for _ in range(3):
        x, plain = leaf(), leaf()
        with spilling:
            loss = Shared()(x)
        spilling.store.drain()
        spilling.ledger.reset_peak()
        loss.backward()
        Shared()(plain).backward()
        assert torch.equal(grad(x), grad(plain))
        peaks.append(spilling.ledger.peak_bytes)
    assert peaks[0] >= (2 + 2 + 1) * 16 * KIB  # what is shared, the neighbour that came with it, and what is in use
    assert peaks[1] == peaks[2] <= (2 + 1 + 1) * 16 * KIB  # what is shared, ahead, and just left


def test_a_backward_in_another_order_than_the_last_one_is_exact(make: Callable[..., Spilling]) -> None:
    spilling = make(nn.Module(), ahead_bytes=4 * KIB, transfer_bytes=4 * KIB)
    plain = leaf()
    expected = [torch.autograd.grad(chain(plain.cos()), plain)[0], torch.autograd.grad(chain(plain.exp()), plain)[0]]
    for order in ((0, 1), (0, 1), (1, 0), (0,), (1, 0), (1, 0)):
        x = leaf()
        with spilling:
            losses = [chain(x.cos()), chain(x.exp())]
        spilling.store.drain()
        for which in order:
            (found,) = torch.autograd.grad(losses[which], x, retain_graph=True)
            assert torch.equal(found, expected[which])
    del losses


class Disk:
    """The file of the next Spilling, in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(alone, "SpillFile", self._open)

    def _open(self, directory: Path, nbytes: int, *, num_threads: int) -> FakeSpillFile:
        self.file = FakeSpillFile(directory, nbytes, num_threads=num_threads)
        return self.file


def test_encrypted_spilling_changes_no_bit(make: Callable[..., Spilling]) -> None:
    spilling, x = make(nn.Module(), encrypts=True), leaf()
    assert spilling.nvme.backend.endswith("+AES-256-XTS")
    with spilling:
        loss = chain(x)
    spilling.store.drain()
    assert spilling.held_bytes()[Tier.NVME] > 0
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(y := leaf()), y)[0])


def test_what_is_not_written_yet_is_used_where_it_is_and_never_written(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    spilling, x = make(nn.Module(), transfer_bytes=4 * KIB), leaf()
    disk.file.stalled = threading.Event()
    with spilling:
        loss = chain(x)
    loss.backward()  # while the first write still stands
    assert torch.equal(x.grad, torch.autograd.grad(chain(y := leaf()), y)[0])
    assert spilling.lanes.moved_bytes().keys() == {"nvme_write"}
    disk.file.stalled.set()
    spilling.store.drain()
    assert len(disk.file._blocks) <= 1
    del loss
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}
    assert spilling.nvme.held_bytes == 0


def test_a_retained_graph_whose_writes_were_cancelled_goes_backward_again(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    spilling, x = make(nn.Module()), leaf()
    disk.file.stalled = threading.Event()
    with spilling:
        loss = chain(x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    disk.file.stalled.set()
    spilling.store.drain()
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_a_tensor_used_where_it_is_and_changed_in_place_raises(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    spilling, x = make(nn.Module()), leaf()
    disk.file.stalled = threading.Event()
    doubled = x * 2
    with spilling:
        loss = doubled.sin().sum()
    with torch.no_grad():
        doubled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    disk.file.stalled.set()


def test_what_the_disk_rejects_stays_and_the_bits_are_the_same(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    spilling, x = make(nn.Module()), leaf()
    disk.file.failing.add("write")
    for _ in range(2):
        with spilling:
            loss = chain(x)
        spilling.store.drain()
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.equal(gradient, torch.autograd.grad(chain(y := leaf()), y)[0])
    assert spilling.nvme.first_failure is not None


def test_a_dropped_graph_is_not_written_any_further(
    make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    spilling = make(nn.Module(), transfer_bytes=4 * KIB)
    disk.file.stalled = threading.Event()
    with spilling:
        loss = chain(leaf())
    del loss
    disk.file.stalled.set()
    spilling.store.drain()
    assert len(disk.file._blocks) <= 1
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}
    assert spilling.nvme.held_bytes == 0


def test_two_graphs_alive_go_backward_in_any_order(make: Callable[..., Spilling]) -> None:
    spilling, leaves = make(nn.Module()), [leaf() for _ in range(3)]
    losses = []
    for index, x in enumerate(leaves):
        with spilling:
            losses.append(chain(x * (index + 1)))
    for index in (1, 0, 2):
        losses[index].backward()
    for index, x in enumerate(leaves):
        assert torch.equal(x.grad, torch.autograd.grad(chain((y := leaf()) * (index + 1)), y)[0])


def test_exception_in_a_forward_leaves_nothing_held_and_the_next_is_exact(make: Callable[..., Spilling]) -> None:
    spilling, x = make(nn.Module()), leaf()
    with pytest.raises(ValueError, match="bad batch"), spilling:
        raise ValueError(f"bad batch: {chain(x)}")
    spilling.store.drain()
    assert spilling.held_bytes() == {Tier.DEVICE: 0, Tier.NVME: 0}
    with spilling:
        loss = chain(x)
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(y := leaf()), y)[0])


def test_a_forward_without_gradients_between_changes_nothing(make: Callable[..., Spilling]) -> None:
    spilling, x = make(nn.Module()), leaf()
    with spilling:
        loss = chain(x)
    moved = spilling.lanes.moved_bytes()
    with torch.no_grad(), spilling:
        chain(x)
    assert spilling.lanes.moved_bytes() == moved
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(chain(y := leaf()), y)[0])


@pytest.mark.parametrize("good", [0, 5])
def test_unwritten_tensors_stay_in_place_and_retirement_is_logged_once(
    good: int, make: Callable[..., Spilling], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Checkpointed(use_reentrant=False)
    model(TOKENS).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    spilling, left = make(model), [good]
    file = spilling.nvme._devices[0].file
    write_batch = file.write_batch

    def failing(writes: Sequence[tuple[int, Tensor, str]]) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise SpillIOError(f"write of {writes[0][2]} at offset {writes[0][0]} (errno 5)", errno=5)
        return write_batch(writes)

    monkeypatch.setattr(file, "write_batch", failing)
    for _ in range(10):  # a step of few tensors may write once
        model.zero_grad()
        with spilling:
            loss = model(TOKENS)
        spilling.store.drain()
        loss.backward()
        assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())
    assert sum("is not written to any more" in line for line in caplog.messages) == 1
    assert sum("at offset" in line and "goes to" not in line for line in caplog.messages) == 3
    assert sum(spilling.held_bytes().values()) == spilling.ledger.held_bytes == 0


def test_a_model_that_is_not_on_the_cpu_is_rejected(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="weight is on meta: Spilling supports CPU tensors only"):
        Spilling(model, tmp_path, nvme_bytes=1 << 20)


def test_a_directory_in_memory_is_rejected_before_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volumes, "read_text", lambda path: f"/dev/a / ext4 rw 0 0\nx {tmp_path} tmpfs rw 0 0\n")
    with pytest.raises(UserError, match=rf"Spilling in {tmp_path}: is in memory \(tmpfs\), so spilled bytes"):
        Spilling(nn.Linear(2, 2), tmp_path, nvme_bytes=1 << 20)
    assert open_files(tmp_path) == 0


GIVEN: dict[str, dict[str, Any]] = {
    "nvme_bytes = -5: give a whole number of bytes, 1 or more": {"nvme_bytes": -5},
    "nvme_bytes = '1Gx': ": {"nvme_bytes": "1Gx"},
    "nvme_bytes = True: give a whole number": {"nvme_bytes": True},
    "device_bytes = 1.5: give a whole number of bytes, 0 or more": {"device_bytes": 1.5},
    "transfer_bytes = 0: give a whole number of bytes, 1 or more": {"transfer_bytes": 0},
    "the first argument is a function; give the nn.Module": {"module": lambda batch: batch},
}


@pytest.mark.parametrize("said", GIVEN)
def test_invalid_arguments_are_rejected_by_name_before_a_file_is_opened(said: str, tmp_path: Path) -> None:
    given = {"module": nn.Linear(2, 2), "nvme_bytes": 1 << 20, **GIVEN[said]}
    with pytest.raises(UserError, match=said):
        Spilling(directory=tmp_path, **given)
    assert open_files(tmp_path) == 0


def test_error_for_a_too_small_file_names_the_argument_to_raise(make: Callable[..., Spilling]) -> None:
    spilling = make(nn.Module(), nvme_bytes=8 * KIB)
    with pytest.raises(SpillVolumeFull, match="Raise nvme_bytes; the first forward spills all tensors"), spilling:
        chain(leaf())


def test_it_is_not_closed_under_a_graph_and_not_used_when_it_is_closed(tmp_path: Path) -> None:
    spilling, start = Spilling(nn.Module(), tmp_path, nvme_bytes=1 << 20, minimum_bytes=256, lean=False), leaf()
    with spilling:
        loss = chain(start)
    with pytest.raises(UserError, match=r"40\.0 KiB of saved tensors still belong to an autograd graph"):
        spilling.close()
    loss.backward()
    plain = leaf()
    chain(plain).backward()
    assert torch.equal(grad(plain), grad(start))
    spilling.close()
    spilling.close()
    assert open_files(tmp_path) == 0
    with pytest.raises(UserError, match="this Spilling is closed and its spill file is removed; create a new Spilling"):
        spilling.__enter__()


AT_THE_END = """
import sys, threading, torch
from spillway_trainer.activation_spill import Spilling, alone

def told(lanes, nvme, close=alone.close_parts):
    close(lanes, nvme)
    print("closed by", threading.current_thread().name, flush=True)

alone.close_parts = told
layer, x = torch.nn.Linear(64, 64), torch.randn(512, 64)
spillings = [Spilling(layer, sys.argv[1], nvme_bytes=1 << 24, lean=False) for _ in range(2)]
for spilling in spillings:
    with spilling:
        loss = layer(x).sin().exp().sum()
del spillings[0], loss
"""


def test_what_is_open_when_the_interpreter_ends_is_closed_before_it(tmp_path: Path) -> None:
    """A thread that it ends in the middle of torch's code would abort the process."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["closed by MainThread", "closed by spilling-close"]
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_forgotten_gives_its_file_back_with_its_last_graph(tmp_path: Path) -> None:
    spilling, start = Spilling(nn.Module(), tmp_path, nvme_bytes=1 << 20, minimum_bytes=256), leaf()
    with spilling:
        loss = chain(start)
    del spilling
    gc.collect()
    assert open_files(tmp_path) == 1
    loss.backward()
    del loss
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "spilling-close":
            thread.join()
    assert open_files(tmp_path) == 0


def open_files(directory: Path) -> int:
    """Nameless ones, too."""
    links = [Path(entry) for entry in Path("/proc/self/fd").iterdir()]
    return sum(os.readlink(link).startswith(f"{directory}/") for link in links if link.is_symlink())


@pytest.mark.parametrize("schedule", [pipelining.ScheduleGPipe, pipelining.Schedule1F1B])
def test_micro_batches_of_a_pipeline_schedule_are_exact(
    schedule: type[pipelining.schedules.PipelineScheduleSingle], make: Callable[..., Spilling], tmp_path_factory: Any
) -> None:
    """Each forward of a stage is a graph of its own, several alive at once, in the order of the schedule."""

    class Spilled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.spilling = inner, make(inner)

        def forward(self, x: Tensor) -> Tensor:
            with self.spilling:
                return self.inner(x)  # type: ignore[no-any-return]

    def gradients(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16), nn.Tanh())
        stage = pipelining.PipelineStage(wrap(inner), 0, 1, torch.device("cpu"))
        x, target = torch.randn(8, 16), torch.randn(8, 16)
        schedule(stage, 4, loss_fn=F.mse_loss).step(x, target=target)
        return [parameter.grad for parameter in inner.parameters()]

    rendezvous = tmp_path_factory.mktemp("rendezvous") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    try:
        assert same(gradients(Spilled), gradients(lambda inner: inner))
    finally:
        torch.distributed.destroy_process_group()
