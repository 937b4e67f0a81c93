"""Text and tasks for a small request-adaptive model, made offline from named packages.

Two kinds of sequence, because a gate needs a reason to choose:

- *text*: English prose. An SSM layer does as well as attention here, at a lower cost.
- *recall*: look a value up in a list, copy words, find a fact inside a passage. A fixed-size state forgets them.

Everything comes from distribution packages that are fetched into a cache folder and never run, apart from the
`bible` program, which alone can decompress its text. Nothing fetched is redistributed: weights trained on a text do
not carry it, and the sources and licences are printed here and written into the model card.

    python examples/tiny_data.py --cache data        # fetch, clean, split, train the tokenizer, print the sizes
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

EOS, PAD = "<|endoftext|>", "<|pad|>"
IGNORE = -100  # label that carries no loss


# 1. Sources
@dataclass(frozen=True)
class Source:
    """A named origin of prose; `weight` is its share of the training windows."""

    name: str
    packages: tuple[str, ...]  # Debian packages
    licence: str
    weight: float
    title: str


SOURCES = (
    Source("kjv", ("bible-kjv", "bible-kjv-text"), "public domain", 0.50, "King James Bible"),
    Source("python", ("python3.11-doc",), "PSF-2.0", 0.25, "prose of the Python 3.11 documentation"),
    Source("jargon", ("dict-jargon",), "public domain", 0.10, "The Jargon File, version 4.4.7"),
    Source("wordnet", ("wordnet-base",), "WordNet 3.0 licence", 0.15, "WordNet 3.0 glosses with their examples"),
)
# Entries about slurs and obscenities are of no use to a demo; the dictionaries mark most of them by these words.
UNWANTED = re.compile(
    r"\b(slur|obscen|offensive|disparag|derogat|vulgar|sexual|genital|fuck|shit|nigg|rape)", re.IGNORECASE
)


@dataclass(frozen=True)
class Document:
    """The unit of the train / held-out split: a bible chapter, a documentation page, a group of entries."""

    source: str
    name: str
    paragraphs: tuple[str, ...]

    @property
    def held_out(self) -> bool:
        """By a hash of the name, so that it stays put when other documents come and go."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return digest[0] < 10  # 10 of 256: 3.9%


def fetch(cache: Path) -> Path:
    """Download the packages with the system's own client and unpack them (no installation, no root needed).

    The same by hand: `apt-get update; apt-get download NAME...; dpkg-deb -x FILE root` for each package of `SOURCES`.
    Returns: the folder that holds the unpacked trees. Raises: RuntimeError naming the command that failed.
    """
    debs, root = cache / "debs", cache / "root"
    debs.mkdir(parents=True, exist_ok=True)
    for package in (p for source in SOURCES for p in source.packages):
        if not list(debs.glob(f"{package}_*.deb")):
            _run(["apt-get", "download", package], debs)
        _run(["dpkg-deb", "-x", next(debs.glob(f"{package}_*.deb")).name, str(root.resolve())], debs)
    return root


def _run(command: list[str], folder: Path) -> str:
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip()
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {detail}. The text comes from packages of Debian 12: run `apt-get update` "
            "first, and `apt-get install libreadline8` if `bible` does not start."
        ) from error


# 2. Cleaning
_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\u00a0": " "})


def tidy(text: str) -> str:
    """One paragraph on one line, typographic quotes and dashes as ASCII (a 2048-token vocabulary has no room)."""
    return re.sub(r"\s+", " ", text.translate(_ASCII)).strip()


def is_prose(text: str, least_words: int = 8) -> bool:
    """A whole sentence of plain English: this is what drops tables, code, signatures and half sentences."""
    letters = sum(c.isalpha() or c in " ,.;'" for c in text)
    return (
        len(text.split()) >= least_words
        and text.isascii()
        and text[0].isupper()
        and text[-1] in ".:!?\"'"
        and letters / len(text) > 0.94
        and not UNWANTED.search(text)
    )


def clean_rst(text: str) -> list[str]:
    """The prose paragraphs of a reStructuredText page, with its inline markup undone."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text):
        if re.match(r"\s*(\.\.|>>>|[-*+#|=~^]|\d+\.\s|:\w+)", block):
            continue
        block = re.sub(r":[\w:+-]+:`([^`]*)`", lambda m: _role(m[1]), block)
        block = re.sub(r"`([^`<]*)<[^`>]*>`_+", r"\1", block)
        block = re.sub(r"(\*\*|``|\*|`)(\S(?:.*?\S)?)\1_*", r"\2", block, flags=re.DOTALL)
        paragraph = tidy(block.replace("::", ":"))
        # a paragraph that ends in a colon announces code, which is not there any more
        if paragraph and is_prose(paragraph) and not re.search(r"[`|<>{}\\]|\.\. |:$", paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def _role(body: str) -> str:
    """`text <target>` -> text, `~a.b.C` -> C, `!name` -> name."""
    body = re.sub(r"\s*<[^>]*>$", "", body.strip())
    return body.rsplit(".", 1)[-1] if body.startswith("~") else body.lstrip("!")


def read_kjv(root: Path) -> Iterator[Document]:
    """Chapters, in paragraphs of four verses, without the verse numbers."""
    lib = root / "usr/lib"
    output = _run(
        [str((root / "usr/bin/bible").resolve()), "-p", ".", "-d", "bible.data", "-f", "Gen1:1-Rev22:21"], lib
    )
    chapters: dict[str, list[str]] = {}
    for line in output.splitlines():
        reference, _, verse = line.partition(" ")
        chapters.setdefault(reference.partition(":")[0], []).append(tidy(verse))
    for name, verses in chapters.items():
        yield Document("kjv", name, tuple(" ".join(verses[i : i + 4]) for i in range(0, len(verses), 4)))


def read_python(root: Path) -> Iterator[Document]:
    base = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(base.rglob("*.rst.txt")):
        # what's-new pages and the C API repeat the library pages or are mostly signatures
        if path.relative_to(base).parts[0] not in ("whatsnew", "includes", "c-api"):
            yield Document("python", str(path.relative_to(base)), tuple(clean_rst(path.read_text("utf-8"))))


def read_jargon(root: Path) -> Iterator[Document]:
    with gzip.open(root / "usr/share/dictd/jargon.dict.dz", "rt", encoding="utf-8") as file:
        text = file.read()
    for entry in re.split(r"\n(?=\S)", text)[8:]:
        name, _, body = entry.partition("\n")
        blocks = (re.sub(r"[{}]", "", tidy(b)) for b in re.split(r"\n\s*\n", body))
        blocks = (re.sub(r"^(\[[^\]]*\]\s*)?(\d+\.\s*)?(\[[^\]]*\]\s*)?", "", b) for b in blocks)
        yield Document("jargon", name, tuple(b for b in blocks if b and is_prose(b) and not UNWANTED.search(name)))


def read_wordnet(root: Path) -> Iterator[Document]:
    """Entries that come with example sentences, eight neighbours to a document."""
    kinds = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
    for part, kind in kinds.items():
        entries = []
        for line in (root / f"usr/share/wordnet/data.{part}").read_text("utf-8").splitlines():
            if line.startswith(" ") or UNWANTED.search(line):
                continue
            head, _, gloss = line.partition(" | ")
            word = re.sub(r"\(\w+\)$", "", head.split()[4]).replace("_", " ")
            examples = [tidy(e).rstrip(".") for e in re.findall(r'"([^"]+)"', gloss)]
            meaning = tidy(gloss.partition('"')[0]).strip("; ")
            if examples and meaning and min(len(meaning), len(examples[0])) > 8:
                sentences = [f"{word} ({kind}): {meaning}", *examples]
                entries.append(" ".join(s[0].upper() + s[1:] + ("" if s[-1] in ".!?" else ".") for s in sentences))
        entries = [e for e in entries if e.isascii()]
        for i in range(0, len(entries), 8):
            yield Document("wordnet", f"{part}-{i}", tuple(entries[i : i + 8]))


def read_documents(root: Path) -> list[Document]:
    """All documents, in a fixed order; a paragraph seen before is dropped (a repeat would leak across the split)."""
    seen: set[str] = set()
    documents = []
    for reader in (read_kjv, read_python, read_jargon, read_wordnet):
        for document in reader(root):
            fresh = tuple(p for p in dict.fromkeys(map(html.unescape, document.paragraphs)) if p not in seen)
            seen.update(fresh)
            if fresh:
                documents.append(Document(document.source, document.name, fresh))
    return documents


# 3. Tokenizer
def train_tokenizer(texts: Iterable[str], folder: Path, vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits (numbers in recall answers are then always several tokens)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    # Written by hand: the two files that every transformers since 4.57 reads, and nothing that changed since.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "padding_side": "left",
        "model_max_length": 2048,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return PreTrainedTokenizerFast.from_pretrained(folder)


# 4. Corpus
@dataclass
class Stream:
    """Token ids of one source and split, with the offsets at which paragraphs start."""

    tokens: np.ndarray  # uint16 [N]
    starts: np.ndarray  # int64, places where a window may begin


@dataclass
class Corpus:
    """Tokenised text of both splits and the word list of the recall tasks."""

    tokenizer: PreTrainedTokenizerFast
    train: dict[str, Stream]
    held_out: dict[str, Stream]
    words: list[str]
    weights: dict[str, float] = field(default_factory=lambda: {s.name: s.weight for s in SOURCES})

    @classmethod
    def from_documents(cls, documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> Corpus:
        train = _streams([d for d in documents if not d.held_out], tokenizer)
        held_out = _streams([d for d in documents if d.held_out], tokenizer)
        return cls(tokenizer, train, held_out, common_words(d for d in documents if not d.held_out))

    @classmethod
    def build(cls, cache: Path) -> Corpus:
        """Load from `cache`, or fetch, clean, split, train the tokenizer and tokenise."""
        if not (cache / "corpus.npz").exists():
            documents = read_documents(fetch(cache))
            texts = ("\n\n".join(d.paragraphs) for d in documents if not d.held_out)
            cls.from_documents(documents, train_tokenizer(texts, cache / "tokenizer"))._save(cache)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(cache / "tokenizer")
        splits: dict[str, dict[str, Stream]] = {"train": {}, "held_out": {}}
        with np.load(cache / "corpus.npz") as arrays:
            for key in sorted(k for k in arrays.files if k.endswith("/tokens")):
                split, source, _ = key.split("/")
                splits[split][source] = Stream(arrays[key], arrays[f"{split}/{source}/starts"])
        return cls(tokenizer, splits["train"], splits["held_out"], json.loads((cache / "words.json").read_text()))

    def _save(self, cache: Path) -> None:
        (cache / "words.json").write_text(json.dumps(self.words))
        arrays = {}
        for split, streams in (("train", self.train), ("held_out", self.held_out)):
            for source, stream in streams.items():
                arrays[f"{split}/{source}/tokens"], arrays[f"{split}/{source}/starts"] = stream.tokens, stream.starts
        np.savez_compressed(cache / "corpus.npz", **arrays)


def _streams(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> dict[str, Stream]:
    tokens: dict[str, list[int]] = {}
    starts: dict[str, list[int]] = {}
    eos, gap = tokenizer.eos_token_id, tokenizer("\n\n")["input_ids"]
    for document in documents:
        ids, begins = tokens.setdefault(document.source, []), starts.setdefault(document.source, [])
        for i, paragraph in enumerate(tokenizer(list(document.paragraphs))["input_ids"]):
            ids += gap if i else []
            begins.append(len(ids))
            ids += paragraph
        ids.append(eos)
    return {s: Stream(np.array(t, np.uint16), np.array(starts[s], np.int64)) for s, t in tokens.items()}


def common_words(documents: Iterable[Document], most: int = 1500) -> list[str]:
    """Lower-case words of 3 to 8 letters that follow an article, by frequency: mostly nouns, without a dictionary."""
    counts: Counter[str] = Counter()
    for document in documents:
        for paragraph in document.paragraphs:
            counts.update(re.findall(r"(?<=\b(?:the|his) )[a-z]{3,8}(?=[ ,.;:])", paragraph))
    return sorted(counts, key=lambda word: (-counts[word], word))[:most]


# 5. Sequences
@dataclass(frozen=True)
class Example:
    """One sequence. The gate sees the prompt alone, the loss falls on the answer alone.

    An answer may go on with further questions about the same prompt (more signal per sequence). Their tokens, which
    nobody could predict, have no label, except the first: its label is the end-of-text that should have come there.
    """

    kind: str
    prompt: list[int]
    answer: list[int]
    labels: list[int]  # for the answer's tokens


KINDS = ("pairs", "copy", "passage")
PAIR_STYLES = ("complete", "ask", "brief")
EASY_WORDS = 100  # different words in small examples


class TaskSampler:
    """Draws examples and batches; everything is a function of (corpus, split, seed, index), so runs can resume."""

    def __init__(self, corpus: Corpus, split: str = "train", seed: int = 0, seq_len: int = 256):
        self.corpus, self.seed, self.seq_len = corpus, seed, seq_len
        self.streams = corpus.train if split == "train" else corpus.held_out
        self.sources = sorted(self.streams)
        weights = np.array([corpus.weights.get(s, 1.0) for s in self.sources])
        self.weights = weights / weights.sum()
        self.salt = int(split != "train")
        # Words of one token each: looking up is then one step of attention, which a model this small does learn.
        encode = corpus.tokenizer.encode
        self.words = [word for word in corpus.words if len(encode(f" {word}")) == 1]

    def rng(self, *index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.salt, *index])

    def text(self, rng: np.random.Generator, source: str | None = None) -> Example:
        """A window that starts with a paragraph; the prompt's length is drawn, mostly short as users' are."""
        window = self._window(rng, self.seq_len, source)
        longest = max(2, len(window) // 2)
        prompt = round(math.exp(rng.uniform(math.log(min(4, longest)), math.log(longest))))
        return Example("text", window[:prompt], window[prompt:], window[prompt:])

    def pairs(
        self,
        rng: np.random.Generator,
        count: int | None = None,
        style: str | None = None,
        follow_ups: int = 0,
        num_words: int | None = None,
    ) -> Example:
        """`- key: value` lines or sentences, then a question about one key: 4 to 24 pairs."""
        count = count or int(rng.integers(4, 25))
        style = style or str(rng.choice(PAIR_STYLES, p=[0.4, 0.4, 0.2]))
        words = self._words(rng, 2 * count, num_words)
        keys, values = words[:count], [self._value(rng, word) for word in words[count:]]
        asked = rng.permutation(count)[: 1 + follow_ups]
        if style == "ask":
            prompt = " ".join(f"The {k} is {v}." for k, v in zip(keys, values, strict=True)) + "\n"
            questions = [f"\nWhat is the {keys[i]}?" for i in asked]
        else:
            prompt = "".join(f"- {k}: {v}\n" for k, v in zip(keys, values, strict=True))
            questions = [f"\n- {keys[i]}:" if style == "complete" else f"\nWhat is {keys[i]}?" for i in asked]
        return self._example("pairs", prompt, questions, [f" {values[i]}" for i in asked])

    def copy(self, rng: np.random.Generator, count: int | None = None, num_words: int | None = None) -> Example:
        """Random words, to be said again."""
        text = " ".join(self._words(rng, count or int(rng.integers(4, 25)), num_words))
        return self._example("copy", f"Copy: {text}\n", ["Answer:"], [f" {text}"])

    def passage(self, rng: np.random.Generator, length: int | None = None) -> Example:
        """A real passage with a made-up fact put between two of its sentences, and a question about the fact."""
        window = self._window(rng, length or int(rng.integers(40, max(41, self.seq_len - 60))), None)
        text = self.corpus.tokenizer.decode([t for t in window if t != self.corpus.tokenizer.eos_token_id])
        ends = [m.end() for m in re.finditer(r"[.?] ", text)] or [0]
        at = ends[int(rng.integers(len(ends)))]
        key, word = self._words(rng, 2)
        value = self._value(rng, word)
        prompt = f"{text[:at]}The code of the {key} is {value}. {text[at:]}\n"
        return self._example("passage", prompt, [f"\nWhat is the code of the {key}?"], [f" {value}"])

    def recall(self, rng: np.random.Generator, kind: str | None = None, size: float = 1.0) -> Example:
        """A recall example of a drawn kind; `size` in [0, 1] sets how much there is to remember.

        Small ones are also easier otherwise: fewer different words, no passages, the plainest question. A model
        that has not found out how to look things up learns it there much sooner.
        """
        small = size < 0.2
        kind = kind or str(rng.choice(KINDS, p=[0.7, 0.3, 0.0] if small else [0.65, 0.15, 0.2]))
        count = 4 + round(20 * min(1.0, max(0.0, size + 0.05 * rng.standard_normal())))
        if kind == "pairs":
            style = "complete" if small and rng.random() < 0.7 else None
            return self.pairs(rng, count, style, follow_ups=3, num_words=EASY_WORDS if small else None)
        return self.copy(rng, count) if kind == "copy" else self.passage(rng, 24 + 6 * count)

    def batch(
        self, index: int, size: int, text_fraction: float = 0.5, difficulty: float = 1.0
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Batch number `index`: model inputs (see `collate`) and the kind of each row.

        `difficulty` in [0, 1] bounds the size of recall examples. One size is drawn for the batch, so that its rows
        are of like length and little is padding.
        """
        num_text = round(size * text_fraction)
        scale = difficulty * self.rng(index).random()
        examples = [self.text(self.rng(index, row)) for row in range(num_text)]
        examples += [self.recall(self.rng(index, row), size=scale) for row in range(num_text, size)]
        return self.collate(examples), [e.kind for e in examples]

    def collate(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        """Right-padded input_ids, labels, attention_mask [B, S] and prompt_lengths [B], all int64."""
        rows = [e.prompt + e.answer for e in examples]
        shape = len(rows), max(map(len, rows))
        input_ids = torch.full(shape, self.corpus.tokenizer.pad_token_id)
        labels, mask = torch.full(shape, IGNORE), torch.zeros(shape, dtype=torch.long)
        for i, (row, example) in enumerate(zip(rows, examples, strict=True)):
            input_ids[i, : len(row)] = torch.tensor(row)
            labels[i, len(example.prompt) : len(row)] = torch.tensor(example.labels)
            mask[i, : len(row)] = 1
        lengths = torch.tensor([len(e.prompt) for e in examples])
        return {"input_ids": input_ids, "labels": labels, "attention_mask": mask, "prompt_lengths": lengths}

    def _window(self, rng: np.random.Generator, length: int, source: str | None) -> list[int]:
        stream = self.streams[source or self.sources[int(rng.choice(len(self.sources), p=self.weights))]]
        start = int(stream.starts[int(rng.integers(len(stream.starts)))])
        start = max(0, min(start, len(stream.tokens) - length))
        return stream.tokens[start : start + length].tolist()

    def _words(self, rng: np.random.Generator, count: int, most: int | None = None) -> list[str]:
        words = self.words[:most]
        return [words[i] for i in rng.choice(len(words), count, replace=False)]

    def _value(self, rng: np.random.Generator, word: str) -> str:
        """The word, or now and then a number of two digits."""
        return word if rng.random() < 0.85 else str(rng.integers(10, 100))

    def _example(self, kind: str, prompt: str, questions: list[str], answers: list[str]) -> Example:
        encode = self.corpus.tokenizer.encode
        eos = self.corpus.tokenizer.eos_token_id
        ids: list[int] = []
        labels: list[int] = []
        for i, text in enumerate(answers):
            question = encode(questions[i]) if i else []
            answer = encode(text)
            ids += question + answer
            # Every answer is to be followed by the end, also where the sequence goes on with another question.
            labels += [eos, *[IGNORE] * (len(question) - 1)] * bool(question) + answer
        return Example(kind, encode(prompt + questions[0]), [*ids, eos], [*labels, eos])


def describe(corpus: Corpus) -> str:
    """Sizes and licences, as a Markdown table."""
    rows = ["| source | packages | licence | train tokens | held-out tokens | share |", "|---|---|---|---|---|---|"]
    for source in (s for s in SOURCES if s.name in corpus.train):
        sizes = [len(split[source.name].tokens) for split in (corpus.train, corpus.held_out)]
        names = ", ".join(f"`{p}`" for p in source.packages)
        rows.append(
            f"| {source.title} | {names} | {source.licence} | {sizes[0]:,} | {sizes[1]:,} | {source.weight:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=Path("data"), help="cache folder, outside git (default: data)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N examples of every kind")
    args = parser.parse_args()
    corpus = Corpus.build(args.cache)
    print(describe(corpus))
    sampler = TaskSampler(corpus)
    for i in range(args.show):
        for example in (sampler.text(sampler.rng(i)), *(sampler.recall(sampler.rng(i), kind) for kind in KINDS)):
            decode = corpus.tokenizer.decode
            print(f"\n--- {example.kind}\n{decode(example.prompt)}[{decode(example.answer)}]")


if __name__ == "__main__":
    main()
