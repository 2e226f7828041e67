"Shakespeare: texts to windows, the reader, and a short run."

import gzip
import json

import pytest
import torch
from tables import tabled

from dpcomm.datasets import shakespeare


def decoded(ids) -> str:
    return "".join(shakespeare.SYMBOLS[j] for j in ids)


# ---- symbols and texts


def test_cleaned_text_is_encoded_in_leafs_order():
    assert shakespeare.encode_text(shakespeare.SYMBOLS).tolist() == [*range(80)]
    said = ["  To be,\nor  not\t", "to é be $ ."]
    assert shakespeare.clean_text(said) == "To be, or not to be ."
    assert shakespeare.clean_text([]) == "" and not len(shakespeare.encode_text(""))


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


def test_a_role_without_a_window_of_each_kind_is_refused():
    with pytest.raises(ValueError, match="a role has 170 characters, too few"):
        shakespeare.federate(TEXTS | {"short": "a" * 170}, "made", "made")


# ---- the file of roles


def roles(folder, texts):
    content = {"users": list(texts), "speeches": {k: [t] for k, t in texts.items()}}
    path = folder / shakespeare.FILE
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_a_broken_or_absent_file_of_roles(tmp_path):
    says = "put shakespeare_roles.json.gz .* into .*/shakespeare .*DPCOMM_DATA"
    with pytest.raises(FileNotFoundError, match=says):
        shakespeare.shakespeare(tmp_path)
    path = roles(tmp_path, TEXTS)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match="roles.json.gz cannot be unpacked"):
        shakespeare.read_roles(path)
    for content in (b"[]", b"{}", b"\xff", b'{"users": [3], "speeches": {}}'):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(
            ValueError, match="json.gz is not valid .*download it again"
        ):
            shakespeare.read_roles(path)
    path.write_bytes(gzip.compress(b'{"users": ["a"], "speeches": {}}'))
    assert shakespeare.read_roles(path) == {"a": ""}, "its digest says the rest"


def test_a_part_of_the_roles_is_refused(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    roles(tmp_path / "shakespeare", TEXTS)
    with pytest.raises(ValueError, match="roles.json.gz is not the published file"):
        shakespeare.shakespeare(tmp_path)
