"""vLLM's names beside ours (`METRICS_ALIASES=vllm`), for dashboards and scalers that know those.

They are made of what is collected anyway, when it is read: there is no second counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from .metric_families import PREFIX

VLLM_PREFIX = "vllm:"
# vLLM's names -> ours; counters without `_total`. Those of before its engine V1 are last.
VLLM = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prefix_cache_query_tokens",
    "prefix_cache_hits": "prefix_cache_hit_tokens",
    "num_preemptions": "num_preemptions",
    "corrupted_requests": "non_finite_logits",
    "request_success": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "gpu_cache_usage_perc": "kv_cache_usage_ratio",
    "gpu_prefix_cache_queries": "prefix_cache_query_tokens",
    "gpu_prefix_cache_hits": "prefix_cache_hit_tokens",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
_LABELS = {"finish_reason": "finished_reason"}


class Aliased(Collector):
    """All that `collector` has, and the same again by vLLM's names, as soon as `model_name` tells
    the label that those have."""

    def __init__(self, collector: Collector, model_name: Callable[[], str | None]) -> None:
        self._collector = collector
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._collector.collect()}
        yield from families.values()
        if (model_name := self._model_name()) is None:
            return
        for alias, name in VLLM.items():
            yield _renamed(families[PREFIX + name], VLLM_PREFIX + alias, model_name)


def _renamed(family: Metric, name: str, model_name: str) -> Metric:
    alias = Metric(name, family.documentation, family.type)
    shared = {"model_name": model_name, "engine": "0"}
    for sample in family.samples:
        labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        alias.samples.append(Sample(name + suffix, shared | labels, sample.value))
    return alias
