"""The example server, driven by OpenAI's own client against a live server on this machine."""

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexops import kernels as fk
from flexops.runtime import Engine, SamplingParams
from tests import tiny

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

SCRIPT = Path(__file__).parents[1] / "examples" / "serve_minimal.py"
PROMPTS = ["hello", "What is it?", "a: 1\nb: 2\n\na:", "x", "naïve", "some longer text, " * 6, "Q", "the end"]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_minimal", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Live:
    """A server that runs, and what it runs on."""

    url: str
    app: Any
    client: Any
    model: Any
    tokenizer: Any

    def expected_ids(self, prompt: str, tokens: int, **options: Any) -> list[int]:
        """What an engine of our own gives for the same prompt, greedily."""
        params = SamplingParams(max_new_tokens=tokens, stop_token_ids=(self.tokenizer.eos_token_id,))
        *_, last = Engine(self.model).stream(self.tokenizer(prompt)["input_ids"], params, **options)
        return last.token_ids

    def expected(self, prompt: str, tokens: int, **options: Any) -> str:
        return self.tokenizer.decode(self.expected_ids(prompt, tokens, **options), skip_special_tokens=True)

    def complete(self, prompt: Any, **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 12, **options}
        return self.client.completions.create(model="tiny", prompt=prompt, **options)

    def post(self, **body: Any) -> Any:
        return httpx.post(f"{self.url}/v1/completions", json={"model": "tiny", "prompt": "x", **body}, timeout=60)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        # the server's threads take the operators that a user gets
        patch.delenv("TRITON_INTERPRET", raising=False)
        model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
        app = load_script().make_app(model, tokenizer, "tiny")
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        yield Live(url, app, client, model, tokenizer)
        server.should_exit = True
        thread.join(timeout=30)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited too long"
        time.sleep(0.02)


def test_health_and_models(live):
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
    assert [model.id for model in live.client.models.list()] == ["tiny"]


def test_completion(live):
    answer = live.complete("hello")
    (choice,) = answer.choices
    assert choice.text == live.expected("hello", 12)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
    }
    assert len(choice.layout) == 3 and set(choice.layout) <= {"A", "S"}


def test_usage_says_how_much_of_the_prompt_was_cached(live):
    prompt = "said for the first time here, and then once more"
    usages = [live.complete(prompt, n=2).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages][1] == len(prompt) - 1


def test_stream(live):
    chunks = list(live.complete("hello", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == live.expected("hello", 12)
    assert len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_stream_ends_with_done(live):
    lines = live.post(stream=True, max_tokens=3, temperature=0).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def test_several_at_once(live):
    """Streams and plain answers share the engine's batch; each gets the tokens of its solo run."""

    def ask(i: int) -> str:
        if i % 2:
            return live.complete(PROMPTS[i], max_tokens=24).choices[0].text
        return "".join(c.choices[0].text for c in live.complete(PROMPTS[i], max_tokens=24, stream=True))

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts == [live.expected(prompt, 24) for prompt in PROMPTS]


def test_prompts_as_lists_and_tokens(live):
    ids = live.tokenizer("hello")["input_ids"]
    expected = live.expected("hello", 6)
    assert live.complete(ids, max_tokens=6).choices[0].text == expected
    answer = live.complete(["x", "hello"], max_tokens=6)
    assert [c.index for c in answer.choices] == [0, 1] and answer.choices[1].text == expected
    assert answer.usage.prompt_tokens == 6
    assert live.complete([[7, 8], ids], max_tokens=6).choices[1].text == expected


def test_samples_differ_and_the_seed_repeats_them(live):
    def texts(seed: int) -> list[str]:
        return [c.text for c in live.complete("x", n=3, temperature=1, seed=seed).choices]

    first = texts(1)
    assert len(set(first)) == 3 and texts(1) == first != texts(2)
    streamed = ["", "", ""]
    for chunk in live.complete("x", n=3, temperature=1, seed=1, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(live, stream):
    """The text ends before the stop string, wherever in the tokens it lies, and no part of it is shown."""
    full = live.expected("hello", 40)
    stop = full[10:13]
    expected = full[: full.index(stop)]
    answer = live.complete("hello", max_tokens=40, stop=["never to be found", stop], stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(c.choices[0].text for c in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_end_of_text_stops(live):
    """The end-of-text token ends a request and gives no text."""
    module = sys.modules["serve_minimal"]
    ids = live.expected_ids("hello", 12)
    live.model.generation_config.eos_token_id = ids[5]
    try:
        app = module.make_app(live.model, live.tokenizer, "tiny")
    finally:
        live.model.generation_config.eos_token_id = 0
    answer = run_on(app, {"prompt": "hello", "max_tokens": 12, "temperature": 0}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == ids.index(ids[5]) + 1


def test_logprobs(live):
    choice = live.complete("hello", logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    assert all(value <= 0 for value in logprobs.token_logprobs)
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    chunks = list(live.complete("hello", logprobs=3, stream=True))
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == logprobs.tokens


def test_layout_and_gate_bias(live):
    assert live.complete("x", extra_body={"layout": "ssm"}).choices[0].layout == "SSS"
    routes = ["ssm", "attention", "adaptive"]
    choice = live.complete("x", extra_body={"layout": routes}).choices[0]
    assert choice.layout[:2] == "SA" and choice.text == live.expected("x", 12, layout=routes)
    assert live.complete("x", extra_body={"gate_bias": 1e4}).choices[0].layout == "AAA"


BAD = {
    "echo": ({"echo": True}, "echo"),
    "unknown-field": ({"fast": True}, "fast"),
    "empty-prompt": ({"prompt": ""}, "no tokens"),
    "no-prompts": ({"prompt": []}, "prompt is an empty list"),
    "empty-in-list": ({"prompt": [[5], []]}, "no tokens"),
    "prompt-kind": ({"prompt": {"a": 1}}, "prompt"),
    "token-range": ({"prompt": [99999]}, "99999"),
    "too-long": ({"prompt": "x" * 600}, "max_model_len"),
    "max-tokens": ({"max_tokens": 0}, "max_tokens"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top-p": ({"top_p": 0}, "top_p"),
    "n": ({"n": 0}, "n: "),
    "best-of": ({"best_of": 4}, "best_of"),
    "frequency-penalty": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "logprobs": ({"logprobs": 9}, "logprobs"),
    "empty-stop": ({"stop": ["a", ""]}, "stop"),
    "layout": ({"layout": "fast"}, "'fast'"),
    "layout-length": ({"layout": ["ssm"]}, "3 layers"),
    "stream-options": ({"stream_options": {"include_usage": True}}, "stream_options"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD.keys())
def test_bad_requests(live, body, message, stream):
    if stream and "stream_options" in body:
        pytest.skip("allowed when streaming")
    answer = live.post(stream=stream, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"]


def test_errors_reach_the_client_as_its_own(live):
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        live.client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        live.complete("x", max_tokens=10_000)
    assert httpx.post(f"{live.url}/v1/completions", content="{").status_code == 400
    assert "error" in httpx.get(f"{live.url}/v1/nothing").json()
    assert live.complete("hello").choices[0].text == live.expected("hello", 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(live, stream):
    engine = live.app.state.engine.engine
    wait_until(lambda: not engine.has_unfinished())
    body = {"model": "tiny", "prompt": ["x", "y"], "max_tokens": 480, "stream": stream, "temperature": 1, "seed": 34}
    # with this seed neither request meets its end token before max_tokens
    aborted = engine.metrics.requests_finished["abort"]
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        wait_until(engine.has_unfinished)
        if stream:
            assert connection.recv(64)
    wait_until(lambda: not engine.has_unfinished())
    assert engine.metrics.requests_finished["abort"] == aborted + 2


def run_on(app: Any, *bodies: dict[str, Any]) -> Any:
    """Requests to an application without a socket; returns the last answer."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            for body in bodies:
                answer = await client.post("/v1/completions", json={"model": "tiny", **body}, timeout=60)
            health = await client.get("/health")
            answer.extensions["health"] = health.status_code
            return answer

    with fk.backend("cpu"):
        return asyncio.run(run())


def test_a_failed_step_fails_requests_and_health(live, monkeypatch):
    app = sys.modules["serve_minimal"].make_app(live.model, live.tokenizer, "tiny")

    def step(self: Engine) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Engine, "step", step)
    answer = run_on(app, {"prompt": "x"}, {"prompt": "again"})
    assert answer.status_code == 500 and "out of luck" in answer.json()["error"]["message"]
    assert answer.extensions["health"] == 503


def test_the_script_refuses_a_missing_model():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--model", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and "'nowhere' is no folder" in done.stderr
