"""The data preparation of `training/`, its fast scans, and the folders of the bundled models."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "training"
MODELS = ROOT / "src" / "replayssm" / "models"
FOLDERS = ("gdn-tiny", "mamba2-tiny", "kda-tiny", "gdn-draft")
BUNDLED = [name for name in FOLDERS if (MODELS / name / "config.json").is_file()]
MAX_FOLDER_BYTES = 6_000_000
RECORD_KEYS = {
    "family",
    "architecture",
    "parameters",
    "steps",
    "tokens",
    "final_loss",
    "train_seconds",
    "wall_seconds",
    "conditions",
    "command",
    "commit",
    "data_sha256",
    "settings",
    "evaluation",
}
FIGURE_KEYS = {"bits_per_byte", "known_word_share_sampled", "known_word_share_greedy", "samples"}

if not TRAINING.is_dir():
    pytest.skip("the training folder is not part of this distribution", allow_module_level=True)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of `training/`, which imports its neighbours by bare name."""
    monkeypatch.syspath_prepend(str(TRAINING))
    for other in ("data", "evaluate", "families", "recall", "scan", "study", "train"):
        monkeypatch.delitem(sys.modules, other, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("data", monkeypatch)


def test_html_keeps_prose_and_drops_navigation(data: ModuleType) -> None:
    page = """<html><head><title>no</title></head><body>
      <div class="sphinxsidebar"><p>a menu with many words in it</p></div>
      <h1>1.2. Reading files¶</h1><p>A file is read
      with the <code>open</code> function, isn’t it?</p><p>too short</p>
      <ul><li><p>One item that is long enough to keep.</p></li></ul>
      <pre>x = 1\n  y = 2\n</pre><script>var a = "a script that has many words";</script></body></html>"""
    assert data.html_to_text(page).split("\n\n") == [
        "Reading files",
        "A file is read with the open function, isn't it?",
        "One item that is long enough to keep.",
        "x = 1\n  y = 2",
    ]


def test_long_listings_are_left_out(data: ModuleType) -> None:
    assert data.clean_block("pre", "\n".join(["line"] * (data.MAX_CODE_LINES + 1))) == ""


def test_repeated_paragraphs_are_dropped_across_documents(data: ModuleType) -> None:
    shared = "This paragraph is the same in both documents, save for the number 12 and its spaces. "
    unique = [" ".join(f"{word}{i}" for i in "abcdefgh" * 12) for word in ("first", "second")]
    documents = [
        data.Document("s", "one", f"{shared}\n\n{unique[0]}"),
        data.Document("s", "two", f"{shared.upper()} 34\n\n{unique[1]}"),
    ]
    kept = list(data.deduplicate(documents))
    assert [document.name for document in kept] == ["one", "two"]
    assert kept[0].text == documents[0].text
    assert kept[1].text == unique[1]


def test_split_is_stable_and_disjoint(data: ModuleType) -> None:
    documents = [data.Document("source", f"page{i}", "text") for i in range(2000)]
    train, held_out = data.split(documents)
    assert len(train) + len(held_out) == len(documents)
    assert {d.name for d in train}.isdisjoint(d.name for d in held_out)
    assert 0.5 * data.HELDOUT_PERCENT < 100 * len(held_out) / len(documents) < 2 * data.HELDOUT_PERCENT
    assert data.split(documents[::2])[1] == [d for d in held_out if d in documents[::2]]


def test_known_words_need_three_occurrences(data: ModuleType) -> None:
    assert data.known_words(["The the file", "THE file rare"]) == ["the"]


def test_documents_survive_the_round_trip(data: ModuleType, tmp_path: Path) -> None:
    documents = [data.Document("s", "n", "some text\n\nmore")]
    data.write_documents(tmp_path / "d.gz", documents)
    first = (tmp_path / "d.gz").read_bytes()
    data.write_documents(tmp_path / "d.gz", documents)
    assert (tmp_path / "d.gz").read_bytes() == first
    assert data.read_documents(tmp_path / "d.gz") == documents


def test_known_word_share_leaves_cut_words_out(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = load("evaluate", monkeypatch)
    assert evaluate.known_word_share(["cut the blorp file cu"], {"the", "file"}) == pytest.approx(2 / 3)
    assert evaluate.known_word_share([""], {"the"}) == 0.0


def test_learning_rate_follows_the_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load("train", monkeypatch)
    assert train.learning_rate_at(0.0, 1.0, 0.1) == 0.0
    assert train.learning_rate_at(0.1, 1.0, 0.1) == pytest.approx(1.0)
    assert train.learning_rate_at(0.55, 1.0, 0.1) == pytest.approx(0.5)
    assert train.learning_rate_at(1.2, 1.0, 0.1) == pytest.approx(0.0)


def test_windows_do_not_overlap_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load("train", monkeypatch)
    batches = train.window_starts(total=1000, length=10, batch=7, seed=0)
    starts = sorted(int(s) for _ in range(13) for s in next(batches))
    assert all(b - a >= 10 for a, b in itertools.pairwise(starts))
    assert starts[-1] + 10 < 1000


@pytest.mark.parametrize("family", ["gdn", "mamba2", "kda"])
def test_fast_scans_equal_the_stock_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and every gradient agree to fp32 rounding: 80 tokens, so one whole chunk and a padded one.

    Measured: logits 2e-6, gradients 2e-5 (A_log and dt_bias, sums over all tokens with cancellation).
    """
    torch = pytest.importorskip("torch")
    scan, families = load("scan", monkeypatch), importlib.import_module("families")
    shape = {"hidden_size": 32, "intermediate_size": 32}
    if family == "mamba2":
        shape["hybrid_override_pattern"] = "M-*"
    else:
        shape |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        shape |= {"mlp_layer_types": ["dense", "dense"]} if family == "kda" else {}
    torch.manual_seed(0)
    model = families.build_model(family, 64, **shape).train()
    ids = torch.randint(0, 64, (2, 80))
    results = []
    for fast in (False, True):
        scan.use_fast_scans(families.FAMILIES[family].model_type, enable=fast)
        try:
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        finally:
            scan.use_fast_scans(families.FAMILIES[family].model_type, enable=False)
        results.append((logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (stock_logits, stock_grads), (fast_logits, fast_grads) = results
    assert (stock_logits - fast_logits).norm() <= 1e-5 * stock_logits.norm()
    for name, grad in stock_grads.items():
        assert (grad - fast_grads[name]).norm() <= 2e-4 * grad.norm() + 1e-9, name


def test_channel_decays_survive_a_step_that_forgets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step with decay exp(-200) next to slow ones: no exponent may overflow, be capped, or touch its neighbours."""
    torch = pytest.importorskip("torch")
    scan = load("scan", monkeypatch)
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 70, 2, 8) for _ in range(3))
    beta = torch.rand(1, 70, 2)
    g = -0.1 * torch.rand(1, 70, 2, 8)
    g[:, 5::7] = -200.0
    expected, state = recurrent_kimi_delta_attention(query, key, value, g, beta, None, True, True)
    out, fast_state = scan.fast_delta_rule(
        query, key, value, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert (out - expected).norm() <= 1e-4 * expected.norm()  # G reaches -1,400 within a chunk: fp32 steps of 1e-4
    assert (fast_state - state).norm() <= 1e-4 * state.norm()


def test_recall_rows_ask_for_what_they_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    recall = load("recall", monkeypatch)
    rows = recall.weave(np.arange(1, 20_000) % 99 + 1, 100, 40, 1025, np.random.default_rng(0), dense=0.5)
    store, ask = 100, 101
    answers = np.zeros(rows.tokens.shape, dtype=bool)
    for row, at, distance in rows.questions.tolist():
        marker, key, value = rows.tokens[row, at - 2 : at + 1].tolist()
        assert marker == ask
        assert rows.tokens[row, at - 2 - distance : at + 1 - distance].tolist() == [store, key, value]
        answers[row, at] = True
    assert (np.diff(rows.questions[:, 0]) >= 0).all()
    is_text = rows.tokens < 100
    assert (rows.weights[is_text] == 1).all()
    assert (rows.weights[~is_text & ~answers] == 0).all()
    assert np.allclose((rows.weights * answers).sum(1), is_text.sum(1), rtol=1e-4)
    stores = [rows.tokens[row, np.nonzero(rows.tokens[row] == store)[0] + 1] for row in range(40)]
    assert all(len(set(keys.tolist())) == len(keys) > recall.PAIRS / 8 for keys in stores)
    events = (rows.tokens[:, : 1024 : recall.CELL] >= 100).mean(1)
    assert 10 < (events == 1).sum() < 30
    assert np.allclose(events[events < 1], recall.EVENTS, atol=0.1)
    distances = rows.questions[:, 2]
    assert all(((distances >= a) & (distances < 4 * a)).sum() > 100 for a in (8, 32, 128))


SMALL = {"hidden_size": 32, "intermediate_size": 32}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
TOYS = {
    "gdn": SMALL | TWO | {f"linear_{what}_head_dim": 16 for what in ("key", "value")},
    "mamba2": SMALL | {"hybrid_override_pattern": "M-M-", "num_hidden_layers": 4, "ssm_state_size": 16},
    "kda": SMALL | TWO | {"mlp_layer_types": ["dense"] * 2, "linear_num_heads": 2, "linear_head_dim": 16},
}


@pytest.mark.parametrize("family", TOYS)
def test_study_runs(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole study of a toy on random text: every part is there."""
    study = load("study", monkeypatch)
    rng = np.random.default_rng(0)
    for name, count in (("train", 5000), ("heldout", 600)):
        rng.integers(1, 90, count).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": 90}))
    sizes = {"seconds": 0.2, "batch": 4, "length": 128, "rows": 8, "questions": 2, "tokens": 128, "sequences": 2}
    arguments = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    arguments += ["--family", family, "--data", str(tmp_path), "--device", "cpu", "--config", json.dumps(TOYS[family])]
    study.main([*arguments, "--out", str(tmp_path / "out"), "--long", "--long-tokens", "192"])
    found = json.loads((tmp_path / "out" / f"study-{family}.json").read_text())
    study.main([*arguments, "--out", str(tmp_path / "again"), "--trained", str(tmp_path / "out")])
    repeated = json.loads((tmp_path / "again" / f"study-{family}.json").read_text())
    assert [repeated[key] for key in ("training", "recall", "ratio")] == [
        found[key] for key in ("training", "recall", "ratio")
    ]
    assert found.keys() >= {"training", "text", "recall", "ratio", "long", "long_ratio", "conditions"}
    assert [row["precision"] for row in found["text"]["rows"]] == list(study.PRECISIONS)
    assert set(found["ratio"]["measured"]) == {name for name in study.PRECISIONS if "+" in name}
    assert len(found["recall"]["right"]) == len(study.PRECISIONS)
    lives = [life for layer in found["text"]["half_lives"] for life in layer]
    assert 128 < min(lives) < 512
    assert 8000 < max(lives) < 32000


def test_the_default_model_is_bundled() -> None:
    assert "gdn-tiny" in BUNDLED


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_folder_is_small_and_documented(name: str) -> None:
    folder = MODELS / name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_FOLDER_BYTES
    for file in (
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    ):
        assert (folder / file).is_file(), file
    record = json.loads((folder / "training.json").read_text())
    assert record.keys() >= RECORD_KEYS
    assert record["evaluation"].keys() >= FIGURE_KEYS
    assert {"device", "torch", "transformers"} <= record["conditions"].keys()


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_weights_are_bf16(name: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    with safe_open(MODELS / name / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((MODELS / name / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_tokenizer_round_trip(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
    text = "The open() function returns a file.\n\n    with open('naïve.txt') as f:\n\tprint(f.read())  # ≤ 3 lines\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == json.loads((MODELS / name / "config.json").read_text())["vocab_size"]
    assert tokenizer.eos_token_id == 0
