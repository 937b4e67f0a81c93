"""The sampler: transformers' semantics, and rows that do not depend on each other."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

from flexops.runtime.random import philox4x32, uniform
from flexops.runtime.request import Request, SamplingParams
from flexops.runtime.sampler import Sampler

VOCABS = [pytest.param(97, id="vocab97"), pytest.param(3001, id="vocab3001")]  # below and above the narrow width


def request(
    seed: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), sample: int = 0, **params
) -> Request:
    return Request(
        request_id=seed,
        sample=sample,
        prompt=list(prompt),
        params=SamplingParams(**params),
        forced=[],
        gate_bias=0.0,
        priority=0,
        seed=seed,
        added_at_us=0.0,
        gate_tokens=len(prompt),
        first_logit_row=len(prompt) - 1,
        output=list(output),
    )


def logits_of(n: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def mixed_requests(n: int, vocab: int) -> list[Request]:
    """Requests of every kind: greedy, penalised, truncated in all ways, early-stop, user-made processors."""
    kinds = [
        dict(),
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=5),
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=1.0, top_p=0.999),
        dict(temperature=0.9, min_p=0.1),
        dict(temperature=1.1, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.4),
        dict(repetition_penalty=1.7),
        dict(temperature=1.0, presence_penalty=0.5),
        dict(temperature=0.8, top_k=vocab - 1),
        dict(temperature=1.0, min_new_tokens=5, stop_token_ids=(3, 4)),
        dict(temperature=1.0, logits_processors=(lambda ids, scores: scores - ids.sum() * 1e-3,)),
    ]
    return [
        request(seed=i, output=tuple((7 * i + j) % vocab for j in range(i % 4)), keep_scores=True, logprobs=2, **kind)
        for i, kind in ((i, kinds[i % len(kinds)]) for i in range(n))
    ]


class TestRandomNumbers:
    @pytest.mark.parametrize(
        "counter, key, expected",
        [
            pytest.param([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], id="zeros"),
            pytest.param(
                [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD], id="ones"
            ),
            pytest.param(
                [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
                [0xA4093822, 0x299F31D0],
                [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
                id="pi",
            ),
        ],
    )
    def test_philox_gives_the_published_vectors(self, counter: list[int], key: list[int], expected: list[int]) -> None:
        words = philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
        assert words[:, 0].tolist() == expected

    def test_uniform_depends_on_seed_sample_and_position_alone(self) -> None:
        seeds, samples, positions = [0, 1, 2**62, 2**64 - 1, -1], [0, 1, 2, 3, 3], [0, 1, 5, 2**40, 2**40]
        together = uniform(seeds, samples, positions)
        alone = [uniform([s], [i], [p])[0] for s, i, p in zip(seeds, samples, positions, strict=True)]
        assert alone == together.tolist()
        assert len(set(together.tolist())) == 4  # -1 and 2**64 - 1 are one seed

    @pytest.mark.parametrize("varying", ["seed", "sample", "position"])
    def test_uniform_fills_the_unit_interval(self, varying: str) -> None:
        n = 100_000
        arguments = {"seed": [11] * n, "sample": [0] * n, "position": [3] * n} | {varying: list(range(n))}
        u = uniform(arguments["seed"], arguments["sample"], arguments["position"])
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_plain_rows_take_the_first_maximum(self, dtype: torch.dtype) -> None:
        logits = logits_of(5, 300, dtype=dtype)
        logits[2, 40], logits[2, 200] = 50.0, 50.0
        result = Sampler(300, "cpu").sample(logits, [request(i) for i in range(5)])
        assert result.token_ids == logits.argmax(-1).tolist()
        assert result.token_ids[2] == 40
        assert not result.errors and result.logits_of(0) is None and result.scores_of(0) is None

    def test_logits_are_not_changed(self) -> None:
        logits = logits_of(12, 97)
        before = logits.clone()
        Sampler(97, "cpu").sample(logits, mixed_requests(12, 97))
        assert torch.equal(logits, before)

    def test_temperature_zero_ignores_truncation(self) -> None:
        logits = logits_of(1, 97)
        result = Sampler(97, "cpu").sample(logits, [request(top_k=3, top_p=0.1, min_p=0.9, keep_scores=True)])
        assert result.token_ids == [int(logits.argmax())]
        assert torch.equal(result.scores[0], logits[0])


class TestAgainstTransformers:
    """Processed scores equal those of transformers' processors in transformers' order."""

    @pytest.mark.parametrize("vocab", VOCABS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize(
        "params, make",
        [
            (dict(temperature=0.7), lambda n: [TemperatureLogitsWarper(0.7)]),
            (dict(temperature=1.0, top_k=1), lambda n: [TopKLogitsWarper(1)]),
            (dict(temperature=1.0, top_k=50), lambda n: [TopKLogitsWarper(50)]),
            (dict(temperature=1.0, top_k=10**6), lambda n: [TopKLogitsWarper(10**6)]),
            (dict(temperature=1.0, top_p=0.9), lambda n: [TopPLogitsWarper(0.9)]),
            (dict(temperature=1.0, top_p=0.01), lambda n: [TopPLogitsWarper(0.01)]),
            (dict(temperature=1.0, top_p=0.99), lambda n: [TopPLogitsWarper(0.99)]),
            (dict(temperature=1.0, min_p=0.05), lambda n: [MinPLogitsWarper(0.05)]),
            (dict(temperature=1.0, min_p=1.0), lambda n: [MinPLogitsWarper(1.0)]),
            (dict(repetition_penalty=1.5), lambda n: [RepetitionPenaltyLogitsProcessor(1.5)]),
            (dict(repetition_penalty=0.5), lambda n: [RepetitionPenaltyLogitsProcessor(0.5)]),
            (
                dict(min_new_tokens=4, stop_token_ids=(7, 9)),
                lambda n: [MinNewTokensLengthLogitsProcessor(n, 4, [7, 9])],
            ),
            (
                dict(temperature=1.4, top_k=40, top_p=0.9, min_p=0.03, repetition_penalty=1.3),
                lambda n: [
                    RepetitionPenaltyLogitsProcessor(1.3),
                    TemperatureLogitsWarper(1.4),
                    TopKLogitsWarper(40),
                    TopPLogitsWarper(0.9),
                    MinPLogitsWarper(0.03),
                ],
            ),
        ],
        ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
    )
    def test_scores(self, vocab: int, dtype: torch.dtype, params: dict, make) -> None:
        prompt, output = (5, 9, 9, 11), (7, 60)
        for seed in range(4):
            logits = logits_of(1, vocab, seed, dtype)
            wanted = LogitsProcessorList(make(len(prompt)))(torch.tensor([[*prompt, *output]]), logits.float())
            rq = request(prompt=prompt, output=output, keep_scores=True, keep_logits=True, **params)
            result = Sampler(vocab, "cpu").sample(logits, [rq])
            if "top_p" in params:  # which of equal scores stay is left open by transformers' sort
                assert torch.equal(result.scores[0].sort().values, wanted[0].sort().values)
                assert torch.equal(result.scores[0].unique(), wanted[0].unique())
            else:
                assert torch.equal(result.scores[0], wanted[0])
            assert torch.equal(result.logits[0], logits[0].float())
            assert result.scores[0][result.token_ids[0]] > -math.inf

    def test_presence_penalty_is_taken_off_once_for_tokens_of_the_output(self) -> None:
        logits = logits_of(1, 97)
        rq = request(prompt=(5, 6), output=(7, 7, 8), presence_penalty=1.5, keep_scores=True)
        scores = Sampler(97, "cpu").sample(logits, [rq]).scores[0]
        wanted = logits[0].clone()
        wanted[[7, 8]] -= 1.5
        assert torch.equal(scores, wanted)

    def test_penalties_follow_a_growing_output(self) -> None:
        sampler, rq = Sampler(97, "cpu"), request(prompt=(5,), repetition_penalty=2.0, keep_scores=True)
        for step in range(6):
            logits = logits_of(1, 97, step)
            result = sampler.sample(logits, [rq])
            ids = torch.tensor([[*rq.prompt, *rq.output]])
            assert torch.equal(result.scores[0], RepetitionPenaltyLogitsProcessor(2.0)(ids, logits)[0])
            rq.output.append(result.token_ids[0])

    def test_logprobs_are_of_the_models_own_distribution(self) -> None:
        logits = logits_of(2, 97)
        rqs = [request(temperature=0.2, top_k=1, logprobs=3), request(1, logprobs=0)]
        result = Sampler(97, "cpu").sample(logits, rqs)
        logprobs = logits.log_softmax(-1)
        best = logprobs[0].topk(3)
        assert list(result.logprobs[0]) == best.indices.tolist()  # the chosen one is the best one here
        assert list(result.logprobs[0].values()) == pytest.approx(best.values.tolist(), rel=1e-6)
        assert result.logprobs_of(1) == [{result.token_ids[1]: float(logprobs[1].max())}]


class TestDistribution:
    """Draws of many seeds against the probabilities, chi-square at p = 0.001."""

    @pytest.mark.parametrize("vocab", VOCABS)
    @pytest.mark.parametrize(
        "params",
        [dict(temperature=1.0), dict(temperature=1.5, top_k=8), dict(temperature=1.0, top_p=0.7)],
        ids=["all", "top_k", "top_p"],
    )
    def test_frequencies(self, vocab: int, params: dict) -> None:
        n = 4000
        row = logits_of(1, vocab, 5)
        rqs = [request(i, keep_scores=i == 0, **params) for i in range(n)]
        sampler = Sampler(vocab, "cpu")
        chunks = [sampler.sample(row.expand(500, -1), rqs[i : i + 500]) for i in range(0, n, 500)]
        probs = chunks[0].scores[0].double().softmax(-1)
        counts = torch.bincount(torch.tensor([t for c in chunks for t in c.token_ids]), minlength=vocab).double()
        assert counts[probs == 0].sum() == 0
        # cells of an expected count of 5 or more, the rest in one
        large = probs * n >= 5
        observed = torch.cat([counts[large], counts[~large].sum()[None]])
        expected = torch.cat([probs[large], probs[~large].sum()[None]]) * n
        observed, expected = observed[expected > 0], expected[expected > 0]
        chi2 = float(((observed - expected) ** 2 / expected).sum())
        free = len(observed) - 1
        # Wilson-Hilferty upper limit of the chi-square distribution
        assert chi2 < free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3

    def test_positions_and_samples_of_one_seed_give_different_draws(self) -> None:
        logits = torch.zeros(60, 97)
        positions = [request(3, output=(1,) * i, temperature=1.0) for i in range(60)]
        samples = [request(3, sample=i, temperature=1.0) for i in range(60)]
        for rqs in (positions, samples):
            assert len(set(Sampler(97, "cpu").sample(logits, rqs).token_ids)) > 30

    def test_a_token_of_no_probability_is_never_drawn(self) -> None:
        logits = torch.full((1, 97), -math.inf)
        logits[0, 96] = -5.0
        for seed in range(50):
            assert Sampler(97, "cpu").sample(logits, [request(seed, temperature=1.0)]).token_ids == [96]


class TestRowsAreIndependent:
    """Bit for bit: solo, in batches of 1 to 33 rows, in other orders."""

    @pytest.mark.parametrize("vocab", VOCABS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_solo_equals_batched(self, vocab: int, dtype: torch.dtype) -> None:
        logits, rqs = logits_of(33, vocab, 3, dtype), mixed_requests(33, vocab)
        solo = [Sampler(vocab, "cpu").sample(logits[i : i + 1], [rq]) for i, rq in enumerate(rqs)]
        assert not any(s.errors for s in solo)
        for n in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33):
            order = torch.randperm(33, generator=torch.Generator().manual_seed(n))[:n]
            batch = Sampler(vocab, "cpu").sample(logits[order], [rqs[i] for i in order])
            for place, i in enumerate(order.tolist()):
                assert batch.token_ids[place] == solo[i].token_ids[0]
                assert torch.equal(batch.scores[place], solo[i].scores[0])
                assert batch.logprobs[place] == solo[i].logprobs[0]

    def test_ties_at_the_cut_do_not_depend_on_the_other_rows(self) -> None:
        logits = torch.randint(0, 8, (16, 3001), generator=torch.Generator().manual_seed(0)).float()
        kinds = [dict(top_k=3), dict(top_p=0.5), dict(top_k=2000), dict(top_p=0.3, top_k=700)]
        rqs = [request(i, temperature=1.0, keep_scores=True, **kinds[i % 4]) for i in range(16)]
        batch = Sampler(3001, "cpu").sample(logits, rqs)
        for i, rq in enumerate(rqs):
            solo = Sampler(3001, "cpu").sample(logits[i : i + 1], [rq])
            assert solo.token_ids[0] == batch.token_ids[i]
            assert torch.equal(solo.scores[0], batch.scores[i])

    def test_a_sampler_keeps_requests_apart_as_slots_change(self) -> None:
        sampler = Sampler(97, "cpu")
        rqs = [request(i, prompt=(i,), repetition_penalty=1.5, temperature=1.0) for i in range(4)]
        for step in range(5):
            logits = logits_of(4, 97, step)
            order = [(i + step) % 4 for i in range(4)]
            tokens = sampler.sample(logits[order], [rqs[i] for i in order]).token_ids
            for i, token in zip(order, tokens, strict=True):
                assert token == Sampler(97, "cpu").sample(logits[i : i + 1], [rqs[i]]).token_ids[0]
                rqs[i].output.append(token)


class TestProcessors:
    def test_called_with_this_requests_ids_alone(self) -> None:
        seen = []

        def forbid_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append((ids.tolist(), tuple(scores.shape), scores.dtype))
            scores[0, ids[0, -1]] = -math.inf
            return scores

        logits = torch.zeros(2, 97, dtype=torch.bfloat16)
        logits[:, 8], logits[:, 4] = 5.0, 4.0
        rqs = [request(prompt=(1, 2, 3), output=(8,), logits_processors=(forbid_last,)), request(1)]
        assert Sampler(97, "cpu").sample(logits, rqs).token_ids == [4, 8]
        assert seen == [([[1, 2, 3, 8]], (1, 97), torch.float32)]

    def test_one_that_raises_fails_its_request_only(self) -> None:
        def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

        logits = logits_of(3, 97)
        rqs = [request(0, temperature=1.0), request(1, temperature=1.0, logits_processors=(broken,)), request(2)]
        result = Sampler(97, "cpu").sample(logits, rqs)
        assert result.token_ids[1] == -1 and list(result.errors) == [1]
        assert str(result.errors[1]) == "not today"
        assert result.token_ids[0] == Sampler(97, "cpu").sample(logits[:1], rqs[:1]).token_ids[0]
        assert result.token_ids[2] == int(logits[2].argmax())

    @pytest.mark.parametrize(
        "returned, message",
        [(torch.zeros(97), r"\[1, 97\], got \[97\]"), (None, r"\[1, 97\], got NoneType")],
        ids=["shape", "none"],
    )
    def test_what_is_no_score_is_an_error(self, returned: torch.Tensor | None, message: str) -> None:
        rq = request(logits_processors=(lambda ids, scores: returned,))
        error = Sampler(97, "cpu").sample(logits_of(1, 97), [rq]).errors[0]
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error

    @pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf], ids=str)
    @pytest.mark.parametrize("vocab", VOCABS)
    def test_nothing_left_to_sample_from(self, value: float, vocab: int) -> None:
        def fill(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, value)

        kinds = dict(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)
        rqs = [request(0, **kinds), request(1, logits_processors=(fill,), **kinds), request(2, **kinds)]
        logits = logits_of(3, vocab)
        result = Sampler(vocab, "cpu").sample(logits, rqs)
        assert list(result.errors) == [1]
        assert "no token can be sampled" in str(result.errors[1])
        for i in (0, 2):
            assert result.token_ids[i] == Sampler(vocab, "cpu").sample(logits[i : i + 1], [rqs[i]]).token_ids[0]

    def test_stop_tokens_outside_the_vocabulary_are_ignored(self) -> None:
        rq = request(min_new_tokens=3, stop_token_ids=(500, -1))
        logits = logits_of(1, 97)
        assert Sampler(97, "cpu").sample(logits, [rq]).token_ids == [int(logits.argmax())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_largest(dtype):
    scores = torch.full((3, 97), -1.0, dtype=dtype)
    scores[0, [5, 9]] = 2.0
    scores[1, 96] = 0.0
    scores[2, 3], scores[2, 1] = 1.0, 1.0 - 1e-12  # apart in fp64 only
    sampler = Sampler(97, "cpu")
    tokens = sampler.sample(scores, [request(seed=i) for i in range(3)]).token_ids
    assert tokens == [5, 96, 3 if dtype == torch.float64 else 1]
