"""Compares the native Helium of `helium_family` with transformers, on a small random checkpoint.

    python -m pdserve_examples.check_helium DIRECTORY

Writes the checkpoint into DIRECTORY, generates greedily with `pdserve.LLM` and with transformers, and exits with 1 if a
token differs.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import HeliumConfig, HeliumForCausalLM, PreTrainedTokenizerFast

from pdserve import LLM, SamplingParams

TEXTS = ("Two servers share the work.", "The first one reads the prompt and the second one writes the answer.")
NUM_TOKENS = 24
VOCAB_SIZE = 320


def write_checkpoint(folder: Path) -> HeliumForCausalLM:
    """Save a random model with three layers, and a byte-level tokenizer; return the model."""
    torch.manual_seed(0)
    config = HeliumConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = HeliumForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return model.eval()


def main() -> int:
    """Return 0 if all tokens are equal."""
    folder = Path(sys.argv[1])
    logging.disable(logging.WARNING)
    model = write_checkpoint(folder)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), model_impl="native", max_total_tokens=4096, dtype="float32") as llm:
        outputs = llm.generate(list(TEXTS), params, use_tqdm=False)
    wrong = 0
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        expected = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        tokens = list(output.outputs[0].token_ids)
        equal = tokens == expected[0, prompt.shape[1] :].tolist()
        wrong += not equal
        print(f"{len(tokens)} tokens {'equal' if equal else 'DIFFER'}: {output.prompt}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
