"""What the monitor says of itself: failures, seconds, and how far its scores are from the trainer's own."""

from __future__ import annotations

from collapsediag.metrics.registry import MetricInfo, register

register(
    MetricInfo(
        name="failures",
        title="Diagnostic failures so far",
        unit="count",
        bad="up",
        bounds=(0, None),
        description="How many steps' diagnostics raised since the run began; training went on.",
        source="collapsediag",
        family="bookkeeping",
    ),
    MetricInfo(
        name="collapse/own_logp_difference",
        title="Distance from the trainer's own log-probabilities",
        unit="nats/token",
        bad="up",
        bounds=(0, None),
        description=(
            "Largest difference per token between a trace's score under its own context and the log-probabilities "
            "that the trainer or its inference engine gave for the same tokens. About 1e-6 in float32; more is low "
            "precision, another engine, or dropout that was on when the trainer computed them."
        ),
        source="collapsediag",
        family="bookkeeping",
        needs="per-token log-probabilities in the batch",
    ),
    MetricInfo(
        name="collapse/scoring_time_share",
        title="Scoring's share of the wall time so far",
        unit="fraction",
        bad="none",
        bounds=(0, 1),
        description=(
            "Seconds spent on scoring since the run began, over all seconds since then in which it ran. Starts near 1 "
            "at the first step, which is always scored, and is paid back before the next."
        ),
        source="collapsediag",
        family="bookkeeping",
        needs="Monitor(time_budget=...)",
    ),
    *(
        MetricInfo(
            name=f"timing_s/collapse_{part}",
            title=f"Seconds spent on {title}",
            unit="seconds",
            bad="up",
            bounds=(0, None),
            description=f"Wall time of {title} in this step.",
            source="collapsediag",
            family="bookkeeping",
        )
        for part, title in (("score", "scoring"), ("rollout_metrics", "rollout metrics"), ("step", "all diagnostics"))
    ),
)
