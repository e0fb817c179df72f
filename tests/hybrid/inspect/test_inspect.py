"""`hybrid inspect`: its page holds what one forward call of the whole text decides, and shows it."""

import base64
import json
import random
import re
import shutil
import string
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid.cli.main import main
from hybrid.generate import load_model
from hybrid.inspect import page
from hybrid.inspect import trace as reading
from hybrid.layers.kvm.mixer import positive_gate

from ..convert.hf.test_standalone import convert, model_folder

LETTERS = random.Random(0).choices(string.ascii_lowercase + "  ", k=500)
TEXT = "if a < b: print('</script><b>&amp;') # é 🙂\n" + "".join(LETTERS)
"""Without repeats, which would be equally like several slots: rounding would decide."""
QUERIES = 4


def converted(folder: Path, pattern: str) -> Path:
    """A model folder."""
    model_folder(folder / "weights", pattern)
    assert convert(folder / "weights", folder / "model", "--no-check") == 0
    return folder / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with two KVM layers (2 key/value heads of 4, chunk 16, window 32) around an RWKV-7 one."""
    return converted(tmp_path_factory.mktemp("inspect"), "KRK")


@pytest.fixture(scope="module")
def made(folder):
    """The page of TEXT, read in pieces that do not go with the chunks."""
    text, output = folder.parent / "a<b>.txt", folder.parent / "page.html"
    text.write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", 37)
        arguments = ["--text", str(text), "--output", str(output), "--queries", str(QUERIES)]
        assert main(["inspect", str(folder), *arguments]) == 0
    return output


def embedded(path: Path):
    """The page's description and arrays, as a browser finds them."""
    page = path.read_text(encoding="utf-8")
    (about,) = re.findall(r'<script type="application/json" id="about">(.*?)</script>', page)
    found = re.findall(r'<script type="text/plain" id="(.*?)">(.*?)</script>', page)
    return json.loads(about), {name: zlib.decompress(base64.b64decode(data)) for name, data in found}


@pytest.fixture(scope="module")
def whole(folder):
    """The model, its ids of TEXT and the routes of one forward call."""
    model, tokenizer = load_model(folder)
    ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(TEXT)]])
    routes: dict = {}
    with torch.no_grad():
        _, state = model(ids, routes=routes)
    return model, tokenizer, ids, routes, state


def test_slots_are_those_of_one_call_for_the_whole_text(made, whole):
    about, arrays = embedded(made)
    _, _, ids, routes, _ = whole
    assert about["tokens"] == ids.shape[1] > 200
    assert [one["layer"] for one in about["layers"]] == [0, 2]
    assert about["others"] == ["1 (rwkv7)"]
    for layer in (0, 2):
        for head in range(2):
            codes = np.frombuffer(arrays[f"slot-{layer}-{head}"], "<u4")
            assert (codes >> 1).tolist() == routes[layer].slot[0, head].tolist()
            assert (codes & 1).tolist() == routes[layer].founds[0, head].int().tolist()


def test_gates_are_the_layers_own(made, whole):
    model, _, ids, _, _ = whole
    seen = []
    hook = model.blocks[2].mixer.merge_gate.register_forward_hook(lambda *given: seen.append(given[2]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    for head in range(2):
        bits = np.frombuffer(embedded(made)[1][f"gate-2-{head}"], "<u2").astype("<u4") << 16
        wanted = positive_gate(seen[0])[0, :, head].numpy()
        np.testing.assert_allclose(bits.view("<f4"), wanted, rtol=2**-8)


def test_attention_of_the_last_token_is_what_its_output_is_made_of(whole):
    """Masses times the values that slots and window hold, against the operator's own output."""
    model, _, ids, _, _ = whole
    mixer = model.blocks[2].mixer
    outputs: list = []
    with torch.no_grad():
        hook = mixer.c_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
        queries: list = []
        before = mixer.register_forward_pre_hook(lambda _, given: queries.append(mixer.project(*given).q))
        _, state = model(ids)
        hook.remove()
        before.remove()
        operator = state.layers[2].mixer.operator
        slots, window = mixer.masses(queries[0][:, -1:], operator)
    torch.testing.assert_close(slots.sum(-1) + window.sum(-1), torch.ones(1, 4))
    assert slots.shape == (1, 4, mixer.spec.slots_at(ids.shape[1]))
    sums = operator.value_sums
    values = operator.radius * sums / sums.norm(dim=-1, keepdim=True)
    held = operator.window_v.transpose(1, 2)
    read = [mass[:, :, None] @ x.repeat_interleave(2, 1) for mass, x in ((slots, values), (window, held))]
    own = outputs[0][:, -1].unflatten(-1, (4, -1))
    torch.testing.assert_close((read[0] + read[1])[:, :, 0], own, atol=1e-5, rtol=1e-4)


def test_attention_is_kept_for_queries_at_equal_distances(made, whole):
    about, arrays = embedded(made)
    spec, count = whole[0].blocks[0].mixer.spec, about["tokens"]
    assert about["queries"] == [round((i + 1) * count / QUERIES) - 1 for i in range(QUERIES)]
    for index, query in enumerate(about["queries"]):
        mass = np.frombuffer(arrays[f"mass-0-1-{index}"], "<u2")
        start = spec.window_start(query + 1)
        assert len(mass) == (spec.slots_at(query + 1) if start else 0) + query + 1 - start
        assert int(mass.astype(int).sum()) == pytest.approx(65535, abs=len(mass))


def test_the_text_comes_back_and_none_of_it_is_html(made, whole):
    about, arrays = embedded(made)
    lengths = np.frombuffer(arrays["lengths"], "<u2")
    assert arrays["text"].decode() == TEXT
    assert lengths.sum() == len(TEXT.encode())
    assert lengths[0] == 0  # the begin token
    assert about["text"] == "a<b>.txt"
    page = made.read_text(encoding="utf-8")
    assert "<title>Memory of a&lt;b&gt;.txt</title>" in page
    assert "<b>" not in page
    assert "print(" not in page


def test_the_page_asks_for_nothing_from_elsewhere(made):
    page = made.read_text(encoding="utf-8")
    assert not re.findall(
        r"""(?:src|href|action)\s*=|url\(|@import|https?:|\bimport\b|XMLHttp|fetch\(""", page
    )
    assert "default-src 'none'" in page


NODE = """
const page = require('fs').readFileSync(process.argv[2], 'utf8'), made = {};
const data = /<script type="[^"]*" id="(.*?)">(.*?)<\\/script>/g;
for (const [, id, textContent] of page.matchAll(data)) made[id] = { textContent };
const node = tag => ({
  tag, dataset: {}, style: {}, children: [], textContent: '', value: '', className: '',
  classList: { toggle() {} }, scrollIntoView() {}, closest() { return null; },
  append(...all) { this.children.push(...all); }, replaceChildren(...all) { this.children = all; },
});
globalThis.document = { getElementById: id => made[id] ??= node(id), createElement: node };
made.sort = Object.assign(node('sort'), { value: 'fullness' });
const script = page.match(/<script>([^]*)<\\/script>/)[1].replace(/begin\\(\\)\\.catch[^]*$/, '');
const report = () => ({
  tokens: made.tokens.children.map(x => [x.children[0], x.className]),
  slots: made.slots.children.map(x => x.children.map(y => y.children[0])),
  card: document.getElementById('card').children.map(x => x.children[0]),
  ...Object.fromEntries(['summary', 'note', 'range'].map(id => [id, made[id].textContent])),
});
eval(script + `;(async () => {
  await begin();
  ${process.argv[3]};
  console.log(JSON.stringify(report()));
})()`);
"""


def shown(path: Path, steps: str = ""):
    """What the page's own script shows, run by node in place of a browser."""
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed, so the page's script cannot be run")
    done = subprocess.run([node, "-", path, steps], input=NODE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_token_is_coloured_by_where_it_is(made, whole):
    model, _, ids, routes, _ = whole
    found = shown(made)
    slot, founds = routes[0].slot[0, 0].tolist(), routes[0].founds[0, 0].tolist()
    start = model.blocks[0].mixer.spec.window_start(ids.shape[1])
    for p, (_, name) in enumerate(found["tokens"]):
        alone = slot[:start].count(slot[p]) == 1 if p < start else False
        own = "sink" if p == 0 else "own" if alone else "shared" if p < start and founds[p] else "merged"
        assert name == (own if p < start else "window"), p
    counts = sorted((slot[:start].count(s) for s in set(slot)), reverse=True)
    assert [row[1] for row in found["slots"]] == [str(n) for n in counts[:40]]
    assert not found["note"]


def test_an_earlier_time_and_a_query_are_shown(made, whole):
    about, _ = embedded(made)
    found = shown(made, "view.now = about.queries[1] + 1; await load(); showCard(3);")
    names = [name for _, name in found["tokens"]]
    assert names.index("later") == about["queries"][1] + 1
    assert f"Token {about['queries'][1]} puts" in found["summary"]
    assert any(line.startswith("merge gate") for line in found["card"])
    assert all(row[2].endswith(" %") for row in found["slots"])


def test_a_long_text_is_shown_page_by_page(folder, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text(TEXT * 10)
    told = page.inspect(folder, text, tmp_path / "long.html", queries=1, layers=[2])
    about, arrays = embedded(tmp_path / "long.html")
    assert f"{about['tokens']:,} tokens in the KVM layers 2" in told
    assert about["tokens"] > 2000
    assert {name.split("-")[1] for name in arrays if "-" in name} == {"2"}
    first = shown(
        tmp_path / "long.html", "document.onclick({ target: { dataset: { page: '-1' }, closest() {} } });"
    )
    assert len(first["tokens"]) == 2000
    assert first["range"] == f"tokens 2,000 to 3,999 of {about['tokens']:,}"


def test_a_text_within_the_window_says_so(folder, tmp_path, capsys):
    text, output = tmp_path / "short.txt", tmp_path / "short.html"
    text.write_text("a < b")
    assert main(["inspect", str(folder), "--text", str(text), "--output", str(output)]) == 0
    assert "all tokens are still in the window of layers 0, 2" in capsys.readouterr().out
    found = shown(output)
    assert {name for _, name in found["tokens"]} == {"window"}
    assert "reads no slot yet" in found["note"]


@pytest.mark.parametrize(
    ("content", "more", "reason"),
    [
        (b"", [], "is empty; there is nothing to inspect"),
        (b"\xff\xfea\0", [], "is not UTF-8 text but UTF-16"),
        (b"a", ["--layers", "1"], "1 is no KVM layer of this model; allowed: 0, 2"),
        (b"a", ["--layers", "x"], "'x' is not a whole number of 0 or more"),
        (b"a", ["--output", "text"], "it must be a file of its own"),
        (b"a", ["--queries", "0"], "'0' is not a whole number of 1 or more"),
    ],
)
def test_what_cannot_be_shown_is_said(folder, tmp_path, monkeypatch, capsys, content, more, reason):
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(content)
    assert main(["inspect", str(folder), "--text", "text", *more]) == 2
    assert reason in capsys.readouterr().err
    assert Path("text").read_bytes() == content
    assert not Path("inspect.html").exists()


def test_a_model_without_slots_and_a_text_too_long_are_refused(folder, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("a")
    plain = converted(tmp_path, "RF")
    assert main(["inspect", str(plain), "--text", str(text)]) == 2
    assert "no KVM layer, so there are no slots to show (it has full, rwkv7)" in capsys.readouterr().err
    monkeypatch.setattr(page, "LARGEST", 4)
    assert main(["inspect", str(folder), "--text", str(text), "--output", str(tmp_path / "x.html")]) == 2
    assert "choose fewer with --layers" in capsys.readouterr().err


def test_a_model_that_diverged_is_named_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    model, tokenizer = load_model(folder)
    with torch.no_grad():
        model.blocks[2].mixer.c_proj.weight[0, 0] = torch.nan
    monkeypatch.setattr(page, "load_model", lambda path: (model, tokenizer))
    text, output = tmp_path / "text", tmp_path / "x.html"
    text.write_text(TEXT)
    assert main(["inspect", str(folder), "--text", str(text), "--output", str(output)]) == 2
    assert "logits are not finite" in capsys.readouterr().err
    assert not output.exists()
