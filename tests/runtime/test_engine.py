"""The engine: right tokens whatever shares the batch, memory whole after every step, bad requests harmless."""

import math
import random
from functools import cache

import pytest
import torch

from flexops import EngineConfig, FlexHybridModel
from flexops.kernels import ATTENTION, SSM
from flexops.runtime import Engine, RequestOutput, SamplingParams
from tests.runtime.serving import MEMORY, Asked, Given, alone, collect, random_requests, serve, small_engine
from tests.tiny import make_model, make_tokenizer


@cache
def model_of(dtype: torch.dtype = torch.float32) -> FlexHybridModel:
    return make_model(layers_without_ffn=[1], num_hidden_layers=4).to(dtype)


@cache
def solo(dtype: torch.dtype, asked: Asked) -> Given:
    return alone(model_of(dtype), asked)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def assert_as_if_alone(dtype: torch.dtype, asked: list[Asked], given: list[Given]) -> None:
    for mine, theirs in zip(asked, given, strict=True):
        assert theirs.same_bits(solo(dtype, mine)), mine


def test_greedy_tokens_and_logits_are_those_of_the_forward_pass():
    model = model_of()
    for asked in random_requests(model, 6, seed=3):
        greedy = Asked(asked.prompt, SamplingParams(max_new_tokens=12, keep_logits=True))
        given = alone(model, greedy)
        ids = torch.tensor([[*asked.prompt, *given.token_ids]])
        with torch.no_grad():
            out = model(ids, prompt_lengths=torch.tensor([len(asked.prompt)]))
        expected = out.logits[0, len(asked.prompt) - 1 : -1]
        assert given.layout == tuple(out.layouts[0].tolist())
        assert (torch.stack(given.logits) - expected).abs().max() <= 1e-4 * expected.std()
        assert given.token_ids == expected.argmax(-1).tolist()


def test_a_batch_changes_no_bit(dtype):
    asked = random_requests(model_of(dtype), 14)
    given = serve(small_engine(model_of(dtype)), asked)
    assert len({g.layout for g in given}) > 2, "the test wants requests that choose differently"
    assert_as_if_alone(dtype, asked, given)


@pytest.mark.parametrize("budget", [1, 7, 33])
def test_slicing_changes_no_bit(dtype, budget):
    asked = random_requests(model_of(dtype), 6, longest=40, seed=budget)
    engine = small_engine(model_of(dtype), max_batched_tokens=budget, decode_slowdown=None)
    given = serve(engine, asked)
    token_layers = sum(len(a.prompt) for a in asked) * 4
    assert engine.metrics.steps >= token_layers // budget, "every prompt was cut"
    assert_as_if_alone(dtype, asked, given)


@pytest.mark.parametrize("budget", [40, 1000])
def test_preemption_changes_no_bit(dtype, budget):
    model, rng = model_of(dtype), random.Random(3)
    prompts = [tuple(rng.randrange(258) for _ in range(rng.randint(3, 30))) for _ in range(10)]
    asked = [Asked(prompt, SamplingParams(max_new_tokens=40, keep_logits=True), "attention") for prompt in prompts]
    page_bytes = small_engine(model).pool.layout.page_bytes
    engine = small_engine(model, memory_bytes=30 * page_bytes, max_batched_tokens=budget, decode_slowdown=None)
    given = serve(engine, asked)
    assert engine.scheduler.preemptions > 0, "the pool was small enough to preempt"
    assert_as_if_alone(dtype, asked, given)


def test_a_request_preempted_twice_keeps_its_bits(dtype):
    model = model_of(dtype)
    asked = Asked(tuple(range(30)), SamplingParams(max_new_tokens=12, keep_logits=True))
    engine = small_engine(model)
    request_id = engine.add_request(asked.prompt, asked.params)
    given: dict[tuple[int, int], Given] = {}
    for step in range(40):
        if step in (4, 9):
            engine.scheduler.preempt(engine.scheduler.running[0])
        collect(given, engine)
        if not engine.has_unfinished():
            break
    assert given[request_id, 0].same_bits(solo(dtype, asked))


def test_without_selective_batching_tokens_are_the_same(dtype):
    asked = random_requests(model_of(dtype), 8, seed=2)
    given = serve(small_engine(model_of(dtype), selective_batching=False), asked)
    assert_as_if_alone(dtype, asked, given)


def test_decodes_keep_their_bits_when_a_long_prompt_joins(dtype):
    model = model_of(dtype)
    short = random_requests(model, 5, longest=20, seed=7)
    long = Asked(tuple(i % 258 for i in range(300)), SamplingParams(max_new_tokens=4, keep_logits=True))
    engine, given = small_engine(model, max_batched_tokens=64), {}
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in short]
    for _ in range(3):
        collect(given, engine)
    ids.append(engine.add_request(long.prompt, long.params))
    while engine.has_unfinished():
        collect(given, engine)
    assert_as_if_alone(dtype, [*short, long], [given[i, 0] for i in ids])


def test_a_one_token_prompt_in_a_reused_slot_starts_from_nothing(dtype):
    model = model_of(dtype)
    one = Asked((5,), SamplingParams(max_new_tokens=6, keep_logits=True), "ssm")
    engine = small_engine(model, max_num_requests=1)
    first = serve(engine, [one])[0]
    serve(engine, random_requests(model, 4, seed=9))
    assert serve(engine, [one])[0].same_bits(first)


@pytest.mark.parametrize("stop_at", range(12))
def test_abort_at_any_point_returns_everything(stop_at):
    model = model_of()
    asked = random_requests(model, 4, longest=40, seed=stop_at)
    engine, given = small_engine(model, max_batched_tokens=24), {}
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in asked]
    for _ in range(stop_at):
        collect(given, engine)
    engine.abort(ids[1])
    engine.check_integrity()
    while engine.has_unfinished():
        collect(given, engine)
    engine.clear_cache()
    assert engine.pool.free == engine.pool.num_pages and engine.pool.reserved == 0
    keep = [0, 2, 3]
    assert_as_if_alone(torch.float32, [asked[i] for i in keep], [given[ids[i], 0] for i in keep])
    engine.abort(ids[1])  # gone already: ignored


@pytest.mark.parametrize("layout", [None, "attention", "ssm"])
def test_samples_share_their_prompt_and_no_bit_depends_on_the_batch(dtype, layout):
    model, prompt = model_of(dtype), tuple(range(40, 77))
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=100, n=4, keep_logits=True)
    outcomes = []
    for beside in ([], random_requests(model, 5, seed=12)):
        engine, given = small_engine(model, context_cache=None), {}
        for asked in beside:
            engine.add_request(asked.prompt, asked.params, asked.layout)
        request_id = engine.add_request(prompt, params, layout)
        while engine.has_unfinished():
            collect(given, engine)
            if engine.metrics.steps == 1:
                shared = int((engine.pool.ref_counts == 4).sum())
                assert bool(shared) == (layout != "ssm"), "full KV pages of the prompt are shared, states are not"
        assert engine.metrics.prompt_tokens == sum(len(a.prompt) for a in beside) + len(prompt), "computed once"
        engine.clear_cache()
        assert engine.pool.free == engine.pool.num_pages
        outcomes.append([given[request_id, sample] for sample in range(4)])
    assert all(a.same_bits(b) for a, b in zip(*outcomes, strict=True))
    assert len({tuple(given.token_ids) for given in outcomes[0]}) > 1
    single = SamplingParams(max_new_tokens=9, temperature=1.0, seed=100, keep_logits=True)
    assert outcomes[0][0].same_bits(solo(dtype, Asked(prompt, single, layout)))


def test_samples_without_room_wait_and_give_the_same(dtype):
    model, prompt = model_of(dtype), tuple(range(20))
    roomy, cramped = small_engine(model), small_engine(model, max_num_requests=2)
    outcomes = []
    for engine in (roomy, cramped):
        given: dict[tuple[int, int], Given] = {}
        engine.add_request(prompt, SamplingParams(max_new_tokens=5, temperature=1.0, seed=3, n=4, keep_logits=True))
        while engine.has_unfinished():
            collect(given, engine)
        engine.clear_cache()
        assert engine.pool.free == engine.pool.num_pages
        outcomes.append([given[0, sample] for sample in range(4)])
    assert all(a.same_bits(b) for a, b in zip(*outcomes, strict=True))


def test_stop_tokens_strings_and_lengths():
    model, tokenizer = model_of(), make_tokenizer()
    engine = Engine(model, EngineConfig(memory_bytes=MEMORY), tokenizer)
    prompt = tuple(range(60, 70))
    free = serve(engine, [Asked(prompt, SamplingParams(max_new_tokens=12))])[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    token = free.token_ids[4]
    cut = free.token_ids.index(token) + 1
    stopped = serve(engine, [Asked(prompt, SamplingParams(max_new_tokens=12, stop_token_ids=(token, 999)))])[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[:cut]
    later = SamplingParams(max_new_tokens=12, stop_token_ids=(token,), min_new_tokens=cut + 1)
    assert len(serve(engine, [Asked(prompt, later)])[0].token_ids) > cut
    text = tokenizer.decode(free.token_ids[3:6])
    by_text = serve(engine, [Asked(prompt, SamplingParams(max_new_tokens=12, stop_strings=(text,)))])[0]
    assert by_text.finish_reason == "stop" and text in tokenizer.decode(by_text.token_ids)
    assert text not in tokenizer.decode(by_text.token_ids[:-1])


def test_the_users_own_code_fails_its_request_alone():
    model = model_of()

    def broken(ids, scores):
        raise RuntimeError("mine")

    def bad_check(ids):
        raise KeyError("also mine")

    fine = random_requests(model, 3, seed=4)
    asked = [
        Asked((1, 2, 3), SamplingParams(max_new_tokens=5, logits_processors=(broken,))),
        Asked((1, 2, 3), SamplingParams(max_new_tokens=5, stop_checks=(bad_check,))),
        *fine,
    ]
    engine = small_engine(model)
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in asked]
    errors: dict[int, RequestOutput] = {}
    given: dict[tuple[int, int], Given] = {}
    while engine.has_unfinished():
        outputs = collect(given, engine)
        errors.update({output.request_id: output for output in outputs if output.error is not None})
    assert errors.keys() == set(ids[:2]) and all(e.finish_reason == "error" for e in errors.values())
    assert isinstance(errors[ids[0]].error, RuntimeError) and isinstance(errors[ids[1]].error, KeyError)
    engine.clear_cache()
    assert engine.pool.free == engine.pool.num_pages
    assert_as_if_alone(torch.float32, fine, [given[i, 0] for i in ids[2:]])


def test_score_is_the_log_probability_under_the_prompts_layout(dtype):
    model = model_of(dtype)
    prompt, continuation = tuple(range(50, 80)), (7, 9, 200, 13, 13)
    engine = small_engine(model)
    scores = engine.score(prompt, continuation)
    with torch.no_grad():
        out = model(torch.tensor([[*prompt, *continuation]]), prompt_lengths=torch.tensor([len(prompt)]))
    rows = out.logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = [rows[i, token].item() for i, token in enumerate(continuation)]
    assert scores == pytest.approx(expected, abs=1e-4 if dtype == torch.float32 else 0.15)
    sliced = small_engine(model, max_batched_tokens=5)
    assert sliced.score(prompt, continuation) == scores, "not a bit differs when the prompt is cut"
    engine.clear_cache()
    assert engine.pool.free == engine.pool.num_pages
    with pytest.raises(ValueError, match="continuation has no tokens"):
        engine.score(prompt, ())


def test_an_output_keeps_the_tokens_it_had():
    outputs = list(small_engine(model_of()).stream((9, 9, 9), SamplingParams(max_new_tokens=6)))
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert [output.num_tokens for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.token_ids for output in outputs] == [tokens[:n] for n in range(1, 7)]
    outputs[0].token_ids.clear()  # the caller's own list
    assert outputs[0].token_ids == tokens[:1]


def test_score_and_stream_lose_nothing_of_others():
    model = model_of()
    asked = random_requests(model, 3, seed=8)
    engine, given = small_engine(model), {}
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in asked]
    engine.score((1, 2, 3, 4), (5, 6))
    tokens = [t for output in engine.stream((9, 9, 9), SamplingParams(max_new_tokens=5)) for t in output.new_token_ids]
    assert tokens == solo(torch.float32, Asked((9, 9, 9), SamplingParams(max_new_tokens=5, keep_logits=True))).token_ids
    collect(given, engine)
    while engine.has_unfinished():
        collect(given, engine)
    assert_as_if_alone(torch.float32, asked, [given[i, 0] for i in ids])
    stream = engine.stream((1, 2), SamplingParams(max_new_tokens=50))
    next(stream)
    stream.close()
    engine.clear_cache()
    assert not engine.has_unfinished() and engine.pool.free == engine.pool.num_pages


def test_decodes_of_any_mix_fill_the_pool():
    model = model_of()
    engine = small_engine(model, memory_bytes=100 * small_engine(model).pool.layout.page_bytes)
    rng, fullest = random.Random(0), 0.0
    for i in range(60):
        layout = [rng.choice(["attention", "ssm"]) for _ in range(4)]
        engine.add_request([i] * rng.randint(1, 30), SamplingParams(max_new_tokens=60), layout)
    while engine.has_unfinished():
        engine.step()
        if engine.scheduler.waiting:
            fullest = max(fullest, 1 - engine.pool.free / engine.pool.num_pages)
    assert fullest >= 0.95


def test_priority_and_order():
    model = model_of()
    engine = small_engine(model, max_num_requests=1)
    params = SamplingParams(max_new_tokens=2)
    ids = [engine.add_request([1, 2, 3], params, priority=p) for p in (0, 0, 5)]
    finished = []
    while engine.has_unfinished():
        finished.extend(o.request_id for o in engine.step() if o.finished)
    assert finished == [ids[2], ids[0], ids[1]]


def test_gate_bias_moves_the_routes_and_layout_forces_them():
    model, prompt = model_of(), tuple(range(20))
    params = SamplingParams(max_new_tokens=1)
    to_attention, to_ssm, forced = serve(
        small_engine(model),
        [Asked(prompt, params, None, 100.0), Asked(prompt, params, None, -100.0), Asked(prompt, params, "ssm", 100.0)],
    )
    assert set(to_attention.layout) == {ATTENTION} and set(to_ssm.layout) == {SSM} and set(forced.layout) == {SSM}


def test_stats_count_what_happened():
    model = model_of()
    engine = small_engine(model)
    asked = random_requests(model, 5, seed=1)
    given = serve(engine, asked)
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(len(a.prompt) for a in asked)
    assert stats["generated_tokens"] == sum(len(g.token_ids) for g in given)
    assert sum(stats["requests_finished"].values()) == stats["requests_added"] == 5
    assert sum(stats["layouts"].values()) == 5
    assert stats["ttft_us_mean"] > 0 and stats["tpot_us_mean"] > 0 and stats["flops_per_token"] > 0
    assert stats["pages_free"] == stats["pages"]


def test_bad_requests_are_refused_and_others_go_on():
    model = model_of()
    engine = small_engine(model, memory_bytes=64 * small_engine(model).pool.layout.page_bytes)
    fine = random_requests(model, 3, longest=20, seed=6)
    ids = [engine.add_request(a.prompt, a.params, a.layout, a.gate_bias) for a in fine]
    engine.step()
    params = SamplingParams(max_new_tokens=4)
    cases = [
        (([], params), "no tokens"),
        (([1, 258], params), r"token id 258 is out of range \[0, 258\)"),
        (([-1], params), "token id -1"),
        (([1] * 510, params), "exceeds max_model_len 512"),
        (([1] * 400, SamplingParams(max_new_tokens=100)), "may need .* pages, but the pool has 64"),
        (([1], params, "mamba"), "layout="),
        (([1], params, None, math.nan), "gate_bias=nan"),
        (([1], SamplingParams(stop_strings=("x",))), "need a tokenizer"),
    ]
    before = engine.stats()["requests_added"]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.add_request(*arguments)
    assert engine.stats()["requests_added"] == before
    given: dict[tuple[int, int], Given] = {}
    collect(given, engine)
    while engine.has_unfinished():
        collect(given, engine)
    assert all(given[i, 0].token_ids == solo(torch.float32, a).token_ids for i, a in zip(ids, fine, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": -1}, "temperature=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 0}, "top_p=0"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"n": 0}, "n=0"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"min_new_tokens": 65}, "min_new_tokens=65"),
    ],
)
def test_bad_sampling_params(changes, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_requests": 0}, "max_num_requests=0"),
        ({"max_batched_tokens": 0}, "max_batched_tokens=0"),
        ({"decode_slowdown": 1.0}, "decode_slowdown=1.0"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"memory_fraction": 1.0}, "memory_fraction=1.0"),
    ],
)
def test_bad_engine_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)
    with pytest.raises(ValueError, match="set memory_bytes to at least"):
        Engine(model_of(), EngineConfig(memory_bytes=1024))
