"""Image editing, partial images and the world model of the page, in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mstar_core.messages.requests import NewRequest
from tests.api.live import live_api
from tests.fakes.any_model import PIXELS, png
from tests.fakes.any_model import SPEC as ANY
from tests.fakes.conductor import FakeDeployment
from tests.fakes.drawing_model import SPEC as DRAWING
from tests.fakes.drawing_model import Easel
from tests.web.conftest import OpenTab
from tests.web.devtools import Tab
from tests.web.test_page import WIDTHS, button, check_fits, check_quiet, open_page

pytestmark = pytest.mark.browser

PANEL = "document.querySelector('[role=tabpanel]:not([hidden])')"
GRAY = """(() => {
  const shown = document.querySelector('SELECTOR');
  if (!shown?.naturalWidth) return -1;
  const canvas = new OffscreenCanvas(1, 1).getContext('2d');
  canvas.drawImage(shown, 0, 0);
  return canvas.getImageData(0, 0, 1, 1).data[0];
})()"""


def choose(page: Tab, title: str) -> None:
    """Open a tab of the page."""
    page.value(f"[...document.querySelectorAll('[role=tab]')].find(e => e.textContent === {title!r}).click()")


def gray(selector: str) -> str:
    """Return an expression: the red value of an image's first pixel, -1 without an image."""
    return GRAY.replace("SELECTOR", selector)


def check_end(page: Tab, url: str) -> None:
    """Check the width, the console and the origins; the fakes have no supervisor, so its views refuse."""
    check_fits(page)
    page.problems = [each for each in page.problems if "/console/" not in each]
    check_quiet(page, url)


def test_steps_and_partial_images_are_shown_while_an_image_is_drawn(tab: OpenTab) -> None:
    easel = Easel()
    with live_api(easel, DRAWING) as api:
        page = tab(820)
        open_page(page, api.url)
        choose(page, "Images")
        button(page, "Make")
        easel.step(1, 4)
        page.until(f"{PANEL}.innerText.includes('Step 1 of 4')")
        assert page.value("(({value, max, hidden}) => [value, max, hidden])(document.querySelector('progress'))") == [
            1,
            4,
            False,
        ]
        easel.partial(40)
        page.until(f"{gray('img.partial')} === 40")
        assert page.value("document.querySelector('img.partial').alt") == "The image so far"
        easel.step(3, 4)
        easel.partial(90)
        page.until(f"{gray('img.partial')} === 90")
        assert page.value("document.querySelectorAll('img.picture').length") == 1
        assert "Download PNG" not in page.value(f"{PANEL}.innerText")
        easel.finish(200)
        page.until(f"{gray('img.picture:not(.partial)')} === 200")
        assert page.value("document.querySelectorAll('img.picture').length") == 1
        text = page.value(f"{PANEL}.innerText")
        assert "16 × 8" in text and "Download PNG" in text
        assert page.until("document.querySelector('progress').hidden")
        check_end(page, api.url)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_dropped_image_is_edited(width: int, tab: OpenTab, tmp_path: Path) -> None:
    picture = tmp_path / "boat.png"
    picture.write_bytes(png(PIXELS))
    easel = Easel()
    with live_api(easel, DRAWING) as api:
        page = tab(width)
        open_page(page, api.url)
        choose(page, "Images")
        page.value(f"""(() => {{
          const bytes = Uint8Array.from({list(picture.read_bytes())});
          const dropped = new DataTransfer();
          dropped.items.add(new File([bytes], 'boat.png', {{type: 'image/png'}}));
          const drop = new DragEvent('drop', {{dataTransfer: dropped, cancelable: true}});
          {PANEL}.querySelector('.drop').dispatchEvent(drop);
        }})()""")
        page.until(f"{PANEL}.querySelector('.thumb img').naturalWidth === {PIXELS.shape[1]}")
        assert page.value(f"{PANEL}.querySelector('.primary').textContent") == "Edit"
        button(page, "Edit")
        easel.finish(120)
        page.until(f"{gray('img.picture:not(.partial)')} === 120")
        assert easel.prompt.startswith(f"[image {PIXELS.shape[1]}x{PIXELS.shape[0]}]")
        button(page, "OpenAI")
        assert "client.images.edit" in page.value("document.querySelector('.snippet pre').textContent")
        assert "Edit" in page.value("document.querySelector('#recent').innerText")
        page.click(".thumb button")
        assert page.value(f"{PANEL}.querySelector('.primary').textContent") == "Make"
        check_end(page, api.url)


def test_a_chosen_file_of_another_kind_is_refused(tab: OpenTab, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("no image")
    with live_api(Easel(), DRAWING) as api:
        page = tab(390)
        open_page(page, api.url)
        choose(page, "Images")
        page.upload("[role=tabpanel]:not([hidden]) input[type=file]", note)
        page.until(f"{PANEL}.innerText.includes('Only image files fit here.')")
        assert page.value(f"{PANEL}.querySelector('.primary').textContent") == "Make"


FORM = f"{PANEL}.querySelector('form:not([hidden])')"


def task(page: Tab, title: str) -> None:
    """Choose a task of the world model."""
    page.value(
        f"(e => {{ e.value = {title!r}; e.dispatchEvent(new Event('change')); }})({PANEL}.querySelector('select'))"
    )


GRID = (2, 4, 4)
LEFT, RIGHT = [1.0, 0, 0, 2.0, 0, 0, 0, 1.0], [0, 3.0, 1.0, 0, 0, 1.0, 0, 0]
BEST = 3


def world(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: features that differ between the halves of each frame, or energies of eight candidates by step."""
    if request.params.get("task") == "encode":
        times, height, across = GRID
        row = [LEFT] * (across // 2) + [RIGHT] * (across // 2)
        features = np.array([row * height * times], dtype=np.float32)
        fake.output(request.handle, "tensor", features, port="features", meta={"grid": list(GRID)})
    else:
        for step in range(2):
            energies = np.abs(np.arange(8, dtype=np.float32) - BEST) + step
            fake.output(request.handle, "tensor", energies, port="energies")
        fake.output(request.handle, "scalar", np.array([BEST], dtype=np.int64), port="best_index")
    fake.finish(request.handle)


@pytest.mark.parametrize("width", WIDTHS)
def test_features_of_a_clip_become_colours_and_energies_a_plot(width: int, tab: OpenTab) -> None:
    with live_api(world, ANY, unknown_params="warn") as api:
        page = tab(width)
        open_page(page, api.url)
        choose(page, "World model")
        button(page, "Run")
        page.until(f"{PANEL}.innerText.includes('Add a clip')")
        button(page, "Sample clip")
        page.until(f"{PANEL}.querySelectorAll('.thumb img').length === 4")
        button(page, "Run")
        page.until("document.querySelectorAll('canvas.pixels').length === 2")
        colours = page.value(
            "[...document.querySelectorAll('canvas.pixels')].map(e => {"
            " const data = e.getContext('2d').getImageData(0, 0, 4, 4).data;"
            " return [[0, 0], [1, 3], [2, 1], [3, 3]].map(([x, y]) => [...data.slice(16 * y + 4 * x).slice(0, 4)]"
            ".join()) })"
        )
        for left, below, right, far in colours:
            assert (left, right) == (below, far)
            assert left != right
        assert colours[0] == colours[1]
        task(page, "Energies of candidates")
        button(page, "Sample frame")
        button(page, "Sample goal")
        page.until(f"{FORM}.querySelectorAll('.thumb img').length === 2")
        button(page, "Run")
        page.until(f"{FORM}.innerText.includes('Candidate {BEST} ends nearest to the goal.')")
        marked = page.value(
            f"[...{FORM}.querySelectorAll('svg.plot')].map(e => [...e.querySelectorAll('circle')]"
            ".map(c => Number(c.getAttribute('r'))))"
        )
        assert marked == [[6 if each == BEST else 3 for each in range(8)]] * 2
        assert (
            page.value(f"{FORM}.querySelectorAll('svg.plot path').length") == 0
        )  # a line would join independent candidates
        check_end(page, api.url)


def test_a_failure_clears_the_figures_of_the_run_before(tab: OpenTab) -> None:
    with live_api(world, ANY, unknown_params="warn") as api:
        page = tab(820)
        open_page(page, api.url)
        choose(page, "World model")
        button(page, "Sample clip")
        page.until(f"{PANEL}.querySelectorAll('.thumb img').length === 4")
        button(page, "Run")
        page.until(f"{FORM}.querySelector('.figures dd').textContent !== '–'")
        page.until(f"!{FORM}.querySelector('.primary').disabled")
        page.value(f"{FORM}.querySelectorAll('.thumb button').forEach(e => e.click())")
        button(page, "Run")
        page.until(f"{FORM}.querySelector(':scope > .error').textContent.includes('Add a clip')")
        assert page.value(f"[...{FORM}.querySelectorAll('.figures dd')].map(e => e.textContent).join('')") == "––"
        assert page.value(f"{FORM}.querySelectorAll('canvas.pixels').length") == 0
