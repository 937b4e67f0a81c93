"""`flexops generate` as a person runs it: from arguments to what stands on the terminal."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import flexops
from flexops import cli
from flexops import kernels as fk
from flexops.runtime import Engine, EngineConfig, SamplingParams
from flexops.runtime.profiling import BranchProfile
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def flexops_command(monkeypatch, capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        device = (
            ["--device", "cpu"]
            if arguments[:1] in (("generate",), ("profile",)) and "--device" not in arguments
            else []
        )
        monkeypatch.setattr(sys, "argv", ["flexops", *map(str, arguments), *device])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as exit_, fk.backend("cpu"):
            cli.main()
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


def expected_text(folder: Path, prompt: str, tokens: int, **options: object) -> str:
    model, tokenizer = cli.loading.load(folder)
    ids = tokenizer(prompt)["input_ids"]
    params = SamplingParams(max_new_tokens=tokens, stop_token_ids=(tokenizer.eos_token_id,))
    with fk.backend("cpu"):
        *_, last = Engine(model).stream(ids, params, **options)
    return tokenizer.decode(last.token_ids, skip_special_tokens=True)


def rows(out: str) -> list[list[str]]:
    """The cells of the table's rows, from the layout on."""
    return [match.group(0).split() for match in re.finditer(r"\b[AS?]{3} .*\d", out)]


def test_one_prompt_streams_and_ends_with_a_table(flexops_command, folder):
    code, out, _ = flexops_command("generate", "--prompt", "hello", "--model", folder, "--max-new-tokens", 12)
    assert code == 0
    assert out.startswith("hello" + expected_text(folder, "hello", 12))
    ((layout, prompt_tokens, new_tokens, first_token_ms, tokens_per_s),) = rows(out)
    assert set(layout) <= {"A", "S"} and (prompt_tokens, new_tokens) == ("5", "12")
    assert float(first_token_ms) >= 0 and float(tokens_per_s) > 0
    assert re.search(r"12 tokens in [\d.]+ s: [\d.]+ tokens/s", out)


def test_several_prompts_from_file_and_command_line(flexops_command, folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("first\nsecond line\n\n\nanother one\n")
    arguments = ("--file", file, "--prompt", "third", "--model", folder, "--max-new-tokens", 6)
    code, out, _ = flexops_command("generate", *arguments)
    assert code == 0
    expected = ["first\nsecond line", "another one", "third"]
    text = "".join(f"[{i}] {p}{expected_text(folder, p, 6)}\n\n" for i, p in enumerate(expected, 1))
    assert out.startswith(text)
    assert [row[1:3] for row in rows(out)] == [["17", "6"], ["11", "6"], ["5", "6"]]


@pytest.mark.parametrize(
    ("given", "strip"),
    [("attention", "AAA"), ("ssm", "SSS"), ("ASA", "ASA"), ("asa", "ASA"), ("ssm,attention, ssm", "SAS")],
)
def test_layout(flexops_command, folder, given, strip):
    arguments = ("--prompt", "x", "--model", folder, "--max-new-tokens", 3, "--layout", given)
    code, out, _ = flexops_command("generate", *arguments)
    assert code == 0 and rows(out)[0][0] == strip


@pytest.mark.parametrize(("bias", "strip"), [(1e4, "AAA"), (-1e4, "SSS")])
def test_gate_bias(flexops_command, folder, bias, strip):
    code, out, _ = flexops_command(
        "generate", "--prompt", "x", "--model", folder, "--max-new-tokens", 3, "--gate-bias", bias
    )
    assert code == 0 and rows(out)[0][0] == strip


def test_sampling_depends_on_the_seed_alone(flexops_command, folder):
    def text(seed: int) -> str:
        _, out, _ = flexops_command(
            *("generate", "--prompt", "x", "--model", folder, "--max-new-tokens", 16),
            *("--temperature", "1.0", "--top-p", "0.9", "--seed", seed),
        )
        return out.partition("\n\n")[0]

    assert text(1) == text(1) != text(2)


def test_terminal_shows_panels():
    console = Console(force_terminal=True, width=60, color_system=None, record=True)
    runs = [
        cli.Run(i, f"prompt {i}", cli.TextStream(tiny.make_tokenizer()), chat=False, prompt_tokens=3, layout="ASA")
        for i in (1, 2)
    ]
    with cli.LivePanels(console, runs) as view:
        runs[0].text, runs[1].text = " and what follows", " [bold]is no markup[/bold]\x1b[2J"
        view.refresh()
    shown = console.export_text()
    assert "─ 1 ASA ─" in shown and "prompt 1 and what follows" in shown
    assert "prompt 2 [bold]is no markup[/bold]\ufffd[2J" in shown


def test_layout_strip_has_letters_and_colours():
    console = Console(force_terminal=True, color_system="standard", width=40)
    with console.capture() as capture:
        console.print(cli.strip("AS?"))
    text = capture.get()
    assert re.sub(r"\x1b\[[\d;]*m", "", text).strip() == "AS?"
    assert len(set(re.findall(r"\x1b\[[\d;]+m", text))) >= 3


def test_prompts_separated_by_rules(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\nstill one\n---\ntwo\n---\n")
    assert cli.read_prompts(file) == ["one\n\nstill one", "two"]


def test_version_and_help(flexops_command):
    assert flexops_command("--version")[:2] == (0, f"flexops {flexops.__version__}\n")
    code, out, _ = flexops_command()
    assert code == 0 and "generate" in out
    code, out, _ = flexops_command("generate", "--help")
    assert code == 0 and "--gate-bias" in out


BAD = {
    "no-prompt": ([], "no prompt"),
    "empty-prompt": (["--prompt", " "], "prompt is empty"),
    "no-file": (["--file", "nowhere.txt"], "nowhere.txt"),
    "no-model": (["--prompt", "x", "--model", "nowhere"], "'nowhere' is no folder"),
    "layout-word": (["--prompt", "x", "--layout", "fast"], "'fast'"),
    "layout-length": (["--prompt", "x", "--layout", "AS"], "3 layers"),
    "tokens": (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "temperature=-1"),
    "too-long": (["--prompt", "x" * 600], "max_model_len"),
    "device": (["--prompt", "x", "--device", "abacus"], "'abacus'"),
    "unknown-option": (["--prompt", "x", "--fast"], "--fast"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_mistakes_end_with_one_clear_line(flexops_command, folder, arguments, message):
    model = [] if "--model" in arguments else ["--model", folder]
    code, out, err = flexops_command("generate", *arguments, *model)
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err


PROFILE = ("--batches", 40, "--seconds", 0.1)


def test_profile_is_stored_beside_the_model_reported_and_used(flexops_command, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    mine = Path(shutil.copytree(folder, tmp_path / "mine"))
    code, out, _ = flexops_command("profile", mine, *PROFILE)
    assert code == 0 and not (tmp_path / "home").exists()
    (path,) = mine.glob("flexops-profile-*.json")
    stored = json.loads(path.read_text())
    assert stored["key"]["hidden_size"] == 32 and stored["key"]["mamba_n_heads"] == 4
    for name in ("attention", "ssm", "ffn"):
        error = stored["held_out"][name]
        assert error["count"] == 10 and 0 < error["median"] <= error["p90"]
        assert re.search(rf"{name} +{error['median']:.1%} +{error['p90']:.1%} +{error['spread']:.1%} +10\b", out)
    assert str(path) in out
    with fk.backend("cpu"):
        engine = Engine(cli.loading.load(mine)[0])
    assert engine.profile is not None and engine.profile.coefficients == stored["coefficients"]
    assert flexops_command("generate", "--prompt", "hello", "--model", mine, "--max-new-tokens", 3)[0] == 0


def test_profile_goes_where_it_is_sent_and_else_to_the_users_cache(flexops_command, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))  # somebody else's
    assert flexops_command("profile", folder, *PROFILE)[0] == 0
    (path,) = (tmp_path / "home" / "flexops" / "profiles").iterdir()
    with fk.backend("cpu"):
        assert Engine(cli.loading.load(folder)[0]).profile == BranchProfile.load(path)
    sent = tmp_path / "new" / "mine.json"
    assert flexops_command("profile", folder, *PROFILE, "--output", sent)[0] == 0
    with fk.backend("cpu"):
        engine = Engine(cli.loading.load(folder)[0], EngineConfig(profile=sent))
    assert engine.profile == BranchProfile.load(sent) != BranchProfile.load(path)
    assert flexops_command("profile", folder, *PROFILE, "--output", sent.parent)[0] == 0
    assert sorted(p.name for p in sent.parent.iterdir()) == [path.name, "mine.json"]
    assert flexops_command("profile", folder, *PROFILE, "--output", sent.parent / "deep")[0] == 0
    assert (sent.parent / "deep" / path.name).is_file()
    code, _, err = flexops_command("profile", folder, *PROFILE, "--output", sent / "below")
    assert code == 2 and "choose another --output" in err
    assert not list(folder.glob("flexops-profile-*"))


def test_a_profile_holds_for_engines_of_as_many_threads(flexops_command, folder, tmp_path):
    before = torch.get_num_threads()
    try:
        path = tmp_path / "two.json"
        assert flexops_command("profile", folder, *PROFILE, "--threads", 2, "--output", path)[0] == 0
        assert torch.get_num_threads() == 2 == json.loads(path.read_text())["key"]["threads"]
        with fk.backend("cpu"):
            engine = Engine(cli.loading.load(folder)[0], EngineConfig(profile=path))
            assert engine.profile == BranchProfile.load(path)
            torch.set_num_threads(1)
            with pytest.raises(ValueError, match="its threads is 2, here 1"):
                Engine(cli.loading.load(folder)[0], EngineConfig(profile=path))
        code, _, err = flexops_command("profile", folder, *PROFILE, "--threads", 0)
        assert code == 2 and "--threads 0 must be at least 1" in err
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("option", [("--batches", 39), ("--seconds", 0)])
def test_profile_refuses_too_little(flexops_command, folder, option):
    code, out, err = flexops_command("profile", folder, *option)
    assert code == 2 and out == "" and "must be at least 40" in err


def test_only_what_exists_is_offered():
    assert [command.callback.__name__ for command in cli.app.registered_commands] == ["generate", "profile"]
