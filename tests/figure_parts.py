"""What a figure shows, read off its Axes, and stages to draw."""

import gradflow

LABELS = ("the", "$x$", "_", " ")
"""Labels that are hard to show."""

STAGES = (
    gradflow.Stage("condensation", 0.0, 30.0, 0, {}),
    gradflow.Stage("focus", 30.0, 80.0, 1, {}),
    gradflow.Stage("dilution", 80.0, 150.0, 1, {}),
)


def drawn(ax):
    """Lay the figure out, as saving it would."""
    ax.figure.draw_without_rendering()
    return ax


def levels(ax):
    """The heights of the horizontal lines across the Axes, and their labels."""
    across = [line for line in ax.lines if list(line.get_xdata()) == [0, 1]]
    return sorted(line.get_ydata()[0] for line in across), [
        text.get_text() for text in ax.texts
    ]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def bands(ax):
    """The extent of each band, left and right."""
    return [(p.get_x(), p.get_x() + p.get_width()) for p in ax.patches]


def band_names(ax):
    """Each name and the time it stands at."""
    (above,) = ax.child_axes
    texts = [label.get_text() for label in above.get_xticklabels()]
    return dict(zip(texts, above.get_xticks(), strict=True))
