"""docs/formats.md: every format that is read or written, and the short table of the README."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import markdown
from markdown import table

from polyquant.formats import FORMATS, WRITERS
from polyquant.formats.gguf.types import BLOCKS, TYPE_IDS


def page() -> str:
    """The page."""
    return markdown.page(
        [
            "# Formats",
            "`pq.open_checkpoint(path)` opens a file, a `.safetensors.index.json`, or a model's "
            "folder. It reads headers alone; a tensor is read when it is asked for, as a "
            "`QTensor` that holds the file's own codes and scales. What format a path is of, it "
            "finds out by what the file or its config declares, never by shapes. Where nothing "
            "is declared, or two formats are, it refuses, and says what would settle it: "
            "`format=`, or `config=` (the model's config, its path, or the part of it that is "
            "about quantization).",
            "`polyquant convert IN OUT --to FORMAT[:VARIANT]` writes the formats that have a word "
            "in the column of writing. A tensor is kept exactly where the target can hold it; "
            "`--requantize` accepts a loss, which is then shown for each tensor. Names of tensors "
            "stay as they are: a GGUF made of weights with the names of Hugging Face is a file of "
            "tensors, not a model that llama.cpp runs, which asks for its own names, keys and "
            "vocabulary. llama.cpp's own script makes such a file; what weights are in it, can be "
            "changed here.",
            "## All",
            section(),
            "*Exact*: how values compare with those that the tool decodes from its own files. "
            "Bit-equal means every float32, but for subnormal numbers, which are zero here by "
            "[contract](numerics.md). *Same bytes*: whether tensors, read and written back, are "
            "the same bytes. *Read by the tool*: the tool that reads our files in a test.",
            "Beside the files of the tests, what tools make of their options, each with each, "
            "was read once and compared with their own values: 1260 tensors of bitsandbytes "
            "0.50.2, 189 of MLX 0.32.4, 168 and every preset of compressed-tensors 0.20.1, 103 "
            "of torchao 0.18, 380 of HQQ 0.2.8, and the experts of models that ModelOpt 0.47 "
            "exported. They are equal in float32, and within a rounding where the tool computes "
            "in fewer bits; but for 288 of bitsandbytes, whose decoding on a CPU contradicts "
            "its encoding in some shapes where a block holds several rows. There the values are "
            "those of its layout.",
            "## Variants",
            "What weights can become, and the scheme that they have then:",
            table(
                ["format", "variant", "scheme"],
                [
                    [f"`{name}`", f"`{variant}`", f"`{text}`"]
                    for name, module in WRITERS.items()
                    for variant, text in getattr(import_module(module), "VARIANTS", {}).items()
                ],
            ),
            "`safetensors:SCHEME` takes every [scheme](schemes.md).",
            "## Types of GGUF",
            "Vector types are held as lookups of 3 or 4 bits: the same numbers in more bytes.",
            table(
                ["type", "number", "values a block", "bytes a block", "scheme"],
                [
                    [
                        *map(str, (f"`{b.name}`", TYPE_IDS[b.name], b.elements, b.size_bytes)),
                        f"`{b.text}`",
                    ]
                    for b in BLOCKS.values()
                ],
            ),
            "## One by one",
            *(
                text
                for name in FORMATS
                for text in (f"### {name}", (_module(name).__doc__ or "").strip())
            ),
        ]
    )


def short() -> str:
    """The table of the README: yes, no, and the tool that reads our files."""
    rows = []
    for name in FORMATS:
        facts = _module(name).FACTS
        bits = "yes" if facts.exact.startswith(("yes", "bit-equal")) else "no"
        writes = ["yes", "yes"] if facts.writes else ["-", "-"]
        rows.append([f"`{name}`", facts.tool, "yes", bits, *writes, facts.checked or "-"])
    head = ["format", "of", "read", "exact", "written", "same bytes", "read by the tool"]
    return table(head, rows) + "\n"


def section() -> str:
    """The table in full."""
    rows = []
    for name in FORMATS:
        facts = _module(name).FACTS
        cells = (facts.tool, facts.reads, facts.exact, facts.writes, facts.bytes, facts.checked)
        rows.append([f"`{name}`", *(cell or "-" for cell in cells)])
    head = ["format", "of", "reads", "exact", "writes", "same bytes", "read by the tool"]
    return table(head, rows) + "\n"


def _module(name: str) -> ModuleType:
    return import_module(FORMATS[name])
