"""Charges: what tenants are charged for the service they get, here and in the other routers."""

from router.dispatch import Dispatcher
from router.fairness import service
from router.replica_generation import ReplicaGeneration
from router.service_tally import ServiceTally


class Charges:
    """Charges a prompt when it is sent, once; gives back what of it was not computed; and output tokens."""

    def __init__(self, dispatcher: Dispatcher, tally: ServiceTally) -> None:
        self._dispatcher = dispatcher
        self._tally = tally

    def prompt_sent(self, generation: ReplicaGeneration) -> None:
        """The request goes to a replica. A loss later on is not the tenant's doing."""
        if not generation.has_begun:
            generation.num_refundable = len(generation.request.prompt_ids)
            self._charge(generation, generation.num_refundable)

    def prompt_cached(self, generation: ReplicaGeneration, num_tokens: int) -> None:
        """So many of its prompt's tokens were not computed. The rest is owed for good: its other outputs
        find what the first one computed."""
        self._charge(generation, -min(num_tokens, generation.num_refundable))
        generation.num_refundable = 0

    def unbegun(self, generation: ReplicaGeneration) -> None:
        """The attempt ends. If nothing of the request has come, nothing was computed for it."""
        if not generation.has_begun:
            self.prompt_cached(generation, generation.num_refundable)

    def generated(self, generation: ReplicaGeneration, num_tokens: int) -> None:
        self._charge(generation, 0, num_tokens)

    def _charge(self, generation: ReplicaGeneration, num_input: int, num_output: int = 0) -> None:
        client, tier = generation.client, generation.request.tier
        amount = service(num_input, num_output)
        self._dispatcher.charge(tier, client.tenant, amount, client.weight)
        self._tally.add(tier, client.tenant, amount / client.weight)
