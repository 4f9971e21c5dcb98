"""What a quantized graph must reach to be published: measures, limits, and the refusal."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import QuantizeError


@dataclass(frozen=True, slots=True)
class Quality:
    """A quantized graph against the unquantized one, over `num_tokens` predictions.

    `perplexity` is exp of the mean negative log-likelihood of the text's tokens; `mean_kl` the mean
    of KL(unquantized || quantized) in nats (Kullback and Leibler, 1951); `top1_agreement` the share
    of positions at which both find the same token likeliest.
    """

    num_tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    top1_agreement: float

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.reference_perplexity


@dataclass(frozen=True, slots=True)
class Floor:
    """What a quantized graph must reach."""

    max_mean_kl: float
    min_top1_agreement: float
    max_perplexity_ratio: float

    def moved(
        self, max_mean_kl: float | None, min_top1: float | None, max_ratio: float | None
    ) -> Floor:
        """With the limits that are given in place of its own."""
        return Floor(
            self.max_mean_kl if max_mean_kl is None else max_mean_kl,
            self.min_top1_agreement if min_top1 is None else min_top1,
            self.max_perplexity_ratio if max_ratio is None else max_ratio,
        )

    def shortfalls(self, quality: Quality) -> list[str]:
        """Each measure that misses the floor, with both numbers; empty if all reach it."""
        checks = [
            ("mean KL", quality.mean_kl, "at most", self.max_mean_kl),
            ("top-1 agreement", quality.top1_agreement, "at least", self.min_top1_agreement),
            ("perplexity ratio", quality.perplexity_ratio, "at most", self.max_perplexity_ratio),
        ]
        return [
            f"{name} {value:.4f}, {side} {limit} is wanted"
            for name, value, side, limit in checks
            # Written so that NaN falls short, too.
            if not (value <= limit if side == "at most" else value >= limit)
        ]


INT8_FLOOR = Floor(max_mean_kl=0.05, min_top1_agreement=0.93, max_perplexity_ratio=1.03)
# 4 bits cost a small model more than that whatever is done: enough to tell a sound graph from a
# broken one, and to be told apart from int8.
INT4_FLOOR = Floor(max_mean_kl=0.25, min_top1_agreement=0.7, max_perplexity_ratio=1.2)


class QualityTooLow(QuantizeError):
    """The quantized model differs too much; the message gives each measure and its floor."""
