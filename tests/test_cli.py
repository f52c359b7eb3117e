"""The command line: what it writes where, its exit status, and a clear sentence for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.text import Text
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import LlamaConfig, MambaConfig, PretrainedConfig, PreTrainedTokenizerFast, ViTConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from typer.testing import CliRunner

from replayssm import __version__, models, supported_families
from replayssm.cli import evaluate as evaluating
from replayssm.cli import generate as generating
from replayssm.cli.app import app
from replayssm.planner.model import known_configs

PROMPT = "A ring holds the last few tokens."
END = "<end>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(token_models.BPE(vocab={char: i for i, char in enumerate([END, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def redraw(model: torch.nn.Module) -> None:
    """Weights with which the recurrent state matters: with the default initialisation a wrong state goes unseen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(torch.empty_like(parameter).uniform_(-1, 1, generator=generator))
            elif parameter.ndim >= 2:
                parameter.copy_(torch.empty_like(parameter).normal_(0, 0.15, generator=generator))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("checkpoint") / "tiny-hybrid")


def save_hybrid(folder: Path, key_dim: int = 16) -> Path:
    """A tiny hybrid model with its tokenizer, saved as a user would save one."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config)
    redraw(model)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def invoke(*arguments: Any, **options: Any) -> Any:
    """Run the command; an exception that is not an exit is a fault of the command and fails the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refusal(*arguments: Any, **options: Any) -> str:
    """The one sentence that a mistaken call gets."""
    result = invoke("generate", *arguments, **options)
    assert result.exit_code == 2
    assert result.stdout == "", "standard output carries nothing but text"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert re.fullmatch(r"Error: .+[.]", lines[0])
    return lines[0]


# generate: what it writes


def test_generate_writes_text_to_stdout_and_one_summary_line_to_stderr(checkpoint: Path) -> None:
    result = invoke("generate", PROMPT, "--model", checkpoint, "-n", 20, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    expected = plain_text(checkpoint, PROMPT, 20)
    assert result.stdout == expected + "\n"
    (summary,) = result.stderr.strip().splitlines()
    assert re.match(r"20 tokens in \d+\.\d\d s \(\d+\.\d tok/s\) on cpu, fp32, window 16; ", summary)
    assert re.search(r"state bytes read .* and written .*, ordinary decoding .*: \d+\.\d\d times as many", summary)


def plain_text(folder: Path, prompt: str, count: int) -> str:
    """What transformers alone writes."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("window", [1, 4, 16])
def test_compare_finds_both_identical(checkpoint: Path, window: int) -> None:
    result = invoke("generate", PROMPT, "-m", checkpoint, "-n", 40, "--window", window, "--compare", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert re.search(
        r"identical to ordinary decoding: all 40 tokens; replayed \d+\.\d\d s, ordinary \d+\.\d\d s", result.stderr
    )


def test_fewer_state_bytes_are_written_with_a_window(checkpoint: Path) -> None:
    """The reason for all this, as the summary reports it."""
    result = invoke("generate", PROMPT, "-m", checkpoint, "-n", 64, "--device", "cpu")
    written, ordinary = re.search(r"and written (\S+ \w+), .* and (\S+ \w+):", result.stderr).groups()
    assert _as_bytes(written) < _as_bytes(ordinary)


def _as_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_compare_reports_the_first_difference_and_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_ordinary_run(monkeypatch, at=5)
    result = invoke("generate", PROMPT, "-m", checkpoint, "-n", 12, "--compare", "--device", "cpu")
    assert result.exit_code == 1
    assert re.search(r"differs from ordinary decoding at new token 6: '.*' instead of '.*'; replayed", result.stderr)


def test_a_difference_is_reported_but_allowed_when_rounding_may_cause_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_ordinary_run(monkeypatch, at=5)
    arguments = ["-m", checkpoint, "-n", 12, "--compare", "--device", "cpu", "--precision", "bf16"]
    result = invoke("generate", PROMPT, *arguments)
    assert result.exit_code == 0
    assert "differs from ordinary decoding at new token" in result.stderr


def _spoil_ordinary_run(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Change one token of the run that has no streamer, which is the ordinary one."""
    decode = generating.decode

    def spoiled(model: Any, inputs: Any, request: Any, streamer: Any) -> Any:
        decoded = decode(model, inputs, request, streamer)
        if streamer is None:
            decoded.tokens[at] = (decoded.tokens[at] + 1) % 257
        return decoded

    monkeypatch.setattr(generating, "decode", spoiled)


def test_first_difference() -> None:
    assert generating.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert generating.first_difference([1, 2], [1, 2, 3]) == 2


def test_prompt_comes_from_a_file_less_its_last_line_break(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    arguments = ["-m", checkpoint, "-n", 12, "--device", "cpu"]
    from_argument = invoke("generate", PROMPT, *arguments).stdout
    assert from_argument
    assert invoke("generate", "--file", file, *arguments).stdout == from_argument
    assert invoke("generate", "--file", "-", *arguments, input=PROMPT + "\n").stdout == from_argument
    assert invoke("generate", PROMPT, "--echo", *arguments).stdout == PROMPT + from_argument


def test_sampling_repeats_with_its_seed(checkpoint: Path) -> None:
    def sample(*more: Any) -> Any:
        return invoke("generate", PROMPT, "-m", checkpoint, "-n", 24, "--device", "cpu", *more)

    first = sample("--temperature", 1.3, "--seed", 5)
    assert first.exit_code == 0, first.stderr
    assert first.stderr.strip().endswith("; seed 5")
    assert sample("--temperature", 1.3, "--seed", 5).stdout == first.stdout
    assert sample("--temperature", 1.3, "--seed", 6).stdout != first.stdout
    unseeded = sample("--top-p", 0.9)
    (seed,) = re.search(r"; seed (\d+)$", unseeded.stderr.strip()).groups()
    assert sample("--top-p", 0.9, "--seed", seed).stdout == unseeded.stdout


def test_sampling_compares_with_the_same_seed(checkpoint: Path) -> None:
    arguments = ["-m", checkpoint, "-n", 24, "--temperature", 0.8, "--seed", 3, "--compare", "--device", "cpu"]
    assert "identical to ordinary decoding: all 24 tokens" in invoke("generate", PROMPT, *arguments).stderr


def test_bundled_model_is_the_default() -> None:
    assert models.DEFAULT in models.names()
    result = invoke("generate", "The function returns", "-n", 8, "--compare", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "identical to ordinary decoding" in result.stderr


# generate: what it refuses


def test_window_0_is_refused(checkpoint: Path) -> None:
    assert "window must be in 1..64, got 0" in refusal(PROMPT, "-m", checkpoint, "--window", 0)


def test_no_token_wanted_is_refused(checkpoint: Path) -> None:
    assert "--max-new-tokens must be at least 1, got 0" in refusal(PROMPT, "-m", checkpoint, "-n", 0)


def test_prompt_mistakes_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "The prompt is empty" in refusal("")
    assert f"{empty} is empty" in refusal("--file", empty)
    assert "Standard input is empty" in refusal("--file", "-", input="")
    assert "There is no prompt" in refusal()
    assert "not both" in refusal(PROMPT, "--file", empty)
    assert f"There is no file {tmp_path / 'absent.txt'}" in refusal("--file", tmp_path / "absent.txt")
    assert "is not UTF-8 text" in refusal("--file", binary)
    assert "cannot be read: Is a directory" in refusal("--file", tmp_path)


def test_checkpoint_mistakes_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert f"There is no checkpoint folder {absent}" in refusal(PROMPT, "-m", absent)
    assert models.DEFAULT in refusal(PROMPT, "-m", "no-such-model"), "the bundled models are named"
    assert "it has no config.json" in refusal(PROMPT, "-m", tmp_path)
    assert "it has no config.json" in refusal(PROMPT, "-m", checkpoint / "config.json")

    (tmp_path / "config.json").write_text("{}")
    assert "describes no model that can be loaded" in refusal(PROMPT, "-m", tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "describes no model that can be loaded" in refusal(PROMPT, "-m", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    assert "abacus" in refusal(PROMPT, "-m", tmp_path)

    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert f"{tmp_path} holds no tokenizer" in refusal(PROMPT, "-m", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert f"The tokenizer in {tmp_path} cannot be loaded" in refusal(PROMPT, "-m", tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert f"The model in {tmp_path} cannot be loaded" in refusal(PROMPT, "-m", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    assert f"The model in {tmp_path} cannot be loaded" in refusal(PROMPT, "-m", tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """transformers would fill the gap with random numbers and go on."""
    from safetensors.torch import load_file, save_file

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("linear_attn.A_log"))
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"is incomplete: it lacks {gone}" in refusal(PROMPT, "-m", tmp_path)


def test_the_tokenizer_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    message = refusal(PROMPT, "-m", with_a_word_more(checkpoint, tmp_path))
    assert "belongs to another model: it gives token 257, and the model has 257" in message


def with_a_word_more(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with a tokenizer that knows a word that the model does not."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["ring"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=32, num_attention_heads=2),
            "no recurrent layer",
        ),
        (MambaConfig(vocab_size=257, hidden_size=32), "no decayed sum of rank-1 terms"),
        (ViTConfig(hidden_size=32), "Models of type vit do not write text"),
    ],
    ids=["attention only", "out of form", "no text"],
)
def test_unsupported_model_is_refused_with_the_families(config: PretrainedConfig, reason: str, tmp_path: Path) -> None:
    """Before its weights are read: there are none in the folder."""
    config.save_pretrained(tmp_path)
    message = refusal(PROMPT, "-m", tmp_path)
    assert reason in message
    for family in supported_families():
        assert family in message


def test_cuda_without_a_device_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device" in refusal(PROMPT, "-m", checkpoint, "--device", "cuda")


def test_sampling_mistakes_are_refused() -> None:
    assert "--temperature must be above 0, got 0" in refusal(PROMPT, "--temperature", 0)
    assert "--temperature must be above 0, got nan" in refusal(PROMPT, "--temperature", "nan")
    assert "--top-p must be above 0 and at most 1, got 1.5" in refusal(PROMPT, "--top-p", 1.5)
    assert "--temperature must be at least 1e-30, got" in refusal(PROMPT, "--temperature", "1e-320")
    assert "--seed must fit in 64 bits" in refusal(PROMPT, "--temperature", 1, "--seed", 2**64)
    assert "--seed has no effect on greedy decoding" in refusal(PROMPT, "--seed", 1)


def test_the_state_is_kept_as_asked() -> None:
    result = invoke("generate", PROMPT, "-n", 4, "--precision", "fp32+nvfp4", "--device", "cpu")
    assert result.exit_code == 0
    assert "checkpoint_format must be one of fp64, fp32" in refusal(PROMPT, "--precision", "int3")
    assert "read_format fp32 is not smaller than checkpoint_format fp32" in refusal(PROMPT, "--precision", "fp32+fp32")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--window", "many"],
        ["--dtype", "fp8"],
        ["--device", "tpu"],
        ["--no-such-option"],
    ],
)
def test_a_value_of_the_wrong_kind_is_a_usage_error(arguments: list[str]) -> None:
    result = invoke("generate", PROMPT, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert arguments[0] in result.stderr


# eval


def test_eval_compares_precisions_on_a_text(checkpoint: Path, tmp_path: Path) -> None:
    text, out, drawn = tmp_path / "text.txt", tmp_path / "out.json", tmp_path / "out.png"
    text.write_text(PROMPT * 5)
    arguments = ["-m", checkpoint, "--tokens", 60, "--sequences", 2, "-p", "fp32+nvfp4", "-p", "fp8-stochastic"]
    pytest.importorskip("matplotlib")
    result = invoke("eval", text, *arguments, "--json", out, "--plot", drawn, "--device", "cpu")
    assert result.exit_code == 0, result.output
    for word in ("fp32+nvfp4", "fp8-stochastic", "2 x 60 tokens, window 16"):
        assert word in result.stdout
    found = json.loads(out.read_text())
    assert [row["precision"] for row in found["text"]["rows"]] == ["fp32", "fp32+nvfp4", "fp8-stochastic"]
    assert found["conditions"]["dtype"] == "fp32"
    assert drawn.stat().st_size > 1000


def test_eval_answers_questions(checkpoint: Path, tmp_path: Path) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out.json"
    line = {"question": "A ring holds", "choices": [" tokens", " gold"], "answer": 0}
    questions.write_text((json.dumps(line) + "\n") * 3)
    result = invoke("eval", "--questions", questions, "-m", checkpoint, "--json", out, "--device", "cpu")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert (found["questions"]["count"], "text" in found) == (3, False)
    assert {row["precision"] for row in found["questions"]["rows"]} > {"fp32", "nvfp4", "fp32+nvfp4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "There is nothing to evaluate"),
        (["nowhere.txt"], "There is no file nowhere.txt; check the path[.]$"),
        (["--questions", "nowhere.jsonl"], "There is no file nowhere.jsonl; check the path[.]$"),
        (["."], "The file [.] cannot be read: Is a directory[.]$"),
        (["pyproject.toml", "-p", "fp5"], "--precision fp5: checkpoint_format must be one of"),
        (["pyproject.toml", "-p", "nvfp4+nvfp4"], "--precision nvfp4.nvfp4: .* too coarse to drive the recurrence"),
        (["pyproject.toml", "-p", "fp64"], "--precision fp64: a checkpoint in fp64 is for verification"),
        (["pyproject.toml", "-p", "fp64+nvfp4"], "--precision fp64.nvfp4: a checkpoint in fp64 is for verification"),
        (["pyproject.toml", "--window", 0], "Error: --window must be in 1..64, got 0[.]$"),
        (["pyproject.toml", "--tokens", 1], "--tokens must be at least 2"),
        (["pyproject.toml", "--tokens", 10**6], "asked for; lower --tokens or --sequences, or take a longer text"),
        (["--questions", "q", "--plot", "p.png"], "--plot draws what a text gives"),
    ],
)
def test_eval_says_what_is_wrong(arguments: list[Any], message: str, checkpoint: Path) -> None:
    root = Path(__file__).parents[1]
    arguments = [root / a if a == "pyproject.toml" else a for a in arguments]
    result = invoke("eval", *arguments, "-m", checkpoint, "--device", "cpu")
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.stderr.split())), result.stderr


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--json", "absent/out.json", "there is no folder .*absent; make it first"),
        ("--plot", "absent/out.png", "there is no folder .*absent; make it first"),
        ("--json", ".", "this is a folder; name a file"),
        ("--plot", "out.abacus", "the name of an image ends in one of .*[.]png"),
    ],
)
def test_eval_looks_at_its_outputs_before_it_runs(
    option: str, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(evaluating, "load", None)
    refused = eval_refusal(Path(__file__), option, tmp_path / name)
    assert re.match(f"Error: {option} ", refused)
    assert re.search(message, refused)


def test_eval_refuses_formats_that_do_not_fit_the_model(tmp_path: Path) -> None:
    folder = save_hybrid(tmp_path, key_dim=24)
    message = eval_refusal(Path(__file__), "-m", folder, "--tokens", 40)
    assert "--precision nvfp4 does not fit this model: nvfp4 keeps key rows in blocks of 16, and key_dim 24" in message
    assert invoke("eval", Path(__file__), "-m", folder, "--tokens", 40, "-p", "fp16", "--device", "cpu").exit_code == 0


def test_eval_refuses_the_tokenizer_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    folder = with_a_word_more(checkpoint, tmp_path)
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    text.write_text(PROMPT)
    questions.write_text(json.dumps({"question": "a", "choices": ["b", "ring"], "answer": 0}))
    for arguments in ([text, "--tokens", 16], ["--questions", questions]):
        message = eval_refusal(*arguments, "-m", folder)
        assert "belongs to another model: it gives token 257, and the model has 257" in message


def test_eval_refuses_questions_by_line(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    for content, message in (
        (b'{"question": "", "choices": ["a"], "answer": 0}', f"line 1 of {path}: the question or one of"),
        (b'{"question": "a", "choices": ["b"], "answer": 1e999}', f"line 1 of {path} is no "),
        (b"\xff", f"{path} is not UTF-8 text"),
    ):
        path.write_bytes(content)
        assert message in eval_refusal("--questions", path)


def eval_refusal(*arguments: Any) -> str:
    """The one sentence that a mistaken call gets."""
    result = invoke("eval", *arguments, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.strip().splitlines()
    assert re.fullmatch(r"Error: .+[.]", line)
    return line


# info and the rest


def test_info_shows_versions_back_ends_families_and_models() -> None:
    result = invoke("info")
    assert result.exit_code == 0
    for word in ("replayssm", torch.__version__, "transformers", "cuda", "triton", models.DEFAULT):
        assert word in result.stdout
    for family in supported_families():
        assert family in result.stdout


def test_info_as_json() -> None:
    facts = json.loads(invoke("info", "--json").stdout)
    sizes = {row["name"]: row["bytes"]["qwen3.5-122b-a10b"] for row in facts["precisions"]}
    assert sizes["fp32"]["read"] == 64 * 128 * 128 * 4
    assert sizes["fp32+nvfp4"]["read"] == sizes["nvfp4"]["read"] == 64 * (64 * 128 + 8 * 128 + 4 * 128)
    assert sizes["fp32+nvfp4"]["slot"] > sizes["fp32"]["slot"] > sizes["fp8+nvfp4"]["slot"]
    assert "nvfp4+nvfp4" not in sizes
    assert facts["versions"]["replayssm"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["families"] == list(supported_families())
    assert {back_end["name"]: back_end["available"] for back_end in facts["back_ends"]}["cpu"] is True
    (bundled,) = (model for model in facts["models"] if model["name"] == models.DEFAULT)
    assert bundled["bytes"] <= 8_000_000
    assert bundled["parameters"] > 1_000_000
    assert 0 < bundled["bits_per_byte"] < 8


def test_an_unknown_bundled_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no bundled model is called 'nobody'; there are: "):
        models.path("nobody")


def test_version() -> None:
    assert invoke("--version").stdout == f"replayssm {__version__}\n"


def test_help_lists_the_commands() -> None:
    result = invoke("--help")
    assert "generate" in result.stdout
    assert "info" in result.stdout


def test_help_is_shown_as_it_is_written() -> None:
    """Rich takes words in brackets for markup and leaves them out."""
    found, waiting = [], [typer.main.get_command(app)]
    while waiting:
        command = waiting.pop()
        found += [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        waiting += getattr(command, "commands", {}).values()
    texts = [text for text in found if text]
    assert len(texts) > 50
    assert [Text.from_markup(text).plain for text in texts] == texts


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "model[new]"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known_configs()["qwen3.5-4b"]))
    assert "model[new]: 4.21 B weights" in invoke("plan", folder, "-b", 1).stdout


def test_the_installed_command_reaches_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm.cli import main

    monkeypatch.setattr("sys.argv", ["replayssm", "--version"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
