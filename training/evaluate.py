"""Measure a saved model: bits per byte on held-out documents, share of known words in what it writes.

    python evaluate.py --model MODELS/gdn-tiny --data DATA --device cpu

Everything runs with the stock transformers code in fp32. Definitions:

- bits per byte: negative log2 likelihood of the held-out token stream in windows of 1,024 tokens (each window starts
  without context), end-of-text targets left out, divided by the UTF-8 bytes of the held-out documents.
- known-word share: of the words (runs of two or more letters, the first and last of each text left out because they
  may be cut), the share that occurs at least three times in the training text (``words.txt``). For comparison the same
  share is given for the held-out text itself and for the text of an untrained model of the same shape.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from data import read_documents

PROMPT_TOKENS = 32
NEW_TOKENS = 128
PROMPTS = 32
TEMPERATURE = 0.8
_WORDS = re.compile(r"[A-Za-z]{2,}")


def known_word_share(texts: Iterable[str], known: set[str]) -> float:
    """Share of known words over all texts together; 0 when there are no words."""
    hits = total = 0
    for text in texts:
        words = _WORDS.findall(text)[1:-1]
        total += len(words)
        hits += sum(word.lower() in known for word in words)
    return hits / total if total else 0.0


@torch.no_grad()
def bits_per_byte(
    model: torch.nn.Module, stream: np.ndarray, text_bytes: int, length: int = 1024, batch: int = 8, skip: int = 0
) -> float:
    """Bits per byte of ``stream`` (uint16 tokens); targets equal to ``skip`` (end of text) do not count."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(stream.astype(np.int64))
    starts = list(range(0, len(stream) - 1, length))
    nats = 0.0
    for first in range(0, len(starts), batch):
        rows = [tokens[start : start + length + 1] for start in starts[first : first + batch]]
        for same in sorted({len(row) for row in rows}):
            block = torch.stack([row for row in rows if len(row) == same]).to(device)
            logits = model(input_ids=block[:, :-1], use_cache=False).logits.float()
            losses = F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten(), reduction="none")
            nats += losses[block[:, 1:].flatten() != skip].double().sum().item()
    return nats / math.log(2) / text_bytes


def prompts_from(stream: np.ndarray, count: int, length: int = PROMPT_TOKENS, end_of_text: int = 0) -> torch.Tensor:
    """The first ``length`` tokens, end-of-text first, of the first ``count`` documents long enough: ``[count, length]``."""
    starts = np.flatnonzero(stream == end_of_text)
    ends = np.append(starts[1:], len(stream))
    chosen = [
        stream[start : start + length] for start, end in zip(starts, ends, strict=True) if end - start >= 2 * length
    ]
    return torch.from_numpy(np.stack(chosen[:count]).astype(np.int64))


@torch.no_grad()
def write(model: Any, prompts: torch.Tensor, new_tokens: int, temperature: float | None, seed: int = 0) -> torch.Tensor:
    """Continuations ``[count, new_tokens]`` without the prompts; greedy when ``temperature`` is None."""
    torch.manual_seed(seed)
    prompts = prompts.to(next(model.parameters()).device)
    how: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
        **how,
    )
    return out[:, prompts.shape[1] :].cpu()


def evaluate(folder: Path, data: Path, device: str, count: int = PROMPTS, likelihood: bool = True) -> dict[str, Any]:
    """All figures of a saved model, with a few samples; keys say what was measured."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    torch.manual_seed(0)
    untrained = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).to(device).eval()
    )
    stream = np.fromfile(data / "heldout.bin", dtype=np.uint16)
    known = set((data / "words.txt").read_text().split())
    documents = read_documents(data / "heldout.jsonl.gz")
    prompts = prompts_from(stream, count)

    def texts(writer: Any, temperature: float | None) -> list[str]:
        return tokenizer.batch_decode(write(writer, prompts, NEW_TOKENS, temperature), skip_special_tokens=True)

    sampled, greedy = texts(model, TEMPERATURE), texts(model, None)
    result: dict[str, Any] = {
        "device": device,
        "prompts": len(prompts),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "temperature": TEMPERATURE,
        "known_word_share_sampled": round(known_word_share(sampled, known), 4),
        "known_word_share_greedy": round(known_word_share(greedy, known), 4),
        "known_word_share_heldout_text": round(known_word_share((d.text for d in documents), known), 4),
        "known_word_share_untrained": round(known_word_share(texts(untrained, TEMPERATURE), known), 4),
        "samples": [
            {
                "prompt": tokenizer.decode(prompts[i], skip_special_tokens=True),
                "sampled": sampled[i],
                "greedy": greedy[i],
            }
            for i in range(min(3, len(prompts)))
        ],
    }
    if likelihood:
        text_bytes = sum(len(document.text.encode()) for document in documents)
        result["bits_per_byte"] = round(bits_per_byte(model, stream, text_bytes), 4)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--no-likelihood", action="store_true")
    options = parser.parse_args(arguments)
    result = evaluate(options.model, options.data, options.device, options.prompts, not options.no_likelihood)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
