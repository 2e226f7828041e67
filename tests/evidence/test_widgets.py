"The pictures that a reader can change: true at the start, and drawn alike by the script."

import html
import math
import re
from statistics import NormalDist

import browser
import pytest
from tables import tabled

from dpcomm.evidence import widgets
from dpcomm.mechanisms import imvu

MADE = {
    "odds": (widgets.odds, [(1.5, 4), (0.0, 1), (3.0, 7)]),
    "coin": (widgets.coin, [(4.0, 1.5), (0.25, 0.25), (2.0, 2.0)]),
    "guess": (widgets.guess, [(1.0,), (0.0,), (5.0,)]),
}


def paths(text: str) -> dict:
    "Class -> path of every curve of a picture."
    found = re.findall(r'<path class="(\w+)" d="([^"]*)"', text)
    assert found and len(dict(found)) == len(found)
    return dict(found)


def test_the_odds_are_those_of_the_algorithm():
    "No update, no preference; many candidates, the target; few, a bias towards the prior."
    assert "picked 1.00 times" in widgets.odds(0.0, 5).sentence
    means = []
    for bits in (1, 4, 7):
        found = re.search(r"the pick is ([\d.]+) on", widgets.odds(1.0, bits).sentence)
        means.append(float(found[1]))
    assert means == sorted(means) and 0.9 < means[-1] < 1.0
    z = NormalDist().inv_cdf(0.75)
    assert means[0] == round(z * math.tanh(z), 2), "two candidates, by hand"


def test_the_coin_is_the_chapters():
    for eps, beta in ((2.0, 1.0), (0.5, 2.0)):
        high, (low, up), top = imvu.closed_form(eps)
        picture = widgets.coin(eps, beta)
        said = f"plus or minus {(up - low) / beta:.2f} clips"
        assert said in picture.sentence
        assert f"multiplier {2 / (eps * beta):.2f}" in picture.sentence
        points = picture.curves["coin"][0][1:].split("L")
        for point in points[::30]:
            x, y = map(float, point.split())
            u = (x - 160) / 90
            assert abs((220 - y) / 190 - high(0.5 + beta * u / 2)) < 0.003
        bound = float(picture.curves["bound"][0].split()[-1])
        assert abs((220 - bound) * 16 / 190 - top * beta**2 / 4) < 0.01


def test_nobody_guesses_better_than_randomised_response_allows():
    assert "50.0 %" in widgets.guess(0.0).sentence
    assert f"{100 * math.e / (1 + math.e):.1f} %" in widgets.guess(1.0).sentence


@tabled("name", MADE)
def test_a_picture_stands_without_scripts_and_asks_nobody(name):
    make, settings = MADE[name]
    for given in settings:
        text = make(*given)._repr_html_()
        bare = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
        assert "<figcaption>" in bare and "aria-label" in bare and paths(bare)
        assert "nan" not in bare and not re.search(r"https?://(?!www\.w3\.org)", text)
        assert repr(make(*given)).startswith(name)


@pytest.mark.deep
@pytest.mark.parametrize("name", MADE)
def test_the_script_draws_what_python_draws(name, tmp_path):
    "At the first settings before a reader moves anything, and at others after."
    if not browser.BROWSER:
        pytest.skip("NOT CHECKED: no Chromium here, scripts were not run")
    make, settings = MADE[name]
    for i, given in enumerate(settings):
        move = "".join(
            f"inputs[{k}].value = {value}; inputs[{k}].dispatchEvent(new Event('input'));"
            for k, value in enumerate(given)
        )
        page = tmp_path / f"{i}.html"
        page.write_text(
            f"<!doctype html><meta charset=utf-8>{make()._repr_html_()}<script>const inputs ="
            f" document.querySelectorAll('input'); {move}</script>",
            encoding="utf-8",
        )
        seen = browser.dump(page.as_uri(), seconds=5)
        assert seen.count('data-drawn="alike"') == 1
        wanted = make(*given)
        assert paths(seen) == {n: path for n, (path, *_) in wanted.curves.items()}
        assert html.escape(wanted.sentence, quote=False) in seen
