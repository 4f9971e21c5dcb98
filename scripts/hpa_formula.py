"""What a HorizontalPodAutoscaler (autoscaling/v2) decides, by its controller's formula.

Read from the manifest itself. As in the controller's `replica_calculator.go` and
`horizontal.go`: the ratio to the target with its tolerance, pods without a value, stabilization
windows, then the policies' pace. Knows nothing of servers or of load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_TOLERANCE = 0.1  # the controller's default
_UP = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Pods", "value": 4, "periodSeconds": 15},
        {"type": "Percent", "value": 100, "periodSeconds": 15},
    ],
}
_DOWN = {
    "stabilizationWindowSeconds": 300,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}


def quantity(text: str | float) -> float:
    """`700m` is 0.7."""
    text = str(text)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


@dataclass(frozen=True)
class Rules:
    """`behavior.scaleUp` or `behavior.scaleDown`, with Kubernetes' defaults where it is silent."""

    rules: dict[str, Any]

    @property
    def window(self) -> int:
        return int(self.rules["stabilizationWindowSeconds"])

    @property
    def tolerance(self) -> float:
        return quantity(self.rules.get("tolerance", _TOLERANCE))

    def limit(self, replicas: int, changed: Callable[[int], int], sign: int) -> int:
        """The most (the fewest, with `sign` -1) pods that the policies permit now. `changed` tells
        by how many pods the number has grown in the last so many seconds."""
        if self.rules.get("selectPolicy") == "Disabled":
            return replicas
        limits = []
        for policy in self.rules["policies"]:
            before = replicas - changed(policy["periodSeconds"])
            step = policy["value"]
            if policy["type"] == "Percent":
                step = before * policy["value"] / 100
            limits.append(math.ceil(before + step) if sign > 0 else int(before - step))
        chosen = max if self.rules.get("selectPolicy", "Max") == "Max" else min
        return sign * max(sign * replicas, chosen(sign * limit for limit in limits))


@dataclass
class Autoscaler:
    """One HorizontalPodAutoscaler, from its first look on. `clock` values are seconds."""

    min_replicas: int
    max_replicas: int
    target: float  # that each pod is to have, on average
    up: Rules
    down: Rules
    is_external: bool = False  # KEDA's: one number for all pods
    # seconds, pods: what the metric asked for; and by how many the number was changed
    _asked: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of_keda(cls, manifest: dict[str, Any]) -> Autoscaler:
        """The one that KEDA makes of a ScaledObject with one trigger of type AverageValue."""
        spec = manifest["spec"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        [trigger] = spec["triggers"]
        return cls(
            *(spec["minReplicaCount"], spec["maxReplicaCount"]),
            float(trigger["metadata"]["threshold"]),
            *(Rules(_UP | behavior["scaleUp"]), Rules(_DOWN | behavior["scaleDown"])),
            is_external=True,
        )

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Autoscaler:
        """Of a HorizontalPodAutoscaler with one metric of kind Pods."""
        spec = manifest["spec"]
        [metric] = spec["metrics"]
        behavior = spec.get("behavior", {})
        return cls(
            *(spec.get("minReplicas", 1), spec["maxReplicas"]),
            quantity(metric["pods"]["target"]["averageValue"]),
            *(
                Rules(_UP | behavior.get("scaleUp", {})),
                Rules(_DOWN | behavior.get("scaleDown", {})),
            ),
        )

    def decide(
        self, now: float, replicas: int, values: Sequence[float | None], starting: int
    ) -> int:
        """The number of pods from now on. `values` are those of the pods whose containers run, None
        where there is none; `starting` pods have no container yet."""
        if not self._asked:
            self._asked.append((now, replicas))
        asked = self.wanted(replicas, values, starting)
        stable = self._stabilized(now, replicas, asked)
        self._asked.append((now, asked))
        decided = self._paced(now, replicas, stable)
        if decided != replicas:
            self._changes.append((now, decided - replicas))
        return decided

    def wanted(self, replicas: int, values: Sequence[float | None], starting: int) -> int:
        """By the metric alone; `replicas` where that says nothing, or too little."""
        known = [value for value in values if value is not None]
        if not known:
            return replicas
        if self.is_external:
            is_near = self._is_near(sum(known) / replicas / self.target)
            return replicas if is_near else math.ceil(sum(known) / self.target)
        num_missing = len(values) - len(known)
        ratio = sum(known) / len(known) / self.target
        num_starting = starting if ratio > 1 else 0
        if not num_starting and not num_missing:
            return replicas if self._is_near(ratio) else math.ceil(ratio * len(known))
        # Without a value: idle where pods are to be added, just right where they are to go.
        filled = num_missing * self.target if ratio < 1 else 0.0
        num = len(known) + num_missing + num_starting
        careful = (sum(known) + filled) / num / self.target
        if self._is_near(careful) or (ratio < 1) != (careful < 1):
            return replicas
        asked = math.ceil(careful * num)
        return replicas if (careful < 1) != (asked < replicas) else asked

    def _is_near(self, ratio: float) -> bool:
        return 1 - self.down.tolerance <= ratio <= 1 + self.up.tolerance

    def _stabilized(self, now: float, replicas: int, asked: int) -> int:
        """Up to the least, down to the most that was asked for in the windows."""
        up = min([n for at, n in self._asked if at > now - self.up.window] + [asked])
        down = max([n for at, n in self._asked if at > now - self.down.window] + [asked])
        return min(max(replicas, up), down)

    def _paced(self, now: float, replicas: int, stable: int) -> int:
        def changed(seconds: int) -> int:
            return sum(change for at, change in self._changes if at > now - seconds)

        if stable > replicas:
            most = min(self.max_replicas, self.up.limit(replicas, changed, 1))
            return min(stable, most)
        if stable < replicas:
            fewest = max(self.min_replicas, self.down.limit(replicas, changed, -1))
            return max(stable, fewest)
        return min(max(replicas, self.min_replicas), self.max_replicas)
