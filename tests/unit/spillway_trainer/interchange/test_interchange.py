"""Foreign checkpoints: every layout is read bit by bit, and what is wrong or hostile in one ends in a sentence."""

from __future__ import annotations

import copyreg
import dataclasses
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from cases.checkpoint_cases import training_state
from cases.interchange_cases import BETAS, GROUPS, KINDS, SHAPES, bits, states, write_zero
from harness.local_runs import job_file
from spillway.api.job_file import JobFile
from spillway.api.training import Optimizer
from spillway.errors import CheckpointCorrupt, UserError
from spillway.update_rules import MomentType
from spillway_trainer.checkpoints.directory import Epoch
from spillway_trainer.checkpoints.durable_files import DurableFiles
from spillway_trainer.checkpoints.manifest import StoredCheckpoint
from spillway_trainer.checkpoints.tensors import save
from spillway_trainer.interchange import exporting
from spillway_trainer.interchange.distributed import find_keys
from spillway_trainer.interchange.exporting import export_states
from spillway_trainer.interchange.foreign import Foreign, powers_after
from spillway_trainer.interchange.importing import import_into, open_foreign
from spillway_trainer.interchange.naming import class_names, matched
from spillway_trainer.kernels.reference import widened
from spillway_trainer.optimizer.plain import MOMENT_DTYPES, Hyperparameters, in_dtype

OPTIMIZER_FILE = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
POWERS = powers_after(Hyperparameters(beta1=BETAS[0], beta2=BETAS[1]), 3)


def assert_holds(foreign: Foreign) -> None:
    for (kind, name), value in states().items():
        assert bits(foreign.read(kind, name)) == bits(value), (kind, name)
    assert (foreign.num_updates, set(foreign.shapes)) == (3, set(SHAPES))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 64])
def test_zero_of_any_number_of_ranks_is_read_bit_by_bit(tmp_path: Path, stage: int, num_ranks: int) -> None:
    write_zero(tmp_path / "t", stage, num_ranks, states())
    foreign = open_foreign(tmp_path / "t")
    assert_holds(foreign)
    assert (foreign.format, foreign.num_steps, foreign.betas) == (f"DeepSpeed ZeRO-{stage}", 3, BETAS)
    assert foreign.shapes == SHAPES


# ---- our own, out and in again ----


def our_checkpoint(directory: Path, **changes: Any) -> StoredCheckpoint:
    state = training_state(4, **({"scalars": POWERS, "model": {"class": "any"}} | changes))
    tensors = ((f"{kind}.{name}", value) for (kind, name), value in states().items())
    return save(Epoch.start(directory / "checkpoints", 1), state, tensors)


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_every_bit_of_an_export_is_read_again(tmp_path: Path, form: Any) -> None:
    written = export_states(our_checkpoint(tmp_path).path, tmp_path / "out", form, betas=BETAS)
    assert (written.num_parameters, written.num_steps, written.num_updates) == (4, 4, 3)
    assert_holds(open_foreign(tmp_path / "out"))


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_narrow_moments_are_exported_as_the_float32_values_that_they_are(
    tmp_path: Path, form: Any, moments: str
) -> None:
    dtype = MOMENT_DTYPES[MomentType(moments)]
    kept = {
        (kind, name): value if kind == "master" else in_dtype(value, dtype, kind)
        for (kind, name), value in states().items()
    }
    state = training_state(4, scalars=POWERS, model={"class": "any"}, moments=moments)
    tensors = ((f"{kind}.{name}", value) for (kind, name), value in kept.items())
    checkpoint = save(Epoch.start(tmp_path / "checkpoints", 1), state, tensors)
    export_states(checkpoint.path, tmp_path / "out", form, betas=BETAS)
    foreign = open_foreign(tmp_path / "out")
    for (kind, name), value in kept.items():
        found = foreign.read(kind, name)
        assert bits(found) == bits(widened(value, kind).view(found.shape))
        if moments == "int8" and kind != "master":
            continue  # scales are of what the codes stand for: an import may find other ones
        assert torch.equal(
            in_dtype(found, value.dtype, kind).view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(("kind", "expected"), [("tensor", torch.Tensor), ("number", int)])
def test_universal_step_is_what_the_loading_optimizer_keeps(tmp_path: Path, kind: Any, expected: type) -> None:
    export_states(our_checkpoint(tmp_path).path, tmp_path / "out", "universal", step_kind=kind)
    step = torch.load(tmp_path / "out" / "step-4" / "zero" / "a.bias" / "step.pt", weights_only=True)
    assert isinstance(step, expected) and float(step) == 3.0


def test_universal_leaves_the_settings_of_the_loading_run_alone(tmp_path: Path) -> None:
    """DeepSpeed takes clipping from the file where there is one, and passes over groups beyond those of the file."""
    export_states(our_checkpoint(tmp_path).path, tmp_path / "out", "universal")
    common = torch.load(tmp_path / "out" / "step-4" / "zero" / "optimizer_state.pt", weights_only=True)
    assert "clip_grad" not in common
    assert common["param_groups"] == [{"params": []}] * len(SHAPES)


def test_llama_export_uses_class_names_and_both_names_of_tied_weights(tmp_path: Path) -> None:
    tensors = {f"{kind}.{name}": torch.ones(2, 2) for kind in KINDS for name in ("embed_tokens.weight", "layers.0.w")}
    model = {"hidden_size": 2, "tie_word_embeddings": True}
    state = training_state(4, scalars=POWERS, model=model)
    checkpoint = save(Epoch.start(tmp_path / "checkpoints", 1), state, iter(tensors.items()))
    export_states(checkpoint.path, tmp_path / "out", "dcp")
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    weights = {key for key in metadata if key.startswith("model.")}
    assert weights == {"model.model.embed_tokens.weight", "model.lm_head.weight", "model.model.layers.0.w"}
    shapes = {"embed_tokens.weight": (2, 2), "layers.0.w": (2, 2)}
    names = matched(open_foreign(tmp_path / "out"), shapes, class_names(model))
    assert names == {"embed_tokens.weight": "model.embed_tokens.weight", "layers.0.w": "model.layers.0.w"}


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_export_never_overwrites(tmp_path: Path, form: Any) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: already exists"):
        export_states(our_checkpoint(tmp_path).path, tmp_path / "out", form)


@pytest.mark.parametrize("form", ["universal", "dcp"])
def test_export_that_fails_leaves_nothing(tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(DurableFiles):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(exporting, "DurableFiles", Full)
    checkpoint = our_checkpoint(tmp_path)
    with pytest.raises(UserError, match="out: not exported: No space left"):
        export_states(checkpoint.path, tmp_path / "out", form)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    checkpoint = our_checkpoint(tmp_path)
    flip(checkpoint.path / "tensors-00000.safetensors", 900)
    with pytest.raises(CheckpointCorrupt, match="tensors-00000"):
        export_states(checkpoint.path, tmp_path / "out", "universal")


def test_states_of_another_rule_have_no_place(tmp_path: Path) -> None:
    tensors = {"master.a": torch.zeros(2), "momentum.a": torch.zeros(2)}
    checkpoint = save(Epoch.start(tmp_path, 1), training_state(4), iter(tensors.items()))
    with pytest.raises(UserError, match=r"a has the states master, momentum; .* only those of AdamW and Adam"):
        export_states(checkpoint.path, tmp_path / "out", "universal")


def test_betas_that_changed_on_the_way_cannot_be_said(tmp_path: Path) -> None:
    checkpoint = our_checkpoint(tmp_path, scalars=POWERS | {"beta2_power": 0.5})
    with pytest.raises(UserError, match=r"beta2_power is 0.5, .* the betas were changed"):
        export_states(checkpoint.path, tmp_path / "out", "dcp", betas=BETAS)


# ---- what is wrong in a foreign checkpoint ----


class Payload:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_no_pickle_of_deepspeed_is_run(tmp_path: Path) -> None:
    write_zero(tmp_path / "t", 2, 1, states())
    torch.save({"optimizer_state_dict": Payload(tmp_path / "ran")}, tmp_path / "t" / OPTIMIZER_FILE)
    with pytest.raises(UserError, match=f"{OPTIMIZER_FILE}: rejected, because it holds Python objects"):
        open_foreign(tmp_path / "t")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    export_states(our_checkpoint(tmp_path).path, tmp_path / "dcp", "dcp")
    return tmp_path / "dcp"


def test_no_pickle_of_distributed_metadata_is_run(tmp_path: Path, distributed: Path) -> None:
    (distributed / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(UserError, match=r"\.metadata: rejected, .*mkdir"):
        open_foreign(distributed)
    assert not (tmp_path / "ran").exists()


def test_members_of_an_enum_may_be_pickled_by_getattr(distributed: Path) -> None:
    """As some Pythons do it (3.11.0 to 3.11.3 among them), whichever runs."""
    metadata = dcp.FileSystemReader(distributed).read_metadata()
    with (distributed / ".metadata").open("wb") as file:
        pickler = pickle.Pickler(file)
        by_getattr = {_MEM_FORMAT_ENCODING: lambda member: (getattr, (_MEM_FORMAT_ENCODING, member.name))}
        pickler.dispatch_table = {**copyreg.dispatch_table, **by_getattr}
        pickler.dump(metadata)
    assert b"getattr" in (distributed / ".metadata").read_bytes()
    assert_holds(open_foreign(distributed))


@pytest.mark.parametrize("owner", [os, _MEM_FORMAT_ENCODING], ids=["os", "enum"])
def test_no_other_getattr_of_a_pickle_is_run(distributed: Path, owner: Any) -> None:
    name = "system" if owner is os else "__class__"
    reference = pickle.GLOBAL + b"torch.distributed.checkpoint.metadata\n" + owner.__name__.encode() + b"\n"
    value = pickle.BINUNICODE + len(name).to_bytes(4, "little") + name.encode()
    call = pickle.GLOBAL + b"builtins\ngetattr\n" + pickle.MARK + reference + value + pickle.TUPLE + pickle.REDUCE
    (distributed / ".metadata").write_bytes(call + pickle.STOP)
    with pytest.raises(UserError, match=r"\.metadata: rejected, "):
        open_foreign(distributed)


def test_no_pickle_of_a_distributed_chunk_is_run(tmp_path: Path, distributed: Path) -> None:
    metadata = dcp.FileSystemReader(distributed).read_metadata()
    hostile = distributed / "__1_0.distcp"
    torch.save(Payload(tmp_path / "ran"), hostile)
    for index, place in metadata.storage_data.items():
        if index.fqn.endswith("exp_avg"):
            place.relative_path, place.offset, place.length = hostile.name, 0, hostile.stat().st_size
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="rejected, because it holds Python objects"):
        read_all(distributed)
    assert not (tmp_path / "ran").exists()


def read_all(directory: Path) -> None:
    foreign = open_foreign(directory)
    for name in foreign.shapes:
        for kind in KINDS:
            foreign.read(kind, name)


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.fixture(params=["zero", "universal", "dcp"])
def foreign_directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.param == "zero":
        write_zero(tmp_path / "foreign", 2, 2, states())
    else:
        export_states(our_checkpoint(tmp_path).path, tmp_path / "foreign", request.param)
    return tmp_path / "foreign"


def test_every_file_that_is_cut_off_is_named(foreign_directory: Path) -> None:
    """At its half, and by its last byte; what no state is read from may be whatever it is."""
    unread = {"latest_universal", "zero_pp_rank_0_mp_rank_00_model_states.pt"}
    files = [path for path in foreign_directory.rglob("*") if path.is_file() and path.name not in unread]
    assert files
    for path in files:
        content = path.read_bytes()
        for length in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(UserError, match=re.escape(path.name)):
                read_all(foreign_directory)
        path.write_bytes(content)
    read_all(foreign_directory)


def test_every_file_that_is_missing_is_named(foreign_directory: Path) -> None:
    for path in list(foreign_directory.rglob("*.distcp")) or sorted(foreign_directory.rglob("*fp32.pt")):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=re.escape(path.name)):
            read_all(foreign_directory)
        path.write_bytes(content)


def test_a_changed_value_is_never_read(foreign_directory: Path) -> None:
    """The bit that is flipped lies in the data of a tensor, where only its checksum can tell."""
    path = next(iter([*foreign_directory.glob("*optim_states.pt"), *foreign_directory.rglob("fp32.pt")]), None)
    path = path or next(foreign_directory.glob("*.distcp"))
    wanted = states()["master", "a.weight" if path.suffix == ".distcp" else "a.bias"].reshape(-1)
    needle = wanted.numpy().tobytes()[:12] if path.suffix == ".distcp" else None
    content = path.read_bytes()
    if needle is None:
        with zipfile.ZipFile(path) as archive:
            entry = next(one for one in archive.infolist() if "/data/" in one.filename)
            needle = archive.read(entry)[:8]
    flip(path, content.index(needle))
    with pytest.raises(UserError, match=re.escape(path.name) + ": not a complete file"):
        read_all(foreign_directory)


def changed_zero(directory: Path, stage: int = 2, rank: int = 0) -> tuple[Path, Any]:
    """A checkpoint of two ranks, and what is in the file of one."""
    write_zero(directory, stage, 2, states())
    path = directory / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    return path, torch.load(path, weights_only=True)


def wrong_dtype(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(26, dtype=torch.bfloat16)


def another_rule(state: Any) -> None:
    state["base_optimizer_state"]["state"][1] = {"momentum_buffer": torch.zeros(4)}


def no_moments(state: Any) -> None:
    state["base_optimizer_state"]["state"] = {}


def another_step(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["step"] = 7


def broken_step(state: Any) -> None:
    state["base_optimizer_state"]["state"][0]["step"] = 2.5


def too_short(state: Any) -> None:
    state["single_partition_of_fp32_groups"][0] = torch.zeros(3)


def another_stage(state: Any) -> None:
    state["zero_stage"] = 3


def no_states(state: Any) -> None:
    del state["single_partition_of_fp32_groups"]


def list_for_dict(state: Any) -> None:
    state["base_optimizer_state"] = {"state": [], "param_groups": None}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (wrong_dtype, r"rank_1.*group 0: exp_avg: its type is bfloat16, but only dense float32"),
        (another_rule, r"rank_1.*group 1 holds momentum_buffer, but only the states of Adam and AdamW"),
        (no_moments, r"rank_1.*contains no optimizer moments, because DeepSpeed kept them on NVMe"),
        (another_step, r"3 for group 0 in bf16_zero_pp_rank_0.*but 7 for group 0 in bf16_zero_pp_rank_1"),
        (broken_step, r"rank_1.*step: expected a whole number of steps, found 2\.5"),
        (too_short, r"parameter group 0 has \d+ values, but the shapes of its parameters add up to 51"),
        (another_stage, r"rank_1.*with ZeRO stage 3, but the files of other ranks with stage 2"),
        (no_states, r"rank_1.*not structured as DeepSpeed writes it \(no 'single_partition_of_fp32_groups'\)"),
        (list_for_dict, r"rank_1"),
    ],
)
def test_wrong_zero_states_are_rejected(tmp_path: Path, change: Any, sentence: str) -> None:
    path, content = changed_zero(tmp_path / "t", rank=1)
    change(content["optimizer_state_dict"])
    torch.save(content, path)
    with pytest.raises(UserError, match=sentence):
        open_foreign(tmp_path / "t")


def test_zero_without_the_states_of_a_rank_is_rejected(tmp_path: Path) -> None:
    path, _ = changed_zero(tmp_path / "t", rank=1)
    path.unlink()
    with pytest.raises(UserError, match="has the optimizer states of 1 ranks, but the run had 2 ranks"):
        open_foreign(tmp_path / "t")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "written by a model-parallel run"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "also holds the states of rank 1"),
        ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "no file with the optimizer states of rank 2"),
        ("layer_01-model_00-model_states.pt", "written with pipeline or expert parallelism"),
    ],
)
def test_zero_of_other_parallelism_or_with_stale_files_is_rejected(tmp_path: Path, name: str, sentence: str) -> None:
    path, _ = changed_zero(tmp_path / "t", rank=1)
    shutil.copy(path, tmp_path / "t" / name)
    with pytest.raises(UserError, match=sentence):
        open_foreign(tmp_path / "t")


def test_latest_names_the_tag_and_never_leaves_the_checkpoint(tmp_path: Path) -> None:
    write_zero(tmp_path / "run" / "global_step3", 1, 2, states())
    (tmp_path / "run" / "latest").write_text("global_step3\n")
    assert_holds(open_foreign(tmp_path / "run"))
    for tag in ("../run/global_step3", "/etc", "nowhere"):
        (tmp_path / "run" / "latest").write_text(tag)
        with pytest.raises(UserError, match=f"latest: names the directory {tag!r}, but no directory of this name"):
            open_foreign(tmp_path / "run")


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such directory"):
        open_foreign(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no checkpoint with optimizer states in a known format"):
        open_foreign(tmp_path)


def changed_metadata(directory: Path, change: Any) -> None:
    metadata = dcp.FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def outside(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../checkpoints/step-4.e1/manifest.json"


def transformed(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def twice(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.a.bias"]
    entry.chunks.append(entry.chunks[0])


def overlapping(metadata: Any) -> None:
    """As many values as the whole, and one of them twice."""
    chunk = type(metadata.state_dict_metadata["model.a.bias"].chunks[0])
    boxes = [chunk(torch.Size([0]), torch.Size([2])), chunk(torch.Size([1]), torch.Size([1]))]
    metadata.state_dict_metadata["model.a.bias"].chunks[:] = boxes


def nowhere(metadata: Any) -> None:
    metadata.storage_data = {}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (outside, r"names the file \.\./checkpoints/step-4\.e1/manifest\.json, but may name only files"),
        (transformed, "saved with transforms of its bytes"),
        (twice, r"model\.a\.bias: the 2 stored pieces .* do not exactly fill its shape \(3,\)"),
        (overlapping, r"model\.a\.bias: the 2 stored pieces .* do not exactly fill its shape \(3,\)"),
        (nowhere, "the metadata does not say in which file"),
    ],
)
def test_wrong_distributed_metadata_are_rejected(distributed: Path, change: Any, sentence: str) -> None:
    changed_metadata(distributed, change)
    with pytest.raises(UserError, match=sentence):
        read_all(distributed)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["model.a"], "no optimizer states"),
        (["x.state.a.exp_avg", "y.state.a.exp_avg"], "states of 2 optimizers"),
        (["state.a.exp_avg", "state.a.exp_avg_sq", "a"], "has exp_avg, exp_avg_sq, but only states of Adam and AdamW"),
        (["state.a.exp_avg", "state.a.exp_avg_sq", "state.a.step"], "all weights must .* prefixes found are: none"),
        (["state.a.exp_avg", "state.a.exp_avg_sq", "state.a.step", "m.a", "n.a"], "prefixes found are: 'm.', 'n.'"),
    ],
)
def test_wrong_distributed_keys_are_rejected(keys: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_keys(keys, Path("foreign"))


@pytest.mark.parametrize(("model", "optimizer"), [("", ""), ("model.", "optimizer."), ("app.model.", "app.optim.")])
def test_prefixes_of_keys_are_the_writers(model: str, optimizer: str) -> None:
    names = ["a.state.weight", "b"]
    keys = [f"{optimizer}state.{name}.{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq", "step")]
    found = find_keys([*keys, *(f"{model}{name}" for name in names), f"{optimizer}param_groups.b.lr"], Path("foreign"))
    assert (found.model_prefix, found.optimizer_prefix, list(found.names)) == (model, optimizer, names)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (
            {**SHAPES, "c": (1,)},
            r"1 parameters differ, the first:\n  c: missing from the checkpoint, \(1,\) in the job",
        ),
        ({**SHAPES, "a.bias": (4,)}, r"a\.bias: \(3,\) in the checkpoint, \(4,\) in the job"),
        (
            {name: shape for name, shape in SHAPES.items() if name != "scale"},
            "scale: trained in the checkpoint, not in the job",
        ),
    ],
)
def test_states_of_another_model_are_rejected(tmp_path: Path, shapes: Any, sentence: str) -> None:
    write_zero(tmp_path / "t", 1, 2, states())
    with pytest.raises(UserError, match=sentence):
        matched(open_foreign(tmp_path / "t"), shapes, class_names({"class": "any"}))


def job(directory: Path, **training: Any) -> JobFile:
    """Of 12 steps; `training` in place of fields of spec.training."""
    made = job_file(directory / "run", directory, directory / "run" / "corpus", 1)
    return made.model_copy(
        update={"spec": made.spec.model_copy(update={"training": made.spec.training.model_copy(update=training)})}
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_steps": 2}, r"counts 2 training steps, but more optimizer updates \(3\), so its files belong to two"),
        ({"num_steps": 12}, "has already trained 12 steps, but the job has only 12 in total"),
        (
            {"betas": (0.9, 0.999)},
            r"computed with betas \(0\.9, 0\.999\), .*optimizer\.betas are \(0\.9, 0\.95\)",
        ),
        ({}, r"belongs to another model than spec.model; 42 parameters differ"),
    ],
)
def test_import_rejects_what_the_job_cannot_go_on_from_and_writes_nothing(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    write_zero(tmp_path / "t", 1, 2, states())
    foreign = dataclasses.replace(open_foreign(tmp_path / "t"), **changes)
    with pytest.raises(UserError, match=sentence):
        import_into(job(tmp_path), foreign, print)
    assert not list((tmp_path / "run").iterdir())


def test_import_into_a_job_of_another_rule_is_rejected(tmp_path: Path) -> None:
    write_zero(tmp_path / "t", 1, 2, states())
    said = r"optimizer\.name = Lion: this optimizer keeps the states master, exp_avg, but only .* use AdamW or Adam"
    with pytest.raises(UserError, match=said):
        import_into(job(tmp_path, optimizer=Optimizer(name="Lion")), open_foreign(tmp_path / "t"), print)


def test_two_groups_lie_as_the_cases_say() -> None:
    assert {name for group in GROUPS for name in group} == set(SHAPES)
