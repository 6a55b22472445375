"""SlaScaler: the production autoscaling policy in a simulation, fed with what production replicas report."""

from collections import Counter

from cluster.autoscaling import Observation, State, decide
from cluster.autoscaling_policy import Policy
from cluster.autoscaling_stats import read
from cluster.simulation.scaling import View


class SlaScaler:
    """What cluster/serve_policy.py does with Serve's numbers, with those of virtual replicas."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._state = State()
        self.reasons: Counter[str] = Counter()
        """Decisions by the reasons that had a part in them."""

    def decide(self, view: View) -> int:
        stats: dict[str, dict[str, float]] = {}
        fleet = view.fleet
        for name in fleet.running:
            for key, value in fleet.replicas[name].autoscaling_stats(self._policy.cold_start_s).items():
                stats.setdefault(key, {})[name] = value
        reports = read(stats)
        observation = Observation(
            target=fleet.target,
            running=len(fleet.running),
            routers=reports.routers,
            replicas=reports.replicas,
        )
        decision = decide(observation, self._state, self._policy, view.now)
        self._state = decision.state
        self.reasons.update({reason.code.value for reason in decision.reasons})
        return decision.target
