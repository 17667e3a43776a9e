"""The plain optimizer: what it shares with torch.optim.AdamW, and the rules that every placement repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from cases.optimizer_cases import HOST_BYTES, SETTINGS, SHAPES, Case, drive, offload, oracle, outcome, resident, split
from fakes.lazy_lanes import LazyLanes
from spillway.errors import DeviceOutOfMemory, HostOutOfMemory, UserError
from spillway.parameter_groups import Group
from spillway.update_rules import UpdateRule
from spillway_trainer.models.transformer import Transformer, TransformerConfig
from spillway_trainer.optimizer.plain import ResidentOptimizer, StepOptimizer
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes

torch.set_num_threads(1)

CONFIG = TransformerConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=61,
    tie_word_embeddings=True,
)


def test_native_arithmetic_leaves_the_bits_of_the_reference() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = Case(dtype, num_micro_batches=4, clipping=1.0, tied=True)
        parameters = case.parameters()
        optimizer = ResidentOptimizer(parameters, case.aliases, SETTINGS, DeviceLedger(None))
        assert outcome(optimizer, parameters, drive(optimizer, case)).difference(oracle(case)) == []


def test_first_float32_gradient_is_the_accumulator_and_goes_with_the_step() -> None:
    optimizer = ResidentOptimizer([("w", Parameter(torch.ones(9, 7)))], {}, SETTINGS, DeviceLedger(None))
    first, more = torch.full((9, 7), 2.0), torch.full((9, 7), 0.5)
    optimizer.take("w", first)
    optimizer.take("w", more)
    found = optimizer.parts(["w"])[0].values
    assert found.data_ptr() == first.data_ptr()
    assert torch.equal(found, torch.full((63,), 2.5))
    optimizer.step(1e-2, 1.0)
    assert not optimizer.arrived()
    storage = found.untyped_storage()
    del first, found
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def test_stays_within_1e_5_of_torch_adamw_with_fp32_masters() -> None:
    """100 steps on one matrix and one vector with decay on the matrix only, as torch's parameter groups have it."""
    generator = torch.Generator().manual_seed(0)
    named = [(name, Parameter(torch.randn(shape, generator=generator))) for name, shape in (("w", (9, 7)), ("b", (7,)))]
    theirs = [Parameter(parameter.detach().clone()) for _, parameter in named]
    ours = ResidentOptimizer(named, {}, SETTINGS, DeviceLedger(None))
    groups = [{"params": [p], "weight_decay": SETTINGS.weight_decay if p.dim() > 1 else 0.0} for p in theirs]
    torchs = torch.optim.AdamW(groups, lr=1e-2, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps, foreach=False)
    for _ in range(100):
        for (name, _parameter), other in zip(named, theirs, strict=True):
            gradient = torch.randn(other.shape, generator=generator)
            ours.take(name, gradient)
            other.grad = gradient.clone()
        ours.step(1e-2, 1.0)
        torchs.step()
    assert max((p - q).abs().max().item() for (_, p), q in zip(named, theirs, strict=True)) <= 1e-5


@pytest.mark.parametrize("decay", [0.03, 0.0])
@pytest.mark.parametrize("rule", UpdateRule)
def test_a_group_trains_as_a_run_with_its_rate_and_decay_for_all(rule: UpdateRule, decay: float) -> None:
    """Bit for bit; and every other parameter as without groups."""
    case, factor = Case(torch.bfloat16, rule=rule), 0.25
    grouped = replace(case.settings, groups=dict.fromkeys(("up", "norm"), Group("", factor, decay)))
    alike = replace(case.settings, weight_decay=decay, groups={"norm": Group("", 1.0, decay)})
    ends = []
    for settings, rate in ((grouped, 1.0), (case.settings, 1.0), (alike, factor)):
        optimizer = ResidentOptimizer(case.parameters(), {}, settings, DeviceLedger(None))
        for step in range(3):
            for name, gradient in case.gradients(step, 0):
                optimizer.take(name, gradient)
            optimizer.step(rate * 1e-2 / (step + 1), 1.0)
        ends.append(dict(optimizer.state()))
    found, without, with_all = ends
    for name, value in found.items():
        inside = name.partition(".")[2] in ("up", "norm")
        assert torch.equal(value, (with_all if inside else without)[name]), name
    assert not torch.equal(found["master.norm"], without["master.norm"])


def test_norm_is_that_of_torch_up_to_its_rounding() -> None:
    case = Case(torch.float32)
    optimizer = resident(case.parameters(), case)
    gradients = list(case.gradients(0, 0))
    for name, gradient in gradients:
        optimizer.take(name, gradient)
    expected = torch.nn.utils.get_total_norm([gradient.double() for _, gradient in gradients])
    assert optimizer.norm() == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(value: float) -> None:
    for optimizer in both(Case(torch.bfloat16)):
        optimizer.take("norm", torch.full((37,), value, dtype=torch.bfloat16))
        assert not math.isfinite(optimizer.norm())


def test_parameter_without_gradient_neither_decays_nor_moves() -> None:
    for optimizer in both(Case(torch.bfloat16)):
        before = dict(optimizer.state())
        optimizer.take("norm", torch.ones(37, dtype=torch.bfloat16))
        optimizer.step(1e-2, 1.0)
        changed = {name for name, value in optimizer.state() if not torch.equal(value, before[name])}
        assert changed == {"master.norm", "exp_avg.norm", "exp_avg_sq.norm"}


def test_gradient_of_an_alias_moves_its_owner() -> None:
    for optimizer in both(Case(torch.bfloat16, tied=True)):
        before = dict(optimizer.state())
        optimizer.take("head", torch.ones(61, 37, dtype=torch.bfloat16))
        optimizer.step(1e-2, 1.0)
        assert not torch.equal(dict(optimizer.state())["master.embedding"], before["master.embedding"])


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        (UpdateRule.ADAMW, ("master", "exp_avg", "exp_avg_sq")),
        (UpdateRule.ADAM, ("master", "exp_avg", "exp_avg_sq")),
        (UpdateRule.SGD_MOMENTUM, ("master", "momentum_buffer")),
        (UpdateRule.LION, ("master", "exp_avg")),
    ],
)
def test_state_has_masters_and_moments_of_every_trained_owner(rule: UpdateRule, kinds: tuple[str, ...]) -> None:
    for optimizer in both(Case(torch.bfloat16, tied=True, rule=rule)):
        shapes = {name: value.shape for name, value in optimizer.state()}
        assert shapes == {f"{kind}.{name}": shape for kind in kinds for name, shape in SHAPES.items()}


def test_scalars_have_powers_of_the_betas_only_where_bias_is_corrected() -> None:
    for rule in UpdateRule:
        for optimizer in both(Case(torch.bfloat16, rule=rule)):
            powers = {"beta1_power", "beta2_power"} if rule in (UpdateRule.ADAMW, UpdateRule.ADAM) else set()
            assert optimizer.scalars().keys() == {"num_updates", *powers}


def test_state_is_a_copy() -> None:
    for optimizer in both(Case(torch.float32)):
        dict(optimizer.state())["master.up"].zero_()
        assert dict(optimizer.state())["master.up"].any()


def test_loaded_master_sets_the_parameter_rounded() -> None:
    case = Case(torch.bfloat16)
    value = torch.randn(37, generator=torch.Generator().manual_seed(3))
    for make in (resident, offloaded):
        parameters = case.parameters()
        make(parameters, case).load("master.norm", value)
        assert torch.equal(dict(parameters)["norm"], value.bfloat16())


def test_parameter_that_is_not_contiguous_is_rejected_by_name() -> None:
    with pytest.raises(UserError, match="parameter up: strides"):
        ResidentOptimizer([("up", Parameter(torch.ones(3, 4).t()))], {}, SETTINGS, DeviceLedger(None))


def test_parameter_on_another_device_is_rejected_by_name() -> None:
    named = [("up", Parameter(torch.ones(3))), ("down", Parameter(torch.ones(3, device="meta")))]
    with pytest.raises(UserError, match="parameter down: is on device meta, but the model's first parameter is on cpu"):
        ResidentOptimizer(named, {}, SETTINGS, DeviceLedger(None))


def test_alias_with_a_storage_of_its_own_is_rejected_by_name() -> None:
    named = [("embedding", Parameter(torch.ones(2, 3))), ("head", Parameter(torch.ones(2, 3)))]
    with pytest.raises(UserError, match="head is declared as tied to embedding"):
        ResidentOptimizer(named, {"head": "embedding"}, SETTINGS, DeviceLedger(None))


def test_sparse_gradient_is_rejected_by_name() -> None:
    for optimizer in both(Case(torch.float32)):
        with pytest.raises(UserError, match="parameter up: its gradient has dtype"):
            optimizer.take("up", torch.ones(83, 37).to_sparse())


@pytest.mark.parametrize(("rule", "states_bytes"), [(UpdateRule.ADAMW, 12), (UpdateRule.LION, 8)])
def test_ledger_holds_states_and_accumulators_of_the_plain_optimizer(rule: UpdateRule, states_bytes: int) -> None:
    case, ledger = Case(torch.bfloat16, tied=True, rule=rule), DeviceLedger(None)
    ResidentOptimizer(case.parameters(), case.aliases, case.settings, ledger)
    num_parameters, num_alias = 8652, 2257
    assert ledger.by_purpose() == {
        "optimizer_states": states_bytes * num_parameters,
        "gradients": 4 * (num_parameters + num_alias),
    }


def test_held_bytes_are_what_ledger_and_slab_gave() -> None:
    case, host, ledger = Case(torch.bfloat16, tied=True), HostSlab(HOST_BYTES), DeviceLedger(None)
    plan = split(0.4, 0.3, 0.3, 1024)
    optimizer = offload(case.parameters(), case, plan, LazyLanes(host, ledger), ledger)
    held = optimizer.held_bytes()
    assert held["device"] == ledger.held_bytes
    assert 0 <= host.held_bytes - held["host"] < 4096 * 10  # the slab rounds each of ten pieces to a page


def test_gradients_in_flight_never_exceed_the_largest_one() -> None:
    """Lazy lanes read nothing until somebody waits, so without the window all gradients would be alive at once."""
    case, host, ledger = Case(torch.bfloat16, num_micro_batches=4), HostSlab(HOST_BYTES), DeviceLedger(None)
    optimizer = offload(case.parameters(), case, split(0.5, 0.5, 0, 1009), LazyLanes(host, ledger), ledger)
    held = ledger.held_bytes
    ledger.reset_peak()
    drive(optimizer, case)
    assert ledger.peak_bytes - held == 2 * 83 * 37


def test_device_budget_too_small_for_states_is_rejected_before_any_step() -> None:
    case, host, ledger = Case(torch.bfloat16), HostSlab(HOST_BYTES), DeviceLedger(50_000)
    with pytest.raises(DeviceOutOfMemory):
        offload(case.parameters(), case, split(0, 0, 1, 1024), LazyLanes(host, ledger), ledger)


def test_host_budget_too_small_for_states_is_rejected_before_the_first_step() -> None:
    case, host, ledger = Case(torch.bfloat16), HostSlab(50_000), DeviceLedger(None)
    with pytest.raises(HostOutOfMemory):
        offload(case.parameters(), case, split(1, 0, 0, 1024), LazyLanes(host, ledger), ledger)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tied_transformer_trains_to_the_same_bits_with_every_split(dtype: torch.dtype) -> None:
    """A real model, hooks and threads: losses and parameters of 4 steps of 2 micro-batches."""
    plain = train_transformer(dtype, None)
    for shares in ((1, 0, 0), (0, 1, 0), (0.3, 0.3, 0.4)):
        losses, parameters = train_transformer(dtype, shares)
        assert losses == plain[0]
        assert all(torch.equal(parameters[name], value) for name, value in plain[1].items())


def train_transformer(
    dtype: torch.dtype, shares: tuple[float, float, float] | None
) -> tuple[list[float], dict[str, Tensor]]:
    model = Transformer(CONFIG).to(dtype)
    model.tie()
    named, ledger = list(model.named_parameters()), DeviceLedger(None)
    lanes = CpuLanes(HostSlab(HOST_BYTES), ledger)
    optimizer: StepOptimizer = ResidentOptimizer(named, model.tied, SETTINGS, ledger)
    if shares is not None:
        optimizer = OptimizerOffload(named, model.tied, SETTINGS, split(*shares, 1009), lanes, ledger)
    for name, value in model.initial_values(seed=0):
        optimizer.load(f"master.{name}", value)
    for name, parameter in named:
        parameter.register_post_accumulate_grad_hook(hand_over(optimizer, name))
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        for _ in range(2):
            tokens = torch.randint(0, CONFIG.vocab_size, (2, 9), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:], 32)
            loss.backward()
            losses.append(loss.item())
        norm = optimizer.norm()
        optimizer.step(1e-2, min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.flush()
    lanes.close()
    return losses, {name: parameter.detach().clone() for name, parameter in named}


def hand_over(optimizer: StepOptimizer, name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        optimizer.take(name, parameter.grad)
        parameter.grad = None

    return hook


def offloaded(parameters: list[tuple[str, Parameter]], case: Case) -> OptimizerOffload:
    host, ledger = HostSlab(HOST_BYTES), DeviceLedger(None)
    return offload(parameters, case, split(0.3, 0.3, 0.4, 1009), LazyLanes(host, ledger), ledger)


def both(case: Case) -> list[StepOptimizer]:
    """The plain optimizer, and one with all three paths."""
    return [resident(case.parameters(), case), offloaded(case.parameters(), case)]


@pytest.mark.parametrize("shares", [(0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.4, 0.3, 0.3)], ids=str)
def test_a_backward_of_before_the_step_raises_as_with_torchs_optimizers(shares: tuple[float, float, float]) -> None:
    """Native kernels write past autograd, so the optimizers tell it of the change themselves."""
    case = Case(torch.float32, num_micro_batches=1, clipping=None, tied=False)
    parameters = case.parameters()
    ledger, host = DeviceLedger(None), HostSlab(HOST_BYTES)
    optimizer: StepOptimizer = resident(parameters, case)
    if shares[2] < 1.0:
        optimizer = offload(parameters, case, split(*shares, 1009), LazyLanes(host, ledger), ledger)
    weight = next(parameter for _, parameter in parameters if parameter.dim() == 2)
    early = (torch.randn(3, weight.shape[1], requires_grad=True) @ weight.t()).sum()
    drive(optimizer, case)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()
