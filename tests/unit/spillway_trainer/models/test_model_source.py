"""A Hugging Face directory is read tensor by tensor, or rejected with names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    NomicBertConfig,
    NomicBertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from cases.huggingface_models import SIZES, VOCABULARY, spec_of
from spillway.errors import UserError
from spillway_trainer.models import families
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain
from spillway_trainer.models.source import SAMPLED_BYTES, open_model_directory

T5_SIZES = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2)


def saved(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    return saved(GPT2LMHeadModel(GPT2), tmp_path / "model")


def built(directory: Path) -> Chain:
    return build_model(spec_of(source={"path": str(directory)}))


def values_of(chain: Chain, seed: int = 0) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in chain.initial_values(seed)}


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# --- what is read -----------------------------------------------------------------------------------------------------


def test_every_value_is_the_files(gpt2: Path) -> None:
    own = GPT2LMHeadModel.from_pretrained(gpt2)
    values = values_of(built(gpt2))
    assert values.keys() == {name for name, _ in own.named_parameters()}
    assert all(torch.equal(values[name], p) for name, p in own.named_parameters())


def test_shards_hold_the_same_model(gpt2: Path, tmp_path: Path) -> None:
    sharded = saved(GPT2LMHeadModel.from_pretrained(gpt2), tmp_path / "sharded", max_shard_size="9KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = values_of(built(gpt2)), values_of(built(sharded))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_half_precision_files_are_read_too(gpt2: Path, tmp_path: Path) -> None:
    half = saved(GPT2LMHeadModel.from_pretrained(gpt2).to(torch.float16), tmp_path / "half")
    whole, rounded = values_of(built(gpt2)), values_of(built(half))
    assert all(torch.equal(rounded[name], whole[name].half().float()) for name in whole)


def test_headless_checkpoint_is_enough_when_the_head_is_the_embedding(tmp_path: Path) -> None:
    torch.manual_seed(1)
    directory = saved(GPT2Model(GPT2), tmp_path / "base")
    change_config(directory, architectures=["GPT2LMHeadModel"])
    own = load_file(directory / "model.safetensors")
    values = values_of(built(directory))
    assert torch.equal(values["transformer.wte.weight"], own["wte.weight"])


def test_heads_for_other_objectives_and_old_names_are_understood(tmp_path: Path) -> None:
    """As in the first published bert: a pooler, a sentence head, TensorFlow's names of norms."""
    sizes = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    directory = saved(BertForPreTraining(sizes), tmp_path / "bert")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = (
                tensors.pop(name)
            )

    change_tensors(directory, rename)
    values = values_of(built(directory))
    assert "bert.embeddings.LayerNorm.weight" in values and not any("pooler" in name for name in values)


def test_a_head_of_its_own_is_not_tied_where_the_configuration_says_so(tmp_path: Path) -> None:
    """t5 1.1 and its descendants."""
    sizes = T5Config(**T5_SIZES, pad_token_id=0, decoder_start_token_id=0)
    directory = saved(T5ForConditionalGeneration(sizes), tmp_path / "t5")
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCABULARY, 16)}))
    with pytest.raises(UserError, match=r"lm_head\.weight and shared\.weight are one parameter"):
        values_of(built(directory))
    change_config(directory, tie_word_embeddings=False)
    assert values_of(built(directory))["lm_head.weight"].eq(1).all()


def test_digest_depends_on_the_weights_but_not_on_their_shards(gpt2: Path, tmp_path: Path) -> None:
    sharded = saved(GPT2LMHeadModel.from_pretrained(gpt2), tmp_path / "sharded", max_shard_size="9KB")
    digest = open_model_directory(gpt2).digest()
    assert open_model_directory(sharded).digest() == digest

    def train(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.h.0.ln_1.bias"][0] += 1

    change_tensors(gpt2, train)
    assert open_model_directory(gpt2).digest() != digest
    assert SAMPLED_BYTES == 4096, "docs/models.md says so"


# --- what is rejected -------------------------------------------------------------------------------------------------


def rename_weights(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def overwrite(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text)


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda directory: change_tensors(directory, change)


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        fields = json.loads(content[8 : 8 + length])
        change(fields)
        header = json.dumps(fields).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return damage


def entry(**fields: Any) -> Callable[[Path], Any]:
    return with_header(lambda header: header[BIAS].update(fields))


def with_offsets(shift: Callable[[int, int], list[int]]) -> Callable[[Path], Any]:
    return with_header(lambda header: header[BIAS].update(data_offsets=shift(*header[BIAS]["data_offsets"])))


def swap(header: dict[str, Any]) -> None:
    one, other = header[BIAS], header["transformer.wte.weight"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def as_index(weight_map: Any) -> Callable[[Path], Any]:
    def damage(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def configured(**fields: Any) -> Callable[[Path], Any]:
    return lambda directory: change_config(directory, **fields)


DEEP = "[" * 100_000
BIAS = "transformer.h.0.ln_1.bias"
NOT_ITS_BYTES = r"the byte range of tensor \S+ does not match its type, shape and offset; copy the file again"
NO_MODEL = r"config\.json: no model can be built from this GPT2Config: "
REJECTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickled weights": (rename_weights, r"holds pytorch_model\.bin .* can run code when read"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "a cut file": (cut, r"model\.safetensors: has \d+ bytes, but its header says \d+; copy the file again"),
    "no safetensors": (overwrite("model.safetensors", "x" * 100), "not a safetensors file"),
    "no configuration": (lambda d: (d / "config.json").unlink(), r"config\.json: No such file"),
    "a configuration that is no JSON": (overwrite("config.json", "{"), r"config\.json: not valid JSON"),
    "another family": (
        configured(model_type="their_own", auto_map={"AutoModelForCausalLM": "theirs.Model"}),
        "model_type 'their_own' is not a text model of transformers",
    ),
    "a wrong configuration": (lambda d: change_config(d, n_embd="x"), "not a valid configuration of GPT2LMHeadModel"),
    "a missing tensor": (with_tensors(lambda t: t.pop(BIAS)), f"1 missing: {BIAS}"),
    "an unexpected tensor": (
        with_tensors(lambda t: t.update({"transformer.more": torch.ones(1)})), "1 unexpected: transformer.more",
    ),
    "another shape": (
        with_tensors(lambda t: t.update({BIAS: torch.ones(3)})), rf"{BIAS} is F32 \[3\], but must be F32 .* \[16\]",
    ),
    "quantised values": (
        with_tensors(lambda t: t.update({BIAS: torch.ones(16, dtype=torch.int8)})), f"{BIAS} is I8",
    ),
    "bytes of another tensor": (with_header(swap), NOT_ITS_BYTES),
    "too few bytes": (with_offsets(lambda start, end: [start + 4, end]), NOT_ITS_BYTES),
    "bytes before the data": (with_offsets(lambda start, end: [-100_000, end]), "not a safetensors file"),
    "another type than its bytes": (entry(dtype="BF16"), NOT_ITS_BYTES),
    "a shape that is text": (entry(shape="ab"), "not a safetensors file"),
    "a type that is a list": (entry(dtype=["F32"]), "not a safetensors file"),
    "metadata that is a list": (with_header(lambda h: h.update(__metadata__=[1])), "not a safetensors file"),
    "a deep header": (
        lambda d: (d / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        "not a safetensors file",
    ),
    "a deep configuration": (overwrite("config.json", DEEP), r"config\.json: not valid JSON"),
    "an index of lists": (as_index({"a": ["x"]}), "has no weight_map from tensor names to file names"),
    "a width that its heads do not divide": (configured(n_head=3), NO_MODEL + "ValueError"),
    "a class that is not trained": (
        configured(model_type="roberta", architectures=["RobertaForCausalLM"]),
        "architectures names RobertaForCausalLM, but models of type roberta are trained as RobertaForMaskedLM",
    ),
    "an encoder and a decoder": (
        configured(model_type="pegasus", is_encoder_decoder=True), "it has an encoder and a decoder instead of one",
    ),
    "a family of encoders and decoders": (configured(model_type="mt5"), "mt5: .* it has an encoder and a decoder"),
    "quantized weights": (
        configured(quantization_config={"load_in_4bit": True}), "quantization_config is set, .* quantized weights; use",
    ),
    "no heads": (configured(n_head=0), r"/config\.json: n_head is 0; set it to a value from 1 to 1024"),
    "positions without end": (
        configured(n_positions=2**24 + 1), r"/config\.json: n_positions is 16777217; set it to .* from 1 to 16777216",
    ),
    "a width without end": (configured(n_embd=1e300), r"n_embd is 1e\+300; set it to a value from 1 to 131072"),
    "a vocabulary without end": (configured(vocab_size=float("inf")), "vocab_size is inf; .* from 1 to 4194304"),
    "a size that is no number": (configured(n_inner=float("nan")), "n_inner is nan; set it to .* from 1 to 1048576"),
    "heads without end": (configured(n_head=10**9), "n_head is 1000000000; set it to a value from 1 to 1024"),
    "an unknown activation": (configured(activation_function="nope"), NO_MODEL + "KeyError: 'nope'"),
    "a rate that is none": (configured(resid_pdrop=1.5), NO_MODEL + "ValueError"),
    "an attention that is not installed": (configured(attn_implementation="flash_attention_2"), NO_MODEL),
    "an unknown type": (configured(dtype="nope"), "not a valid configuration of GPT2LMHeadModel"),
    "labels without end": (configured(num_labels=10**8), "but this model may have at most 100000"),
    "layers without end": (configured(n_layer=10**8), r"n_layer is 100000000, but this model may have at most \d+"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), REJECTED.values(), ids=REJECTED)
def test_a_directory_that_is_not_right_is_rejected_with_what_was_found(
    damage: Callable[[Path], Any], words: str, gpt2: Path
) -> None:
    damage(gpt2)
    with pytest.raises(UserError, match=words):
        values_of(built(gpt2))


def test_files_that_store_several_parameters_in_one_tensor_are_rejected(tmp_path: Path) -> None:
    sizes = NomicBertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    NomicBertForMaskedLM(sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"store several parameters in one tensor \(\S+\.attn\.Wqkv\.weight\)"):
        built(tmp_path)


@pytest.mark.parametrize("field", ["decoder_start_token_id", "pad_token_id"])
@pytest.mark.parametrize("token", [None, -1, VOCABULARY])
def test_t5_needs_tokens_that_it_has_for_what_is_not_in_the_text(field: str, token: int | None) -> None:
    """`pad_token_id` stands for labels that are not learned."""
    sizes = T5Config(**T5_SIZES, **{"decoder_start_token_id": 0, "pad_token_id": 0, field: token})
    with torch.device("meta"):
        model = T5ForConditionalGeneration(sizes)
    with pytest.raises(UserError, match=rf"t5: {field} is {token}, which is not a token of the model \(0 to 96\)"):
        families.chain_of(model, torch.float32)


def test_a_value_that_is_no_number_equals_itself(gpt2: Path) -> None:
    def store_twice(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.wte.weight"][0, 0] = float("nan")
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    change_tensors(gpt2, store_twice)
    assert values_of(built(gpt2))["transformer.wte.weight"].isnan().sum() == 1


def test_a_file_that_safetensors_does_not_read_is_rejected(gpt2: Path) -> None:
    directory = open_model_directory(gpt2)
    (gpt2 / "model.safetensors").write_text("x" * 100)
    with pytest.raises(UserError, match=rf"cannot read {BIAS}: .*copy the file again"):
        directory.value(BIAS)


def test_values_of_buffers_are_rejected_and_not_lost(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), moe_intermediate_size=24, num_experts_per_tok=2, n_routed_experts=4,
        n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    directory = saved(DeepseekV3ForCausalLM(config), tmp_path / "deepseek")
    with pytest.raises(UserError, match=r"holds values of 2 buffers of DeepseekV3ForCausalLM, first .*correction_bias"):
        built(directory)


@pytest.mark.parametrize("names", [("decoder.bias", "bias"), ("decoder.bias",), ("bias",)])
def test_an_untied_berts_bias_is_the_projections_own(names: tuple[str, ...], tmp_path: Path) -> None:
    """transformers 5 writes both and uses that of the decoder; before, they were one."""
    sizes = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    directory = saved(BertForMaskedLM(sizes), tmp_path / "bert")

    def store(tensors: dict[str, Tensor]) -> None:
        for name in ("decoder.bias", "bias"):
            tensors.pop(f"cls.predictions.{name}")
        for number, name in enumerate(names):
            tensors[f"cls.predictions.{name}"] = torch.full((VOCABULARY,), 1.0 + number)

    change_tensors(directory, store)
    assert values_of(built(directory))["cls.predictions.decoder.bias"].eq(1).all()


def test_a_shard_that_is_not_there_is_named(gpt2: Path, tmp_path: Path) -> None:
    sharded = saved(GPT2LMHeadModel.from_pretrained(gpt2), tmp_path / "sharded", max_shard_size="9KB")
    lost = max(sharded.glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(UserError, match=f"names 1 weight files that are missing from its directory, first {lost.name}"):
        built(sharded)


def test_an_index_cannot_lead_out_of_the_directory(gpt2: Path, tmp_path: Path) -> None:
    (gpt2 / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(UserError, match=r"missing from its directory, first outside\.safetensors"):
        built(gpt2)


def test_a_sequence_longer_than_the_learned_positions_is_rejected(tmp_path: Path) -> None:
    short = saved(GPT2LMHeadModel(GPT2Config(**GPT2.to_diff_dict() | {"n_positions": 8})), tmp_path / "short")
    with pytest.raises(UserError, match="the model has 8 learned positions"):
        built(short)


def test_code_in_the_directory_is_not_run(gpt2: Path) -> None:
    (gpt2 / "modeling.py").write_text("raise SystemExit('run')")
    change_config(gpt2, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert values_of(built(gpt2))
