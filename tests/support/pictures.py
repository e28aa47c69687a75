"""Checks of the text of a picture: inside it, overlapping neither other text nor dots, and naming no folder."""

from __future__ import annotations

import itertools
import re

from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

FOLDER = re.compile(r"(^|[\s\"'=])[/~]\w")  # a path that begins at the root or in the home folder


def words(figure: Figure) -> list[Text]:
    """Return titles, labels, names, legends and footers; not the numbers along an axis, which matplotlib places."""
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    numbers = {text for axis in axes for text in axis.findobj(Text) if text is not axis.label}
    found = [text for text in figure.findobj(Text) if isinstance(text, Text) and text not in numbers]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def misfits(figure: Figure) -> list[str]:
    """Return the faults of a picture's text, one line each."""
    figure.draw_without_rendering()
    boxes = {text: text.get_window_extent() for text in words(figure)}
    frame = figure.bbox
    wrong = [
        f"{text.get_text()!r} leaves the picture"
        for text, box in boxes.items()
        if not (frame.contains(*box.min) and frame.contains(*box.max))
    ]
    wrong += [
        f"{one.get_text()!r} covers {other.get_text()!r}"
        for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2)
        if box.overlaps(beside)
    ]
    dots = [dots for panel in figure.axes for dots in panel.collections if isinstance(dots, PathCollection)]
    centres = [dots.get_offset_transform().transform(place) for dots in dots for place in dots.get_offsets()]
    wrong += [
        f"{text.get_text()!r} covers a dot" for text, box in boxes.items() if any(box.contains(*at) for at in centres)
    ]
    wrong += [f"{text.get_text()!r} names a folder" for text in boxes if FOLDER.search(text.get_text())]
    return wrong
