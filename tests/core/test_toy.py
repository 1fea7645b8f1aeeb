"""The toy data set: drawings and their captions, the stand-in codec and the stand-in encoders."""

import math
import threading

import numpy as np
import pytest
from conftest import MICRO
from run_files import contents
from shard_damage import every_sample, opened

from flux_ref import config_file, dataset, toy
from flux_ref.config import ModelConfig
from tools.prepare import __main__ as commands

WORDS = {word for drawing in toy.all_drawings() for word in drawing.caption.split()}


def test_encode_inverts_decode_and_keeps_flat_colours():
    grey = toy.encode(np.zeros((3, 32, 48), np.float32))
    mean = grey + 0.5 * np.random.default_rng(0).standard_normal(grey.shape).astype(np.float32)
    picture = toy.decode(mean)
    assert 0.1 < abs(picture).max() < 1, "this latent must not clip"
    np.testing.assert_allclose(toy.encode(picture), mean, atol=1e-5)
    for colour in toy.COLOURS.values():
        flat = np.broadcast_to(2 * np.array(colour)[:, None, None] - 1, (3, 16, 8))
        np.testing.assert_allclose(toy.decode(toy.encode(flat)), flat, atol=1e-5)


def test_held_out_has_each_colour_and_shape_once_and_training_has_the_rest():
    held_out = toy.held_out()
    everything = toy.all_drawings()
    assert len({drawing.caption for drawing in everything}) == 180
    assert len({(drawing.colour, drawing.shape) for drawing in held_out}) == len(held_out) == 18
    shown = set(everything) - set(held_out)
    assert len(shown) == 180 - 18, "held-out drawings are among all drawings"
    for drawings in (held_out, shown):  # training knows every word, and validation asks for it
        assert {word for drawing in drawings for word in drawing.caption.split()} == WORDS


def test_the_set_has_keys_timesteps_and_captions_and_training_never_shows_what_validation_asks_for(shapes_dir):
    train, val = ([meta for meta, _ in every_sample(shapes_dir / split)] for split in ("train", "val"))
    assert [(meta.key, meta.timestep) for meta in train] == [(f"train_{i:08d}", None) for i in range(50)]
    assert [(meta.key, meta.timestep) for meta in val] == [(f"val_{i:08d}", i % 8) for i in range(45)]
    held_out = {drawing.caption for drawing in toy.held_out()}
    assert {meta.caption for meta in val} <= held_out and not held_out & {meta.caption for meta in train}


def test_a_set_is_made_once_and_whole_or_not_at_all(micro, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    cfg = config_file.replace(micro, data__train=str(tmp_path / "new" / "set" / "train"), data__val="")
    new = tmp_path / "new"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dataset, "to_bf16_bits", interrupt)
        toy.ensure(cfg)
    assert not list(tmp_path.glob("new/[!.]*"))
    killed, other = new / ".set.0123abcd.flux_ref_partial", new / ".set.2.0123abcd.flux_ref_partial"
    for folder in (killed, other):  # of a killed job, and of a job that makes set.2 now
        folder.mkdir()
    write_empty = dataset.write_empty
    beside = threading.Thread(target=toy.ensure, args=(cfg,))
    made = []

    def beside_another(*args):
        """Another first start comes meanwhile, and waits."""
        made.append(args)
        beside.start()
        beside.join(0.5)
        assert beside.is_alive()
        monkeypatch.setattr(dataset, "write_empty", write_empty)
        write_empty(*args)

    monkeypatch.setattr(dataset, "write_empty", beside_another)
    toy.ensure(cfg)
    beside.join()
    assert {path.name for path in new.iterdir()} == {".set.lock", "set", other.name} and len(made) == 1
    assert len(opened(new / "set" / "train")) == micro.data.expected_train_samples
    assert commands.main(["shapes", f"--config={MICRO}", f"--out={tmp_path / 'made'}"]) == 0
    assert contents(tmp_path / "made" / "train") == contents(new / "set" / "train")
    assert commands.main(["shapes", f"--config={MICRO}", f"--out={tmp_path / 'made'}"]) == 2
    monkeypatch.setattr(dataset, "to_bf16_bits", interrupt)
    toy.ensure(cfg)


def test_drawings_are_where_and_what_their_captions_say():
    """The colour is at the named place, the background in the corner. The size of the ink is about right."""
    for drawing in toy.held_out():
        picture = (toy.render(drawing, 64, 80) + 1) / 2
        assert picture.shape == (3, 64, 80) and picture.dtype == np.float32
        x, y = toy.PLACES[drawing.place]
        np.testing.assert_allclose(picture[:, int(y * 64), int(x * 80)], toy.COLOURS[drawing.colour], atol=1e-6)
        np.testing.assert_allclose(picture[:, 0, 0], toy.BACKGROUND, atol=1e-6)
        ink = (abs(picture - toy.BACKGROUND).max(axis=0) > 0.05).mean()
        area = {"circle": math.pi, "square": 1.8**2, "triangle": 2.0}[drawing.shape] * toy.SIZES[drawing.size] ** 2
        assert ink == pytest.approx(area, rel=0.3), drawing.caption


def test_caption_encodings_are_the_same_in_every_process():
    """One vector a word, whatever the case; pinned, because a data set on disk was made with them."""
    t5, clip = toy.encode_caption("a Red circle", ModelConfig(text_tokens=5, t5_dim=6, clip_dim=4)).values()
    assert t5.shape == (5, 6) and clip.shape == (4,) and t5.dtype == clip.dtype == np.float32
    np.testing.assert_allclose(t5[1, :3], [-0.11212102, -0.37770814, 0.19347517], rtol=1e-5)
    np.testing.assert_allclose(t5[4, :3], [0.38186851, -0.00030607, -0.81482333], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(clip, [0.09850877, 0.4119615, 0.8492412, -0.34046832], rtol=1e-5)


def test_words_of_own_captions_that_share_letters_are_near():
    """The cosine of two words of n and m letters that share s trigrams is s / sqrt(n m) / 2: all parts are random."""
    wide = ModelConfig(text_tokens=1, t5_dim=4, clip_dim=8192)
    for one, other, own, cosine in (
        ("diamond", "diamonds", True, 6 / math.sqrt(7 * 8) / 2),
        ("ring", "cross", True, 0),
        ("diamond", "diamonds", False, 0),
    ):
        first, second = (toy.encode_caption(word, wide, own)["clip"] for word in (one, other))
        assert np.std(first) == pytest.approx(1, abs=0.05), one
        assert np.corrcoef(first, second)[0, 1] == pytest.approx(cosine, abs=0.05), (one, other)
