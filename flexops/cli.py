"""The command `flexops`."""

import os
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from . import EngineConfig, FlexHybridModel, __version__
from .models import loading
from .models.layout import Layout, layout_strip
from .models.packed import PackedModel
from .runtime import Engine, RequestOutput, SamplingParams
from .runtime.measuring import profile_model
from .runtime.profiling import BranchProfile, profile_path
from .text import TextStream

app = typer.Typer(help="Request-adaptive hybrid attention/SSM language models.", add_completion=False)
# escape sequences and the like in a model's text must not reach a terminal
_CONTROL = {code: "\ufffd" for code in (*range(9), *range(11, 32), 127)}
# parameters; below, a second thread gains little, and waiting for it costs much where another program holds its core
SMALL_MODEL = 20_000_000
THREADS_HELP = "CPU threads; by default one for a small model, else as many as torch takes."
MIN_BATCHES = 40  # for `profile`: below, the fit has hardly more samples than terms
PROFILED_CONTEXT = 4096  # tokens cached per request, at most, in what `profile` measures
ROUTE_STYLES = {"A": "black on bright_magenta", "S": "black on bright_cyan", "?": "dim"}


def main() -> None:
    """Entry point of the console script."""
    app()


@contextmanager
def user_errors() -> Iterator[None]:
    """What the user got wrong is one line on stderr and exit code 2, not a traceback."""
    try:
        yield
    except ValueError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(2) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and progress bars of transformers inside."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with redirect_stderr(StringIO()):
        yield


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"flexops {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; give it several times for several.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Prompts from a text file, separated by blank lines, or by lines of --- where it has any."),
    ] = None,
    model: Annotated[str, typer.Option(help="flex-tiny, smollm2, or the folder of a saved model.")] = "flex-tiny",
    layout: Annotated[
        str | None,
        typer.Option(help="Force routes: attention, ssm, a letter per layer (AASS), or names with commas."),
    ] = None,
    gate_bias: Annotated[float, typer.Option(help="Added to every gate's attention logit.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages repetition.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help=THREADS_HELP)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
) -> None:
    """Continue prompts, all at once, and show the layout that each one took."""
    console = Console(highlight=False)
    loading_model = console.status(f"loading {model}") if console.is_terminal else nullcontext()
    with user_errors(), loading_model:
        prompts = [*(read_prompts(file) if file else []), *(prompt or [])]
        if not prompts:
            raise ValueError("no prompt: give --prompt TEXT (several times for several) or --file PROMPTS.TXT")
        if any(not text.strip() for text in prompts):
            raise ValueError("a prompt is empty: give it at least one word")
        routes = parse_layout(layout)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        with quiet_transformers():
            loaded, tokenizer = loading.load(model)
            loaded.to(choose_device(device))
        choose_threads(threads, loaded)
        params = replace(params, stop_token_ids=stop_token_ids(loaded))
        chat = bool(tokenizer.chat_template) and not raw
        engine = Engine(loaded, EngineConfig(max_num_requests=len(prompts)))
        warm_up(engine)
        runs: dict[int, Run] = {}
        for text in prompts:
            ids = encode(tokenizer, text, chat)
            request_id = engine.add_request(ids, params, layout=routes, gate_bias=gate_bias)
            runs[request_id] = Run(len(runs) + 1, text, TextStream(tokenizer, ids), chat, prompt_tokens=len(ids))
    started = time.perf_counter()
    view = LivePanels if console.is_terminal else PlainText
    with view(console, list(runs.values())) as shown:
        while engine.has_unfinished():
            for output in engine.step():
                runs[output.request_id].update(output)
            shown.refresh()
    seconds = time.perf_counter() - started
    console.print(summary(list(runs.values())))
    total = sum(run.new_tokens for run in runs.values())
    console.print(f"{total} tokens in {seconds:.2f} s: {total / seconds:.1f} tokens/s over all prompts")


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="flex-tiny, smollm2, or the folder of a saved model.")] = "flex-tiny",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(help=f"{THREADS_HELP} A profile holds for engines of as many.")] = None,
    batches: Annotated[int, typer.Option(help="Batches to measure; more fit better.")] = 160,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="A .json file, or a folder, to store it in; by default the model's folder, or else the user's cache."
        ),
    ] = None,
) -> None:
    """Measure the parts of a model's layers on this device, once, and store what they cost."""
    console = Console(highlight=False)
    with user_errors():
        if batches < MIN_BATCHES or not seconds > 0:
            raise ValueError(f"--batches {batches} must be at least {MIN_BATCHES}, and --seconds {seconds} above 0")
        chosen = choose_device(device)
        with quiet_transformers():
            loaded, _ = loading.load(model)
            loaded.to(chosen)
        choose_threads(threads, loaded)
        with torch.no_grad():
            packed = PackedModel(loaded, loaded.config.max_position_embeddings)
        columns = (
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            made = profile_model(
                packed,
                max_context=min(loaded.config.max_position_embeddings - 1, PROFILED_CONTEXT),
                batches=batches,
                budget_s=seconds,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        path = save_profile(made, model, output)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("part of a layer", "held-out error", "90th percentile", "spread of a run", "samples"):
        table.add_column(name, justify="left" if name == "part of a layer" else "right")
    for name, error in made.held_out.items():
        cells = (f"{value:.1%}" for value in (error.median, error.p90, error.spread))
        table.add_row(name, *cells, str(error.count))
    console.print(table)
    console.print(f"stored for {made.key['device']} in {path}", soft_wrap=True)


def save_profile(profile: BranchProfile, model: str, output: Path | None) -> Path:
    """Store a profile where the user says, beside a model that is a folder, or else in the user's cache folder."""
    folder = Path(model)
    if output is not None:
        path = output if output.suffix == ".json" else profile_path(profile.key, output)
    elif model not in loading.NAMES and folder.is_dir() and os.access(folder, os.W_OK):
        path = profile_path(profile.key, folder)
    else:
        path = profile_path(profile.key)
    try:
        profile.save(path)
    except OSError as error:
        raise ValueError(f"the profile cannot be stored in {str(path)!r}: {error}; choose another --output") from error
    return path


@dataclass
class Run:
    """One prompt while it runs."""

    number: int
    prompt: str
    stream: TextStream
    chat: bool
    prompt_tokens: int
    text: str = ""
    layout: str = ""
    new_tokens: int = 0
    finished: bool = False
    error: str | None = None
    first_token_us: float | None = None
    token_times: list[float] = field(default_factory=list)

    def update(self, output: RequestOutput) -> None:
        self.text += self.stream.push(output.new_token_ids)
        self.layout = layout_strip(output.layout)
        self.new_tokens = len(output.token_ids)
        self.token_times += [time.perf_counter()] * len(output.new_token_ids)
        self.first_token_us = output.time_to_first_token_us or self.first_token_us
        self.finished = output.finished
        if output.finished:
            self.text += self.stream.finish()
            self.error = str(output.error) if output.error else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token, whose time is the prompt's."""
        if len(self.token_times) < 2:
            return None
        return (len(self.token_times) - 1) / (self.token_times[-1] - self.token_times[0])


class LivePanels:
    """A panel per prompt that fills while the text comes, for a terminal."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._console, self._runs = console, runs
        self._live = Live(console=console, refresh_per_second=12, transient=True, get_renderable=self._panels)

    def _panels(self) -> Group:
        return Group(*(self._panel(run) for run in self._runs))

    @staticmethod
    def _panel(run: Run) -> Panel:
        text = run.text.rstrip().translate(_CONTROL)
        body = Text.assemble((run.prompt, "dim"), "\n" if run.chat else "", (text, "bold"))
        title = Text.assemble(f"{run.number} ", strip(run.layout) if run.layout else ("…", "dim"))
        return Panel(body, title=title, title_align="left", border_style="green" if run.finished else "dim")

    def __enter__(self) -> "LivePanels":
        self._live.start()
        return self

    def refresh(self) -> None:
        """The panels redraw themselves."""

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        self._console.print(self._panels())


class PlainText:
    """Text as it comes, prompt after prompt, for pipes and files: the first unfinished prompt streams."""

    def __init__(self, console: Console, runs: Sequence[Run]) -> None:
        self._console, self._runs = console, runs
        self._pieces = self._stream()

    def _stream(self) -> Generator[str, None, None]:
        for run in self._runs:
            heading = f"[{run.number}] " if len(self._runs) > 1 else ""
            yield f"{heading}{run.prompt}" + ("\n" if run.chat else "")
            written = 0
            while not run.finished or written < len(run.text):
                piece = run.text[written:]
                written += len(piece)  # before the yield: more text may have come when this goes on
                yield piece
            yield "\n\n"

    def __enter__(self) -> "PlainText":
        return self

    def refresh(self) -> None:
        """Write what is there, up to the end of the first prompt that still runs."""
        for piece in self._pieces:
            self._console.file.write(piece)
            if not piece:
                break
        self._console.file.flush()

    def __exit__(self, *exception: object) -> None:
        self._pieces.close()


def summary(runs: Sequence[Run]) -> Table:
    """A row per prompt: its layout, its tokens, its times."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=28)
    table.add_column("layout", overflow="fold", min_width=min(max(len(run.layout) for run in runs), 40))
    for name in ("prompt tokens", "new tokens", "first token ms", "tokens/s"):
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(
            str(run.number),
            Text(" ".join(run.prompt.split())),
            strip(run.layout),
            str(run.prompt_tokens),
            str(run.new_tokens),
            "" if run.first_token_us is None else f"{run.first_token_us / 1000:.0f}",
            "" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f}",
        )
    return table


def strip(layout: str) -> Text:
    """A layout as coloured cells, a letter per layer: A attention, S SSM."""
    return Text.assemble(*((letter, ROUTE_STYLES[letter]) for letter in layout))


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text file, separated by lines of --- if there are any, by blank lines otherwise."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--file {str(path)!r} cannot be read: {error}") from error
    has_rules = re.search(r"^---\s*$", text, re.MULTILINE)
    parts = re.split(r"^---\s*$" if has_rules else r"\n\s*\n", text, flags=re.MULTILINE)
    prompts = [part.strip("\n") for part in parts if part.strip()]
    if not prompts:
        raise ValueError(f"--file {str(path)!r} holds no prompt")
    return prompts


def parse_layout(text: str | None) -> Layout:
    """`--layout` as the engine takes it: a name for all layers, or a list of names."""
    if text is None or text == "adaptive":
        return None
    names = {"A": "attention", "S": "ssm", "?": "adaptive"}
    if text in ("attention", "ssm"):
        return text
    if "," in text:
        return [names.get(part.strip().upper(), part.strip()) for part in text.split(",")]
    if text and set(text.upper()) <= set(names):
        return [names[letter] for letter in text.upper()]
    raise ValueError(
        f"--layout {text!r} must be attention, ssm, a letter A, S or ? (the gate chooses) per layer, "
        "or a comma list of attention, ssm and adaptive"
    )


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> list[int]:
    """A prompt as token ids, as the user's turn of a chat where the model was trained for one."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def choose_device(name: str | None) -> torch.device:
    """The device of that name, checked; without a name CUDA where there is one."""
    cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if cuda else "cpu")
    if name != "cpu" and not (cuda and re.fullmatch(r"cuda(:\d+)?", name)):
        raise ValueError(f"--device {name!r} is not here: it must be {'cpu, cuda or cuda:N' if cuda else 'cpu'}")
    return torch.device(name)


def choose_threads(threads: int | None, model: FlexHybridModel) -> None:
    """Make torch work with so many threads; without a number, with one where the model is small."""
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads} must be at least 1")
    if threads is not None or model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(threads or 1)


def stop_token_ids(model: FlexHybridModel) -> tuple[int, ...]:
    """The tokens that end a text, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def warm_up(engine: Engine) -> None:
    """A few tokens by every route before the clock starts: the first call of a kernel compiles it."""
    for layout in ("attention", "ssm", None):
        for _ in engine.stream([0] * 4, SamplingParams(max_new_tokens=2), layout=layout):
            pass
