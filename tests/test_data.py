"""The real Q, K, V: what they are said to be."""

import numpy as np
import pytest

from flashnumba.data import load_minilm


def test_shapes_and_types():
    data = load_minilm()
    for array in (data.q, data.k, data.v):
        assert array.shape == (3, 12, 512, 32)
        assert array.dtype == np.float16
        assert np.isfinite(array).all()
    assert data.layers.tolist() == [0, 3, 5]


def test_the_text_is_the_apache_licence():
    tokens = load_minilm().tokens
    assert len(tokens) == 512
    assert tokens[:6].tolist() == ["[CLS]", "apache", "license", "version", "2", "."]
    assert tokens[-1] == "[SEP]"


def test_one_head_reaches_79():
    greatest = np.array([[load_minilm().scores(layer, head).max() for head in range(12)] for layer in range(3)])
    assert np.unravel_index(greatest.argmax(), greatest.shape) == (0, 2)
    assert greatest.max() == pytest.approx(79.03, abs=0.05)
    assert np.delete(greatest, 2, axis=1).max() < 20


def test_scores_are_scaled_dot_products():
    data = load_minilm()
    one = sum(float(a) * float(b) for a, b in zip(data.q[1, 5, 17], data.k[1, 5, 400], strict=True)) / 32**0.5
    assert data.scores(1, 5)[17, 400] == pytest.approx(one, rel=1e-12)


def test_it_is_read_once_and_cannot_be_changed():
    assert load_minilm() is load_minilm()
    with pytest.raises(ValueError, match="read-only"):
        load_minilm().q[0, 0, 0, 0] = 1
