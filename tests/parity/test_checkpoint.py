"""Tensors through a checkpoint and back: no bit changes, and a resumed run is the uninterrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cases.checkpoint_cases import flip_bit, training_state
from spillway.errors import CheckpointCorrupt, UserError
from spillway.update_rules import MASTER, MomentType, UpdateRule
from spillway_trainer.checkpoints.directory import Epoch
from spillway_trainer.checkpoints.durable_files import describe_file
from spillway_trainer.checkpoints.manifest import StoredCheckpoint, TrainingState
from spillway_trainer.checkpoints.tensors import (
    check_same_run,
    load,
    random_state,
    restore_random_state,
    save,
    write_tensors,
)
from spillway_trainer.corpus.data import TokenBatches
from spillway_trainer.corpus.text_source import text_source
from spillway_trainer.corpus.tokens import Corpus, build_corpus, open_corpus
from spillway_trainer.interchange.export import WeightFile, export
from spillway_trainer.models.transformer import Transformer, TransformerConfig
from spillway_trainer.optimizer.plain import Hyperparameters, in_dtype

CONFIG = TransformerConfig(
    hidden_size=16, num_layers=2, num_heads=4, num_key_value_heads=2, intermediate_size=24, vocab_size=300
)

torch.set_num_threads(1)


def awkward(shape: tuple[int, ...], seed: int) -> Tensor:
    """All kinds of float32: random bit patterns hold NaNs with payloads, denormals, infinities and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


def canonical(
    shapes: dict[str, tuple[int, ...]], rule: UpdateRule = UpdateRule.ADAMW, moments: MomentType = MomentType.FLOAT32
) -> dict[str, Tensor]:
    settings = Hyperparameters(rule=rule, moments=moments)
    names = [(kind, name) for name in shapes for kind in rule.state_kinds]
    return {
        f"{kind}.{name}": in_dtype(awkward(shapes[name], seed), settings.state_dtype(kind), kind)
        for seed, (kind, name) in enumerate(names)
    }


SHAPES = {"a": (7, 5), "b": (3,), "c": (1, 1), "d": (40, 50), "e": (), "empty": (0, 3)}


def saved(directory: Path, tensors: dict[str, Tensor], **state: object) -> StoredCheckpoint:
    return save(Epoch.start(directory, 1), training_state(10, **state), iter(tensors.items()))


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("moments", MomentType)
@pytest.mark.parametrize("rule", UpdateRule)
def test_every_bit_of_every_tensor_comes_back(tmp_path: Path, rule: UpdateRule, moments: MomentType) -> None:
    tensors = canonical(SHAPES, rule, moments)
    loaded = dict(load(saved(tmp_path, tensors, rule=rule.value, moments=moments.value), SHAPES))
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].shape, loaded[name].dtype) == (tensor.shape, tensor.dtype)
        assert bits(loaded[name]) == bits(tensor)


def test_files_are_as_large_as_allowed_and_a_larger_tensor_has_its_own(tmp_path: Path) -> None:
    tensors = canonical(SHAPES)
    with Epoch.start(tmp_path, 1).pending(10) as pending:
        write_tensors(pending, tensors.items(), file_bytes=400)
        checkpoint = pending.commit(training_state(10))
    held = {entry.name: set(load_file(checkpoint.path / entry.name)) for entry in checkpoint.manifest.files}
    sizes = {file: sum(tensors[name].nbytes for name in names) for file, names in held.items()}
    assert all(size <= 400 or len(held[file]) == 1 for file, size in sizes.items())
    assert sorted(sizes.values())[:3] != [4, 4, 4], "small tensors share files"
    assert {name for names in held.values() for name in names} == tensors.keys()


def test_in_a_file_of_two_types_every_tensor_begins_where_its_type_may(tmp_path: Path) -> None:
    """Readers map files; an odd number of two-byte values before four-byte ones would leave these unaligned."""
    tensors = canonical({"odd": (7, 5), "other": (4,)}, UpdateRule.LION, MomentType.BFLOAT16)
    checkpoint = saved(tmp_path, tensors, rule="Lion", moments="bfloat16")
    assert len(checkpoint.manifest.files) == 1
    with (checkpoint.path / checkpoint.manifest.files[0].name).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    begins = {name: header[name]["data_offsets"][0] for name in tensors}
    assert all(begins[name] % 4 == 0 for name in tensors if name.startswith(MASTER))
    assert {header[name]["dtype"] for name in tensors} == {"F32", "BF16"}


def test_iterator_may_reuse_its_buffer(tmp_path: Path) -> None:
    """States on NVMe pass through one staging buffer."""
    tensors = canonical({"a": (4, 4), "b": (4, 4)})
    buffer = torch.empty(4, 4)

    def staged() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield name, buffer.copy_(tensor)

    checkpoint = save(Epoch.start(tmp_path, 1), training_state(10), staged())
    assert {name: bits(tensor) for name, tensor in load(checkpoint, {"a": (4, 4), "b": (4, 4)})} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_transposed_tensor_is_stored_in_its_logical_order(tmp_path: Path) -> None:
    tensors = {name: tensor.t() for name, tensor in canonical({"a": (3, 5)}).items()}
    loaded = dict(load(saved(tmp_path, tensors), {"a": (5, 3)}))
    assert all(bits(loaded[name]) == bits(tensor.contiguous()) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"a": (7, 5)}, r"exp_avg\.b: \(3,\) in the checkpoint, absent in the model"),
        ({"a": (7, 5), "b": (3,), "z": (1,)}, r"exp_avg\.z: absent in the checkpoint, \(1,\) in the model"),
        ({"a": (5, 7), "b": (3,)}, r"exp_avg\.a: \(7, 5\) in the checkpoint, \(5, 7\) in the model"),
    ],
)
def test_checkpoint_of_another_model_is_rejected_with_the_first_differences(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    checkpoint = saved(tmp_path, canonical({"a": (7, 5), "b": (3,)}))
    with pytest.raises(UserError, match=sentence):
        next(load(checkpoint, shapes))


def test_a_tensor_that_its_file_lacks_is_never_left_out(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, canonical({"a": (7, 5)}))
    save_file({"master.a": torch.zeros(7, 5)}, checkpoint.path / "tensors-00000.safetensors")
    with pytest.raises(SafetensorError, match=r"exp_avg\.a"):
        list(load(checkpoint, {"a": (7, 5)}))


DECIDE = ("tokenizer_xxh3", "data_xxh3", "seed", "rule", "moments")


@pytest.mark.parametrize("changed", DECIDE)
def test_checkpoint_of_another_run_is_rejected(changed: str) -> None:
    state = training_state(10)
    now = {field: getattr(state, field) for field in DECIDE}
    check_same_run(state, **now)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="written under other settings"):
        check_same_run(state, **(now | {changed: "other"}))  # type: ignore[arg-type]


def test_manifest_names_rule_and_moments_unless_older_trainers_assume_them() -> None:
    assert not {"rule", "moments"} & set(training_state(10).to_json())
    assert training_state(10, rule="Lion").to_json()["rule"] == "Lion"
    narrow = training_state(10, moments="bfloat16")
    assert narrow.to_json()["moments"] == "bfloat16"
    assert TrainingState.from_json(narrow.to_json()) == narrow
    for rule in UpdateRule:
        state = training_state(10, rule=rule.value)
        assert TrainingState.from_json(state.to_json()) == state


def test_random_state_comes_back() -> None:
    with torch.random.fork_rng():
        state = random_state()
        drawn = torch.rand(4)
        torch.rand(9)
        restore_random_state(state)
        assert torch.equal(torch.rand(4), drawn)


# ---- resuming ----


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    directory = tmp_path_factory.mktemp("data")
    source = text_source(Path(__file__))
    build_corpus(source, directory / "corpus", CONFIG.vocab_size, lambda line: None)
    return open_corpus(directory / "corpus", source, CONFIG.vocab_size)


class Run:
    """Plain AdamW on a tiny model: enough state that a forgotten piece shows in the next loss."""

    def __init__(self, corpus: Corpus) -> None:
        self.model = Transformer(CONFIG)
        with torch.no_grad():
            for name, value in self.model.initial_values(seed=1):
                self.model.get_parameter(name).copy_(value)
        self.batches = TokenBatches(corpus, sequence_length=8, seed=3)
        self.parameters = dict(self.model.named_parameters())
        self.exp_avg = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self.beta1_power = 1.0
        self.samples = 0
        self.step = 0

    def train(self, num_steps: int) -> list[float]:
        return [self.train_step() for _ in range(num_steps)]

    def train_step(self) -> float:
        batch = self.batches.batch(range(self.samples, self.samples + 4))
        loss: Tensor = self.model(batch.tokens_BT, batch.labels_BT, batch.num_unmasked)
        loss.backward()  # type: ignore[no-untyped-call]
        self.beta1_power *= 0.9
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                assert parameter.grad is not None
                self.exp_avg[name].mul_(0.9).add_(0.1 * parameter.grad)
                self.exp_avg_sq[name].mul_(0.95).add_(0.05 * parameter.grad**2)
                unbiased = self.exp_avg[name] / (1 - self.beta1_power)
                parameter.sub_(0.01 * unbiased / (self.exp_avg_sq[name].sqrt() + 1e-8))
                parameter.grad = None
        self.samples += 4
        self.step += 1
        return loss.item()

    def save(self, epoch: Epoch) -> StoredCheckpoint:
        state = training_state(
            self.step,
            samples_consumed=self.samples,
            scalars={"beta1_power": self.beta1_power},
            data_xxh3=self.batches.fingerprint,
            model=asdict(CONFIG),
            random_state=random_state(),
        )
        return save(epoch, state, self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for kind, values in self.states().items():
            yield from ((f"{kind}.{name}", value) for name, value in values.items())

    def states(self) -> dict[str, dict[str, Tensor]]:
        return {
            "master": {name: parameter.data for name, parameter in self.parameters.items()},
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }

    def load(self, checkpoint: StoredCheckpoint) -> None:
        states = self.states()
        for full_name, value in load(checkpoint, {name: tuple(p.shape) for name, p in self.parameters.items()}):
            kind, name = full_name.split(".", 1)
            states[kind][name].copy_(value)
        state = checkpoint.manifest.state
        self.step, self.samples = state.step, state.samples_consumed
        self.beta1_power = state.scalars["beta1_power"]
        assert state.data_xxh3 == self.batches.fingerprint


def test_resumed_run_is_the_uninterrupted_run(tmp_path: Path, corpus: Corpus) -> None:
    whole = Run(corpus)
    losses = whole.train(9)
    cut = Run(corpus)
    assert cut.train(4) == losses[:4]
    cut.save(Epoch.start(tmp_path, 1))
    epoch = Epoch.start(tmp_path, 2)
    assert epoch.resume.checkpoint is not None
    resumed = Run(corpus)
    resumed.load(epoch.resume.checkpoint)
    assert resumed.train(5) == losses[4:]
    for (name, value), (_, expected) in zip(resumed.tensors(), whole.tensors(), strict=True):
        assert bits(value) == bits(expected), name


# ---- export ----


@pytest.fixture
def exported_from(tmp_path: Path, corpus: Corpus) -> StoredCheckpoint:
    run = Run(corpus)
    run.train(1)
    state = training_state(
        1, model=asdict(CONFIG), sequence_length=8, tokenizer_xxh3=describe_file(corpus.tokenizer_path).xxh3_128
    )
    return save(Epoch.start(tmp_path / "checkpoints", 1), state, run.tensors())


LAYER_NAMES = {
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (16, 16),
    "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16),
    "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
LLAMA_NAMES = {
    "model.embed_tokens.weight": (300, 16),
    "model.norm.weight": (16,),
    "lm_head.weight": (300, 16),
    **{f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER_NAMES.items()},
}


def test_export_has_the_names_and_shapes_of_llama(
    tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint
) -> None:
    export(exported_from.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == LLAMA_NAMES
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_exported_float32_weights_are_the_masters(
    tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint
) -> None:
    export(exported_from.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path, dtype="float32")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    run = Run(corpus)
    run.train(1)
    assert bits(weights["lm_head.weight"]) == bits(run.parameters["head.lm_head.weight"].detach())
    assert bits(weights["model.layers.1.mlp.up_proj.weight"]) == bits(
        run.parameters["layers.1.mlp.up_proj.weight"].detach()
    )


def test_exported_float16_weights_are_the_rounded_masters(
    tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint
) -> None:
    for dtype in ("float16", "float32"):
        export(exported_from.path, tmp_path / dtype, tokenizer=corpus.tokenizer_path, dtype=dtype)
    halves, masters = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float16", "float32"))
    assert halves.keys() == masters.keys()
    assert all(torch.equal(halves[name], masters[name].half()) for name in masters)


def test_what_float16_cannot_hold_is_rejected_with_its_name() -> None:
    file = WeightFile("model.safetensors", {"a": (1,), "b": (2,)}, lambda: [torch.ones(1), torch.tensor([1.0, 7e4])])
    with pytest.raises(UserError, match=r"b: has values beyond 65504.*bfloat16"):
        list(file.content(torch.float16))
    assert list(file.content(torch.bfloat16))


def test_exported_config_describes_the_model(tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint) -> None:
    export(exported_from.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 300, "max_position_embeddings": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "eos_token_id": corpus.index.end_of_text,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == corpus.tokenizer_path.read_bytes()


def test_tied_model_is_exported_without_a_second_embedding(tmp_path: Path, corpus: Corpus) -> None:
    tokenizer = describe_file(corpus.tokenizer_path).xxh3_128
    model = asdict(CONFIG) | {"tie_word_embeddings": True}
    tensors = canonical({"embed_tokens.weight": (4, 4)})
    checkpoint = saved(tmp_path / "checkpoints", tensors, model=model, tokenizer_xxh3=tokenizer)
    export(checkpoint.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path)
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"model.embed_tokens.weight"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True


def test_corrupt_checkpoint_is_not_exported(tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint) -> None:
    flip_bit(exported_from.path / "tensors-00000.safetensors", 9999)
    with pytest.raises(CheckpointCorrupt, match="tensors-00000"):
        export(exported_from.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path)
    assert not (tmp_path / "hf").exists()


def test_export_with_another_tokenizer_is_rejected(tmp_path: Path, exported_from: StoredCheckpoint) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not the tokenizer that step-1\.e1 was trained with"):
        export(exported_from.path, tmp_path / "hf", tokenizer=tmp_path / "tokenizer.json")


def test_export_never_overwrites(tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="already exists"):
        export(exported_from.path, tmp_path / "hf", tokenizer=corpus.tokenizer_path)


def test_export_removes_nothing_beside_its_output(
    tmp_path: Path, corpus: Corpus, exported_from: StoredCheckpoint
) -> None:
    mine = tmp_path / "llama.tmp" / "notes"
    mine.parent.mkdir()
    mine.write_text("mine")
    export(exported_from.path, tmp_path / "llama", tokenizer=corpus.tokenizer_path)
    assert mine.read_text() == "mine"
    assert not list(tmp_path.glob("llama.*.tmp"))
