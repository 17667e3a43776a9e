"""What inspection finds without memory is what autograd saves and allocates with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from cases.chats import model_directory
from cases.huggingface_models import BATCH, LENGTH, SPEC, VOCABULARY, batch_for, filled, spec_of, structural_chain
from harness.allocator_peak import allocated_peak
from harness.tiny_model import save_model
from spillway.api.sweep.members import solo_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.planning.model_shape import ModelShape, Segment, model_shape
from spillway_trainer import inspect as inspect_module
from spillway_trainer.inspect import main, shape_of_chain
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain, as_carried
from spillway_trainer.segments import Position, wrap_segments

TOKENS = BATCH * LENGTH
WIDE = {"hiddenSize": 64, "intermediateSize": 160, "numLayers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"config": WIDE},
    "gpt2": {"architecture": "gpt2", "config": {**WIDE, "dropout": "0.1"}},
    "bert": {"architecture": "bert", "config": WIDE},
    "t5": {"architecture": "t5", "config": WIDE},
    "adapters": {"architecture": "llama", "config": WIDE, "lora": {"rank": 4}},
    "bloom": {"family": "bloom"},
    "gemma3_text": {"family": "gemma3_text"},
    "mixtral": {"family": "mixtral"},
    "roberta": {"family": "roberta"},
}
every_model = pytest.mark.parametrize("model", MODELS)
every_type = pytest.mark.parametrize("compute", ["float32", "bfloat16"])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def built(model: str, compute: str) -> Chain:
    if "family" in MODELS[model]:
        return structural_chain(MODELS[model]["family"], compute)
    return build_model(spec_of(compute=compute, **MODELS[model]))


def inspected(model: str, compute: str) -> ModelShape:
    return shape_of_chain(built(model, compute), BATCH, LENGTH)


def real(model: str, compute: str) -> Chain:
    chain = filled(built(model, compute))
    wrap_segments(chain.segments, Position(seed=0), None, autocast=chain.autocast)
    return chain


def saved_bytes(chain: Chain) -> dict[str, int]:
    """Bytes of the distinct storages that each segment saves first; parameters, tables and labels excluded."""
    tokens, labels, count = batch_for(chain.objective)
    arguments = {name: chain.arguments(name, tokens, labels, count) for name, _ in chain.segments}
    given = [value for values in [*arguments.values()][:-1] for value in values]  # not the labels, which the loss saves
    theirs = [*chain.parameters(), *(value for value in given if isinstance(value, Tensor))]
    seen = {tensor.untyped_storage().data_ptr() for tensor in theirs}
    alive: list[Tensor] = []  # or addresses would be used again
    sums = dict.fromkeys(arguments, 0)
    carried: tuple[Tensor, ...] = (tokens,)
    for name, module in chain.segments:

        def pack(tensor: Tensor, name: str = name) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                alive.append(tensor.detach())
                sums[name] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            carried = as_carried(module(*carried, *arguments[name]))
    return sums


@every_type
@every_model
def test_each_segment_saves_what_inspection_found(model: str, compute: str) -> None:
    """Per token, rounded up once for each storage."""
    chain = real(model, compute)
    measured = saved_bytes(chain)
    for segment in inspected(model, compute).segments:
        rounding = TOKENS * len(segment.saved_bytes)
        assert measured[segment.name] <= TOKENS * segment.saved_bytes_per_token <= measured[segment.name] + rounding, (
            segment.name
        )


def block_of(shape: ModelShape) -> Segment:
    return shape.blocks[-1]


@every_type
@every_model
def test_a_blocks_forward_and_backward_allocate_what_inspection_found(model: str, compute: str, tmp_path: Path) -> None:
    """The last block alone, everything kept: saved storages, temporaries, and the largest gradient for its moment."""
    chain, segment = real(model, compute), block_of(inspected(model, compute))
    tokens, labels, count = batch_for(chain.objective)
    carried: tuple[Any, ...] = (tokens,)
    for name, module in chain.segments:
        arguments = chain.arguments(name, tokens, labels, count)
        if name == segment.name:
            break
        carried = tuple(out.detach().requires_grad_() for out in as_carried(module(*carried, *arguments)))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def forward_backward() -> None:
        roots = [out for out in as_carried(module(*carried, *arguments)) if out.grad_fn is not None]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    measured = allocated_peak(forward_backward, tmp_path)
    largest_gradient = segment.largest_parameter * max(p.element_size() for p in module.parameters() if p.requires_grad)
    own_saved = saved_bytes_of_its_own(module, (*carried, *arguments))
    workspace = max(segment.forward_workspace_bytes, segment.backward_workspace_bytes)
    predicted = own_saved + TOKENS * workspace
    # Without tiles for bfloat16, products convert their operands into memory that no operator shows.
    least = 0.9 if compute == "float32" or torch.cpu._is_amx_tile_supported() else 0.65
    assert least * measured <= predicted + largest_gradient
    assert predicted <= 1.1 * measured


def saved_bytes_of_its_own(module: torch.nn.Module, inputs: tuple[Any, ...]) -> int:
    """Of storages that the module made."""
    known = {t.untyped_storage().data_ptr() for t in (*inputs, *module.parameters()) if isinstance(t, Tensor)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@every_type
def test_our_llama_has_the_shape_that_its_sizes_say(compute: str) -> None:
    spec = spec_of(compute=compute, **MODELS["llama"])
    found, said = inspected("llama", compute), model_shape(spec.model.transformer, compute)
    for one, other in zip(found.segments, said.segments, strict=True):
        assert one.num_parameters == other.num_parameters
        assert (one.matrix_parameters, one.attention_width) == (other.matrix_parameters, other.attention_width)
    assert [block.saved_bytes_per_token for block in found.blocks] == [
        block.saved_bytes_per_token for block in said.blocks
    ]
    assert found.table_bytes_per_position == said.table_bytes_per_position


@every_model
def test_the_head_saves_the_labels_of_its_loss(model: str) -> None:
    """Indices of all tokens; of t5, whose decoder says the second half, of half of them."""
    assert (4 if model == "t5" else 8) in inspected(model, "bfloat16").head.saved_bytes


@every_type
def test_a_token_is_multiplied_with_the_experts_that_it_is_routed_to(compute: str) -> None:
    """Two of four, and with all of the other matrices."""
    experts = [p.numel() for n, p in built("mixtral", compute).named_parameters() if "layers.0" in n and p.dim() == 3]
    others = [p.numel() for n, p in built("mixtral", compute).named_parameters() if "layers.0" in n and p.dim() == 2]
    assert len(experts) == 2 and len(others) == 5
    assert inspected("mixtral", compute).blocks[0].matrix_parameters == sum(experts) // 2 + sum(others)


@every_model
def test_parameters_are_counted_once_each_and_frozen_ones_apart(model: str) -> None:
    chain, shape = built(model, "bfloat16"), inspected(model, "bfloat16")
    own = {name: p for name, p in chain.named_parameters() if name not in chain.tied}
    assert shape.num_parameters == sum(p.numel() for p in own.values())
    assert shape.num_trained == sum(p.numel() for p in own.values() if p.requires_grad)
    assert shape.num_accumulated == sum(p.numel() for p in chain.parameters() if p.requires_grad)
    assert shape.parameter_bytes == sum(p.numel() * p.element_size() for p in own.values())
    assert len(shape.tied) == len(chain.tied)
    assert shape.vocab_size == VOCABULARY


def test_equal_segments_are_found_equal() -> None:
    blocks = inspected("gpt2", "bfloat16").blocks
    assert len(blocks) == 3 and len(set(blocks)) == 1


def test_a_large_model_is_inspected_without_its_memory() -> None:
    sizes = {"hiddenSize": 8192, "numLayers": 4, "numHeads": 64, "intermediateSize": 28672, "vocabSize": 128256}
    shape = shape_of_chain(build_model(spec_of("llama", "bfloat16", config=sizes, lora={"rank": 8})), 1, 4096)
    assert shape.num_parameters > 5e9
    assert 2 * 128256 < shape.head.saved_bytes_per_token < 4 * 128256  # logits in bfloat16


# --- as a command -----------------------------------------------------------------------------------------------------


def inspect_command(document: dict[str, Any], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-P", "-m", "spillway_trainer.inspect", str(file), "--claim=models=/nowhere"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.ci
def test_the_command_prints_the_shape_as_json(tmp_path: Path) -> None:
    document = yaml.safe_load(SPEC)
    document["spec"]["model"]["config"] |= {"architecture": "gpt2", "vocabSize": 300}
    done = inspect_command(document, tmp_path)
    assert done.returncode == 0, done.stderr
    found = ModelShape.from_json(done.stdout)
    chain = build_model(spec_of("gpt2", config={"vocabSize": 300}))
    assert found == shape_of_chain(chain, 2, 16)


OWN_CHAIN = """
import os
from torch import nn
from spillway_trainer.models.transformer import Transformer, TransformerConfig

def build():
    print("from python")
    os.system("echo from a process")
    return Transformer(TransformerConfig(32, 2, 4, 4, 48, 97))

def failing():
    model = build()
    model.embed_tokens.forward = lambda tokens: nn.functional.linear(tokens, model.embed_tokens.weight)
    return model
"""


@pytest.mark.ci
def test_what_an_entry_point_prints_is_no_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_chain.py").write_text(OWN_CHAIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    document = yaml.safe_load(SPEC)
    document["spec"]["model"] = {"entrypoint": "their_chain:build"}
    done = inspect_command(document, tmp_path)
    assert done.returncode == 0, done.stderr
    assert ModelShape.from_json(done.stdout).vocab_size == VOCABULARY
    assert done.stderr == "from python\nfrom a process\n"
    document["spec"]["model"] = {"entrypoint": "their_chain:failing"}
    done = inspect_command(document, tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert "spec.model: the model's forward fails on a test micro-batch: RuntimeError: " in done.stderr


# --- what a segment may not write -------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A block that changes its input in place."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BTD: Tensor, *tables: Tensor) -> Tensor:
        return self.block(x_BTD.mul_(2), *tables)


class Running(nn.Module):
    """A block that keeps a running mean, in place or anew."""

    def __init__(self, block: nn.Module, *, anew: bool = False) -> None:
        super().__init__()
        self.block, self.anew = block, anew
        self.register_buffer("mean", torch.zeros(1, device="cpu"))

    def forward(self, x_BTD: Tensor, *tables: Tensor) -> Tensor:
        with torch.no_grad():
            mean = 0.9 * self.mean + x_BTD.mean()
            self.mean = mean if self.anew else self.mean.copy_(mean)
        return self.block(x_BTD, *tables)


WRITES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "its input": (Doubled, r"segment block1 \(a group of layers\) changes its input in place"),
    "a buffer": (Running, r"segment block1 \(a group of layers\) writes its buffer mean"),
    "another buffer": (partial(Running, anew=True), r"segment block1 \(a group of layers\) writes its buffer mean"),
}


@pytest.mark.parametrize(("wrap", "words"), WRITES.values(), ids=WRITES)
def test_mutating_segment_is_rejected_by_inspection_and_the_first_step(
    wrap: Callable[[nn.Module], nn.Module], words: str
) -> None:
    def made() -> Chain:
        chain = build_model(spec_of("llama"))
        chain.layers[1] = wrap(chain.layers[1])
        return chain

    with pytest.raises(UserError, match=words):
        shape_of_chain(made(), BATCH, LENGTH)
    chain = filled(made())
    wrap_segments(chain.segments, Position(seed=0), None)
    with pytest.raises(UserError, match=words):
        chain(*batch_for(chain.objective))


class Picking(Doubled):
    """A block whose sizes depend on values."""

    def forward(self, x_BTD: Tensor, *tables: Tensor) -> Tensor:
        return self.block(x_BTD + x_BTD[x_BTD > 0].sum(), *tables)


class Asking(Doubled):
    def forward(self, x_BTD: Tensor, *tables: Tensor) -> Tensor:
        return self.block(x_BTD + x_BTD.sum().item(), *tables)


@pytest.mark.parametrize(("wrap", "operation"), [(Picking, "aten.nonzero"), (Asking, "aten._local_scalar_dense")])
def test_a_forward_that_depends_on_values_is_an_error(
    wrap: Callable[[nn.Module], nn.Module], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = build_model(spec_of("llama"))
    chain.layers[1] = wrap(chain.layers[1])
    monkeypatch.setattr(inspect_module, "build_model", lambda *_: chain)
    with pytest.raises(UserError, match=f"{operation}.* depends on the values of a tensor, .* use torch.where"):
        inspect_module.inspect(spec_of("llama"), {})


class Unsummed(nn.Module):
    """A head that returns a loss for each token."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return self.head(x_BTD, labels_BT, num_tokens) + x_BTD[..., 0]


def test_a_loss_that_is_not_one_number_is_an_error() -> None:
    chain = build_model(spec_of("llama"))
    chain.head = Unsummed(chain.head)
    with pytest.raises(
        UserError, match=r"the last segment of the model, head, returns .* \(.*\); .* the loss, a single number"
    ):
        shape_of_chain(chain, BATCH, LENGTH)


@pytest.mark.ci
def test_the_command_rejects_with_a_sentence(tmp_path: Path) -> None:
    document = yaml.safe_load(SPEC)
    document["spec"]["model"] = {"source": {"claim": "models", "subPath": "gpt2"}}
    done = inspect_command(document, tmp_path)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("spec.model.source: /nowhere/gpt2 is not a directory")


def test_members_with_other_adapters_have_their_own_shapes(tmp_path: Path) -> None:
    """In one answer, of which what they have in common is written once."""
    save_model(tmp_path / "gpt2")
    spec = yaml.safe_load(SPEC)["spec"] | {"model": {"source": {"path": str(tmp_path / "gpt2")}, "lora": {"rank": 2}}}
    spec["members"] = [
        {"name": "two", "training": {"seed": 1}},
        *({"name": f"rank-{rank}", "model": {"lora": {"rank": rank}}} for rank in (4, 8)),
        {"name": "rank-8-too", "model": {"lora": {"rank": 8}}, "training": {"seed": 1}},
    ]
    asked = TrainingJobSpec.model_validate(spec)
    shape = inspect_module.inspect(asked, {})
    assert ModelShape.unpacked(shape.packed()) == shape and len(shape.packed()) < 2048
    assert len(shape.others) == 2
    for one in solo_specs(asked):
        found = shape.of_member(one, asked)
        assert found is not None and one.model.lora is not None
        alone = inspect_module.inspect(one, {})
        assert (found.segments, found.num_trained) == (alone.segments, alone.num_trained)
        assert found.num_trained == one.model.lora.rank * shape.num_trained // 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda directory: (directory / "tokenizer.json").unlink(), r"tokenizer\.json: No such file or directory; add"),
        (lambda directory: (directory / "tokenizer_config.json").write_text('{"chat_template": 3}'), "chat template"),
        (
            lambda directory: model_directory(directory, "chatml", None),
            r"has \d+ tokens, but the model's vocabSize is 300",
        ),
    ],
    ids=["no tokenizer", "a template that is none", "another model's tokenizer"],
)
def test_a_tokenizer_that_a_run_would_reject_is_rejected(
    change: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    save_model(tmp_path)
    spec = yaml.safe_load(SPEC)["spec"] | {
        "model": {"source": {"path": str(tmp_path)}},
        "data": {"chat": {"path": "/c"}},
    }
    inspect_module.inspect(TrainingJobSpec.model_validate(spec), {})
    change(tmp_path)
    with pytest.raises(UserError, match=why):
        inspect_module.inspect(TrainingJobSpec.model_validate(spec), {})


def test_a_model_of_masked_tokens_needs_a_tokenizer_with_a_mask(tmp_path: Path) -> None:
    save_model(tmp_path)
    sizes = BertConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        pad_token_id=None,
    )
    BertForMaskedLM(sizes).save_pretrained(tmp_path)
    spec = yaml.safe_load(SPEC)["spec"] | {"model": {"source": {"path": str(tmp_path)}}}
    with pytest.raises(UserError, match=r"tokenizer\.json: has no mask token, .*; name it as mask_token"):
        inspect_module.inspect(TrainingJobSpec.model_validate(spec), {})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "mask_token": "a"}')
    inspect_module.inspect(TrainingJobSpec.model_validate(spec), {})


@pytest.mark.parametrize("model", ["gpt2", "nowhere"])
def test_a_pod_tells_the_shape_or_the_error_in_its_termination_message(model: str, tmp_path: Path) -> None:
    """As the operator asks it (decide/inspection.py)."""
    if model == "gpt2":
        save_model(tmp_path / "models" / "gpt2")
    spec = yaml.safe_load(SPEC)["spec"] | {"model": {"source": {"claim": "models", "subPath": model}}}
    asked, told = tmp_path / "job.json", tmp_path / "termination-log"
    asked.write_text(json.dumps({"spec": spec, "claims": {"models": str(tmp_path / "models")}}))
    code = main([str(asked), "--in-pod", str(told)])
    if model == "nowhere":
        assert code == 64 and "spec.model.source" in told.read_text() and "nowhere" in told.read_text()
    else:
        assert code == 0 and len(told.read_text()) < 2048
        shape = ModelShape.unpacked(told.read_text())
        assert (shape.architecture, shape.num_layers, shape.vocab_size) == ("gpt2", 3, 300)


def test_a_long_error_is_cut_to_the_bytes_that_a_pod_may_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("a" + "é" * 4096)

    monkeypatch.setattr(inspect_module, "inspect", fails)
    asked, told = tmp_path / "job.json", tmp_path / "termination-log"
    spec = yaml.safe_load(SPEC)["spec"] | {"model": {"source": {"claim": "models"}}}
    asked.write_text(json.dumps({"spec": spec, "claims": {}}))
    assert main([str(asked), "--in-pod", str(told)]) == 64
    assert told.read_bytes().decode() == "a" + "é" * 2047
