"""The extractor of metric names itself."""

from __future__ import annotations

import pytest

from .metric_names import metrics_of, our_names_in, selectors_of, unknown


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (job, le) (rate(a_bucket{reason=~"b|c"}[5m]))', {"a_bucket"}),
        ("a > 0.5 and on (instance) b == 1 unless c offset 5m", {"a", "b", "c"}),
        ("histogram_quantile(0.95, rate(instance:a:p95[$__rate_interval]))", {"instance:a:p95"}),
        ("a / ignoring(x) group_left(y) (b + 1e3) or vector(0)", {"a", "b"}),
        ('label_replace(up, "x", "$1", "y", "(.*)")', {"up"}),
        ("a @ 1609746000 - a{b='c d'} > bool 2", {"a"}),
    ],
)
def test_metrics_of_an_expression_are_its_metrics_only(expression: str, names: set[str]) -> None:
    assert metrics_of(expression) == names


def test_matchers_are_found_with_their_metric() -> None:
    found = list(selectors_of('rate(a{b="c", d=~"e|f"}[5m]) / g'))
    assert found == [("a", "b", "=", "c"), ("a", "d", "=~", "e|f")]


def test_names_in_a_text_are_found_in_comments_too_but_not_recorded_ones() -> None:
    text = "# phi_serve_a\nexpr: instance:phi_serve_b:p95 > phi_serve_c_total{x='phi-serve'}"
    assert our_names_in(text) == {"phi_serve_a", "phi_serve_c_total"}


def test_name_that_no_scrape_has_is_unknown() -> None:
    scrape = '# TYPE phi_serve_a counter\nphi_serve_a_total{x="y"} 1\n'
    names = {"phi_serve_a_total", "phi_serve_b", "up", "phi_serve_gpu_utilization_ratio", "i:b:c"}
    assert unknown(names, scrape, {"i:b:c"}) == {"phi_serve_b"}
