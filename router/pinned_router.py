"""PinnedRouter: sends a handle call to the replica that the call names."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # ray ships no types
    """Route by the keyword argument `replica`; a call without one may go anywhere.

    Serve must always be given a candidate: left without one it retries for ever, even after the caller
    gave up. So a call for an unknown replica goes to any other, and each replica refuses calls that do
    not carry its own name.

    Pickled by value and run in the router's process, perhaps on Serve's own loop: it shares state with
    the rest of the process only through `router.replica_set`, imported inside the method.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take Serve's new list, keep drained replicas that are held, tell the process. On each change."""
        from router.replica_set import replica_set

        shared = replica_set()
        listed = {replica.replica_id.unique_id: replica for replica in replicas}
        before = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
        drained = [before[name] for name in shared.held if name in before and name not in listed]
        super().update_replicas([*replicas, *drained])
        shared.when_released(lambda: self.update_replicas(replicas))
        shared.publish(frozenset(listed))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the named replica alone, or everyone."""
        name = pending_request.kwargs.get("replica") if pending_request is not None else None
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]
