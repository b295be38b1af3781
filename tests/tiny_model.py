"""A random tiny Qwen3 checkpoint with a tokenizer and the real chat template: enough to run the whole command in a second."""

import json

from checkpoints import DENSE, write_checkpoint
from qwen3_fixture import CASES, CONFIG

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
UNSPECIAL = ["<think>", "</think>", "<tool_response>"]
TOKENS = 600
PADDED = 640  # rows of the model: the last ones mean nothing
TINY = DENSE | {"vocab_size": PADDED, "max_position_embeddings": 4096, "eos_token_id": TOKENS + 2}


def tokenizer_json() -> str:
    """A byte-level BPE trained on the tests' texts: TOKENS ids, then the control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([case["text"] for case in CASES["texts"]] * 4, trainer)
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.add_tokens([AddedToken(text, special=text in CONTROL, normalized=False) for text in CONTROL + UNSPECIAL])
    return tokenizer.to_str()


def write_tiny_model(folder, **changes):
    """Writes the checkpoint into `folder` and returns it; `changes` go into config.json."""
    write_checkpoint(folder, TINY | changes)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CONFIG["chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [TOKENS + 2, TOKENS]}))
    return folder
