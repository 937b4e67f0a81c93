"""The data and the training of the small model, on a corpus made up here: no network, no packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tiny_data as td
import train_tiny as tt

NOUNS = """
river apple stone lamp horse garden window paper bridge candle forest table king queen road star ship wind door cloud
tree house wall field bread salt song rope knife boat hill sand snow fire iron gold wool coat ring bell
leaf farm silver lake tower flour wheel rain seed milk tent mill drum
"""
WORDS = NOUNS.split()


def make_documents(count: int = 120) -> list[td.Document]:
    documents = []
    for i in range(count):
        a, b, c = (WORDS[(i * k + k) % len(WORDS)] for k in (1, 3, 7))
        text = (
            f"In the year {i} the {a} stood by the {b}. Then the {c} was seen, and his {a} was lost. So it was written."
        )
        documents.append(td.Document(("kjv", "jargon")[i % 2], f"doc {i}", (text, f"The {b} came. The {c} went.")))
    return documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> td.Corpus:
    documents = make_documents()
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = td.train_tokenizer((p for d in documents for p in d.paragraphs), folder, vocab_size=700)
    return td.Corpus.from_documents(documents, tokenizer)


@pytest.fixture
def sampler(corpus: td.Corpus) -> td.TaskSampler:
    return td.TaskSampler(corpus, seed=3, seq_len=64)


def test_rst_markup_is_undone_and_code_is_dropped():
    page = """Title
=====

Use :class:`~queue.Queue` or the `guide <https://example.org>`_ for *every* ``item`` that the programs share.

.. function:: get(block)

   Remove and return an item from the queue, and wait for one when :term:`needed <wait>` by the caller.

>>> queue.get()

x = [1, 2, 3]; y = {"a": 4} and this is not a sentence of prose at all.
"""
    assert td.clean_rst(page) == [
        "Use Queue or the guide for every item that the programs share.",
        "Remove and return an item from the queue, and wait for one when needed by the caller.",
    ]


@pytest.mark.parametrize(
    "text", ["Too short.", "no capital at the start of this long sentence here.", "A " * 9 + "= |x|."]
)
def test_what_is_not_prose(text: str):
    assert not td.is_prose(text)


def test_split_is_stable_and_disjoint():
    documents = [td.Document("kjv", f"chapter {i}", ("x",)) for i in range(2000)]
    held_out = [d for d in documents if d.held_out]
    assert 0.02 < len(held_out) / len(documents) < 0.06
    assert all(td.Document(d.source, d.name, ("other",)).held_out for d in held_out)


def test_held_out_text_is_not_in_train(corpus: td.Corpus):
    train = corpus.tokenizer.decode(corpus.train["kjv"].tokens.tolist())
    held_out = [d for d in make_documents() if d.held_out and d.source == "kjv"]
    assert held_out
    assert not any(d.paragraphs[0] in train for d in held_out)


def test_tokenizer_splits_digits_and_round_trips(corpus: td.Corpus):
    text = "The river: 5821\n\nWhat is river? naïve"
    ids = corpus.tokenizer(text)["input_ids"]
    assert corpus.tokenizer.decode(ids) == text
    assert {"5", "8", "2", "1"} <= set(corpus.tokenizer.convert_ids_to_tokens(ids))
    assert set(corpus.tokenizer("a")) == {"input_ids", "attention_mask"}
    assert corpus.tokenizer.pad_token_id != corpus.tokenizer.eos_token_id


def test_corpus_survives_the_cache(corpus: td.Corpus, tmp_path: Path):
    corpus._save(tmp_path)
    corpus.tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer").mkdir()
    corpus.tokenizer.save_pretrained(tmp_path / "tokenizer")
    again = td.Corpus.build(tmp_path)
    assert again.words == corpus.words
    assert all((again.train[s].tokens == corpus.train[s].tokens).all() for s in corpus.train)


@pytest.mark.parametrize("style", td.PAIR_STYLES)
def test_pairs_hold_their_answers(sampler: td.TaskSampler, style: str):
    decode = sampler.corpus.tokenizer.decode
    for i in range(20):
        example = sampler.pairs(sampler.rng(i), 6, style)
        prompt, answer = decode(example.prompt), decode(example.answer).removesuffix(td.EOS)
        key = prompt.rsplit("\n", 1)[1].removeprefix("What is ").removeprefix("the ").removeprefix("- ").rstrip(":?")
        fact = f"The {key} is{answer}." if style == "ask" else f"- {key}:{answer}\n"
        assert fact in prompt
        assert example.answer[-1] == sampler.corpus.tokenizer.eos_token_id
        assert example.labels == example.answer


def test_follow_up_questions_carry_no_loss_but_the_end(sampler: td.TaskSampler):
    tokenizer = sampler.corpus.tokenizer
    example = sampler.pairs(sampler.rng(0), 8, "complete", follow_ups=3)
    assert len(example.labels) == len(example.answer)
    assert example.labels.count(tokenizer.eos_token_id) == 4
    assert example.answer.count(tokenizer.eos_token_id) == 1
    pairs = list(zip(example.labels, example.answer, strict=True))
    assert all(label in (answer, td.IGNORE, tokenizer.eos_token_id) for label, answer in pairs)


def test_copy_repeats_and_passage_contains_its_fact(sampler: td.TaskSampler):
    decode = sampler.corpus.tokenizer.decode
    copy = sampler.copy(sampler.rng(1), 5)
    assert decode(copy.prompt) == f"Copy:{decode(copy.answer).removesuffix(td.EOS)}\nAnswer:"
    passage = sampler.passage(sampler.rng(2), 40)
    prompt = decode(passage.prompt)
    key = prompt.rsplit("the ", 1)[1].rstrip("?")
    assert f"The code of the {key} is{decode(passage.answer).removesuffix(td.EOS)}." in prompt


def test_batches_repeat_and_are_padded_on_the_right(sampler: td.TaskSampler):
    batch, kinds = sampler.batch(5, 8, text_fraction=0.5)
    again, _ = sampler.batch(5, 8, text_fraction=0.5)
    other, _ = sampler.batch(6, 8, text_fraction=0.5)
    assert all(torch.equal(batch[k], again[k]) for k in batch)
    assert batch["input_ids"].shape != other["input_ids"].shape or not torch.equal(
        batch["input_ids"], other["input_ids"]
    )
    assert kinds.count("text") == 4 and set(kinds) - {"text"} <= set(td.KINDS)
    mask, labels, lengths = batch["attention_mask"], batch["labels"], batch["prompt_lengths"]
    assert (mask.diff(dim=1) <= 0).all()
    assert (labels[mask == 0] == td.IGNORE).all()
    for row, length in zip(labels, lengths.tolist(), strict=True):
        assert (row[:length] == td.IGNORE).all() and row[length] != td.IGNORE


def test_held_out_sampler_draws_other_text(corpus: td.Corpus):
    train, held_out = (td.TaskSampler(corpus, split, seed=0, seq_len=32) for split in ("train", "held_out"))
    assert train.text(train.rng(0)).prompt != held_out.text(held_out.rng(0)).prompt


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
RECIPE = tt.Recipe(rows_before=(2, 3), seq_len=32)


def make_trainer(corpus: td.Corpus, output: Path) -> tt.Trainer:
    torch.manual_seed(0)
    return tt.Trainer(tt.FlexHybridModel(tt.make_config(corpus, **SIZES)), corpus, RECIPE, output)


def test_training_resumes_where_it_stopped(corpus: td.Corpus, tmp_path: Path):
    straight = make_trainer(corpus, tmp_path / "straight")
    straight.run(None, 4, log_every=2)
    first = make_trainer(corpus, tmp_path / "split")
    for progress in (0.0, 0.25):  # the schedule of a run of four steps, stopped after two
        first.step(progress)
    first.save()
    second = make_trainer(corpus, tmp_path / "split")
    second.resume()
    second.run(None, 4)
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert len((tmp_path / "straight/log.jsonl").read_text().splitlines()) == 2


def test_learning_rate_warms_up_and_decays():
    recipe = tt.Recipe(warmup=0.1)
    factors = [tt.rate_factor(recipe, p) for p in (0.0, 0.05, 0.1, 0.5, 1.0)]
    assert factors[0] < factors[1] < factors[2] == pytest.approx(1.0)
    assert factors[2] > factors[3] > factors[4] == pytest.approx(0.02)


def test_results_are_measured_and_the_export_loads(corpus: td.Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path)
    trainer.run(None, 1, log_every=1)
    corpus.tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = tt.export(trainer.model, corpus, tmp_path).eval()
    result = {"count": 2, **tt.evaluate(model, corpus, count=2, seq_len=32)}
    assert set(result["recall"]) == {"adaptive", "soft", "attention", "ssm"}
    assert all(sum(layouts.values()) == 2 for layouts in result["layouts"].values())
    assert all(0 <= share <= 1 for tasks in result["recall"].values() for share in tasks.values())
    tt.write_card(model, corpus, result, trainer, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "public domain" in card and str(tmp_path) not in card
    trainer.model.eval()
    batch, _ = trainer.sampler.batch(0, 2)
    with torch.no_grad():
        for routing in ("soft", "hard"):
            ours, theirs = (m(**batch, routing=routing).logits for m in (trainer.model, model))
            torch.testing.assert_close(ours, theirs)
