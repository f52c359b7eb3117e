"""`replayssm generate`: continue a text with an attached model, and compare with ordinary decoding if asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from replayssm import ReplayConfig, attach, detach, models, supported_families
from replayssm.cli.errors import DIFFERS_STATUS, CliError, first_line, reading
from replayssm.cli.speculate import Drafted, Guesser, Speculation, require_plain_logits, require_same_tokens
from replayssm.cli.speculate import run as speculate
from replayssm.recurrences.binding import bindings

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEAST_TEMPERATURE = 1e-30
"""Logits in fp32 that are divided by less may become infinite."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn, and the seed that makes the draw repeatable."""

    temperature: float
    top_p: float
    seed: int

    @staticmethod
    def choose(temperature: float | None, top_p: float | None, seed: int | None) -> Sampling | None:
        """The sampling that the options ask for; None is greedy."""
        if temperature is None and top_p is None:
            if seed is not None:
                raise CliError(
                    "--seed has no effect on greedy decoding; add --temperature or --top-p, or leave it out."
                )
            return None
        if temperature is not None and not temperature > 0:
            raise CliError(f"--temperature must be above 0, got {temperature:g}; leave it out for greedy decoding.")
        if temperature is not None and temperature < LEAST_TEMPERATURE:
            raise CliError(
                f"--temperature must be at least {LEAST_TEMPERATURE:g}, got {temperature:g}; leave it out for greedy "
                "decoding."
            )
        if top_p is not None and not 0 < top_p <= 1:
            raise CliError(f"--top-p must be above 0 and at most 1, got {top_p:g}.")
        if seed is None:
            seed = torch.Generator().seed() % 2**31
        if not -(2**63) <= seed < 2**64:
            raise CliError(f"--seed must fit in 64 bits, got {seed}.")
        return Sampling(temperature=temperature or 1.0, top_p=top_p or 1.0, seed=seed)


@dataclass(frozen=True)
class Request:
    """One call of the command, checked as far as is possible without loading the model."""

    prompt: str
    folder: Path
    max_new_tokens: int
    window: int
    precision: str
    sampling: Sampling | None
    speculation: Speculation | None
    compare: bool
    echo: bool
    device: str
    dtype: str

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise CliError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}.")
        if self.compare and self.sampling is not None and self.speculation is not None:
            raise CliError(
                "--compare has nothing to compare: sampling with drafts draws other random numbers; leave out "
                "--temperature and --top-p, or --speculate."
            )
        self.config()

    def config(self) -> ReplayConfig:
        try:
            if self.speculation is not None:
                return self.speculation.config(self.precision, self.window)
            return ReplayConfig.of(self.precision, window=self.window)
        except ValueError as error:
            raise CliError(f"{first_line(error)}.") from None

    @property
    def must_be_equal(self) -> bool:
        """Whether rounding leaves no excuse for another token; a sampled run has the same seed both times."""
        return self.dtype == "fp32" and self.precision == "fp32"


@dataclass(frozen=True)
class Decoded:
    tokens: list[int]
    seconds: float
    drafted: Drafted | None = None


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text to continue, from the argument or the file."""
    if prompt is not None and file is not None:
        raise CliError("Give the prompt as an argument or with --file, not both.")
    if prompt is None and file is None:
        raise CliError('There is no prompt; write it after the command ("replayssm generate TEXT") or name a --file.')
    source = "The prompt"
    if file is not None:
        source = "Standard input" if str(file) == "-" else f"The file {file}"
        prompt = _read_file(file).removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise CliError(f"{source} is empty; give at least one character to continue.")
    return prompt


def _read_file(file: Path) -> str:
    with reading(file, "the path given to --file"):
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")


def find_folder(model: str, option: str = "--model") -> Path:
    """The checkpoint folder that an option names."""
    if model in models.names():
        return models.path(model)
    folder = Path(model)
    bundled = ", ".join(models.names()) or "none"
    if not folder.exists():
        raise CliError(
            f"There is no checkpoint folder {model}; {option} takes a local folder or a bundled model ({bundled})."
        )
    if not (folder / "config.json").is_file():
        raise CliError(f"{model} is not a checkpoint folder: it has no config.json; save one with save_pretrained.")
    return folder


def choose_device(device: str | None) -> str:
    """The device asked for if it is there; without a wish, cuda if there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise CliError("--device cuda: torch sees no CUDA device here; use --device cpu.")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def run(request: Request) -> int:
    """Load, decode, report; the exit status."""
    console = Console(stderr=True, highlight=False, markup=False)
    with console.status(f"Loading {escape(request.folder.name)}"):
        tokenizer, model = load(request.folder, request.dtype, request.device)
        inputs = tokenizer(request.prompt, return_tensors="pt").to(request.device)
        check_tokens(inputs["input_ids"], model)
        handle = _attach(model, request.config())
        proposer, draft_handle = _proposer(request, tokenizer, model)
    if request.echo:
        sys.stdout.write(request.prompt)
    with out_of_memory_is_an_error():
        if request.speculation is None:
            replayed = decode(model, inputs, request, _streamer(tokenizer))
        else:
            replayed = decode_with_drafts(model, inputs, request, proposer, _streamer(tokenizer))
        _note(console, describe(request, replayed, handle.traffic()))
        if replayed.drafted is not None:
            draft_traffic = None if draft_handle is None else draft_handle.traffic()
            _note(console, describe_drafts(replayed.drafted, handle.traffic(), draft_traffic))
        detach(model)
        if not request.compare:
            return 0
        with console.status("Decoding again without ReplaySSM"):
            ordinary = decode(model, inputs, request, streamer=None)
    return compare(console, tokenizer, request, replayed, ordinary)


def load(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """The tokenizer and the model of a checkpoint folder; nothing is looked up on a network."""
    import transformers
    from safetensors import SafetensorError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_class = _find_class(folder)
    if not (any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))):
        # transformers would go on with an empty vocabulary.
        raise CliError(f"{folder} holds no tokenizer; save the model's tokenizer there with save_pretrained.")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CliError(
            f"The tokenizer in {folder} cannot be loaded ({first_line(error)}); copy or save it again."
        ) from None
    try:
        model, report = model_class.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CliError(
            f"The model in {folder} cannot be loaded ({first_line(error)}); copy or save it again."
        ) from None
    if report["missing_keys"]:
        # transformers would go on with random numbers in their place.
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise CliError(f"The checkpoint in {folder} is incomplete: it lacks {missing}; copy or save it again.")
    with out_of_memory_is_an_error():
        return tokenizer, model.to(device).eval()


def _find_class(folder: Path) -> Any:
    """The class that loads the folder's model. One that cannot be replayed is refused before its weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    families = f"supported families: {', '.join(supported_families())}"
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CliError(
            f"{folder / 'config.json'} describes no model that can be loaded ({first_line(error)}); {families}."
        ) from None
    for model_class in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                skeleton = model_class.from_config(config)
        except ValueError:
            continue  # no model of this kind
        if bindings().keys().isdisjoint(type(module).__name__ for module in skeleton.modules()):
            _attach(skeleton, ReplayConfig())  # knows the reason
        return model_class
    raise CliError(f"Models of type {config.model_type} do not write text; {families}.")


def _attach(model: Any, config: ReplayConfig) -> Any:
    try:
        return attach(model, config)
    except ValueError as error:
        raise CliError(f"{first_line(error)}.") from None


def check_tokens(input_ids: torch.Tensor, model: Any) -> None:
    if input_ids.numel() == 0:
        raise CliError("The prompt has no token in this model's vocabulary; give another text.")
    vocab_size = model.get_input_embeddings().num_embeddings
    if int(input_ids.max()) >= vocab_size:
        raise CliError(
            f"The tokenizer in the folder belongs to another model: it gives token {int(input_ids.max())}, "
            f"and the model has {vocab_size}; save the right one beside the weights."
        )


def decode(model: Any, inputs: Any, request: Request, streamer: Any) -> Decoded:
    """Continue the prompt; the same call whether or not the model is attached."""
    options: dict[str, Any] = {"do_sample": False}
    if request.sampling is not None:
        sampling = request.sampling
        torch.manual_seed(sampling.seed)
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    prompt_len = inputs["input_ids"].shape[1]
    begin = time.perf_counter()
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=request.max_new_tokens,
        num_beams=1,
        streamer=streamer,
        **options,
    )
    tokens = output[0, prompt_len:].tolist()
    return Decoded(tokens=tokens, seconds=time.perf_counter() - begin)


def _proposer(request: Request, tokenizer: Any, model: Any) -> tuple[Any, Any]:
    """Who drafts, and the handle of the draft model if there is one."""
    speculation = request.speculation
    if speculation is None:
        return None, None
    require_plain_logits(model.generation_config, request.sampling is not None)
    from replayssm.decode import DraftModel, PromptLookup

    if speculation.guesser is Guesser.ngram:
        return PromptLookup(branches=speculation.branches), None
    folder = speculation.draft_folder or models.path(models.DRAFT)
    draft_tokenizer, draft = load(folder, request.dtype, request.device)
    require_same_tokens(tokenizer, draft_tokenizer)
    handle = _attach(draft, request.config())
    vocabulary = model.get_output_embeddings().weight.shape[0]  # padded, perhaps otherwise than the draft model's
    return DraftModel(draft, speculation.branches, _draws(request), vocabulary), handle


def _draws(request: Request) -> Any:
    """The sampling of the request as the decode loop takes it, None for greedy."""
    from replayssm.decode import Sampling as Draws

    sampling = request.sampling
    return None if sampling is None else Draws(sampling.temperature, sampling.top_p, sampling.seed)


def decode_with_drafts(model: Any, inputs: Any, request: Request, proposer: Any, streamer: Any) -> Decoded:
    """Continue the prompt in rounds of drafts."""
    assert request.speculation is not None
    prompt = inputs["input_ids"][0].tolist()
    begin = time.perf_counter()
    drafted = speculate(model, prompt, request.max_new_tokens, proposer, request.speculation, _draws(request), streamer)
    return Decoded(tokens=drafted.tokens, seconds=time.perf_counter() - begin, drafted=drafted)


def _streamer(tokenizer: Any) -> Any:
    """Writes the new text to standard output as it becomes certain."""
    from transformers import TextStreamer

    return TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


@contextmanager
def out_of_memory_is_an_error() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise CliError(
            "The GPU has too little memory for this model; try --dtype bf16, fewer tokens or --device cpu."
        ) from None


def describe(request: Request, decoded: Decoded, traffic: Any) -> str:
    """The summary line: speed, and the state's bytes against ordinary decoding."""
    moved = traffic.read_bytes + traffic.written_bytes
    ordinary = [traffic.ordinary_read_bytes, traffic.ordinary_written_bytes]
    if decoded.drafted is not None:  # which decodes the tokens of the text, and no drafts
        ordinary = [count * (len(decoded.tokens) - 1) // max(1, traffic.tokens) for count in ordinary]
    line = (
        f"{_speed(decoded)} on {request.device}, {request.dtype}, window {request.window}; "
        f"state bytes read {format_bytes(traffic.read_bytes)} and written {format_bytes(traffic.written_bytes)}, "
        f"ordinary decoding {format_bytes(ordinary[0])} and {format_bytes(ordinary[1])}"
    )
    if moved:
        line += f": {sum(ordinary) / moved:.2f} times as many"
    if request.sampling is not None:
        line += f"; seed {request.sampling.seed}"
    return line


def describe_drafts(drafted: Drafted, traffic: Any, draft_traffic: Any) -> str:
    """The line about the drafts: how many were right, and the steps and bytes that they saved."""
    steps, after_prompt = drafted.steps, len(drafted.tokens) - 1
    share = f" ({drafted.accepted / drafted.drafted:.0%})" if drafted.drafted else ""
    line = f"drafts: {drafted.accepted} of {drafted.drafted} accepted{share}"
    if steps:
        line += f", {after_prompt / steps:.2f} tokens per step; {steps} steps, {after_prompt - steps} saved"
    line += f"; a state saved per draft would have written {format_bytes(traffic.ordinary_written_bytes)}"
    if draft_traffic is not None:
        moved = format_bytes(draft_traffic.read_bytes + draft_traffic.written_bytes)
        line += f"; the draft model moved {moved} of its own states"
    return line


def compare(console: Console, tokenizer: Any, request: Request, replayed: Decoded, ordinary: Decoded) -> int:
    """Say whether both runs wrote the same tokens; the exit status."""
    times = f"replayed {replayed.seconds:.2f} s, ordinary {ordinary.seconds:.2f} s"
    if replayed.tokens == ordinary.tokens:
        _note(console, f"identical to ordinary decoding: all {len(ordinary.tokens)} tokens; {times}")
        return 0
    at = first_difference(replayed.tokens, ordinary.tokens)
    ours, theirs = (_token_text(tokenizer, run.tokens, at) for run in (replayed, ordinary))
    _note(console, f"differs from ordinary decoding at new token {at + 1}: {ours} instead of {theirs}; {times}")
    return DIFFERS_STATUS if request.must_be_equal else 0


def first_difference(left: list[int], right: list[int]) -> int:
    """Index of the first token in which two unequal sequences differ; where one goes on, the other's length."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _token_text(tokenizer: Any, tokens: list[int], at: int) -> str:
    return repr(tokenizer.decode(tokens[at : at + 1])) if at < len(tokens) else "the end of the text"


def _speed(decoded: Decoded) -> str:
    count = len(decoded.tokens)
    return f"{count} tokens in {decoded.seconds:.2f} s ({count / decoded.seconds:.1f} tok/s)"


def format_bytes(count: int) -> str:
    """A byte count in the decimal unit that leaves one to three digits before the point."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _note(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True)
