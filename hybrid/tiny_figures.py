"""The tiny vision task: figures drawn on the spot, to be read with visible working.

    a figure with 4 dots and the digit 7        prompt "dots+digit="        completion "4+7#11"

The first number is counted, the second one is read, their sum follows from the text alone: only two tokens of a
response hang on the picture. At a tenth of its size nothing of a figure can be told but how dark it is.
"""

import random
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import datasets
from PIL import Image, ImageDraw

from hybrid.errors import ConfigError, DataError
from hybrid.tiny_tasks import VISION_TASKS, Split, split_of

PROMPT = "dots+digit="
SIDE = 32
"""Pixels of a figure's side."""

COLUMNS, ROWS, CELL = 2, 4, 8
"""Dots stand in the left half, each in a cell of its own."""

MOST_DOTS = 6
DIGIT_LEFT, DIGIT_TOP, STROKE = 20, 8, 7
"""Upper left corner of the digit, and the length of one of its seven strokes."""

STROKES = MappingProxyType(
    {
        "top": ((0, 0), (1, 0)),
        "upper left": ((0, 0), (0, 1)),
        "upper right": ((1, 0), (1, 1)),
        "middle": ((0, 1), (1, 1)),
        "lower left": ((0, 1), (0, 2)),
        "lower right": ((1, 1), (1, 2)),
        "bottom": ((0, 2), (1, 2)),
    }
)
WITHOUT: tuple[frozenset[str], ...] = (
    frozenset({"middle"}),
    frozenset(STROKES) - {"upper right", "lower right"},
    frozenset({"upper left", "lower right"}),
    frozenset({"upper left", "lower left"}),
    frozenset({"top", "lower left", "bottom"}),
    frozenset({"upper right", "lower left"}),
    frozenset({"upper right"}),
    frozenset({"upper left", "middle", "lower left", "bottom"}),
    frozenset(),
    frozenset({"lower left"}),
)
"""The strokes that each digit leaves out, as on a pocket calculator."""


@dataclass(frozen=True)
class Figure:
    """Dots to be counted beside a digit to be read.

    Attributes:
      dots: centre of each dot in pixels.
      digit: 0 to 9.
      corner: upper left corner of the digit in pixels.
    """

    dots: tuple[tuple[int, int], ...]
    digit: int
    corner: tuple[int, int]

    @property
    def answer(self) -> str:
        """Dots and digit together."""
        return str(len(self.dots) + self.digit)

    @property
    def working(self) -> str:
        """The right completion."""
        return f"{len(self.dots)}+{self.digit}#{self.answer}"

    def draw(self) -> Image.Image:
        """Black on white, `SIDE` pixels wide and high."""
        picture = Image.new("RGB", (SIDE, SIDE), "white")
        pen = ImageDraw.Draw(picture)
        for x, y in self.dots:
            pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill="black")
        left, top = self.corner
        for name, ends in STROKES.items():
            if name not in WITHOUT[self.digit]:
                pen.line([(left + STROKE * x, top + STROKE * y) for x, y in ends], fill="black", width=2)
        return picture


def draw_figure(split: Split, rng: random.Random) -> Figure:
    """Draws one figure of a split; the same generator state gives the same figure."""
    while True:
        cells = rng.sample([(x, y) for x in range(COLUMNS) for y in range(ROWS)], rng.randint(1, MOST_DOTS))
        dots = tuple(
            (CELL * x + CELL // 2 + rng.randint(-1, 1), CELL * y + CELL // 2 + rng.randint(-1, 1)) for x, y in cells
        )
        corner = (DIGIT_LEFT + rng.randint(-1, 1), DIGIT_TOP + rng.randint(-3, 3))
        figure = Figure(tuple(sorted(dots)), rng.randint(0, 9), corner)
        if split_of(repr(figure)) == split:
            return figure


def vision_dataset(task: str, split: str, size: int, seed: int) -> datasets.Dataset:
    """Makes a data set of distinct figures.

    Args:
      task: a name in `VISION_TASKS`.
      split: `train`, `validation` or `eval`; no figure is in two of them, whatever the seeds.
      size: number of rows, at least 1.
      seed: which rows, and in which order.

    Returns:
      Columns `prompt` (the same in every row), `image`, `answer` and `reference` (the right working in full).

    Raises:
      ConfigError: the task or split does not exist.
      DataError: `size` is below 1.
    """
    if task not in VISION_TASKS:
        raise ConfigError(f"no tiny vision task is called {task!r}; there is {', '.join(VISION_TASKS)}")
    if split not in ("train", "validation", "eval"):
        raise ConfigError(f"tiny task {task!r} has no split {split!r}; there are train, validation and eval")
    if size < 1:
        raise DataError(f"tiny task {task!r}: size must be at least 1; got {size}")
    rng = random.Random(f"{task}/{split}/{seed}")
    figures: dict[Figure, None] = {}
    while len(figures) < size:
        figures.setdefault(draw_figure(cast("Split", split), rng))
    rows = {
        "prompt": [PROMPT] * size,
        "image": [figure.draw() for figure in figures],
        "answer": [figure.answer for figure in figures],
        "reference": [figure.working for figure in figures],
    }
    features = datasets.Features({name: datasets.Value("string") for name in rows} | {"image": datasets.Image()})
    return datasets.Dataset.from_dict(rows, features=features)
