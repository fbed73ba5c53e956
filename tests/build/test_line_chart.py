import xml.etree.ElementTree as ElementTree

import pytest

from surefoot.build.line_chart import Chart, ChartSeries, to_svg, to_text


def chart(*values, **settings):
    line = ChartSeries("loss <1>", range(len(values)), values)
    return Chart("a & b", "step", "loss", (line,), **settings)


def test_a_chart_draws_gaps_for_values_it_cannot_place():
    chart = Chart("t", "x", "y", (ChartSeries("a<b", [1, 2, 3, 4], [1.0, float("nan"), 0.0, 10.0]),), log_y=True)
    drawn = to_svg(chart)
    assert drawn.count("<polyline") == 2
    assert "a&lt;b" in drawn
    assert to_text(chart).count("•") == 2
    with pytest.raises(ValueError, match="Nothing to draw"):
        to_svg(Chart("t", "x", "y", (ChartSeries("s", [1], [float("nan")]),)))


def test_the_svg_is_well_formed_whatever_the_texts_say():
    drawn = to_svg(chart(3.0, 2.0, 1.0, marks=((1.0, "<here>"),)))
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text and element.text.strip()]
    assert {"a & b", "loss <1>", "<here>"} <= set(texts)


def test_the_text_form_has_the_ends_of_both_axes_and_the_points_in_order():
    lines = to_text(chart(1.0, 100.0, log_y=True), width=20, height=5).splitlines()
    assert lines[0].strip() == "a & b"
    assert lines[1].startswith("      100 ┤")
    assert lines[1].endswith("•")
    assert lines[5].startswith("        1 ┤•")
    assert lines[-1].split() == ["0", "step", "1"]


def test_values_that_cannot_be_drawn_at_all_are_refused():
    with pytest.raises(ValueError, match="Nothing to draw"):
        to_text(chart(float("nan"), -1.0, log_y=True))
