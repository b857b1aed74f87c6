"""Where a number becomes a finding: every threshold, in one place, as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from collapsediag.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class FindingSettings:
    """Thresholds and persistence of all checks. Ratios are to the run's own baseline.

    n_baseline: the baseline is the mean of this many first measured steps.
    min_baseline: while the run is young the baseline is shorter, but never shorter than this. The last `persistence`
        steps are kept out of it, so that a collapse in a short run is not compared with itself.
    persistence: measured steps in a row before a state is named, and before it is left.
    release: hysteresis. A state entered below a share of the baseline is left `release - 1` of the way from there back
        to the baseline: 0.5 above 0.6, 0.8 above 0.84. One entered above a level is left below level / release.
    alpha: a permutation p-value above this is "at chance".
    dependence_low: MI and retrieval above chance, both below this share of the baseline, are "MI low".
    environment_low: ratio at which one environment has collapsed, if all together have not.
    conditional_entropy_low: H(Z|X) below this share of the baseline is "low".
    token_entropy_falling, token_entropy_low, token_entropy_critical: ratios for info, warning and critical.
    calls_low, calls_critical: ratios of tool calls per rollout; min_calls: a baseline below it is no tool use.
    format_low, format_critical: ratios of valid format; min_format: a baseline below it was never followed.
    length_low, length_critical: ratios of the mean length.
    spread_low, spread_critical: ratios of the reward's std within prompts.
    all_equal_high, all_equal_critical: shares of prompts whose rewards are all equal.
    all_equal_by_chance: a share by chance from which the group size, not the policy, is the finding.
    narrowing_gain, narrowing_loss: pass@1 above its baseline by this and pass@k below its own by that.
    saturation_high: share of the MI bound from which more prompts are needed to see anything.
    saturated_high: share of prompts solved by every rollout from which a lack of signal is success, not collapse.
    solved_high: share of solved rollouts from which it is so as well: in large groups one failure in a group is likely
        long after the task is learnt.
    identical_high: share of completions equal to another one of their group.
    identical_min_length: mean length below which equal completions are expected.
    truncated_high: share of turns cut off.
    ungrouped_high: share of prompts with a single rollout, or with several contexts, from which groups are suspect.

    >>> FindingSettings(persistence=2).persistence
    2
    """

    n_baseline: int = 5
    min_baseline: int = 2
    persistence: int = 3
    release: float = 1.2
    alpha: float = 0.05
    dependence_low: float = 0.8
    environment_low: float = 0.5
    conditional_entropy_low: float = 0.7
    token_entropy_falling: float = 0.7
    token_entropy_low: float = 0.5
    token_entropy_critical: float = 0.2
    calls_low: float = 0.5
    calls_critical: float = 0.2
    min_calls: float = 0.1
    format_low: float = 0.8
    format_critical: float = 0.5
    min_format: float = 0.1
    length_low: float = 0.5
    length_critical: float = 0.2
    spread_low: float = 0.5
    spread_critical: float = 0.2
    all_equal_high: float = 0.8
    all_equal_critical: float = 0.95
    all_equal_by_chance: float = 0.5
    narrowing_gain: float = 0.02
    narrowing_loss: float = 0.05
    saturation_high: float = 0.95
    saturated_high: float = 0.5
    solved_high: float = 0.85
    identical_high: float = 0.5
    identical_min_length: float = 16.0
    truncated_high: float = 0.25
    ungrouped_high: float = 0.5

    def __post_init__(self) -> None:
        for name in ("n_baseline", "min_baseline", "persistence"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name}={value!r}: it is a number of measured steps, 1 or more.")
        if self.min_baseline > self.n_baseline:
            raise SettingsError(f"min_baseline={self.min_baseline} is more than n_baseline={self.n_baseline}.")
        if not self.release >= 1.0:
            raise SettingsError(f"release={self.release!r}: below 1 a state would be left while it still holds.")
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if not value >= 0:  # NaN too
                raise SettingsError(f"{setting.name}={value!r}: thresholds are numbers >= 0.")

    def left_above(self, low: float) -> float:
        """The share of the baseline above which a state is left that was entered below `low`.

        >>> FindingSettings().left_above(0.5), FindingSettings(release=1.0).left_above(0.5)
        (0.6, 0.5)
        """
        return low + (self.release - 1) * (1 - low)

    @property
    def n_needed(self) -> int:
        """Measured steps from which a check against the baseline can speak."""
        return self.min_baseline + self.persistence
