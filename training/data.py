"""Corpus of openly licensed programming documentation: extract, clean, deduplicate, split, tokenize.

    python data.py corpus   --deb-dir DEBS --out DATA      # documents, word list, manifest
    python data.py tokenize --out DATA                     # tokenizer, train.bin, heldout.bin

The input is a folder of Debian documentation packages (``README.md`` lists them) plus the docstrings of the standard
library of the interpreter that runs this script. The output is deterministic for given inputs:

| file                | content                                                                               |
|---------------------|---------------------------------------------------------------------------------------|
| ``train.jsonl.gz``  | one document a line: ``source``, ``name``, ``text``                                     |
| ``heldout.jsonl.gz``| same, documents never seen in training; no paragraph of theirs occurs in training     |
| ``words.txt``       | known words: lower-case words that occur at least ``MIN_WORD_COUNT`` times in training |
| ``manifest.json``   | package files and hashes, sizes, counts, hash of the training text                     |
| ``tokenizer/``      | byte-level BPE, loadable by ``transformers.AutoTokenizer``                              |
| ``train.bin``       | uint16 tokens of all training documents, each preceded by the end-of-text token       |
| ``heldout.bin``     | same for the held-out documents                                                       |
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import inspect
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MIN_WORD_COUNT = 3
HELDOUT_PERCENT = 2
MIN_DOCUMENT_CHARS = 400
MAX_CODE_LINES = 15  # longer listings are left out: the models should learn to write prose
WORD = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Source:
    """One documentation package: where its pages lie and which of them to read.

    ``include`` and ``exclude`` are regular expressions that are searched in the page's path relative to ``root``.
    """

    package: str
    root: str
    licence: str
    include: str = ""
    exclude: str = r"(^|/)(genindex|py-modindex|search|_modules|_sources|changelog|changes|bookindex)"


_DOC = "usr/share/doc/"
SOURCES = (
    Source("python3.11-doc", _DOC + "python3.11/html", "PSF-2.0"),
    Source("postgresql-doc-15", _DOC + "postgresql-doc-15/html", "PostgreSQL", exclude=r"^(release|bookindex|features-sql|errcodes)"),
    Source("sqlite3-doc", _DOC + "sqlite3", "public domain", exclude=r"(releaselog|changes|matrix|syntax/|session/|keyword_index)"),
    Source("cmake-doc", _DOC + "cmake-data/html", "BSD-3-Clause", exclude=r"(genindex|_sources|release/|search)"),
    Source("python-django-doc", _DOC + "python-django-doc/html", "BSD-3-Clause", exclude=r"(genindex|modindex|_modules|_sources|releases/|search)"),
    Source("python-sqlalchemy-doc", _DOC + "python-sqlalchemy-doc/html", "MIT", exclude=r"(genindex|_modules|_sources|changelog/change|search)"),
    Source("python-flask-doc", _DOC + "python-flask-doc/html", "BSD-3-Clause"),
    Source("python-werkzeug-doc", _DOC + "python-werkzeug-doc/html", "BSD-3-Clause"),
    Source("python-jinja2-doc", _DOC + "python-jinja2-doc/html", "BSD-3-Clause"),
    Source("python-click-doc", _DOC + "python-click-doc/html", "BSD-3-Clause"),
    Source("python-attr-doc", _DOC + "python-attr-doc/html", "MIT"),
    Source("python-pytest-doc", _DOC + "python-pytest-doc/html", "MIT"),
    Source("python-requests-doc", _DOC + "python-requests-doc/html", "Apache-2.0"),
    Source("python-tornado-doc", _DOC + "python-tornado-doc/html", "Apache-2.0"),
    Source("python-aiohttp-doc", _DOC + "python-aiohttp-doc/html", "Apache-2.0"),
    Source("python-cryptography-doc", _DOC + "python-cryptography-doc/html", "Apache-2.0 or BSD-3-Clause"),
    Source("python-setuptools-doc", _DOC + "python-setuptools-doc/html", "MIT", exclude=r"(genindex|_sources|history|search)"),
    Source("sphinx-doc", _DOC + "sphinx-doc/html", "BSD-2-Clause"),
    Source("cython-doc", _DOC + "cython-doc", "Apache-2.0"),
    Source("twisted-doc", _DOC + "twisted-doc/html", "MIT", exclude=r"(^api|genindex|_sources|search|NEWS)"),
    Source("rust-doc", _DOC + "rust-doc/html", "MIT or Apache-2.0",
           include=r"^(book|reference|nomicon|rust-by-example|cargo|rustc|rustdoc|edition-guide|embedded-book)/", exclude=r"(print|toc|book/(first|2018)-edition)"),
)  # fmt: skip

_BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "pre"}
_SKIP_TAGS = {"script", "style", "nav", "head", "footer", "table", "svg", "button", "noscript"}
_SKIP_CLASSES = re.compile(
    r"sphinxsidebar|related|toctree-wrapper|nav-?(header|footer|wrapper|chapters)|\bsidebar|menu|\btoc\b|footer|contents|fancy_toc"
)
_VOID = {"br", "img", "hr", "meta", "link", "input", "area", "base", "col", "embed", "source", "track", "wbr"}
_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\xa0": " ", "¶": "", "→": "->", "•": "*", "\u200b": "", "\uf0c1": ""}
)  # fmt: skip


class _PageText(HTMLParser):
    """Collects the paragraphs, headings, list items and listings of one page, in order, as (tag, text) pairs."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []
        self._stack: list[tuple[str, bool]] = []  # open tags, and whether each one hides its content
        self._tag: str | None = None
        self._text: list[str] = []

    def _flush(self, next_tag: str | None) -> None:
        if self._tag is not None:
            self.blocks.append((self._tag, "".join(self._text)))
        self._tag, self._text = next_tag, []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            if tag == "br" and self._tag is not None:
                self._text.append("\n" if self._tag == "pre" else " ")
            return
        values = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        hides = tag in _SKIP_TAGS or (
            bool(_SKIP_CLASSES.search(values)) and tag in ("div", "ul", "ol", "span", "aside")
        )
        self._stack.append((tag, hides))
        if tag in _BLOCKS and self._tag != "pre":
            self._flush(tag)

    def handle_endtag(self, tag: str) -> None:
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0] == tag:
                del self._stack[depth:]
                break
        if tag == self._tag or (tag in _BLOCKS and self._tag != "pre"):
            self._flush(None)

    def handle_data(self, data: str) -> None:
        if self._tag is not None and not any(hides for _, hides in self._stack):
            self._text.append(data)


def clean_block(tag: str, text: str) -> str:
    """The text of one block, or an empty string when it should be left out.

    Prose is put on one line; fragments of fewer than five words go, except headings. Listings keep their lines.
    """
    text = text.translate(_ASCII)
    if tag == "pre":
        lines = [line.rstrip() for line in text.strip("\n").split("\n")]
        return "\n".join(lines) if 0 < len(lines) <= MAX_CODE_LINES and any(lines) else ""
    text = re.sub(r"\s+", " ", text).strip()
    heading = re.fullmatch(r"h[1-6]", tag) is not None
    if heading:
        return re.sub(r"^[\d.]+\s+", "", text)
    if len(text.split()) < 5 and not (tag == "dt" and len(text) >= 12):
        return ""
    return f"* {text}" if tag == "li" else text


def html_to_text(page: str) -> str:
    """Readable text of an HTML page; blocks are separated by blank lines."""
    parser = _PageText()
    parser.feed(page)
    parser.close()
    blocks = [block for tag, raw in parser.blocks if (block := clean_block(tag, raw))]
    return "\n\n".join(blocks)


def is_mostly_ascii(text: str, limit: float = 0.02) -> bool:
    """Whether at most ``limit`` of the characters are outside ASCII (this leaves translated pages out)."""
    return sum(ord(char) > 127 for char in text) <= limit * max(len(text), 1)


@dataclass(frozen=True)
class Document:
    """One page or one module: ``source`` is the package, ``name`` is unique within it."""

    source: str
    name: str
    text: str


def deduplicate(documents: Iterable[Document], min_chars: int = 60) -> Iterator[Document]:
    """Drop every paragraph of at least ``min_chars`` characters that an earlier document (or this one) already had.

    Comparison ignores case, digits and white space. Documents left with too little text are dropped.
    """
    seen: set[bytes] = set()
    for document in documents:
        kept = []
        for paragraph in document.text.split("\n\n"):
            if len(paragraph) >= min_chars:
                normal = re.sub(r"[\s\d]+", "", paragraph).lower()
                digest = hashlib.blake2b(normal.encode(), digest_size=16).digest()
                if digest in seen:
                    continue
                seen.add(digest)
            kept.append(paragraph)
        text = "\n\n".join(kept)
        if len(text) >= MIN_DOCUMENT_CHARS:
            yield Document(document.source, document.name, text)


def is_held_out(document: Document, percent: int = HELDOUT_PERCENT) -> bool:
    """A stable choice by name, so that adding a package moves no document across the split."""
    digest = hashlib.sha256(f"{document.source}/{document.name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < percent


def split(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents)."""
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        (held_out if is_held_out(document) else train).append(document)
    return train, held_out


def known_words(texts: Iterable[str], min_count: int = MIN_WORD_COUNT) -> list[str]:
    """Sorted lower-case words that occur at least ``min_count`` times."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word.lower() for word in WORD.findall(text))
    return sorted(word for word, count in counts.items() if count >= min_count)


def read_package(source: Source, tree: Path) -> Iterator[Document]:
    """Documents of an unpacked package, sorted by path."""
    root = tree / source.root
    for path in sorted(root.rglob("*.html")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not re.search(source.include, name) or re.search(source.exclude, name):
            continue
        text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) >= MIN_DOCUMENT_CHARS and is_mostly_ascii(text):
            yield Document(source.package, name, text)


def read_standard_library() -> Iterator[Document]:
    """Docstrings of the standard library's modules, read from source without importing anything."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if re.search(r"(^|/)(site-packages|dist-packages|test|tests|idlelib|lib2to3|_vendor|__pycache__)/", name):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        parts = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node, clean=False)
                if doc and len(doc) >= 60:
                    doc = re.sub(r"\n\s*\n\s*", "\n\n", inspect.cleandoc(doc))
                    title = f"{getattr(node, 'name', name.removesuffix('.py').replace('/', '.'))}\n\n"
                    parts.append(title + doc.translate(_ASCII))
        text = "\n\n".join(parts)
        if len(text) >= MIN_DOCUMENT_CHARS and is_mostly_ascii(text):
            yield Document("python-stdlib", name, text)


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    """One JSON object a line, gzip with a fixed time stamp."""
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as stream:
        for document in documents:
            stream.write((json.dumps(asdict(document)) + "\n").encode())


def read_documents(path: Path) -> list[Document]:
    """The documents of a file written by :func:`write_documents`."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [Document(**json.loads(line)) for line in stream]


def sha256_of_texts(documents: Iterable[Document]) -> str:
    """Hash of all texts in order; this identifies the data a model was trained on."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.text.encode() + b"\0")
    return digest.hexdigest()


def build_corpus(deb_dir: Path, out: Path) -> dict[str, object]:
    """Read all sources, write documents, word list and manifest; returns the manifest."""
    out.mkdir(parents=True, exist_ok=True)
    collected: list[Document] = []
    packages: dict[str, dict[str, str]] = {}
    for source in SOURCES:
        files = sorted(deb_dir.glob(f"{source.package}_*.deb"))
        if len(files) != 1:
            raise FileNotFoundError(f"expected one {source.package}_*.deb in {deb_dir}, found {len(files)}")
        digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
        packages[source.package] = {"file": files[0].name, "sha256": digest, "licence": source.licence}
        with tempfile.TemporaryDirectory() as tree:
            subprocess.run(["dpkg-deb", "-x", str(files[0]), tree], check=True)
            collected.extend(read_package(source, Path(tree)))
    collected.extend(read_standard_library())
    packages["python-stdlib"] = {"file": f"CPython {platform.python_version()} docstrings", "licence": "PSF-2.0"}

    train, held_out = split(deduplicate(collected))
    words = known_words(document.text for document in train)
    write_documents(out / "train.jsonl.gz", train)
    write_documents(out / "heldout.jsonl.gz", held_out)
    (out / "words.txt").write_text("\n".join(words) + "\n")
    for name, entry in packages.items():
        entry["train_bytes"] = str(sum(len(d.text.encode()) for d in train if d.source == name))
    manifest: dict[str, object] = {
        "packages": packages,
        "train_documents": len(train),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "train_sha256": sha256_of_texts(train),
        "heldout_documents": len(held_out),
        "heldout_bytes": sum(len(d.text.encode()) for d in held_out),
        "heldout_sha256": sha256_of_texts(held_out),
        "known_words": len(words),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE):
    """A byte-level BPE tokenizer as ``transformers.PreTrainedTokenizerFast``; token 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def pack(documents: list[Document], tokenizer, batch: int = 256) -> np.ndarray:
    """All documents as one uint16 stream ``[tokens]``, each document preceded by the end-of-text token."""
    pieces: list[np.ndarray] = []
    for start in range(0, len(documents), batch):
        texts = [document.text for document in documents[start : start + batch]]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            pieces.append(np.array([tokenizer.eos_token_id, *ids], dtype=np.uint16))
    return np.concatenate(pieces)


def tokenize_corpus(out: Path) -> dict[str, object]:
    """Train the tokenizer on the training documents and pack both splits; returns token counts."""
    train, held_out = read_documents(out / "train.jsonl.gz"), read_documents(out / "heldout.jsonl.gz")
    tokenizer = train_tokenizer(document.text for document in train)
    tokenizer.save_pretrained(out / "tokenizer")
    counts: dict[str, object] = {"vocab_size": len(tokenizer)}
    for name, documents in (("train", train), ("heldout", held_out)):
        tokens = pack(documents, tokenizer)
        tokens.tofile(out / f"{name}.bin")
        counts[f"{name}_tokens"] = int(tokens.size)
        counts[f"{name}_bytes_per_token"] = sum(len(d.text.encode()) for d in documents) / tokens.size
    manifest = json.loads((out / "manifest.json").read_text()) | counts
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return counts


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="documents, word list and manifest")
    corpus.add_argument("--deb-dir", type=Path, required=True, help="folder with the .deb files")
    corpus.add_argument("--out", type=Path, required=True, help="data folder to write")
    tokenize = commands.add_parser("tokenize", help="tokenizer and packed tokens")
    tokenize.add_argument("--out", type=Path, required=True, help="data folder written by 'corpus'")
    options = parser.parse_args(arguments)
    result = build_corpus(options.deb_dir, options.out) if options.command == "corpus" else tokenize_corpus(options.out)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
