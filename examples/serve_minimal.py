"""An OpenAI-compatible completions server in one file: how to put the engine behind HTTP.

    python examples/serve_minimal.py                       # flex-tiny on http://127.0.0.1:8000
    python examples/serve_minimal.py --model smollm2 --port 9000

One task steps the engine for as long as it has work; requests join the running batch between two steps, whenever they
come. Beside OpenAI's fields a request may hold `layout` ("attention", "ssm", or a list with a route per layer),
`gate_bias`, `top_k`, `min_p` and `repetition_penalty`. Every choice in an answer tells the `layout` that it took.

Made to be read: no authentication, no metrics, no limit on the queue.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from flexops import EngineConfig, FlexHybridModel
from flexops.models import loading
from flexops.models.layout import layout_strip
from flexops.runtime import Engine, RequestOutput, SamplingParams
from flexops.text import TextStream

T = TypeVar("T")


# 1. The engine as a task: it alone touches the engine, between two steps or in the step
@dataclass(frozen=True)
class Job:
    """What the engine needs for one choice."""

    prompt: list[int]
    params: SamplingParams
    layout: str | list[str] | None
    gate_bias: float


@dataclass(eq=False)
class Submission:
    """Jobs of one client, taken all or none, and the queue that their outputs come through."""

    jobs: list[Job]
    queue: "asyncio.Queue[RequestOutput | Exception]" = field(default_factory=asyncio.Queue)
    index_of: dict[int, int] = field(default_factory=dict)  # request id -> place in jobs
    closed: bool = False


class EngineTask:
    """Steps the engine in a thread while it has work, and hands each output to the client that waits for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: Exception | None = None
        self._arrived: list[Submission] = []
        self._closed: list[Submission] = []
        self._owners: dict[int, Submission] = {}
        self._work = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def outputs(self, jobs: list[Job]) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(place in jobs, output) of all jobs as they come. Closing the iterator early aborts what still runs.

        Raises ValueError where the engine refuses a job (then it takes none), RuntimeError where a step failed.
        """
        if self.failure is not None:
            raise RuntimeError(f"the engine has stopped: {self.failure}")
        submission = Submission(jobs)
        self._arrived.append(submission)
        self._work.set()
        running = len(jobs)
        try:
            while running:
                output = await submission.queue.get()
                if isinstance(output, Exception):
                    raise output
                running -= output.finished
                yield submission.index_of[output.request_id], output
        finally:  # nothing to await here: a client that went away has its task cancelled again and again
            submission.closed = True
            self._closed.append(submission)
            self._work.set()

    async def run(self) -> None:
        """Until cancelled, or until a step fails: then all requests fail, and new ones are refused."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._work.wait()
                self._between_steps()
                if not self.engine.has_unfinished():
                    self._work.clear()
                    continue
                for output in await loop.run_in_executor(self._thread, self.engine.step):
                    self._owners[output.request_id].queue.put_nowait(output)
        except Exception as error:
            self.failure = error
            for submission in {*self._owners.values(), *self._arrived}:
                submission.queue.put_nowait(RuntimeError(f"the engine has stopped: {error}"))
            raise
        finally:
            self._thread.shutdown()

    def _between_steps(self) -> None:
        arrived, self._arrived = self._arrived, []
        closed, self._closed = self._closed, []
        for submission in arrived:
            if not submission.closed:
                self._add(submission)
        for submission in closed:
            self._drop(submission)

    def _add(self, submission: Submission) -> None:
        try:
            for i, job in enumerate(submission.jobs):
                request_id = self.engine.add_request(job.prompt, job.params, job.layout, job.gate_bias)
                submission.index_of[request_id] = i
                self._owners[request_id] = submission
        except ValueError as error:
            self._drop(submission)
            submission.queue.put_nowait(error)

    def _drop(self, submission: Submission) -> None:
        for request_id in submission.index_of:
            self.engine.abort(request_id)
            self._owners.pop(request_id, None)


# 2. What a client may send
class CompletionRequest(BaseModel):
    """OpenAI's fields, and ours. Unknown fields are refused: a setting that does nothing misleads."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    user: str | None = None
    # accepted at the one value that asks for nothing
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] = 0.0
    logit_bias: None = None
    suffix: None = None
    # ours
    layout: str | list[str] | None = None
    gate_bias: float = 0.0
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """The prompts as token ids."""
        prompt: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not prompt:
            raise ValueError("prompt is an empty list: it must hold at least one prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        return [list(tokenizer(p)["input_ids"]) if isinstance(p, str) else p for p in prompt]

    def stops(self) -> list[str]:
        """The strings that end a choice."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not text for text in stops):
            raise ValueError("stop holds an empty string: it must hold at least one character")
        return stops

    def job(self, prompt: list[int], sample: int, tokenizer: PreTrainedTokenizerBase, eos: tuple[int, ...]) -> Job:
        """What sample i of n asks of the engine; it takes seed + i, or all n would be equal."""
        stops = self.stops()
        params = SamplingParams(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            seed=None if self.seed is None else self.seed + sample,
            stop_token_ids=eos,
            logprobs=self.logprobs,
            stop_checks=(StopStrings(tokenizer, stops, len(prompt)),) if stops else (),
        )
        return Job(prompt, params, self.layout, self.gate_bias)


@dataclass(frozen=True)
class StopStrings:
    """Ends a request once its own text holds one of the strings. `Choice` cuts them off."""

    tokenizer: PreTrainedTokenizerBase
    stops: list[str]
    prompt_tokens: int

    def __call__(self, ids: torch.Tensor) -> bool:
        # a stop string that the last token completes lies in the last few: no character has more than 4 tokens
        first = max(self.prompt_tokens, ids.shape[1] - 4 * max(map(len, self.stops)) - 4)
        text = self.tokenizer.decode(ids[0, first:], skip_special_tokens=True)
        return any(stop in text for stop in self.stops)


# 3. One choice of an answer, as its tokens come
@dataclass
class Choice:
    """Turns engine outputs into OpenAI's chunks; never shows a stop string, nor what may become one."""

    index: int
    tokenizer: PreTrainedTokenizerBase
    stream: TextStream
    stops: list[str]
    text: str = ""  # given out so far
    held: str = ""  # may be the beginning of a stop string
    tokens: int = 0
    cached_tokens: int = 0  # of its prompt
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    layout: str = ""

    def push(self, output: RequestOutput) -> dict[str, Any]:
        """The chunk that this output adds."""
        if output.error is not None:
            raise RuntimeError(f"choice {self.index} failed: {output.error}") from output.error
        self.tokens, self.cached_tokens = len(output.token_ids), output.cached_tokens
        self.layout = layout_strip(output.layout)
        offsets = []
        for token in output.new_token_ids:
            offsets.append(len(self.text) + len(self.held))
            self.held += self.stream.push([token])
        if output.finished:
            self.held += self.stream.finish()
            self.finish_reason = output.finish_reason
        stop = min((self.held.find(text) for text in self.stops if text in self.held), default=None)
        end = len(self.held) if self.finish_reason else len(self.held) - self._unsure()
        piece = self.held[: end if stop is None else stop]
        self.text, self.held = self.text + piece, self.held[len(piece) :]
        logprobs = None
        if output.logprobs is not None:
            shown = [i for i, offset in enumerate(offsets) if stop is None or offset < len(self.text)]
            logprobs = self._logprobs(output.new_token_ids, output.logprobs, offsets, shown)
        return self.as_dict(piece, logprobs)

    def _unsure(self) -> int:
        """Length of the longest ending that is the beginning of a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        lengths = range(min(longest, len(self.held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self.held[-n:]) for stop in self.stops)), 0)

    def _logprobs(
        self, token_ids: list[int], logprobs: list[dict[int, float]], offsets: list[int], shown: list[int]
    ) -> dict[str, list[Any]]:
        """OpenAI's four lists for the tokens at the places `shown`, also kept for the whole answer."""
        new = {
            "tokens": [self._name(token_ids[i]) for i in shown],
            "token_logprobs": [logprobs[i][token_ids[i]] for i in shown],
            "top_logprobs": [{self._name(t): value for t, value in logprobs[i].items()} for i in shown],
            "text_offset": [offsets[i] for i in shown],
        }
        self.logprobs = {name: (self.logprobs or {}).get(name, []) + values for name, values in new.items()}
        return new

    def _name(self, token: int) -> str:
        """A token's text, or its name in the vocabulary where it is a part of a character."""
        text = self.tokenizer.decode([token])
        return self.tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else text

    def as_dict(self, text: str, logprobs: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            "layout": self.layout,
        }


# 4. The routes
def make_app(
    model: FlexHybridModel, tokenizer: PreTrainedTokenizerBase, name: str, config: EngineConfig | None = None
) -> FastAPI:
    """The application for one model, under the name that clients ask for."""
    eos = model.generation_config.eos_token_id
    stop_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.engine = EngineTask(Engine(model, config))
        task = asyncio.create_task(app.state.engine.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task

    app = FastAPI(title="flexops", lifespan=lifespan)

    @app.get("/health")
    async def health() -> JSONResponse:
        if app.state.engine.failure is not None:
            return JSONResponse({"status": "failed", "reason": str(app.state.engine.failure)}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": started, "owned_by": "flexops"}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> StreamingResponse | JSONResponse:
        if body.model != name:
            raise HTTPException(404, f"the model {body.model!r} does not exist: this server has {name!r}")
        if body.stream_options is not None and not body.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        prompts = body.prompts(tokenizer)
        samples = [(prompt, i) for prompt in prompts for i in range(body.n)]
        jobs = [body.job(prompt, i, tokenizer, stop_token_ids) for prompt, i in samples]
        choices = [Choice(i, tokenizer, TextStream(tokenizer, job.prompt), body.stops()) for i, job in enumerate(jobs)]
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            async with aclosing(app.state.engine.outputs(jobs)) as outputs:
                async for i, output in outputs:
                    chunk = choices[i].push(output)
                    if chunk["text"] or chunk["finish_reason"] or chunk["logprobs"]:
                        yield chunk

        def usage() -> dict[str, Any]:
            counts = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": sum(c.tokens for c in choices)}
            cached = sum(choice.cached_tokens for choice in choices[:: body.n])  # the first sample of each prompt
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            return {**counts, "total_tokens": sum(counts.values()), **details}

        running = chunks()
        if not body.stream:
            await unless_disconnected(request, exhaust(running))
            answer = [choice.as_dict(choice.text, choice.logprobs) for choice in choices]
            return JSONResponse({**head, "choices": answer, "usage": usage()})
        # wait for the first chunk: what the engine refuses must be a 400, and not a stream that breaks off
        first = await unless_disconnected(request, anext(running))

        async def events() -> AsyncIterator[str]:
            async with aclosing(running):
                try:
                    yield event({**head, "choices": [first]})
                    async for chunk in running:
                        yield event({**head, "choices": [chunk]})
                    if body.stream_options and body.stream_options.get("include_usage"):
                        yield event({**head, "choices": [], "usage": usage()})
                except Exception as error:
                    yield event(error_body(str(error), "server_error"))
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problem = error.errors()[0]
        parameter = next((str(part) for part in problem["loc"][1:2] if isinstance(part, str)), None)
        message = f"{parameter or 'body'}: {problem['msg']}"
        return JSONResponse(error_body(message, "invalid_request_error", parameter), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)

    @app.exception_handler(ValueError)
    async def refused(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse(error_body(str(error), "invalid_request_error"), 400)

    @app.exception_handler(RuntimeError)
    async def failed(request: Request, error: RuntimeError) -> JSONResponse:
        return JSONResponse(error_body(str(error), "server_error"), 500)

    return app


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def error_body(message: str, kind: str, parameter: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": None}}


async def exhaust(iterator: AsyncIterator[Any]) -> None:
    async for _ in iterator:
        pass


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled if the client goes away before."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=0.1))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client has closed the connection")
        return task.result()
    finally:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="flex-tiny", help="flex-tiny, smollm2, or the folder of a saved model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    try:
        model, tokenizer = loading.load(args.model)
    except ValueError as error:
        parser.error(str(error))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if model.num_parameters() < 20_000_000:
        torch.set_num_threads(1)  # a second thread gains little here, and costs much on a busy machine
    uvicorn.run(make_app(model, tokenizer, args.model), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
