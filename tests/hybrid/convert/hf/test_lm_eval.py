"""lm-eval's `hf` model type runs our folders, by its own command line, whatever the batch."""

import json
import os
import subprocess
import sys

import pytest
import torch
import yaml

from hybrid.cli.main import main
from hybrid.data.tokenizer import Tokenizer

from .test_standalone import model_folder

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'kvm-hybrid[eval]'")

ROWS = [
    {"start": "def read(self", "endings": ["):", " banana"], "right": 0},
    {"start": "import", "endings": [" os", " self.assertEqual(1)"], "right": 0},
    {"start": "class", "endings": [" Foo(object):\n    pass", " 1"], "right": 1},
]
CHOICE = {"task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{endings}}",
          "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
WRITE = {"task": "write", "output_type": "generate_until", "doc_to_target": "{{start}}",
         "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
         "metric_list": [{"metric": "exact_match"}]}  # fmt: skip
COMMANDS = {"hybrid": "import hybrid", "standalone": "import sys; sys.modules['hybrid'] = None"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Local tasks, and a model as a standalone folder."""
    folder = tmp_path_factory.mktemp("lm_eval")
    (folder / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    files = {"data_files": {"test": str(folder / "rows.json")}}
    common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "target_delimiter": "",
              "doc_to_text": "{{start}}"}  # fmt: skip
    for task in (CHOICE, WRITE):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(common | task))
    model = model_folder(folder / "ours", "KRF").eval()
    options = ("--to", "hf", "--standalone", "--no-check")
    assert main(["convert", str(folder / "ours"), str(folder / "model"), *options]) == 0
    return folder, model


def evaluate(folder, way, batch):
    """Run both tasks by lm-eval's command line; returns the answers to each."""
    out = folder / f"{way}{batch}"
    arguments = f"pretrained={folder / 'model'},dtype=float32" + (
        ",trust_remote_code=True" * (way != "hybrid")
    )
    code = f"{COMMANDS[way]}; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", "hf", "--model_args", arguments, "--device", "cpu",
         "--tasks", "choice,write", "--include_path", str(folder), "--batch_size", str(batch),
         "--output_path", str(out), "--log_samples"],
        capture_output=True, text=True,
        env=os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for task in ("choice", "write"):
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda one: one["doc_id"])
        found[task] = [one["filtered_resps"] for one in samples]
    return found


@pytest.mark.slow
def test_both_kinds_of_folders_give_the_models_own_likelihoods_for_any_batch(place):
    folder, model = place
    tokenizer = Tokenizer.load(folder / "ours")
    runs = [evaluate(folder, way, batch) for way, batch in (("hybrid", 1), ("hybrid", 8), ("standalone", 8))]
    assert runs[0]["write"] == runs[1]["write"] == runs[2]["write"]
    for row, *found in zip(ROWS, *(run["choice"] for run in runs), strict=True):
        start = [tokenizer.bos_id, *tokenizer.encode(row["start"])]
        for ending, *answers in zip(row["endings"], *found, strict=True):
            ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(row["start"] + ending)]])
            with torch.no_grad():
                logs = model(ids)[0].log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
            wanted = logs[len(start) - 1 :].sum().item()
            assert [float(one[0]) for one in answers] == pytest.approx([wanted] * 3, rel=1e-4)
