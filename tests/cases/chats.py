"""Chat templates in the style of four families, their tokenizers, and conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}"
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\\n' }}"
        "{% generation %}{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endgeneration %}"
        "{% else %}{{ '<start_of_turn>' + m['role'] + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    ),
}
"""Templates that mark the responses."""
UNMARKED = {
    family: text.replace("{% generation %}", "").replace("{% endgeneration %}", "") for family, text in MARKED.items()
}
SPECIAL = {
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
}
NAMED = {
    "chatml": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>"},
    "mistral": {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}},
}
WORDS = ("yes", "no", " a b", "x += 1\n", "naïve", "日本語", "🙂", "\n\n", "  ", "<b>", "{{ m }}", "don't", "\t", "01")
VOCABULARY = 512


def model_directory(root: Path, family: str, template: str | None, *, trim_offsets: bool = False) -> Path:
    """Makes a directory with tokenizer.json and, unless `template` is None, a chat template, but without a model."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL[family]), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox says yes, no and hello to user assistant model\n"], trainer)
    bos = NAMED[family].get("bos_token")
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if isinstance(bos, str):
        steps.append(
            processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        )
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.save(str(root / "tokenizer.json"))
    config = NAMED[family] | ({} if template is None else {"chat_template": template})
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of alternating user and assistant, as all four templates accept them. Turns are seldom empty and
    often have unusual characters."""
    draw = random.Random(seed)

    def content() -> str:
        return "".join(draw.choice(WORDS) for _ in range(draw.randrange(12))) + draw.choice(("", "ok", "🙂", " "))

    return [
        [
            {"role": role, "content": content()}
            for _ in range(draw.randrange(1, 4))
            for role in ("user", "assistant")
        ]
        for _ in range(count)
    ]  # fmt: skip


def write_lines(path: Path, lines: Sequence[Mapping[str, Any] | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
