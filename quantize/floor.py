"""What a quantized graph must reach to be published: measures, limits, and the refusal."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import QuantizeError


@dataclass(frozen=True, slots=True)
class Quality:
    """A quantized graph against the fp32 graph, over `num_tokens` predictions.

    `perplexity` is exp of the mean negative log-likelihood of the text's tokens; `mean_kl` the mean
    of KL(fp32 || quantized) in nats (Kullback and Leibler, 1951); `top1_agreement` the share of
    positions at which both find the same token likeliest.
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
    """What an int8 graph must reach; measured on the default model, with room."""

    max_mean_kl: float = 0.05
    min_top1_agreement: float = 0.93
    max_perplexity_ratio: float = 1.03

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


class QualityTooLow(QuantizeError):
    """The quantized model differs too much; the message gives each measure and its floor."""
