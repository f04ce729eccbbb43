"""The command line."""

import pytest
import torch
from safetensors.torch import load_file

import msa_ext
from msa_ext.__main__ import main
from msa_ext.demo import select_blocks
from msa_ext.packs import load_packs


def test_demo_passes_and_saves(tmp_path, capsys):
    path = tmp_path / "gradients.safetensors"
    assert main(["demo", "--tokens", "300", "--device", "cpu", "--save", str(path)]) == 0
    text = capsys.readouterr().out
    assert "PASS" in text and "FAIL" not in text and "every token and key" in text
    saved = load_file(path)
    assert saved["dq"].shape == (300, 64, 128) and saved["dk"].shape == saved["dv"].shape == (300, 4, 128)
    assert all(torch.isfinite(x).all() and x.any() for x in saved.values())


def test_demo_samples_when_large(capsys):
    assert main(["demo", "--pack", "pack_48", "--tokens", "700", "--device", "cpu", "--seed", "3"]) == 0
    assert "sampled tokens" in capsys.readouterr().out


def test_demo_fails_on_wrong_gradients(monkeypatch, capsys):
    from msa_ext import demo

    right = demo.run_backward
    monkeypatch.setattr(demo, "run_backward", lambda *a: tuple(1.05 * x for x in right(*a)))
    assert main(["demo", "--tokens", "64", "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--pack", "pack_0"], "--pack: expected one of pack_11, pack_12"),
        (["--save", "no/such/folder/x.safetensors"], "--save: expected a file in an existing folder, got no/such"),
        (["--save", "."], r"--save: expected a file, got the folder \."),
        (["--seed", "99999999999999999999999"], r"--seed: expected a value in \[-2\*\*63, 2\*\*64 - 1\], got 9999"),
        (["--tokens", "0"], r"--tokens: expected a value in \[1, 196608\], got 0"),
    ],
)
def test_demo_rejects(arguments, message, capsys, monkeypatch):
    from msa_ext import demo

    monkeypatch.setattr(demo, "select_blocks", lambda *a, **k: pytest.fail("computed before the options were checked"))
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", *arguments])
    assert exit_info.value.code == 2
    import re

    assert re.search(message, capsys.readouterr().err)


def test_a_gpu_without_a_backend(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert main(["demo", "--tokens", "64"]) == 0
    assert "device     CPU, backend reference" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_info:
        main(["demo", "--tokens", "64", "--device", "cuda"])
    assert exit_info.value.code == 2
    assert "--device: expected a GPU that a built backend runs on for cuda, got none" in capsys.readouterr().err


def test_help(capsys):
    for arguments in (["--help"], ["demo", "--help"], ["info", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 0
    assert "token budget" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"msa_ext {msa_ext.__version__}\n"


def test_demo_shows_its_progress(capsys):
    assert main(["demo", "--tokens", "64", "--device", "cpu"]) == 0
    bars = capsys.readouterr().err
    assert all(f"{name}:" in bars for name in ("select", "forward", "backward", "check"))


def test_info(capsys):
    assert main(["info"]) == 0
    assert "reference" in capsys.readouterr().out


def test_selection_is_the_indexers():
    """Block scores are maxima over visible keys; the own block is always there."""
    lengths = [300, 2500]
    q, k = torch.randn(2800, 1, 128), torch.randn(2800, 1, 128)
    topk = select_blocks(q, k, lengths)[0]
    for token, begin in ((299, 0), (300 + 2300, 300), (300 + 5, 300)):
        local = token - begin
        scores = k[begin : token + 1, 0] @ q[token, 0]
        best = [float(part.max()) for part in scores.split(128)]
        best[local // 128] = float("inf")
        expected = sorted(range(len(best)), key=lambda b: -best[b])[:16]
        chosen = [b for b in topk[token].tolist() if b >= 0]
        assert set(chosen) == set(expected)


def test_packs_ship_with_the_package():
    packs = load_packs()
    assert set(packs) == {"pack_11", "pack_12", "pack_18", "pack_37", "pack_48"}
    for pack in packs.values():
        assert pack.cu_seqlens[-1] == sum(pack.document_lengths()) == 196_608
        assert sum(pack.document_lengths(1000)) == 1000
