"""Chains as users write them, whose forwards do things that torch allows and that a technique may overlook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cases.model_spill_cases import RandomBatches
from spillway_trainer.models.chain import Chain
from spillway_trainer.models.loss import token_loss

HIDDEN, INNER, VOCABULARY, NUM_BLOCKS = 16, 24, 61, 4


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        return x_BTD + F.dropout(self.down(F.gelu(self.up(x_BTD))), 0.1)


class Checkpointed(FeedForward):
    """Recomputes by itself, with torch's own checkpointing."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.run = partial(checkpoint, **options)

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        return self.run(super().forward, x_BTD, tokens_BT)  # type: ignore[no-any-return]


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class TwiceReentrant(FeedForward):
    """Uses its weights in two re-entrant checkpoints, so that each weight gets its gradient in two parts."""

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        once: Tensor = checkpoint(super().forward, x_BTD, tokens_BT, use_reentrant=True)
        return checkpoint(super().forward, once, tokens_BT, use_reentrant=True)  # type: ignore[no-any-return]


class Compiled(FeedForward):
    """Compiles its inner function with graph capture and AOT autograd; the kernels are torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(self.plain, backend="aot_eager", fullgraph=True, dynamic=False)

    def plain(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + torch.tanh(self.down(F.gelu(self.up(x_BTD))))

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        return self.inner(x_BTD)  # type: ignore[no-any-return]


class Branching(FeedForward):
    """Chooses one of two branches, or both, by the first token. Parameters of a branch that is not used get no
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(HIDDEN, HIDDEN)
        self.unused = nn.Parameter(torch.empty(5))

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        token = int(tokens_BT[0, 0])
        y_BTD = super().forward(x_BTD, tokens_BT) if token % 3 else x_BTD
        return y_BTD + torch.tanh(self.odd(x_BTD)) if token % 3 != 1 else y_BTD


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * x * 2).flatten(0, -2).sum(0)


class OwnFunction(FeedForward):
    """Uses its own autograd function, which saves an activation and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
        return super().forward(Doubled.apply(x_BTD, self.scale), tokens_BT)  # type: ignore[no-untyped-call]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return token_loss(self.output(F.layer_norm(x_BTD, (HIDDEN,))), labels_BT, num_tokens)


class OwnLoss(Head):
    """A head whose loss has smoothed labels and a penalty on large logits."""

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        logits_NV = self.output(F.layer_norm(x_BTD, (HIDDEN,))).flatten(0, 1).float()
        labels_N = labels_BT.flatten()
        smoothed = F.cross_entropy(logits_NV, labels_N, label_smoothing=0.1, reduction="sum")
        penalty = torch.where(labels_N >= 0, logits_NV.logsumexp(-1).square(), 0.0).sum()
        return (smoothed + 1e-4 * penalty) / num_tokens


class UsersChain(Chain):
    """A chain embedding -> blocks -> head with given blocks and a given head."""

    vocab_size = VOCABULARY

    def __init__(self, make_block: Callable[[], nn.Module], make_head: Callable[[], nn.Module] = Head) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(make_block() for _ in range(NUM_BLOCKS))
        self.head = make_head()

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        blocks = [(f"block{index}", block) for index, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), *blocks, ("head", self.head)]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        return {"embedding": (), "head": (labels_BT, num_tokens)}.get(segment, (tokens_BT,))

    def deviation(self, name: str) -> float:
        return 0.2  # makes the model far from linear, so that a wrong bit changes results


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": partial(Checkpointed, use_reentrant=False),
    "selectively checkpointed": partial(
        Checkpointed,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, keep_products),
    ),
    "re-entrant": partial(Checkpointed, use_reentrant=True),
    "twice re-entrant": TwiceReentrant,
    "compiled": Compiled,
    "branching": Branching,
    "own function": OwnFunction,
    "own loss": FeedForward,
}
HEADS = {"own loss": OwnLoss}


@dataclass(frozen=True)
class UserModel:
    """A model for model_spill_cases.Laboratory."""

    block: str
    dtype: torch.dtype = torch.float32
    num_micro_batches: int = 2
    clipping: float | None = 0.5

    num_segments = NUM_BLOCKS + 2
    tied = False

    def batches(self) -> Any:
        return RandomBatches()

    def build(self) -> Chain:
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("meta"):
                return UsersChain(BLOCKS[self.block], HEADS.get(self.block, Head))
        finally:
            torch.set_default_dtype(default)


class Mixes(nn.Module):
    """Mixes features by a random matrix that is drawn when the model is built, and is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("mixture", 0.1 * torch.randn(HIDDEN, HIDDEN, device="cpu"), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + F.dropout(torch.relu(self.inner(x_BTD @ self.mixture)), 0.1)


def drawing() -> nn.Sequential:
    """An entry point that returns a chain of four segments."""
    return nn.Sequential(nn.Embedding(512, HIDDEN), Mixes(), Mixes(), nn.Linear(HIDDEN, 512))
