"Shakespeare: texts to windows, the reader, and a short run."

import gzip
import json

import pytest
import torch
from conftest import or_skip
from tables import tabled

from dpcomm.datasets import shakespeare
from dpcomm.datasets.images import data_root


def decoded(ids) -> str:
    return "".join(shakespeare.SYMBOLS[j] for j in ids)


# ---- symbols and texts


def test_the_alphabet_is_leafs():
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    symbols = "\n !\"&'(),-.0123456789:;>?" + letters + "[]" + letters.lower() + "}"
    assert shakespeare.SYMBOLS == symbols and len(set(symbols)) == 80
    assert shakespeare.encode_text(symbols).tolist() == list(range(80))
    assert shakespeare.encode_text("").shape == (0,)


def test_cleaning_leaves_one_line_of_the_alphabet():
    said = ["  To be,\nor  not\t", "to é be $ ."]
    assert shakespeare.clean_text(said) == "To be, or not to be ."
    assert shakespeare.clean_text([]) == ""


# ---- windows


@tabled("n", [811, 843, 5000])
def test_no_test_window_holds_a_character_of_training(n):
    k, start = shakespeare.split_windows(n)
    assert k == int(0.9 * n) and start < n
    assert start == k + 80, "training reads and predicts up to character k + 79"


TEXTS = shakespeare.synthetic_roles(3, 950)


def test_a_federation_holds_the_windows_of_the_texts():
    whole = shakespeare.federate(TEXTS, "made", "made")
    data, start, test = whole.data, 0, []
    for text, part in zip(TEXTS.values(), whole.parts):
        k, first = shakespeare.split_windows(len(text) - 80)
        assert part.tolist() == list(range(start, start + k))
        for i in (0, k // 2, k - 1):
            assert decoded(data.x[start + i]) == text[i : i + 80]
            assert decoded([data.y[start + i]]) == text[i + 80]
        test += [text[i : i + 81] for i in range(first, len(text) - 80)]
        start += len(text)
    tests = zip(data.x_test, data.y_test)
    assert [decoded([*x, y]) for x, y in tests] == test and data.y.dtype == torch.int64
    assert data.x.dtype == torch.uint8 and data.x.stride() == (1, 1)
    assert data.x.untyped_storage().nbytes() == start, "windows are views of the text"


def test_the_made_text_is_learnable_and_its_own():
    made = shakespeare.synthetic_roles
    assert made(2) == made(2) != made(2, seed=1)
    found = list(made(4, 900).values())
    assert [len(t) for t in found] == [900, 1125, 1350, 1575]
    assert set("".join(found).split()[:50]) <= set(shakespeare.WORDS)


# ---- the file of roles


def roles(folder, texts):
    content = {"users": list(texts), "speeches": {k: [t] for k, t in texts.items()}}
    path = folder / shakespeare.FILE
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_a_broken_or_absent_file_of_roles(tmp_path):
    says = "put shakespeare_roles.json.gz into .*/shakespeare .*DPCOMM_DATA"
    with pytest.raises(FileNotFoundError, match=says):
        shakespeare.shakespeare(tmp_path)
    path = roles(tmp_path, TEXTS)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="roles.json.gz cannot be unpacked"):
        shakespeare.read_roles(path)


def test_a_part_of_the_roles_is_refused_unless_asked_for(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    roles(tmp_path / "shakespeare", TEXTS)
    says = "has 3 roles of 1 plays.*; the whole file has 1339 of 37 .* pass whole=False"
    with pytest.raises(ValueError, match=says):
        shakespeare.shakespeare(tmp_path)
    assert len(shakespeare.shakespeare(tmp_path, 2, whole=False).parts) == 2


def test_the_real_roles_are_counted():
    real = or_skip(shakespeare.shakespeare)
    gap = abs(real.sizes.sum() - 3_678_451)
    assert len(real.parts) == 660 and 20 * gap < 3_678_451, "the paper's within 5 %"
    texts = shakespeare.read_roles(data_root() / "shakespeare" / shakespeare.FILE)
    chosen = shakespeare.longest_roles(texts)
    assert min(map(len, chosen.values())) == 924
    assert max(len(t) for u, t in texts.items() if u not in chosen) <= 924
    assert real.sizes.tolist() == [int(0.9 * (len(t) - 80)) for t in chosen.values()]
